"""Promises about docstrings: functions that take tensors say of which shape."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# A shape in parentheses, with a comma, such as `(T_q, H, D)`, `(B + 1,)`, `(pages, page size, H, D)` or
# `(*tokens.shape, heads, head_dim)`. An upper-case dim, a "dim" or a sum tells it from other parentheses,
# such as `(query, key)`.
NAME = r"\*?[A-Za-z_][\w.]*(?: [a-z]+){0,3}"
DIM = rf"(?:\.\.\.|{NAME}|\d+(?: or [A-Z])?)(?: ?[-+*/x] ?(?:{NAME}|\d+))?"
PARENTHESES = re.compile(rf"\((?:{DIM})(?:,|, ?{DIM},?)+\)")
UPPER_CASE = re.compile(r"\b[A-Z](?:_\w+)?\b|dim\b|\+ 1\b|\.\.\.|shape")
WORD = re.compile(r"\bshapes?\b|\bscalars?\b", re.IGNORECASE)


def has_shape(text):
    """Whether a text has a shape, or says that any shape will do."""
    shapes = (match[0] for match in PARENTHESES.finditer(" ".join(text.split())))
    return bool(WORD.search(text)) or any(UPPER_CASE.search(shape) for shape in shapes)


def takes_tensor(annotation):
    """Whether an annotation names `Tensor`, other than as an argument of a callable."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return "Tensor" in annotation.value and takes_tensor(ast.parse(annotation.value, mode="eval").body)
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value).endswith(("Callable", "type")):
        return False
    if isinstance(annotation, ast.Name | ast.Attribute):
        return ast.unparse(annotation) in ("Tensor", "torch.Tensor")
    return any(map(takes_tensor, ast.iter_child_nodes(annotation)))


def public_functions(body, prefix=""):
    """Yield each function and method without an underscore in its name or its class's, with its name."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name[0] != "_":
            if isinstance(node, ast.ClassDef):
                yield from public_functions(node.body, f"{prefix}{node.name}.")
            else:
                yield f"{prefix}{node.name}", node


def without_shape(source):
    """Return the public functions of a module that take tensors and name no shape."""
    names = []
    for name, function in public_functions(ast.parse(source).body):
        given = function.args
        every = (*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg)
        annotations = [each.annotation for each in every if each is not None and each.annotation]
        if any(map(takes_tensor, annotations)) and not has_shape(ast.get_docstring(function) or ""):
            names.append(name)
    return names


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Return rows (T_q, H, D).", True),
        ("Return offsets (B + 1,).", True),
        ("Offsets (documents + 1,), integers.", True),
        ("Pages (pages, page size, H, D).", True),
        ("Tables (B, pages of a sequence).", True),
        ("Rows (sequences * key heads,\n    rows, D).", True),
        ("Positions (1 or B, S).", True),
        ("Return the LSE (B, H, S_q), padded.", True),
        ("Tables (positions, rotary dim / 2).", True),
        ("Query and key, each (*tokens.shape, heads, head_dim).", True),
        ("Rotate tensors of any shape.", True),
        ("A scalar, int32.", True),
        ("Return both (query, key).", False),
        ("Return the larger one (LSE).", False),
        ("", False),
    ],
)
def test_a_shape_is_told_from_other_parentheses(text, expected):
    assert has_shape(text) is expected


def test_functions_that_take_tensors_are_found():
    source = """
def flat(x: Tensor): ...
def optional(x: "torch.Tensor | None"): ...
def several(*xs: Tensor): "Shape (B, S)."
def run(call: Callable[[Tensor], Tensor], n: int): ...
def _hidden(x: Tensor): ...
class Public:
    def method(self, xs: list[Tensor]): ...
    def _hidden(self, x: Tensor): ...
class _Hidden:
    def method(self, x: Tensor): ...
"""
    assert without_shape(source) == ["flat", "optional", "Public.method"]


def test_functions_that_take_tensors_give_a_shape():
    modules = (
        path
        for path in sorted((ROOT / "attnreg").rglob("*.py"))
        if not any(part.startswith("_") for part in path.relative_to(ROOT).parts[:-1])
        and (path.stem == "__init__" or not path.stem.startswith("_"))
    )
    lacking = {
        f"{path.relative_to(ROOT / 'attnreg').as_posix()} {name}"
        for path in modules
        for name in without_shape(path.read_text(encoding="utf-8"))
    }
    assert lacking == set(), "give each tensor's shape and dtype in the docstring"
