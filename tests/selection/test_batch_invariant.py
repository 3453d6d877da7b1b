"""Promises of `policy = "batch_invariant"`: neither a sequence's bits nor its backend depend on its batch."""

import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F
from support.command_line import invoke
from support.known import know
from support.policies import SPEC, decided

import attnreg
from attnreg.backends import cpu as cpu_backend
from attnreg.backends import math as math_backend
from attnreg.core import registry
from attnreg.core.contract.spec import Device
from attnreg.core.dispatch.counters import Fallback
from attnreg.core.dispatch.state import state
from attnreg.core.policy import current as policy
from attnreg.core.policy import ranks
from attnreg.errors import UnsupportedInputError

pytestmark = pytest.mark.usefixtures("routers")

POLICY = 'policy = "batch_invariant"'
BY = f"default order for cpu, {POLICY}"
REASON = "not batch-invariant, and policy is batch_invariant"


@pytest.fixture
def known(monkeypatch, fake):
    """Know a fake that isn't batch-invariant, two that are, one of them for small batches, and math."""
    narrow = {"batch": attnreg.Range(0, 2), "batch_invariant": True}
    fakes = {
        "varying": fake("varying", priority=900),
        "narrow": fake("narrow", priority=800, **narrow),
        "wide": fake("wide", priority=700, batch_invariant=True),
    }
    know(monkeypatch, *(one.backend for one in fakes.values()), math_backend.BACKEND)
    return fakes


@pytest.fixture
def in_force(monkeypatch):
    monkeypatch.setenv("ATTNREG_POLICY", "batch_invariant")
    attnreg.reload()


def attend(*lengths, heads=2, **options):
    tokens = torch.randn(sum(lengths), heads, 16)
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    return attnreg.varlen_attn(
        tokens, tokens, tokens, offsets, offsets, max(lengths), max(lengths), **options
    )


def refused(run, *arguments, **options):
    with pytest.raises(UnsupportedInputError) as error:
        run(*arguments, **options)
    return str(error.value)


@pytest.mark.usefixtures("known")
def test_the_default_order_of_invariant_backends_decides_whoever_sets_the_policy(monkeypatch, write, ran):
    for put in (
        lambda: attnreg.configure(write(POLICY)),
        lambda: attnreg.configure({"policy": "batch_invariant"}),
        lambda: (monkeypatch.setenv("ATTNREG_POLICY", "batch_invariant"), attnreg.reload()),
    ):
        put()
        assert decided() == ("narrow", BY)
        assert attnreg.explain(SPEC).rejected["varying"] == (REASON,)
        attend(3, 5)
        F.scaled_dot_product_attention(*torch.randn(3, 1, 2, 8, 16))  # not torch's own kernel
        assert ran() == {"narrow": (2, 0)}
        attnreg.configure({})
    assert policy.current().tables is None
    assert ["policy", "batch_invariant", "ATTNREG_POLICY"] in [
        [row["setting"], row["value"], row["source"]]
        for row in json.loads(invoke("info", "--json").output)["settings"]["in_force"]
    ]


@pytest.mark.usefixtures("known", "in_force")
def test_a_backend_that_is_asked_for_and_is_not_invariant_is_declined_with_the_reason(monkeypatch, ran):
    with attnreg.use_backend("varying"):
        attend(4)
    assert attnreg.stats().fallbacks == (Fallback("varying", REASON, 1),)
    assert ran() == {"narrow": (1, 0)}
    assert REASON in refused(attend, 4, backend="varying")
    monkeypatch.setenv("ATTNREG_STRICT", "1")
    attnreg.reload()
    with attnreg.use_backend("varying"):
        assert REASON in refused(attend, 4)
    with attnreg.use_backend("wide"):
        attend(4)
    assert ran()["wide"] == (1, 0)


@pytest.mark.usefixtures("known")
def test_no_backend_runs_a_batch_that_would_run_another_batch_elsewhere(in_force, ran):
    attend(4, 5)
    message = refused(attend, 4, 5, 6)
    assert message.startswith(
        "no attention backend can run this forward on cpu: "
        f"by {POLICY} narrow runs such calls, whatever the batch"
    )
    assert "batch must be 0 to 2, got 3" in message
    assert not attnreg.explain(dataclasses.replace(SPEC, batch=3)).runs
    with attnreg.use_backend("wide"):
        attend(4, 5, 6)
    assert ran() == {"narrow": (1, 0), "wide": (1, 0)}


def test_a_call_that_its_kernel_declines_goes_to_no_other_backend(monkeypatch, fake, in_force):
    def declining(q, k, v, call):
        raise UnsupportedInputError("no plan for these lengths")

    kernels = attnreg.Kernels(declining)
    first = fake("first", backward=False, batch_invariant=True, load=lambda: kernels).backend
    know(monkeypatch, first, math_backend.BACKEND)
    message = refused(attend, 4)
    assert message.startswith(f"{POLICY}, so none but first may run it: no plan for these lengths: ")


@pytest.mark.usefixtures("in_force")
def test_a_mask_is_not_simplified_by_the_longest_sequence_of_a_batch(known):
    for lengths in ((1, 1), (1, 9)):
        attend(*lengths, window_size=(4, 0))
    calls = [given[-1] for given in known["narrow"].forwards]
    assert [(call.window, call.batch_invariant, call.repeatable) for call in calls] == [
        ((4, 0), True, True)
    ] * 2


def attend_windowed(*lengths):
    return attend(*lengths, window_size=(100, 0))


@pytest.mark.parametrize("heads", [1, 2])
def test_after_a_failure_to_compile_no_other_backend_runs_such_calls(fake, monkeypatch, in_force, heads):
    def fails_later(q, k, v, call):
        if len(call.cu_seqlens_q) == 2:
            raise attnreg.BackendUnavailableError("no compiler")
        return math_backend.forward(q, k, v, call)

    kernels = attnreg.Kernels(fails_later)
    first = fake("first", backward=False, batch_invariant=True, load=lambda: kernels, priority=999).backend
    know(monkeypatch, first, math_backend.BACKEND)
    attend(3, 4, heads=heads)
    for lengths in ((5,), (3, 4), (6, 7)):
        message = refused(attend, *lengths, heads=heads)
        assert "first" in message and "math runs" not in message


@pytest.mark.usefixtures("known")
def test_a_lock_holds_the_backend_of_calls_of_any_batch(tmp_path, monkeypatch, ran):
    trace, out = tmp_path / "trace.jsonl", tmp_path / "lock.json"
    with attnreg.record(tmp_path / "without.jsonl"):
        attend(4, 5)
    monkeypatch.setenv("ATTNREG_POLICY", "batch_invariant")
    attnreg.reload()
    done = invoke("lock", "--from", tmp_path / "without.jsonl", "--out", out)
    assert done.exit_code == 2 and 'recorded without policy = "batch_invariant"' in done.output
    with attnreg.record(trace):
        attend(4, 5, window_size=(100, 0))
        attend(6, window_size=(100, 0))
        attend(0, 0, 0, window_size=(100, 0))  # another backend runs it, and it has no bits
    assert invoke("lock", "--from", trace, "--out", out).exit_code == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["backend"], row["source"], row["spec"]["batch_invariant"]) == ("narrow", BY, True)
    monkeypatch.setenv("ATTNREG_LOCK", str(out))
    attnreg.reload()
    ran()
    attend(7, 3, window_size=(100, 0))
    assert ran() == {"narrow": (1, 0)}
    assert "which can't run it here (batch must be 0 to 2, got 3)" in refused(attend_windowed, 4, 5, 6)
    monkeypatch.delenv("ATTNREG_POLICY")
    attnreg.reload()
    assert "has no row for this forward" in refused(attend_windowed, 7, 3)


@pytest.mark.usefixtures("known", "in_force")
def test_info_names_the_policy_with_the_order():
    order = json.loads(invoke("info", "--json").stdout)["devices"][0]["order"]
    assert {one["source"] for one in order} == {BY}


@pytest.mark.usefixtures("known", "in_force")
def test_ranks_compare_the_policy():
    found = ranks._inputs(state().policy, registry.entries(), Device("cpu"))
    assert (found.requested, found.table_name) == (POLICY, POLICY)


@pytest.fixture
def two_threads():
    """Have kernels share their work among threads, as they do in programs; the tests run with one."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def bits_of_last(run, tensors, rows=1):
    """Return the last rows of the output and of the gradients, where the others' have none."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = run(*leaves)
    grad = torch.zeros_like(out)
    grad[-rows:] = torch.arange(grad[-rows:].numel()).view(grad[-rows:].shape).sin().to(grad.dtype)
    return [x[-rows:] for x in (out.detach(), *torch.autograd.grad(out, leaves, grad))]


def same_bits(one, other):
    assert len(one) == len(other) == 4  # the output and three gradients
    return all(map(torch.equal, one, other))


def only(backend, monkeypatch):
    know(monkeypatch, math_backend.BACKEND, *([cpu_backend.BACKEND] if backend == "cpu" else []))


@pytest.mark.usefixtures("two_threads")
def test_without_the_policy_a_batch_shows_in_the_bits_of_its_rows_and_with_it_does_not(monkeypatch, ran):
    only("cpu", monkeypatch)
    generator = torch.Generator().manual_seed(0)
    # In which of these a batch shows depends on the CPU, by which MKL chooses how to multiply.
    shapes = [(4, 32, (1, 600, 600)), (1, 32, (33, 257, 257)), (1, 64, (1, 4000, 4000))]
    batches = [
        [torch.randn(3, heads, length, dim, generator=generator) for length in lengths]
        for heads, dim, lengths in shapes
    ]

    def same(batch):
        together = bits_of_last(F.scaled_dot_product_attention, batch)
        alone = bits_of_last(F.scaled_dot_product_attention, [x[-1:] for x in batch])
        return same_bits(together, alone)

    with attnreg.use_backend("cpu"):
        assert False in [same(batch) for batch in batches]
    monkeypatch.setenv("ATTNREG_POLICY", "batch_invariant")
    attnreg.reload()
    assert [same(batch) for batch in batches] == [True] * 3
    assert ran() == {"cpu": (12, 12)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("backend", ["cpu", "math"])
@pytest.mark.usefixtures("in_force", "two_threads")
def test_a_row_of_sdpa_has_the_same_bits_alone_and_beside_others_first_and_repeated(
    backend, dtype, monkeypatch, ran
):
    only(backend, monkeypatch)
    batch = [x.to(dtype) for x in torch.randn(3, 5, 4, 70, 32)]

    def attend(*qkv):
        return F.scaled_dot_product_attention(*qkv, is_causal=True)

    for _ in range(4):  # the call cache runs the later ones
        together = bits_of_last(attend, batch)
        assert same_bits(together, bits_of_last(attend, [x[-1:] for x in batch]))
        assert same_bits(together, bits_of_last(attend, [x[[0, 4]] for x in batch]))
    assert ran() == {backend: (12, 12)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("backend", ["cpu", "math"])
@pytest.mark.usefixtures("in_force", "two_threads")
def test_a_packed_sequence_has_the_same_bits_alone_and_beside_others(backend, dtype, monkeypatch, ran):
    only(backend, monkeypatch)
    tokens = torch.randn(3, 130 + 5 + 300, 1, 32).to(dtype)

    def attend_packed(*lengths):
        offsets = torch.tensor([0, *lengths]).cumsum(0).int()
        return lambda *qkv: attnreg.varlen_attn(
            *qkv, offsets, offsets, max(lengths), max(lengths), window_size=(50, 0)
        )

    for _ in range(3):
        together = bits_of_last(attend_packed(130, 5, 300), tokens, 300)
        assert same_bits(together, bits_of_last(attend_packed(300), [x[-300:] for x in tokens], 300))
        assert same_bits(together, bits_of_last(attend_packed(5, 300), [x[-305:] for x in tokens], 300))
    assert ran() == {backend: (9, 9)}


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.usefixtures("in_force")
def test_with_sinks_a_sequence_has_the_same_bits_alone_and_beside_others(dtype):
    length, count, dim = 4, 120, 8
    tokens, sinks = torch.randn(3, count * length, 1, dim, dtype=dtype), torch.randn(1)

    def results(qkv):
        leaves = [x.clone().requires_grad_() for x in qkv]
        offsets = torch.arange(0, len(qkv[0]) + 1, length, dtype=torch.int32)
        aux = attnreg.AuxRequest(lse=True)
        out, lse = attnreg.varlen_attn(*leaves, offsets, offsets, length, length, True, aux, sinks=sinks)
        grads = torch.autograd.grad((out.sum(), lse.sum()), leaves)
        return torch.cat([*(x.flatten(1) for x in (out, *grads)), lse.mT], dim=1)

    together = results(tokens)
    alone = torch.cat([results(tokens[:, i : i + length]) for i in range(0, count * length, length)])
    assert (together != alone).sum(0).tolist() == [0] * (4 * dim + 1)
