"""Promises about what attnreg puts in the place of torch's functions: programs find torch's in it."""

import copy
import functools
import inspect
import pickle

import pytest
import torch
import torch.nn.functional as F
from support.processes import forked

import attnreg
from attnreg.core.aten import bypassed

pytestmark = pytest.mark.usefixtures("routers")

PLACES = [(place, name, torchs) for place, name, torchs, _ in bypassed._FUNCTIONS]


def model():
    """Return a module of torch's that refers to the function as modules of programs do."""
    module = torch.nn.Linear(2, 2)
    module.attend = F.scaled_dot_product_attention
    module.attend_causally = functools.partial(F.scaled_dot_product_attention, is_causal=True)
    return module


def recognised(_folder):
    attnreg.configure({"masks": "recognise"})
    return lambda: attnreg.configure({})


def strict(_folder):
    attnreg.configure({"strict": True})
    return lambda: attnreg.configure({})


def recorded(folder):
    recording = attnreg.record(folder / "calls.jsonl")
    recording.__enter__()
    return lambda: recording.__exit__(None, None, None)


ways = pytest.mark.parametrize("way", [recognised, strict, recorded])


def replaced():
    return [
        (getattr(place, name), place, name, torchs)
        for place, name, torchs in PLACES
        if getattr(place, name) is not torchs
    ]


@ways
def test_a_replacement_is_to_a_program_the_function_that_it_replaces(way, tmp_path):
    end = way(tmp_path)
    found = replaced()
    assert len(found) == (1 if way is recognised else 3)
    for ours, place, name, torchs in found:
        assert (ours == torchs, torchs == ours, ours != torchs) == (True, True, False)
        assert ours != print and hash(ours) == hash(torchs) and {torchs: 1}[ours] == 1
        assert (repr(ours), ours.__name__, ours.__qualname__) == (
            repr(torchs), torchs.__name__, torchs.__qualname__
        )  # fmt: skip
        assert (ours.__module__, ours.__doc__, ours.__self__) == (
            torchs.__module__, torchs.__doc__, torchs.__self__
        )  # fmt: skip
        assert copy.copy(ours) is ours and copy.deepcopy([ours])[0] is ours
        with pytest.raises(ValueError, match="no signature found for builtin"):
            inspect.signature(ours)
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            assert pickle.loads(pickle.dumps(ours, protocol)) is getattr(place, name)
    end()
    assert not replaced()
    for ours, _, _, torchs in found:
        assert pickle.loads(pickle.dumps(ours)) is torchs


@ways
def test_a_replacement_that_a_class_refers_to_is_no_method_of_it(way, tmp_path):
    x = torch.randn(1, 2, 8, 16)
    end = way(tmp_path)
    attended = type("Class", (), {"attend": F.scaled_dot_product_attention})().attend(x, x, x)
    end()
    torch.testing.assert_close(attended, F.scaled_dot_product_attention(x, x, x))


READ = """
import sys
sys.modules["attnreg"] = None
import torch
x, expected, modules = torch.load(sys.argv[1], weights_only=False)
for module in modules:
    assert module.attend is torch.nn.functional.scaled_dot_product_attention
    torch.testing.assert_close(module.attend_causally(x, x, x), expected)
print(len(modules))
"""


@ways
def test_a_module_made_meanwhile_is_read_by_a_process_without_attnreg(way, tmp_path):
    x = torch.randn(1, 2, 8, 16)
    end = way(tmp_path)
    made = model()
    attended = made.attend_causally(x, x, x)
    saved = pickle.loads(pickle.dumps(made))
    end()
    torch.save((x, attended, (made, saved, copy.deepcopy(made))), tmp_path / "model.pt")
    run = forked(READ, tmp_path / "model.pt", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert (run.stderr, run.stdout) == ("", "3\n")
