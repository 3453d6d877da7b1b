"""Promises about docstrings: functions that take tensors say of which shape."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# A shape in parentheses, with a comma, such as `(T_q, H, D)`, `(B + 1,)` or `(*tokens.shape, heads,
# head_dim)`. An upper-case dim or a "dim" tells it from other parentheses, such as `(query, key)`.
DIM = r"(?:\.\.\.|\*?[A-Za-z_][\w.]*(?: dim)?|\d+)(?: ?[-+*/x] ?(?:[A-Za-z_][\w.]*|\d+))?"
PARENTHESES = re.compile(rf"\((?:{DIM})(?:,|, ?{DIM},?)+\)")
UPPER_CASE = re.compile(r"\b[A-Z](?:_\w+)?\b|dim\b|\.\.\.|shape")
WORD = re.compile(r"\bshapes?\b|\bscalars?\b", re.IGNORECASE)

# Functions whose docstring lacks a shape: only ever fewer, until there are none.
PENDING = {
    "core/adaptation/padded_dims.py with_zeros",
    "core/adaptation/sinks.py grad_of_sinks",
    "core/aten/bypassed.py selected",
    "core/aten/nested.py why_torchs",
    "core/aten/routing.py with_strides_of",
    "backends/cpu/bfloat16.py takes",
    "backends/cpu/compiled.py CompiledKernel.specialize",
    "backends/cpu/flash.py Flash.backward",
    "backends/cpu/flash.py Flash.forward",
    "backends/cpu/flash.py forward_dtype",
    "backends/cpu/flash.py lse_dtype",
    "backends/cpu/padding.py RowPlaces.write",
    "backends/cpu/paged.py check_pages",
    "backends/cpu/problem.py count_of",
    "backends/cpu/problem.py kind_of",
    "backends/cudnn/adapter.py specialize",
    "backends/cudnn/execution_plans.py ExecutionPlans.execute",
    "backends/cudnn/lengths.py lengths_of",
    "backends/cudnn/problem.py is_empty",
    "backends/cudnn/problem.py kind_of",
    "backends/cudnn/problem.py problem_of",
    "backends/fa2/native.py TorchKernels.specialize",
    "backends/fa2/native.py is_empty",
    "backends/fa2/native.py keeps_contract",
    "backends/fa4/compiled_kinds.py batch_of",
    "backends/fa4/compiled_kinds.py repeated_dims",
    "backends/fa4/watching.py compare",
    "backends/math/softmax.py ForwardResults.delta",
    "backends/math/softmax.py Output.add",
    "backends/math/softmax.py Softmax.weights",
    "core/dispatch/call_cache.py kept_for",
    "core/dispatch/calls.py keys_used",
    "core/dispatch/calls.py lengths_fit",
    "core/dispatch/calls.py lengths_of",
    "core/dispatch/calls.py scale_of",
    "core/dispatch/calls.py wants_gradient",
    "core/dispatch/dropout.py generator_of",
    "core/dispatch/dropout.py run_with_dropout",
    "core/dispatch/planning.py spec_of",
    "core/dispatch/scope.py read_token",
    "core/launching/launchers.py PackedCall.cleared",
    "core/launching/memory.py check_all_in_memory",
    "core/launching/offsets.py derived_from",
    "core/launching/offsets.py empty_results",
    "core/launching/offsets.py facts_of",
    "core/launching/offsets.py find_unused",
    "core/launching/regular.py fills",
    "core/launching/regular.py regular_length",
    "core/launching/rows.py facts",
    "core/launching/validation.py check",
    "core/launching/validation.py check_values",
    "core/launching/validation.py every_row_sees_a_key",
    "core/torchlib/layout.py needs_graph_memory",
    "core/torchlib/layout.py stream_of",
    "core/torchlib/layout.py with_strides",
    "core/torchlib/modes.py is_plain",
    "core/varlen/autograd.py attend",
    "core/varlen/autograd.py run_backward",
    "core/varlen/autograd.py run_forward",
    "core/varlen/custom_op.py Transformable.backward",
    "core/varlen/plans.py check_heads",
    "core/varlen/plans.py check_sinks",
    "core/varlen/plans.py run",
    "core/varlen/sinks.py counted",
    "core/varlen/sinks.py may_be_counted",
    "core/varlen/sinks.py with_sinks",
    "core/varlen/spread.py attend",
    "core/varlen/spread.py note_whole_batch",
    "flash_attn/attention.py Options.call",
    "flash_attn/attention.py check_strided",
    "flash_attn/attention.py checked_call",
    "flash_attn/bert_padding.py index_first_axis_residual",
    "flash_attn/kvcache_checks.py check_places",
    "flash_attn/rotary.py check_compiled",
    "integrations/packing.py by_positions",
    "integrations/packing.py read",
    "integrations/shared_mask.py SharedMask.dense_apart",
    "integrations/shared_mask.py SharedMask.packing",
    "masks/cache.py read",
    "masks/rows.py Choice.of",
    "masks/sequences.py sequences",
    "parallel/balance.py balanced",
    "parallel/balance.py spread_documents",
    "parallel/by_heads.py AttentionByHeads.backward",
    "parallel/by_heads.py AttentionByHeads.forward",
    "parallel/by_heads.py Work.send_back",
    "parallel/calls.py check_offsets",
    "parallel/calls.py kind_of",
    "parallel/calls.py problem_of",
    "parallel/front.py context_parallel",
    "parallel/layout.py checked_offsets",
    "parallel/layout.py contiguous",
    "parallel/layout.py zigzag",
    "parallel/parts.py on_device",
    "parallel/parts.py taken",
    "parallel/results.py Sums.merge",
    "parallel/results.py Sums.put",
    "parallel/stepwise.py StepwiseAttention.backward",
    "parallel/stepwise.py StepwiseAttention.forward",
}


def has_shape(text):
    """Whether a text has a shape, or says that any shape will do."""
    shapes = (match[0] for match in PARENTHESES.finditer(text))
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
    assert lacking - PENDING == set(), "give each tensor's shape and dtype in the docstring"
    assert PENDING - lacking == set(), "these have a shape or are gone: take them out of PENDING"
