"""What `info` shows of PyTorch, this machine, and the backends on it, as plain data."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import entry_points
from typing import Any

import torch
from torch.nn.attention import SDPBackend
from torch.nn.attention import _registry as torch_registry

from attnreg import __version__
from attnreg.core import registry
from attnreg.core.contract.backend import UNTRIED
from attnreg.core.contract.spec import AttentionSpec, Device
from attnreg.core.dispatch import planning
from attnreg.core.registry.entry import Entry
from attnreg.core.selection.decision import Policy, default_source, select
from attnreg.errors import BackendUnavailableError
from attnreg.tools.lines import counted

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def versions() -> dict[str, str | None]:
    """Return the versions that belong in a bug report, and why there is no GPU if there is none."""
    cuda, hip = torch.version.cuda, getattr(torch.version, "hip", None)
    trouble = "torch finds none" if cuda or hip else "this torch is built without CUDA"
    return {
        "attnreg": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": cuda,
        "cudnn": str(torch.backends.cudnn.version() or "") or None,  # type: ignore[no-untyped-call]
        "gpu_trouble": None if torch.cuda.is_available() else trouble,
    }


def devices() -> Iterator[tuple[torch.device, dict[str, Any]]]:
    """Yield the CPU and every CUDA GPU, each with its name and compute capability."""
    threads = counted(torch.get_num_threads(), "thread")
    cpu = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {threads}"
    yield torch.device("cpu"), {"device": "cpu", "name": cpu, "compute_capability": None}
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        properties = torch.cuda.get_device_properties(device)
        name = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
        capability = f"{properties.major}.{properties.minor}"
        yield device, {"device": str(device), "name": name, "compute_capability": capability}


def of_torch() -> dict[str, Any]:
    """Return which kernels `F.scaled_dot_product_attention` uses without attnreg."""
    # On CUDA torch settles its order with its first choice; until then it reports another one.
    chosen = {str(device): _chosen_by_torch(device) for device, _ in devices()}
    order: list[int] = getattr(torch._C, "_get_sdp_priority_order", list)()
    return {
        "chooses": chosen,
        "priority": [_kernel(number) for number in order],
        "enabled": {
            name.removeprefix("mem_"): bool(getattr(torch.backends.cuda, f"{name}_sdp_enabled")())
            for name in ("flash", "mem_efficient", "cudnn", "math")
        },
        "flash_implementation": torch_registry.current_flash_attention_impl(),
        "flash_implementations": torch_registry.list_flash_attention_impls(),
    }


def _chosen_by_torch(device: torch.device) -> str:
    """Return the kernel that torch picks for a common call of SDPA: bfloat16, 8 heads of 128, causal."""
    try:
        query = torch.empty(1, 8, 256, 128, dtype=torch.bfloat16, device=device)
        return _kernel(torch._fused_sdp_choice(query, query, query, is_causal=True))
    except Exception as error:  # noqa: BLE001 - a GPU without free memory is no reason to fail
        return f"{type(error).__name__}: {error}"


def _kernel(number: int) -> str:
    return SDPBackend(number).name.removesuffix("_ATTENTION").lower()


def untouched_programs() -> str:
    """Return why a program that imports only torch can't use attnreg; empty if it can."""
    if not entry_points(group="torch.backends", name="attnreg"):
        return "attnreg isn't installed as a package, so torch can't load it"
    if os.environ.get(AUTOLOAD, "1") != "1":
        return f"{AUTOLOAD}={os.environ[AUTOLOAD]} keeps torch from loading it"
    return ""


def state(entry: Entry, in_force: Policy) -> tuple[str, str]:
    """Return a backend's state and the reason for it; loads the backend, as looking is not enough."""
    if by := in_force.disabled.get(entry.name.casefold()):
        return "disabled", f"by {by}"
    here = [planning.device_of(device) for device, _ in devices()]
    if entry.on_request and not any(in_force.asks_for(entry.name, device) for device in here):
        return "not loaded", "nothing asks for it on the devices here"
    backend = entry.open()
    experimental = backend is not None and backend.experimental
    try:
        entry.kernels()
    except BackendUnavailableError:
        state = "can't load" if entry.cause is None else "broken"
        reason = entry.unavailable().removeprefix("can't load here: ").removeprefix("failed to load: ")
        return state, f"{reason}; experimental: it {UNTRIED}" if experimental else reason
    return ("experimental", UNTRIED) if experimental else ("ready", "")


def order(device: Device, in_force: Policy) -> dict[str, Any]:
    """Return a device's backends in order of preference, each with its source, and what prevents calls."""
    entries = registry.entries()
    # Selection needs a call. Priorities may depend on it: the order shown is for this short call.
    spec = in_force.applied_to(AttentionSpec(
        device=device, dtype="float32", batch=1, max_q=1, max_k=1,
        heads_q=1, heads_k=1, head_dim=8, head_dim_v=8,
    ))  # fmt: skip
    problem = "" if in_force.lock is None else in_force.lock.problem(device)
    in_force = replace(in_force, lock=None)  # a lock has no row for this made-up call
    try:
        planning.decide(spec, "forward", entries, in_force)
    except BackendUnavailableError as error:
        problem = f"{error}; attention calls on this device are refused"
    sources = {
        name.casefold(): preference.source
        for preference in reversed(in_force.preferences)
        if preference.applies_to(device)
        for name in preference.names
    }
    backends = []
    for name in select(spec, "forward", entries, in_force).order:
        entry = entries[name.casefold()]
        has_device = entry.backend is not None and device.type in entry.backend.devices
        if has_device and name.casefold() not in in_force.disabled and not entry.unavailable():
            source = sources.get(name.casefold(), default_source(spec))
            backends.append({"backend": name, "source": source})
    return {"order": backends, "problem": problem}
