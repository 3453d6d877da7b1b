"""Promises of the masks that layers share: which are structure, which are dense, what contradicts them."""

import inspect

import pytest
import torch
import transformers
from support import transformers_models as models
from support.transformers_models import CACHE
from transformers import masking_utils

from attnreg.errors import InvalidInputError, UnsupportedInputError
from attnreg.integrations.shared_mask import shared_mask
from attnreg.integrations.transformers import attention

# 5.10 brought `block_sequence_ids`.
_PARAMETERS = inspect.signature(masking_utils.create_causal_mask).parameters


def call(mask, length=6, module=None, **options):
    """Call attention as a layer does, over two rows of random tensors."""
    torch.manual_seed(0)
    tensors = torch.randn(3, 2, 4, length, 8, dtype=torch.float64).unbind()
    return attention(module or torch.nn.Module(), *tensors, mask, **options)[0], tensors


def by_scores(tensors, visible):
    query, key, value = tensors
    scores = (query @ key.transpose(-1, -2) * 8**-0.5).masked_fill(~visible, -torch.inf)
    return (scores.softmax(-1).nan_to_num() @ value).transpose(1, 2)


def made(name="Gemma3", create=masking_utils.create_sliding_window_causal_mask, **options):
    """Return a mask of transformers for two rows of 6 tokens, of `attnreg` and as a tensor."""
    masks = []
    for implementation in ("attnreg", "sdpa"):
        config = models.CONFIGS[name]()
        config.sliding_window, config._attn_implementation = 3, implementation
        given = {"config": config, "inputs_embeds": torch.empty(2, 6, 0), "attention_mask": None, CACHE: None}
        masks.append(create(**given | options))
    return masks


def test_a_hole_in_a_rows_padding_counts_for_its_window_as_in_a_mask():
    holes = torch.tensor([[1, 1, 0, 0, 1, 1], [0, 0, 1, 1, 1, 1]])
    shared, visible = made(attention_mask=holes)
    assert shared.packing(None).has_holes
    out, tensors = call(shared, sliding_window=3)
    torch.testing.assert_close(out[holes.bool()], by_scores(tensors, visible)[holes.bool()])


def test_images_whose_tokens_see_each_other_take_the_mask_of_scores():
    blocks = torch.tensor([[-1, 0, 0, 0, -1, -1], [-1, -1, 1, 1, 1, 1]])

    def in_one_image(row, _, query, key):
        return (blocks[row, query] == blocks[row, key]) & (blocks[row, query] >= 0)

    by_name = "block_sequence_ids" in _PARAMETERS
    images = {"block_sequence_ids": blocks} if by_name else {"or_mask_function": in_one_image}
    shared, visible = made(create=masking_utils.create_causal_mask, **images)
    assert shared.structure is None
    out, tensors = call(shared)
    torch.testing.assert_close(out, by_scores(tensors, visible))
    assert visible[0, 0, 1, 3]


def test_chunks_take_the_mask_of_scores():
    shared, visible = [], []
    for implementation in ("attnreg", "sdpa"):
        config = models.CONFIGS["Llama"]()
        config.attention_chunk_size, config._attn_implementation = 4, implementation
        mask = masking_utils.create_chunked_causal_mask(config, torch.empty(2, 6, 0), None, **{CACHE: None})
        (shared if implementation == "attnreg" else visible).append(mask)
    out, tensors = call(shared[0])
    assert shared[0].structure is None
    torch.testing.assert_close(out, by_scores(tensors, visible[0]))
    assert not visible[0][0, 0, 5, 3]


def test_masks_of_one_forward_are_read_back_together_and_those_of_the_next_by_themselves(read_backs):
    padding = torch.ones(2, 6, dtype=torch.long)
    padding[1, 4:] = 0
    for _ in range(2):
        full, _ = made(create=masking_utils.create_causal_mask, attention_mask=padding)
        window, _ = made(attention_mask=padding)
        assert full.packing(None).max_q == window.packing(None).max_q == 6
        assert full.packing(None).cu_seq_k.tolist() == [0, 6, 10]
    assert len(read_backs) == 2


def test_several_documents_in_each_of_several_rows_are_apart(read_backs):
    positions = torch.tensor([[0, 1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 0]])
    shared, visible = made(position_ids=positions)  # transformers has found them
    out, tensors = call(shared, sliding_window=3)
    torch.testing.assert_close(out, by_scores(tensors, visible))
    with_cache, _ = made(**{CACHE: transformers.DynamicCache()}, position_ids=positions)  # it doesn't look
    out, _ = call(with_cache, sliding_window=3, position_ids=positions)
    torch.testing.assert_close(out, by_scores(tensors, visible))
    assert len(read_backs) == 2


@pytest.mark.parametrize("window", [False, True])
def test_dropout_drops_weights_of_dense_and_of_windowed_calls(window):
    mask = made()[0] if window else made(create=masking_utils.create_causal_mask)[0]
    out, (_, _, value) = call(mask, dropout=1.0)
    assert out.count_nonzero() == 0 < value.count_nonzero()
    torch.manual_seed(0)
    dropped, _ = call(mask, dropout=0.1)
    torch.manual_seed(0)
    assert torch.equal(call(mask, dropout=0.1)[0], dropped)
    assert not torch.equal(call(mask)[0], dropped)


def test_a_softcap_and_sinks_apply_with_a_mask_of_scores_too():
    visible = torch.ones(6, 6, dtype=torch.bool).tril()[None, None].expand(2, 1, 6, 6)
    sinks = torch.randn(4, dtype=torch.float64)
    out, (query, key, value) = call(visible, softcap=2.0, s_aux=sinks)
    scores = 2 * torch.tanh(query @ key.transpose(-1, -2) * 8**-0.5 / 2)
    weights = scores.masked_fill(~visible, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True) + sinks.exp().view(1, 4, 1, 1)
    torch.testing.assert_close(out, (weights / total @ value).transpose(1, 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"block_indices": torch.zeros(1)},
            "got block_indices from a layer whose indexer.block_size is None, expected the number of keys of "
            "a block; attn_implementation='sdpa' or 'eager' takes it",
        ),
        (
            {"output_attentions": True},
            "got output_attentions, expected no such argument; attn_implementation='eager'",
        ),
        (
            {"block_table": torch.zeros(1)},
            "got block_table, expected no such argument; attn_implementation='flash",
        ),
    ],
    ids=lambda x: "" if isinstance(x, str) else next(iter(x)),
)
def test_what_would_change_the_result_and_is_not_served_is_an_error(options, message):
    with pytest.raises(UnsupportedInputError) as error:
        call(None, **options)
    assert message in str(error.value)


@pytest.mark.parametrize("kind", ["none", "causal", "tensor", "numbers", "window", "padded", "of all"])
def test_a_position_bias_is_added_to_the_scores_that_a_mask_leaves(kind):
    visible = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    mask, module, options = None, torch.nn.Module(), {}
    module.is_causal = kind == "causal"
    if kind == "causal":
        visible = visible.tril()
    elif kind in ("tensor", "numbers"):
        mask = visible = visible.tril(1)
        mask = mask if kind == "tensor" else torch.zeros(2, 1, 6, 6).double().masked_fill(~mask, -torch.inf)
    elif kind == "window":
        (mask, visible), options = made(), {}
    elif kind in ("padded", "of all"):
        counted = torch.ones(2, 6, dtype=torch.long)
        counted[1, 4:] = kind == "of all"
        mask = made(create=masking_utils.create_bidirectional_mask, attention_mask=counted)[0]
        visible = counted.bool()[:, None, None].expand(2, 1, 6, 6)
    bias = torch.randn(1, 4, 6, 6, dtype=torch.float64, requires_grad=True)
    out, (query, key, value) = call(mask, module=module, position_bias=bias, **options)
    scores = query @ key.transpose(-1, -2) * 8**-0.5 + bias
    expected = (scores.masked_fill(~visible, -torch.inf).softmax(-1) @ value).transpose(1, 2)
    torch.testing.assert_close(out, expected)
    weights = torch.randn_like(out)
    got, wanted = (torch.autograd.grad((x * weights).sum(), bias)[0] for x in (out, expected))
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("name", ["position_bias", "indices", "block_indices"])
def test_offsets_with_what_a_layer_adds_to_its_scores_are_an_error(name):
    offsets = torch.tensor([0, 6, 12], dtype=torch.int32)
    with pytest.raises(InvalidInputError) as error:
        call(None, cu_seq_lens_q=offsets, **{name: torch.zeros(2, 4, 6, 6)})
    assert str(error.value) == (
        f"cu_seq_lens_q: got offsets for a layer that passes {name}, expected none, because that is for rows "
        "of one document each; pad the documents"
    )


def test_a_window_of_a_layer_that_its_mask_does_not_have_is_an_error():
    shared, _ = made(create=masking_utils.create_causal_mask)
    with pytest.raises(
        InvalidInputError, match="sliding_window: got 3 from a layer whose mask has no window"
    ):
        call(shared, sliding_window=3)
    call(shared, sliding_window=6)  # hides nothing


def test_a_mask_for_other_lengths_than_the_layers_is_an_error():
    shared, _ = made()
    with pytest.raises(InvalidInputError) as error:
        call(shared, length=5)
    assert "got one for (batch, queries, keys) (2, 6, 6), expected one for (2, 5, 5)" in str(error.value)


def test_offsets_of_a_collator_beside_padding_are_an_error():
    shared, _ = made(attention_mask=torch.ones(2, 6))
    offsets = torch.tensor([0, 6, 12], dtype=torch.int32)
    with pytest.raises(InvalidInputError, match="got one with cu_seq_lens_q, expected one of them"):
        call(shared, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets)


def test_offsets_for_a_model_whose_own_mask_says_more_are_an_error_that_names_positions():
    shared, _ = made(or_mask_function=lambda batch, head, query, key: key == 0)
    with pytest.raises(InvalidInputError, match=r"^cu_seq_lens_q: .* expected position_ids that start anew"):
        call(shared, cu_seq_lens_q=torch.tensor([0, 6, 12], dtype=torch.int32))


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}], ids=["plain", "softcap"])
def test_a_mask_of_integers_is_an_error(options):
    with pytest.raises(InvalidInputError, match=r"^attention_mask: got torch.int64, expected torch.bool"):
        call(torch.ones(2, 1, 6, 6, dtype=torch.int64), **options)


def test_a_mask_of_two_dimensions_that_reaches_a_layer_is_an_error():
    with pytest.raises(InvalidInputError, match=r"got shape \(2, 6\), expected \(B, 1, S_q, S_k\)"):
        call(torch.ones(2, 6, dtype=torch.bool))


COMPUTES = (
    "attnreg: got a model that computes with its attention mask itself ({}), expected one whose layers pass "
    "it on to transformers' attention functions; attn_implementation='eager', or 'sdpa' where the model has "
    "it, runs it"
)


@pytest.mark.parametrize(
    ("config", "use"),
    [
        (
            lambda: transformers.BloomConfig(hidden_size=32, n_layer=1, n_head=4, vocab_size=64),
            "torch.Tensor.add",
        ),
        (
            lambda: transformers.MptConfig(d_model=32, n_layers=1, n_heads=4, vocab_size=64, max_seq_len=64),
            "mask.to",
        ),
    ],
    ids=["Bloom", "Mpt"],
)
def test_a_model_that_computes_with_its_mask_itself_is_told_what_runs_it(config, use):
    batch = models.padded(models.documents(), "right")
    del batch["position_ids"]
    one = transformers.AutoModelForCausalLM.from_config(config(), attn_implementation="attnreg")
    with pytest.raises(UnsupportedInputError) as error:
        one(**batch)
    assert str(error.value) == COMPUTES.format(use)
    one = transformers.AutoModelForCausalLM.from_config(config(), attn_implementation="eager")
    assert one(**batch).logits.isfinite().all()


def test_a_model_that_adds_a_mask_of_one_query_to_its_scores_is_refused():
    sizes = models.ENCODER | {"num_hidden_layers": 1, "visual_embedding_dim": 8}
    config = transformers.VisualBertConfig(**sizes)
    one = transformers.AutoModel.from_config(config, attn_implementation="attnreg")
    if "create_bidirectional_mask" not in vars(inspect.getmodule(type(one))):
        pytest.skip("this transformers' VisualBERT computes attention by itself, with a mask of its own")
    ids = models.documents(lengths=(12,))[0]
    with pytest.raises(UnsupportedInputError) as error:
        one(input_ids=ids, attention_mask=torch.ones_like(ids))
    assert str(error.value) == COMPUTES.format("torch.Tensor.add")


@pytest.mark.parametrize(
    ("compute", "use"),
    [
        (lambda mask: torch.zeros(2, 4, 6, 6) + mask, "torch.Tensor.add"),
        (lambda mask: mask + torch.zeros(2, 4, 6, 6), "torch.Tensor.add"),
        (lambda mask: torch.zeros(2, 4, 6, 6).masked_fill(mask, 0.0), "torch.Tensor.masked_fill"),
        (lambda mask: torch.where(mask, 0.0, 1.0), "torch.where"),
        (lambda mask: mask[:, :, :, :6], "an operator"),
        (lambda mask: ~mask, "an operator"),
        (lambda mask: 1.0 - mask, "an operator"),
        (lambda mask: mask.repeat(1, 4, 1, 1), "mask.repeat"),
    ],
    ids=["added to", "added", "filled by", "where", "a part", "not", "one less", "repeated"],
)
def test_a_mask_is_no_tensor_to_compute_with(compute, use):
    with pytest.raises(UnsupportedInputError) as error:
        compute(made()[0])
    assert str(error.value) == COMPUTES.format(use)


def test_a_mask_has_the_shape_of_the_tensor_that_it_stands_for():
    assert made()[0].shape == made()[0].dense().shape


def test_a_mask_says_no_to_those_who_ask_whether_it_is_a_tensor():
    assert not hasattr(made()[0], "to")
    assert getattr(made()[0], "dtype", None) is None


@pytest.mark.parametrize("order", [1, -1], ids=["first", "last"])
def test_documents_are_recognised_wherever_a_version_of_transformers_names_them(order):
    documents = torch.tensor([[0, 0, 1, 1, 1, 1]])
    apart = masking_utils.packed_sequence_mask_function(documents)
    both = masking_utils.and_masks(*(apart, masking_utils.causal_mask_function)[::order])
    options = {"batch_size": 1, "q_length": 6, "kv_length": 6, "mask_function": both}
    mask = shared_mask(**options, allow_is_causal_skip=False)
    assert mask.structure.window == (-1, 0)
    assert mask.structure.documents is documents
