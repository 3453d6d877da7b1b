"""The flex backend on a CPU: torch's dense implementation of its two ops runs its graphs, uncompiled."""

import dataclasses

from support.packages import on_cpu

from attnreg.backends import flex
from attnreg.backends.flex import adapter, programs


def run_uncompiled(monkeypatch):
    """Have graphs run as they are; return what is compiled, by kind. Inductor compiles no such backward."""
    monkeypatch.setattr(programs, "_programs", {})
    monkeypatch.setattr(programs, "compile_graph", lambda graph, fakes: graph)
    monkeypatch.setattr(adapter, "_dense", {})
    return programs._programs


def backend():
    """Return flex under another name, declared for the CPU: the registry has the real one."""
    return dataclasses.replace(on_cpu(flex.BACKEND), name="flex by graphs")
