"""Dynamo leaves attnreg's Python alone where it runs between the graphs of a compiled program."""

from __future__ import annotations

import functools
import os
import warnings
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.processes import forked
from support.tuned import point, spec_with, table
from torch._dynamo.types import ConvertFrameReturn
from torch.utils.checkpoint import checkpoint

import attnreg
from attnreg import flash_attn
from attnreg.backends import math
from attnreg.core import registry
from attnreg.core.contract.spec import Device
from attnreg.core.dispatch.state import state
from attnreg.core.launching.launchers import FunctionLauncher
from attnreg.core.times.environments import environment
from attnreg.core.torchlib import frames

PACKAGE = str(Path(attnreg.__file__).parent) + os.sep
CU = torch.tensor([0, 2, 5], dtype=torch.int32)


@contextmanager
def hook():
    """Look at the frames that Dynamo would compile; returns the names of attnreg's and of this file's."""
    seen = []

    def look(frame, *_):
        code = frame.f_code
        if code.co_filename.startswith((PACKAGE, __file__)):
            seen.append(f"{code.co_filename.removeprefix(PACKAGE)}:{code.co_qualname}")
        return ConvertFrameReturn(apply_to_code=False)  # so that it is looked at again

    look.get_guard_manager = None
    before = torch._C._dynamo.eval_frame.set_eval_frame(look)
    try:
        yield seen
    finally:
        torch._C._dynamo.eval_frame.set_eval_frame(before)


def packed(**options):
    x = torch.randn(5, 2, 8, requires_grad=True)
    attnreg.varlen_attn(x, x, x, CU, CU, 3, 3, **options).sum().backward()


def dense(mask=None):
    x = torch.randn(1, 2, 5, 8, requires_grad=True)
    F.scaled_dot_product_attention(x, x, x, mask).sum().backward()


def scoped():
    with attnreg.use_backend("math"):
        dense()
        packed()
    attnreg.use_backend("math")(dense)()


def with_options():
    packed(sinks=torch.zeros(2, requires_grad=True))
    packed(softcap=3.0)
    packed(dropout_p=0.5)
    packed(backend="math")
    with suppress(attnreg.InvalidInputError):
        packed(window_size=(-3, 0))


def as_op():
    x = torch.randn(5, 2, 8, requires_grad=True)
    torch.ops.attnreg._varlen_attn(x, x, x, CU, CU, 3, 3)[0].sum().backward()
    torch.func.grad(lambda x: attnreg.varlen_attn(x, x, x, CU, CU, 3, 3).sum())(x.detach())


def masked():
    attnreg.configure({"masks": "recognise"})
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
    mask[0, ..., 3:] = False
    x = torch.randn(2, 2, 5, 8)
    F.scaled_dot_product_attention(x, x, x, mask)


def flash_functions():
    x, cache = torch.randn(2, 6, 2, 8, requires_grad=True), torch.zeros(2, 9, 2, 8)
    for options in ({"causal": True}, {"dropout_p": 0.5}, {"deterministic": True}):
        flash_attn.flash_attn_func(x, x, x, **options).sum().backward()
    with torch.no_grad():
        flash_attn.flash_attn_with_kvcache(x, cache, cache.clone(), x, x, cache_seqlens=3)
    tokens, indices, *_ = flash_attn.bert_padding.unpad_input(x[..., 0], torch.ones(2, 6, dtype=torch.bool))
    flash_attn.bert_padding.pad_input(tokens, indices, 2, 6)


def around_calls(tmp_path):
    with attnreg.record(tmp_path / "calls.json"):
        dense()
    x = torch.randn(1, 2, 5, 8)
    assert attnreg.explain(x, x, x).forward
    assert attnreg.stats().calls
    with attnreg.register_backend("cpu"):
        packed()


def checkpointed():
    x = torch.randn(5, 2, 8, requires_grad=True)
    with attnreg.use_backend("math"):
        out = checkpoint(lambda x: attnreg.varlen_attn(x, x, x, CU, CU, 3, 3), x, use_reentrant=False)
    out.sum().backward()


@pytest.mark.parametrize("way", ["compiled", "python"])
def test_no_frame_of_attnreg_reaches_dynamo(way, request, tmp_path):
    request.getfixturevalue(f"{way}_routers")
    request.getfixturevalue("routers")
    attnreg.register_backend("math")
    programs = dense, packed, scoped, with_options, as_op, masked, flash_functions, checkpointed
    with hook() as seen:
        for program in programs:
            for _ in range(3):  # planned, kept, run by what is kept
                program()
        around_calls(tmp_path)
    assert [name for name in seen if not name.startswith(__file__)] == []
    assert f"{__file__}:dense" in seen


@pytest.mark.parametrize("way", ["compiled", "python"])
def test_no_frame_reaches_dynamo_where_times_decide_about_further_lengths(way, request, tmp_path, ran):
    request.getfixturevalue(f"{way}_routers")
    request.getfixturevalue("routers")
    points = [
        point(spec_with(varlen=varlen, needs_backward=True), direction, math=10.0, cpu=90.0)
        for varlen in (False, True)
        for direction in ("forward", "backward")
    ]
    here = environment(Device("cpu"), registry.entries())
    replace(table(*points), environment=here).save(tmp_path / "here.json")
    attnreg.configure({"tuned": tmp_path / "here.json"})

    def call(length):
        dense = torch.randn(1, 4, length, 64).bfloat16().requires_grad_()
        F.scaled_dot_product_attention(dense, dense, dense).sum().backward()
        packed, ends = dense[0].transpose(0, 1), torch.tensor([0, length], dtype=torch.int32)
        attnreg.varlen_attn(packed, packed, packed, ends, ends, length, length).sum().backward()

    with hook() as seen:
        for length in (20, 20, 20, 30, 40, 60, 90):
            call(length)
    assert ran() == {"math": (14, 14)}
    assert [name for name in seen if not name.startswith(__file__)] == []
    assert any(kind.steps for kind in state().kinds.values())


def test_no_frame_of_a_backend_of_the_programs_own_reaches_dynamo(compiled_routers, routers):
    kernels, ran = math.BACKEND.load(), []

    def forward(query, key, value, call):
        ran.append("function")
        return kernels.forward(query, key, value, call)

    def launched(query, key, value, *rest):
        ran.append("launcher")
        return query.clone(), query.new_zeros(2, 5)

    limits = attnreg.Capabilities(devices=("cpu",), dtypes=("float32",), varlen=True)
    for specialize in (None, lambda *_: FunctionLauncher(launched, (-1, -1))):
        own = attnreg.Kernels(forward, None, specialize=specialize)
        backend = attnreg.Backend(name="own", forward=limits, backward=None, load=lambda own=own: own)
        with attnreg.register_backend(backend), hook() as seen:
            for _ in range(4):
                x = torch.randn(5, 2, 8)
                attnreg.varlen_attn(x, x, x, CU, CU, 3, 3)
        assert [name for name in seen if name.endswith(("forward", "launched"))] == []
    assert {"function", "launcher"} == set(ran)


@pytest.mark.parametrize("setting", ["error_on_recompile", "fail_on_recompile_limit_hit"])
def test_new_lengths_after_a_graph_break_compile_nothing(setting, routers):
    torch._dynamo.reset()
    attnreg.register_backend("math")

    def attend(x, cu):
        try:
            torch._dynamo.graph_break()
            F.scaled_dot_product_attention(x, x, x)
            return attnreg.varlen_attn(x[0], x[0], x[0], cu, cu, x.shape[1], x.shape[1])
        finally:
            pass

    compiled, before = torch.compile(attend, backend="eager"), attnreg.stats().calls.get("math")
    with torch._dynamo.config.patch({setting: True}), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for length in range(4, 16):
            compiled(torch.randn(1, length, 2, 8), torch.tensor([0, 1, length], dtype=torch.int32))
    assert [str(warning.message) for warning in warned if "attnreg" in str(warning.message)] == []
    assert attnreg.stats().calls["math"]["forward"] >= 24 + (before["forward"] if before else 0)


@pytest.mark.parametrize("function", [attnreg.varlen_attn, flash_attn.flash_attn_varlen_func])
def test_a_function_that_is_compiled_itself_is_compiled(function):
    torch._dynamo.reset()
    graphs, x = [], torch.randn(5, 2, 8)

    def keep(module, _inputs):
        graphs.append(module)
        return module

    out = torch.compile(function, backend=keep, fullgraph=True)(x, x, x, CU, CU, 3, 3)
    assert "attnreg._varlen_attn" in graphs[0].code
    torch.testing.assert_close(out, function(x, x, x, CU, CU, 3, 3))


def test_what_use_backend_decorates_is_compiled():
    torch._dynamo.reset()
    graphs = []

    def keep(module, _inputs):
        graphs.append(module)
        return module

    @attnreg.use_backend("math")
    def twice(x):
        return x * 2

    def untraced(x):
        try:
            torch._dynamo.graph_break()
            return twice(x)
        finally:
            pass

    assert torch.compile(untraced, backend=keep)(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]
    assert graphs


FIRST_USE = """
import torch, attnreg
from torch._dynamo.types import ConvertFrameReturn

seen = []

def look(frame, *_):
    seen.append(frame.f_code.co_qualname)
    return ConvertFrameReturn(apply_to_code=False)

def first_use():
    return attnreg.varlen_attn

look.get_guard_manager = None
torch._C._dynamo.eval_frame.set_eval_frame(look)
first_use()
torch._C._dynamo.eval_frame.set_eval_frame(None)
print(seen)
"""


@pytest.mark.parametrize("entry_point", ["0", "1"])
def test_the_modules_that_the_first_use_imports_do_not_reach_dynamo(entry_point):
    """Whether torch has run attnreg's entry point or not."""
    run = forked(FIRST_USE, TORCH_DEVICE_BACKEND_AUTOLOAD=entry_point)
    assert (run.stdout, run.stderr) == ("['first_use']\n", "")


class Launches:
    def run(self, x):
        return x


def test_the_function_behind_a_method_or_a_partial_is_marked():
    """C++ calls launchers that are methods, and no function of attnreg's is around them."""
    functions = [lambda x: x for _ in range(2)]
    frames.leave_uncompiled(Launches().run)
    frames.leave_uncompiled(functools.partial(functions[0], 1))
    marked = [hasattr(function, "_torchdynamo_orig_callable") for function in (Launches.run, *functions)]
    assert marked == [True, True, False]
