"""Promises of `attnreg.warmup`: each kind runs once, on the backends that its calls would run on."""

import logging
from dataclasses import replace

import pytest
import torch

import attnreg
from attnreg.core.contract.capabilities import Range
from attnreg.tools.warmup import FirstCall

KIND = {"dtype": "fp32", "heads_q": 4, "heads_k": 2, "head_dim": 16}
SPEC = attnreg.AttentionSpec(
    device=attnreg.Device("cpu"), dtype="float32", batch=3, max_q=5, max_k=7, heads_q=4, heads_k=2,
    head_dim=16, head_dim_v=8,
)  # fmt: skip


@pytest.fixture
def mine(fake):
    """Register a backend that runs anything and keeps what it was called with."""
    recorder = fake("mine", page_size=Range(1, 512), key_ranges=True)
    with attnreg.register_backend(recorder.backend):
        yield recorder


def shapes_of(arguments):
    return [tuple(x.shape) for x in arguments if isinstance(x, torch.Tensor)]


def refuse(*arguments):
    raise attnreg.UnsupportedInputError("no kernel for this one")


def crash(*arguments):
    raise RuntimeError("ptxas fatal")


def kernels_of(recorder, **changes):
    return lambda: attnreg.Kernels(**({"forward": recorder.forward, "backward": recorder.backward} | changes))


# What is run


def test_each_kind_runs_once_on_the_backend_that_its_calls_would_run_on(mine, ran):
    dense, packed = attnreg.warmup(KIND, {**KIND, "varlen": True, "dtype": torch.float16})
    for result, varlen in ((dense, False), (packed, True)):
        assert (result.backend, result.direction, result.error) == ("mine", "forward", None)
        assert result.kind.varlen is varlen and 0 <= result.seconds < 60
    assert [len(one) for one in map(shapes_of, (x[:3] for x in mine.forwards))] == [3, 3]
    assert shapes_of(mine.forwards[0][:3]) == [(2, 512, 4, 16), (2, 512, 2, 16), (2, 512, 2, 16)]
    assert shapes_of(mine.forwards[1][:3]) == [(1024, 4, 16), (1024, 2, 16), (1024, 2, 16)]
    assert [x[0].dtype for x in mine.forwards] == [torch.float32, torch.float16]
    assert mine.backwards == []
    assert ran() == {}  # the counters are for the calls of programs


def test_a_kind_that_needs_a_backward_runs_both_directions(mine):
    results = attnreg.warmup({**KIND, "head_dim_v": 8, "window": (-1, 0), "needs_backward": True})
    assert [(one.backend, one.direction) for one in results] == [("mine", "forward"), ("mine", "backward")]
    ((*_, forward),), ((*tensors, backward),) = mine.forwards, mine.backwards
    q, k, v = (2, 512, 4, 16), (2, 512, 2, 16), (2, 512, 2, 8)
    assert shapes_of(tensors) == [(2, 512, 4, 8), q, k, v, (2, 512, 4, 8), (2, 4, 512)]
    assert forward.window == backward.window == (-1, 0)


def test_a_spec_runs_with_its_own_lengths(mine):
    (result,) = attnreg.warmup(SPEC)
    assert result.kind == SPEC
    assert shapes_of(mine.forwards[0][:3]) == [(3, 5, 4, 16), (3, 7, 2, 16), (3, 7, 2, 8)]


def test_options_reach_the_kernel(mine):
    packed = {**KIND, "varlen": True}
    attnreg.warmup(
        {**packed, "seqused_k": True, "page_size": 64, "alibi": True, "softcap": 5.0, "num_splits": 3},
        {**KIND, "bias": True, "dropout": 0.5, "positive_scale": False, "needs_backward": True},
        {**packed, "grad_lse": True, "needs_backward": True},
        {**packed, "key_ranges": True, "ranges": 3},
    )
    paged, biased, plain, in_ranges = (call for *_, call in mine.forwards)
    assert in_ranges.key_ranges.shape == (1024, 3, 2)
    assert mine.forwards[0][1].shape[1:] == (64, 2, 16)
    assert paged.block_table is not None and paged.cu_seqlens_k is None
    assert paged.seqused_k.tolist() == [512, 512]
    assert (paged.softcap, paged.num_splits, paged.alibi_slopes.shape[-1]) == (5.0, 3, 4)
    assert (biased.dropout, biased.scale) == (0.5, 0.0)
    assert biased.attn_bias is not None and biased.rng_state is not None
    assert plain.grad_lse is None
    (*_, with_gradient) = mine.backwards[-1]
    assert with_gradient.grad_lse.shape == (4, 1024)


def test_a_gradient_of_the_bias_is_wanted_of_the_backward_and_with_dropout_of_the_forward_too(fake):
    recorder = fake("mine", bias_gradient=True)
    kind = {**KIND, "bias": True, "bias_gradient": True, "needs_backward": True}
    with attnreg.register_backend(recorder.backend):
        results = attnreg.warmup(kind, {**kind, "dropout": 0.5})
    assert [(one.backend, one.direction, one.error) for one in results] == [
        ("mine", direction, None) for direction in ("forward", "backward") * 2
    ]
    assert [call.bias_gradient for *_, call in recorder.forwards] == [False, True]
    assert [call.bias_gradient for *_, call in recorder.backwards] == [True, True]
    # A backend without that gradient runs the forward, and the next one the backward.
    plain = fake("plain")
    with attnreg.register_backend(plain.backend):
        results = attnreg.warmup(kind)
    assert [(one.backend, one.direction) for one in results] == [("plain", "forward"), ("math", "backward")]
    assert (len(plain.forwards), plain.backwards) == (1, [])


def test_sinks_are_given_to_a_kernel_that_counts_them_after_a_call_without(fake):
    counting, other = fake("counting", sinks=True), fake("other")
    kind = {**KIND, "varlen": True, "sinks": True}
    for one, given in ((counting, [False, True]), (other, [False])):
        with attnreg.register_backend(one.backend):
            (result,) = attnreg.warmup(kind, backend=one.backend.name)
        assert result.error is None
        assert [call.sinks is not None for *_, call in one.forwards] == given


def test_without_lengths_each_backend_runs_that_would_run_one_of_the_usual_lengths(fake):
    def long_alone(spec):
        return () if spec.max_k > 4096 else ("for long keys only",)

    long, rest = fake("long", refuses=long_alone), fake("rest")
    with attnreg.register_backend(rest.backend), attnreg.register_backend(long.backend):
        results = attnreg.warmup(KIND)
        # It is needed at 16,384 tokens, and can't be warmed at the few that are run.
        assert [(one.backend, one.error) for one in results] == [
            ("rest", None),
            ("long", "for long keys only"),
        ]
        assert len(rest.forwards) == 1 and long.forwards == []
        (result,) = attnreg.warmup({**KIND, "batch": 1, "max_q": 1, "max_k": 4097})
        assert (result.backend, result.error, len(long.forwards)) == ("long", None, 1)


def test_a_backend_that_is_named_runs_alone_whatever_is_preferred(mine, fake):
    other = fake("other")
    with attnreg.register_backend(other.backend):
        attnreg.warmup(KIND)
        (result,) = attnreg.warmup(KIND, backend="MINE")
        assert (result.backend, len(mine.forwards), len(other.forwards)) == ("mine", 1, 1)
        with attnreg.use_backend("mine"):
            (result,) = attnreg.warmup(KIND)
        assert (result.backend, len(mine.forwards), len(other.forwards)) == ("mine", 2, 1)


# What goes wrong


def test_an_unknown_backend_is_an_error_with_a_suggestion_and_nothing_runs(mine):
    with pytest.raises(attnreg.UnknownBackendError, match="did you mean 'mine'"):
        attnreg.warmup(KIND, backend="mien")
    assert mine.forwards == []


def test_a_backend_that_cannot_load_is_an_error_if_it_is_named(fake):
    absent = fake("absent", unavailable=lambda: "not installed")
    with (
        attnreg.register_backend(absent.backend, required=False),
        pytest.raises(attnreg.BackendUnavailableError, match="absent can't load here: not installed"),
    ):
        attnreg.warmup(KIND, backend="absent")


def test_a_kind_that_cannot_run_has_its_reasons_and_the_others_run(fake):
    picky = fake("picky", dtypes=("float16",))
    with attnreg.register_backend(picky.backend):
        refused, done = attnreg.warmup(KIND, {**KIND, "dtype": "fp16"}, backend="picky")
    assert refused == FirstCall(
        refused.kind, "forward", "picky", None, "dtype must be float16, got float32", refused=True
    )
    assert (done.backend, done.error) == ("picky", None)
    assert len(picky.forwards) == 1


@pytest.mark.parametrize(
    ("kernel", "refused", "error"),
    [(refuse, True, "no kernel for this one"), (crash, False, "RuntimeError: ptxas fatal")],
)
def test_the_next_backend_runs_where_a_kernel_does_not_run_it_after_all(fake, mine, kernel, refused, error):
    one = fake("one")
    one = fake("one", load=kernels_of(one, forward=kernel))
    with attnreg.register_backend(one.backend):
        first, second = attnreg.warmup(KIND)
        assert (first.backend, first.error, first.refused) == ("one", error, refused)
        assert (second.backend, second.error, len(mine.forwards)) == ("mine", None, 1)
        (alone,) = attnreg.warmup(KIND, backend="one")
    assert (alone.backend, alone.error, len(mine.forwards)) == ("one", error, 1)


def test_a_kind_that_no_backend_can_run_has_the_reasons_of_all(monkeypatch, fake):
    monkeypatch.setenv("ATTNREG_DISABLE", "math")
    monkeypatch.setenv("ATTNREG_STRICT", "1")
    attnreg.reload()
    with attnreg.register_backend(fake("picky", dropout=False).backend):
        (result,) = attnreg.warmup({**KIND, "dropout": 0.5, "bias": True})
    assert (result.backend, result.seconds, result.refused) == (None, None, True)
    headline, _, *rows = result.error.splitlines()
    assert headline.startswith("no attention backend can run this forward on cpu")
    reasons = dict(row.split(maxsplit=1) for row in rows)
    assert reasons["math"] == "disabled by ATTNREG_DISABLE"
    assert reasons["picky"] == "dropout_p must be 0, got 0.5"
    (result,) = attnreg.warmup(KIND, backend="math")
    assert (result.backend, result.error) == ("math", "disabled by ATTNREG_DISABLE")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ({**KIND, "heads": 4}, r"kind: got 'heads', expected a field of AttentionSpec; did you mean"),
        ({"heads_q": 4, "head_dim": 16}, "kind: got no dtype, expected it among the fields of a kind"),
        ({"dtype": "fp32", "head_dim": 16}, "kind: got no heads_q, expected"),
        ({**KIND, "heads_q": 3}, "heads: got 3 for the query and 2 for the key"),
        ({**KIND, "window": 5}, "kind: 'int' object is not iterable"),
        ({**KIND, "dtype": "bf17"}, "kind: got dtype 'bf17', expected that of a tensor"),
        ({**KIND, "device": "sm_90"}, "device: got 'sm_90', expected one of this machine"),
        (replace(SPEC, device=attnreg.Device.parse("sm_90")), "device: got 'sm_90', expected one of this"),
        ("FA4", "kind: got 'FA4', expected an AttentionSpec or a dict of its fields"),
    ],
)
def test_a_kind_that_is_none_is_an_error_before_anything_runs(mine, kind, message):
    with pytest.raises(attnreg.InvalidInputError, match=message):
        attnreg.warmup(KIND, kind)
    assert mine.forwards == []


def test_no_kind_and_no_such_device_are_errors(mine):
    with pytest.raises(attnreg.InvalidInputError, match="got no kind, expected at least one"):
        attnreg.warmup()
    for device in ("meta", "nonesuch", "cuda:99", 3.5):
        with pytest.raises(attnreg.InvalidInputError, match=f"device: got '{device}', expected one of this"):
            attnreg.warmup(KIND, device=device)
    (result,) = attnreg.warmup(replace(SPEC, device=attnreg.Device.parse("sm_90")), device="cpu")
    assert (str(result.kind.device), result.backend, len(mine.forwards)) == ("cpu", "mine", 1)


# What it says


def test_each_result_is_a_line_of_the_log(fake, mine, caplog):
    caplog.set_level(logging.INFO, "attnreg")
    one = fake("one")
    with attnreg.register_backend(fake("one", load=kernels_of(one, forward=crash)).backend):
        failed, done = attnreg.warmup(SPEC)
    lines = [(x.levelname, x.getMessage()) for x in caplog.records if x.getMessage().startswith("warmup: ")]
    assert lines == [("WARNING", f"warmup: {failed}"), ("INFO", f"warmup: {done}")]
    assert str(failed) == f"one didn't run the forward of {SPEC}: RuntimeError: ptxas fatal"
    assert str(done) == f"mine ran the forward of {SPEC} in {done.seconds:.2f} s"


def test_a_call_of_a_gpu_that_took_long_has_prepared_something():
    on_gpu = replace(SPEC, device=attnreg.Device("cuda", (9, 0)))
    slow = FirstCall(on_gpu, "forward", "FA4", 12.5)
    assert slow.prepared
    assert str(slow) == f"FA4 compiled, built or loaded, and ran the forward of {on_gpu} in 12.50 s"
    assert not FirstCall(on_gpu, "forward", "FA4", 0.001).prepared
    assert not FirstCall(SPEC, "forward", "math", 12.5).prepared  # of a CPU, whose calls take so long
    assert not FirstCall(on_gpu, "forward", "FA4", None, "no").prepared


def test_seconds_are_those_of_loading_and_of_the_call(fake, monkeypatch):
    times = [0.0]

    def taking(seconds, function):
        def run(*arguments):
            times[0] += seconds
            return function(*arguments)

        return run

    monkeypatch.setattr("attnreg.tools.warmup.time.perf_counter", lambda: times[0])
    one = fake("one")
    load = taking(3.0, kernels_of(one, forward=taking(4.0, one.forward)))
    with attnreg.register_backend(fake("one", load=load).backend):
        (result,) = attnreg.warmup(KIND)
    assert (result.backend, result.seconds) == ("one", 4.0)  # registering it has loaded it
