"""Torch's flex kernels, compiled by Inductor for a kind of call and any lengths.

A program's graph is traced with symbolic lengths, and compiled without Dynamo. So no state of the caller is
guarded, and a backward is a program of its own, which runs on another forward's results as well. Both happen
in a thread of their own, whose modes aren't the caller's.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnreg.backends.flex.graphs import traced
from attnreg.backends.flex.kinds import ProgramKind
from attnreg.backends.flex.tiles import TOO_LARGE, tiles_for
from attnreg.core.torchlib.isolation import raise_if_of_program, run_in_thread
from attnreg.core.torchlib.locks import open_after_fork
from attnreg.errors import BackendUnavailableError

# How many programs a kind may have: for addresses of 32 and of 64 bits, each for queries below and above
# torch's limit of 128. More would mean that a program holds for a single length.
MOST_PROGRAMS = 8

_compile_lock = open_after_fork(threading.RLock())


class CompiledGraph(NamedTuple):
    """A compiled graph.

    Attributes:
        run: computes the results, a sequence of tensors, from the tensors of the graph.
        holds: whether it is right for these lengths; None if it is for all.
    """

    run: Callable[..., Sequence[Tensor]]
    holds: Callable[[Mapping[str, int]], bool] | None


_programs: dict[ProgramKind, list[CompiledGraph]] = {}

# How many kinds with functions of scores are kept: a program may bring new ones for ever.
MOST_WITH_FUNCTIONS = 64


def program_for(kind: ProgramKind, lengths: Mapping[str, int]) -> CompiledGraph:
    """Return the program of a kind that is right for these lengths, compiled where there is none.

    Raises:
        BackendUnavailableError: torch can't compile it.
    """
    for program in _programs.get(kind, ()):
        if program.holds is None or program.holds(lengths):
            return program
    with _compile_lock:
        _drop_oldest_function(kind)
        programs = _programs.setdefault(kind, [])
        for program in programs:  # another thread may have compiled it meanwhile
            if program.holds is None or program.holds(lengths):
                return program
        if len(programs) >= MOST_PROGRAMS:
            raise BackendUnavailableError(f"flex compiled {MOST_PROGRAMS} programs for one kind of call")
        try:
            context = contextvars.copy_context()  # has torch's settings of Inductor
            programs.append(run_in_thread(lambda: context.run(_compiled, kind, lengths)))
        except BaseException as error:
            raise_if_of_program(error)
            raise BackendUnavailableError(f"flex couldn't be compiled: {error}") from error
        return programs[-1]


def _drop_oldest_function(kind: ProgramKind) -> None:
    """Forget the oldest kind with functions of scores, where a new one is one too many."""
    with_functions = [other for other in _programs if other.score_mod or other.mask_mod]
    is_new = kind not in _programs and (kind.score_mod or kind.mask_mod)
    if is_new and len(with_functions) >= MOST_WITH_FUNCTIONS:
        _programs.pop(with_functions[0], None)


def _compiled(kind: ProgramKind, lengths: Mapping[str, int]) -> CompiledGraph:
    with _on(kind.device):
        *others, last = tiles_for(kind)
        for tiles in others:
            try:
                return _with_tiles(kind, lengths, tiles)
            except Exception as error:
                if not TOO_LARGE.search(str(error)):
                    raise
        return _with_tiles(kind, lengths, last)


def _with_tiles(kind: ProgramKind, lengths: Mapping[str, int], tiles: Mapping[str, int]) -> CompiledGraph:
    graph, fakes, shapes = traced(kind, lengths, tiles)
    return CompiledGraph(compile_graph(graph, fakes), _condition(shapes))


def compile_graph(graph: torch.fx.GraphModule, fakes: list[Any]) -> Callable[..., Any]:
    """Compile a graph for tensors like these, whose sizes may be symbols."""
    import torch._inductor  # takes a second: only where something is compiled

    # Lengths that differ from call to call would record a graph each.
    options = {"triton.cudagraphs": False}
    run: Callable[..., Any] = torch._inductor.compile(graph, fakes, options=options)
    return run


@contextlib.contextmanager
def _on(device: torch.device) -> Iterator[None]:
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        yield


def _condition(shapes: Any) -> Callable[[Mapping[str, int]], bool] | None:
    """Return what tracing and compiling have assumed of lengths, as a function of them.

    `shapes` is torch's `ShapeEnv` of the graph, and the symbol of each length by name.
    """
    from torch.utils._sympy.printers import PythonPrinter

    environment, symbols = shapes
    printer = PythonPrinter()
    texts = {printer.doprint(guard.expr) for guard in environment.guards} - {"True"}
    if not texts:
        return None
    condition = compile(" and ".join(f"({text})" for text in sorted(texts)), "<guards of flex>", "eval")
    names = {name: str(symbol) for name, symbol in symbols.items()}

    def holds(lengths: Mapping[str, int]) -> bool:
        values = {names[name]: length for name, length in lengths.items() if name in names}
        return bool(eval(condition, {"math": math}, values))  # noqa: S307 - torch's own text, of lengths

    return holds
