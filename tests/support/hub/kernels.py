"""A stand-in for Hugging Face's package `kernels`: its functions, over the layout of its cache.

The variable HUB names a folder that is the hub, with the layout of the cache; without it there is no network.
Each use of it is a line of `uses.txt` in that folder.
"""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

__version__ = "0.17.2"


class ConnectError(Exception):
    """What httpx raises without a network."""


class RepositoryNotFoundError(Exception):
    """What huggingface_hub raises."""


class RevisionNotFoundError(Exception):
    """What huggingface_hub raises."""


def get_local_kernel(repo_path, *, backend=None):
    for base in (repo_path, repo_path / "build"):
        for variant in sorted(base.glob("torch-*")):
            name = f"_kernel_{abs(hash(variant))}"
            if name not in sys.modules:
                spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
                module = sys.modules[name] = importlib.util.module_from_spec(spec)
                try:
                    spec.loader.exec_module(module)
                except BaseException:
                    del sys.modules[name]  # the package runs a module again whose import has failed
                    raise
            return sys.modules[name]
    raise FileNotFoundError(
        f"Cannot find a build variant for this system in {repo_path}:\n\ntorch-cuda: other"
    )


def install_kernel(repo_id, *, revision=None, local_files_only=False):
    place = "kernels--" + repo_id.replace("/", "--")
    cache = Path(os.environ["KERNELS_CACHE"], place)
    if not local_files_only:
        if not os.environ.get("HUB") or os.environ.get("HF_HUB_OFFLINE"):
            try:
                raise ConnectError("[Errno -2] Name or service not known")
            except ConnectError:
                raise ValueError(f"{repo_id} could not verify publisher trust status") from None
        with Path(os.environ["HUB"], "uses.txt").open("a") as uses:
            uses.write(f"{repo_id}@{revision}\n")
        source = Path(os.environ["HUB"], place)
        if not source.exists():
            raise RepositoryNotFoundError(f"404: {repo_id}")
        if not _snapshot(source, revision).exists():
            raise RevisionNotFoundError(f"404: {revision}")
        shutil.copytree(source, cache, dirs_exist_ok=True)
    snapshot = _snapshot(cache, revision)
    if not snapshot.exists():
        raise FileNotFoundError(f"Cannot find a local snapshot for {repo_id} (revision: {revision}).")
    return snapshot / "build" / "torch-cpu"


def get_kernel(repo_id, *, revision=None):
    return get_local_kernel(install_kernel(repo_id, revision=revision).parent)


def _snapshot(place, revision):
    ref = place / "refs" / revision
    return place / "snapshots" / (ref.read_text() if ref.exists() else revision)
