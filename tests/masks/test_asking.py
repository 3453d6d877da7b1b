"""Promises about who asks for masks to be recognised, and where one reads what they were recognised as."""

import json
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from support import dense
from support.command_line import invoke
from support.processes import COMMAND, forked
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

import attnreg
from attnreg.core.dispatch.state import FEW_SHAPES
from attnreg.errors import ConfigError
from attnreg.masks import serving
from attnreg.tools.cli.run import _print_stats

SDPA = F.scaled_dot_product_attention
PADDED = (torch.arange(6) < torch.tensor([4, 6])[:, None])[:, None, None]

# What a program does that knows nothing of attnreg.
PROGRAM = """
import torch
mask = (torch.arange(6) < torch.tensor([4, 6])[:, None])[:, None, None]
x = torch.randn(2, 4, 6, 8, requires_grad=True)
torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask).sum().backward()
"""
ASKS_STATS = (
    PROGRAM
    + """
import attnreg
print([(row.seen, row.count) for row in attnreg.stats().masks])
"""
)


def attend():
    F.scaled_dot_product_attention(*dense.qkv(), attn_mask=PADDED)


@pytest.mark.parametrize("by", ["a variable", "a file"])
def test_a_program_that_imports_only_torch_is_asked_for_from_outside(by, tmp_path):
    file = tmp_path / "attnreg.toml"
    file.write_text('masks = "recognise"\n', encoding="utf-8")
    done = forked(
        ASKS_STATS,
        **({"ATTNREG_MASKS": "recognise"} if by == "a variable" else {"ATTNREG_CONFIG": str(file)}),
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "[('padded keys', 1)]\n"), done.stderr


def test_where_nobody_asks_torchs_function_is_its_own_and_the_room_is_not_imported():
    looks = "import sys; print('attnreg.masks' in sys.modules, torch.nn.functional.{0} is torch._C._nn.{0})"
    looks = looks.format("scaled_dot_product_attention")
    for variables in ({}, {"ATTNREG_BACKEND": "math"}, {"ATTNREG_MASKS": "as_given"}):
        done = forked(f"{PROGRAM}\n{looks}", **variables)
        assert (done.returncode, done.stdout) == (0, "False True\n"), done.stderr


@pytest.mark.usefixtures("routers")
def test_settings_switch_it_on_and_off_and_the_environment_is_stronger(monkeypatch, seen, tmp_path):
    file = tmp_path / "attnreg.toml"
    file.write_text('masks = "recognise"\n', encoding="utf-8")
    attend()
    assert (seen(), F.scaled_dot_product_attention) == ({}, SDPA)
    attnreg.configure(file)
    attend()
    assert seen() == {"padded keys": 1}
    attnreg.configure(attnreg.Settings(masks="as_given"))
    attend()
    assert (seen(), F.scaled_dot_product_attention) == ({}, SDPA)
    monkeypatch.setenv("ATTNREG_MASKS", "recognise")
    attnreg.reload()
    attend()
    assert seen() == {"padded keys": 1}
    with pytest.raises(ConfigError, match="masks: got 'always', expected 'as_given', 'large' or 'recognise'"):
        attnreg.configure({"masks": "always"})
    attend()
    assert seen() == {"padded keys": 1}


@pytest.fixture
def as_on_a_gpu(monkeypatch, routers):
    """Have calls of at least two sequences be large, and torch be a build for CUDA."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(serving, "is_large", lambda query, key, runs: len(query) > 1)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("policy", ["measured", "adaptive"])
def test_a_program_that_asks_for_measured_choices_gets_large_masks_recognised(policy, seen, ran):
    attnreg.configure({"policy": policy})
    for size, expected in ((2, {"padded keys": 1}), (1, {})):
        inputs = dense.qkv(batch=size)
        out = F.scaled_dot_product_attention(*inputs, attn_mask=PADDED[:size])
        torch.testing.assert_close(out, torch._C._nn.scaled_dot_product_attention(*inputs, PADDED[:size]))
        assert seen() == expected
    found = attnreg.explain(*dense.qkv(), attn_mask=PADDED)
    assert any(note.startswith("attn_mask is recognised as padded keys") for note in found.notes)
    in_force = json.loads(invoke("info", "--json").stdout)["settings"]["in_force"]
    assert {"setting": "masks", "value": "large", "source": "the policy"} in in_force


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("named", [False, True], ids=["by place", "by name"])
def test_of_a_large_call_tensors_mask_and_sizes_are_checked_once(monkeypatch, named):
    checks, inputs = [], dense.qkv()

    def count(name):
        check = getattr(serving, name)
        monkeypatch.setattr(serving, name, lambda *given: checks.append(name) or check(*given))

    for name in ("is_plain", "is_large", "_has_mask"):
        count(name)
    attnreg.configure({"policy": "measured"})
    given = dict(zip(("query", "key", "value"), inputs, strict=True)) if named else {}
    out = F.scaled_dot_product_attention(*(() if named else inputs), **given, attn_mask=PADDED)
    stats = attnreg.stats().to_dict()
    assert sorted(checks) == ["_has_mask", "is_large", "is_plain"]
    torch.testing.assert_close(out, torch._C._nn.scaled_dot_product_attention(*inputs, PADDED))
    assert stats["masks"] == [{"seen": "padded keys", "count": 1}]
    assert stats["calls"] == {"cpu": {"forward": 1, "backward": 0}}


UNMASKED = [((), {}), ((None,), {}), ((), {"attn_mask": None, "is_causal": True})]


@pytest.mark.usefixtures("compiled_routers", "as_on_a_gpu")
@pytest.mark.parametrize(
    ("by_place", "named", "is_looked_at"),
    [*((*call, False) for call in UNMASKED), ((PADDED,), {}, True), ((), {"attn_mask": PADDED}, True)],
)
def test_a_call_without_a_mask_to_look_at_does_not_enter_the_wrappers_code(
    by_place, named, is_looked_at, seen
):
    attnreg.configure({"policy": "measured"})
    inputs, entered = [x.detach() for x in dense.qkv()], []
    for _ in range(3):
        F.scaled_dot_product_attention(*inputs, *by_place, **named)
    assert seen() == ({"padded keys": 3} if is_looked_at else {})
    sys.setprofile(lambda frame, event, _: event == "call" and entered.append(frame.f_code.co_name))
    try:
        out = F.scaled_dot_product_attention(*inputs, *by_place, **named)
    finally:
        sys.setprofile(None)
    assert ("looking" in entered) == is_looked_at
    torch.testing.assert_close(out, torch._C._nn.scaled_dot_product_attention(*inputs, *by_place, **named))


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(("by_place", "named"), UNMASKED)
def test_a_function_mode_sees_a_call_without_a_mask_to_look_at(by_place, named):
    class Doubles(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            out = function(*args, **kwargs or {})
            return out * 2 if function is F.scaled_dot_product_attention else out

    attnreg.configure({"policy": "measured"})
    inputs = dense.qkv()
    plain = F.scaled_dot_product_attention(*inputs, *by_place, **named)
    with Doubles():
        doubled = F.scaled_dot_product_attention(*inputs, *by_place, **named)
    torch.testing.assert_close(doubled, plain * 2)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("settings", [{"policy": "order"}, {"policy": "measured", "masks": "as_given"}, {}])
def test_other_programs_keep_their_masks(settings, seen):
    attnreg.configure(settings)
    attend()
    assert (seen(), F.scaled_dot_product_attention) == ({}, SDPA)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("strict", [False, True])
def test_a_preferred_backend_that_takes_no_packed_calls_gets_the_mask(fake, seen, strict):
    backend = fake("dense only", varlen=False, bias=True).backend
    attnreg.configure({"policy": "measured", "strict": strict})
    with attnreg.register_backend(backend):
        attend()
        attend()
        assert attnreg.stats().calls == {"dense only": {"forward": 2, "backward": 0}}
        assert seen() == {"as given: dense only can't run its packed forward": 2}


@pytest.mark.usefixtures("routers")
def test_nested_tensors_and_modes_see_torchs_call_before_sizes_are_read(monkeypatch, seen):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(serving, "is_large", lambda query, key, runs: pytest.fail("read"))
    attnreg.configure({"policy": "measured"})
    with FakeTensorMode() as mode:
        F.scaled_dot_product_attention(*map(mode.from_tensor, dense.qkv()), mode.from_tensor(PADDED))
    nested = torch.nested.nested_tensor([torch.randn(4, 6, 8)] * 2, layout=torch.jagged).transpose(1, 2)
    with pytest.raises(ValueError, match="Masks are not yet supported"):
        F.scaled_dot_product_attention(nested, nested, nested, attn_mask=PADDED)
    assert seen() == {}


def test_without_routers_masks_are_torchs(seen, recognise):
    attend()
    attnreg.uninstall()
    attend()
    assert (seen(), F.scaled_dot_product_attention) == ({"padded keys": 1}, SDPA)
    attnreg.install()
    attend()
    assert seen() == {"padded keys": 1}


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_lockfile_knows_calls_with_their_masks(tmp_path):
    trace, lock = tmp_path / "trace.jsonl", tmp_path / "lock.json"
    with attnreg.record(trace), attnreg.use_backend("cpu"):
        F.scaled_dot_product_attention(*dense.qkv())
    assert invoke("lock", "--from", trace, "--out", lock).exit_code == 0
    attnreg.configure({"policy": "measured", "lock": str(lock)})
    assert F.scaled_dot_product_attention is SDPA


@pytest.mark.usefixtures("routers")
def test_without_cuda_no_mask_is_large(seen):
    attnreg.configure({"policy": "measured"})
    attend()
    assert (seen(), F.scaled_dot_product_attention) == ({}, SDPA)


def test_smaller_calls_are_large_once_a_program_has_brought_more_than_a_few_shapes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", int)
    attnreg.configure({"policy": "measured"})

    def is_large(length, batch=1, is_cuda=True):
        x = types.SimpleNamespace(is_cuda=is_cuda, shape=(batch, 2, length, 8), dim=lambda: 4)
        return serving.is_large(x, x, True)

    assert (is_large(4096), is_large(4095), is_large(4096, is_cuda=False)) == (True, False, False)
    others = [is_large(length) for length in range(2000, 2000 + FEW_SHAPES - 1)]
    repeated = [is_large(2000) for _ in range(9)]
    assert not any(others + repeated)
    assert not any(is_large(length) for length in range(100, 120))  # which don't count
    assert is_large(1449) and is_large(2000) and is_large(725, batch=4) and not is_large(1448)
    attnreg.configure({"policy": "adaptive"})
    assert not is_large(2000)


@pytest.fixture
def as_if_on_a_gpu(monkeypatch, routers):
    """Have tensors count as a GPU's, and 32 pairs of a query and a key be many after a few shapes."""
    is_large = serving.is_large

    def ask(query, key, *rest):
        sized = (types.SimpleNamespace(is_cuda=True, shape=x.shape, dim=x.dim) for x in (query, key))
        return is_large(*sized, *rest)

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", int)
    monkeypatch.setattr(serving, "is_large", ask)
    monkeypatch.setattr(serving, "LARGE_PAIRS_OF_NEW_SHAPES", 32)


def of_length(length):
    """Return a call's tensors, and a mask that hides the last key."""
    return dense.qkv(length, length), (torch.arange(length) < length - 1)[None, None, None]


@pytest.mark.usefixtures("as_if_on_a_gpu")
def test_a_call_that_is_explained_counts_for_no_shape_and_is_told_what_it_would_get(seen):
    attnreg.configure({"policy": "measured"})
    for length in range(8, 8 + 2 * FEW_SHAPES):
        inputs, mask = of_length(length)
        attnreg.explain(*inputs)
        assert "recognised" not in str(attnreg.explain(*inputs, attn_mask=mask))
    for length in range(8, 8 + FEW_SHAPES):
        inputs, mask = of_length(length)
        F.scaled_dot_product_attention(*inputs, attn_mask=mask)
    assert seen() == {}
    inputs, mask = of_length(100)
    assert "attn_mask is recognised as padded keys" in str(attnreg.explain(*inputs, attn_mask=mask))
    out = F.scaled_dot_product_attention(*inputs, attn_mask=mask)
    assert attnreg.stats().calls == {"cpu": {"forward": 1, "backward": 0}}
    assert seen() == {"padded keys": 1}
    torch.testing.assert_close(out, torch._C._nn.scaled_dot_product_attention(*inputs, mask))


@pytest.mark.filterwarnings("error::torch.jit.TracerWarning", "ignore:`torch.jit:DeprecationWarning")
@pytest.mark.usefixtures("as_if_on_a_gpu")
def test_calls_in_a_trace_have_no_sizes_to_count(seen):
    attnreg.configure({"policy": "measured"})
    inputs, mask = of_length(8)

    def layers(query, key, value, mask):
        for _ in range(FEW_SHAPES + 1):
            query = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return query

    torch.jit.trace(layers, (*inputs, mask), check_trace=False)
    F.scaled_dot_product_attention(*inputs, attn_mask=mask)
    assert seen() == {}


@pytest.mark.usefixtures("as_on_a_gpu")
def test_several_short_packed_calls_run_only_where_all_masks_are_recognised(seen):
    mask = PADDED & torch.ones(6, 6).tril().bool()  # queries in the padding see all keys
    for masks, words in (("large", "as given: 2 packed calls may take longer than torch's kernel"),
                         ("recognise", "padded keys, causal")):  # fmt: skip
        attnreg.configure({"masks": masks})
        F.scaled_dot_product_attention(*dense.qkv(), attn_mask=mask)
        assert seen() == {words: 1}


def test_what_others_have_put_in_place_of_torchs_function_stays(monkeypatch, routers):
    def theirs(*arguments, **options):
        return SDPA(*arguments, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", theirs)
    attnreg.configure({"masks": "recognise"})
    assert F.scaled_dot_product_attention is theirs


EXPLAINED = {
    "padding": (
        PADDED,
        "attn_mask is recognised as padded keys: 100% of the queries and 83% of the keys count",
    ),
    "causal": (
        torch.ones(6, 6).tril().bool(),
        "attn_mask is recognised as causal: the call runs as one without a mask",
    ),
    "a gap": (
        torch.eye(6).bool().logical_not(),
        "attn_mask is passed on as given: some query sees keys with gaps between them",
    ),
}


@pytest.mark.usefixtures("recognise")
@pytest.mark.parametrize(("mask", "note"), EXPLAINED.values(), ids=EXPLAINED)
def test_explain_says_what_a_mask_is_and_which_backend_runs_what_takes_its_place(mask, note, ran):
    inputs = dense.qkv()
    found = attnreg.explain(*inputs, attn_mask=mask)
    assert note in found.notes
    assert f"note: {note}" in str(found)
    assert attnreg.stats().masks == ()
    dense.with_gradients(F.scaled_dot_product_attention(*inputs, attn_mask=mask), inputs)
    assert ran() == {"cpu": (1, 1)}
    assert (found.forward.backend, found.backward.backend) == ("cpu", "cpu")
    assert found.spec.varlen is (mask is PADDED)


@pytest.mark.usefixtures("recognise")
def test_explain_names_every_packed_call_of_a_mask():
    mask = PADDED & torch.ones(6, 6).tril().bool()
    found = attnreg.explain(*dense.qkv(), attn_mask=mask)
    assert found.spec.window == (-1, 0)
    assert [note.split(":")[0] for note in found.notes[:2]] == [
        "attn_mask is recognised as padded keys, causal", "this packed call runs as well"
    ]  # fmt: skip


def test_explain_says_nothing_of_masks_where_nobody_asks(routers):
    found = attnreg.explain(*dense.qkv(), attn_mask=PADDED)
    assert not any("attn_mask" in note for note in found.notes)
    assert not found.spec.varlen


def test_explain_on_the_command_line_says_where_to_look(monkeypatch):
    described = ("explain", "--device", "cpu", "--dtype", "fp32", "--q", "2,6,4,8", "--bias", "--json")
    said = "a boolean mask with structure is recognised"
    assert said not in invoke(*described).stdout
    monkeypatch.setenv("ATTNREG_MASKS", "recognise")
    attnreg.reload()
    assert said in " ".join(json.loads(invoke(*described).stdout)["notes"])


def test_info_says_that_masks_are_recognised_and_by_whom(monkeypatch):
    monkeypatch.setenv("ATTNREG_MASKS", "recognise")
    attnreg.reload()
    found = json.loads(invoke("info", "--json").stdout)["settings"]
    assert {"setting": "masks", "value": "recognise", "source": "ATTNREG_MASKS"} in found["in_force"]
    assert any(row["name"] == "ATTNREG_MASKS" and row["purpose"] for row in found["variables"])


@pytest.mark.usefixtures("recognise")
def test_stats_on_the_command_line_list_what_masks_were(capsys):
    attend()
    attend()
    _print_stats()
    printed = " ".join(capsys.readouterr().err.split())
    assert "What ran backend forward backward cpu 2 0" in printed
    assert printed.endswith("What boolean masks were mask calls padded keys 2")
    assert attnreg.stats().to_dict()["masks"] == [{"seen": "padded keys", "count": 2}]


def test_a_program_that_is_run_with_stats_says_them_at_its_end(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(PROGRAM, encoding="utf-8")
    done = forked(COMMAND, "run", "--stats", file, ATTNREG_MASKS="recognise")
    assert done.returncode == 0, done.stderr
    assert "What boolean masks were mask calls padded keys 1" in " ".join(done.stderr.split())
