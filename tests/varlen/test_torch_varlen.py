"""Torch's own `varlen_attn`, which has no CPU kernel without attnreg, served on a CPU."""

import inspect

import pytest
import torch
from support import truth
from support.cuda_ops import FLASH_OPTIONS
from support.packed_calls import (
    CAUSAL,
    LENGTHS_K,
    LENGTHS_Q,
    integers,
    offsets,
    run_and_compare,
    total,
)
from torch.nn.attention import varlen
from torch.nn.attention.varlen import AuxRequest, varlen_attn

import attnreg
from attnreg.errors import InvalidInputError, UnsupportedInputError

LSE = AuxRequest(lse=True)

# What this torch's function takes: torch 2.11 has less.
PARAMETERS = inspect.signature(varlen_attn).parameters.keys()


def needs(name):
    return pytest.mark.skipif(name not in PARAMETERS, reason=f"this torch's varlen_attn has no {name}")


@pytest.fixture(autouse=True)
def served(routers):
    """Serve torch's entry points, though no backend is preferred."""
    attnreg.install()


def test_without_attnreg_torch_has_no_kernel(packed):
    attnreg.uninstall()
    with pytest.raises(NotImplementedError, match="Could not run 'aten::_flash_attention_forward'"):
        varlen_attn(*packed((3, 4), grad=False))


OPTIONS = {
    "none": ({}, {}),
    "causal": ({"window_size": CAUSAL}, {"window": CAUSAL}),
    # As a list torch doesn't recognise the causal window, but passes it on.
    "causal as a list": ({"window_size": [-1, 0]}, {"window": CAUSAL}),
    "window": ({"window_size": (2, 1)}, {"window": (2, 1)}),
    "left window": ({"window_size": (2, 0)}, {"window": (2, 0)}),
    "scale": ({"scale": 0.7}, {"scale": 0.7}),
    "num_splits": ({"num_splits": 1}, {}),
}
OPTIONS = {name: pair for name, pair in OPTIONS.items() if pair[0].keys() <= PARAMETERS}


@pytest.mark.parametrize(("options", "meant"), OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_option_gives_the_right_output_lse_and_gradients(packed, ran, options, meant, dtype):
    given = packed(LENGTHS_Q, LENGTHS_K, dtype=dtype)
    _, lse = run_and_compare(given, meant, attend=varlen_attn, return_aux=LSE, **options)
    assert lse.shape == (4, 17)
    assert total(ran()) == (1, 1)


def test_a_registered_backend_runs_both_directions_with_what_was_given(packed, fake, ran):
    inputs = packed(LENGTHS_Q, LENGTHS_K)
    recorder = fake("mine")
    with attnreg.register_backend(recorder.backend):
        varlen_attn(*inputs, window_size=(2, 0), scale=0.5).sum().backward()
    assert ran() == {"mine": (1, 1)}
    ((*_, forward),), ((*_, backward),) = recorder.forwards, recorder.backwards
    assert (forward.window, forward.scale, forward.max_q, forward.max_k) == ((2, 0), 0.5, 8, 8)
    assert (backward.window, backward.scale) == (forward.window, forward.scale)
    assert torch.equal(forward.cu_seqlens_q, inputs[3]) and torch.equal(forward.cu_seqlens_k, inputs[4])


def test_several_query_heads_share_a_key_head(packed):
    given = packed(LENGTHS_Q, LENGTHS_K, heads=6, heads_k=2)
    allowed = {"enable_gqa": True} if "enable_gqa" in PARAMETERS else {}  # torch 2.11 doesn't ask
    run_and_compare(given, attend=varlen_attn, return_aux=LSE, **allowed)


@needs("seqused_k")
def test_seqused_k_serves_inference_and_torch_itself_refuses_gradients(packed):
    given, used = packed(LENGTHS_Q, LENGTHS_K), integers(3, 0, 8, 1)
    with torch.no_grad():
        out = varlen_attn(*given, seqused_k=used)
    truth.assert_near(out, truth.varlen(*given[:5], used=used.tolist())[0])
    with pytest.raises(RuntimeError, match="seqused_k is an inference-only parameter"):
        varlen_attn(*given, seqused_k=used)


@needs("block_table")
def test_a_block_table_serves_inference(packed):
    query, _, _, cu_q, _, max_q, _ = packed((5, 1, 8), grad=False)
    pool = torch.randn(2, 6, 4, 4, 16)
    table, used = integers(5, 2, 0, 1, 3, 4).view(3, 2), (7, 4, 5)
    out = varlen_attn(query, *pool, cu_q, None, max_q, 8, seqused_k=integers(*used), block_table=table)
    flat = [torch.cat([x[table[i].long()].flatten(0, 1)[: used[i]] for i in range(3)]) for x in pool]
    truth.assert_near(out, truth.varlen(query, *flat, cu_q, offsets(*used))[0])


# What aten's op is given, its backward isn't.
USED, PAGES = integers(2, 4), integers(0, 1, 2, 3).view(2, 2)
FORWARD_ONLY = {
    "seqused_k": {"seqused_k": USED},
    "alibi_slopes": {"alibi_slopes": torch.ones(4)},
    "seqused_k and alibi_slopes": {"seqused_k": USED, "alibi_slopes": torch.ones(4)},
    "seqused_k and block_table": {"seqused_k": USED, "block_table": PAGES},
}


@pytest.mark.parametrize("named", [x for x, given in FORWARD_ONLY.items() if given.keys() <= FLASH_OPTIONS])
def test_the_backward_of_atens_op_refuses_what_it_is_not_given(packed, ran, named):
    *inputs, cu_q, cu_k, max_q, max_k = packed((3, 4))
    if "block_table" in named:
        inputs[1:], cu_k, max_k = torch.randn(2, 4, 4, 4, 16), None, 8

    def attend():
        lengths, options = (cu_q, cu_k, max_q, max_k), FORWARD_ONLY[named]
        return torch.ops.aten._flash_attention_forward(*inputs, *lengths, 0.0, False, False, **options)[0]

    out = attend()
    with pytest.raises(UnsupportedInputError) as error:
        out.sum().backward()
    assert str(error.value) == (
        f"{named}: aten::_flash_attention_backward doesn't receive it, so its gradients "
        "would be wrong; call attnreg.varlen_attn, whose backward does"
    )
    assert total(ran()) == (1, 0)
    with torch.no_grad():  # nothing is refused where no gradient is wanted
        assert torch.equal(attend(), out)


def test_varlen_attn_out_writes_into_the_given_tensor(packed, ran):
    if not hasattr(varlen, "varlen_attn_out"):
        pytest.skip("torch 2.11 has no varlen_attn_out")
    given = packed(LENGTHS_Q, LENGTHS_K, grad=False)
    out = torch.full_like(given[0], torch.nan)
    returned, lse = varlen.varlen_attn_out(out, *given, return_aux=LSE, window_size=CAUSAL, scale=0.3)
    assert returned is out
    expected, expected_lse = truth.varlen(*given[:5], window=CAUSAL, scale=0.3)
    truth.assert_near(out, expected)
    truth.assert_near(lse, expected_lse)
    assert total(ran()) == (1, 0)


def test_bad_offsets_are_an_error(packed):
    *inputs, cu_q, cu_k, max_q, max_k = packed((3, 4), grad=False)
    with pytest.raises(InvalidInputError, match="max_q: got 3, expected at least 4, the longest sequence"):
        varlen_attn(*inputs, cu_q, cu_k, 3, max_k)
    with pytest.raises(InvalidInputError, match="cu_seq_q: got 7 after 8 at index 2, expected no decrease"):
        varlen_attn(*inputs, integers(0, 8, 7), cu_k, 8, max_k)
    truth.assert_near(varlen_attn(*inputs, cu_q, cu_k, max_q, max_k), truth.varlen(*inputs, cu_q, cu_k)[0])


def test_a_dense_call_of_two_batch_sizes_is_an_error(ran):
    query, key = torch.randn(2, 5, 4, 16), torch.randn(3, 5, 4, 16)
    with pytest.raises(InvalidInputError, match="batch: got 2 for query and 3 for key, expected equal ones"):
        torch.ops.aten._flash_attention_forward(query, key, key, None, None, 5, 5, 0.0, False, False)
    assert ran() == {}
