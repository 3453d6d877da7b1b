"""On a GPU: what a launcher does for a repeated call is as right as what the kernel did for the first."""

import dataclasses
import functools

import pytest
import torch
from support import gpu, truth
from support.launchers import packed_arguments
from test_gpu_accuracy import CAUSAL, LAYOUTS, OPEN, RAGGED, dense, kernels, ragged

import attnreg
from attnreg.core import registry
from attnreg.core.contract.backend import Call, Kernels
from attnreg.core.launching import rows
from attnreg.core.launching.launchers import AddressLauncher, FunctionLauncher, OpLauncher
from attnreg.core.torchlib import captured
from attnreg.tools.measure import measure

pytestmark = pytest.mark.gpu

SAME = [(n, n) for n in (113, 1, 33, 203)]
LONGER = ((113, 203), (1, 65), (31, 33))
alike = functools.partial(ragged, *SAME, one_cu_seqlens=True)
CASES = (
    *(dense(113, 203, window=window) for window in (OPEN, CAUSAL, (8, 2), (100, -1))),
    *(alike(window=window) for window in (OPEN, CAUSAL, (8, 2))),
    *(ragged(*LONGER, window=window) for window in (OPEN, CAUSAL)),
    dense(65, 65, heads=(8, 2), dims=(128, 128)),
    alike(heads=(8, 2), dims=(128, 128), window=CAUSAL),
    alike(dtype="float16", scale=0.2),
    # 512 tokens: an LSE in order
    *(ragged(*SAME, (162, 162), one_cu_seqlens=True, window=window) for window in (OPEN, CAUSAL)),
    *(alike(layout=layout, heads=(4, 4)) for layout in LAYOUTS),
    # Rows that see no key, and of no sequence.
    alike(window=CAUSAL, tail=5, poison=True),
    *(ragged(*RAGGED, window=window, tail=5, poison=True) for window in (OPEN, CAUSAL)),
)
# So many calls a backend may want to see before it offers a launcher.
SEEN = 6


def offers(name, direction, case):
    """Whether a backend has a launcher of such calls; FA2's backward is told of rows without a key."""
    marks_rows = name == "FA2" and direction == "backward" and case.varlen and not case.one_cu_seqlens
    return name != "math" and not marks_rows


def ways_of(launcher, tensors, call):
    """Return the results of each way to call a launcher: by Python, on addresses, with what may be known."""
    known = [False]
    if call.varlen:
        query, key = tensors[:2] if len(tensors) == 3 else tensors[1:3]
        _, sees_keys = rows.facts(call.cu_seqlens_q, call.cu_seqlens_k, len(query), len(key)).tolist()
        known += [True] * sees_keys
    runs = [launcher, launcher.on_addresses] if isinstance(launcher, AddressLauncher) else [launcher]
    return [run(*tensors, *packed_arguments(call, one)) for one in known for run in runs]


def with_launchers(forward, backward, used):
    """Return kernels that run two backends' launchers where there are some; `used` gets the directions."""

    def done(direction, kernel, specialize, tensors, call):
        for _ in range(SEEN):
            results = kernel(*tensors, call)
            torch.cuda.synchronize()  # so that the device has reported
        launcher = specialize(direction, tensors, call) if specialize is not None else None
        if launcher is None:
            return results
        used.append(direction)
        found = ways_of(launcher, tensors, call)
        for one in found:
            for result, other in zip(one, results, strict=True):
                assert torch.allclose(result.float(), other.float(), rtol=0.02, atol=0.02)
        return found[-1]

    return Kernels(
        lambda q, k, v, call: done("forward", forward.forward, forward.specialize, (q, k, v), call),
        lambda *given: done("backward", backward.backward, backward.specialize, given[:6], given[6]),
    )


def assert_right(tested, case):
    errors = measure(tested, case, "cuda")
    assert {name: str(error) for name, error in errors.items() if not error.passed} == {}
    assert errors.keys() == {"out", "lse", "dq", "dk", "dv"}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_launcher_keeps_the_rule(named, case):
    used = []
    assert_right(with_launchers(kernels(named), kernels(named), used), case)
    wanted = [direction for direction in ("forward", "backward") if offers(named, direction, case)]
    # Tensors that have to be copied first take the kernel.
    assert used == wanted or "layout" in str(case)


def test_any_forward_launcher_pairs_with_any_backward_launcher(named, other):
    for case in (dense(113, 203, window=CAUSAL), alike(window=CAUSAL), ragged(*LONGER)):
        used = []
        assert_right(with_launchers(kernels(named), kernels(other), used), case)
        wanted = [
            direction
            for direction, name in (("forward", named), ("backward", other))
            if offers(name, direction, case)
        ]
        # The LSE of cuDNN's forward may have the token first, and FA2's kernel reads it in order.
        may_copy = (named, other) == ("cuDNN", "FA2")
        assert used == wanted or (may_copy and used == ["forward"])


def test_layers_whose_tensors_have_other_strides_have_entries_of_their_own(named, ran):
    """Calls of one shape, with query, key and value in three tensors or as views of one, in turn."""
    offsets = gpu.offsets_of((40, 300, 7))
    with attnreg.register_backend(named):
        for seed in range(6):
            separate = gpu.packed((40, 300, 7), seed=seed)._replace(
                cu_seqlens_q=offsets, cu_seqlens_k=offsets
            )
            query, key, value = torch.stack([x.detach() for x in separate.qkv], 1).requires_grad_().unbind(1)
            views = separate._replace(query=query, key=key, value=value)
            assert not query.is_contiguous()
            right = gpu.expected(separate, window=CAUSAL)[0]
            for given in (separate, views):
                got = gpu.run(attnreg.varlen_attn, given, window_size=CAUSAL)
                torch.cuda.synchronize()
                gpu.assert_near(got, right)
                assert ran() == {named: (1, 1)}, seed


def record_launches(monkeypatch, named, *, programs=False):
    """Return a list to which each launch of a backend in Python adds its direction.

    Without `programs` C++ runs none of its own, which the list would lack.
    """
    entry, launched = registry.find(named), []
    original = entry.kernels()

    def recorded(direction, run):
        return lambda *given: launched.append(direction) or run(*given)

    def specialize(direction, tensors, call):
        launcher = original.specialize(direction, tensors, call)
        if isinstance(launcher, FunctionLauncher):
            kept = launcher.programs if programs else None
            return dataclasses.replace(launcher, run=recorded(direction, launcher.run), programs=kept)
        if not isinstance(launcher, AddressLauncher):
            return launcher and recorded(direction, launcher)

        def prepare(*lengths):
            how = launcher.prepare(*lengths)
            return how and how._replace(launch=recorded(direction, how.launch))

        return dataclasses.replace(launcher, run=None, prepare=prepare)

    monkeypatch.setattr(entry, "_kernels", original._replace(specialize=specialize))
    return launched


def forward_launcher_of(named):
    """Return the launcher of a forward of a kind of call that has run often enough."""
    given = gpu.packed((40, 300, 7), heads=(4, 2)).detached()
    call = Call(64**-0.5, given.max_q, given.max_k, (-1, -1), given.cu_seqlens_q, given.cu_seqlens_k)
    for _ in range(SEEN):
        kernels(named).forward(*given.qkv, call)
        torch.cuda.synchronize()
    return kernels(named).specialize("forward", tuple(given.qkv), call)


@pytest.mark.only_for("FA2", "FA4", "cuDNN")
def test_the_call_cache_runs_launchers_of_packed_calls(named, compiled_cache, monkeypatch):
    kind = type(forward_launcher_of(named))
    launched = record_launches(monkeypatch, named)
    given = gpu.packed((40, 300, 7), heads=(4, 2))
    right = gpu.expected(given)[0]
    with attnreg.register_backend(named):
        assert captured.call_cache_in_use
        for _ in range(16):
            got = gpu.run(attnreg.varlen_attn, given, enable_gqa=True)
            torch.cuda.synchronize()
            gpu.assert_near(got, right)
    assert launched[-2:] == ["forward", "backward"]
    assert launched.count("forward") >= 4
    assert kind is {"FA2": OpLauncher, "FA4": FunctionLauncher, "cuDNN": AddressLauncher}[named]


@pytest.mark.only_for("FA4")
def test_packed_calls_are_programs_that_run_without_python(named, compiled_cache, monkeypatch, ran):
    assert isinstance(forward_launcher_of(named), FunctionLauncher)
    launched = record_launches(monkeypatch, named, programs=True)
    given = gpu.packed((40, 300, 7), heads=(4, 2))
    right = gpu.expected(given)[0]
    with attnreg.register_backend(named):
        for _ in range(16):
            gpu.run(attnreg.varlen_attn, given, enable_gqa=True)
            torch.cuda.synchronize()
        launched.clear()
        ran()
        for _ in range(4):
            gpu.assert_near(gpu.run(attnreg.varlen_attn, given, enable_gqa=True), right)
    assert ran() == {named: (4, 4)}
    assert launched == []


@pytest.mark.only_for("FA2", "FA4", "math")
def test_calls_of_new_lengths_are_run_by_what_was_kept_before_them(named, compiled_cache, planned, ran):
    attend, results = functools.partial(attnreg.varlen_attn, enable_gqa=True), []
    with attnreg.register_backend(named):
        for _ in range(8):
            gpu.run(attend, gpu.packed((40, 300, 7), heads=(4, 2)))
            torch.cuda.synchronize()
        ran()
        for lengths in ((39, 280, 90), (301, 2, 0, 60, 7), (290,)):  # no sum a multiple of 4, as the first
            given = gpu.packed(lengths, heads=(4, 2))
            assert planned(lambda given=given: results.append(gpu.run(attend, given))) == 0
            assert ran() == {named: (1, 1)}
            gpu.assert_near(results[-1], gpu.expected(given)[0])


def test_a_call_of_another_kind_does_not_run_a_launcher_and_one_of_other_values_does(
    named, compiled_cache, is_kept, planned, ran
):
    given = gpu.packed((40, 300, 7), heads=(4, 2))
    right, right_lse = gpu.expected(given)
    attend = functools.partial(attnreg.varlen_attn, enable_gqa=True)

    def call(**options):
        got = gpu.run(attend, given, **options)
        torch.cuda.synchronize()
        gpu.assert_near(got, right)

    with attnreg.register_backend(named):
        for _ in range(8):
            call()
        assert is_kept(call)
        out, lse = attend(*given, return_aux=attnreg.AuxRequest(lse=True))
        truth.assert_near(out.detach().cpu(), right[0], torch.bfloat16)
        truth.assert_near(lse.cpu(), right_lse.detach(), torch.float32)
        assert lse.is_contiguous()
        assert planned(lambda: attend(*given, scale=0.5)) == 1
        assert ran() == {named: (13, 11)}
        call(backend="math")
        assert ran() == {"math": (1, 1)}
        with attnreg.use_backend("math"):
            call()
        assert ran() == {"math": (1, 1)}
        assert is_kept(call)
        with torch.autocast("cuda", torch.bfloat16):
            assert is_kept(call)
        given.cu_seqlens_q[1] += 1  # in place: other sequences now, which a kept call follows
        right, right_lse = gpu.expected(given)
        assert is_kept(call)


@pytest.mark.only_for("FA2")
def test_below_sdpa_nothing_is_allocated_that_the_kernel_doesnt_allocate(named, compiled_cache):
    inputs = [torch.randn(2, 128, 4, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in "qkv"]
    op = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    kernel = captured.kernel("_flash_attention_forward", "CUDA")

    def allocated(run):
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        kept = run()
        return torch.cuda.memory_stats()["allocation.all.allocated"] - before, kept

    directly, _ = allocated(
        lambda: kernel(*(x.transpose(1, 2) for x in inputs), None, None, 128, 128, 0.0, False, False)
    )
    with attnreg.register_backend(named):
        for _ in range(4):
            op(*inputs, None, True)
        repeated, (*_, seed, offset, _) = allocated(lambda: op(*inputs, None, True))
    assert repeated == directly
    assert (seed.dtype, offset.dtype, seed.shape, offset.shape) == (torch.int64, torch.int64, (), ())
    seed.fill_(1)
    offset.fill_(2)
    assert (seed.item(), offset.item()) == (1, 2)
