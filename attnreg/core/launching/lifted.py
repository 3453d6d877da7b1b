"""Functions of single scores as text and tensors: what a compiled kernel is made from.

A kernel can't call `score_mod`. So the function is traced: its operations become the text of a function of
torch's ops, and the tensors that it has captured become further arguments. Equal texts are the same kernel,
whichever function they come from. So nothing keeps a function alive, and one that is made anew for each call
compiles nothing. Tracing takes tens of milliseconds. A trace is used again as long as the function's code and
all that it has captured are the same, but for tensors, which are arguments.
"""

from __future__ import annotations

import ast
import functools
import logging
import math
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from attnreg.core.launching.elementwise import ReadAtTensors
from attnreg.errors import InvalidInputError, UnsupportedInputError, short_repr

log = logging.getLogger("attnreg")

# How many traces are kept.
MOST_TRACES = 256
# From so many traces of one function on a log line says why it is traced anew.
MANY_TRACES = 8
NEW_NUMBERS = "its numbers change: capture tensors in their place"
NEW_SIZES = "the sizes of its tensors change: change their shapes before the call, and index them in it"

# Modules whose contents don't change.
_FIXED = ("torch", "math", "builtins")

# What the text of a function consists of, besides calls and the function itself.
_OF_TEXTS = (
    *(ast.Module, ast.arguments, ast.arg, ast.Assign, ast.Return, ast.Name, ast.Load, ast.Store, ast.keyword),
    *(ast.Attribute, ast.Constant, ast.List, ast.Tuple, ast.Subscript, ast.UnaryOp, ast.USub),
)

# What a tensor is asked whose answer may differ for other values.
_ON_HOST = frozenset(
    getattr(Tensor, name)
    for name in ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__contains__")
)


class Lifted(NamedTuple):
    """A function of scores without what it has captured.

    Attributes:
        text: the source of a function `lifted` of the same arguments, followed by the tensors.
        tensors: what it has captured, of any shape and dtype.
    """

    text: str
    tensors: tuple[Tensor, ...]

    def __call__(self, *arguments: Tensor) -> Tensor:
        """Return what the function returns for a score or its places, tensors of shape ()."""
        return function_of(self.text)(*arguments, *self.tensors)


class _Trace(NamedTuple):
    """A trace that later calls may use.

    Attributes:
        text: as in `Lifted`; empty if the function can't be traced.
        reason: why not.
        numbers: which of the captured tensors are arguments.
        sizes: the sizes of all captured tensors; None if the text is the same for all sizes.
    """

    text: str
    reason: str
    numbers: tuple[int, ...]
    sizes: tuple[torch.Size, ...] | None


class _OpaqueError(Exception):
    """A function has captured a value that can't be compared from call to call."""


_traces: dict[object, _Trace] = {}
_counts: dict[object, int] = {}


def lift(name: str, function: Callable[..., Any], device: torch.device) -> Lifted:
    """Return a function of scores on a device as text and tensors; `name` is its argument of `varlen_attn`.

    Raises:
        UnsupportedInputError: it can't be traced, as it reads a tensor on the host, for example in an `if`.
    """
    if isinstance(function, Lifted):
        return function
    captured: list[Tensor] = []
    try:
        state: object = (name, device, _state_of(function, captured, []))
    except _OpaqueError as opaque:
        _count(function, name, f"it has captured {opaque}: capture only tensors and numbers")
        trace, tensors = _traced(name, function, device, None)
        return Lifted(_text_of(trace, name), tensors)
    sizes = tuple(x.shape for x in captured)
    known = _traces.get(state)
    if known is not None and known.sizes in (None, sizes):
        trace = known
    else:
        _count(function, name, NEW_NUMBERS if known is None else NEW_SIZES)
        trace, tensors = _traced(name, function, device, captured)
        if len(trace.numbers) < len(tensors):  # it has made a tensor itself
            return Lifted(_text_of(trace, name), tensors)
        while len(_traces) >= MOST_TRACES:
            _traces.pop(next(iter(_traces)), None)
        _traces[state] = trace
    return Lifted(_text_of(trace, name), tuple(captured[number] for number in trace.numbers))


@functools.lru_cache(MOST_TRACES)
def function_of(text: str) -> Callable[..., Tensor]:
    """Return the function of a text of `lift`'s.

    Raises:
        InvalidInputError: the text does more than call torch's ops. An exported program may have any text.
    """
    tree = ast.parse(text)
    if not all(map(_is_of_ops, ast.walk(tree))):
        raise InvalidInputError(f"score_mod: got {short_repr(text)}, expected the text of a function of ops")
    names: dict[str, Any] = {"torch": torch, "device": torch.device, "inf": math.inf, "nan": math.nan}
    names["__builtins__"] = {}
    exec(compile(tree, "<lifted>", "exec"), names)  # noqa: S102 - the text was checked
    function: Callable[..., Tensor] = names["lifted"]
    return function


def _is_of_ops(node: ast.AST) -> bool:
    """Whether a part of a text may be in a function that calls torch's ops alone."""
    if isinstance(node, ast.Call):
        called = ast.unparse(node.func)
        return called == "device" or called.startswith(("torch.ops.aten.", "torch.ops.prims."))
    if isinstance(node, ast.FunctionDef):
        return node.name == "lifted" and not node.decorator_list
    return isinstance(node, _OF_TEXTS)


def _text_of(trace: _Trace, name: str) -> str:
    if trace.reason:
        raise UnsupportedInputError(f"{name} can't be traced for a kernel: {trace.reason}")
    return trace.text


def _count(function: Callable[..., Any], name: str, hint: str) -> None:
    """Count a trace; after a few of one function's say once why there are so many."""
    code = getattr(function, "__code__", type(function))
    while len(_counts) >= MOST_TRACES:
        _counts.pop(next(iter(_counts)), None)
    _counts[code] = _counts.get(code, 0) + 1
    if _counts[code] == MANY_TRACES:
        place = f"{code.co_filename}:{code.co_firstlineno}" if isinstance(code, types.CodeType) else code
        log.warning("%s of %s was traced %d times, as %s", name, place, MANY_TRACES, hint)


def _state_of(value: Any, captured: list[Tensor], functions: list[Any]) -> object:
    """Return what tells a captured value from others, without keeping it alive.

    Tensors are appended to `captured`, and told from each other alone: their values are arguments. Functions
    are appended to `functions`: one may call itself, or a method whose name is its own.
    """
    if isinstance(value, Tensor):
        first = next((number for number, x in enumerate(captured) if x is value), len(captured))
        captured.append(value)
        return first, value.dtype, value.device, value.dim()
    if value is None or isinstance(value, (bool, int, float, complex, str, torch.dtype, torch.device)):
        return type(value), repr(value)
    if isinstance(value, tuple):
        return tuple(_state_of(x, captured, functions) for x in value)
    if isinstance(value, (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)):
        module = value.__name__ if isinstance(value, types.ModuleType) else value.__module__ or ""
        if module.partition(".")[0] in _FIXED:
            return module, getattr(value, "__qualname__", "")
    if isinstance(value, types.FunctionType):
        known = next((number for number, x in enumerate(functions) if x is value), None)
        if known is not None:
            return "function", known
        functions.append(value)
        return value.__code__, *(_state_of(x, captured, functions) for x in _captured_by(value))
    raise _OpaqueError(f"an object of type {type(value).__name__}")


def _captured_by(function: types.FunctionType) -> Iterator[Any]:
    """Yield the values that a function has besides its arguments."""
    try:
        yield from (cell.cell_contents for cell in function.__closure__ or ())
    except ValueError:
        raise _OpaqueError("a variable without a value") from None
    yield from function.__defaults__ or ()
    for values in (function.__kwdefaults__ or {}, vars(function)):
        yield from (part for pair in sorted(values.items()) for part in pair)
    names = sorted(set(_names_in(function.__code__)) & function.__globals__.keys())
    yield from (function.__globals__[name] for name in names)


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


class _Watch(ReadAtTensors):
    """Refuse values that are read on the host, and note whether the text may depend on sizes.

    A trace has the numbers that operations such as `flatten` and `chunk` make of sizes. An index makes none.
    """

    uses_sizes = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _ON_HOST:
            raise UnsupportedInputError(f"it reads a tensor on the host, by {func.__name__}")
        leaves = tree_leaves((args, kwargs))
        if func is not Tensor.__getitem__ and any(isinstance(x, Tensor) and x.dim() for x in leaves):
            self.uses_sizes = True
        return super().__torch_function__(func, types, args, kwargs)


def _traced(
    name: str, function: Callable[..., Any], device: torch.device, captured: list[Tensor] | None
) -> tuple[_Trace, tuple[Tensor, ...]]:
    """Trace a function; return the trace, and the tensors that it reads."""
    watch = _Watch()
    text, reason, tensors = traced(name, function, device, torch.float32, watch)
    places = [next((n for n, x in enumerate(captured or ()) if x is tensor), -1) for tensor in tensors]
    numbers = tuple(number for number in places if number >= 0)
    sizes = tuple(x.shape for x in captured or ()) if watch.uses_sizes else None
    return _Trace(text, reason, numbers, sizes), tensors


def traced(
    name: str, function: Callable[..., Any], device: torch.device, dtype: torch.dtype, watch: ReadAtTensors
) -> tuple[str, str, tuple[Tensor, ...]]:
    """Return the text of a function, or why it can't be traced, and the tensors that it reads.

    These are of any shape and dtype. `dtype` is the dtype of scores, `watch` a mode that it is traced in.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    try:
        with torch.no_grad(), watch, FakeTensorMode(allow_non_fake_inputs=True):
            score = [torch.empty((), dtype=dtype, device=device)] if name == "score_mod" else []
            places = [torch.empty((), dtype=torch.int32, device=device) for _ in range(4)]
            module: Any = make_fx(lambda *arguments: function(*arguments))(*score, *places)
    except Exception as error:  # noqa: BLE001 - whatever the program's function raises
        lines = str(error).strip().splitlines()
        return "", lines[0] if lines else type(error).__name__, ()
    graph, tensors = module.graph, []
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    constants: dict[str, Any] = {}
    for node in [node for node in graph.nodes if node.op == "get_attr"]:
        if node.target not in constants:
            with graph.inserting_after(last):
                last = constants[node.target] = graph.placeholder(f"captured_{len(constants)}")
            tensors.append(getattr(module, node.target))
        node.replace_all_uses_with(constants[node.target])
        graph.erase_node(node)
    head, *body = graph.python_code("self").src.strip().splitlines()
    # In one line: Inductor's C++ wrapper writes it between quotes as it is.
    statements = "; ".join(line.strip().rstrip(";") for line in body if line.strip())
    return f"{head.replace('def forward(self, ', 'def lifted(', 1)} {statements}", "", tuple(tensors)
