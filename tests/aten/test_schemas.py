"""The routes' arguments and layouts, against the ops of every torch that they are for."""

import contextlib
import re
from typing import NamedTuple

import pytest
import torch

import attnreg
from attnreg.core import aten
from attnreg.core.aten import schemas
from attnreg.core.aten.routing import OpLayout, Route, router
from attnreg.core.dispatch.planning import Native
from attnreg.errors import RegistrationError, UnsupportedInputError

VERSIONS = ((2, 11), (2, 12), (2, 13), (2, 14), (2, 15))
SOFTMAX = "float? scale=None"
WINDOW = "SymInt? window_size_left=None, SymInt? window_size_right=None"
QKV = "Tensor query, Tensor key, Tensor value"
VARLEN = "Tensor? cum_seq_q, Tensor? cum_seq_k, SymInt max_q, SymInt max_k"
FLASH = f"{QKV}, {VARLEN}, float dropout_p, bool is_causal, bool return_debug_mask, *, {SOFTMAX}, {WINDOW}, Tensor? seqused_k=None, Tensor? alibi_slopes=None"  # noqa: E501 - a schema
PAGED = "Tensor? block_table=None, int? num_splits=None"
SAVED = f"Tensor grad_out, {QKV}, Tensor out, Tensor logsumexp"
CUDNN = "float dropout_p=0., bool is_causal=False, bool return_debug_mask=False, *, float? scale=None"
CUDNN_VARLEN = f"{QKV}, Tensor? attn_bias, {VARLEN}, bool compute_log_sumexp, {CUDNN}"
CUDNN_SAVED = f"{SAVED}, Tensor philox_seed, Tensor philox_offset, Tensor attn_bias, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, *, {SOFTMAX}"  # noqa: E501 - a schema
EFFICIENT = "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt{0} max_seqlen_q, SymInt{0} max_seqlen_k"
EFFICIENT_SAVED = f"Tensor grad_out_, {QKV}, Tensor? bias, Tensor out, {EFFICIENT.format('')}"
FOR_CPU = "*, Tensor? attn_mask=None, float? scale=None"

# Each op's arguments in each torch: from the first version named up to the next.
DECLARED = {
    "_flash_attention_forward": {(2, 11): FLASH, (2, 12): f"{FLASH}, {PAGED}"},
    "_flash_attention_forward_no_dropout_inplace": {(2, 12): f"Tensor(a!) out, {FLASH}, {PAGED}"},
    "_flash_attention_backward": {
        (2, 11): f"{SAVED}, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, "
        f"float dropout_p, bool is_causal, Tensor rng_state, Tensor unused, *, {SOFTMAX}, {WINDOW}"
    },
    "_scaled_dot_product_flash_attention_for_cpu": {
        (2, 11): f"{QKV}, float dropout_p=0., bool is_causal=False, {FOR_CPU}"
    },
    "_scaled_dot_product_flash_attention_for_cpu_backward": {
        (2, 11): f"{SAVED}, float dropout_p, bool is_causal, {FOR_CPU}"
    },
    "_cudnn_attention_forward": {
        (2, 11): CUDNN_VARLEN,
        (2, 14): f"{CUDNN_VARLEN}, Tensor? seqused_k=None, Tensor? block_table=None",
    },
    "_cudnn_attention_backward": {(2, 11): CUDNN_SAVED},
    "_efficient_attention_forward": {
        (2, 11): f"{QKV}, Tensor? bias, {EFFICIENT.format('?')}, float dropout_p, int custom_mask_type, "
        f"bool compute_log_sumexp=False, *, {SOFTMAX}, Tensor? seqlen_k=None, int? window_size=None"
    },
    "_efficient_attention_backward": {
        (2, 11): f"{EFFICIENT_SAVED}, Tensor logsumexp, float dropout_p, Tensor philox_seed, "
        f"Tensor philox_offset, int custom_mask_type, bool bias_requires_grad, *, {SOFTMAX}, "
        "int? num_splits_key=None, int? window_size=None, bool shared_storage_dqdkdv=False"
    },
    "_cudnn_attention_forward_no_dropout_inplace": {
        (2, 15): f"Tensor(a!) out, {QKV}, Tensor cum_seq_q, Tensor? cum_seq_k, SymInt max_q, SymInt max_k, "
        f"bool is_causal=False, *, {SOFTMAX}, Tensor? seqused_k=None, Tensor? block_table=None"
    },
}

ROUTES = {route.op: route for route in aten.ROUTES}
HERE = tuple(map(int, torch.__version__.split(".")[:2]))
DECLARED_HERE = [op for op, versions in DECLARED.items() if min(versions) <= HERE]


class Argument(NamedTuple):
    """An argument as a schema declares it."""

    name: str
    keyword_only: bool
    required: bool


def declared(op, version):
    """Return the arguments of an op in a torch, or None if that has no such op."""
    versions = [text for since, text in DECLARED[op].items() if since <= version]
    if not versions:
        return None
    found, keyword_only = [], False
    for part in versions[-1].split(", "):
        if part == "*":
            keyword_only = True
            continue
        name, _, default = part.split(" ")[-1].partition("=")
        found.append(Argument(name, keyword_only, not default))
    return found


def schema_of(op):
    return getattr(torch.ops.aten, op).default._schema


def test_the_table_is_right_about_the_torch_that_is_installed():
    assert [op for op in DECLARED if hasattr(torch.ops.aten, op)] == DECLARED_HERE
    for op in DECLARED_HERE:
        given = schema_of(op).arguments
        assert declared(op, HERE) == [
            Argument(x.name, x.kwarg_only, not x.has_default_value()) for x in given
        ], op
        latest = [written for since, written in DECLARED[op].items() if since <= HERE][-1]
        assert str(schema_of(op)).startswith(f"aten::{op}({latest}) -> ")


def test_every_routed_op_is_in_the_table_and_every_class_in_use():
    assert DECLARED.keys() == ROUTES.keys()
    assert {route.arguments for route in aten.ROUTES} == {
        getattr(schemas, name) for name in vars(schemas) if re.search("(Forward|Backward|Inplace)$", name)
    }


@pytest.mark.parametrize("op", DECLARED_HERE)
def test_a_class_has_the_defaults_of_the_installed_op(op):
    defaults = ROUTES[op].arguments._field_defaults
    arguments = [x for x in schema_of(op).arguments if x.has_default_value() or x.name in defaults]
    for argument in arguments:
        assert argument.has_default_value(), argument.name
        assert defaults[argument.name] == argument.default_value


@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: "{}.{}".format(*version))
@pytest.mark.parametrize("op", DECLARED)
def test_every_argument_of_every_version_is_a_field_in_its_place(op, version):
    arguments, route = declared(op, version), ROUTES[op]
    if arguments is None:
        assert version < route.since
        return
    fields = route.arguments._fields
    assert [a.name for a in arguments] == list(fields[: len(arguments)])
    # What this version lacks has a default, so that the class can be made without it.
    assert set(fields[len(arguments) :]) <= set(route.arguments._field_defaults)


@pytest.mark.parametrize("op", DECLARED_HERE)
def test_a_layout_names_the_places_of_query_key_and_value_of_the_installed_op(op):
    layout, arguments = ROUTES[op].layout, schema_of(op).arguments
    names, types = [x.name for x in arguments], [str(x.type) for x in arguments]
    assert names[layout.query : layout.query + 3] == ["query", "key", "value"]
    if op == "_efficient_attention_backward":
        return  # of which nothing is kept but torch's own kernel, with the arguments as they come
    # The compiled router takes all arguments up to these, in a backward output and LSE as well, for tensors.
    count = 6 if op.endswith("backward") else layout.query + 3
    assert types[:count] == ["Tensor"] * count
    if op.endswith("backward"):
        assert names[:6] == ["grad_out", "query", "key", "value", "out", "logsumexp"]


@pytest.mark.parametrize("op", [op for op in DECLARED_HERE if op.endswith("backward")])
def test_the_choice_token_is_a_result_of_the_forward_and_the_argument_of_the_same_name(op):
    route = ROUTES[op]
    forward_op = op.removesuffix("_backward")
    forward = ROUTES[forward_op if forward_op in ROUTES else f"{forward_op}_forward"]
    argument = schema_of(op).arguments[route.layout.token_argument]
    result = schema_of(forward.op).returns[forward.layout.token_result]
    assert (argument.name, str(argument.type)) == (route.token, "Tensor")
    assert (result.name, str(result.type)) == (route.token, "Tensor")
    assert (route.layout.token_result, forward.layout.token_argument, forward.token) == (-1, -1, "")
    assert route.layout.bhsd == forward.layout.bhsd
    assert route.layout.lse_ends_in_one == forward.layout.lse_ends_in_one


@pytest.mark.parametrize("kind", ["flash", "cudnn"])
def test_an_op_that_returns_no_saved_tensors_has_no_token(kind):
    inplace = ROUTES[f"_{kind}_attention_forward_no_dropout_inplace"]
    assert (inplace.token, inplace.layout.token_argument, inplace.layout.token_result) == ("", -1, -1)
    assert inplace.arguments._fields[: inplace.layout.query] == ("out",)


# ---- torches to come: an op of the tests' own stands in for one of aten


@pytest.fixture
def ops(monkeypatch):
    """Return a library whose ops attnreg takes for aten's."""
    aten.ensure()  # a scope would install the routers, over these ops
    library = torch.library.Library("attnreg_test", "FRAGMENT")
    monkeypatch.setattr(torch.ops, "aten", torch.ops.attnreg_test)
    yield library
    library._destroy()


class Known(NamedTuple):
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    is_causal: bool = False
    scale: float | None = None


def serve(given, routed):
    raise AssertionError("the call was to pass to torch's own kernel")


ROUTE = Route("attend", ("CPU",), Known, serve, Native("cpu"), OpLayout(query=0))


CAUSAL = "bool is_causal=False"
REFUSED = {
    "moved": f"Tensor key, Tensor query, Tensor value, {CAUSAL}, *, {SOFTMAX}",
    "renamed": f"{QKV}s, {CAUSAL}, *, {SOFTMAX}",
    "one more in the middle": f"{QKV}, float dropout_p=0., {CAUSAL}, *, {SOFTMAX}",
    "one more at the end": f"{QKV}, {CAUSAL}, {SOFTMAX}, bool new=False",
    "one more that must be given": f"{QKV}, {CAUSAL}, *, {SOFTMAX}, int new",
}


@pytest.mark.parametrize("schema", REFUSED.values(), ids=REFUSED)
def test_an_argument_that_has_moved_is_an_error_with_both_schemas(ops, schema):
    ops.define(f"attend({schema}) -> Tensor")
    with pytest.raises(RegistrationError) as error:
        aten._unknown_arguments(ROUTE)
    declared = torch.ops.aten.attend.default._schema
    assert str(error.value) == (
        f"aten::attend of torch {torch.__version__}: got {declared}, "
        "expected arguments ('query', 'key', 'value', 'is_causal', 'scale')"
    )


ACCEPTED = {
    "the same": (f"{QKV}, {CAUSAL}, *, {SOFTMAX}", ()),
    "one less": (f"{QKV}, {CAUSAL}", ()),
    "one more": (f"{QKV}, {CAUSAL}, *, {SOFTMAX}, int new=0", ("new",)),
    "now by keyword": (f"{QKV}, *, {SOFTMAX}, {CAUSAL}", ()),
}


@pytest.mark.parametrize(("schema", "unknown"), ACCEPTED.values(), ids=ACCEPTED)
def test_an_argument_that_came_or_went_is_no_error(ops, schema, unknown):
    ops.define(f"attend({schema}) -> Tensor")
    assert aten._unknown_arguments(ROUTE) == frozenset(unknown)


NEWER = f"attend({QKV}, {CAUSAL}, *, {SOFTMAX}, Tensor? sinks=None, int[]? splits=None) -> Tensor"


@pytest.fixture
def newer(ops):
    """Route an op that has two arguments more than attnreg knows; returns the calls of the original."""
    ops.define(NEWER)
    calls = []

    def original(*args, **kwargs):
        calls.append((args, kwargs))
        return args[0].clone()

    unknown = aten._unknown_arguments(ROUTE)
    assert unknown == {"sinks", "splits"}
    aten._register(ops, "attend", "CPU", router(ROUTE, original, unknown), ROUTE.layout)
    return calls


@pytest.mark.parametrize("scoped", [False, True])
def test_an_argument_of_a_newer_torch_passes_the_call_untouched_also_in_a_scope(newer, scoped):
    query, key, value, sinks = (torch.randn(2, 3) for _ in range(4))
    with attnreg.use_backend("math") if scoped else contextlib.nullcontext():
        torch.ops.attnreg_test.attend(query, key, value, True, scale=0.5, sinks=sinks, splits=[1, 2])
        if scoped:
            with pytest.raises(AssertionError, match="the call was to pass to torch's own kernel"):
                torch.ops.attnreg_test.attend(query, query, query, sinks=None, splits=None)
    ((args, kwargs),) = newer
    assert all(x is y for x, y in zip(args[:3], (query, key, value), strict=True))
    assert args[3:] == (True,)
    assert kwargs.keys() == {"scale", "sinks", "splits"}
    assert kwargs["sinks"] is sinks
    assert (kwargs["scale"], kwargs["splits"]) == (0.5, [1, 2])


def test_an_argument_of_a_newer_torch_is_an_error_where_torch_has_no_kernel(ops):
    ops.define(NEWER)
    aten._register(ops, "attend", "CPU", router(ROUTE, None, frozenset({"sinks", "splits"})), ROUTE.layout)
    query = torch.randn(2, 3)
    with pytest.raises(UnsupportedInputError) as error:
        torch.ops.attnreg_test.attend(query, query, query, sinks=query, splits=[1])
    assert str(error.value) == (
        "aten::attend: argument sinks, splits is of a newer torch than attnreg knows, "
        "and torch has no kernel for this device"
    )
