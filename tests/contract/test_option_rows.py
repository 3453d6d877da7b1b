"""Promises of the rows of options: what a value means, and what `varlen_attn` refuses of them."""

import dataclasses
import inspect

import pytest
import torch

import attnreg
from attnreg.core.contract import options
from attnreg.core.contract.backend import Call
from attnreg.core.contract.options import OPTIONS
from attnreg.core.launching import offsets, validation
from attnreg.errors import InvalidInputError

OFFSETS = torch.tensor([0, 4, 9], dtype=torch.int32)
INPUTS = [torch.randn(9, 2, 8) for _ in "qkv"]
ARGUMENTS = *INPUTS, OFFSETS, OFFSETS, 5, 5
ROWS = {row.name: row for row in OPTIONS}


def attend(**options):
    return attnreg.varlen_attn(*ARGUMENTS, **options)


@pytest.mark.parametrize("splits", [2.5, "2", float("inf"), -1, [2]])
def test_a_number_of_splits_is_a_whole_number(splits):
    expected = f"num_splits: got {splits!r}, expected an integer of 0 or more"
    with pytest.raises(InvalidInputError) as error:
        attend(num_splits=splits)
    assert str(error.value) == expected


@pytest.mark.parametrize(
    ("name", "off", "on"),
    [
        ("softcap", (None, 0, 0.0, torch.tensor(0.0)), (1.0, torch.tensor(2.0))),
        ("dropout", (None, 0, 0.0, torch.tensor(0.0)), (0.5,)),
        ("num_splits", (None, 0), (1, 3)),
        ("alibi_slopes", (None,), (torch.zeros(2),)),
    ],
)
def test_values_that_mean_a_call_without_the_option(name, off, on):
    assert [ROWS[name].is_on(value) for value in (*off, *on)] == [False] * len(off) + [True] * len(on)


def test_the_shape_of_an_option_is_checked_in_every_call():
    """A kernel of a known kind would read slopes that aren't there."""
    with attnreg.use_backend("math"):
        for slopes in (torch.ones(2), torch.ones(2, 2)):
            for _ in range(2):
                attend(alibi_slopes=slopes)
        for got in ((3,), (3, 2), (2, 3)):
            with pytest.raises(InvalidInputError) as error:
                attend(alibi_slopes=torch.ones(got))
            expected = f"alibi_slopes: got shape {got}, torch.float32, expected (2,) or (2, 2), torch.float32"
            assert str(error.value) == expected


def test_options_of_the_op_have_places_of_their_own_and_no_gradients_that_it_does_not_return():
    """Exported programs contain the op's schema: a new option is one more argument at its end."""
    ops = torch.ops.attnreg._varlen_attn.default, torch.ops.attnreg._varlen_attn_backward.default
    forward, backward = ([argument.name for argument in op._schema.arguments] for op in ops)
    shared = ["seqused_k", "block_table"]
    others = ["backend", "needs_backward", "softcap", "alibi_slopes", "sinks"]
    newer = [row for row in sorted(OPTIONS, key=lambda row: row.in_op) if row.in_op > 7]
    for_backward = [row.name for row in newer if "backward" in row.directions and not row.rescales]
    captured = [f"captured_{number}" for number in range(8)]
    assert forward[11:] == [*shared, "num_splits", *others, *(row.name for row in newer), *captured]
    own = ["softcap", "grad_lse", "alibi_slopes"]
    assert backward[14:] == [*shared, "backend", "choice", *own, *for_backward, *captured]
    assert len({row.in_op for row in OPTIONS if row.in_op}) == sum(row.in_op > 0 for row in OPTIONS)
    with pytest.raises(ValueError, match="got in_op with gradient, expected one"):
        dataclasses.replace(ROWS["sinks"], rescales=False)


def test_an_argument_that_there_is_not_is_an_error_whatever_its_value_and_however_the_call_runs():
    message = r"^varlen_attn\(\) got an unexpected keyword argument 'softcup'; did you mean 'softcap'\?$"

    def misspelt(query):
        return attnreg.varlen_attn(query, *ARGUMENTS[1:], softcup=None)

    for call in (misspelt, torch.func.vmap(misspelt), torch.compile(misspelt, backend="eager")):
        with pytest.raises(Exception, match=message if call is misspelt else "softcup"):
            call(INPUTS[0][None] if call is not misspelt else INPUTS[0])


@pytest.mark.slow
def test_a_softcap_that_a_graph_has_as_a_symbol_compiles():
    options = {"fullgraph": True, "dynamic": True, "backend": "eager"}
    compiled = torch.compile(lambda softcap: attend(softcap=softcap), **options)
    for softcap in (2.0, 3.0):
        assert torch.allclose(compiled(softcap), attend(softcap=softcap), atol=1e-6)


def test_a_tensor_that_says_no_dropout_is_none_in_a_transform():
    grad = torch.func.grad(
        lambda query: attnreg.varlen_attn(query, *ARGUMENTS[1:], dropout_p=torch.tensor(0.0)).sum()
    )
    expected = torch.func.grad(lambda query: attnreg.varlen_attn(query, *ARGUMENTS[1:]).sum())
    assert torch.equal(grad(INPUTS[0]), expected(INPUTS[0]))


@pytest.mark.parametrize(
    ("further", "text"),
    [
        ({"softcap": 9.0}, "further: there is no option 'softcap'"),
        ([["nope", 1]], "further: there is no option 'nope'"),
        ("ab", "further: got 'ab', expected a mapping of options to values that can be hashed"),
        (
            {"nope": [1]},
            "further: got {'nope': [1]}, expected a mapping of options to values that can be hashed",
        ),
    ],
)
def test_a_spec_refuses_further_options_that_there_are_not(further, text):
    fields = {"heads_q": 2, "heads_k": 2, "head_dim": 8, "head_dim_v": 8, "batch": 1, "max_q": 1, "max_k": 1}
    with pytest.raises(InvalidInputError) as error:
        attnreg.AttentionSpec(device=attnreg.Device("cpu"), dtype="fp32", **fields, further=further)
    assert str(error.value).startswith(text)


def test_a_call_refuses_options_that_there_are_not():
    assert Call(1.0, 5, 5).with_options({"softcap": 2.0}).softcap == 2.0
    with pytest.raises(TypeError, match=r"^Call has no option nope, softcup$"):
        Call(1.0, 5, 5).with_options({"nope": 1, "softcup": 2, "softcap": 3.0})


def test_forward_only_options_and_tensors_do_not_stay_in_what_a_backward_keeps():
    query = INPUTS[0].clone().requires_grad_()
    with attnreg.use_backend("math"):
        out = attnreg.varlen_attn(query, *ARGUMENTS[1:], num_splits=1, softcap=2.0)
    assert (out.grad_fn.call.num_splits, out.grad_fn.call.softcap) == (None, 2.0)
    assert out.grad_fn.call.cu_seqlens_q is None


def test_a_row_with_shapes_and_no_dtype_takes_each_dtype(monkeypatch):
    rows = [dataclasses.replace(row, dtype="") if row.name == "alibi_slopes" else row for row in OPTIONS]
    monkeypatch.setattr(validation, "options_on", lambda call: [x for x in rows if x.name == "alibi_slopes"])
    call = Call(1.0, 5, 5, cu_seqlens_q=OFFSETS, cu_seqlens_k=OFFSETS)
    validation.check(*INPUTS, call._replace(alibi_slopes=torch.zeros(2, dtype=torch.float64)))
    with pytest.raises(InvalidInputError, match="alibi_slopes: got shape"):
        validation.check(*INPUTS, call._replace(alibi_slopes=torch.zeros(3, dtype=torch.float64)))


def test_no_row_is_known_to_see_a_key_where_ranges_hide_keys():
    call = Call(1.0, 5, 5, cu_seqlens_q=OFFSETS, cu_seqlens_k=OFFSETS)
    assert offsets.every_row_sees_a_key(*INPUTS[:2], call)
    ranges = torch.zeros(9, 1, 2, dtype=torch.int32)
    assert not offsets.every_row_sees_a_key(*INPUTS[:2], call._replace(key_ranges=ranges))


@pytest.mark.parametrize(
    ("other", "own"),
    [
        ("causal", "is_causal"),
        ("softmax_scale", "scale"),
        ("attn_mask", "key_ranges"),
        ("s_aux", "sinks"),
        ("is_casual", "is_causal"),
        ("window", "window_size"),
        ("enable_gpa", "enable_gqa"),
        ("return_lse", "return_aux"),
        ("bakend", "backend"),
    ],
)
def test_names_of_other_functions_and_misspelt_names_lead_to_varlen_attns(other, own):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{other}'; did you mean '{own}'"):
        attend(**{other: None})


def test_the_arguments_that_are_suggested_exist():
    for function in (attnreg.varlen_attn, attnreg.explain):
        assert set(options.ARGUMENTS) <= set(inspect.signature(function).parameters)
