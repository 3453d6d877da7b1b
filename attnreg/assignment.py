"""A choice of backends by module: `assign` puts the calls of matching modules into a block of `use_backend`.

An assigned module gets a class derived from its own, whose `forward` enters the block. Why not torch's hooks:
- After a KeyboardInterrupt in `forward`, an error in an export, or a handle removed by another thread, no
  second hook ends what the first began. A `with` statement ends however the call ends.
- Code that was compiled before doesn't notice new hooks (`skip_nnmodule_hook_guards`). It notices the class.
- Compiled or not, copied, replicated for several devices, pickled: the class and the attribute go with it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextvars import Token
from copy import copy
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NoReturn, Self, cast
from weakref import WeakValueDictionary

import torch
from torch import nn

from attnreg.api import choice_or_error, use_backend
from attnreg.core.dispatch import call_cache, scope
from attnreg.core.policy import current as policy
from attnreg.core.policy.sources import modules as patterns_of
from attnreg.core.torchlib.frames import leave_module_uncompiled
from attnreg.errors import AttnregError, InvalidInputError, did_you_mean, short_repr

__all__ = ["Assignment", "assign"]

Patterns = Mapping[str, "str | list[str] | tuple[str, ...]"]

_BLOCKS, _OWN_CLASS = "_attnreg_blocks", "_attnreg_own_class"


class ModuleBlock(use_backend):
    """The block that the modules of one pattern run in.

    Attributes:
        source: the pattern, as `explain` and messages show it.
        choice: the choice of these backends. `csrc/choice.h` reads it.
        fault: why its backends can't run here; only a model from another process can have such a block.
    """

    def __init__(self, names: tuple[str, ...], source: str) -> None:
        choice = choice_or_error(names, source)
        self.names, self.source = names, source
        self.fault = choice if isinstance(choice, AttnregError) else None
        self.choice = self._choice = cast("Any", choice)

    def __enter__(self) -> None:
        if self.fault is not None:
            raise copy(self.fault)
        super().__enter__()

    def enter(self) -> Token[scope.ScopedChoice | None]:
        """Put the choice in force until `scope.leave`, in code that isn't traced."""
        if self.fault is not None:
            raise copy(self.fault)
        return scope.enter(self.choice)

    def __reduce__(self) -> tuple[type[Self], tuple[Any, ...]]:
        return type(self), (self.names, self.source)

    def __deepcopy__(self, memo: object) -> Self:
        return self  # a copied model shares it, and keeps it when the handle of the first is removed


@dataclass(frozen=True, eq=False, slots=True)
class Inner:
    """In the place of a block: a module that no pattern matches runs by the choice of its caller.

    A checkpoint inside a matching module calls its part again in a backward, when no block is in force.

    Attributes:
        repeated: the block for such a call; None in a model whose parts alone are assigned.
    """

    repeated: ModuleBlock | None
    choice = None  # of a call outside of a backward: see `ModuleBlock`

    def block(self) -> ModuleBlock | None:
        """Return the block for a call now."""
        if self.repeated is None or torch._C._current_graph_task_id() == -1 or scope.current() is not None:
            return None
        return self.repeated


_OUTSIDE = (Inner(None),)


class Assignment:
    """The result of `assign`: `remove` undoes it, and so does the end of a `with` block.

    Attributes:
        modules: the backends of each module that was assigned, by its name.
    """

    def __init__(self, model: nn.Module, matching: dict[str, ModuleBlock]) -> None:
        self.modules = {name: block.names for name, block in matching.items()}
        chosen = _with_inner(model, matching)
        root = Inner(None)
        self._placed = [(model, root), *chosen]
        try:
            _set_blocks(model, (root, *_blocks(model)))  # before blocks, of which the last counts
            for module, block in chosen:
                _set_blocks(module, (*_blocks(module), block))
        except Exception as error:
            self.remove()
            raise InvalidInputError(
                f"assign: a class of the model can't be derived from: {type(error).__name__}: {error}"
            ) from error

    def remove(self) -> None:
        """Undo the assignment; a second call changes nothing. Calls that are running keep their choice."""
        placed, self._placed = self._placed, []
        for module, block in placed:
            _set_blocks(module, tuple([other for other in _blocks(module) if other is not block]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an Assignment can't be pickled or copied: it undoes a change of this process; pickle or copy "
            "the model, which keeps its backends"
        )

    def __repr__(self) -> str:
        state = f"{len(self.modules)} modules" if self._placed else "removed"
        return f"<attnreg.Assignment, {state}>"


def assign(model: nn.Module, patterns: Patterns | None = None) -> Assignment:
    """Choose backends by module: each call of a matching module runs as inside `use_backend`.

        handle = attnreg.assign(model, {"*.self_attn": "FA4", "vision.*": ["cuDNN", "FA2"]})

    A pattern has the form of `fnmatch`, and is compared with the names of `model.named_modules()`. If several
    patterns match a module, the last one decides; where modules nest, the innermost. `use_backend` inside a
    module and `backend=` on a call are stronger. Of several assignments of a model, the newest decides until
    it is removed. Copies and pickles of the model keep their backends.

    Args:
        model: the model, or a part of it.
        patterns: a backend, or several in the order of preference, for each pattern. None: `[modules]` of the
            settings in force.

    Returns:
        A handle that undoes the assignment.

    Raises:
        InvalidInputError: a pattern matches no module, or something has another type.
        UnknownBackendError: no backend has one of the names.
        BackendUnavailableError: one of them can't load here.
        ConfigError: the settings can't be read.
        RegistrationError: the routers can't be installed.

    An error changes nothing.
    """
    if not isinstance(model, nn.Module):
        raise InvalidInputError(f"assign: got {short_repr(model)}, expected a torch.nn.Module")
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    matching: dict[str, ModuleBlock] = {}
    for pattern, backends, source in _from_settings() if patterns is None else _checked(patterns):
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            raise InvalidInputError(
                f"{source}: got {pattern!r}, which matches no module, expected a pattern for names of "
                f"model.named_modules(){did_you_mean(pattern, names)}"
            )
        block = ModuleBlock(backends, source)
        if block.fault is not None:
            raise block.fault
        matching = {name: own for name, own in matching.items() if name not in matched}
        matching |= dict.fromkeys(matched, block)  # the last pattern's last
    return Assignment(model, matching)


def _from_settings() -> Iterator[tuple[str, tuple[str, ...], str]]:
    patterns = patterns_of(policy.sources())
    if not patterns and not policy.left_out():
        raise InvalidInputError(
            "assign: got no patterns, and no settings in force have [modules]; expected patterns, as in "
            "assign(model, {'*.self_attn': 'FA4'})"
        )
    for pattern, (names, where) in patterns.items():
        yield pattern, names, f"assign, {where}"


def _checked(patterns: Patterns) -> Iterator[tuple[str, tuple[str, ...], str]]:
    if not isinstance(patterns, Mapping) or not patterns:
        raise InvalidInputError(
            f"assign: got {short_repr(patterns)}, expected a dict of patterns and backends, as in "
            "{'*.self_attn': 'FA4'}"
        )
    for pattern, value in patterns.items():
        names = (value,) if isinstance(value, str) else value
        is_list = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
        if not isinstance(pattern, str) or not is_list or not names:
            raise InvalidInputError(
                f"assign: got {short_repr(pattern)}: {short_repr(value)}, expected a pattern and a backend, "
                "or a list of at least one"
            )
        yield pattern, tuple(names), f"assign({{{pattern!r}: {value!r}}})"


def _with_inner(
    model: nn.Module, matching: dict[str, ModuleBlock]
) -> list[tuple[nn.Module, ModuleBlock | Inner]]:
    """Return the modules that match, with their blocks, and all modules inside them."""
    modules = list(model.named_modules(remove_duplicate=False))
    matching = _with_lists(dict(modules), matching)
    by_id = {id(module): (name, module) for name, module in modules}
    inherited: dict[str, Inner] = {}
    of_module: dict[int, set[Inner]] = {}  # a shared module has several names
    inner = {id(block): Inner(block) for block in matching.values()}
    for name, module in modules:  # the outer ones first
        block = matching.get(name)
        inherited[name] = inner[id(block)] if block else inherited.get(name.rpartition(".")[0], _OUTSIDE[0])
        of_module.setdefault(id(module), set()).add(inherited[name])
    chosen: dict[int, ModuleBlock | Inner] = {
        key: min(blocks, key=id)
        for key, blocks in of_module.items()
        if len(blocks) == 1 and blocks != {*_OUTSIDE} and not _calls_none(by_id[key][1])
    }
    keys = {name: id(module) for name, module in modules}
    chosen |= {keys[name]: block for name, block in matching.items()}
    for name in matching:
        _check(name, by_id[keys[name]][1])
    return [(by_id[key][1], block) for key, block in chosen.items()]


def _with_lists(modules: dict[str, nn.Module], matching: dict[str, ModuleBlock]) -> dict[str, ModuleBlock]:
    """Return blocks by name, with the members of matching modules that aren't called, such as ModuleList."""
    blocks = dict(matching)
    for name in modules:
        outer = name.rpartition(".")[0]
        if name and outer in blocks and _own_class(modules[outer]).forward is nn.Module.forward:
            blocks.setdefault(name, blocks[outer])
    return blocks


def _own_class(module: nn.Module) -> type[nn.Module]:
    own: type[nn.Module] = getattr(type(module), _OWN_CLASS, type(module))
    return own


def _calls_none(module: nn.Module) -> bool:
    """Whether a module calls no attention itself, as torch's smallest, or can't be put into a block."""
    # Of a parametrized module torch changes the class itself, which has to be the module's own then.
    children = [name for name, _ in module.named_children() if name != "parametrizations"]
    is_small = type(module).__module__.startswith("torch.nn.") and not children
    return is_small or isinstance(module, torch.jit.ScriptModule)


def _check(name: str, module: nn.Module) -> None:
    """Raise an error if calls of a module can't be put into a block."""
    if isinstance(module, torch.jit.ScriptModule):
        raise InvalidInputError(
            f"assign: got {name!r}, a module of TorchScript, expected patterns for modules that run in Python"
        )
    kinds = inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction
    if any(runs_later(module.forward) for runs_later in kinds):
        raise InvalidInputError(
            f"assign: got {name!r}, whose forward runs after its call (async def, or a generator), expected "
            "patterns for modules that run at once: write `with use_backend(...)` inside forward"
        )


def _blocks(module: nn.Module) -> tuple[ModuleBlock | Inner, ...]:
    blocks: tuple[ModuleBlock | Inner, ...] = vars(module).get(_BLOCKS, ())
    return blocks


def _set_blocks(module: nn.Module, blocks: tuple[ModuleBlock | Inner, ...]) -> None:
    """Have a module run in the last of some blocks, or without blocks as ever."""
    own = type(module)
    if blocks:
        vars(module)[_BLOCKS] = blocks
        if not hasattr(own, _OWN_CLASS):
            # Accelerate, say, gives instances a `forward` of their own, which no method can be around.
            _change_class(
                module, assigned.derive(own, "_call_impl" if "forward" in vars(module) else "forward")
            )
    else:
        vars(module).pop(_BLOCKS, None)
        # Where another library has derived a class from ours since, that stays, and runs no block.
        if _OWN_CLASS in vars(own):
            _change_class(module, getattr(own, _OWN_CLASS))


def _change_class(module: nn.Module, to: type[nn.Module]) -> None:
    object.__setattr__(module, "__class__", to)  # modules may set attributes in a way of their own


class AssignedClasses:
    """The classes of assigned modules: one for each class, so that compiled code serves all its modules."""

    def __init__(self) -> None:
        self._derived: WeakValueDictionary[tuple[type, str], type[nn.Module]] = WeakValueDictionary()

    def derive(self, own: type[nn.Module], method: str) -> type[nn.Module]:
        """Return a class like `own`, one of whose methods runs in a module's block."""
        derived = self._derived.get((own, method))
        if derived is None:
            metaclass: Callable[..., type[nn.Module]] = type(own)
            derived = metaclass(own.__name__, (own,), self._namespace(own, method))
            self._derived[own, method] = derived
        return derived

    def _namespace(self, own: type[nn.Module], method: str) -> dict[str, Any]:
        run = getattr(own, method)

        def in_block(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            block = getattr(module, _BLOCKS, _OUTSIDE)[-1]
            if isinstance(block, Inner):
                if torch.compiler.is_dynamo_compiling():
                    # Only so does Dynamo let functions enter blocks that a checkpoint calls further inside.
                    scope.enter_in_graph(())
                    scope.leave_in_graph()
                    return run(module, *args, **kwargs)
                block = block.block()
                if block is None:
                    return run(module, *args, **kwargs)
            if torch.compiler.is_compiling() or scope.backends_in_graph():
                with block:
                    return run(module, *args, **kwargs)
            token = block.enter()  # which takes half the time of `with`
            try:
                return run(module, *args, **kwargs)
            finally:
                scope.leave(token)

        # Dynamo recompiles a code object a few times only, so each class has one.
        in_block.__code__ = in_block.__code__.replace()
        # Libraries read the arguments of `forward`. The attributes aren't copied: because of a compiled
        # function's attributes Dynamo would trace that function in place of `in_block`.
        functools.update_wrapper(in_block, run, updated=())
        if (compiled := call_cache.load()) is not None:
            compiled.take_over(in_block)  # only the calls: Dynamo traces the code

        names = {name: getattr(own, name) for name in ("__module__", "__qualname__", "__doc__")}
        namespace = {method: in_block, _OWN_CLASS: own, **names, **self._copying(own, method)}
        if (finished := getattr(own, "cls_to_become", None)) is not None:
            namespace["cls_to_become"] = self.derive(finished, method)  # of a lazy module, once it was called
        return namespace

    def _copying(self, own: type[nn.Module], method: str) -> dict[str, Callable[..., Any]]:
        """Return the methods by which a module is copied and pickled with its backends."""

        def reduce(module: nn.Module, protocol: Any) -> Any:
            reduced = own.__reduce_ex__(module, protocol)
            if isinstance(reduced, str):
                return reduced
            make, args, *rest = reduced
            # Other processes find the module's own class, by its name.
            made_by = [own if part is type(module) else part for part in (make, *args)]
            return _make_again, (method, *made_by), *rest

        def deep_copy(module: nn.Module, memo: Any) -> nn.Module:
            copied: nn.Module = own.__deepcopy__(module, memo)  # type: ignore[attr-defined]
            _set_blocks(copied, _blocks(module))
            return copied

        # Such as GraphModule, which copies the attributes that it knows.
        copies_itself = hasattr(own, "__deepcopy__")
        return {"__reduce_ex__": reduce} | ({"__deepcopy__": deep_copy} if copies_itself else {})


assigned = AssignedClasses()


def _make_again(method: str, make: Callable[..., nn.Module], *args: Any) -> nn.Module:
    """Return a copied or unpickled module, which gets its attributes after this."""
    module = make(*args)
    _change_class(module, assigned.derive(type(module), method))
    return module


leave_module_uncompiled(__name__)
