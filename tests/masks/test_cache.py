"""Promises about how often a mask is looked at: once while it is unchanged, and never where it mustn't."""

import gc
import threading
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from support import dense
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import attnreg
from attnreg.core.launching import offsets
from attnreg.errors import InvalidInputError, UnsupportedInputError
from attnreg.masks import cache, serving
from attnreg.masks.serving import LEFT

pytestmark = pytest.mark.usefixtures("recognise")

PLACES = torch.arange(6)
TOLD = f"{LEFT}dispatch modes, subclasses or function transforms have to see it"
TORCHS = torch._C._nn.scaled_dot_product_attention


def padded(*counts, length=6):
    return (torch.arange(length) < torch.tensor(counts)[:, None])[:, None, None]


def attend(mask, inputs=None):
    return F.scaled_dot_product_attention(*(inputs or dense.qkv()), attn_mask=mask)


def expected(mask, inputs=None):
    return TORCHS(*(inputs or dense.qkv()), attn_mask=mask)


def test_all_layers_of_a_model_share_one_read_back(reads, seen):
    mask = padded(4, 6)
    for _ in range(12):
        attend(mask).sum().backward()
    assert len(reads) == 1
    assert seen() == {"padded keys": 12}


def test_layers_that_each_cut_the_same_view_share_one_read_back(reads):
    mask = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril() & padded(4, 6, length=9)
    for _ in range(5):
        torch.testing.assert_close(attend(mask[:, :, :6, :6]), expected(mask[:, :, :6, :6]))
    assert len(reads) == 1
    attend(mask[:, :, 3:, 3:])
    assert len(reads) == 2


def test_another_tensor_with_the_same_values_is_read_again(reads):
    attend(padded(4, 6))
    attend(padded(4, 6))
    assert len(reads) == 2


WRITES = {
    "in place": lambda mask: mask[1, :, :, 2:].fill_(False),
    "by an operator": lambda mask: mask.logical_and_(padded(2, 3)),
    "by a copy": lambda mask: mask.copy_(padded(1, 5)),
    "through a view": lambda mask: mask.view(-1)[3:].zero_(),
    "through a detached one": lambda mask: mask.detach().masked_fill_(padded(1, 1), False),
    "to data": lambda mask: setattr(mask, "data", padded(3, 2)),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_that_torch_counts_is_noticed(write, reads):
    mask = padded(4, 6)
    attend(mask)
    before = mask.clone()
    write(mask)
    assert not torch.equal(mask, before)
    torch.testing.assert_close(attend(mask), expected(mask))
    assert len(reads) == 2


def test_a_write_to_the_tensor_that_a_mask_is_a_view_of_is_noticed(reads):
    whole = padded(4, 6).expand(2, 1, 6, 6).clone()
    attend(whole[..., :6])
    whole[..., 3:] = False
    torch.testing.assert_close(attend(whole[..., :6]), expected(whole))
    assert len(reads) == 2


def test_one_mask_in_calls_of_two_sizes_is_looked_at_for_each(reads):
    mask = torch.ones(1, 1, 6, 1, dtype=torch.bool)
    mask[:, :, 4:] = False
    for length in (6, 9, 6, 9):
        inputs = dense.qkv(6, length)
        torch.testing.assert_close(attend(mask, inputs), expected(mask, inputs))
    assert len(reads) == 2


def test_an_inference_tensor_is_left_to_torch_unread(reads, seen):
    with torch.inference_mode():
        mask = padded(4, 6)
        assert torch.equal(attend(mask), expected(mask))
    assert seen() == {f"{LEFT}an inference tensor, which may change unnoticed": 1}
    assert not reads


def test_a_normal_mask_is_recognised_in_inference_mode_too(seen):
    mask = padded(4, 6)
    with torch.inference_mode():
        torch.testing.assert_close(attend(mask), expected(mask))
    assert seen() == {"padded keys": 1}


@pytest.mark.parametrize("causal", [False, True], ids=["in place", "copied"])
def test_a_mask_that_was_seen_in_inference_mode_first_serves_training(causal, reads):
    mask = padded(4, 6)
    if causal:
        mask = mask & mask.mT & (PLACES[:, None] >= PLACES)
    with torch.inference_mode():
        attend(mask)
    ours, torchs = dense.qkv(), dense.qkv()
    results = dense.with_gradients(attend(mask, ours), ours)
    for got, right in zip(results, dense.with_gradients(expected(mask, torchs), torchs), strict=True):
        torch.testing.assert_close(got, right)
    assert len(reads) == 1


class Seeing(TorchDispatchMode):
    """Keeps the names of the ops it sees."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, op, types, arguments=(), options=None):
        self.names.append(op.name())
        return op(*arguments, **(options or {}))


class Functions(TorchFunctionMode):
    """Keeps the names of the functions it sees."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, function, types, arguments=(), options=None):
        self.names.append(function.__name__)
        return function(*arguments, **(options or {}))


def test_modes_see_torchs_call_and_those_of_ops_leave_the_mask_unread(reads, seen):
    mask, inputs = padded(4, 6), dense.qkv()
    with Seeing() as ops:
        attend(mask, inputs)
    assert any("scaled_dot_product" in name for name in ops.names)
    with FakeTensorMode() as mode:
        attend(mode.from_tensor(mask), [mode.from_tensor(x) for x in inputs])
    assert not reads
    assert seen() == {TOLD: 2}
    with Functions() as functions:
        attend(mask, inputs)
    assert functions.names == ["scaled_dot_product_attention"]
    assert seen() == {"padded keys": 1}


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's op has no batching rule
def test_function_transforms_get_torchs_call(reads):
    inputs = [x.detach() for x in dense.qkv()]
    masks = torch.stack([padded(4, 6), padded(2, 5)])
    rows = torch.vmap(lambda mask: F.scaled_dot_product_attention(*inputs, attn_mask=mask))(masks)
    for row, mask in zip(rows, masks, strict=True):
        torch.testing.assert_close(row, expected(mask, inputs))
    mask = padded(4, 6)
    gradient = torch.func.grad(lambda query: attend(mask, [query, *inputs[1:]]).sum())(inputs[0])
    assert gradient.shape == inputs[0].shape
    assert not reads


def test_nothing_is_read_while_a_program_is_compiled_or_exported_or_runs_as_compiled(reads, seen):
    mask, inputs = padded(4, 6), [x.detach() for x in dense.qkv()]

    class Model(torch.nn.Module):
        def forward(self, query, key, value, attn_mask):
            return F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask)

    right = expected(mask, inputs)
    for backend in ("eager", "aot_eager"):
        compiled = torch.compile(Model(), fullgraph=True, backend=backend)
        for _ in range(2):
            torch.testing.assert_close(compiled(*inputs, mask), right)
    exported = torch.export.export(Model(), (*inputs, mask)).module()
    torch.testing.assert_close(exported(*inputs, mask), right)
    assert not reads
    assert not any(not what.startswith(LEFT) for what in seen())


def test_nothing_is_read_where_a_cuda_graph_may_be_captured(monkeypatch, reads, seen):
    monkeypatch.setattr(serving, "needs_graph_memory", lambda _: True)
    mask, inputs = padded(4, 6), dense.qkv()
    assert torch.equal(attend(mask, inputs), expected(mask, inputs))
    assert not reads
    assert seen() == {f"{LEFT}it is in a CUDA graph, or may be": 1}


@pytest.mark.parametrize("write", [lambda mask: mask.data.zero_(), lambda mask: mask.numpy().fill(False)])
def test_a_write_that_torch_does_not_count_is_an_error_after_a_while(monkeypatch, trust_offsets, write):
    """As on a GPU, where a write of that kind costs an error."""
    monkeypatch.setattr(cache, "is_compared", lambda _: True)
    trust_offsets(0.0)
    mask = padded(4, 6).clone()
    right = expected(mask)
    torch.testing.assert_close(attend(mask), right)
    torch.testing.assert_close(attend(mask), right)  # compared, and nothing has changed
    write(mask[1])
    with pytest.raises(InvalidInputError, match=r"attn_mask was written to .*increment_version\(attn_mask\)"):
        for _ in range(2):
            attend(mask)
    torch.testing.assert_close(attend(mask), expected(mask))


def refuse_packed(mask):
    """Have the settings leave a recognised mask as it is, because only the reference could run the call."""
    attnreg.configure({"masks": "recognise", "disabled": ["cpu"]})
    attend(mask)


def fail_packed(mask):
    """Have the packed call that takes the place of a masked call end in an error."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(UnsupportedInputError):
        patch.setattr(serving, "varlen_attn", Mock(side_effect=UnsupportedInputError("refused")))
        attend(mask)


KEPT = {
    "without structure": (torch.eye(6).bool().logical_not().expand(2, 1, 6, 6), attend),
    "refused": (padded(4, 6), refuse_packed),
    "failed": (padded(4, 6), fail_packed),
}


@pytest.mark.parametrize(("mask", "call"), KEPT.values(), ids=KEPT)
def test_a_mask_that_no_call_ran_without_may_be_written_to(monkeypatch, trust_offsets, ran, mask, call):
    monkeypatch.setattr(cache, "is_compared", lambda _: True)
    trust_offsets(0.0)
    mask = mask.clone()
    call(mask)
    mask.data.copy_(padded(2, 3).expand_as(mask))
    call(mask)  # which begins to compare
    attnreg.reset_stats()
    with attnreg.use_backend("math"):
        results = [attend(mask) for _ in range(3)]
    assert [(row.seen, row.count) for row in attnreg.stats().masks] == [("padded keys", 3)]
    assert ran() == {"math": (3, 0)}
    for result in results:
        torch.testing.assert_close(result, expected(mask))


def test_a_write_that_a_thread_finds_while_the_first_call_without_the_mask_runs_is_an_error(
    monkeypatch, trust_offsets
):
    monkeypatch.setattr(cache, "is_compared", lambda _: True)
    trust_offsets(0.0)
    mask, asked, found = padded(4, 6).clone(), [], []
    fail_packed(mask)
    mask.data.copy_(padded(2, 3))

    def ask():
        try:
            attend(mask)
        except InvalidInputError as error:
            found.append(str(error))

    def run(*given, **options):
        if not asked:
            asked.append(True)
            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()
        return attnreg.varlen_attn(*given, **options)

    monkeypatch.setattr(serving, "varlen_attn", run)
    attend(mask)  # with the old mask, as the comparison has only begun
    assert found == [cache.CHANGED]


def test_a_thread_that_asks_while_a_changed_mask_is_looked_at_again_gets_no_old_structure(
    monkeypatch, trust_offsets, ran
):
    monkeypatch.setattr(cache, "is_compared", lambda _: True)
    trust_offsets(0.0)
    mask, results, describe = padded(4, 6).clone(), [], cache.describe
    fail_packed(mask)
    mask.data.copy_(padded(2, 3))
    fail_packed(mask)  # which begins to compare

    def describe_slowly(given):
        monkeypatch.setattr(cache, "describe", describe)
        thread = threading.Thread(target=lambda: results.append(attend(mask)))
        thread.start()
        thread.join()
        return describe(given)

    monkeypatch.setattr(cache, "describe", describe_slowly)
    ran()
    results.append(attend(mask))
    assert ran() == {"cpu": (2, 0)}
    for result in results:
        torch.testing.assert_close(result, expected(mask))


def test_of_a_mask_that_is_written_to_in_each_step_the_last_state_is_kept():
    one, other = padded(4, 6), padded(2, 5)
    attend(other)
    for _ in range(100):
        one.logical_not_()
        attend(one)
    assert len(offsets._cache) == 2


def test_memory_that_a_look_lacks_leaves_the_mask_to_torch(monkeypatch, seen):
    def describe(mask):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(cache, "describe", describe)
    mask = padded(4, 6)
    assert torch.equal(attend(mask), expected(mask))
    assert seen() == {f"{LEFT}a look at it takes more memory than there is": 1}


def test_what_is_kept_goes_with_its_mask():
    mask = padded(4, 6)
    attend(mask)
    assert len(offsets._cache) == 1
    del mask
    gc.collect()
    assert not offsets._cache


@pytest.mark.slow
def test_what_is_kept_is_bounded():
    masks = [padded(4, 6) for _ in range(70)]
    for mask in masks:
        attend(mask)
    assert 0 < len(offsets._cache) <= 64
    one = masks[0]
    for _ in range(70):  # a mask that is written to for each batch
        one.logical_not_()
        attend(one)
    assert len(offsets._cache) <= 64
    found = cache.find(one, (2, 6, 6))
    for length in range(2 * serving.MOST_KINDS):
        attend(one, dense.qkv(dim=length + 1))
    assert len(found.refused) <= serving.MOST_KINDS


@pytest.mark.usefixtures("hasty")
def test_threads_share_masks_that_come_and_go():
    shared, failures = [padded(4, 6), padded(1, 5), padded(6, 2)], []
    inputs = [x.detach() for x in dense.qkv()]
    right = [expected(mask, inputs) for mask in shared]

    def work(number):
        try:
            for turn in range(12):
                which = (turn + number) % 3
                torch.testing.assert_close(attend(shared[which], inputs), right[which])
                torch.testing.assert_close(attend(shared[which].clone(), inputs), right[which])
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(offsets._cache) <= 64
    assert attnreg.stats().masks[0].count == 6 * 12 * 2
