"""Promises about classes of lengths: what is decided for one call of a class is right for all."""

import collections
import itertools
import random
import types
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from support.dense import with_gradients
from support.launcher_kinds import forward_function
from support.length_kinds import DEVICES, draw_backend, draw_cut, draw_kind

import attnreg
from attnreg.core import registry
from attnreg.core.contract.capabilities import ANY_SIZE
from attnreg.core.contract.lengths import LENGTHS, OF_ALL, Cut, Lengths, changes_at, with_lengths
from attnreg.core.contract.spec import AttentionSpec, Device
from attnreg.core.dispatch import state
from attnreg.core.dispatch.kinds import kind_of
from attnreg.core.dispatch.planning import decide
from attnreg.core.dispatch.state import CallKind, Detail
from attnreg.core.registry.entry import Entry
from attnreg.core.selection.decision import Policy, Ranking
from attnreg.core.times import tables
from attnreg.core.times.table import load
from attnreg.testing import classes
from attnreg.testing.classes import by_class, draw_spec

pytestmark = pytest.mark.usefixtures("one_thread")

CALLS_OF_A_KIND = 60
WAYS = "forward", "backward"


def directions(spec):
    return ("forward", "backward") if spec.needs_backward else ("forward",)


def replaces(entry, spec, direction):
    """Whether a backend runs a call that torch's selector has sent to the kernel of its name."""
    if entry._kernels is None or entry._kernels.replaces_native is None or spec.varlen:
        return False
    return not entry.reasons(spec, direction) and entry._kernels.replaces_native(direction, spec)


def decided(entries, spec):
    """Return all that a decision about a call is made of, without the numbers that reasons name."""
    found = []
    for direction in directions(spec):
        decision = decide(spec, direction, entries, Policy())
        replacing = [name for name, entry in entries.items() if replaces(entry, spec, direction)]
        builds = [name for name, entry in entries.items() if entry.builds(spec)]
        able = [name for name in decision.order if name not in decision.rejected]
        found.append((decision.backend, able, replacing, builds))
    return found


def looks_at_lengths(entries, spec):
    """Whether calls like this one are decided by exact lengths."""
    return any(
        entry.unnamed_reads(spec, direction) for entry in entries.values() for direction in directions(spec)
    )


def check_pairs(entries, spec, draw, pairs):
    """Compare what is decided about pairs of one class; returns how many there were, and of exact ones."""
    cuts = kind_of(types.SimpleNamespace(entries=entries, policy=Policy()), spec, "forward").cuts
    drawn = [draw_spec(draw, spec, cuts) for _ in range(CALLS_OF_A_KIND)]
    compared = exact = 0
    for group in by_class(drawn, cuts):
        first = group[0]
        if looks_at_lengths(entries, first):
            exact += len(group) - 1
            continue
        expected = decided(entries, first) if len(group) > 1 else None
        for other in group[1:]:
            assert decided(entries, other) == expected, f"{first}\n{other}"
            compared += 1
            if compared == pairs:
                return compared, exact
    return compared, exact


def check_many(entries_of, seed, pairs, **changes):
    """Check so many pairs of kinds that are drawn; returns how many more are decided by exact lengths.

    All kinds are changed by `changes`.
    """
    draw, compared, exact = random.Random(seed), 0, 0
    while compared < pairs:
        more = check_pairs(entries_of(draw), draw_kind(draw).but(**changes), draw, pairs - compared)
        compared, exact = compared + more[0], exact + more[1]
    return exact


@pytest.fixture
def built_in():
    """Return all built-in backends, with the kernels of those that load here."""
    entries = dict(registry.entries())
    for name in ("cpu", "math"):
        entries[name].kernels()
    return entries


MANY = pytest.param(100_000, marks=pytest.mark.slow)


@pytest.mark.parametrize("pairs", [100, MANY])
def test_built_in_backends_decide_alike_about_all_lengths_of_a_class(built_in, pairs):
    exact = check_many(lambda _: built_in, 0, pairs)
    assert exact <= pairs // 10, "most calls are decided by class"


@pytest.mark.parametrize("pairs", [100, MANY])
def test_built_in_backends_decide_alike_about_all_numbers_of_ranges_of_a_class(built_in, pairs):
    given = {"varlen": True, "bias": False, "key_ranges": True}
    exact = check_many(lambda _: built_in, 3, pairs, **given)
    assert exact <= pairs // 10, "most calls are decided by class"


@pytest.mark.parametrize("kinds", [12, pytest.param(1_500, marks=pytest.mark.slow)])
def test_the_shipped_table_predicts_either_all_lengths_of_a_class_or_none(built_in, kinds):
    """Without the tables' own cuts some classes have both, of which the first call would decide for all."""
    shipped = load(Path(tables.__file__).parent / "shipped" / "nvidia-h200.json")
    times, draw = tables.NamedTables((tables.Named(shipped, "a test"),), lambda: built_in), random.Random(4)
    counts = {True: 0, False: 0}
    for _ in range(kinds):
        spec = draw_kind(draw).but(device=Device.parse("sm_90"))
        now = types.SimpleNamespace(entries=built_in, policy=Policy(tables=times))
        cuts = kind_of(now, spec, "forward").cuts
        assert {*times.cuts(spec.device)} <= {*cuts}
        for group in by_class([draw_spec(draw, spec, cuts) for _ in range(CALLS_OF_A_KIND)], cuts):
            for direction in directions(spec):
                found = {times.predict(each.of(direction), direction) is not None for each in group}
                assert len(found) == 1, group
                counts[found.pop()] += 1
    assert min(counts.values()) > kinds // 2


@pytest.mark.parametrize("kinds", [8, pytest.param(1_500, marks=pytest.mark.slow)])
def test_a_ranking_of_one_call_decides_by_times_as_each_call_of_its_class(built_in, kinds):
    """What `Steps` relies on: of the lengths of a class the times alone are looked up again."""
    shipped = load(Path(tables.__file__).parent / "shipped" / "nvidia-h200.json")
    times, draw = tables.NamedTables((tables.Named(shipped, "a test"),), lambda: built_in), random.Random(5)
    policy, chosen = Policy(tables=times), collections.Counter()
    for _ in range(kinds):
        spec = draw_kind(draw).but(device=Device.parse("sm_90"))
        now = types.SimpleNamespace(entries=built_in, policy=policy)
        cuts = kind_of(now, spec, "forward").cuts
        for group in by_class([draw_spec(draw, spec, cuts) for _ in range(CALLS_OF_A_KIND)], cuts):
            if looks_at_lengths(built_in, group[0]):
                continue
            for direction in directions(spec):
                ranking = Ranking(group[0].of(direction), direction, built_in, policy)
                for each in group:
                    prediction = times.predict(each.of(direction), direction)
                    found = ranking.decision(prediction, complete=False)
                    expected = decide(each, direction, built_in, policy, complete=False)
                    assert parts(found) == parts(expected), each
                    chosen[found.backend] += prediction is not None
    assert len(chosen) > 2


def parts(decision):
    return decision.backend, decision.source, decision.order, decision.passed_over, decision.refusal


@pytest.mark.parametrize("native", ["", "cpu"])
@pytest.mark.parametrize("decides", ["table", "lock", "recording", "default"])
def test_tables_are_looked_at_only_where_they_decide(decides, native):
    """Else a table of another machine would be warned of, and tables that ship be read."""
    looked = []

    class Tables:
        def cuts(self, device):
            looked.append(device)
            return (Cut.of("max_q", at=17),)

    class Lock:
        def cuts(self, spec, direction):
            return ()

    policy = Policy(
        tables=Tables(), lock=Lock() if decides == "lock" else None,
        only_recording=decides == "recording", by_measurement=decides == "table",
    )  # fmt: skip
    spec = draw_kind(random.Random(0))
    cuts = kind_of(types.SimpleNamespace(entries={}, policy=policy), spec, "forward", native).cuts
    counts = decides == "table" or (decides != "lock" and not native)
    assert bool(looked) is (Cut.of("max_q", at=17) in cuts) is counts


def beside(spec, cut):
    """Yield calls whose lengths lie at a cut and on both sides of it."""
    for name in sorted(cut.names):
        at = changes_at(spec, cut, name)
        if at is not None:
            yield [with_lengths(spec, **{name: max(at + further, 0)}) for further in (-2, -1, 0, 1)]


@pytest.mark.parametrize("name", registry.entries())
def test_beside_each_of_its_cuts_a_built_in_backend_decides_as_the_class_says(built_in, name):
    entry, draw = built_in[name], random.Random(name)
    for _ in range(50):
        spec = draw_kind(draw)
        for direction in directions(spec):
            if entry.reasons(spec, direction):
                continue
            cuts = entry.cuts(spec, direction)
            for calls in itertools.chain.from_iterable(beside(spec, cut) for cut in cuts):
                for group in by_class(calls, (*OF_ALL, *cuts)):
                    found = [classes.decided(entry, call, direction) for call in group]
                    assert len({*found}) <= 1 or looks_at_lengths({name: entry}, group[0]), group


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0)])
@pytest.mark.parametrize("varlen", [True, False])
def test_usual_calls_are_decided_by_class(built_in, varlen, window):
    for device, dtype in itertools.product(DEVICES, ("bfloat16", "float32")):
        spec = AttentionSpec(
            device=device, dtype=dtype, batch=8, max_q=300, max_k=300, heads_q=8, heads_k=2, head_dim=64,
            head_dim_v=64, varlen=varlen, window=window,
        )  # fmt: skip
        read = {(name, way): one.unnamed_reads(spec, way) for name, one in built_in.items() for way in WAYS}
        assert {key: names for key, names in read.items() if names} == {}


@pytest.mark.parametrize("pairs", [100, MANY])
def test_backends_with_cuts_of_any_form_decide_alike_about_all_lengths_of_a_class(pairs):
    def made_up(draw):
        made = [draw_backend(draw, f"made{number}") for number in range(draw.randint(1, 3))]
        return {one.name: Entry(one.name, "a test", one) for one in made}

    exact = check_many(made_up, 1, pairs)
    assert exact > pairs // 20, "some look at lengths that they don't declare"


@pytest.mark.parametrize("wrong_by", [-1, 1])
def test_the_check_of_pairs_finds_a_cut_that_is_wrong_by_one(fake, wrong_by):
    def refuses(spec):
        return (f"max_k must be below 4096, got {spec.max_k}",) if spec.max_k >= 4096 else ()

    cut = Cut.of("max_k", at=4096 + wrong_by)
    mine = fake("mine", refuses=refuses, cuts=lambda _: [cut]).backend
    with pytest.raises(AssertionError, match=f"{4096 + min(wrong_by, 0)}"):
        check_many(lambda _: {"mine": Entry("mine", "a test", mine)}, 2, 1_000)


# ---- through calls


@pytest.mark.parametrize("declared", [True, False])
def test_lengths_that_no_cut_names_are_decided_exactly(packed, fake, ran, planned, declared):
    """The values, and which backend ran: of three keys more than whole eights another one."""

    def refuses(spec):
        return (f"max_k must not be 3 modulo 8, got {spec.max_k}",) if spec.max_k % 8 == 3 else ()

    def cuts(spec):
        return [Cut.of("max_k", at=at) for at in range(3, 64) if at % 8 in (3, 4)]

    options = {"cuts": cuts} if declared else {}
    first, second = fake("first", refuses=refuses, **options), fake("second")
    with attnreg.register_backend(second.backend), attnreg.register_backend(first.backend):
        for lengths in [(5, 9), (9, 2), (11, 1), (9, 3), (3, 3), (11, 4), (12, 12), (19,), (8, 8)] * 3:
            inputs = packed(lengths)
            out = attnreg.varlen_attn(*inputs)
            out.sum().backward()
            expected = "second" if max(lengths) % 8 == 3 else "first"
            assert ran() == {expected: (1, 1)}, lengths


@pytest.mark.parametrize("how", ["of both directions", "of each direction", "a class of its own"])
def test_a_declared_limit_of_a_length_names_no_other_reads_of_that_length(packed, fake, ran, how):
    def against(spec):
        return (f"batch must be even, got {spec.batch}",) if spec.batch % 2 else ()

    class Even(attnreg.Capabilities):
        def unsupported(self, spec):
            return (*super().unsupported(spec), *against(spec))

    first, second = fake("first", batch=attnreg.Range(0, 9)), fake("second")
    backend = first.backend
    if how == "a class of its own":
        limits = Even(**{one.name: getattr(backend.forward, one.name) for one in fields(backend.forward)})
        backend = replace(backend, forward=limits, backward=limits)
    elif how == "of both directions":
        backend = replace(backend, refuses=against)
    else:
        limits = replace(backend.forward, refuses=against)
        backend = replace(backend, forward=limits, backward=limits)
    with attnreg.register_backend(second.backend), attnreg.register_backend(backend):
        for batch in (2, 4, 6, 3, 5, 2, 10, 8):
            out = attnreg.varlen_attn(*packed([4] * batch))
            out.sum().backward()
            assert ran() == {"second" if batch % 2 or batch > 9 else "first": (1, 1)}, batch


def test_after_a_decline_lengths_of_the_class_are_decided_exactly(packed, fake, ran):
    """A kernel that declines calls of some lengths, which its limits don't know, runs the others."""
    first, second = fake("first"), fake("second")
    made = first.backend.load()

    def forward(q, k, v, call):
        if call.max_q % 2:
            raise attnreg.UnsupportedInputError("no engine for an odd length")
        return made.forward(q, k, v, call)

    choosy = fake("first", load=lambda: made._replace(forward=forward)).backend
    with attnreg.register_backend(second.backend), attnreg.register_backend(choosy):
        for lengths in [(4, 2), (6, 2), (5, 1), (8, 4), (7, 1), (6, 6), (5, 5), (4, 2)] * 3:
            attnreg.varlen_attn(*packed(lengths, grad=False))
            assert ran() == {"second" if max(lengths) % 2 else "first": (1, 0)}, lengths


@pytest.mark.parametrize("counts", [(3, 9, 2, 8, 3), (9, 3, 8, 2, 9)], ids=["few first", "many first"])
@pytest.mark.parametrize("declared", [True, False], ids=["by its limits", "by its kernels"])
def test_calls_with_too_many_ranges_keep_no_others_from_a_backend(packed, fake, ran, declared, counts):
    """The values, and which backend ran; of a limit that is declared there is a plan on either side."""
    few, many = fake("few"), fake("many", key_ranges=True)
    made = few.backend.load()

    def of_four(kernel):
        def run(*given):
            if given[-1].key_ranges.shape[1] > 4:
                raise attnreg.UnsupportedInputError("no kernel for five ranges")
            return kernel(*given)

        return run

    kernels = made if declared else attnreg.Kernels(of_four(made.forward), of_four(made.backward))
    allowed = attnreg.Range(0, 4) if declared else ANY_SIZE
    chosen = fake("few", load=lambda: kernels, key_ranges=True, ranges=allowed).backend
    inputs, generator = packed([20, 13]), torch.Generator().manual_seed(0)
    ranges = torch.randint(0, 20, (33, 9, 2), generator=generator, dtype=torch.int32)

    def attend(count, **options):
        return with_gradients(
            attnreg.varlen_attn(*inputs, key_ranges=ranges[:, :count], **options), inputs[:3]
        )

    expected = {count: attend(count, backend="math") for count in counts}
    ran()
    with attnreg.register_backend(many.backend), attnreg.register_backend(chosen):
        for count in counts:
            torch.testing.assert_close(attend(count), expected[count])
            assert ran() == {"few" if count <= 4 else "many": (1, 1)}, count
        assert not declared or len(state.state().plans()) == 4
        refused = (
            "key_ranges must have 0 to 4 ranges a query, got 9" if declared else "no kernel for five ranges"
        )
        assert attnreg.explain(*inputs, key_ranges=ranges).rejected["few"] == (refused,)


# ---- in C++ as in Python


def tensors_of(lengths):
    """Return query, key, value and one tensor of offsets of a packed call."""
    generator = torch.Generator().manual_seed(0)
    sides = lengths.tokens_q, lengths.tokens_k, lengths.tokens_k
    inputs = [torch.randn(rows, 2, 8, generator=generator) for rows in sides]
    return *inputs, torch.zeros(lengths.batch + 1, dtype=torch.int32)


def sizes_of(lengths):
    """Return what the key has of lengths besides their class: whether a tensor has none, one or more."""
    return min(lengths.tokens_q, 2), min(lengths.tokens_k, 2), min(lengths.batch, 1)


def draw_near(draw, cuts):
    """Return small lengths, of which every second lie at a cut or one beside it."""
    most = dict(zip(LENGTHS, (12, 2**31 - 1, 2**31 - 1, 90, 90, 0), strict=True))  # the cache has no ranges
    drawn = Lengths(*(draw.randint(0, min(at, draw.choice((3, 12, 100)))) for at in most.values()))
    cut = draw.choice(cuts)
    name = draw.choice(sorted(cut.names))
    places = [
        number
        for number in range(min(most[name], 200))
        if cut.is_reached(drawn._replace(**{name: number}))
        is not cut.is_reached(drawn._replace(**{name: number + 1}))
    ]
    if not places or draw.random() < 0.5:
        return drawn
    return drawn._replace(**{name: min(max(draw.choice(places) + draw.choice((0, 1, 2)), 0), most[name])})


@pytest.mark.each_value("detail", "count")
@pytest.mark.parametrize("count", [1, 3, 70], ids=["a cut", "three", "more cuts than a word has bits"])
@pytest.mark.parametrize("detail", Detail)
def test_the_compiled_cache_tells_the_same_lengths_apart_as_python(packed_plan, count, detail):
    """A call is planned if, and only if, none of what Python calls its class came before."""
    packed_plan.forward = forward_function
    draw = random.Random(f"{count} {detail}")
    kind = CallKind((*OF_ALL, *(draw_cut(draw, most=2**12) for _ in range(count))))
    drawn = [draw_near(draw, kind.cuts) for _ in range(100)]
    of_class, seen = {}, set()
    for lengths in [*drawn, *draw.choices(drawn, k=100)]:
        place = CallKind(kind.cuts).key(lengths)
        # Of every second class more counts than the class.
        if of_class.setdefault(place, len(of_class) % 2 == 0) and detail is not Detail.CLASS:
            kind.details[place] = detail
        key = kind.key(lengths)
        packed_plan.plan = state.Plan("tests", None, False, (packed_plan.counter,), kind=kind, key=key)
        query, *rest, offsets = tensors_of(lengths)
        options = {"max_q": lengths.max_q, "max_k": lengths.max_k}
        planned, (out, _) = packed_plan.planned(query, *rest, offsets, offsets, **options)
        assert planned == ((sizes_of(lengths), key) not in seen), lengths
        assert torch.equal(out, query + 1 if planned else query * 2)
        seen.add((sizes_of(lengths), key))
    assert 20 < len(seen) <= 100
    assert {name for cut in kind.cuts for name in cut.names} >= {*LENGTHS} - {"ranges"}


def test_cuts_that_come_later_divide_what_was_kept(packed_plan):
    """A kind of the cache's may be several of Python's: whatever cut one of them names counts for all."""
    packed_plan.forward = forward_function
    inputs = tensors_of(Lengths(2, 8, 8, 12, 12))

    def planned(longest):
        return packed_plan.planned(*inputs, inputs[3], max_q=longest, max_k=longest)[0]

    assert [planned(8), planned(20)] == [True, False]
    packed_plan.options = {"cuts": (Cut.of("max_q", at=16),)}
    assert planned(1)  # of a class of its own: its entry brings the cut
    assert [planned(8), planned(20), planned(15), planned(16)] == [True, True, False, False]
