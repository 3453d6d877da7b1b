"""Promise: a backend that a package brings runs where something asks for it, and nowhere else."""

from importlib.metadata import EntryPoint

import pytest
import torch
import torch.nn.functional as F

import attnreg
from attnreg.core.contract.spec import Device
from attnreg.core.dispatch.declined import with_reasons
from attnreg.core.registry import discovery, entries
from attnreg.core.selection.decision import Policy, select
from attnreg.tools.measure import Case

FIRST = 10**6  # above the priority of every backend of attnreg's own


@pytest.fixture
def installed(monkeypatch, fake):
    """Install fakes as entry points of another package: name to what `fake` takes."""

    def install(**options):
        made = {name: fake(name, **given).backend for name, given in options.items()}

        class Point(EntryPoint):
            def load(self):
                return made[self.name]

        points = [Point(name, f"{name}_package:BACKEND", discovery.GROUP) for name in made]
        monkeypatch.setattr(discovery, "entry_points", lambda group: points)

    return install


def spec_on(device):
    return Case(name="small", lens_q=(64,), lens_k=(64,)).spec(device)


def packed(**options):
    q = torch.randn(9, 2, 16)
    offsets = torch.tensor([0, 4, 9], dtype=torch.int32)
    return attnreg.varlen_attn(q, q, q, offsets, offsets, 5, 5, **options)


def test_an_installed_backend_runs_nothing_that_does_not_ask_for_it(installed, ran):
    installed(mine={"priority": FIRST})
    packed()
    assert ran() == {"cpu": (1, 0)}
    # Only `math` of attnreg's own runs float64 here.
    q = torch.randn(9, 2, 16, dtype=torch.float64)
    offsets = torch.tensor([0, 4, 9], dtype=torch.int32)
    attnreg.varlen_attn(q, q, q, offsets, offsets, 5, 5, softcap=3.0)
    assert ran() == {"math": (1, 0)}


def test_an_installed_backend_runs_where_it_is_asked_for(installed, ran):
    installed(mine={"priority": -FIRST})
    packed(backend="mine")
    assert ran() == {"mine": (1, 0)}
    with attnreg.use_backend("mine"):
        packed()
    assert ran() == {"mine": (1, 0)}
    with attnreg.register_backend("mine"):
        packed()
        F.scaled_dot_product_attention(*[torch.randn(1, 2, 8, 16)] * 3)
    assert ran() == {"mine": (2, 0)}
    attnreg.configure({"devices": {"cpu": {"order": ["mine"]}}})
    packed()
    assert ran() == {"mine": (1, 0)}


def test_a_programs_own_object_and_a_call_that_an_asked_for_backend_refuses_keep_the_default_order(
    installed, fake, ran
):
    installed(mine={"priority": FIRST}, narrow={"head_dim": attnreg.Range(64, 64), "priority": FIRST})
    with attnreg.register_backend("narrow"):
        packed()
        assert ran() == {"cpu": (1, 0)}  # not the other package's
    with attnreg.register_backend(fake("object", priority=-FIRST).backend):
        packed()
    assert ran() == {"object": (1, 0)}


def test_priorities_rank_installed_backends_among_each_other_behind_all_others(installed):
    installed(low={"priority": -500}, high={"priority": 500})
    spec = spec_on(Device("cpu"))
    order = select(spec, "forward", entries(), Policy()).order
    assert order[-4:] == ("math", "flex", "high", "low")
    assert order[0] == "cpu"
    # One that declined a call stays where it was.
    judged = with_reasons(entries(), {"high": "no kernel for it"})
    assert select(spec, "forward", judged, Policy()).order == order


RANKS = {"cpu": 100, "FA4": 30, "cuDNN": 20, "FA2": 10, "FA3": 5, "efficient": 0, "math": -100, "flex": -200}


def test_the_priorities_that_the_docstring_names_are_those_of_the_backends():
    spec, text = spec_on(Device("cuda", (9, 0))), attnreg.Backend.__doc__
    for name, rank in RANKS.items():
        entry = entries()[name.casefold()]
        assert (entry.name, entry.priority(spec), entry.installed) == (name, rank, False)
        assert f"`{name}`" in text and str(rank) in text
