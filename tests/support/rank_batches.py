"""What ranks do with several batches, and what is asked of kernels before a call."""

import contextlib
import functools
import itertools
import logging

import torch
import torch.distributed as dist
from support.ranks import _attend, _inputs, said_by
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import attnreg
from attnreg.backends import math
from attnreg.parallel import agreement, context, machine


def _known(method, *batches):
    """Return batches of which ranks have compared all that is called here; the last was used last."""
    found = []
    for cu_seq in batches:
        spread = attnreg.context_parallel(dist.group.WORLD, cu_seq, method=method)
        spread.gather(_attend(spread, _inputs(spread)[1], group=spread))
        _attend(spread, [x.requires_grad_() for x in _inputs(spread)[1]], group=spread)
        found.append(spread)
    return found


def out_of_order(method, what, second=(0, 8, 20)):
    """Use two known batches in another order on the last rank; return the error that this rank gets."""
    *two, third = _known(method, [0, 7, 20], list(second), [0, 20])
    inputs = {spread: [x.requires_grad_() for x in _inputs(spread)[1]] for spread in (*two, third)}
    order = two[:: -1 if dist.get_rank() == dist.get_world_size() - 1 else 1]
    outs = {}
    if what == "backward":
        outs = {spread: _attend(spread, mine, group=spread) for spread, mine in inputs.items()}

    def call():
        for spread in order:
            if what == "gather":
                spread.gather(inputs[spread][0].detach())
            elif what == "forward":
                _attend(spread, inputs[spread], group=spread)
            else:
                torch.autograd.grad(outs[spread].sum(), inputs[spread])

    said = said_by(call)
    difference = []
    for spread in two:  # the error has changed nothing: in one order both go through
        whole, mine = _inputs(spread)
        alone = spread.shard(_attend(spread, whole))
        difference.append(float((_attend(spread, mine, group=spread) - alone).abs().max()))
    return said, max(difference)


def another_batch_alone(gathers=False):
    """Go on with one batch while the last rank turns to another; return the error that this rank gets."""
    two = _known("all_to_all", [0, 7, 20], [0, 8, 20])
    spread = two[1 if dist.get_rank() < dist.get_world_size() - 1 else 0]
    try:
        out = _attend(two[1], _inputs(two[1])[1], group=two[1])
        if gathers:
            spread.gather(out)
        else:
            _attend(spread, _inputs(spread)[1], group=spread)
    except RuntimeError as error:
        return str(error)
    return "no error"


def wrong_where_ranks_compare():
    """Make a call that is wrong on the last rank alone, of a batch that wasn't the last one used."""
    spread, other = _known("ring", [0, 7, 20], [0, 8, 20])
    inputs, is_last = _inputs(spread)[1], dist.get_rank() == dist.get_world_size() - 1
    said = said_by(lambda: _attend(spread, [x[int(is_last) :] for x in inputs], group=spread))
    for one in (other, spread):
        whole, mine = _inputs(one)
        difference = (_attend(one, mine, group=one) - one.shard(_attend(one, whole))).abs().max()
        assert difference < 1e-5
    return said


def exchanges(detail=False):
    """Return how often ranks compare in six calls of the last batch, and in six of two in turns."""
    two, count = _known("all_gather", [0, 7, 20], [0, 8, 20]), 0
    compare, level = agreement.agree, agreement.torch_dist.get_debug_level

    def counted(*arguments):
        nonlocal count
        count += 1
        return compare(*arguments)

    found = []
    agreement.agree = counted
    if detail:
        agreement.torch_dist.get_debug_level = lambda: agreement.torch_dist.DebugLevel.DETAIL
    try:
        for batches in ([two[1]] * 6, two * 3):
            count = 0
            for spread in batches:
                inputs = [x.requires_grad_() for x in _inputs(spread)[1]]
                _attend(spread, inputs, group=spread).sum().backward()
            found.append(count)
    finally:
        agreement.agree, agreement.torch_dist.get_debug_level = compare, level
    return found


def timeouts():
    """Return the timeouts of a group and of the one by which it compares."""
    other = agreement._on_cpu(dist.group.WORLD)
    assert other is not dist.group.WORLD
    cpu = torch.device("cpu")
    return [group._get_backend(cpu).options._timeout for group in (dist.group.WORLD, other)]


def _limits(**options):
    return attnreg.Capabilities(
        devices=("cpu",), dtypes=("float32",), varlen=True, causal=True, window=True, **options
    )


def where_kernels_refuse(method, refused):
    """Return what a causal call takes, or says, where the last rank's kernel refuses other windows."""
    spread = attnreg.context_parallel(dist.group.WORLD, [0, 36], "zigzag", method=method, memory=0)
    whole, inputs = _inputs(spread, heads=3)
    kernels, is_last = math.BACKEND.load(), dist.get_rank() == dist.get_world_size() - 1

    def refuses(spec):
        return ("no such window",) if is_last and spec.varlen and refused(spec) else ()

    some = attnreg.Backend(
        name="some", forward=_limits(), backward=_limits(), load=lambda: kernels, refuses=refuses
    )
    with attnreg.register_backend(some):
        try:
            out = _attend(spread, inputs, group=spread, backend="some")
        except attnreg.AttnregError as error:
            return f"{type(error).__name__}: {error}"
    assert (out - spread.shard(_attend(spread, whole))).abs().max() < 1e-5
    return dict(spread.taken)


def refuses_what_the_ring_needs(spec):
    return spec.window == (-1, -1)


def refuses_all(spec):
    return spec.max_q < 1000  # not that by which ranks compare their backends


def sinks_without_a_gradient_of_the_lse():
    """Return what forwards say without and with sinks, first with gradients."""
    spread = attnreg.context_parallel(dist.group.WORLD, [0, 7, 20], method="ring")
    inputs = [x.requires_grad_() for x in _inputs(spread)[1]]
    plain = attnreg.Backend(name="plain", forward=_limits(), backward=_limits(), load=math.BACKEND.load)
    found = []
    with attnreg.register_backend(plain):
        for mode, sinks in itertools.product((contextlib.nullcontext, torch.no_grad), (None, torch.zeros(4))):
            with mode():
                found.append(
                    said_by(lambda s=sinks: _attend(spread, inputs, group=spread, backend="plain", sinks=s))
                )
    return found


def scales():
    """Return how many kinds calls with a number and a tensor as scale are, and how far apart."""
    spread = attnreg.context_parallel(dist.group.WORLD, [0, 7, 20])
    inputs = _inputs(spread)[1]
    outs = [_attend(spread, inputs, group=spread, scale=x) for x in (0.25, torch.tensor(0.25))]
    return len(spread._agreed), float((outs[0] - outs[1]).abs().max())


def explained():
    """Return the methods that are said and taken with little memory and with much, in this order."""
    found = []
    for memory in (0, 10**9, None):
        spread = attnreg.context_parallel(dist.group.WORLD, [0, 6000], "zigzag", memory=memory)
        # By four heads three ranks can't go all_to_all, which takes least of both, time and memory.
        inputs = [x.requires_grad_() for x in _inputs(spread, heads=4)[1]]
        said = spread.explain(heads=4, head_dim=8, dtype="float32").method
        _attend(spread, inputs, group=spread)
        _attend(spread, inputs, group=spread)
        found.append((said, dict(spread.taken)))
    return found


@contextlib.contextmanager
def _as_gpus(**faked):
    """Have ranks choose as on GPUs: all have memory for any method, and measure; `faked` says otherwise."""
    faked = {"memory_of": lambda device: 10**9, "PRODUCT": 64, "EXCHANGED": 2**12} | faked
    usual = {name: getattr(machine, name) for name in faked}
    try:
        for name, one in faked.items():
            setattr(machine, name, one)
        yield
    finally:
        for name, one in usual.items():
            setattr(machine, name, one)
        machine._least_memory.clear()
        machine._rates.clear()


def _counting(comparisons):
    """Return `agree`, which notes each of its calls."""
    compare = agreement.agree

    def counted(*arguments):
        comparisons.append(arguments)
        return compare(*arguments)

    return counted


def _chosen(cu_seq=(0, 6000), mode=contextlib.nullcontext, heads=12, **options):
    """Return what is said before and after two calls, what they take, and how often ranks compare."""
    spread = attnreg.context_parallel(dist.group.WORLD, list(cu_seq), "zigzag", **options)
    inputs = [x.requires_grad_() for x in _inputs(spread, heads=heads)[1]]
    usual, comparisons = agreement.agree, []
    said = [spread.explain(heads=heads, head_dim=8, dtype="float32").method]
    agreement.agree = _counting(comparisons)
    try:
        with mode():
            _attend(spread, inputs, group=spread)
        _attend(spread, inputs, group=spread)
    finally:
        agreement.agree = usual
    after = spread.explain(heads=heads, head_dim=8, dtype="float32")
    return [*said, after.method], dict(spread.taken), len(comparisons), after.rates


def unequal_memory(**options):
    """Return what two batches take where the last rank has little memory."""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    with _as_gpus(memory_of=lambda device: 0 if is_last else 10**9):
        return [_chosen(heads=4, **options) for _ in range(2)]


def measured(**options):
    """Return what a batch takes where ranks measure, and whether random numbers stay what they were."""
    random = torch.get_rng_state()
    with _as_gpus():
        found = _chosen(**options)
    return found, bool((torch.get_rng_state() == random).all())


def measured_on_gpus(backend):
    """Return what a GPU's first call without a method goes by, before and after it, and what is measured."""
    device = torch.device("cuda", dist.get_rank())
    spread = attnreg.context_parallel(dist.group.WORLD, [0, 4096], "zigzag")
    before = spread._machine(device).rates
    inputs = [x.to(device, torch.bfloat16).requires_grad_() for x in _inputs(spread, heads=8, dim=64)[1]]
    offsets = spread.cu_seq(device)
    attnreg.varlen_attn(
        *inputs, offsets, offsets, 4096, 4096, is_causal=True, backend=backend, group=spread
    ).float().sum().backward()
    return before, spread._machine(device).rates, dict(spread.taken)


def as_measured(flops, link, latency, **options):
    """Return what a batch takes where ranks have measured this; those of higher rank are faster."""
    times = 1 + dist.get_rank()
    run = machine._Probe.run
    machine._Probe.run = lambda probe: (machine.Exchanges(link * times, latency / times), flops * times)
    try:
        with _as_gpus():
            return _chosen([0, 3000, 6000], **options)
    finally:
        machine._Probe.run = run


def cannot_measure(how):
    """Return what batches take where the last rank can't measure at the first call; then all could."""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    make = machine._Probe.__init__

    def no_memory(*given):
        raise torch.OutOfMemoryError("none left")

    counts_flops = how == "mode" and is_last
    mode = functools.partial(FlopCounterMode, display=False) if counts_flops else contextlib.nullcontext
    if how == "memory" and is_last:
        machine._Probe.__init__ = no_memory
    try:
        with _as_gpus():
            first = _chosen(mode=mode)
            machine._Probe.__init__ = make
            return first, _chosen([0, 3000, 6000])
    finally:
        machine._Probe.__init__ = make


def other_estimates(name, *values):
    """Return what a call says for which ranks give other memory or rates."""
    options = {name: values[dist.get_rank() % len(values)]}
    spread = attnreg.context_parallel(dist.group.WORLD, [0, 20], **options)
    return said_by(lambda: _attend(spread, _inputs(spread)[1], group=spread))


def warnings_of_another_window(**options):
    """Return what is logged in calls of two batches with two windows."""
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    context._warn_of_another_window.cache_clear()
    context.log.addHandler(handler)
    try:
        for cu_seq in ([0, 7, 20], [0, 8, 20]):
            spread = attnreg.context_parallel(dist.group.WORLD, cu_seq, "balanced", **options)
            whole, inputs = _inputs(spread)
            for window in ((2, 0), (-1, 0), (-1, 0)):
                out = _attend(spread, inputs, group=spread, window_size=window)
                alone = spread.shard(_attend(spread, whole, window_size=window))
                assert (out - alone).abs().max() < 1e-5  # by its own window
    finally:
        context.log.removeHandler(handler)
    return said


def balance(**options):
    """Return the rows of the ranks of a batch that is balanced."""
    cu_seq = [0, *range(4000, 44_001, 1000)]
    return attnreg.context_parallel(dist.group.WORLD, cu_seq, "balanced", **options).layout


def dense_in_a_block():
    """Return what calls say that aren't spread, inside of a block."""
    import attnreg.integrations.transformers as integration
    from attnreg import flash_attn

    spread = attnreg.context_parallel(dist.group.WORLD, [0, 7, 20])
    query, key, value = (x[None] for x in _inputs(spread)[1])
    ends, cache = spread.cu_seq(), [torch.zeros(1, 16, 4, 8) for _ in range(2)]
    by_heads = [x.transpose(1, 2) for x in (query, key, value)]
    packed = query[0], key[0], value[0], ends, ends, 13, 13
    mask = torch.ones(1, 1, query.shape[1], query.shape[1], dtype=torch.bool)
    calls = {
        "dense": lambda: flash_attn.flash_attn_func(query, key, value),
        "qkv": lambda: flash_attn.flash_attn_qkvpacked_func(torch.stack((query, key, value), 2)),
        "cache": lambda: flash_attn.flash_attn_with_kvcache(query, *cache, key, value, cache_seqlens=0),
        "deterministic": lambda: flash_attn.flash_attn_varlen_func(*packed, deterministic=True),
        "packed": lambda: flash_attn.flash_attn_varlen_func(*packed, causal=True),
        "transformers": lambda: integration.attention(torch.nn.Module(), *by_heads, None),
        "mask": lambda: integration.attention(torch.nn.Module(), *by_heads, mask),
        "transformers, packed": lambda: integration.attention(
            torch.nn.Module(), *by_heads, None, cu_seq_lens_q=ends, max_length_q=13, max_length_k=13
        ),
    }
    outside = {name: said_by(call) for name, call in calls.items() if name in ("dense", "transformers")}
    cache[0].zero_()
    with spread:
        inside = {name: said_by(call) for name, call in calls.items()}
    return inside, outside, float(cache[0].abs().max())


def after_the_block(checkpointed):
    """Return what a call says after the block, or a backward that computes the forward once more."""
    spread = attnreg.context_parallel(dist.group.WORLD, [0, 7, 20], "zigzag")
    whole, inputs = _inputs(spread)
    with spread:
        if checkpointed:
            query = inputs[0].requires_grad_()
            out = checkpoint(_attend, spread, [query, *inputs[1:]], use_reentrant=False)
        else:
            out = _attend(spread, inputs)
    _attend(spread, whole)
    return said_by(out.sum().backward if checkpointed else lambda: _attend(spread, inputs))


def with_another_default_device(method):
    """Return how far results and what else a batch has are from those without it."""
    groups = dist.group.WORLD, [0, 7, 20], "zigzag"
    spread = attnreg.context_parallel(*groups, method=method)
    expected = _attend(spread, _inputs(spread)[1], group=spread)
    grad = torch.ones_like(expected)
    with torch.device("meta"):
        other = attnreg.context_parallel(*groups, method=method)
        assert other.layout.pieces == spread.layout.pieces
        inputs = [x.requires_grad_() for x in _sharded(other)]
        out = _attend(other, inputs, group=other)
        grads = torch.autograd.grad(out, inputs, grad)
        difference = (other.gather(out.detach()) - spread.gather(expected)).abs().max()
        assert torch.equal(other.positions(), spread.positions())
        assert torch.equal(other.layout.positions(0), spread.layout.positions(0))
        balanced = attnreg.spread_documents([0, 7, 20, 90], 2)
    assert balanced.pieces == attnreg.spread_documents([0, 7, 20, 90], 2).pieces
    inputs = [x.requires_grad_() for x in _sharded(spread)]
    right = torch.autograd.grad(_attend(spread, inputs, group=spread), inputs, grad)
    return max(float(difference), *(float((x - y).abs().max()) for x, y in zip(grads, right, strict=True)))


def _sharded(spread):
    with torch.device("cpu"):
        return _inputs(spread)[1]


def end_without_a_begin():
    spread = attnreg.context_parallel(dist.group.WORLD, [0, 7, 20])
    return said_by(lambda: spread.__exit__(None, None, None))


def bits_of_the_whole_batch(method, backend):
    """Return whether output and gradients have the bits of one rank's, where those depend on no batch."""
    spread = attnreg.context_parallel(dist.group.WORLD, [0, 70, 413, 700], "zigzag", method=method)
    wholes, inputs = ([x.requires_grad_() for x in some] for some in _inputs(spread, dim=16))
    attnreg.configure({"policy": "batch_invariant"})
    try:
        alone = _attend(spread, wholes, backend=backend)
        wanted = alone, *torch.autograd.grad(alone.sum(), wholes)
        out = _attend(spread, inputs, group=spread, backend=backend)
        got = out, *torch.autograd.grad(out.sum(), inputs)
    finally:
        attnreg.configure({})
    return [torch.equal(one, spread.shard(other)) for one, other in zip(got, wanted, strict=True)]
