"""Promises of `dropout_p` in `varlen_attn`: the mask of a seed, in both directions, by one backend."""

import pytest
import torch
from support import truth
from torch.utils.flop_counter import FlopCounterMode

import attnreg
from attnreg.backends.cpu import compiled
from attnreg.errors import InvalidInputError, UnsupportedInputError
from attnreg.tools.measure.reference import attend as reference

LENGTHS, HEADS, DIM, P = (40, 0, 64, 7), 2, 64, 0.3
OFFSETS = torch.tensor([0, *LENGTHS]).cumsum(0).int()


def packed(seed=0, heads_k=HEADS):
    generator = torch.Generator().manual_seed(seed)
    heads = HEADS, heads_k, heads_k
    return [torch.randn(sum(LENGTHS), h, DIM, generator=generator).requires_grad_() for h in heads]


def backend_of_the_machine():
    """Return which backend takes dropout here: without its compiled kernel that of the CPU doesn't."""
    return "math" if compiled.load() is None else "cpu"


def attend(query, key, value, seed=1, **options):
    torch.manual_seed(seed)
    options = {"dropout_p": P, "window_size": (-1, 0)} | options
    return attnreg.varlen_attn(
        query, key, value, OFFSETS, OFFSETS, max(LENGTHS), max(LENGTHS), enable_gqa=True, **options
    )


def kept(query, key, seed=1):
    """Return the factors of each sequence's weights, (H, S, S): a value of ones in one place shows them."""
    columns = torch.eye(max(LENGTHS))
    value = torch.cat([columns[:length] for length in LENGTHS])[:, None].expand(-1, key.shape[1], -1)
    dropped = attend(query.detach(), key.detach(), value, seed)
    plain = attend(query.detach(), key.detach(), value, dropout_p=0.0)
    for begin, length in zip(OFFSETS.tolist(), LENGTHS, strict=False):
        rows = slice(begin, begin + length)
        factors = torch.where(plain[rows] > 0, dropped[rows] / plain[rows], 0.0)
        yield rows, factors[..., :length].transpose(0, 1)


@pytest.mark.parametrize("way", ["compiled_routers", "python_routers"])
@pytest.mark.parametrize("dropout_p", [0.0, P])
def test_a_default_device_changes_no_call(way, dropout_p, request, ran):
    request.getfixturevalue(way)

    tensors = packed()

    def results():
        out = attend(*tensors, dropout_p=dropout_p)
        return out, *torch.autograd.grad(out.sum(), tensors)

    expected, calls = results(), ran()
    with torch.device("meta"):  # where no attention can run
        assert all(map(torch.equal, results(), expected))
    assert ran() == calls


@pytest.mark.parametrize("way", ["compiled_routers", "python_routers"])
@pytest.mark.parametrize("heads_k", [HEADS, 1])
def test_output_and_gradients_are_those_of_the_weights_that_a_seed_keeps(way, heads_k, request, ran):
    request.getfixturevalue(way)
    tensors = packed(heads_k=heads_k)
    factors = list(kept(*tensors[:2]))
    ran()
    out = attend(*tensors)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
    grads = torch.autograd.grad(out, tensors, weight)
    assert ran() == {backend_of_the_machine(): (1, 1)}
    exact = [x.detach().double().requires_grad_() for x in tensors]
    parts = []
    for rows, one in factors:
        nearest = torch.where(one > 0, 1 / (1 - P), 0.0).double()[None]
        dense = [x[rows][None] for x in exact]
        parts.append(reference(*dense, DIM**-0.5, (-1, 0), kept=nearest)[0][0])
    expected = torch.cat(parts)
    for got, right in zip(
        (out, *grads), (expected, *torch.autograd.grad(expected, exact, weight.double())), strict=True
    ):
        truth.assert_near(got.detach(), right.detach(), torch.float32)


def test_a_seed_repeats_the_mask_another_draws_another_and_the_share_is_what_was_asked_for():
    query, key, _ = packed()
    first, again, other = ([one for _, one in kept(query, key, seed)] for seed in (1, 1, 2))
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[2], other[2])
    seen = torch.ones(64, 64).tril().bool()
    share = (first[2][:, seen] == 0).double().mean()
    assert abs(share - P) < 6 * (P * (1 - P) / (2 * seen.sum())) ** 0.5


def test_the_lse_is_that_of_all_weights():
    tensors = packed()
    out, lse = attend(*tensors, return_aux=attnreg.AuxRequest(lse=True))
    plain = {"dropout_p": 0.0, "backend": backend_of_the_machine()}
    expected = attend(*tensors, **plain, return_aux=attnreg.AuxRequest(lse=True))[1]
    torch.testing.assert_close(lse, expected)  # few rows are summed in another order without dropout
    assert not torch.equal(out, attend(*tensors, dropout_p=0.0))


def test_the_backward_runs_on_the_backend_that_drew_the_mask(fake, ran):
    tensors = packed()
    with attnreg.register_backend("math"), attnreg.register_backend(fake("mine").backend):
        with attnreg.use_backend("mine"):
            out = attend(*tensors)
        with attnreg.use_backend("math"):
            torch.autograd.grad(out.sum(), tensors)
    assert ran() == {"mine": (1, 1)}


def test_checkpointing_draws_the_same_mask_again():
    tensors = packed()
    given = torch.autograd.grad(attend(*tensors).sum(), tensors)
    torch.manual_seed(1)

    def layer(*qkv):
        return attnreg.varlen_attn(
            *qkv, OFFSETS, OFFSETS, max(LENGTHS), max(LENGTHS), dropout_p=P, window_size=(-1, 0)
        )

    out = torch.utils.checkpoint.checkpoint(layer, *tensors, use_reentrant=False)
    assert all(map(torch.equal, torch.autograd.grad(out.sum(), tensors), given))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo asks for it
def test_a_compiled_program_runs_it_between_two_graphs(ran):
    torch._dynamo.reset()
    tensors = packed()
    torch.manual_seed(1)

    @torch.compile(backend="aot_eager")
    def layer(*qkv):
        return 2 * attnreg.varlen_attn(
            *qkv, OFFSETS, OFFSETS, max(LENGTHS), max(LENGTHS), dropout_p=P,
            window_size=(-1, 0),
        )  # fmt: skip

    with attnreg.use_backend("math"):
        out = layer(*tensors)
    grads = torch.autograd.grad(out, tensors, torch.ones_like(out))
    assert ran() == {"math": (1, 1)}
    expected = 2 * attend(*tensors, backend="math")
    assert torch.equal(out, expected)
    assert all(map(torch.equal, grads, torch.autograd.grad(expected, tensors, torch.ones_like(out))))


@pytest.mark.parametrize("dropout_p", [-0.1, 1.5, float("nan"), "much", "0.1"])
def test_what_is_no_probability_is_refused(dropout_p):
    with pytest.raises(InvalidInputError) as error:
        attend(*packed(), dropout_p=dropout_p)
    assert str(error.value) == f"dropout_p: got {dropout_p!r}, expected 0 to 1"


def test_where_an_op_would_be_seen_it_is_refused():
    with FlopCounterMode(display=False), pytest.raises(UnsupportedInputError) as error:
        attend(*packed())
    assert str(error.value).startswith("dropout_p must be 0 in dispatch modes")


def test_explain_and_a_recording_know_it(tmp_path):
    tensors = packed()
    found = attnreg.explain(*tensors, OFFSETS, OFFSETS, 64, 64, dropout_p=P, window_size=(-1, 0))
    assert (found.forward.backend, found.spec.dropout) == (backend_of_the_machine(), P)
    if found.forward.backend == "math":
        needs = "dropout_p needs the compiled kernel, which `attnreg build` makes"
        assert found.forward.rejected["cpu"] == (needs,)
    with attnreg.record(tmp_path / "trace.jsonl"):
        attend(*tensors)
    assert '"dropout":0.3' in (tmp_path / "trace.jsonl").read_text()
