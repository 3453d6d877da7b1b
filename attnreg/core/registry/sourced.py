"""A backend that a name brings, opened when first needed, and verified before it serves."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from attnreg.core.contract.spec import AttentionSpec, Device, Direction
from attnreg.core.registry.entry import Entry
from attnreg.core.registry.loading import alone
from attnreg.core.registry.verification import remember, verdict
from attnreg.core.settings.hub_names import HubName, is_hub_name
from attnreg.core.torchlib.isolation import raise_if_temporary, strip_tracebacks
from attnreg.errors import RegistrationError

if TYPE_CHECKING:
    from attnreg.core.contract.backend import Backend

# By name: `registry` stands below the backends.
HUB = "attnreg.backends.fa2.hub"

# The backend that the conformance kit checks in this thread.
_tested: ContextVar[str] = ContextVar("_tested", default="")


@contextmanager
def under_test(name: str, changed: Callable[[], None]) -> Iterator[None]:
    """Have a backend run this thread's calls unverified inside the block: the conformance kit verifies it.

    `changed` has plans forgotten that were made for such calls.
    """
    if not is_hub_name(name):
        yield
        return
    from torch.autograd import set_multithreading_enabled  # here: recorded calls are decided without torch

    token = _tested.set(name)
    try:
        # Autograd has a thread for the backwards of each GPU, which has none of our context variables. On it
        # the kernel would have to be verified first, by a process that waits for this one.
        with set_multithreading_enabled(False):
            yield
    finally:
        _tested.reset(token)
        changed()


class SourcedEntry(Entry):
    """A kernel from the hub.

    What it can run depends on its functions, so `open` downloads and imports it. Until then `backend` is
    None. Calls run on it once the conformance kit has found nothing wrong with it on their device.
    """

    on_request = True

    def __init__(self, source: HubName, changed: Callable[[], None]) -> None:
        origin = f"folder {source.folder}" if source.folder else f"repository {source.repository}"
        super().__init__(str(source), origin)
        self.source = source
        self._changed = changed  # called when more is known: plans that were made before know less
        self._is_open = self._is_opening = False
        self._verdicts: dict[tuple[str, int | None], str] = {}

    def open(self) -> Backend | None:
        """Import it, once, and return its declaration; None if it can't be, and `cause` is the error then."""
        if self._is_open:
            return self.backend
        with alone(self):
            if self._is_open:  # another thread has opened it meanwhile
                return self.backend
            if self._is_opening:
                raise RegistrationError(
                    f"{self.name} is being loaded: its import has called attention that would run on it, "
                    "expected another backend there, as in use_backend('math')"
                )
            self._is_opening = True
            try:
                self.backend = importlib.import_module(HUB).backend_of(self.source)
            except BaseException as error:  # noqa: BLE001 - kept as the cause
                raise_if_temporary(error)
                self.cause = strip_tracebacks(error)
            finally:
                self._is_opening = False
            self._is_open = True
            self._changed()
            return self.backend

    def forget_failure(self) -> None:
        """Have the next request load it again, if that has failed: its cause may be mended."""
        if not self._is_open or self.backend is not None:
            return  # another thread may be loading it, which is no reason to wait
        with alone(self):
            if self.backend is None:
                self._is_open, self.cause, self._version = False, None, None

    def unavailable(self) -> str:
        """Return why the kernel can't load here, or an empty string; loads it to find out."""
        self.open()
        return super().unavailable()

    def reasons(self, spec: AttentionSpec, direction: Direction) -> tuple[str, ...]:
        """Return every reason against one direction of `spec` here, a failed verification among them."""
        self.open()
        against = super().reasons(spec, direction)
        if against or _tested.get() == self.name or spec.device.simulated:
            return against
        verdict = self._verdict(spec.device)
        return (verdict,) if verdict else ()

    def _verdict(self, device: Device) -> str:
        """Return what the conformance kit has found wrong on a device; empty if the kernel may serve."""
        key = device.type, device.index
        if key not in self._verdicts:
            with alone(self):
                if key not in self._verdicts:
                    self._verdicts[key] = verdict(self.name, self._revision, device)
        return self._verdicts[key]

    @property
    def _revision(self) -> str:
        """Which kernel it is, without what its version says of how it was loaded."""
        return self.version().partition(" (")[0]

    def remember(self, device: Device, checks: int, wrong: str) -> None:
        """Write down what all checks of the kit have found on a device; `wrong` is empty for nothing.

        Raises OSError if the cache folder can't be written.
        """
        remember(self.name, self._revision, device, checks, wrong)
        with alone(self):
            self._verdicts.clear()
        self._changed()
