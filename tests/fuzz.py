"""Makes random calls of `varlen_attn`, SDPA and `flash_attn_func`, and compares each with float64.

    python tests/fuzz.py [--seconds 60] [--calls N] [--seed S] [--device cuda] [--backends FA2,FA4,math]
    python tests/fuzz.py --seed S --only N      repeats one call

Each call is drawn from the seed and its number alone. It is made three times, with new values each time; for
a packed call the lengths change their order, and are written to the same offsets. So a new plan, a kept plan
and the call cache run it. More than half of the calls are made five times, with other lengths each time or
with keys that grow by one, in the same offsets or new ones. One in ten is a turn of four threads, each with a
call of its own.

A call fails if the largest errors of all its draws break the accuracy rule (`measure/rule.py`), or if another
backend ran than the one that was asked for and `stats()` has no reason for that. One with `deterministic` has
to give the same bits twice, and so has one with dropout and the same seed: no reference knows which weights
are dropped. `make fuzz` and `make fuzz-gpu` run this script; `support/fuzz_draws.py` draws.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import random
import secrets
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
import typer
from support.fuzz_draws import REORDERED, THREADS, Drawn, draw, draw_for_threads, repeated, with_strides
from support.fuzzed import Given, measure
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.utils.checkpoint import checkpoint

import attnreg
from attnreg.core.selection.decision import tied_to
from attnreg.errors import UnsupportedInputError
from attnreg.flash_attn import flash_attn_func
from attnreg.tools.measure.inputs import Inputs, inputs
from attnreg.tools.measure.rule import Error

REPEATS, OF_NEW_LENGTHS = 3, 5
# One in so many is a turn of several threads.
TOGETHER = 10
# Further draws of the values of a call that is beyond the rule. With two keys, or one number as the whole
# incoming gradient, the largest error of plain PyTorch is that of a few numbers, and small by chance.
MORE = 12


class Found(NamedTuple):
    """What came of a call: what to count it as, and what is wrong with it."""

    outcome: str
    wrong: str = ""


# ---- making the call


def call_once(drawn: Drawn, given: Given, leaves: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Make the call as a program does; returns the output in the contract's layout, and the LSE if any."""
    case, call = drawn.case, given.inputs.call
    q, k, v = leaves[:3]
    further = dict(zip(given.names[3:], leaves[3:], strict=True))
    scale, gqa = case.scale, case.heads[0] != case.heads[1]
    if case.varlen:
        function: Any = attnreg.varlen_attn
        result = function(
            q, k, v, call.cu_seqlens_q, call.cu_seqlens_k, case.max_q, case.max_k,
            return_aux=attnreg.AuxRequest(lse=True) if case.grad_lse else None,
            scale=scale, window_size=case.window, enable_gqa=gqa, seqused_k=call.seqused_k,
            block_table=call.block_table, num_splits=case.num_splits, softcap=case.softcap,
            alibi_slopes=call.alibi_slopes, sinks=further.get("dsinks"), dropout_p=drawn.dropout,
            backend=drawn.backend if drawn.request == "keyword" else None, key_ranges=call.key_ranges,
            score_mod=call.score_mod, mask_mod=call.mask_mod,
        )  # fmt: skip
        return result if isinstance(result, tuple) else (result,)
    if drawn.flash:
        return (flash_attn_func(q, k, v, softmax_scale=scale, causal=case.window == (-1, 0)),)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, further.get("dbias", call.attn_bias), dropout_p=drawn.dropout,
        is_causal=case.window == (-1, 0), scale=scale, enable_gqa=gqa,
    )  # fmt: skip
    return (out.transpose(1, 2),)


def run(drawn: Drawn, given: Given) -> dict[str, Tensor]:
    """Make the call in its mode; returns the results that it has."""
    before = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(drawn.case.deterministic)
    try:
        return _run(drawn, given)
    finally:
        torch.set_deterministic_debug_mode(before)


def _run(drawn: Drawn, given: Given) -> dict[str, Tensor]:
    def call(*leaves: Tensor) -> tuple[Tensor, ...]:
        with attnreg.use_backend(drawn.backend) if drawn.request == "scoped" else contextlib.nullcontext():
            return call_once(drawn, given, leaves)

    # Leaves of the very same memory layout, as a clone would have another one.
    plain = tuple(x.detach() for x in given.leaves)
    if drawn.mode in ("no_grad", "inference"):
        with torch.no_grad() if drawn.mode == "no_grad" else torch.inference_mode():
            return dict(zip(("out", "lse"), call(*plain), strict=False))
    if drawn.mode == "capture":
        return dict(zip(("out", "lse"), _captured(lambda: call(*plain)), strict=False))
    leaves = tuple(x.detach().requires_grad_() for x in plain)
    function: Callable[..., tuple[Tensor, ...]] = call
    if drawn.mode == "compile":
        torch._dynamo.reset()
        function = torch.compile(call, backend="aot_eager")
    with contextlib.ExitStack() as stack:
        if drawn.mode == "autocast":
            stack.enter_context(torch.autocast(leaves[0].device.type, torch.bfloat16))
        if drawn.mode == "checkpoint":
            results = checkpoint(function, *leaves, use_reentrant=False)
        elif drawn.mode == "autocast":
            results = function(*(x.float() for x in leaves))
        else:
            results = function(*leaves)
    incoming = given.inputs.grad_out.to(results[0].dtype), given.inputs.call.grad_lse
    grads = torch.autograd.grad(results, leaves, incoming[: len(results)], materialize_grads=True)
    found = dict(zip(("out", "lse"), (x.detach() for x in results), strict=False))
    return found | dict(zip(given.names, grads, strict=True))


def _captured(call: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    stream = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(2):
            call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            results = call()
        graph.replay()
    torch.cuda.synchronize()
    return results


# ---- what came of it


def check(drawn: Drawn, seed: int, number: int, device: str, alone: bool = True) -> Found:
    """Make a call several times over and compare each with float64; `alone`: and see which backend ran it."""
    rng = random.Random(f"{seed}/{number}/values")
    repeats, case = REPEATS if drawn.change == REORDERED else OF_NEW_LENGTHS, None
    registered = (
        attnreg.register_backend(drawn.backend) if drawn.request == "registered" else contextlib.nullcontext()
    )
    offsets: tuple[Tensor | None, ...] = ()
    largest: dict[str, Error] = {}
    with registered:
        for times in range(1, repeats + MORE + 1):
            case = repeated(rng, drawn, case)
            offsets, drawn_inputs = _same_offsets(offsets, inputs(case, device, rng.randrange(2**31)))
            offsets = offsets if drawn.in_place else ()
            given = _given(drawn, with_strides(drawn.strides, drawn_inputs), rng)
            now = drawn._replace(case=case)
            attnreg.reset_stats()
            try:
                torch.manual_seed(number)
                results = run(now, given)
                if drawn.dropout == 0.0:
                    measure(case, given, results, largest)
                found = _explained(now, given) if alone else Found("of a thread")
                if (drawn.dropout or case.deterministic) and not found.wrong:
                    torch.manual_seed(number)
                    found = _repeated(now, found, results, run(now, given))
                # Of few weights two seeds may drop the same.
                weights = case.heads[0] * sum(map(operator.mul, case.lens_q, case.lens_k))
                has_many = min(weights, results["out"].count_nonzero()) >= 1000
                if drawn.dropout and has_many and not found.wrong:
                    torch.manual_seed(number + 1)
                    if torch.equal(run(now, given)["out"], results["out"]):
                        found = Found(
                            "wrong", f"dropout {drawn.dropout} gives the same bits for another seed"
                        )
            except UnsupportedInputError as error:
                expected = (drawn.request == "keyword" and drawn.backend in str(error)) or (
                    # Not known before the backward, and no other backend has the mask.
                    bool(drawn.dropout and case.grad_lse) and tied_to("").source in str(error)
                )
                found = Found("refused", "" if expected else f"refused: {error}")
            except Exception as error:
                if device == "cuda" and "CUDA error" in str(error):
                    print(f"{drawn}\n  --seed {seed} --only {number}")
                    raise  # no further call can run
                found = Found("error", f"{type(error).__name__}: {error}")
            beyond = {name: error for name, error in largest.items() if not error.passed}
            if beyond and not found.wrong:
                # FA4's first call of a shape rescales its results for sinks, later ones give them to the
                # kernel, which rounds otherwise: compare two later ones.
                first = run(now, given) if drawn.sinks else results
                if _differs(first, run(now, given), largest):
                    found = Found("wrong", "a call gives other results each time")
            if found.wrong or (times >= repeats and not beyond):
                break
    if beyond and not found.wrong:
        found = Found("wrong", "; ".join(f"{name} of {ran() or 'torch'}: {e}" for name, e in beyond.items()))
    if not alone:
        return found
    if found.wrong and not (case.varlen or drawn.flash):
        if device == "cuda" and _is_torchs_alone(now, given):
            return Found("torch chose an op that isn't routed, and failed")
        torchs_may_run = drawn.request == "nothing" or ran() == "efficient"
        if beyond and torchs_may_run and _is_so_without_attnreg(now, given, results, set(beyond)):
            print(f"{drawn}\n  {found.wrong}, as without attnreg: --seed {seed} --only {number}")
            return Found("beyond the rule by torch's own kernel, which is so without attnreg")
    if times > repeats and not found.wrong:
        print(f"{drawn}\n  within the rule over {times} draws: --seed {seed} --only {number}")
        return Found("beyond the rule in one draw of the values, within it over more")
    return found


def together(seed: int, number: int, names: list[str], device: str) -> tuple[Drawn, Found]:
    """Have several threads make a call each, at once; return the first that is wrong there and not alone."""
    calls, found = draw_for_threads(seed, number, names, device), {}
    start = threading.Barrier(THREADS)

    def work(drawn: Drawn) -> None:
        start.wait()
        found[drawn] = check(drawn, seed, number, device, alone=False)

    threads = [threading.Thread(target=work, args=(drawn,)) for drawn in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for drawn in calls:
        if drawn not in found:
            return drawn, Found("wrong", "an error ended its thread")
        if found[drawn].wrong and not check(drawn, seed, number, device).wrong:
            return drawn, Found("wrong", f"beside other threads, and not alone: {found[drawn].wrong}")
        if found[drawn].wrong:
            return drawn, check(drawn, seed, number, device)
    return calls[0], Found(f"{THREADS} threads at once")


def _given(drawn: Drawn, drawn_inputs: Inputs, rng: random.Random) -> Given:
    """Return the tensors of a call: sinks of usual sizes, and the bias if it needs a gradient."""
    like, bias = drawn_inputs.q, drawn_inputs.call.attn_bias if drawn.bias_grad else None
    if not drawn.sinks:
        return Given(drawn_inputs, bias=bias)
    sinks = torch.tensor([rng.gauss(0.0, 2.0) for _ in range(drawn.case.heads[0])])
    return Given(drawn_inputs, sinks.to(like.device, rng.choice((torch.float32, like.dtype))), bias)


def _repeated(drawn: Drawn, found: Found, first: dict[str, Tensor], second: dict[str, Tensor]) -> Found:
    """Return what to say of two runs of a call with the same seed, which have to agree bit for bit."""
    exact = first if drawn.case.deterministic or first["out"].is_cpu else ["out"]
    if other := [name for name in exact if not torch.equal(first[name], second[name])]:
        return Found("wrong", f"other bits for the same seed: {', '.join(other)}")
    if not_finite := [name for name in first if name != "lse" and not first[name].isfinite().all()]:
        return Found("wrong", f"not finite: {', '.join(not_finite)}")
    return found


def _same_offsets(
    before: tuple[Tensor | None, ...], given: Inputs
) -> tuple[tuple[Tensor | None, ...], Inputs]:
    """Write new offsets to the tensors of the calls before, as a data loader that keeps its memory does."""
    call = given.call
    if call.cu_seqlens_q is None or call.cu_seqlens_k is None:
        return before, given
    now = call.cu_seqlens_q, call.cu_seqlens_k
    if not before:
        return now, given
    for kept, new in zip(before, now, strict=True):
        assert kept is not None
        kept.copy_(new)
    return before, given._replace(call=call._replace(cu_seqlens_q=before[0], cu_seqlens_k=before[1]))


def _differs(first: dict[str, Tensor], second: dict[str, Tensor], largest: dict[str, Error]) -> bool:
    """Whether two runs of one call differ by more than rounding: then it isn't chance that one is beyond."""
    return any(float((first[name] - second[name]).abs().max()) > largest[name].allowed for name in first)


def ran() -> str:
    """Return the backends that have run since the last reset."""
    return ", ".join(attnreg.stats().calls)


def _explained(drawn: Drawn, given: Given) -> Found:
    """Return whether the backend that was asked for has run, or something says why not."""
    counted = attnreg.stats()
    others = [name for name in counted.calls if name.casefold() != drawn.backend.casefold()]
    if drawn.request == "nothing" or (counted.calls and not others):
        return Found(f"{drawn.backend} ran" if counted.calls and not others else "nothing asked for")
    if not counted.calls:
        if not (drawn.case.varlen or drawn.flash or _reaches_an_op(drawn, given)):
            return Found("torch chose no op that is routed")
        return Found("unexplained", "nothing ran that is counted")
    passed_over = {row.backend.casefold() for row in counted.fallbacks}
    if drawn.backend.casefold() in passed_over:
        return Found(f"{drawn.backend} gave way")
    return Found("unexplained", f"{', '.join(others)} ran, and nothing says why {drawn.backend} didn't")


def _is_torchs_alone(drawn: Drawn, given: Given) -> bool:
    """Whether nothing of attnreg's ran in a dense call, nor could."""
    return not attnreg.stats().calls and not _reaches_an_op(drawn, given)


def _is_so_without_attnreg(drawn: Drawn, given: Given, results: dict[str, Tensor], beyond: set[str]) -> bool:
    """Whether torch's ops without routers give the same, or are beyond the rule in the same results."""
    attnreg.uninstall()
    try:
        without: dict[str, Error] = {}
        theirs = run(drawn, given)
        measure(drawn.case, given, theirs, without)
    finally:
        attnreg.install()
    same = {name for name in beyond if torch.equal(results[name], theirs[name])}
    return beyond <= same | {name for name, error in without.items() if not error.passed}


def _reaches_an_op(drawn: Drawn, given: Given) -> bool:
    """Whether torch's selector chooses an op with a router, and not plain operations."""
    case, records = drawn.case, drawn.mode not in ("no_grad", "inference", "capture")
    q, k, v = (x.detach().transpose(1, 2).requires_grad_(records) for x in given.inputs[:3])
    bias = given.inputs.call.attn_bias
    if given.bias is not None and bias is not None:
        bias = bias.detach().requires_grad_(records)
    before = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(case.deterministic)
    # As SDPA asks it, past torch's dispatcher.
    q, k, v = (torch._neg_view(x) if x.is_neg() else x for x in (q, k, v))
    choice = torch._fused_sdp_choice(
        q, k, v, bias, drawn.dropout, is_causal=case.window == (-1, 0), scale=case.scale,
        enable_gqa=case.heads[0] != case.heads[1],
    )  # fmt: skip
    torch.set_deterministic_debug_mode(before)
    return choice != SDPBackend.MATH.value  # of flash, cuDNN and efficient each has one


def main(
    seconds: Annotated[float, typer.Option(help="How long to go on.")] = 60.0,
    calls: Annotated[int, typer.Option(help="How many calls to make at most; 0 for no limit.")] = 0,
    seed: Annotated[int, typer.Option(help="The seed of all calls; a random one if below 0.")] = -1,
    only: Annotated[int, typer.Option(help="Make only the call with this number.")] = -1,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    backends: Annotated[str, typer.Option(help="The backends to ask for, separated by commas.")] = "cpu,math",
) -> None:
    """Make random calls until one of the limits, print what came of them; exit 1 if any was wrong."""
    names, seed = backends.split(","), secrets.randbelow(10**6) if seed < 0 else seed
    logging.getLogger("attnreg").setLevel(logging.ERROR)  # why a backend gave way is looked up in `stats`
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS's deterministic mode needs it
    attnreg.install()
    counts: Counter[str] = Counter()
    failures, number, end = 0, max(only, 0), time.monotonic() + seconds
    while time.monotonic() < end and not (calls and number >= calls):
        if number % TOGETHER == TOGETHER - 1:
            drawn, found = together(seed, number, names, device)
        else:
            drawn = draw(seed, number, names, device)
            found = check(drawn, seed, number, device)
        counts[found.outcome] += 1
        if found.wrong:
            failures += 1
            arguments = f"--seed {seed} --only {number} --device {device} --backends {backends}"
            print(f"{drawn}\n  {found.wrong}\n  repeat: {arguments}")
        number += 1
        if only >= 0:
            break
    where = f"{device}, torch {torch.__version__}, seed {seed}"
    print(f"{where}: {counts.total()} calls made {REPEATS} or {OF_NEW_LENGTHS} times each, {failures} wrong")
    for outcome, count in counts.most_common():
        print(f"  {count:6} {outcome}")
    sys.exit(failures > 0)


if __name__ == "__main__":
    typer.run(main)
