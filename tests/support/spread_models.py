"""What ranks do with models whose tokens are spread, and with torch's own ways to spread attention."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from support import truth
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard, set_rotate_method
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import attnreg

CU_SEQ = [0, 5, 29, 40]
WIDTH, DIM = 16, 4


class Attention(nn.Module):
    """Packed causal attention with a residual."""

    def __init__(self, offsets, longest):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.lengths = offsets, offsets, longest, longest

    def forward(self, hidden):
        inputs = (x(hidden).unflatten(-1, (-1, DIM)) for x in (self.query, self.key, self.value))
        attended = attnreg.varlen_attn(*inputs, *self.lengths, is_causal=True)
        return hidden + self.out(attended.flatten(1))


class Model(nn.Module):
    """Two such layers; with `checkpointed` each is computed once more in the backward."""

    def __init__(self, offsets, longest, checkpointed=False):
        super().__init__()
        self.layers = nn.ModuleList(Attention(offsets, longest) for _ in range(2))
        self.checkpointed = checkpointed

    def forward(self, hidden):
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False) if self.checkpointed else layer(hidden)
        return hidden


def made(offsets, longest, **options):
    torch.manual_seed(0)
    return Model(offsets, longest, **options)


def inputs(device):
    """Return hidden states of the whole batch, and weights of the loss."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, CU_SEQ[-1], WIDTH, generator=generator).to(device).unbind()


def expected(device):
    """Return loss and gradients of the whole batch in one process."""
    offsets, (hidden, weights) = torch.tensor(CU_SEQ, dtype=torch.int32).to(device), inputs(device)
    model = made(offsets, 24).to(device)
    loss = (model(hidden) * weights).sum()
    loss.backward()
    return loss.detach(), {name: x.grad for name, x in model.named_parameters()}


def trained(how, method, device="cpu"):
    """Hold loss and gradients of spread training to those of one process; `how` is what is around it."""
    wanted_loss, wanted = expected(device)
    mesh, cp = _mesh(how, device)
    spread = attnreg.context_parallel(cp, CU_SEQ, "balanced", method=method)
    hidden, weights = (spread.shard(x) for x in inputs(device))
    model = made(spread.cu_seq(device), spread.longest, checkpointed=how == "checkpointed").to(device)
    if "tensor parallel" in how:
        plan = dict.fromkeys(("layers.*.query", "layers.*.key", "layers.*.value"), ColwiseParallel())
        parallelize_module(model, mesh["tp"], plan | {"layers.*.out": RowwiseParallel()})
    if "fsdp" in how:
        for layer in model.layers:
            fully_shard(layer, mesh=cp)
        fully_shard(model, mesh=cp)
    step = torch.compile(model, backend="aot_eager") if how == "compiled" else model
    attnreg.reset_stats()
    with spread:
        loss = (step(hidden) * weights).sum()
        loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total, group=cp.get_group())
    torch.testing.assert_close(total, wanted_loss, rtol=1e-4, atol=1e-4)
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if "fsdp" in how:  # it takes the mean over ranks
            grad = grad * cp.size()
        grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
        if "fsdp" not in how:
            dist.all_reduce(grad, group=cp.get_group())
        torch.testing.assert_close(grad, wanted[name], rtol=1e-4, atol=1e-4)
    return attnreg.stats().calls


def _mesh(how, device):
    count = dist.get_world_size()
    if "tensor parallel" not in how:
        mesh = init_device_mesh(device, (count,), mesh_dim_names=("cp",))
        return mesh, mesh
    mesh = init_device_mesh(device, (count // 2, 2), mesh_dim_names=("cp", "tp"))
    return mesh, mesh["cp"]


def _dense(heads):
    """Return dense query, key, value and a gradient on this rank's GPU, and what float64 gives of them."""
    generator = torch.Generator().manual_seed(2)
    shape = 2, heads, 256, 64
    whole = [torch.randn(shape, generator=generator).bfloat16() for _ in range(4)]
    leaves = [x.double().requires_grad_() for x in whole[:3]]
    out = F.scaled_dot_product_attention(*leaves, is_causal=True)
    wanted = out.detach(), *torch.autograd.grad(out, leaves, whole[3].double())
    return [x.to("cuda") for x in whole], wanted


def _ran():
    return {name: count for name, count in attnreg.stats().calls.items() if any(count.values())}


def sdpa_of_shards(backend):
    """Hold SDPA of DTensors that are sharded over heads to that of whole tensors; return what kernels ran."""
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    whole, wanted = _dense(2 * mesh.size())
    *shards, grad = (distribute_tensor(x, mesh, [Shard(1)]) for x in whole)
    shards = [x.requires_grad_() for x in shards]
    with attnreg.register_backend(backend):
        attnreg.reset_stats()
        out = F.scaled_dot_product_attention(*shards, is_causal=True)
        got = out, *torch.autograd.grad(out, shards, grad)
        ran = _ran()
    for one, other in zip(got, wanted, strict=True):
        truth.assert_near(one.full_tensor().cpu(), other)
    return ran


def torchs_context_parallel(backend, kernel, rotation):
    """Hold torch's own context parallel to float64, a backend behind it; return what kernels ran.

    `kernel` is the name of an `SDPBackend`: torch 2.11's can't be pickled.
    """
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    buffers, wanted = _dense(4)
    set_rotate_method(rotation)
    spread = context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4)
    with attnreg.register_backend(backend), sdpa_kernel(getattr(SDPBackend, kernel)), spread:
        *inputs, grad = buffers
        inputs = [x.detach().requires_grad_() for x in inputs]
        attnreg.reset_stats()
        out = F.scaled_dot_product_attention(*inputs, is_causal=True)
        got = [out, *torch.autograd.grad(out, inputs, grad)]
        ran = _ran()
        whole = context_parallel_unshard(mesh, [x.detach() for x in got], [2] * 4)
    for one, other in zip(whole, wanted, strict=True):
        truth.assert_near(one.cpu(), other)
    return ran


def llama(method):
    """Hold a small Llama of transformers, on attnreg, to itself in one process; return what kernels ran."""
    import transformers

    import attnreg.integrations.transformers as integration

    integration.install()
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation="attnreg",
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.randint(0, 50, (CU_SEQ[-1],), generator=torch.Generator().manual_seed(1))
    spread = attnreg.context_parallel(dist.group.WORLD, CU_SEQ, "balanced", method=method)
    ends = spread.cu_seq()

    def run(tokens, positions):
        batch = {"input_ids": tokens[None], "position_ids": positions[None]}
        lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 24, "max_length_k": 24}
        logits = model(**batch, **lengths, use_cache=False).logits[0]
        return logits, *torch.autograd.grad(logits.square().sum(), model.model.embed_tokens.weight)

    starts = ends[:-1].repeat_interleave(ends.diff())
    wanted, wanted_grad = run(tokens, torch.arange(CU_SEQ[-1]) - starts)
    attnreg.reset_stats()
    with spread:
        got, grad = run(spread.shard(tokens), spread.positions())
    dist.all_reduce(grad)
    torch.testing.assert_close(got, spread.shard(wanted), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(grad, wanted_grad, rtol=1e-4, atol=1e-4)
    return _ran()
