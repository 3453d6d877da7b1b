"""Promise: the template of a kernel author's package installs, is found, and runs where it is asked for."""

import re
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
from support.processes import forked, python

import attnreg
from attnreg.testing import check_backend

TEMPLATE = Path(__file__).parents[2] / "examples" / "plugin"
# What the entry point of an installed package does: it is called, and then it isn't asked for.
CALLS = """
import attnreg, torch
import torch.nn.functional as F
from attnreg.core import registry

query = torch.randn(1, 2, 8, 16)
print(registry.find("example").origin)
with attnreg.use_backend("example"):
    F.scaled_dot_product_attention(query, query, query, is_causal=True)
offsets = torch.tensor([0, 8], dtype=torch.int32)
attnreg.varlen_attn(*[query[0].transpose(0, 1)] * 3, offsets, offsets, 8, 8)
print(attnreg.stats().calls)
"""


@pytest.fixture
def template(monkeypatch):
    """Return the template's module, imported from its folder and forgotten afterwards."""
    monkeypatch.syspath_prepend(TEMPLATE / "src")
    yield __import__("attnreg_example")
    for name in [name for name in sys.modules if name.partition(".")[0] == "attnreg_example"]:
        del sys.modules[name]


def test_the_template_keeps_the_contract(template, few_lengths, one_thread, monkeypatch):
    # It asks for the version of the installed package; here it is only on the path.
    monkeypatch.setattr("attnreg_example.version", lambda name: "0.1.0")
    report = check_backend(template.BACKEND, device="cpu", cases=["heads 4:2", "few keys", "drawn 2", "SDPA"])
    right = [outcome for outcome in report.outcomes if not outcome.refused]
    assert len(right) > 5
    assert all([*outcome.errors][-1] in ("dv", "lse") for outcome in right)


def test_its_entry_point_is_found_and_it_runs_where_it_is_asked_for(tmp_path):
    wheel = pytest.importorskip("hatchling.build")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(TEMPLATE)
        built = wheel.build_wheel(str(tmp_path))
    # A wheel is on the path as it is: attnreg finds the entry point in it without an installer.
    run = forked(f"import sys; sys.path.insert(0, {str(tmp_path / built)!r})" + CALLS, cwd=tmp_path)
    assert run.stdout.splitlines() == [
        "entry point attnreg_example:BACKEND of attnreg-example 0.1.0",
        "{'example': {'forward': 1, 'backward': 0}, 'cpu': {'forward': 1, 'backward': 0}}",
    ], run.stderr


def test_its_readme_and_ci_name_what_it_has():
    readme = (TEMPLATE / "README.md").read_text("utf-8")
    workflow = (TEMPLATE / ".github" / "workflows" / "test.yml").read_text("utf-8")
    files = "pyproject.toml", "src/attnreg_example/__init__.py", "src/attnreg_example/kernels.py"
    for name in (*files, "tests/test_example.py", ".github/workflows/test.yml"):
        assert f"`{name}`" in readme
        assert (TEMPLATE / name).exists()
    points = tomllib.loads((TEMPLATE / "pyproject.toml").read_text("utf-8"))["project"]["entry-points"]
    assert points == {"attnreg.backends": {"example": "attnreg_example:BACKEND"}}
    for text in (readme, workflow):
        assert "attnreg verify --backend example --device cpu" in text


def test_its_readme_names_every_file_that_has_the_backends_name():
    texts = {
        file.relative_to(TEMPLATE).as_posix(): re.sub("attnreg[-_]example", "", file.read_text("utf-8"))
        for pattern in ("*.*", "src/**/*.py", "tests/*.py", ".github/**/*.yml")
        for file in TEMPLATE.glob(pattern)
        if file.is_file()
    }
    named = {name for name, text in texts.items() if re.search(r"\bexample\b", text)}
    init = "src/attnreg_example/__init__.py"
    assert named == {init, "pyproject.toml", ".github/workflows/test.yml", "README.md"}
    step = (TEMPLATE / "README.md").read_text("utf-8").partition("**Rename it.**")[2].partition("\n3. ")[0]
    for name in ("`__init__.py`", "`pyproject.toml`", "`.github/workflows/test.yml`", "this page"):
        assert name in " ".join(step.split())


@pytest.mark.slow
def test_it_installs_and_its_own_tests_pass(tmp_path):
    pytest.importorskip("hatchling")
    copy = shutil.copytree(TEMPLATE, tmp_path / "copy")
    options = "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(tmp_path / "site")
    done = python("-m", "pip", "install", *options, str(copy))
    assert done.returncode == 0, done.stderr
    path = f"{tmp_path / 'site'}:{Path(attnreg.__file__).parents[1]}"
    done = python("-m", "pytest", "-q", cwd=copy, PYTHONPATH=path)
    assert "3 passed" in done.stdout, done.stdout
    verify = "-m", "attnreg", "verify", "--backend", "example", "--device", "cpu", "--case", "heads"
    done = python(*verify, cwd=copy, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
