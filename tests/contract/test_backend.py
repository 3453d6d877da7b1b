"""Promises of the contract's own types: what a backend declares, and what its kernels are called with."""

import dataclasses

import pytest
import torch
from support.refusals import refusal

from attnreg import Backend, Call, Capabilities, Kernels, RegistrationError
from attnreg.core.contract.options import OPTIONS
from attnreg.core.registry.entry import Entry
from attnreg.errors import BackendUnavailableError

ON_CPU = Capabilities(devices=("cpu",), dtypes=("float32",))
ON_BOTH = Capabilities(devices=("cuda", "cpu"), dtypes=("float32",))
ON_CUDA = Capabilities(devices=("cuda",), dtypes=("float32",))


def load():
    return Kernels(forward=print)


LEAST = {"name": "mine", "forward": ON_CPU, "load": load}


def test_a_name_a_forward_and_a_load_function_make_a_backend():
    backend = Backend(**LEAST)
    assert (backend.name, backend.forward, backend.load) == ("mine", ON_CPU, load)
    assert (backend.backward, backend.refuses, load().backward) == (None, None, None)
    assert (backend.unavailable(), backend.version()) == (None, None)
    assert (backend.install, backend.priority, backend.experimental) == ("", 0, False)
    assert not backend.compiles


@pytest.mark.parametrize(
    ("forward", "backward", "devices"),
    [
        (ON_CPU, None, ("cpu",)),
        (ON_CPU, ON_CPU, ("cpu",)),
        (ON_CPU, ON_CUDA, ("cpu", "cuda")),
        (ON_BOTH, ON_CPU, ("cuda", "cpu")),
    ],
)
def test_a_backend_serves_the_devices_of_either_direction_each_once(forward, backward, devices):
    assert Backend(**LEAST | {"forward": forward, "backward": backward}).devices == devices


BAD = [
    *(("name", value, "a name without commas and outer spaces") for value in ("", " m", "FA2,FA4", None, 4)),
    *(
        ("name", value, "a name without line ends and control characters")
        for value in ("a\nb", "a\tb", "a\x00", "a\x1b[31mred", "a\u2028b", "a\u200bb", "a\x7f")
    ),
    *(("name", value, "a name without commas and outer spaces") for value in (" ", "\n", " \t ")),
    *(("forward", value, "Capabilities") for value in (None, {"devices": ("cpu",)}, Capabilities)),
    ("backward", True, "Capabilities or None"),
    *(("load", value, "a function") for value in (None, Kernels(print))),
    *(("unavailable", value, "a function") for value in (None, "not here")),
    ("version", "1.0", "a function"),
    ("refuses", "never", "a function"),
    ("cuts", (), "a function"),
    ("builds", True, "a function"),
    *(("install", value, "a string") for value in (None, ["pip", "install", "mine"])),
    *(("priority", value, "a whole number or a function") for value in ("high", None, 1.5)),
    ("experimental", "no", "True or False"),
    ("compiles", 1, "True or False"),
    ("stands_in", 1, "True or False"),
]


@pytest.mark.parametrize(("field", "value", "expected"), BAD)
def test_a_badly_typed_field_is_refused_by_name_with_what_was_got_and_expected(field, value, expected):
    message = f"Backend.{field}: got {value!r}, expected {expected}"
    assert refusal(lambda: Backend(**LEAST | {field: value}), kind=RegistrationError) == message


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ({"forward": 3, "backward": 4}, "Kernels.forward: got 3, expected a function"),
        ({"forward": None, "backward": print}, "Kernels.forward: got None, expected a function"),
        ({"forward": print, "backward": 2}, "Kernels.backward: got 2, expected a function or None"),
        ({"forward": print, "specialize": "x"}, "Kernels.specialize: got 'x', expected a function or None"),
        (
            {"forward": print, "replaces_native": True},
            "Kernels.replaces_native: got True, expected a function or None",
        ),
    ],
)
def test_kernels_that_are_no_functions_are_refused_when_they_are_put_together(functions, message):
    assert refusal(lambda: Kernels(**functions), kind=RegistrationError) == message


def test_every_field_is_checked():
    assert {field for field, *_ in BAD} == {field.name for field in dataclasses.fields(Backend)}


@pytest.mark.parametrize("name", ["mine", "FA4", "my kernel", "flash-attn 2.8", "Ünïcode"])
def test_any_other_text_is_a_valid_backend_name(name):
    assert Backend(**LEAST | {"name": name}).name == name


def test_a_backend_cannot_be_changed_behind_the_registrys_back():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Backend(**LEAST).priority = 100


def test_making_a_backend_neither_probes_nor_loads_it():
    def never():
        raise AssertionError("called at construction")

    backend = Backend(name="mine", forward=ON_CPU, load=never, unavailable=never, version=never)
    with pytest.raises(AssertionError, match="called at construction"):
        backend.load()


@pytest.mark.parametrize(
    ("window", "causal"),
    [((-1, -1), False), ((-1, 0), True), ((8, 0), True), ((0, 0), True), ((8, 8), False)],
)
def test_a_call_is_causal_if_its_window_ends_at_the_diagonal_and_varlen_if_it_has_offsets(window, causal):
    offsets = torch.tensor([0, 4], dtype=torch.int32)
    call = Call(1.0, 4, 4, window)
    assert (call.causal, call.varlen) == (causal, False)
    for options in ({"cu_seqlens_k": offsets}, {"block_table": offsets[None]}):
        varlen = call._replace(cu_seqlens_q=offsets, **options)
        assert (varlen.causal, varlen.varlen) == (causal, True)


def test_a_call_has_no_options_beyond_its_scale_and_lengths_by_default():
    others = {
        "scale": 0.5, "max_q": 4, "max_k": 8, "window": (-1, -1), "cu_seqlens_q": None, "cu_seqlens_k": None,
        "rng_state": None, "deterministic": False, "batch_invariant": False, "further": (),
    }  # fmt: skip
    options = {row.name: row.off for row in OPTIONS if row.name in Call._fields}
    assert Call(0.5, 4, 8)._asdict() == others | options


def test_what_replace_has_put_in_is_checked_when_the_backend_loads():
    backend = Backend(**LEAST | {"load": lambda: load()._replace(forward=3)})
    with pytest.raises(BackendUnavailableError, match=r"Kernels\.forward: got 3, expected a function"):
        Entry("mine", "a test", backend).kernels()
