"""Processes that are the ranks of a process group; they hold calls spread over them to float64."""

import contextlib
import datetime
import itertools
import os
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from support import truth
from torch._subclasses.fake_tensor import FakeTensorMode

import attnreg
from attnreg.backends import math
from attnreg.parallel import by_heads, parts

PATIENCE = 60.0  # seconds after which a call hangs


class Ranks:
    """Processes that do the same work, each as one rank of a group, until they are closed."""

    def __init__(self, count, store, backend="gloo", patience=PATIENCE / 2):
        # Its server has imported what ranks use, once for all, and forks.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["support.ranks", "support.spread_models", "torch._dynamo"])
        self._pipes, self._processes = [], []
        for rank in range(count):
            here, there = context.Pipe()
            given = there, rank, count, str(store), backend, patience
            self._processes.append(context.Process(target=_serve, args=given, daemon=True))
            self._processes[-1].start()
            self._pipes.append(here)

    def __len__(self):
        return len(self._pipes)

    def kill(self, rank):
        """Kill a rank, once all have joined the group."""
        self.run(dist.barrier)
        self._processes[rank].kill()
        self._processes[rank].join()

    def run(self, work, *arguments, only=None, **options):
        """Return what `work` returns on each rank; if it raises on one, its text is an error here."""
        pipes = [pipe for rank, pipe in enumerate(self._pipes) if only is None or rank in only]
        for pipe in pipes:
            pipe.send((work, arguments, options))
        replies = []
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(PATIENCE):
                self.close()
                raise TimeoutError(f"rank {rank} has not answered in {PATIENCE} s")
            replies.append(pipe.recv())
        for rank, (error, _) in enumerate(replies):
            if error:
                raise AssertionError(f"rank {rank}: {error}")
        return [result for _, result in replies]

    def close(self):
        """End the processes, which must end by themselves if they are well."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()


def _serve(pipe, rank, count, store, backend, patience):
    os.environ["ATTNREG_BUILD"] = "off"
    torch.set_num_threads(1)
    options = {"rank": rank, "world_size": count, "timeout": datetime.timedelta(seconds=PATIENCE / 2)}
    if backend == "nccl":
        torch.cuda.set_device(rank)
        options["device_id"] = torch.device("cuda", rank)
    dist.init_process_group(backend, init_method=f"file://{store}", **options)
    # Only now: on a busy machine ranks start seconds apart.
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=patience))
    while (given := pipe.recv()) is not None:
        work, arguments, keywords = given
        try:
            pipe.send(("", work(*arguments, **keywords)))
        except Exception:
            pipe.send((traceback.format_exc(), None))
    dist.destroy_process_group()


def batch(cu_seq, heads, heads_k, dim, dim_v, dtype, device, seed=0):
    """Draw query, key, value, and gradients of output and LSE of a whole batch; the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape):
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    tokens = cu_seq[-1]
    inputs = drawn(tokens, heads, dim), drawn(tokens, heads_k, dim), drawn(tokens, heads_k, dim_v)
    return *inputs, drawn(tokens, heads, dim_v), drawn(heads, tokens).float()


def compare(
    method,
    cu_seq,
    *,
    how="contiguous",
    window=(-1, -1),
    heads=(4, 2),
    dims=(8, 8),
    dtype=torch.float32,
    device="cpu",
    backend="math",
    sinks=False,
    with_lse=True,
    enough=by_heads.ENOUGH,
    most_rounded=parts.MOST_ROUNDED,
    **options,
):
    """Hold a spread call, forward and backward, to float64 of the whole batch; return what kernels ran."""
    device = torch.device("cuda", dist.get_rank()) if device == "cuda" else torch.device(device)
    query, key, value, grad, grad_lse = batch(cu_seq, *heads, *dims, dtype, device)
    sink = torch.linspace(-1, 1, heads[0], device=device) if sinks else None
    leaves = [x.detach().cpu().double().requires_grad_() for x in (query, key, value, sink) if x is not None]
    offsets = torch.tensor(cu_seq, dtype=torch.int32)
    softcap = options.get("softcap", 0.0)
    out, lse = truth.varlen(*leaves[:3], offsets, offsets, window=window, softcap=softcap)
    if sinks:
        out, lse = _with_sinks(out, lse, leaves[3])
    results, weights = (out, lse), (grad.cpu().double(), grad_lse.cpu().double())
    if not with_lse:
        results, weights = results[:1], weights[:1]
    wanted = torch.autograd.grad(results, leaves, weights)

    balance = {"is_causal": window[1] == 0} if how == "balanced" else {}
    spread = attnreg.context_parallel(dist.group.WORLD, cu_seq, how, method=method, **balance)
    mine = [spread.shard(x).requires_grad_() for x in (query, key, value)]
    mine += [] if sink is None else [sink.requires_grad_()]
    attnreg.reset_stats()
    by_heads.ENOUGH, parts.MOST_ROUNDED = enough, most_rounded
    got = attnreg.varlen_attn(
        *mine[:3], spread.cu_seq(device), spread.cu_seq(device), spread.longest, spread.longest,
        window_size=window, enable_gqa=True, sinks=sink, backend=backend, group=spread,
        return_aux=attnreg.AuxRequest(lse=True) if with_lse else None, **options,
    )  # fmt: skip
    got = got if with_lse else (got,)
    weights = (spread.shard(grad), spread.shard(grad_lse, 1))[: len(got)]
    grads = list(torch.autograd.grad(got, mine, weights))
    if sinks:
        dist.all_reduce(grads[3])  # as DDP or FSDP would: a rank has its own tokens' share
    truth.assert_near(got[0].cpu(), spread.shard(out), dtype)
    if with_lse:
        truth.assert_near(got[1].cpu(), spread.shard(lse, 1), dtype)
    for one, other in zip(grads[:3], wanted[:3], strict=True):
        truth.assert_near(one.cpu(), spread.shard(other), dtype)
    if sinks:
        truth.assert_near(grads[3].cpu(), wanted[3], dtype)
    truth.assert_near(spread.gather(got[0].detach()).cpu(), out, dtype)
    return {name: count for name, count in attnreg.stats().calls.items() if any(count.values())}


def _with_sinks(out, lse, sinks):
    share = (lse - sinks[:, None]).sigmoid()
    return out * share.mT[..., None], torch.logaddexp(lse, sinks[:, None])


def said_by(call, **given):
    """Make a call; return the error that this rank gets."""
    try:
        call(**given)
    except attnreg.AttnregError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def disagree(device="cpu", **different):
    """Make a call of which some options are others on some ranks; return the error that this rank gets."""
    rank, count = dist.get_rank(), dist.get_world_size()
    usual = {
        "cu_seq": [0, 5, 12], "heads": count, "backend": "math", "method": "all_gather",
        "dtype": torch.float32, "gradient": True, "softcap": 0.0, "ends": None, "memory": None,
    }  # fmt: skip
    given = usual | {name: by_rank[rank] for name, by_rank in different.items() if rank in by_rank}

    def call(cu_seq, heads, backend, method, dtype, gradient, softcap, ends, memory):
        spread = attnreg.context_parallel(dist.group.WORLD, cu_seq, method=method, memory=memory)
        shape = spread.layout.rows[rank], heads, 8
        given = {"dtype": dtype, "device": device, "requires_grad": gradient}
        inputs = [torch.randn(shape, **given) for _ in range(3)]
        ends = spread.cu_seq(device) if ends is None else ends
        with attnreg.use_backend(backend):
            return attnreg.varlen_attn(
                *inputs, ends, ends, spread.longest, spread.longest, True, softcap=softcap, group=spread
            )

    said = said_by(call, **given)
    assert call(**usual).shape[1] == count
    return said


def wrong_later():
    """Return what the last rank says whose call is wrong after one that was right; the others make none."""
    spread = attnreg.context_parallel(dist.group.WORLD, [0, 7, 20], method="ring")
    _, inputs = _inputs(spread)
    _attend(spread, inputs, group=spread)
    spread.gather(inputs[0])
    said = []
    if dist.get_rank() == dist.get_world_size() - 1:
        for call in (
            lambda: _attend(spread, [x[1:] for x in inputs], group=spread),
            lambda: _attend(spread, inputs, group=spread, softcap=-1.0),
            lambda: _attend(spread, inputs, group=spread, dropout_p=0.5),
            lambda: spread.gather(inputs[0][1:]),
        ):
            said.append(said_by(call))
    return said


def gather_what_differs(**different):
    """Gather tensors of which some ranks have others; return the error that this rank gets."""
    rank, count = dist.get_rank(), dist.get_world_size()
    usual = {"how": "contiguous", "width": 2, "dtype": torch.float32, "more": 0}
    given = usual | {name: by_rank[rank] for name, by_rank in different.items() if rank in by_rank}

    def call(how, width, dtype, more):
        spread = attnreg.context_parallel(dist.group.WORLD, [0, 5, 12 * count], how)
        return spread.gather(torch.ones(spread.layout.rows[rank] + more, width, dtype=dtype))

    said = said_by(call, **given)
    assert call(**usual).sum() == 2 * 12 * count
    return said


def gathered(dtype, dim):
    """Return whether a tensor of a dtype comes back from the parts that ranks have of it."""
    spread = attnreg.context_parallel(dist.group.WORLD, [0, 7, 20], "zigzag")
    shape = (20, 3) if dim == 0 else (3, 20)
    whole = torch.arange(60).reshape(shape).to(dtype)
    if dtype.is_complex:
        whole = whole.conj()
    got = spread.gather(spread.shard(whole, dim), dim)
    return got.dtype == dtype and got.to(torch.complex64).tolist() == whole.to(torch.complex64).tolist()


def a_kernel_raises():
    """Return the error of a backward, in which the kernel of the last rank fails."""
    rank, count = dist.get_rank(), dist.get_world_size()
    spread = attnreg.context_parallel(dist.group.WORLD, [0, 7, 20], "zigzag", method="ring")
    inputs = [x.requires_grad_() for x in _inputs(spread)[1]]
    kernels = math.BACKEND.load()

    def backward(*arguments):
        if rank == count - 1:
            raise RuntimeError("out of memory, or so")
        return kernels.backward(*arguments)

    limits = attnreg.Capabilities(
        devices=("cpu",), dtypes=("float32",), varlen=True, causal=True, window=True
    )
    failing = attnreg.Backend(
        name="failing",
        forward=limits,
        backward=limits,
        load=lambda: attnreg.Kernels(kernels.forward, backward),
    )
    with attnreg.register_backend(failing):
        out = _attend(spread, inputs, group=spread, backend="failing")
        try:
            out.sum().backward()
        except RuntimeError as error:
            return str(error)
    return "no error"


def _inputs(spread, heads=4, dim=8):
    generator = torch.Generator().manual_seed(3)
    whole = torch.randn(3, spread.layout.tokens, heads, dim, generator=generator)
    return whole, [spread.shard(x) for x in whole]


def _attend(spread, inputs, **options):
    ends, longest = spread.cu_seq(), spread.longest
    return attnreg.varlen_attn(*inputs, ends, ends, longest, longest, True, **options)


def written_to(method):
    """Return whether an output may be written to, and the sum of its gradient for what was added."""
    spread = attnreg.context_parallel(dist.group.WORLD, [0, 7, 20], method=method)
    inputs = [x.requires_grad_() for x in _inputs(spread)[1]]
    out = _attend(spread, inputs, group=spread, backend="math")
    before, added = out.detach().clone(), torch.ones(1, requires_grad=True)
    out += added
    return torch.equal(out, before + 1), torch.autograd.grad(out.sum(), added)[0].item() == out.numel()


def inside_and_outside():
    """Return whether calls are spread inside of a block alone, nested ones by the innermost."""
    two = [attnreg.context_parallel(dist.group.WORLD, [0, 7, 20], how) for how in ("contiguous", "zigzag")]
    inputs = [_inputs(spread)[1] for spread in two]
    found = []
    with two[0]:
        found.append(torch.equal(_attend(two[0], inputs[0]), _attend(two[0], inputs[0], group=two[0])))
        with two[1]:
            found.append(torch.equal(_attend(two[1], inputs[1]), _attend(two[1], inputs[1], group=two[1])))
        found.append(torch.equal(_attend(two[0], inputs[0]), _attend(two[0], inputs[0], group=two[0])))
    whole, _ = _inputs(two[0])
    alone = _attend(two[0], whole)  # of all tokens, without any other rank
    found.append(torch.allclose(two[0].shard(alone), _attend(two[0], inputs[0], group=two[0]), atol=1e-5))
    return found


def without_gradients(mode):
    """Return how far a spread call in a mode without gradients is from the whole batch's."""
    spread = attnreg.context_parallel(dist.group.WORLD, [0, 7, 20], "zigzag", method="ring")
    whole, inputs = _inputs(spread)
    inputs = [x.requires_grad_() for x in inputs]
    with mode():
        out = _attend(spread, inputs, group=spread)
    assert not out.requires_grad
    return float((out - spread.shard(_attend(spread, whole))).abs().max())


def in_a_long_run(calls):
    """Return how many offsets are kept after calls with new ones, and whether positions are still right."""
    spread = attnreg.context_parallel(dist.group.WORLD, [0, 7, 20])
    _, inputs = _inputs(spread)
    positions = spread.positions().clone()
    for _ in range(calls):
        ends = torch.tensor([0, 7, 20], dtype=torch.int32)
        attnreg.varlen_attn(*inputs, ends, ends, 13, 13, group=spread)
        spread.positions().add_(1)
    return len(spread._known_offsets), torch.equal(spread.positions(), positions)


def where_kernels_are_few(method, *, causal, backward, mode=contextlib.nullcontext):
    """Return what a causal call of which one rank has all tokens says, on a backend with few kernels."""
    ends, count = (0, 5, 12), dist.get_world_size()
    pieces = *(() for _ in range(count - 1)), (attnreg.Piece(0, 0, 5), attnreg.Piece(1, 5, 12))
    spread = attnreg.context_parallel(dist.group.WORLD, attnreg.Layout(ends, pieces), method=method)
    inputs = [x.requires_grad_() for x in _inputs(spread, heads=2 * count)[1]]
    limits = attnreg.Capabilities(devices=("cpu",), dtypes=("float32",), varlen=True, causal=causal)
    kernels = math.BACKEND.load()
    if not backward:
        kernels = attnreg.Kernels(kernels.forward, None)
    few = attnreg.Backend(
        name="few", forward=limits, backward=limits if backward else None, load=lambda: kernels
    )
    with attnreg.register_backend(few), mode():
        try:
            return tuple(_attend(spread, inputs, group=spread, backend="few").shape)
        except attnreg.AttnregError as error:
            return f"{type(error).__name__}: {error}"


def under_autocast():
    """Return the dtypes of a spread call's output and gradients under autocast."""
    spread = attnreg.context_parallel(dist.group.WORLD, [0, 7, 20], "zigzag")
    inputs = [x.requires_grad_() for x in _inputs(spread)[1]]
    with torch.autocast("cpu", torch.bfloat16):
        out = _attend(spread, inputs, group=spread)
    return [out.dtype, *(x.dtype for x in torch.autograd.grad(out.sum(), inputs))]


class _Anywhere:
    """An object whose address is another on each rank."""

    def __repr__(self):
        return f"<Anywhere object at {0x7F00 + dist.get_rank():#x}>"


def explained_with(**options):
    """Return what the `explain` of a context says of arguments that it doesn't take."""
    try:
        attnreg.context_parallel(dist.group.WORLD, [0, 20]).explain(heads=4, head_dim=8, **options)
    except TypeError as error:
        return str(error)
    return "no error"


def refusals():
    """Return what wrong uses say."""
    spread = attnreg.context_parallel(dist.group.WORLD, [0, 7, 20])
    whole, inputs = _inputs(spread)
    ends = torch.tensor([0, 8, 20], dtype=torch.int32)
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    others = groups[dist.get_rank() - 1]
    grid = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("a", "b"))
    wrong = {
        "mesh": lambda: attnreg.context_parallel(grid, [0, 20]),
        "no rank": lambda: attnreg.context_parallel(others, [0, 7, 20]),
        "elsewhere": lambda: attnreg.context_parallel(
            dist.device_mesh.DeviceMesh("cpu", [1 - min(dist.get_rank(), 1)]), [0, 7, 20]
        ),
        "no group": lambda: attnreg.context_parallel("world", [0, 7, 20]),
        "method": lambda: attnreg.context_parallel(dist.group.WORLD, [0, 20], method="rin"),
        "rates": lambda: attnreg.context_parallel(dist.group.WORLD, [0, 20], rates=5),
        "memory": lambda: attnreg.context_parallel(dist.group.WORLD, [0, 20], memory="8GB"),
        "memory, a bool": lambda: attnreg.context_parallel(dist.group.WORLD, [0, 20], memory=True),
        "unused window": lambda: attnreg.context_parallel(dist.group.WORLD, [0, 20], window_size=(3,)),
        "unused mask": lambda: attnreg.context_parallel(dist.group.WORLD, [0, 20], "zigzag", is_causal="yes"),
        "unused width": lambda: attnreg.context_parallel(dist.group.WORLD, [0, 20], "zigzag", width=99),
        "window": lambda: attnreg.context_parallel(dist.group.WORLD, [0, 20], "balanced", window_size="abc"),
        "object": lambda: attnreg.context_parallel(dist.group.WORLD, [0, 20], _Anywhere()),
        "device of explain": lambda: spread.explain(heads=4, head_dim=8, device="cuda:99"),
        "layout and how": lambda: attnreg.context_parallel(dist.group.WORLD, spread.layout, "zigzag"),
        "layout and mask": lambda: attnreg.context_parallel(dist.group.WORLD, spread.layout, is_causal=False),
        "ranks": lambda: attnreg.context_parallel(dist.group.WORLD, attnreg.spread_documents([0, 20], 7)),
        "how": lambda: attnreg.context_parallel(dist.group.WORLD, [0, 20], "zigzags"),
        "group": lambda: _attend(spread, inputs, group=dist.group.WORLD),
        "mesh=": lambda: _attend(spread, inputs, mesh=grid),
        "rows": lambda: _attend(spread, whole, group=spread),
        "offsets": lambda: attnreg.varlen_attn(*inputs, ends, ends, 20, 20, group=spread),
        "keys of their own": lambda: attnreg.varlen_attn(
            *inputs, spread.cu_seq(), ends, 13, 13, group=spread
        ),
        "int64": lambda: attnreg.varlen_attn(*inputs, *[spread.cu_seq().long()] * 2, 20, 20, group=spread),
        "one number": lambda: attnreg.varlen_attn(*inputs, *[ends.sum()] * 2, 20, 20, group=spread),
        "short": lambda: attnreg.varlen_attn(*inputs, *[spread.cu_seq()] * 2, 12, 20, group=spread),
        "no number": lambda: attnreg.varlen_attn(*inputs, *[spread.cu_seq()] * 2, 20, "20", group=spread),
        "sparse": lambda: _attend(spread, [inputs[0].to_sparse(), *inputs[1:]], group=spread),
        "list": lambda: attnreg.varlen_attn(*inputs, [0, 7, 20], [0, 7, 20], 13, 13, group=spread),
        "device": lambda: _attend(spread, [inputs[0], inputs[1].to("meta"), inputs[2]], group=spread),
        "transform": lambda: torch.func.grad(lambda x: _attend(spread, [x] * 3, group=spread).sum())(
            inputs[0]
        ),
        "dropout": lambda: _attend(spread, inputs, group=spread, dropout_p=0.5),
        "heads": lambda: _attend(spread, [inputs[0], *(x[:, :2] for x in inputs[1:])], group=spread),
        "shard": lambda: spread.shard(torch.zeros(3)),
        "shard a list": lambda: spread.shard([1, 2]),
        "shard a dim": lambda: spread.shard(torch.zeros(20), 1),
        "gather": lambda: spread.gather(torch.zeros(3)),
        "gradient": lambda: spread.gather(inputs[0].requires_grad_()),
    }
    said = {}
    for name, call in wrong.items():
        try:
            call()
        except attnreg.AttnregError as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def in_a_mode_on_one_rank(name):
    """Return what a rank gets of a call that the last one makes in a function transform, or in a mode."""
    spread = attnreg.context_parallel(dist.group.WORLD, [0, 7, 20])
    whole, inputs = _inputs(spread)
    modes = {
        "grad": lambda call: torch.func.grad(lambda x: call([x, *inputs[1:]]).sum())(inputs[0]),
        "vmap": lambda call: torch.vmap(lambda x: call([x, *inputs[1:]]))(inputs[0][None]),
        "jvp": lambda call: torch.func.jvp(lambda x: call([x, *inputs[1:]]), (inputs[0],), (inputs[0],)),
        "fake": _with_fake_tensors,
    }
    ends = spread.cu_seq()

    def attend(given):
        return attnreg.varlen_attn(*given, ends, ends, 13, 13, True, group=spread)

    is_last = dist.get_rank() == dist.get_world_size() - 1
    said = said_by(lambda: modes[name](attend) if is_last else attend(inputs))
    difference = (attend(inputs) - spread.shard(_attend(spread, whole))).abs().max()
    assert difference < 1e-5  # the error has changed nothing
    return said


def _with_fake_tensors(call):
    with FakeTensorMode() as mode:
        return call([mode.from_tensor(torch.empty(10, 4, 8)) for _ in range(3)])


def _zeros(query, key, value, call):
    """Return zeros: a kernel that needs no memory besides its results."""
    out = query.new_zeros(*query.shape[:2], value.shape[2])
    return out, query.new_zeros(query.shape[1::-1], dtype=torch.float32)


def _peak(work):
    """Return the most bytes that are allocated at a time."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as seen:
        work()
    events = seen.profiler.kineto_results.events()
    return max(itertools.accumulate(event.nbytes() for event in events if event.name() == "[memory]"))


def memory(method, cu_seq, *, how, window, heads, slack):
    """Return a rank's peak of bytes in a forward and backward, the bytes of its results, and the estimate.

    A thread of gloo's may free what it has sent a little late, which raises the peak of some calls. So calls
    are repeated, on all ranks alike, until no rank's least peak exceeds `slack` times its results and the
    estimate: 20 times at most.
    """
    layout = attnreg.spread_documents(cu_seq, dist.get_world_size(), how, window_size=window)
    spread, dim = attnreg.context_parallel(dist.group.WORLD, layout, method=method), 64
    shapes = [(layout.rows[spread.rank], count, dim) for count in (*heads, heads[1])]
    inputs = [torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    limits = attnreg.Capabilities(
        devices=("cpu",), dtypes=("bfloat16",), varlen=True, causal=True, window=True, gqa=True
    )
    kernels = attnreg.Kernels(_zeros, lambda grad, *tensors: tuple(map(torch.zeros_like, tensors[:3])))
    zeros = attnreg.Backend(name="zeros", forward=limits, backward=limits, load=lambda: kernels)

    def call():
        out = _attend(spread, inputs, group=spread, backend="zeros", window_size=window, enable_gqa=True)
        torch.autograd.grad(out, inputs, inputs[0].detach())

    choice = attnreg.explain_context_parallel(
        layout, heads=heads[0], heads_k=heads[1], head_dim=dim, window_size=window
    )
    (estimate,) = (one.memory for one in choice.methods if one.name == method)
    results = inputs[0].nbytes + sum(x.nbytes for x in inputs)
    peak = float("inf")
    with attnreg.register_backend(zeros):
        call()
        for _ in range(20):
            peak = min(peak, _peak(call))
            exceeds = torch.tensor(int(peak > slack * results + estimate))
            dist.all_reduce(exceeds)
            if not exceeds:
                break
    return peak, results, estimate
