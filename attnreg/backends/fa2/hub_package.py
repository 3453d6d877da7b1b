"""Kernels from the hub, found and imported by Hugging Face's package `kernels`.

A pinned revision that is in the cache of `kernels` is imported without the network. A branch is looked up
on the hub, and its last download stands in where the hub can't be reached.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from attnreg.core.settings.hub_names import KNOWN, HubName
from attnreg.core.torchlib.isolation import raise_if_temporary
from attnreg.errors import RegistrationError, did_you_mean

log = logging.getLogger("attnreg")

NAME = "kernels"
INSTALL = "pip install 'attnreg[hub]'"

# Names of errors, wherever they are defined: of huggingface_hub, requests, httpx and Python.
_NETWORK = {
    "ConnectError", "ConnectionError", "LocalEntryNotFoundError", "NetworkError", "OfflineModeIsEnabled",
    "ProxyError", "SSLError", "Timeout", "TimeoutError", "TimeoutException",
}  # fmt: skip

# How the names of files end that an import reads.
_CODE = {".py", ".so", ".pyd", ".dll", ".dylib", ".cubin", ".ptx", ".hsaco", ".json"}


class Loaded(NamedTuple):
    """An imported kernel.

    Attributes:
        module: the kernel's module.
        revision: the commit it is of; for a folder what its files are, as a hash.
        variant: the name of its build variant, such as "torch211-cxx11-cu128-x86_64-linux".
        version: the version of the package `kernels`.
    """

    module: ModuleType
    revision: str
    variant: str
    version: str


def load(source: HubName) -> Loaded:
    """Import a kernel, after downloading it if need be.

    Raises RegistrationError, which says what to do.
    """
    kernels = _package()
    files = ""
    try:
        if source.folder:  # before the import: a file may be replaced meanwhile
            files = f"files {_fingerprint(_folder_of(source))}"
            module = kernels.get_local_kernel(Path(source.folder))
        else:
            module = _import_repository(kernels, source)
    except RegistrationError:
        raise
    except BaseException as error:
        raise_if_temporary(error)
        raise RegistrationError(_explain(error, source)) from error
    if not getattr(module, "__file__", None):
        raise RegistrationError(f"{NAME} returned {module!r}, expected a module with a file")
    folder = Path(str(module.__file__)).parent
    # huggingface_hub's cache names a snapshot's folder by its commit.
    commits = re.findall(r"(?<=[/\\]snapshots[/\\])[0-9a-f]{40}(?=[/\\])", str(folder))
    variants = [part for part in folder.parts if part.startswith("torch")]
    of_repository = commits[-1] if commits else f"files {_fingerprint(folder)}"
    revision = files or of_repository
    loaded = Loaded(module, revision, variants[-1] if variants else "", str(kernels.__version__))
    _say_if_unpinned(source, loaded)
    return loaded


def _package() -> Any:
    try:
        return import_module(NAME)
    except ModuleNotFoundError as error:
        if error.name != NAME:
            raise RegistrationError(f"the package {NAME} failed to load: {error}") from error
        raise RegistrationError(f"the package {NAME} isn't installed; install it with: {INSTALL}") from None
    except Exception as error:
        raise RegistrationError(f"the package {NAME} failed to load: {error}; try: {INSTALL}") from error


def _folder_of(source: HubName) -> Path:
    folder = Path(source.folder)
    if not folder.is_dir():
        raise RegistrationError(f"got {source.folder}, expected a folder with a kernel, as of a repository")
    return folder


def _import_repository(kernels: Any, source: HubName) -> Any:
    repository, revision = source.repository, source.revision
    replaced = os.environ.get("LOCAL_KERNELS", "").split(":")
    if any(each.startswith(f"{repository}=") for each in replaced):  # whose folder `get_kernel` imports
        return kernels.get_kernel(repository, revision=revision)
    if source.is_pinned and (module := _import_cached(kernels, source)) is not None:
        return module
    try:
        return kernels.get_kernel(repository, revision=revision)
    except Exception as error:
        if source.is_pinned or _of_network(error) is None:
            raise
        if (module := _import_cached(kernels, source)) is None:
            raise
        log.warning("%s: the hub can't be reached, and the last download of %s serves", source, revision)
        return module


def _import_cached(kernels: Any, source: HubName) -> Any:
    """Import a kernel from the cache of `kernels`; None if it isn't there, or not as a whole."""
    try:
        variant = kernels.install_kernel(source.repository, revision=source.revision, local_files_only=True)
    except Exception as error:  # noqa: BLE001 - downloading it says what is wrong
        log.debug("%s isn't in the cache: %r", source, error)
        return None
    return kernels.get_local_kernel(Path(variant).parent)


def _fingerprint(folder: Path) -> str:
    """Return a hash of the code in a folder, by names and contents.

    Other files don't count: an import may write some next to itself.
    """
    digest = hashlib.sha256()
    folder = folder / "build" if (folder / "build").is_dir() else folder
    for file in sorted(path for path in folder.rglob("*") if not _CODE.isdisjoint(path.suffixes)):
        if file.is_file():
            with file.open("rb") as stream:
                contents = hashlib.file_digest(stream, "sha256").hexdigest()
            digest.update(f"{file.relative_to(folder)} {contents}\n".encode())
    return digest.hexdigest()[:16]


def _say_if_unpinned(source: HubName, loaded: Loaded) -> None:
    if not source.is_pinned and not loaded.revision.startswith("files "):
        pinned = f"hub:{source.repository}@{loaded.revision}"
        log.warning(
            "%s names no commit, so another start may load another kernel; it is %s now. To keep it: %s",
            source, loaded.revision, pinned,
        )  # fmt: skip


def _explain(error: BaseException, source: HubName) -> str:
    """Return what is wrong and what to do, as one line."""
    name, kinds = source.repository, {type(each).__name__ for each in _chain(error)}
    text = " ".join(str(error).split())[:600]
    if source.folder:
        return f"{source.folder} can't be imported: {type(error).__name__}: {text}"
    if "RevisionNotFoundError" in kinds:
        return f"{name} has no revision {source.revision!r}: see https://huggingface.co/{name}/tree"
    if kinds & {"RepositoryNotFoundError", "GatedRepoError"}:
        near = did_you_mean(name, KNOWN) if name not in KNOWN else ""
        return f"the hub has no repository {name}, or only for some (HF_TOKEN names who asks){near}"
    if (cause := _of_network(error)) or "offline mode" in text:
        said = f"{type(cause).__name__}: {cause}" if cause else "Hugging Face's packages are in offline mode"
        return (
            f"the hub can't be reached ({said}), and {source} isn't in the cache of {NAME}, whose folder "
            f'KERNELS_CACHE names. Where there is a network, this fetches it: python -c "import kernels; '
            f"kernels.install_kernel('{name}', revision='{source.revision}')\""
        )
    if "is not from a trusted publisher" in text:
        return (
            f"{name} isn't of a publisher whom {NAME} trusts, and attnreg trusts nobody by itself: download "
            f"the repository, look at it, and name its folder (hub:./folder). ({text})"
        )
    if "build variant" in text.casefold():
        return f"{source} has no build for this machine; another revision may have one. {text}"
    return f"{source} can't be imported: {type(error).__name__}: {text}"


def _of_network(error: BaseException) -> BaseException | None:
    """Return the error of the network that an error was raised for; `kernels` words some as another one."""
    for each in _chain(error):
        if isinstance(each, ConnectionError) or not _NETWORK.isdisjoint(
            base.__name__ for base in type(each).__mro__
        ):
            return each
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and the errors that it was raised for."""
    visited: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in visited:
        visited.add(id(at))
        yield at
        at = at.__cause__ or at.__context__
