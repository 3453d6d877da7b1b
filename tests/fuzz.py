"""Makes random calls of `varlen_attn` and SDPA as programs do, and compares each with float64.

    python tests/fuzz.py [--seconds 60] [--calls N] [--seed S] [--device cuda] [--backends FA2,FA4,math]
    python tests/fuzz.py --seed S --only N      repeats one call

Each call is drawn from the seed and its number alone. It is made three times, with new values each time; for
a packed call the lengths change their order, and are written to the same offsets. So a new plan, a kept plan
and the call cache run it. A call fails if the largest errors of all its draws break the accuracy rule
(`measure/rule.py`), or if another backend ran than the one that was asked for and `stats()` has no reason for
that. `make fuzz` and `make fuzz-gpu` run this script.
"""

from __future__ import annotations

import contextlib
import logging
import random
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
import typer
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import attnreg
from attnreg.errors import UnsupportedInputError
from attnreg.measure.cases import LAYOUTS, Case
from attnreg.measure.inputs import Inputs, inputs
from attnreg.measure.reference import Results, attention
from attnreg.measure.rule import Error, compare

REPEATS = 3
# Further draws of the values of a call that is beyond the rule. With two keys, or one number as the whole
# incoming gradient, the largest error of plain PyTorch is that of a few numbers, and small by chance.
MORE = 12
LENGTHS = (1, 2, 3, 7, 15, 16, 17, 31, 33, 63, 64, 65, 97, 127, 128, 129, 193, 255, 257, 320)
DIMS = (8, 16, 32, 40, 64, 64, 64, 72, 80, 96, 128, 128, 192, 256)
GROUPS = ((1, 1), (2, 1), (4, 1), (2, 2), (4, 2), (6, 3), (8, 8))
# How the backend is asked for, and how the call is made, as often as they are listed.
REQUESTS = ("registered", "registered", "scoped", "keyword", "nothing")
MODES = ("plain",) * 8 + ("no_grad", "inference", "autocast", "checkpoint", "capture")
COMPILED_SHARE = 0.005  # it takes a second


class Drawn(NamedTuple):
    """A call and how it is made."""

    case: Case
    backend: str
    request: str
    mode: str

    def __str__(self) -> str:
        shown = {name: getattr(self.case, name) for name in self.case.__slots__ if name != "name"}
        default = Case(name="", lens_q=(), lens_k=())
        given = ", ".join(f"{k}={v!r}" for k, v in shown.items() if v != getattr(default, k))
        return f"{self.backend} ({self.request}, {self.mode}): {given}"


class Found(NamedTuple):
    """What came of a call: what to count it as, and what is wrong with it."""

    outcome: str
    wrong: str = ""


def draw(seed: int, number: int, backends: list[str], device: str) -> Drawn:
    """Draw a call; one seed and number are always the same call."""
    rng = random.Random(f"{seed}/{number}")
    varlen, dtype = rng.random() < 0.6, rng.choice(("float16", "bfloat16", "bfloat16", "float32"))
    case = _packed(rng) if varlen else _dense(rng)
    # Scores of float32 calls may be large. With large 16-bit ones the softmax saturates: the gradient of a
    # flash kernel then has the rounding of its output, where that of plain PyTorch cancels.
    exact, dim = dtype == "float32", rng.choice(DIMS)
    # With a scale of 0 results may be exact, and then a rule about rounding leaves torch's own SDPA none.
    zero = 0.0 if varlen else None
    case = replace(
        case,
        dtype=dtype,
        heads=rng.choice(GROUPS),
        dims=(dim, rng.choice(DIMS) if rng.random() < 0.1 else dim),
        scale=rng.choice(
            (None, None, None, dim**-0.5 * 2, dim**-0.5 / 3, zero, -0.125, 1.0 if exact else None)
        ),
        layout=rng.choice(("plain",) * 6 + LAYOUTS),
        grad_layout=rng.choice(("plain", "plain", "bhsd", "expanded")),
    )
    if case.layout == "fused qkv" and (case.lens_q != case.lens_k or case.dims[0] != case.dims[1]):
        case = replace(case, layout="bhsd")
    mode = rng.choice([mode for mode in MODES if mode != "capture" or device == "cuda"])
    request = rng.choice([how for how in REQUESTS if varlen or how != "keyword"])
    if rng.random() < COMPILED_SHARE:
        mode = "compile"
    if mode == "autocast":
        case = replace(case, dtype="bfloat16")
    if device == "cuda" and not varlen and (request == "nothing" or case.dtype == "float32"):
        # Where torch's own SDPA runs alone, it gives NaN for these, or ends the CUDA context.
        layout = "plain" if case.layout in ("offset", "odd rows") else case.layout
        scale = None if case.scale is not None and case.scale < 0 else case.scale
        case = replace(case, layout=layout, scale=scale)
    return Drawn(case, rng.choice(backends), request, mode)


def _dense(rng: random.Random) -> Case:
    batch, len_q = rng.choice((1, 1, 2, 3, 5)), rng.choice(LENGTHS)
    len_k = len_q if rng.random() < 0.6 else rng.choice(LENGTHS)
    # SDPA aligns causal masks top-left, the reference bottom-right: the same for equal lengths.
    window = (-1, 0) if len_q == len_k and rng.random() < 0.5 else (-1, -1)
    bias = rng.choice(("none",) * 4 + ("key padding", "additive")) if window == (-1, -1) else "none"
    if bias == "key padding":
        batch = min(batch, 3)  # so many lengths the mask has
    return Case(name="fuzz", lens_q=(len_q,) * batch, lens_k=(len_k,) * batch, window=window, bias=bias)


def _packed(rng: random.Random) -> Case:
    count = rng.choice((1, 2, 3, 5, 9))
    lens_q = tuple(0 if rng.random() < 0.1 else rng.choice(LENGTHS) for _ in range(count))
    lens_k, window = lens_q, (-1, -1)
    if other := rng.random() < 0.5:
        lens_k = tuple(0 if rng.random() < 0.1 else rng.choice(LENGTHS) for _ in range(count))
    if rng.random() < 0.6:
        window = (rng.choice((-1, -1, 0, 1, 31, 64, 400)), rng.choice((0, 0, 0, -1, 5)))
    used = tuple(rng.randint(0, n) for n in lens_k) if rng.random() < 0.1 else None
    tail = rng.choice((0, 0, 0, 5, 64))
    return Case(
        name="fuzz", lens_q=lens_q, lens_k=lens_k, varlen=True, window=window, seqused_k=used, tail=tail,
        poison=bool(tail) and rng.random() < 0.5, one_cu_seqlens=not other,
    )  # fmt: skip


# ---- making the call


def attend(case: Case, given: Inputs, backend: str | None) -> Tensor:
    """Make the call as a program does; returns the output in the layout of the contract."""
    call, scale = given.call, case.scale
    gqa = case.heads[0] != case.heads[1]
    if case.varlen:
        out = attnreg.varlen_attn(
            given.q, given.k, given.v, call.cu_seqlens_q, call.cu_seqlens_k, case.max_q, case.max_k,
            scale=scale, window_size=case.window, enable_gqa=gqa, seqused_k=call.seqused_k, backend=backend,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out
    q, k, v = (x.transpose(1, 2) for x in (given.q, given.k, given.v))
    causal = case.window == (-1, 0)
    out = F.scaled_dot_product_attention(
        q, k, v, call.attn_bias, is_causal=causal, scale=scale, enable_gqa=gqa
    )
    return out.transpose(1, 2)


def run(drawn: Drawn, given: Inputs) -> dict[str, Tensor]:
    """Make the call in its mode; returns the results that it has."""
    case, keyword = drawn.case, drawn.backend if drawn.request == "keyword" else None

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with attnreg.use_backend(drawn.backend) if drawn.request == "scoped" else contextlib.nullcontext():
            return attend(case, given._replace(q=q, k=k, v=v), keyword)

    if drawn.mode in ("no_grad", "inference"):
        with torch.no_grad() if drawn.mode == "no_grad" else torch.inference_mode():
            return {"out": call(given.q, given.k, given.v)}
    # Leaves of the very same memory layout, as a clone would have another one.
    leaves = tuple(x.detach().requires_grad_() for x in (given.q, given.k, given.v))
    if drawn.mode == "capture":
        return _captured(lambda: call(*(x.detach() for x in leaves)))
    function: Callable[..., Tensor] = call
    if drawn.mode == "compile":
        torch._dynamo.reset()
        function = torch.compile(call, backend="aot_eager")
    with contextlib.ExitStack() as stack:
        if drawn.mode == "autocast":
            stack.enter_context(torch.autocast(given.q.device.type, torch.bfloat16))
        if drawn.mode == "checkpoint":
            out = checkpoint(function, *leaves, use_reentrant=False)
        elif drawn.mode == "autocast":
            out = function(*(x.float() for x in leaves))
        else:
            out = function(*leaves)
    grads = torch.autograd.grad(out, leaves, given.grad_out.to(out.dtype), materialize_grads=True)
    return {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), grads, strict=True))}


def _captured(call: Callable[[], Tensor]) -> dict[str, Tensor]:
    stream = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(2):
            call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = call()
        graph.replay()
    torch.cuda.synchronize()
    return {"out": out}


# ---- what came of it


def check(drawn: Drawn, seed: int, number: int, device: str) -> Found:
    """Make a call several times over and compare each with float64."""
    rng = random.Random(f"{seed}/{number}/values")
    registered = (
        attnreg.register_backend(drawn.backend) if drawn.request == "registered" else contextlib.nullcontext()
    )
    offsets: tuple[Tensor | None, ...] = ()
    largest: dict[str, Error] = {}
    with registered:
        for times in range(1, REPEATS + MORE + 1):
            case = _in_another_order(rng, drawn.case)
            given = inputs(case, device, rng.randrange(2**31))
            offsets, given = _same_offsets(offsets, given)
            attnreg.reset_stats()
            try:
                results = run(drawn._replace(case=case), given)
                _measure(case, given, results, largest)
                found = _explained(drawn, case, given)
            except UnsupportedInputError as error:
                expected = drawn.request == "keyword" and drawn.backend in str(error)
                found = Found("refused", "" if expected else f"refused: {error}")
            except Exception as error:
                if device == "cuda" and "CUDA error" in str(error):
                    print(f"{drawn}\n  --seed {seed} --only {number}")
                    raise  # no further call can run
                found = Found("error", f"{type(error).__name__}: {error}")
            beyond = {name: error for name, error in largest.items() if not error.passed}
            if (
                beyond
                and not found.wrong
                and _differs(results, run(drawn._replace(case=case), given), largest)
            ):
                found = Found("wrong", "a call gives other results each time")
            if found.wrong or (times >= REPEATS and not beyond):
                break
    if beyond and not found.wrong:
        found = Found("wrong", "; ".join(f"{name} of {ran() or 'torch'}: {e}" for name, e in beyond.items()))
    if found.wrong and device == "cuda" and not case.varlen and _is_torchs_alone(given, case):
        return Found("torch chose an op that isn't routed, and failed")
    if times > REPEATS and not found.wrong:
        print(f"{drawn}\n  within the rule over {times} draws: --seed {seed} --only {number}")
        return Found("beyond the rule in one draw of the values, within it over more")
    return found


def _in_another_order(rng: random.Random, case: Case) -> Case:
    if not case.varlen:
        return case
    order = rng.sample(range(len(case.lens_q)), len(case.lens_q))
    used = case.seqused_k and tuple(case.seqused_k[i] for i in order)
    lens_q, lens_k = (tuple(lens[i] for i in order) for lens in (case.lens_q, case.lens_k))
    return replace(case, lens_q=lens_q, lens_k=lens_k, seqused_k=used)


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


def _measure(case: Case, given: Inputs, results: dict[str, Tensor], largest: dict[str, Error]) -> None:
    """Measure the errors of a call, and keep the largest of the kernel's and of plain PyTorch's."""
    truth, plain = (attention(case, given, dtype) for dtype in (torch.float64, given.q.dtype))
    for name, got in results.items():
        assert name in Results._fields
        error = compare((got,), getattr(plain, name), getattr(truth, name), given.q.dtype)
        if not error.passed:
            read = with_the_output(results["out"], case, given, truth)
            shifted = compare((got,), getattr(plain, name), getattr(read, name), given.q.dtype)
            error = error._replace(kernel=shifted.kernel)  # plain PyTorch's stays that from the truth
        largest[name] = Error(*map(max, error, largest.get(name, error)))


def _differs(first: dict[str, Tensor], second: dict[str, Tensor], largest: dict[str, Error]) -> bool:
    """Whether two runs of one call differ by more than rounding: then it isn't chance that one is beyond."""
    return any(float((first[name] - second[name]).abs().max()) > largest[name].allowed for name in first)


def with_the_output(out: Tensor, case: Case, given: Inputs, truth: Results) -> Results:
    """Return the results with the gradients that an exact flash backward has with this output.

    It computes dS = P * (dP - delta), with delta the sum of dout * out, where plain PyTorch takes that of
    dP * P (https://arxiv.org/abs/2205.14135, algorithm 4). The output is rounded, and with few keys that can
    be the largest of all errors. It changes dq by the mean of the keys and dk by the sum of P * q: attention
    and its gradient give both where the keys stand for the values.
    """
    change = -given.call.scale * ((out.double() - truth.out) * given.grad_out.double()).sum(-1, keepdim=True)
    grad_out = (change * given.q.double()).nan_to_num()
    of_keys = replace(case, dims=(case.dims[0], case.dims[0]))
    keys = attention(of_keys, given._replace(v=given.k, grad_out=grad_out), torch.float64)
    return truth._replace(dq=truth.dq + (change * keys.out).nan_to_num(), dk=truth.dk + keys.dv)


def ran() -> str:
    """Return the backends that have run since the last reset."""
    return ", ".join(attnreg.stats().calls)


def _explained(drawn: Drawn, case: Case, given: Inputs) -> Found:
    """Return whether the backend that was asked for has run, or something says why not."""
    counted = attnreg.stats()
    others = [name for name in counted.calls if name.casefold() != drawn.backend.casefold()]
    if drawn.request == "nothing" or (counted.calls and not others):
        return Found(f"{drawn.backend} ran" if counted.calls and not others else "nothing asked for")
    if not counted.calls:
        if not case.varlen and not _reaches_an_op(given, case):
            return Found("torch chose no op that is routed")
        return Found("unexplained", "nothing ran that is counted")
    passed_over = {row.backend.casefold() for row in counted.fallbacks}
    if drawn.backend.casefold() in passed_over:
        return Found(f"{drawn.backend} gave way")
    return Found("unexplained", f"{', '.join(others)} ran, and nothing says why {drawn.backend} didn't")


def _is_torchs_alone(given: Inputs, case: Case) -> bool:
    """Whether nothing of attnreg's ran in a dense call, nor could."""
    return not attnreg.stats().calls and not _reaches_an_op(given, case)


def _reaches_an_op(given: Inputs, case: Case) -> bool:
    """Whether torch's selector chooses an op with a router, and not plain operations."""
    q, k, v = (x.transpose(1, 2) for x in (given.q, given.k, given.v))
    choice = torch._fused_sdp_choice(
        q, k, v, given.call.attn_bias, is_causal=case.window == (-1, 0), scale=case.scale,
        enable_gqa=case.heads[0] != case.heads[1],
    )  # fmt: skip
    return choice in (1, 3)  # flash and cuDNN; 0 are plain operations, 2 the memory-efficient kernel


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
    attnreg.install()
    counts: Counter[str] = Counter()
    failures, number, end = 0, max(only, 0), time.monotonic() + seconds
    while time.monotonic() < end and not (calls and number >= calls):
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
    print(f"{where}: {counts.total()} calls made {REPEATS} times each, {failures} wrong")
    for outcome, count in counts.most_common():
        print(f"  {count:6} {outcome}")
    sys.exit(failures > 0)


if __name__ == "__main__":
    typer.run(main)
