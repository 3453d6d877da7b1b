"""Promises of the demo: real text, one training in two layouts, a comparison, and a plot."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from types import SimpleNamespace

import pytest
import torch
from matplotlib.image import imread
from support.command_line import invoke
from support.processes import COMMAND, forked

import attnreg
from attnreg.tools.demo import batches
from attnreg.tools.demo.batches import corpus, draw
from attnreg.tools.demo.train import LAYERS, LAYOUTS, TOLERANCE, ByteTransformer, Result, TrainingStep

DOCUMENTS = [b"ab", b"a longer document", b"and one between"]


@pytest.fixture(autouse=True)
def surroundings(monkeypatch, one_thread):
    """Print for 80 columns, and compute on one thread, in processes as well."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def documents():
    """Read the real text once."""
    return corpus(1024)


@pytest.fixture
def demo(monkeypatch, tmp_path, routers, documents):
    """Run the demo in this process, on the beginnings of documents: it takes a second."""
    beginnings = [text[:64] for text in documents]
    monkeypatch.setattr("attnreg.tools.demo.batches.corpus", lambda context: beginnings)
    monkeypatch.setattr("attnreg.tools.cli.demo.BATCH", 4)

    return functools.partial(invoke, "demo", "--steps", "3", "--out", tmp_path)


@pytest.fixture
def result():
    """Make a result from the losses of its steps, each of which takes as many seconds."""

    def make(one, other, packed=1.0, padded=2.0):
        losses = [dict(zip(LAYOUTS, pair, strict=True)) for pair in zip(one, other, strict=True)]
        query = torch.empty(2, 4, 8, 16)
        return Result(
            steps=tuple(
                TrainingStep(lengths=(100, 50), loss=loss, seconds={"packed": packed, "padded": padded})
                for loss in losses
            ),
            ran=attnreg.stats(),
            why=attnreg.explain(query, query, query),
        )

    return make


def trained(found, steps, documents):
    """Check what the command says of a training, and return its share of padding."""
    assert found["agrees"] and found["largest_difference"] <= found["tolerance"] == TOLERANCE
    assert found["loss"]["packed"][0] > found["loss"]["packed"][-1]
    assert (found["steps"], found["documents"]) == (steps, documents)
    assert all(speed > 0 for speed in found["tokens_per_second"].values())
    for direction in ("forward", "backward"):  # every packed attention, by whichever backend
        assert sum(count[direction] for count in found["stats"]["calls"].values()) == steps * LAYERS
    return found["padding"]


@pytest.mark.slow
def test_the_command_trains_on_the_beginnings_of_real_text_and_agrees(demo):
    ended = demo("--json")
    assert ended.exit_code == 0
    # Which texts there are, and so how long the shortest of each batch is, depends on the Python.
    assert 0.0 < trained(json.loads(ended.stdout), 3, 12) < 0.9


@pytest.mark.slow
def test_the_command_trains_on_real_text_and_agrees(tmp_path):
    ended = forked(COMMAND, "demo", "--steps", "2", "--json", "--out", tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert 0.3 < trained(json.loads(ended.stdout), 2, 16) < 0.95


def test_the_report_and_the_plot_show_losses_speed_with_its_spread_and_what_ran(demo, tmp_path):
    ended = demo()
    assert ended.exit_code == 0
    assert "equal but for rounding" in ended.stdout
    assert "attnreg.varlen_attn" in ended.stdout and "F.scaled_dot_product_attention" in ended.stdout
    assert "of the padded batches" in ended.stdout
    assert re.search(r"  packed +[\d,]+ \([\d,]+ to [\d,]+\), through attnreg.varlen_attn\n", ended.stdout)
    assert re.search(r"  packed +cpu forward and .*, by default order for cpu\n", ended.stdout)
    assert "could run it" not in ended.stdout
    assert f"Plot: {tmp_path / 'demo.png'}\n" in ended.stdout
    picture = imread(tmp_path / "demo.png")
    assert picture.shape == (660, 1800, 4)
    for third in (picture[:, :600], picture[:, 600:1200], picture[:, 1200:]):
        assert third[..., :3].std() > 0.05, "a panel is blank"


def sees_the_future(query, key, value, cu_seqlens, *lengths, is_causal):
    return attnreg.varlen_attn(query, key, value, cu_seqlens, cu_seqlens, *lengths[1:], is_causal=False)


def sees_other_documents(query, key, value, cu_seqlens, *lengths, is_causal):
    everything = cu_seqlens[[0, -1]]
    longest = len(query)
    return attnreg.varlen_attn(query, key, value, everything, everything, longest, longest, is_causal)


@pytest.mark.parametrize(
    "mistaken", [pytest.param(sees_the_future, marks=pytest.mark.slow), sees_other_documents]
)
def test_a_wrong_packed_attention_fails_the_demo(demo, monkeypatch, mistaken):
    monkeypatch.setattr(batches, "attnreg", SimpleNamespace(varlen_attn=mistaken))
    ended = demo()
    assert ended.exit_code == 1
    assert "WRONG: the trainings differ" in ended.stdout


@pytest.mark.parametrize("loss", [2.0 + 2 * TOLERANCE, float("nan")])
def test_losses_that_differ_or_are_nan_do_not_agree(result, loss):
    assert not result([3.0, loss], [3.0, 2.0]).agrees
    assert result([3.0, 2.0 + TOLERANCE / 2], [3.0, 2.0]).agrees


def test_the_first_step_and_padding_count_in_no_speed(result):
    made = result([3.0, 2.0, 2.0], [3.0, 2.0, 2.0], packed=0.5, padded=2.0)
    made.steps[0].seconds.update(packed=1e9, padded=1e9)
    assert (made.throughput("packed"), made.throughput("padded"), made.speedup) == (300, 75, 4)
    assert made.padding == 0.25
    made.steps[1].seconds.update(packed=1.0)
    assert made.speeds("packed") == [150, 300]
    assert made.spread("packed") == (187.5, 262.5)
    assert result([3.0, 2.0], [3.0, 2.0]).spread("padded") == (75, 75)


@pytest.mark.slow
def test_a_slower_packed_training_is_said_to_be_slower(demo, result, monkeypatch):
    slower = result([3.0, 2.0], [3.0, 2.0], packed=4.0, padded=2.0)
    monkeypatch.setattr("attnreg.tools.cli.demo._train", lambda *_: slower)
    assert "packed is 0.50 times as fast: it is slower here" in demo().stdout


def test_without_matplotlib_the_demo_says_what_to_install(demo, monkeypatch, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: (name != "matplotlib" and find(name)) or None
    )
    ended = demo()
    assert ended.exit_code == 0 and "pip install 'attnreg[plots]'" in ended.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("option", "value"),
    [("--device", "nowhere"), ("--device", "meta"), ("--steps", "1"), ("--out", __file__)],
)
def test_what_cannot_be_trained_or_written_is_a_usage_error_at_once(demo, option, value):
    ended = demo(option, value)
    assert ended.exit_code == 2 and option in ended.stderr and not ended.stdout


def test_the_corpus_is_text_of_very_different_lengths_each_once(documents):
    assert len(documents) > 1000 and len(set(documents)) == len(documents)
    lengths = sorted(map(len, documents))
    assert lengths[0] >= 2 and lengths[-1] == 1024
    assert lengths[len(lengths) // 10] * 10 < lengths[-len(lengths) // 10]


def test_a_library_that_cannot_be_read_leaves_the_files_of_attnreg(monkeypatch, tmp_path):
    (tmp_path / "template.py").write_text("def {{ name }}(:")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    documents = corpus(1024)
    assert any(document.startswith(b'"""Real text for the demo') for document in documents)


def test_batches_are_drawn_by_the_seed_alone():
    documents = [bytes([65, number]) for number in range(60)]
    first, second, other = (list(draw(documents, 5, 4, seed)) for seed in (1, 1, 2))
    assert first == second != other
    assert [len(set(batch)) for batch in first] == [5] * 4


def test_both_layouts_hold_the_same_bytes_places_and_targets():
    packed, padded = (make(DOCUMENTS, torch.device("cpu")) for make in (batches.packed, batches.padded))
    text = padded.targets != batches.IGNORED
    assert torch.equal(packed.tokens, padded.tokens[text])
    assert torch.equal(packed.targets, padded.targets[text])
    assert torch.equal(packed.positions, padded.positions.expand_as(text)[text])
    assert not text.all(), "nothing is padded, so nothing is tested"


def test_the_model_gives_both_layouts_one_loss_and_one_gradient(routers):
    torch.manual_seed(0)
    model = ByteTransformer(64).double()
    gradients = []
    for make in (batches.packed, batches.padded):
        model.zero_grad()
        model(make(DOCUMENTS, torch.device("cpu"))).backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    torch.testing.assert_close(*gradients)
