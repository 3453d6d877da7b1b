"""Promises of `attnreg.varlen_attn` about its backend: which one runs each direction, and who is refused."""

import functools
import threading

import pytest
import torch
from support import truth
from support.packed_calls import LENGTHS_K, LENGTHS_Q, assert_right, random_like, run_and_compare, total

import attnreg
from attnreg.core.dispatch import planning
from attnreg.errors import BackendUnavailableError, UnknownBackendError, UnsupportedInputError


def in_thread(function, *arguments):
    thread = threading.Thread(target=function, args=arguments)
    thread.start()
    thread.join()


# ---- a backend of the call


def test_a_backend_of_the_call_runs_both_directions_and_leads_a_scope(front, packed, mine, ran):
    given = packed((3, 4))
    attnreg.varlen_attn(*given, backend="MINE").sum().backward()
    assert ran() == {"mine": (1, 1)}
    attnreg.varlen_attn(*given).sum().backward()
    assert ran() == {"math": (1, 1)}
    with attnreg.use_backend("mine"):
        attnreg.varlen_attn(*given, backend="math").sum().backward()
    assert ran() == {"math": (1, 1)}


def test_a_backend_of_the_call_refuses_what_it_cannot_run(front, packed, fake, ran):
    given = packed((3, 4), grad=False)
    with attnreg.register_backend(fake("mine", causal=False, dtypes=("float16",)).backend):
        with pytest.raises(UnsupportedInputError) as error:
            attnreg.varlen_attn(*given, True, backend="mine")
        attnreg.varlen_attn(*given, True)
        assert list(ran()) != ["mine"]
    first, call, *rows = str(error.value).splitlines()
    assert first == "no attention backend can run this forward on cpu: backend='mine' allows no other backend"
    assert call.strip() == (
        "query (7, 4, 16) · key (7, 4, 16) · value (7, 4, 16) · float32 · packed, 2 sequences up to 4 x 4 "
        "· causal"
    )
    reasons = ("dtype must be float16, got float32", "is_causal must be False, got True")
    text = [" ".join(row.split()) for row in rows]
    assert text[:2] == [f"mine {reasons[0]}", reasons[1]]
    assert "math could run it" in text
    assert error.value.rejected["mine"] == reasons


def test_an_unknown_or_missing_backend_is_an_error_that_says_so(front, packed, fake):
    given = packed((3, 4))
    missing = fake("absent", unavailable=lambda: "no such package", install="pip install absent")
    with attnreg.register_backend(missing.backend, required=False):
        with pytest.raises(UnknownBackendError, match="no backend is named 'maths'; did you mean 'math'"):
            attnreg.varlen_attn(*given, backend="maths")
        with pytest.raises(BackendUnavailableError) as error:
            attnreg.varlen_attn(*given, backend="absent")
    assert str(error.value) == "absent can't load here: no such package; install it with: pip install absent"
    attnreg.varlen_attn(*given)


def test_a_backend_of_the_call_is_refused_for_the_backward_it_lacks(front, packed, fake, ran):
    given = packed((3, 4))
    with attnreg.register_backend(fake("half", backward=False).backend):
        with pytest.raises(UnsupportedInputError, match=r"half +has no backward"):
            attnreg.varlen_attn(*given, backend="half")
        assert ran() == {}


@pytest.mark.parametrize("option", ["seqused_k", "softcap"])
def test_a_forward_is_refused_as_a_forward_also_where_its_gradient_is_wanted(front, packed, fake, option):
    given = packed((3, 4))
    value = {"seqused_k": torch.tensor([3, 2], dtype=torch.int32), "softcap": 8.0}[option]
    with attnreg.register_backend(fake("mine", seqused_k=False, softcap=False).backend):
        with pytest.raises(UnsupportedInputError, match=f"mine +{option} must be") as error:
            attnreg.varlen_attn(*given, backend="mine", **{option: value})
        assert str(error.value).startswith("no attention backend can run this forward on cpu: backend='mine'")


def test_a_forward_that_lacks_only_its_backward_is_refused_with_the_reasons_of_the_backward(
    front, packed, fake, ran, monkeypatch
):
    given = packed((3, 4))
    monkeypatch.setenv("ATTNREG_STRICT", "1")
    attnreg.reload()
    with attnreg.register_backend(fake("half", backward=False).backend):
        with pytest.raises(UnsupportedInputError, match=r"half +has no backward") as error:
            attnreg.varlen_attn(*given)
        assert str(error.value).startswith(
            "no attention backend can run this forward on cpu, because none can run its backward: "
            "no backend of register_backend('half') can run it"
        )
        assert ran() == {}


# ---- the backward


def test_a_forward_only_backend_leaves_the_backward_to_another(front, packed, fake, ran):
    with attnreg.register_backend(fake("half", backward=False).backend):
        run_and_compare(packed(LENGTHS_Q, LENGTHS_K))
    calls = ran()
    assert calls["half"] == (1, 0)
    assert total(calls) == (1, 1)


def test_the_backward_is_given_the_forwards_results_and_arguments(front, packed, fake):
    recorder = fake("mine")
    *inputs, cu_q, cu_k, max_q, max_k = packed(LENGTHS_Q, LENGTHS_K)
    with attnreg.register_backend(recorder.backend):
        out = attnreg.varlen_attn(*inputs, cu_q, cu_k, max_q, max_k, scale=0.3, window_size=(3, 0))
        grad = random_like(out)
        out.backward(grad)
    ((*tensors, backward),), ((*_, forward),) = recorder.backwards, recorder.forwards
    expected, expected_lse = truth.varlen(*inputs, cu_q, cu_k, scale=0.3, window=(3, 0))
    assert all(map(torch.equal, tensors[:4], (grad, *inputs)))
    truth.assert_near(tensors[4], expected)
    truth.assert_near(tensors[5], expected_lse)
    assert (forward.scale, forward.window, forward.max_q, forward.max_k) == (0.3, (3, 0), 8, 8)
    without = {"cu_seqlens_q": None, "cu_seqlens_k": None}
    assert backward._replace(**without) == forward._replace(**without)
    assert torch.equal(backward.cu_seqlens_q, cu_q)
    assert torch.equal(backward.cu_seqlens_k, cu_k)


def test_a_registration_removed_before_the_backward_leaves_it_to_what_is_there(front, packed, fake, ran):
    given = packed((3, 4))
    handle = attnreg.register_backend(fake("mine").backend)
    out = attnreg.varlen_attn(*given)
    handle.remove()
    ran()
    assert_right(given[:3], out, truth.varlen(*given[:5]))
    assert "mine" not in ran()


# ---- scopes


@pytest.mark.parametrize("elsewhere", [False, True], ids=["outside of it", "in another thread"])
def test_a_scope_holds_for_the_backward(front, packed, mine, ran, elsewhere):
    given = packed((3, 4))
    with attnreg.use_backend("mine"):
        out = attnreg.varlen_attn(*given)
    if elsewhere:
        with attnreg.use_backend("math"):
            in_thread(out.sum().backward)
    else:
        out.sum().backward()
    assert ran() == {"mine": (1, 1)}
    assert given[0].grad is not None


def test_scopes_nest_and_the_backward_keeps_each(front, packed, mine, ran):
    given = packed((3, 4))
    with attnreg.use_backend("math"):
        with attnreg.use_backend("mine"):
            inner = attnreg.varlen_attn(*given)
        outer = attnreg.varlen_attn(*given)
    ran()
    inner.sum().backward()
    assert ran() == {"mine": (0, 1)}
    outer.sum().backward()
    assert ran() == {"math": (0, 1)}


def test_a_scope_of_one_thread_is_unknown_to_another(front, packed, mine, ran):
    with attnreg.use_backend("mine"):
        in_thread(attnreg.varlen_attn, *packed((3, 4), grad=False))
    assert ran() == {"math": (1, 0)}


# ---- deterministic algorithms


@pytest.fixture
def deterministic():
    """Ask for deterministic algorithms: `deterministic(warn_only=True)`."""
    planning._warn_once.cache_clear()
    yield functools.partial(torch.use_deterministic_algorithms, True)
    torch.use_deterministic_algorithms(False)


def test_a_backend_that_is_not_deterministic_gives_way_or_is_warned_of(
    front, packed, fake, ran, caplog, deterministic
):
    given = packed(LENGTHS_Q, LENGTHS_K)
    reason = "not deterministic, and deterministic algorithms are on"

    def warnings():  # a thread of an earlier test may log as well
        return [said for said in caplog.messages if "deterministic" in said]

    with attnreg.register_backend(fake("mine", deterministic=False).backend):
        for _ in range(3):  # calls before don't keep those after it from being warned of
            run_and_compare(given)
        assert warnings() == []
        deterministic(warn_only=True)
        for _ in range(3):
            run_and_compare(given)
        assert ran() == {"mine": (6, 6)}
        assert warnings() == [
            f"mine runs a {direction} that isn't deterministic, as torch only warns: {reason}"
            for direction in ("forward", "backward")
        ]
        deterministic()
        run_and_compare(given)
        refused = {(row.backend, row.reason) for row in attnreg.stats().fallbacks if row.count}
        calls = ran()
    assert refused == {("mine", reason)}
    assert "mine" not in calls and total(calls) == (1, 1)
