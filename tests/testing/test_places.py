"""Promise: the report of a failed case says where it is wrong, and its own line repeats that case alone."""

import re

import pytest
import torch

import attnreg
from attnreg.backends import math as math_backend
from attnreg.errors import InvalidInputError
from attnreg.testing import Case, Check, Conformance, check_backend, inputs
from attnreg.testing.cases import selected
from attnreg.tools.measure import CASES, measure
from attnreg.tools.measure.places import describe_faults

MATH = math_backend.BACKEND.load()
GROUPS = Case(name="groups", lens_q=(5, 5), lens_k=(7, 7), heads=(4, 2), dims=(8, 8), dtype="float32")
FEW_KEYS = Case(name="few keys", lens_q=(5, 3), lens_k=(2, 4), dims=(8, 8), dtype="float32", varlen=True,
                window=(-1, 0), tail=2)  # fmt: skip


def late_rows(q, k, v, call):
    """Compute all rows but those from 3 on."""
    out, lse = MATH.forward(q, k, v, call)
    out[:, 3:] += 1.0
    return out, lse


def nan_where_nothing_is_seen(q, k, v, call):
    out, lse = MATH.forward(q, k, v, call)
    out[(lse == -torch.inf).mT] = torch.nan
    return out, lse


def heads_across(q, k, v, call):
    """Give query head h the key head h % heads, where h // group is right."""
    across = [head % k.shape[-2] for head in range(q.shape[-2])]
    return MATH.forward(q, k[..., across, :], v[..., across, :], call)


def places(forward, case):
    errors = measure(MATH._replace(forward=forward, backward=None), case)
    return {name: error.place for name, error in errors.items() if not error.passed}


def test_wrong_rows_are_named():
    (place,) = places(late_rows, GROUPS).values()
    assert re.match(
        r"first out\[0, 3, 0, 0\] \(sequence 0, row 3, head 0, dim 0\): got [-\d.]+, expected", place
    )
    assert place.endswith(
        "; 128 of 320 elements are wrong; rows 3-4 of 5; all 2 sequences; all 4 heads; "
        "every row of a sequence sees a key"
    )


def test_a_nan_is_shown_as_nan_with_the_rows_that_see_no_key():
    errors = measure(MATH._replace(forward=nan_where_nothing_is_seen, backward=None), FEW_KEYS)
    assert str(errors["out"]).startswith("NaN > ")
    assert errors["out"].place == (
        "first out[0, 0, 0] (row 0 of sequence 0, head 0, dim 0): got NaN, expected 0; "
        "80 of 160 elements are wrong, all of them NaN; rows 0-2, 8-9 of 10; sequence 0 of 2; "
        "some of these rows are past the last offset; all 2 heads; "
        "no key is seen by rows 0-2 of 10 (some wrong rows are among them)"
    )


def test_heads_of_a_group_that_are_exchanged_are_named():
    found = places(heads_across, GROUPS)
    assert [*found] == ["out", "lse"]
    assert all("; heads 1-2 of 4; " in place for place in found.values())


def test_gradients_of_keys_say_which_keys_and_a_launcher_is_named():
    def backward(*given):
        dq, dk, dv = MATH.backward(*given)
        dk[-1, 1] += 1.0  # the last key of the last sequence, in one head
        return dq, dk, dv

    case = Case(name="packed", lens_q=(5, 3), lens_k=(6, 4), dims=(8, 8), dtype="float32", varlen=True)
    errors = measure(MATH._replace(backward=backward), case)
    assert [name for name, error in errors.items() if not error.passed] == ["dk"]
    assert re.search(r"first dk\[9, 1, 0\] \(key 3 of sequence 1, head 1, dim 0\)", errors["dk"].place)
    assert "; key 9 of 10; sequence 1 of 2; head 1 of 2" in errors["dk"].place

    def specialize(direction, tensors, call):
        return lambda *given: tuple(x + 1.0 for x in MATH.forward(*given[:3], call))

    dense = Case(name="dense", lens_q=(5, 5), lens_k=(7, 7), dims=(8, 8), dtype="float32")
    errors = measure(MATH._replace(specialize=specialize, backward=None), dense)
    assert errors["out"].place.startswith("by a launcher: first out[0, 0, 0, 0] ")


@pytest.mark.parametrize("name", ["dsinks", "dk"])
def test_sinks_and_pages_are_named_as_what_they_are(name):
    case = next(case for case in CASES if case.name == ("pages" if name == "dk" else "packed counted sinks"))
    truth = torch.zeros(9, 16, 2, 4) if name == "dk" else torch.zeros(16)
    got = truth.clone()
    got[3] = 1.0
    text = describe_faults(case, name, got, truth, 0.5, torch.zeros(2, 5))
    assert text.startswith(
        "first dk[3, 0, 0, 0] (page 3, row of the page 0, " if name == "dk" else "first dsinks[3] (head 3)"
    )
    assert text.endswith("; page 3 of 9; all 2 heads" if name == "dk" else "; head 3 of 16")


def test_what_a_kernel_writes_to_and_which_bits_differ_is_named(fake):
    def writes(q, k, v, call):
        k.view(-1)[3] = 7.0
        return MATH.forward(q, k, v, call)

    wrong = fake("mine", backward=False, load=lambda: attnreg.Kernels(writes)).backend
    failure = Conformance(wrong, "cpu").run(GROUPS).failure
    assert re.search(
        r"written to its inputs or around them: 1 of 224 elements differ, first k\[0, 0, 0, 3\]: ", failure
    )

    def differs(*given):
        out, lse = MATH.forward(*given)
        return out + torch.rand(()), lse

    case = Case(name="same", lens_q=(5,), lens_k=(7,), dtype="float32", deterministic=True)
    wrong = fake("mine", backward=False, load=lambda: attnreg.Kernels(differs)).backend
    assert "elements differ, first out[0, 0, 0, 0]: " in Conformance(wrong, "cpu").run(case).failure


def test_a_sequence_that_depends_on_its_batch_is_named(fake):
    def shrinks(q, k, v, call):
        out, lse = MATH.forward(q, k, v, call)
        return out * (1.0 - 1e-6 * (q.shape[0] == 1)), lse

    case = Case(name="same", lens_q=(5, 5), lens_k=(7, 7), dtype="float32", batch_invariant=True)
    kernels = attnreg.Kernels(shrinks)
    wrong = fake("mine", backward=False, batch_invariant=True, load=lambda: kernels).backend
    failure = Conformance(wrong, "cpu").run(case).failure
    assert "out: got other bits for a sequence in another batch; sequence 0 alone: " in failure
    assert " of 640 elements differ, first out[0, 0, " in failure


def test_a_report_has_shapes_place_and_lines_that_repeat_this_check_alone(fake):
    wrong = fake("mine", backward=False, load=lambda: attnreg.Kernels(heads_across)).backend
    with attnreg.register_backend(wrong):
        with pytest.raises(AssertionError) as raised:
            check_backend("mine", device="cpu", seed=3, cases=["heads 4:2", "drawn 5 "])
        lines = str(raised.value).splitlines()
        at = lines.index("  q (2, 65, 4, 64), k and v (2, 129, 2, 64), window=(-1, 0)")
        assert lines[at - 1].startswith("heads 4:2 bfloat16: out ")
        assert lines[at + 1].startswith("  first out[0, 0, 1, ")
        assert any(
            line.startswith("  q (314, 4, 64), k and v (314, 2, 64), lengths (113, 1, 64, 7, 129)")
            for line in lines
        )
        for line in [line.strip() for line in lines if "check_backend(" in line]:
            with pytest.raises(AssertionError) as again:
                exec(line)  # noqa: S102
            assert "1 checks: 0 right, 1 wrong" in str(again.value)
            start = lines.index(f"  {line}") - 3
            assert lines[start] in str(again.value)  # the same check, with the same error
        tensors = lines[lines.index("tensors of a check:") + 1].strip()
        names = {}
        exec(tensors.replace("; inputs(", "; drawn = inputs("), names)  # noqa: S102
    assert names["drawn"].q.shape == (2, 65, 4, 64)


def test_a_whole_name_selects_its_check_alone_and_heavy_cases_repeat_with_full(fake):
    kit = Conformance("math", "cpu")
    drawn = next(str(check) for check in kit.checks if check.case.name == "drawn 1")
    for name in (drawn, "scale 0.3 bfloat16", "SDPA in use_backend: repeated bfloat16"):
        assert [str(check) for check in selected(kit.checks, [name])] == [name]
    assert len(list(selected(kit.checks, ["heads 4:2"]))) == 2  # the packed one as well
    full = Conformance("math", "cpu", full=True)
    assert "full=True, cases=[" in full.report([]).repeat


def test_inputs_are_those_that_the_check_runs_with(fake, monkeypatch):
    given = []

    def forward(q, k, v, call):
        given.append((q.clone(), k.clone(), v.clone()))
        return MATH.forward(q, k, v, call)

    mine = fake("mine", backward=False, load=lambda: attnreg.Kernels(forward)).backend
    kit = Conformance(mine, "cpu", seed=5)
    check = next(check for check in kit.checks if check.case.name.startswith("drawn 4"))
    assert kit.find(str(check)) == check
    kit.run(check)
    for case in (check, check.case):
        drawn = inputs(case, "cpu", 5)
        assert all(torch.equal(x, y) or x.isnan().any() for x, y in zip(drawn[:3], given[0], strict=True))
        assert drawn.call.max_q == check.case.max_q
    assert isinstance(check, Check)
    with pytest.raises(
        InvalidInputError, match=r"case: got 'drawn 4', expected a Case or a Check, such as Conf"
    ):
        inputs("drawn 4")
    with pytest.raises(InvalidInputError, match=r"check: got 'drawn', expected the whole name of one"):
        kit.find("drawn")
