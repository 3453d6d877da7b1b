"""A name of another library leads to the backend that has its kernels, wherever a name can be given."""

import pytest

import attnreg
from attnreg.core.settings.other_names import backend_meant, device_meant
from attnreg.errors import ConfigError, UnknownBackendError

KNOWN = "cpu", "cuDNN", "efficient", "FA2", "FA3", "FA4", "flex", "math"
OWN = "; did you mean PyTorch's own choice? It runs where no backend is named: leave this name out."


@pytest.mark.parametrize(
    ("backend", "names"),
    [
        ("FA2", ["flash", "flash_attention_2", "FLASH_ATTN", "flash-attn", "SDPBackend.FLASH_ATTENTION"]),
        ("FA3", ["flash_attention_3", "flash_attn_3", "kernels-community/flash-attn3"]),
        ("FA4", ["flash_attention_4", "flash-attn-4", "FA5"]),
        ("cuDNN", ["cudnn_attention", "CUDNN_ATTENTION", "cudn"]),
        ("efficient", ["xformers", "mem_efficient", "effcient"]),
        ("flex", ["flex_attention", "FlexAttention"]),
        ("math", ["eager", "maht"]),
    ],
)
def test_a_name_of_another_library_or_a_misspelt_one_has_a_suggestion(backend, names):
    assert {backend_meant(name, KNOWN) for name in names} == {f"; did you mean {backend!r}?"}


def test_names_of_torchs_own_function_lead_to_no_backend_and_others_to_nothing():
    assert {backend_meant(name, KNOWN) for name in ("sdpa", "native", "torch_sdpa")} == {OWN}
    others = "nothing", "FlashMLA", "flash-linear-attention"
    assert {backend_meant(name, KNOWN) for name in others} == {""}


def test_only_backends_that_are_there_are_suggested_and_a_near_name_goes_first():
    assert backend_meant("flash_attention_3", ("FA2", "math")) == "; did you mean 'FA2'?"
    assert backend_meant("xformers", ("FA2", "math")) == ""
    assert backend_meant("my_flash2", (*KNOWN, "my_flash")) == "; did you mean 'my_flash'?"


@pytest.mark.parametrize(
    ("name", "meant"),
    [("H100", "sm_90"), ("sm90a", "sm_90"), ("gpu", "cuda"), ("cdua", "cuda"), ("mars", "")],
)
def test_a_device_has_a_suggestion(name, meant):
    assert device_meant(name, ("cpu", "cuda")) == (f"; did you mean '{meant}'?" if meant else "")


def test_a_device_of_a_registration_has_its_suggestion():
    for name, meant in (("h100", "sm_90"), ("gpu", "cuda")):
        with pytest.raises(attnreg.AttnregError, match=f"did you mean '{meant}'"):
            attnreg.register_backend("math", devices=name)


def test_errors_of_settings_and_of_calls_have_the_suggestion(tmp_path, monkeypatch):
    said = "did you mean 'FA2'?"
    with pytest.raises(UnknownBackendError, match=rf"no backend is named 'flash_attention_2'; {said}"):
        attnreg.register_backend("flash_attention_2")
    with pytest.raises(ConfigError, match=rf"disabled\[0\]: got 'flash_attn', expected one of .*; {said}"):
        attnreg.configure({"disabled": ["flash_attn"]})
    monkeypatch.setenv("ATTNREG_BACKEND", "flash")
    with pytest.raises(ConfigError, match=rf"ATTNREG_BACKEND: no backend is named 'flash'; {said}"):
        attnreg.reload()
