"""Promises of `attnreg explain`: every option reaches the call, and every backend has its reasons."""

import json

import pytest
import torch
from support.options import NUMBERS, number_of

import attnreg

CALL = ("--q", "2,64,4,32", "--kv", "2,48,2,32", "--device", "cpu")


def spec(**options):
    usual = {
        "device": attnreg.Device("cpu"), "dtype": "bf16", "batch": 2, "max_q": 64, "max_k": 48,
        "heads_q": 4, "heads_k": 2, "head_dim": 32, "head_dim_v": 32,
    }  # fmt: skip
    return attnreg.AttentionSpec(**{**usual, **options})


@pytest.fixture(autouse=True)
def picky(fake, plugins):
    """Install a backend that refuses everything but float16, and one that never loads."""
    plugins(
        picky=fake("picky", dtypes=("float16",), gqa=False).backend,
        absent=fake("absent", unavailable=lambda: "not installed", install="pip install it").backend,
        ruined=ImportError("no such symbol"),
    )


def test_explain_prints_what_attnreg_explain_returns(call):
    result = call("explain", *CALL, "--causal", "--backward")
    assert result.exit_code == 0
    expected = attnreg.explain(spec(window=(-1, 0), needs_backward=True))
    assert result.output == f"{expected}\n"
    found = json.loads(call("explain", *CALL, "--causal", "--backward", "--json").stdout)
    assert found["runs"] is True
    assert found["backend"] == found["forward"]["backend"] == expected.backend
    assert found["backward"]["rejected"].keys() == expected.backward.rejected.keys()


def test_everything_is_behind_verbose(call):
    usual, verbose = call("explain", *CALL), call("explain", *CALL, "--verbose")
    assert "device must be" not in usual.output and "  for other devices: FA4, " in usual.output
    assert "device must be cuda, got cpu" in verbose.output
    assert verbose.output == f"{attnreg.explain(spec()).text(verbose=True)}\n"


def test_the_answer_is_the_first_line_and_names_the_line_of_the_settings(call, monkeypatch, tmp_path):
    file = tmp_path / "hopper.toml"
    file.write_text('log_level = "info"\n[devices."sm_90"]\norder = ["FA4"]\n')
    monkeypatch.setenv("ATTNREG_CONFIG", str(file))
    options = ("--q", "2,512,8,64", "--device", "sm_90", "--backward")
    assert call("explain", *options).output.splitlines()[0] == "FA4 forward and backward, by hopper.toml:3"


def test_a_causal_mask_that_is_not_that_of_is_causal_has_a_note(call):
    described = "note: the causal mask is aligned bottom-right here: the last query sees all keys."
    as_many_keys = ("explain", "--q", "2,64,4,32", "--device", "cpu", "--causal")
    assert described in call("explain", *CALL, "--causal").output
    for same in (as_many_keys, ("explain", *CALL), ("explain", *CALL, "--causal", "--varlen")):
        assert described not in call(*same).output


@pytest.mark.parametrize("options", ["--bias --softcap 3", "--bias --sinks", "--varlen --bias"])
def test_of_a_call_that_no_function_makes_no_function_is_said_to_run_torchs_kernel(call, options):
    output = call("explain", *CALL, *options.split()).output
    assert output.startswith(("cpu forward, by ", "math forward, by "))
    assert "note: no function makes such a call: " in output


@pytest.mark.parametrize("scale", ["nan", "inf"])
def test_a_scale_that_is_no_number_is_refused(call, scale):
    result = call("explain", *CALL, "--scale", scale)
    assert result.exit_code == 2
    assert f"--scale: got {scale}, expected a finite number" in result.stderr


FLAGS = ("bias", "alibi", "seqused-k", "grad-lse", "deterministic")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--window 7,3", {"window": [7, 3]}),
        ("--window 7,3 --causal", {"window": [7, 0]}),
        ("--window 900,900", {"window": [-1, -1]}),
        ("--varlen", {"varlen": True, "tokens_q": 128}),
        ("--varlen --tokens-q 100 --tokens-k 90", {"tokens_q": 100, "tokens_k": 90}),
        ("--scale 0.5", {"positive_scale": True}),
        ("--scale -1", {"positive_scale": False}),
        ("--scale 1e-46", {"positive_scale": False}),
        *((f"--{name}", {name.replace("-", "_"): True}) for name in FLAGS),
        ("--dropout 0.1", {"dropout": 0.1}),
        ("--paged 16", {"page_size": 16}),
        ("--varlen --key-ranges 9", {"key_ranges": True, "ranges": 9}),
        ("--head-dim-v 64", {"head_dim": 32, "head_dim_v": 64}),
        ("--num-splits 4", {"num_splits": 4}),
        ("--softcap 30", {"softcap": 30.0}),
        ("--option softcap=30 --option alibi_slopes", {"softcap": 30.0, "alibi": True}),
        ("--capture", {"capturing": True}),
        ("--backward", {"needs_backward": True}),
        ("--grad-lse", {"needs_backward": True}),
        ("--dtype half", {"dtype": "float16"}),
        ("--dtype float64", {"dtype": "float64"}),
        ("--device sm_100", {"device": {"type": "cuda", "capability": [10, 0]}}),
    ],
)
def test_every_option_of_explain_reaches_the_spec(call, options, expected):
    found = json.loads(call("explain", *CALL, *options.split(), "--json").stdout)["spec"]
    device = {"type": found["device"]["type"], "capability": found["device"]["capability"]}
    assert {**found, "device": device}.items() >= expected.items()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("softcup=3", "--option: there is no option 'softcup'; did you mean 'softcap'?"),
        ("softcap=x", "--option: got 'softcap=x', expected NAME=NUMBER, or the name of a tensor alone"),
    ],
)
def test_an_option_that_is_misspelt_or_no_number_is_wrong_usage(call, option, message):
    result = call("explain", *CALL, "--option", option)
    assert (result.exit_code, message in result.stderr) == (2, True)


def test_every_field_of_a_spec_has_an_option(call):
    plain = json.loads(call("explain", *CALL, "--json").stdout)["spec"]
    everything = (
        "--q 3,65,8,40 --kv 3,49,4,40 --device sm_90 --dtype fp32 --window 7,3 --varlen --tokens-q 100"
        " --tokens-k 90 --dropout 0.1 --bias --alibi --paged 16 --seqused-k --key-ranges 2 --head-dim-v 64"
        " --score-mod --mask-mod"
        " --num-splits 4 --softcap 30 --grad-lse --sinks --deterministic --capture --backward --scale 0"
        " --json"
    )
    others = [row for row in NUMBERS if row.field in plain and row.name.replace("_", "-") not in everything]
    everything += "".join(f" --option {row.name}={number_of(row)}" for row in others)
    found = json.loads(call("explain", *everything.split()).stdout)["spec"]
    # A setting, and the options that have no field.
    assert {field for field in plain if plain[field] == found[field]} == {"batch_invariant", "further"}


def test_explain_without_a_device_is_about_this_machine(call):
    result = call("explain", "--q", "1,8,2,64")
    assert f"  on {'cuda' if torch.cuda.is_available() else 'cpu'}" in result.output


def test_a_gpu_that_is_not_there_is_wrong_usage(call, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    result = call("explain", "--q", "1,8,2,64", "--device", "cuda:7")
    assert result.exit_code == 2
    assert "--device: got 'cuda:7', expected cuda:0 or cuda:1" in result.stderr


def test_explain_obeys_or_refuses_a_backend_as_a_call_would(call):
    refused = call("explain", *CALL, "--backend", "PICKY")
    assert refused.exit_code == 1
    assert refused.output.startswith(
        "no attention backend can run this forward on cpu: --backend picky allows"
    )
    data = call("explain", *CALL, "--backend", "PICKY", "--json")
    found = json.loads(data.stdout)
    assert (data.exit_code, found["runs"], found["backend"]) == (1, False, None)
    assert found["forward"]["refusal"] == "--backend picky allows no other backend"
    obeyed = call("explain", *CALL, "--backend", "math", "--json")
    assert obeyed.exit_code == 0
    assert json.loads(obeyed.stdout)["source"] == "--backend math"
    missing = call("explain", *CALL, "--backend", "absent")
    assert missing.exit_code == 1
    assert "--backend absent: absent can't load here: not installed" in missing.output


@pytest.mark.parametrize("options", ["--prefer picky,math", "--prefer picky --prefer Math"])
def test_explain_prefers_as_use_backend_does(call, options):
    result = call("explain", *CALL, *options.split())
    assert result.exit_code == 0
    assert result.output.startswith("math forward, by --prefer picky,math\n")
