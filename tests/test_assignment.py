"""Promises of `attnreg.assign`: whose calls run on the backend of a module, however the module is called."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
import threading
from contextvars import Context, copy_context

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import attnreg
from attnreg import assignment
from attnreg.core.dispatch import call_cache, scope

MATH, CPU = {"math": (1, 1)}, {"cpu": (1, 1)}
BOTH = {"math": (1, 1), "cpu": (1, 1)}


class Attention(nn.Module):
    """Calls attention on (B, H, S, D), and does first what a test asks for."""

    first = staticmethod(lambda: None)

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        self.first()
        return F.scaled_dot_product_attention(x * self.scale, x, x)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn = Attention()
        self.mlp = nn.Linear(8, 8)

    def forward(self, x):
        return self.mlp(self.self_attn(x)) + x


class Model(nn.Module):
    """Two layers; `reentrant` is None for no checkpoints around them."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.reentrant = reentrant

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


class Wrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)


pytestmark = pytest.mark.usefixtures("cpu_where_compiled")


def ran_of(ran, model):
    """Run a model forward and backward; return what ran."""
    x = torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    ran()
    model(x).sum().backward()
    return ran()


PATTERNS = [
    ({"*.self_attn": "math"}, {"math": (2, 2)}),
    ({"layers.0.*": "MATH"}, BOTH),
    ({"layers.[0]": ["math", "cpu"]}, BOTH),
    ({"": ("math",)}, {"math": (2, 2)}),
    ({"*": "math", "layers.1.*": "cpu"}, BOTH),  # the last that matches
    ({"*.self_attn": "cpu", "layers.?.self_attn": "math"}, {"math": (2, 2)}),
    ({"layers.1.self_attn": "cpu", "layers": "math", "layers.1": "math"}, BOTH),  # the innermost
]


@pytest.mark.parametrize("patterns, expected", PATTERNS)
def test_the_innermost_module_and_the_last_pattern_decide_until_removed(ran, patterns, expected):
    model = Model()
    handle = attnreg.assign(model, patterns)
    assert ran_of(ran, model) == expected
    handle.remove()
    handle.remove()
    assert ran_of(ran, model) == {"cpu": (2, 2)}
    assert [type(module) for module in model.layers[0].modules()] == [Layer, Attention, nn.Linear]
    assert "_attnreg_blocks" not in vars(model)


def test_values_and_gradients_are_those_of_the_program_alone():
    model = Model().double()
    x = torch.randn(1, 2, 5, 8, dtype=torch.float64, requires_grad=True)
    plain = model(x)
    with attnreg.assign(model, {"*.self_attn": "math"}):
        out = model(x)
    for one, other in zip(*([y, *torch.autograd.grad(y.sum(), x)] for y in (out, plain)), strict=True):
        torch.testing.assert_close(one, other)


def test_the_newest_assignment_decides_until_it_is_removed(ran):
    model = Model()
    first = attnreg.assign(model, {"*.self_attn": "math"})
    second = attnreg.assign(model, {"layers.0": "cpu"})
    assert ran_of(ran, model) == BOTH
    third = attnreg.assign(model, {"*.self_attn": "cpu"})
    assert ran_of(ran, model) == {"cpu": (2, 2)}
    second.remove()
    third.remove()
    assert ran_of(ran, model) == {"math": (2, 2)}
    first.remove()
    assert ran_of(ran, model) == {"cpu": (2, 2)}
    assert [repr(handle) for handle in (first, third)] == ["<attnreg.Assignment, removed>"] * 2


def test_a_block_around_is_weaker_and_one_inside_and_an_argument_are_stronger(ran):
    class Inside(Layer):
        def forward(self, x):
            with attnreg.use_backend("cpu"):
                return super().forward(x)

    class Packed(nn.Module):
        def forward(self, x):
            cu = torch.tensor([0, 5], dtype=torch.int32)
            q = x[0].transpose(0, 1)
            return attnreg.varlen_attn(q, q, q, cu, cu, 5, 5, backend="cpu")

    model = nn.Sequential(Attention(), Inside(), Packed())
    with attnreg.assign(model, {"0": "math", "1": "math", "2": "math"}), attnreg.use_backend("cpu"):
        assert ran_of(ran, model) == {"math": (1, 1), "cpu": (2, 2)}


def test_explain_names_the_pattern_and_stats_count():
    seen = []
    model = Model()
    with attnreg.assign(model, {"*.self_attn": "math", "*": ["cpu", "math"]}) as handle:
        assert handle.modules["layers.0.self_attn"] == ("cpu", "math")
    with attnreg.assign(model, {"*.self_attn": "math"}) as handle:
        assert handle.modules == dict.fromkeys(("layers.0.self_attn", "layers.1.self_attn"), ("math",))
        q = torch.randn(1, 2, 5, 8)
        model.layers[0].self_attn.first = lambda: seen.append(attnreg.explain(q, q, q).forward)
        model(q)
    assert [(one.backend, one.source) for one in seen] == [("math", "assign({'*.self_attn': 'math'})")]


def test_copies_and_pickles_keep_their_backends_and_a_state_dict_has_no_trace(ran):
    model = Model()
    keys = model.state_dict().keys()
    with attnreg.assign(model, {"layers.0.self_attn": "math"}) as handle:
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model)]
        assert model.state_dict().keys() == keys
        with pytest.raises(TypeError, match="an Assignment can't be pickled or copied"):
            copy.copy(handle)
    assert ran_of(ran, model) == {"cpu": (2, 2)}
    for one in copies[:2]:
        assert one.layers[0].self_attn.scale is not model.layers[0].self_attn.scale
        assert ran_of(ran, one) == BOTH
        assert one.layers[0].self_attn.scale.grad is not None
    assert model.layers[0].self_attn.scale.grad is not None  # of its own call and of the shallow copy's
    assert ran_of(ran, torch.compile(copies[1], backend="aot_eager", fullgraph=True)) == BOTH


def test_a_module_that_copies_itself_keeps_its_backends(ran):
    model = torch.fx.symbolic_trace(nn.Sequential(Attention(), nn.ReLU()))
    handle = attnreg.assign(model, {"": "math"})
    copied = copy.deepcopy(model)
    handle.remove()
    assert [ran_of(ran, one) for one in (copied, copy.deepcopy(copied), model)] == [MATH, MATH, CPU]


def test_a_pickled_model_loads_where_its_backend_does_not_and_raises_when_called():
    limits = attnreg.Capabilities(devices=("cpu",), dtypes=("float32",))
    load = lambda: attnreg.Kernels(lambda *_: None, lambda *_: None)  # noqa: E731
    own = attnreg.Backend(name="gone", forward=limits, backward=limits, load=load)
    model = Model()
    with attnreg.register_backend(own), attnreg.assign(model, {"*.self_attn": "gone"}):
        pickled = pickle.dumps(model)
    loaded = pickle.loads(pickled)
    for _ in range(2):
        with pytest.raises(attnreg.UnknownBackendError, match="no backend is named 'gone'"):
            loaded(torch.randn(1, 2, 5, 8))


@pytest.mark.parametrize(
    ("pattern", "reentrant"),
    [
        ("*.self_attn", True),
        pytest.param("layers.?", False, marks=pytest.mark.slow),
        pytest.param("", True, marks=pytest.mark.slow),
    ],
)
def test_a_forward_that_a_checkpoint_repeats_gets_the_same_backend(ran, pattern, reentrant):
    model = Model(reentrant)
    with attnreg.assign(model, {pattern: "math"}):
        assert ran_of(ran, model) == {"math": (4, 2)}
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert ran_of(ran, compiled) == {"math": (4, 2)}


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_error_in_forward_ends_the_choice(ran, error):
    model = Model()

    def fail():
        raise error

    attnreg.assign(model, {"layers": "math", "*.self_attn": "math"})
    model.layers[1].self_attn.first = fail
    with pytest.raises(error):
        model(torch.randn(1, 2, 5, 8))
    assert ran_of(ran, Attention()) == CPU


def test_threads_replicas_and_a_handle_that_is_removed_while_a_call_runs(ran):
    model = Wrapper(Attention())
    handle = attnreg.assign(model, {"module": "math"})
    x, together = torch.randn(1, 2, 5, 8), threading.Barrier(3)

    def run(called):
        called(x)
        F.scaled_dot_product_attention(x, x, x)

    replica = model.module._replicate_for_data_parallel()
    replica.scale = torch.ones(())
    Attention.first = staticmethod(lambda: (together.wait(5), together.wait(5)))
    try:
        threads = [threading.Thread(target=run, args=(called,)) for called in (model, replica)]
        for thread in threads:
            thread.start()
        together.wait(5)
        handle.remove()
        together.wait(5)
        for thread in threads:
            thread.join()
    finally:
        Attention.first = staticmethod(lambda: None)
    assert ran() == {"math": (2, 0), "cpu": (2, 0)}
    run(model)
    assert ran() == {"cpu": (2, 0)}


def test_a_model_that_is_wrapped_later_or_called_in_itself_keeps_its_backends(ran):
    model = Model()
    attnreg.assign(model, {"*.self_attn": "math"})
    model.layers[0].self_attn.first = lambda: ran_of(ran, model.layers[1])
    assert ran_of(ran, Wrapper(model)) == {"math": (2, 2)}


def test_a_forward_of_the_instance_as_accelerate_puts_it_there_runs_in_the_block(ran):
    before, after = Attention(), Attention()
    model = nn.Sequential(before, after)
    own = before.forward
    before.forward = lambda x: own(x)
    attnreg.assign(model, {"*": "math"})
    inner = after.forward
    after.forward = lambda x: inner(x)
    assert ran_of(ran, model) == {"math": (2, 2)}


def test_a_module_with_two_names_is_found_by_both(ran):
    shared = Attention()
    model = nn.ModuleDict({"a": Wrapper(shared), "b": Wrapper(shared)})
    with attnreg.assign(model, {"b.module": "math"}):
        assert ran_of(ran, model["a"]) == MATH
    with attnreg.assign(model, {"b": "math"}):
        assert (ran_of(ran, model["a"]), ran_of(ran, model["b"])) == (CPU, MATH)


@pytest.mark.slow
def test_compiled_code_follows_what_is_assigned_and_removed_later(ran):
    model = nn.Sequential(Attention(), Attention())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert ran_of(ran, compiled) == {"cpu": (2, 2)}
    for pattern, backend, expected in (
        ("1", "math", BOTH),
        ("", "math", {"math": (2, 2)}),
        ("?", ["cpu"], {"cpu": (2, 2)}),
        ("?", ["math"], {"math": (2, 2)}),
    ):
        with attnreg.assign(model, {pattern: backend}), attnreg.use_backend("cpu"):
            assert ran_of(ran, compiled) == expected
    assert ran_of(ran, compiled) == {"cpu": (2, 2)}


def test_the_choice_is_part_of_an_exported_program(ran):
    model = nn.Sequential(Attention(), Attention())
    attnreg.assign(model, {"0": "math"})
    program = torch.export.export(model, (torch.randn(1, 2, 5, 8),)).module()
    ran()
    program(torch.randn(1, 2, 5, 8))
    assert ran() == {"math": (1, 0), "cpu": (1, 0)}


@pytest.mark.slow
@pytest.mark.parametrize("pattern, expected", [("layers.0.self_attn", BOTH), ("", {"math": (2, 2)})])
def test_the_choice_is_in_the_code_of_inductor(ran, inductor, pattern, expected):
    model = Model()
    attnreg.assign(model, {pattern: "math"})
    assert ran_of(ran, torch.compile(model, backend=inductor, fullgraph=True)) == expected


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_the_choice_holds_between_graphs(ran):
    model = nn.Sequential(Attention(), Attention())
    attnreg.assign(model, {"": "math", "1": "cpu"})
    for attention in model:
        attention.first = torch._dynamo.graph_break
    assert ran_of(ran, torch.compile(model, backend="eager")) == BOTH


def test_a_lazy_module_keeps_its_backend_once_it_has_its_weights(ran):
    class Lazy(nn.modules.lazy.LazyModuleMixin, Attention):
        cls_to_become = Attention

        def initialize_parameters(self, x):
            pass

    model = nn.Sequential(Lazy())
    attnreg.assign(model, {"0": "math"})
    assert [ran_of(ran, model), ran_of(ran, model)] == [MATH, MATH]


class Streams(nn.Module):
    async def forward(self, x):
        return x


WRONG = [
    (None, {"*": "math"}, attnreg.InvalidInputError, r"got None, expected a torch\.nn\.Module"),
    (Model(), ["*"], attnreg.InvalidInputError, r"got \['\*'\], expected a dict of patterns and backends"),
    (Model(), {}, attnreg.InvalidInputError, r"got {}, expected a dict"),
    (Model(), {3: "math"}, attnreg.InvalidInputError, "got 3: 'math', expected a pattern and a backend"),
    (Model(), {"*": []}, attnreg.InvalidInputError, r"got '\*': \[\], expected .* a list of at least one"),
    (Model(), {"*": {"math"}}, attnreg.InvalidInputError, "expected a pattern and a backend"),
    (Model(), {"*": "mth"}, attnreg.UnknownBackendError, "no backend is named 'mth'.*did you mean 'math'"),
    (
        Model(), {"*": "math", "layers.0.self_atn": "cpu"}, attnreg.InvalidInputError,
        r"'layers.0.self_atn', which matches no module.*did you mean 'layers\.0\.self_attn'\?",
    ),
    (
        Model(), {"*.att": "cpu"}, attnreg.InvalidInputError,
        r"'\*\.att', which matches no module, expected a pattern for names of model\.named_modules\(\)$",
    ),
    (Model(), None, attnreg.InvalidInputError, r"got no patterns, and no settings in force have \[modules\]"),
    (nn.Sequential(Streams()), {"0": "math"}, attnreg.InvalidInputError, "'0', whose forward runs after its"),
]  # fmt: skip


@pytest.mark.parametrize("model, patterns, error, message", WRONG)
def test_what_cannot_be_assigned_says_why_and_changes_nothing(model, patterns, error, message):
    before = [type(module) for module in model.modules()] if model is not None else []
    with pytest.raises(error, match=message):
        attnreg.assign(model, patterns)
    assert before == ([type(module) for module in model.modules()] if model is not None else [])


@pytest.mark.filterwarnings("ignore:`torch.jit")  # of 2.15 a FutureWarning
def test_a_module_of_torchscript_is_refused():
    model = nn.Sequential(torch.jit.trace(nn.ReLU(), torch.ones(1)))
    with pytest.raises(attnreg.InvalidInputError, match="got '0', a module of TorchScript"):
        attnreg.assign(model, {"*": "math"})
    assert type(model) is nn.Sequential


def test_modules_of_settings_are_assigned_where_the_program_gives_no_patterns(ran, tmp_path):
    file, seen = tmp_path / "attnreg.toml", []
    file.write_text('[modules]\n"*.self_attn" = "math"\n"layers.1.*" = ["cpu", "math"]\n', encoding="utf-8")
    attnreg.configure(file)
    model = Model()
    with attnreg.assign(model):
        assert ran_of(ran, model) == BOTH
        q = torch.randn(1, 2, 5, 8)
        model.layers[0].self_attn.first = lambda: seen.append(attnreg.explain(q, q, q).forward.source)
        model(q)
    assert seen == ["assign, attnreg.toml:2"]
    attnreg.configure({"modules": {"layers.1.*": "math"}})  # the program's own are stronger
    model = Model()
    with attnreg.assign(model):
        assert ran_of(ran, model) == {"math": (2, 2)}
    with pytest.raises(attnreg.InvalidInputError, match=r"attnreg.toml:2: got '\*.self_attn', which matches"):
        attnreg.assign(Attention())


def test_a_backend_of_modules_that_is_unknown_or_disabled_is_an_error_with_its_line(tmp_path):
    file = tmp_path / "attnreg.toml"
    file.write_text('disabled = ["FA2"]\n[modules]\n"*.attn" = ["cpu", "FA2"]\n', encoding="utf-8")
    with pytest.raises(
        attnreg.ConfigError, match=r"attnreg.toml:3: modules.*expected a backend that isn't d"
    ):
        attnreg.configure(file)
    file.write_text('[modules]\n"*.attn" = "mth"\n', encoding="utf-8")
    with pytest.raises(attnreg.ConfigError, match=r"attnreg.toml:2: modules.*did you mean 'math'"):
        attnreg.configure(file)
    file.write_text('[modules]\n"*.attn" = []\n', encoding="utf-8")
    with pytest.raises(attnreg.ConfigError, match=r"attnreg.toml:2: modules.*expected at least one name"):
        attnreg.configure(file)


def test_a_forward_that_is_compiled_itself_runs_by_the_choice_in_an_outer_graph():
    class Compiled(torch.nn.Module):
        @torch.compile(backend="eager")
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x)

    model = torch.nn.Sequential(Compiled())
    with attnreg.assign(model, {"0": "math"}):
        torch.compile(model, backend="eager")(torch.randn(1, 2, 5, 8))
    assert attnreg.stats().calls == {"math": {"forward": 1, "backward": 0}}


def test_parametrizations_of_a_part_can_be_removed_while_the_model_is_assigned():
    model = torch.nn.Sequential(
        torch.nn.Sequential(torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 4)))
    )
    with attnreg.assign(model, {"0": "math"}):
        torch.nn.utils.parametrize.remove_parametrizations(model[0][0], "weight")
    assert type(model[0][0]) is torch.nn.Linear


def test_a_class_that_cannot_be_derived_from_leaves_the_model_as_it_was():
    class Odd(torch.nn.Module):
        pass

    model = torch.nn.Sequential(torch.nn.Sequential(), Odd())

    def refuse(cls, **options):
        raise TypeError("kind is missing")

    Odd.__init_subclass__ = classmethod(refuse)
    with pytest.raises(attnreg.InvalidInputError, match="can't be derived from: TypeError: kind is missing"):
        attnreg.assign(model, {"0": "math", "1": "math"})
    assert [type(module) for module in model.modules()] == [torch.nn.Sequential, torch.nn.Sequential, Odd]


# ---- Calls in C++, where it is loaded: without it they run the same way, by Python


@pytest.fixture
def entered(monkeypatch):
    """Return how often Python has entered a module's block since the last call."""
    enter, count = assignment.ModuleBlock.enter, []
    monkeypatch.setattr(assignment.ModuleBlock, "enter", lambda block: (count.append(block), enter(block))[1])

    def read():
        seen = len(count)
        count.clear()
        return seen

    return read


@pytest.mark.parametrize("kind", ["forward", "instance"])
def test_python_enters_no_block_where_the_call_cache_does(ran, entered, kind):
    model = nn.Sequential(Layer())
    if kind == "instance":
        own = model[0].forward
        model[0].forward = lambda x: own(x)
    attnreg.assign(model, {"0": "math"})
    assert ran_of(ran, model) == MATH
    assert entered() == (0 if call_cache.load() is not None else 1)
    with torch.overrides.BaseTorchFunctionMode():  # as a block of traced code, for all that C++ knows
        assert ran_of(ran, model) == MATH
    assert entered() == 1


def test_a_failed_compilation_before_does_not_leave_calls_to_python(ran, entered):
    """After it Dynamo goes on evaluating frames, and traces none."""

    @torch.compile(backend="eager", fullgraph=True)
    def fail(x):
        torch._dynamo.graph_break()
        return x

    with pytest.raises(torch._dynamo.exc.Unsupported):
        fail(torch.ones(2))
    model = nn.Sequential(Attention())
    attnreg.assign(model, {"0": "math"})
    assert ran_of(ran, model) == MATH
    assert entered() == (0 if call_cache.load() is not None else 1)


@pytest.mark.parametrize("error", [None, ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("own, outer", [("math", None), ("cpu", "math")])
def test_a_call_leaves_the_choice_and_what_threads_inherit_as_they_were(ran, error, own, outer):
    """C++ remembers the choice of a thread for calls of SDPA, too."""
    module, x, seen = Attention(), torch.randn(1, 2, 5, 8), []
    attend = functools.partial(F.scaled_dot_product_attention, x, x, x)

    def state():
        is_kept = torch._C._is_key_in_tls(scope._IN_TORCHS_STATE)
        kept = torch._C._get_obj_in_tls(scope._IN_TORCHS_STATE)[1] if is_kept else None
        return scope.current(), kept if scope.is_inherited else scope.current()

    def first():
        seen.append(state())
        with attnreg.use_backend("math"):
            attend()
        attend()
        if error is not None:
            raise error

    model = nn.Sequential(module)
    attnreg.assign(model, {"0": own})
    module.first = first
    choice = module._attnreg_blocks[-1].choice
    with attnreg.use_backend(outer) if outer else contextlib.nullcontext():
        before = state()
        for _ in range(3):
            attend()
            ran()
            with pytest.raises(error) if error else contextlib.nullcontext():
                model(x)
            inside = 1 if error else 2
            assert ran() == (
                {"math": (1 + inside, 0)} if own == "math" else {"math": (1, 0), "cpu": (inside, 0)}
            )
            assert state() == before
            attend()
            assert ran() == {outer or "cpu": (1, 0)}
    assert seen == [(choice, choice)] * 3


def test_modules_that_call_each_other_run_by_their_own_choices_and_arguments_come_as_given(ran):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Attention()

        def forward(self, x, *rest, scale=1.0, **others):
            F.scaled_dot_product_attention(x, x, x)
            out = self.inner(x) * scale
            F.scaled_dot_product_attention(x, x, x)
            return out, rest, others

    model = nn.Sequential(Outer())
    attnreg.assign(model, {"0": "math", "0.inner": "cpu"})
    x = torch.randn(1, 2, 5, 8)
    for _ in range(3):
        out, rest, others = model[0](x, 1, 2, scale=2.0, other=3)
        assert ran() == {"math": (2, 0), "cpu": (1, 0)}
        assert (rest, others) == ((1, 2), {"other": 3})
        torch.testing.assert_close(out, 2 * F.scaled_dot_product_attention(x, x, x))
        ran()
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        model[0]()
    assert scope.current() is None


def test_a_thread_of_autograds_inherits_the_choice_of_the_module_that_calls_backward(ran, monkeypatch):
    """As that of a GPU; a hook without the caller's context plays such a thread."""
    if not scope.is_inherited:
        pytest.skip("this torch can't erase what threads inherit, and keeps nothing on a CPU")
    x = torch.randn(1, 2, 5, 8)

    class Learns(nn.Module):
        def forward(self):
            out = torch.ones(3, requires_grad=True) * 2
            out.register_hook(lambda grad: Context().run(in_backward))
            out.sum().backward()

    def in_backward():
        monkeypatch.setattr(scope, "get_ident", lambda: -2)
        for _ in range(3):
            F.scaled_dot_product_attention(x, x, x)
        assigned(x)
        F.scaled_dot_product_attention(x, x, x)
        monkeypatch.undo()

    model = nn.ModuleList([Learns(), Attention()])
    attnreg.assign(model, {"0": "math", "1": "cpu"})
    assigned = model[1]
    model[0]()
    assert ran() == {"math": (4, 0), "cpu": (1, 0)}


def test_a_task_that_runs_in_a_module_and_other_contexts_have_their_own_choices(ran):
    x = torch.randn(1, 2, 5, 8)
    attend = functools.partial(F.scaled_dot_product_attention, x, x, x)
    before = copy_context()

    class Runs(nn.Module):
        def forward(self):
            attend()
            before.run(attend)
            attend()

    model = nn.Sequential(Runs())
    with attnreg.register_backend("cpu"), attnreg.assign(model, {"0": "math"}):
        for _ in range(3):
            model[0]()
            before.run(attend)
            attend()
            assert ran() == {"math": (2, 0), "cpu": (3, 0)}


def test_another_context_that_runs_inside_a_module_has_no_choice_of_its():
    outside, seen = copy_context(), []

    def note(x):
        seen.append(scope.current())
        return x * x.sin()

    class Outer(nn.Module):
        def forward(self, x):
            outside.run(lambda: checkpoint(note, x, use_reentrant=False).sum().backward())
            return x

    model = nn.Sequential(Outer())
    with attnreg.assign(model, {"0": "math"}):
        model(torch.randn(4, requires_grad=True))
    assert seen == [None, None]


def test_an_argument_of_a_forward_may_be_named_module():
    class Named(nn.Module):
        def forward(self, x, module):
            return x + module

    model = nn.Sequential(Named())
    with attnreg.assign(model, {"0": "math"}):
        assert model[0](1, module=2) == model[0].forward(1, module=2) == 3
