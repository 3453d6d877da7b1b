"""An option is one row: a made-up option needs its row, a backend that declares it, and nothing else."""

import json

import pytest
from support.processes import forked

# A factor on the scores. Everything behind the row and the backend is what programs call.
SCRIPT = """
import dataclasses, json
from attnreg.core.contract import options

row = options.Option(
    name="sharpness", values="number", off=1.0, low=0.0, expected="0 or more",
    reason="sharpness must be 1.0, got {}", label="sharpness {}",
)
reason = "gains must be None, got a tensor"
gains = options.Option(name="gains", values="tensor", reason=reason, label="gains")
# In compiled graphs, too.
last = max(known.in_op for known in options.OPTIONS)
warmth = dataclasses.replace(
    row, name="warmth", argument="warmth", field="warmth", in_op=last + 1, reason="no {}"
)
# A factor on the query of each head, which is learned.
tilt = options.Option(
    name="tilt", values="tensor", shapes=("H",), dtype="float64", gradient=True, reason="no tilt",
    label="tilt",
)
options.OPTIONS += (row, gains, warmth, tilt)

import torch
import attnreg
from attnreg.core import registry
from attnreg.core.times.traces import spec_from, spec_to
from attnreg.tools.cli.options import further
from attnreg.tools import measure
from attnreg.tools.measure import reference
from attnreg.tools.tuning.workload import unmeasurable

def sharpened(kernel):
    def run(*arguments):
        *tensors, call = arguments
        plain = call._replace(scale=call.scale * call.sharpness * call.warmth, further=())
        if call.tilt is None:
            return kernel(*tensors, plain)
        at = 0 if len(tensors) == 3 else 1
        query = tensors[at]
        tensors[at] = query * call.tilt[:, None]
        if not at:
            return kernel(*tensors, plain)
        grad_q, *grads = kernel(*tensors, plain)
        return grad_q * call.tilt[:, None], *grads, (grad_q * query).sum((0, 2))
    return run

math = registry.find("math")
kernels = math.kernels()
limits = dataclasses.replace(math.backend.forward, options=("sharpness", "warmth", "tilt"))
backend = attnreg.Backend(
    name="warm", forward=limits, backward=limits,
    load=lambda: attnreg.Kernels(sharpened(kernels.forward), sharpened(kernels.backward)),
)
attnreg.register_backend(backend)

torch.manual_seed(0)
query, key, value = (torch.randn(9, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
offsets = torch.tensor([0, 4, 9], dtype=torch.int32)
arguments = query, key, value, offsets, offsets, 5, 5

def attend(**further):
    attnreg.reset_stats()
    out = attnreg.varlen_attn(*arguments, is_causal=True, **further)
    grads = torch.autograd.grad(out.sin().sum(), (query, key, value))
    return [out, *grads], attnreg.stats().calls

def expected(scale):
    outs = []
    for a, b in ((0, 4), (4, 9)):
        parts = [x[None, a:b] for x in (query, key, value)]
        outs.append(reference.attend(*parts, scale, (-1, 0))[0][0])
    out = torch.cat(outs)
    return [out, *torch.autograd.grad(out.sin().sum(), (query, key, value))]

def error(function):
    try:
        function()
    except Exception as caught:
        return [type(caught).__name__, str(caught)]

seen = {}
for number, factor in enumerate((2.0, 0.5, 2.0, 1.0)):  # again with 2.0: its plan, and not the one of 0.5
    results, ran = attend(sharpness=factor)
    right = expected(8**-0.5 * factor)
    seen[f"{number} right"] = all(torch.allclose(x, y) for x, y in zip(results, right, strict=True))
    seen[f"{number} ran"] = ran
results, ran = attend()
seen["plain right"] = all(torch.allclose(x, y) for x, y in zip(results, expected(8**-0.5), strict=True))
seen["plain ran"] = ran
seen["refused"] = error(lambda: attend(sharpness=2.0, backend="math"))[1]
seen["typo"] = error(lambda: attend(sharpnes=2.0))
spec = attnreg.AttentionSpec(
    device=attnreg.Device("cpu"), dtype="fp64", batch=2, max_q=5, max_k=5, heads_q=2, heads_k=2, head_dim=8,
    head_dim_v=8, varlen=True, further={"sharpness": 2.0},
)
seen["gains"] = [
    error(lambda: attend(gains=value))[1] for value in (3, torch.ones(2, requires_grad=True), torch.ones(2))
]
seen["range"] = [error(lambda: attend(sharpness=factor)) for factor in (-1.0, float("inf"))]
seen["explained"] = str(attnreg.explain(*arguments, is_causal=True, sharpness=2.0))
seen["no explanation"] = error(lambda: attnreg.explain(*arguments, sharpnes=2.0))
seen["no spec"] = error(lambda: spec.but(further={"sharpnes": 2.0}))
seen["spec"] = [str(spec), spec.sharpness, spec.but(further=()).sharpness]
again = spec_from(json.loads(json.dumps(spec_to(spec))), spec.device)
seen["trace"] = again == spec and hash(again) == hash(spec)
seen["flag"] = further(["sharpness=2", "tilt"])
seen["reasons"] = math.reasons(spec, "forward")
scales = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)
frozen = scales.detach()
seen["learned"] = []
whole, still = (query, key), (query.detach(), key.detach())
for tensors, tilts in ((whole, scales), (whole, frozen), (still, scales)):
    given = *tensors, value.detach(), *arguments[3:]
    out = attnreg.varlen_attn(*given, is_causal=True, tilt=tilts)
    tilted = attnreg.varlen_attn(tensors[0] * tilts[:, None], *given[1:], is_causal=True)
    leaves = [x for x in (*tensors, tilts) if x.requires_grad]
    pairs = zip(*(torch.autograd.grad(x.sin().sum(), leaves) for x in (out, tilted)), strict=True)
    seen["learned"].append(torch.allclose(out, tilted) and all(torch.allclose(a, b) for a, b in pairs))
seen["wrong"] = [
    error(lambda: attend(tilt=x))[1] for x in (torch.ones(3, dtype=torch.float64), torch.ones(2))
]
in_graph = lambda **further: attnreg.varlen_attn(*arguments, is_causal=True, **further)
compiled = torch.compile(in_graph, backend="aot_eager", fullgraph=True)
seen["not in graph"] = torch.allclose(compiled(), expected(8**-0.5)[0])
out = compiled(warmth=2.0)
grads = torch.autograd.grad(out.sin().sum(), (query, key, value))
wanted = expected(8**-0.5 * 2.0)
seen["in graph"] = all(torch.allclose(x, y) for x, y in zip((out, *grads), wanted, strict=True))
whole = lambda: attnreg.varlen_attn(*arguments, is_causal=True, sharpness=2.0)
compiled = torch.compile(whole, backend="eager")
seen["compiled"] = torch.allclose(compiled(), expected(8**-0.5 * 2.0)[0])
case = measure.Case(name="any", lens_q=(3, 4), lens_k=(3, 4), varlen=True)
drawn = measure.inputs(case)
drawn = drawn._replace(call=drawn.call.with_options({"sharpness": 2.0}))
seen["unknown"] = [
    error(lambda: reference.attention(case, drawn, torch.float64)), error(lambda: measure.Sample(case, drawn))
]
seen["tuned"] = unmeasurable(spec)
half = options.Option(name="half", values="number", off=0.5)
seen["off"] = [type(known.off).__name__ for known in (row, half)]
print(json.dumps(seen))
"""
RAN = {"warm": {"forward": 1, "backward": 1}}


# What is built on a machine, if anything is, knows the row too; most machines have built nothing.
@pytest.mark.slow
@pytest.mark.parametrize("routers", ["", "python"])
def test_a_row_and_a_kernel_add_an_option(routers):
    # The row is added before anything reads the rows, as attnreg's entry point would.
    run = forked(SCRIPT, ATTNREG_ROUTERS=routers, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert run.returncode == 0, run.stderr
    seen = json.loads(run.stdout)
    assert [seen[f"{number} right"] for number in range(4)] == [True] * 4
    assert [seen[f"{number} ran"] for number in range(4)] == [RAN] * 4
    assert (seen["plain right"], seen["plain ran"]) == (True, RAN)
    assert "sharpness must be 1.0, got 2.0" in seen["refused"]
    assert seen["typo"] == [
        "TypeError",
        "varlen_attn() got an unexpected keyword argument 'sharpnes'; did you mean 'sharpness'?",
    ]
    number, with_gradient, refused = seen["gains"]
    assert number == "gains: got 3, expected a tensor"
    assert with_gradient == "gains: got a tensor that needs a gradient, expected none: it has none"
    assert "gains must be None, got a tensor" in refused  # by the backend, which doesn't declare it
    assert seen["range"] == [
        ["InvalidInputError", f"sharpness: got {factor}, expected 0 or more"] for factor in ("-1.0", "inf")
    ]
    assert "sharpness 2.0" in seen["explained"] and "sharpness must be 1.0, got 2.0" in seen["explained"]
    assert seen["no explanation"] == ["TypeError", seen["typo"][1].replace("varlen_attn", "explain")]
    hint = "further: there is no option 'sharpnes'; did you mean 'sharpness'?"
    assert seen["no spec"] == ["InvalidInputError", hint]
    shown, value, off = seen["spec"]
    assert shown.endswith("packed, 2 sequences up to 5 x 5 · sharpness 2.0")
    assert (value, off) == (2.0, 1.0)
    assert seen["trace"]
    assert seen["flag"] == {"further": {"sharpness": 2, "tilt": True}}
    assert seen["reasons"] == ["sharpness must be 1.0, got 2.0"]
    assert seen["compiled"]
    assert seen["in graph"] and seen["not in graph"]
    assert seen["learned"] == [True] * 3
    # Nothing computes or measures the call without the option.
    assert [name for name, _ in seen["unknown"]] == ["TypeError"] * 2
    assert all("unexpected keyword argument 'sharpness'" in text for _, text in seen["unknown"])
    assert seen["tuned"] == "sharpness can't be measured: the default order decides"
    assert seen["off"] == ["int", "float"]
    assert seen["wrong"] == [
        f"tilt: got shape {got}, expected (2,), torch.float64"
        for got in ("(3,), torch.float64", "(2,), torch.float32")
    ]
