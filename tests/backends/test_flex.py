"""The flex backend: its masks, tables and graphs on a CPU, where torch's dense ops run them uncompiled."""

import dataclasses

import pytest
import torch
from support.flex_graphs import backend
from support.packages import gpu_spec

import attnreg
from attnreg.backends import flex
from attnreg.backends.flex import adapter, programs, tiles
from attnreg.backends.flex.graphs import OTHER_CORES, TENSOR_CORES, float32_product
from attnreg.backends.flex.kinds import layout_of
from attnreg.core import registry
from attnreg.core.launching import offsets, visible
from attnreg.errors import BackendUnavailableError, UnsupportedInputError
from attnreg.testing import Conformance
from attnreg.tools.cli import options
from attnreg.tools.measure import QUICK, Case, inputs

FLOAT32 = {str(case).removesuffix(" float32"): case for case in QUICK if case.dtype == "float32"}

# A case of each thing that the backend declares, some of which have several.
CASES = (
    *("length 127", "packed heads 4:2", "causal lengths 64 and 1", "window (4, 0)", "no keys"),
    *("key padding mask", "additive bias", "alibi"),
    *("packed key_ranges 3, window", "packed key_ranges 2, seqused_k"),
    "packed score_mod and mask_mod, softcap, alibi, seqused_k",
)


def packed(**options):
    return Case(**{"name": "packed", "lens_q": (130, 7, 40), "lens_k": (150, 7, 33), "varlen": True,
                   "dtype": "float32", "heads": (4, 2), "window": (-1, 0), **options})  # fmt: skip


ALONE = {"varlen": True, "dtype": "float32"}


@pytest.mark.parametrize(
    ("changes", "backend"),
    [
        ({**ALONE, "max_q": 512, "max_k": 512}, "flex"),
        ({**ALONE, "max_q": 511, "max_k": 512}, "math"),
        ({**ALONE, "max_q": 512, "max_k": 511}, "math"),
        ({"varlen": True, "head_dim": 512, "max_q": 4096, "max_k": 4096}, "flex"),
        ({"varlen": True, "device": "sm_75", "dtype": "float16", "max_q": 600, "max_k": 600}, "flex"),
        ({"varlen": True, "max_q": 4096, "max_k": 4096}, "FA4"),
        ({"varlen": True, "max_q": 4096, "max_k": 4096, "key_ranges": True}, "FA4"),
        ({"varlen": True, "max_q": 4096, "max_k": 4096, "key_ranges": True, "head_dim": 256}, "flex"),
        ({"varlen": True, "max_q": 4096, "max_k": 4096, "key_ranges": True, "device": "sm_80"}, "flex"),
        ({"dtype": "float32", "heads_k": 8, "max_q": 4096, "max_k": 4096}, "efficient"),
    ],
)
def test_it_runs_long_calls_that_otherwise_only_math_runs(changes, backend):
    spec = gpu_spec(**changes, needs_backward=True)
    explanation = attnreg.explain(spec)
    assert (explanation.backend, explanation.backward.backend) == (backend, backend)
    short = attnreg.explain(dataclasses.replace(spec, max_q=2, max_k=2), backend="flex")
    assert short.backend == "flex"


def test_it_is_measured_only_where_it_is_named(monkeypatch):
    names = "FA2", "flex", "math"
    runnable = [(registry.find(name), "") for name in names]
    monkeypatch.setattr(options, "candidates", lambda *_: runnable)
    device = torch.device("cuda")
    assert [entry.name for entry in options.measurable((), device)] == ["FA2"]
    assert [entry.name for entry in options.measurable(names, device)] == list(names)


@pytest.fixture
def kit(flex_graphs):
    return Conformance(backend(), "cpu", ["float32"])


# What others of these have as well.
REPEATED = (
    *("alibi", "additive bias", "window (4, 0)", "packed key_ranges 2, seqused_k"),
    "packed score_mod and mask_mod, softcap, alibi, seqused_k",
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in REPEATED)) for name in FLOAT32 if name in CASES],
)
def test_a_case_of_each_kind_is_right_in_both_directions(kit, name):
    outcome = kit.run(FLOAT32[name])
    assert outcome.passed, outcome
    assert outcome.errors.keys() == {"out", "lse", "dq", "dk", "dv"}, outcome.reasons


OPTIONS = {
    "head dim 512": {"dims": (512, 512)},
    "a value of another head dim": {"dims": (64, 128)},
    "rows past the last offset, which are NaN": {"tail": 17, "poison": True},
    "keys that don't count, which are NaN": {"seqused_k": (100, 7, 0), "poison": True},
    "a gradient of the LSE, a negative scale and a window": {
        "grad_lse": True,
        "scale": -0.1,
        "window": (30, 5),
    },
    "a window as wide as int32 allows": {"window": (2**31 - 1, 2**31 - 1)},
    "a shared tensor of queries, keys and values": {"layout": "odd rows"},
}


ALIKE = "head dim 512", "a window as wide as int32 allows", "a shared tensor of queries, keys and values"


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=name, marks=[pytest.mark.slow] * (name in ALIKE))
        for name, options in OPTIONS.items()
    ],
)
def test_packed_options_are_right_in_both_directions(kit, options):
    outcome = kit.run(packed(**options))
    assert outcome.passed, outcome
    assert outcome.errors.keys() == {"out", "lse", "dq", "dk", "dv"}, outcome.reasons


@pytest.mark.parametrize("name", ["varlen_attn(backend=): repeated", "SDPA in use_backend: repeated"])
def test_calls_of_both_fronts_reach_the_backend_and_are_right(kit, name):
    outcome = kit.run(kit.find(f"{name} float32"))
    assert outcome.passed, outcome
    assert not outcome.refused


@pytest.mark.slow
def test_the_whole_kit_passes(kit):
    report = kit.report([kit.run(check) for check in kit.checks])
    assert [str(outcome) for outcome in report.outcomes if not outcome.passed] == []


# Programs


def called(case):
    q, k, v, grad, call = inputs(case)
    out, lse = adapter.forward(q, k, v, call)
    return adapter.backward(grad, q, k, v, out, lse, call)


def test_new_lengths_compile_nothing(flex_graphs):
    for number in range(3):
        called(packed(lens_q=(130 + 40 * number, 200), lens_k=(150 + number, 190)))
    assert [len(compiled) for compiled in flex_graphs.values()] == [1, 1]
    assert {kind.direction for kind in flex_graphs} == {"forward", "backward"}


def ranges_of(count, tokens=177):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 150, (tokens, count, 2), generator=generator, dtype=torch.int32)


@pytest.mark.slow
def test_numbers_of_ranges_share_programs(flex_graphs):
    q, k, v, _, call = inputs(packed())
    for count in (3, 4, 5, 7, 8):
        out, lse = adapter.forward(q, k, v, call._replace(key_ranges=ranges_of(count)))
        wanted = registry.find("math").kernels().forward(q, k, v, call._replace(key_ranges=ranges_of(count)))
        torch.testing.assert_close((out, lse), wanted)
    assert [len(compiled) for compiled in flex_graphs.values()] == [1, 1]


def test_more_ranges_than_a_program_has_are_left_to_math(flex_graphs, ran):
    q, k, v, _, call = inputs(packed())
    offsets = call.cu_seqlens_q, call.cu_seqlens_k, call.max_q, call.max_k
    with attnreg.register_backend(backend()):
        for count in (33, 2, 33, 32):
            attnreg.varlen_attn(q, k, v, *offsets, enable_gqa=True, key_ranges=ranges_of(count))
            assert ran() == {"flex by graphs" if count <= 32 else "math": (1, 0)}, count


def test_each_dense_layout_has_a_program_for_all_its_lengths(flex_graphs):
    for layout in ("plain", "bhsd"):
        for length in (130, 170):
            q, k, v, _, call = inputs(packed(varlen=False, lens_q=(length,) * 3, lens_k=(length + 9,) * 3))
            if layout == "bhsd":
                q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
            adapter.forward(q, k, v, call)
    assert [len(compiled) for compiled in flex_graphs.values()] == [1, 1]


def test_a_program_is_used_only_for_lengths_that_it_holds_for(flex_graphs, monkeypatch):
    """Inductor guards a limit of int32 addresses, say; here a stand-in of it specializes on a length."""

    def for_few_tokens(graph, fakes):
        bool(fakes[0].shape[2] < 200)
        return graph

    monkeypatch.setattr(programs, "compile_graph", for_few_tokens)
    for length in (130, 190, 210, 150):
        q, k, v, _, call = inputs(packed(lens_q=(length,), lens_k=(140,)))
        adapter.forward(q, k, v, call)
    assert [len(compiled) for compiled in flex_graphs.values()] == [2]


def test_a_kind_that_compiles_for_each_length_anew_is_given_up(flex_graphs, monkeypatch):
    monkeypatch.setattr(programs, "MOST_PROGRAMS", 2)
    monkeypatch.setattr(programs, "compile_graph", lambda graph, fakes: int(fakes[0].shape[2]) and graph)
    with pytest.raises(BackendUnavailableError, match="flex compiled 2 programs for one kind of call"):
        for length in (130, 190, 210):
            q, k, v, _, call = inputs(packed(lens_q=(length,), lens_k=(140,)))
            adapter.forward(q, k, v, call)


def test_tiles_that_the_gpu_cannot_hold_are_followed_by_smaller_ones(flex_graphs, monkeypatch):
    tried = []

    def too_large(graph, fakes):
        (node,) = (node for node in graph.graph.nodes if "flex_attention" in str(node.target))
        tried.append({name: x for name, x in node.args[6].items() if name.startswith("fwd_")})
        if len(tried) < 3:
            raise RuntimeError("No valid triton configs. OutOfResources: out of resource: shared memory")
        return graph

    monkeypatch.setattr(programs, "compile_graph", too_large)
    q, k, v, _, call = inputs(packed())
    adapter.forward(q, k, v, call)
    assert tried == [{}, *tiles.LARGE["forward", False]]


@pytest.mark.parametrize(("dim", "first"), [(64, tiles.FLOAT32["forward"]), (256, {})])
def test_float32_on_tensor_cores_has_tiles_of_its_own(flex_graphs, monkeypatch, dim, first):
    tried = []

    def kept(graph, fakes):
        (node,) = (node for node in graph.graph.nodes if "flex_attention" in str(node.target))
        tried.append({name: x for name, x in node.args[6].items() if name.startswith("fwd_")})
        return graph

    monkeypatch.setattr(programs, "compile_graph", kept)
    monkeypatch.setattr(tiles, "float32_product", lambda *_: TENSOR_CORES)
    q, k, v, _, call = inputs(packed(dims=(dim, dim)))
    adapter.forward(q, k, v, call)
    assert tried == [first]


def test_an_error_of_the_compiler_leaves_the_call_to_the_next_backend(flex_graphs, monkeypatch):
    def broken(graph, fakes):
        raise RuntimeError("no ptxas")

    monkeypatch.setattr(programs, "compile_graph", broken)
    q, k, v, _, call = inputs(packed())
    with pytest.raises(BackendUnavailableError, match=r"flex couldn't be compiled: no ptxas"):
        adapter.forward(q, k, v, call)
    with attnreg.register_backend(backend()):
        out = attnreg.varlen_attn(
            q, k, v, call.cu_seqlens_q, call.cu_seqlens_k, call.max_q, call.max_k, enable_gqa=True
        )
    assert out.isfinite().all()
    assert attnreg.stats().calls == {"cpu": {"forward": 1, "backward": 0}}


@pytest.mark.parametrize(
    ("sizes", "strides", "names", "expected"),
    [
        ((1, 4, 50, 8), (1600, 8, 32, 1), ("B", "", "S", ""), ((1600, ()), (8, ()), (32, ()), (1, ()))),
        ((3, 4, 50, 8), (1600, 8, 32, 1), ("B", "", "S", ""), ((32, ("S",)), (8, ()), (32, ()), (1, ()))),
        ((3, 4, 50, 8), (1600, 400, 8, 1), ("B", "", "S", ""), ((32, ("S",)), (8, ("S",)), (8, ()), (1, ()))),
        ((3, 4, 50, 8), (9600, 8, 96, 1), ("B", "", "S", ""), ((9600, ()), (8, ()), (96, ()), (1, ()))),
    ],
    ids=["packed", "dense", "dense, heads first", "a part of a longer cache"],
)
def test_a_layout_names_the_lengths_in_its_strides(sizes, strides, names, expected):
    layout = layout_of(torch.empty_strided(sizes, strides), names)
    expected = ((32, ("S",)), *expected[1:]) if sizes[0] == 1 else expected
    assert layout.strides == expected
    assert layout.sizes == (sizes[0] if sizes[0] == 1 else "B", 4, "S", 8)


# What queries see


def blocks_of(seen, tokens_k):
    """Return by its definition which blocks have a visible score, and which only visible ones."""
    keys = torch.arange(tokens_k)
    mask = ((keys >= seen.low[..., None]) & (keys < seen.high[..., None])).any(1)[0]
    mask = torch.nn.functional.pad(mask, (0, -tokens_k % 128, 0, -len(mask) % 128))
    blocks = mask.unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).transpose(1, 2).flatten(2)
    return blocks.any(-1), blocks.all(-1)


def listed(seen, like):
    """Return which blocks the table lists as masked, and as whole."""
    return [
        torch.zeros_like(like).scatter_(1, order.long(), torch.arange(order.shape[-1]) < number[:, None])
        for number, order in ((seen.table[at][0, 0], seen.table[at + 1][0, 0]) for at in (0, 2))
    ]


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (100, 0), (3, 200), (0, 0)], ids=str)
@pytest.mark.parametrize("lengths", [(300,), (1, 129, 0, 500, 128), (40,) * 9], ids=str)
def test_the_table_names_each_block_with_a_visible_score_and_masks_what_it_must(lengths, window):
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    tokens = sum(lengths) + 5
    seen = visible.of_packed(tokens, tokens, window, False, cu_seqlens, cu_seqlens, None)
    some, every = blocks_of(seen, tokens)
    masked, whole = listed(seen, some)
    assert not (masked & whole).any()
    assert (some <= (masked | whole)).all()
    assert (whole <= every).all()
    # All but a few: the last blocks, which are padded, and blocks of several sequences.
    assert (masked | whole).sum() <= 2 * some.sum() + 2


def test_the_table_of_a_tree_leaves_out_other_branches():
    ranges = attnreg.tree_ranges([-1, *[0] * 8], [1024, *[256] * 8])
    offsets = torch.tensor([0, len(ranges)], dtype=torch.int32)
    seen = visible.of_packed(len(ranges), len(ranges), (-1, -1), False, offsets, offsets, None, ranges)
    some, every = blocks_of(seen, len(ranges))
    masked, whole = listed(seen, some)
    assert torch.equal(masked | whole, some)
    assert torch.equal(whole, every)
    assert some.sum() < some.numel() / 2


def test_a_large_batch_has_larger_blocks():
    assert visible.block_size(2**17, 2**17) == 128
    assert visible.block_size(2**20, 2**20) == 512


def test_what_queries_see_is_derived_once_for_all_layers(flex_graphs, monkeypatch):
    made = []
    of_packed = visible.of_packed
    monkeypatch.setattr(visible, "of_packed", lambda *given: made.append(1) or of_packed(*given))
    monkeypatch.setattr(offsets, "TRUSTED", 1e9)
    q, k, v, grad, call = inputs(packed())
    for _ in range(3):
        out, lse = adapter.forward(q, k, v, call)
        adapter.backward(grad, q, k, v, out, lse, call)
    assert len(made) == 1
    call.cu_seqlens_k.copy_(torch.tensor([0, 150, 157, 170], dtype=torch.int32))
    out, _ = adapter.forward(q, k, v, call)
    assert len(made) == 2
    assert (out[157:] != 0).any()


# Choice


def explained(device="sm_90", **changes):
    return attnreg.explain(
        gpu_spec(device, **{"varlen": True, "window": (-1, 0), "needs_backward": True, **changes})
    )


def chosen(**changes):
    explanation = explained(**changes)
    return explanation.backend, explanation.backward.backend


@pytest.mark.parametrize(
    ("device", "changes"),
    [
        ("sm_90", {"head_dim": 512}),
        ("sm_90", {"dtype": "float32"}),
        ("sm_80", {"head_dim": 264}),
        ("sm_75", {"dtype": "float16"}),
    ],
    ids=["head dim 512", "float32", "head dim 264", "a card without FA2"],
)
def test_it_can_run_packed_calls_that_else_only_math_runs_and_does_where_it_is_asked_for(device, changes):
    assert chosen(device=device, **changes) == ("math", "math")
    explanation = explained(device, **changes)
    for direction in (explanation, explanation.backward):
        assert "flex" not in direction.rejected and "efficient" in direction.rejected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "FA4"),
        ({"varlen": False, "dtype": "float32", "heads_k": 8}, "efficient"),
        ({"head_dim": 520}, "math"),
        ({"dropout": 0.1, "head_dim": 512}, "math"),
    ],
    ids=["16 bits", "dense float32", "a head dim above 512", "dropout"],
)
def test_what_other_kernels_run_is_not_left_to_it(changes, expected):
    assert chosen(**changes) == (expected, expected)


def test_bfloat16_needs_a_card_that_has_it():
    reasons = registry.find("flex").reasons(gpu_spec("sm_75", head_dim=512), "forward")
    assert reasons == ("compute capability must be 8.0 or above for bfloat16, got 7.5",)


def test_a_call_in_a_cuda_graph_is_left_to_another_backend():
    reasons = registry.find("flex").reasons(gpu_spec(head_dim=512, capturing=True), "forward")
    assert reasons == ("can't be recorded in a CUDA graph",)


def test_without_triton_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(flex, "find_spec", lambda name: None)
    assert flex.BACKEND.unavailable() == "triton isn't installed"


# Functions of scores


def with_bias(bias, slope=0.5):
    def score_mod(score, batch, head, query, key):
        return score + bias[head, (query - key).abs() % 7] - slope * key

    return score_mod


def assert_like_math(q, k, v, call, grad):
    out, lse = adapter.forward(q, k, v, call)
    math = registry.find("math").kernels()
    torch.testing.assert_close((out, lse), math.forward(q, k, v, call))
    got = adapter.backward(grad, q, k, v, out, lse, call)
    torch.testing.assert_close(got, math.backward(grad, q, k, v, out, lse, call), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_functions_made_anew_and_captured_tensors_of_other_sizes_compile_nothing(flex_graphs):
    for number in range(3):
        q, k, v, grad, call = inputs(packed(lens_q=(130 + 40 * number, 200), lens_k=(150 + number, 190)))
        tokens = torch.linspace(-1.0, 1.0, len(k))
        offsets = call.cu_seqlens_k

        def mask_mod(batch, head, query, key, tokens=tokens, offsets=offsets):
            return tokens[offsets[batch] + key] < 0.5

        bias = torch.randn(4, 7, generator=torch.Generator().manual_seed(number))
        assert_like_math(q, k, v, call._replace(score_mod=with_bias(bias), mask_mod=mask_mod), grad)
    assert [len(compiled) for compiled in flex_graphs.values()] == [1, 1]


@pytest.mark.slow
def test_another_function_is_another_program_and_the_oldest_are_forgotten(flex_graphs, monkeypatch):
    monkeypatch.setattr(programs, "MOST_WITH_FUNCTIONS", 2)
    q, k, v, _, call = inputs(packed())
    adapter.forward(q, k, v, call)
    for slope in range(3):
        of_slope = call._replace(score_mod=with_bias(torch.zeros(4, 7), slope))
        wanted = registry.find("math").kernels().forward(q, k, v, of_slope)
        torch.testing.assert_close(adapter.forward(q, k, v, of_slope), wanted)
    assert sum(bool(kind.score_mod) for kind in flex_graphs) == 2
    assert sum(not kind.score_mod for kind in flex_graphs) == 1


@pytest.mark.slow
def test_functions_of_scores_read_only_places_that_exist(flex_graphs):
    """Sequences without queries or without keys, rows of no sequence, and keys that don't count."""
    case = packed(lens_q=(0, 30, 5, 7, 0), lens_k=(9, 33, 0, 7, 0), seqused_k=(9, 20, 0, 7, 0), tail=3)
    q, k, v, grad, call = inputs(case)
    of_queries, of_keys = torch.linspace(-1.0, 1.0, 42), torch.linspace(-1.0, 1.0, 49)
    cu_q, cu_k = call.cu_seqlens_q, call.cu_seqlens_k

    def score_mod(score, batch, head, query, key):
        return score + of_queries[cu_q[batch] + query] * of_keys[cu_k[batch] + key]

    assert_like_math(q, k, v, call._replace(score_mod=score_mod), grad)


def test_a_function_that_cannot_be_traced_is_left_to_math_each_time_or_refused(flex_graphs):
    q, k, v, _, call = inputs(packed())
    host = torch.tensor(2.0)
    given = q, k, v, call.cu_seqlens_q, call.cu_seqlens_k, call.max_q, call.max_k

    def score_mod(score, *_):
        return score * host.item()

    with attnreg.register_backend(backend()):
        for _ in range(2):
            out = attnreg.varlen_attn(*given, enable_gqa=True, score_mod=score_mod)
    assert attnreg.stats().calls == {"math": {"forward": 2, "backward": 0}}
    torch.testing.assert_close(out, attnreg.varlen_attn(*given, enable_gqa=True, scale=64**-0.5 * 2))
    with attnreg.register_backend(backend()), pytest.raises(UnsupportedInputError, match="by item"):
        attnreg.varlen_attn(*given, enable_gqa=True, score_mod=score_mod, backend="flex by graphs")


@pytest.mark.parametrize(
    ("device", "capability", "expected"),
    [("cuda", (9, 0), "tf32x3"), ("cuda", (8, 0), "tf32x3"), ("cuda", (7, 5), "ieee"), ("cpu", None, "ieee")],
)
def test_float32_is_multiplied_by_tensor_cores_that_have_tf32_and_not_by_one_product(
    monkeypatch, device, capability, expected
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    torch.set_float32_matmul_precision("high")  # of torch's own products
    try:
        assert float32_product(torch.device(device), 256) == expected
        assert float32_product(torch.device(device), 264) == OTHER_CORES
    finally:
        torch.set_float32_matmul_precision("highest")
