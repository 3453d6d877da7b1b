"""A backend in the registry: whether it loads here, its kernels, and the reasons against a call."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

from attnreg.core.adaptation.chain import Adaptation, adaptations_of, first_adaptation
from attnreg.core.contract.backend import Backend, Kernels
from attnreg.core.contract.capabilities import ANY_SIZE, Capabilities, reasons_of
from attnreg.core.contract.lengths import LENGTHS, Cut, check_cuts, reads_of
from attnreg.core.contract.spec import AttentionSpec, Direction

# Not from the package: a thread that imports the package may wait for this module.
from attnreg.core.registry.known_issues import against as known_faults
from attnreg.core.registry.known_issues import cuts as cuts_of_faults
from attnreg.core.registry.known_issues import text_of
from attnreg.core.registry.loading import alone, wait_for_module
from attnreg.core.torchlib.isolation import raise_if_temporary, strip_tracebacks
from attnreg.errors import BackendUnavailableError, RegistrationError

T = TypeVar("T")

CHECK_FAILED = "check failed: "
SET_ASIDE = "not tried again for calls like this: "


@dataclass(eq=False)
class Entry:
    """A backend in the registry: its origin, its declaration, and its kernels once they are loaded.

    Attributes:
        name: the backend's name; for a broken backend the name of its module or entry point.
        origin: where it was found, as text.
        backend: its declaration; None if it is broken.
        cause: the exception of importing or loading it.
        own: whether the program registered its object, so that it is dropped with its last registration.
        installed: whether an entry point of another package brought it. In the default order it is behind
            all others: who installs a package hasn't asked for its kernels.
        on_request: whether it runs only where something asks for it. Its code runs when it is opened, so
            nothing else may open it.
    """

    name: str
    origin: str
    backend: Backend | None = None
    cause: BaseException | None = None
    own: bool = False
    installed: bool = False
    on_request: ClassVar[bool] = False
    _kernels: Kernels | None = field(default=None, init=False)
    _is_loading: bool = field(default=False, init=False)
    _missing: str | None = field(default=None, init=False)
    _version: str | None = field(default=None, init=False)
    _set_aside: dict[tuple[Direction, AttentionSpec], str] = field(default_factory=dict, init=False)

    @property
    def stands_in(self) -> bool:
        """Whether it runs, unless asked for, only what no other kernel can."""
        return self.backend is not None and self.backend.stands_in

    def open(self) -> Backend | None:
        """Return its declaration, for a caller that asks for this backend; None if it is broken."""
        return self.backend

    def unavailable(self) -> str:
        """Return why the backend can't load here, or an empty string; imports no kernel package."""
        # What is known is read without waiting: a package that is imported may wait for a thread that calls
        # attention.
        if self._missing is not None and self.cause is None:
            return self._missing
        with alone(self):
            if self.cause is not None:
                return f"failed to load: {type(self.cause).__name__}: {self.cause}{self._hint()}"
            if self._missing is None and self.backend is not None:
                self._missing = self._probe(self.backend)
            return self._missing or ""

    def kernels(self, spec: AttentionSpec | None = None) -> Kernels:
        """Load the backend, once per process, and return its kernels, fit for a call if its spec is given.

        If it can't load here, a `BackendUnavailableError` says why and what to install.
        """
        loaded = self._kernels or self._loaded()
        fit = loaded if spec is None else self._fit_for(spec, loaded)
        # The backend's launchers know nothing of further columns.
        return loaded if fit == loaded else fit._replace(specialize=None)

    def _loaded(self) -> Kernels:
        with alone(self) as is_inner:
            if is_inner and self._is_loading:  # else a thread that a fork has left behind has set it
                raise RegistrationError(
                    f"{self.name} is being loaded: its load() has registered it, or called attention that "
                    f"would run on it, expected another backend there, as in use_backend('math')"
                )
            if self._kernels is None and not self.unavailable() and self.backend is not None:
                self._kernels = self._load(self.backend)
            if self._kernels is None:
                raise BackendUnavailableError(f"{self.name} {self.unavailable()}") from self.cause
            return self._kernels

    def kernel(self, direction: Direction, spec: AttentionSpec | None = None) -> Callable[..., Any]:
        """Return the function of one direction as `kernels` does; an error as well where there is none."""
        kernels = self.kernels(spec)
        kernel = kernels.forward if direction == "forward" else kernels.backward
        if kernel is None:
            raise BackendUnavailableError(f"{self.name} has no {direction}")
        return kernel

    def set_aside(
        self, spec: AttentionSpec, direction: Direction, problem: str, counting: bool = False
    ) -> str:
        """Have the backend refuse calls like one whose kernel couldn't be loaded, compiled or built.

        It does so as long as the entry exists, so that none of them waits for another attempt. `counting`
        says whether that kernel was to count what results are rescaled for. Returns the reason that it gives.
        """
        alike = _without_lengths(spec if counting else spec.unscaled, direction)
        return self._set_aside.setdefault(alike, SET_ASIDE + problem)

    def priority(self, spec: AttentionSpec) -> int:
        """Return its rank in the default order for a call; 0 where it has none, as `reasons` says then."""
        backend = self.backend
        return 0 if backend is None else _or(0, lambda: backend.priority_for(self.adapted(spec, "forward")))

    def reasons(self, spec: AttentionSpec, direction: Direction) -> tuple[str, ...]:
        """Return every reason against running one direction of `spec` here."""
        if self.backend is None:
            return (self.unavailable(),)
        if self._limits(direction) is None:
            return ("has no backward",)
        spec = spec.of(direction)
        # A package that is missing here needn't be missing on the simulated machine.
        missing = "" if spec.device.simulated and self.cause is None else self.unavailable()
        try:
            against = self._against(spec, direction, missing)
            if not against and self._set_aside:
                aside = self._set_aside.get(_without_lengths(spec, direction))
                against = (aside,) if aside else ()
        except BaseException as error:  # noqa: BLE001 - a fault in a backend's check must not end the program
            raise_if_temporary(error)
            against = (f"{CHECK_FAILED}{type(error).__name__}: {error}",)
        return (missing, *against) if missing else against

    def _against(self, spec: AttentionSpec, direction: Direction, missing: str) -> tuple[str, ...]:
        """Return the reasons of the backend's limits, of its own check and of known issues."""
        backend, limits = self.backend, self._limits(direction)
        if backend is None or limits is None:
            return ()
        if (adaptation := first_adaptation(spec, direction, limits)) is not None:
            # Reasons that hold without the adaptation aren't about it.
            plain, either_way = adaptation.plain(spec), limits.unsupported(spec)
            if plain is not None and (against := self._against(plain, direction, missing)):
                return against
            adapted, words = adaptation.adapted(spec), adaptation.in_reason(spec)
            against = self._against(adapted, direction, missing)
            return tuple(
                reason if plain is None and reason in either_way else f"{words}: {reason}"
                for reason in against
            )
        backend.priority_for(spec)  # what it raises is against the call
        against = limits.unsupported(spec) or reasons_of(backend.refuses, spec)
        if not against and not missing:
            against = known_faults(self.name, self.version, spec, direction)
        return against

    @property
    def is_loaded(self) -> bool:
        """Whether its kernels have loaded."""
        return self._kernels is not None

    def cuts(self, spec: AttentionSpec, direction: Direction) -> tuple[Cut, ...]:
        """Return where the decision about calls of a spec's kind changes with their lengths."""
        backend, limits = self.backend, self._limits(direction)
        if backend is None or limits is None or spec.device.type not in limits.devices:
            return ()
        cuts = [*limits.cuts(spec)]
        for variant in self._variants(spec.of(direction), direction):
            cuts += cuts_of_faults(self.name, variant)[0]
            cuts += self._declared(variant) or ()  # if they can't be had, the calls are decided exactly
        return tuple(cuts)

    def unnamed_reads(
        self, spec: AttentionSpec, direction: Direction, ranks_only: bool = False
    ) -> frozenset[str]:
        """Return the lengths that decide about a spec here in ways that no cut names.

        Calls of the spec's class may be decided differently then. Which lengths are read may depend on the
        class, but on nothing else of the lengths. `ranks_only` looks at the backend's rank alone.
        """
        backend, limits = self.backend, self._limits(direction)
        if backend is None or limits is None or spec.device.type not in limits.devices:
            return frozenset()
        reads: set[str] = set()
        for variant in self._variants(spec.of(direction), direction):
            if (declared := self._declared(variant)) is None:
                return frozenset(LENGTHS)
            if backend.cuts is not None and (of_cuts := reads_of(backend.cuts, variant)):
                return of_cuts
            named = {name for cut in declared for name in cut.names}
            for look in self._looks(backend, limits, direction, ranks_only, variant.varlen):
                reads |= reads_of(look, variant) - named
            reads |= frozenset() if ranks_only else cuts_of_faults(self.name, variant)[1]
        if not ranks_only:
            reads |= {name for name, allowed in limits.of_lengths(spec).items() if allowed.step > 1}
        return frozenset(reads)

    def _declared(self, spec: AttentionSpec) -> tuple[Cut, ...] | None:
        """Return the backend's cuts; None if its function fails."""
        cuts = self.backend.cuts if self.backend is not None else None
        return () if cuts is None else _or(None, lambda: check_cuts(cuts(spec), self.name))

    def _variants(self, spec: AttentionSpec, direction: Direction) -> list[AttentionSpec]:
        """Return the specs that limits may be asked about for one of `spec`; see `_against`."""
        variants = [spec]
        for adaptation, before in self.adaptations(spec, direction):
            plain = adaptation.plain(before)
            variants += [adaptation.adapted(before), *(() if plain is None else (plain,))]
        return variants

    def _looks(
        self, backend: Backend, limits: Capabilities, direction: Direction, ranks_only: bool, varlen: bool
    ) -> Iterator[Callable[[AttentionSpec], object]]:
        """Yield the functions of a backend that may look at lengths."""
        if callable(backend.priority):
            yield backend.priority_for
        if ranks_only:
            return
        # The limits' fields of lengths are cuts already.
        if type(limits).unsupported is not Capabilities.unsupported:  # of a package's own class
            yield replace(limits, batch=ANY_SIZE, ranges=ANY_SIZE).unsupported
        yield from filter(None, (limits.refuses, backend.refuses))
        replaces = None if varlen or self._kernels is None else self._kernels.replaces_native
        if replaces is not None:  # asked about dense calls alone
            yield functools.partial(replaces, direction)

    def builds(self, spec: AttentionSpec) -> bool:
        """Whether the backend builds something for each new shape of such calls."""
        builds = self.backend.builds if self.backend is not None else None
        return builds is not None and _or(False, lambda: builds(spec))

    def replaces_native(self, spec: AttentionSpec, direction: Direction) -> bool:
        """Whether the backend's function runs a dense call in the place of torch's kernel of its name."""
        replaces = self.kernels().replaces_native
        return replaces is not None and _or(False, lambda: replaces(direction, spec))

    def _limits(self, direction: Direction) -> Capabilities | None:
        if self.backend is None:
            return None
        return self.backend.forward if direction == "forward" else self.backend.backward

    def _fit_for(self, spec: AttentionSpec, kernels: Kernels) -> Kernels:
        """Return kernels that are given what this backend's take in place of such a call's tensors."""
        forward = self.fit_for(spec, "forward", kernels.forward)
        backward = kernels.backward and self.fit_for(spec, "backward", kernels.backward)
        return Kernels(forward, backward, kernels.specialize, kernels.replaces_native)

    def fit_for(
        self, spec: AttentionSpec, direction: Direction, kernel: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return what runs a call on a kernel of this backend, which may take other tensors."""
        for adaptation, _ in reversed(self.adaptations(spec, direction)):
            kernel = adaptation.wrap(kernel, direction)
        return kernel

    def adaptations(
        self, spec: AttentionSpec, direction: Direction
    ) -> list[tuple[Adaptation, AttentionSpec]]:
        """Return the adaptations of a call for this backend, the outermost first: see `adaptation.chain`."""
        limits = self._limits(direction)
        return [] if limits is None else adaptations_of(spec, direction, limits)

    def adapted(self, spec: AttentionSpec, direction: Direction) -> AttentionSpec:
        """Return the spec of the call that the kernel is given; the same object without an adaptation."""
        for adaptation, before in self.adaptations(spec, direction):
            spec = adaptation.adapted(before)
        return spec

    def counts_sinks(self, spec: AttentionSpec, direction: Direction) -> bool:
        """Whether the kernel of a direction counts the sinks of such calls itself."""
        limits, with_sinks = self._limits(direction), spec.but(sinks=True)
        may = limits is not None and limits.sinks and with_sinks.gives_sinks and not spec.capturing
        return may and not self.reasons(with_sinks, direction)

    def version(self) -> str:
        """Return the provider's version, or an empty string if it has none or the check raises.

        It is asked for once: a provider may have to read it from the disk.
        """
        if self._version is None:
            self._version = text_of(self.backend.version) if self.backend is not None else ""
        return self._version

    def _probe(self, backend: Backend) -> str:
        try:
            missing = backend.unavailable()
            if missing and not isinstance(missing, str):  # the reason itself is shown
                raise TypeError(f"unavailable() returned {missing!r}, expected a reason as text, or none")
        except BaseException as error:  # noqa: BLE001 - as in `reasons`
            raise_if_temporary(error)
            missing = f"availability check failed: {type(error).__name__}: {error}"
        if not missing:
            return ""
        # Where torch lacks something, installing a package wouldn't help.
        return f"can't load here: {missing}" + ("" if missing.startswith("torch ") else self._hint())

    def _hint(self) -> str:
        install = self.backend.install if self.backend is not None else ""
        return f"; install it with: {install}" if install else ""

    def _load(self, backend: Backend) -> Kernels | None:
        self._is_loading = True
        try:
            try:
                kernels = backend.load()
            except (ImportError, AttributeError) as error:
                # Python hands out half a module where two threads import each other's modules.
                half = re.search(r"partially initialized module '([^']+)'", str(error))
                if half is None or not wait_for_module(half[1]):
                    raise
                kernels = backend.load()
            if not isinstance(kernels, Kernels):
                raise RegistrationError(f"load() of {self.name}: got {kernels!r}, expected Kernels")
            Kernels(*kernels)  # which `_replace` doesn't check
            if backend.backward is not None and kernels.backward is None:
                raise RegistrationError(f"load() of {self.name}: got no backward, but it declares one")
        except BaseException as error:  # noqa: BLE001 - kept as the cause
            raise_if_temporary(error)
            self.cause = strip_tracebacks(error)  # kept for good; its frames may refer to tensors
            return None
        finally:
            self._is_loading = False
        return kernels


def _or(default: T, function: Callable[[], T]) -> T:
    """Return what a backend's function does, or the default if it fails: see `Entry.reasons`."""
    try:
        return function()
    except BaseException as error:  # noqa: BLE001 - see `reasons`
        raise_if_temporary(error)
        return default


def _without_lengths(spec: AttentionSpec, direction: Direction) -> tuple[Direction, AttentionSpec]:
    """Return what calls have in common but for lengths, how far a window reaches, and how much is dropped."""
    left, right = spec.window
    alike = spec.of(direction).but(**dict.fromkeys(LENGTHS, 1))
    dropout = float(spec.dropout > 0.0)
    return direction, alike.but(window=(min(left, 1), min(right, 1)), dropout=dropout, needs_backward=False)
