"""Which library of a wheel is used: the one for this machine's instructions, unless one is compiled here."""

import json
from pathlib import Path

import pytest
import torch
from support.compiled_files import stand_in, whole
from typer.testing import CliRunner

from attnreg.core.torchlib import building, libraries
from attnreg.errors import BuildError
from attnreg.tools.cli import app

AVX512, AVX2 = libraries.LEVELS
KERNEL = building.CPU_KERNEL


def on_machine(monkeypatch, limit, *instructions):
    """Make Linux say that the CPU has these instructions, and limit torch to some, "" for no limit."""
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", limit)
    monkeypatch.setattr(libraries, "cpu_flags", lambda: frozenset(instructions))
    building.target.cache_clear()


@pytest.fixture
def wheel(cache, monkeypatch, tmp_path):
    """Return a function that puts files for levels where a wheel has them; nothing is compiled."""
    monkeypatch.setattr(libraries, "PREBUILT", tmp_path / "prebuilt")

    def brings(*levels):
        libraries.PREBUILT.mkdir()
        files = [libraries.PREBUILT / f"{libraries.identity(KERNEL.for_level(level))}.so" for level in levels]
        for file in files:
            file.write_bytes(whole())
        return files

    return brings


@pytest.mark.parametrize(
    ("limit", "instructions", "level"),
    [
        ("", AVX512.instructions, AVX512),
        ("avx2", AVX512.instructions, AVX2),
        ("", AVX2.instructions, AVX2),
        ("avx512", AVX2.instructions, AVX2),  # torch would run into an illegal instruction
        ("", AVX512.instructions - {"avx512cd"}, AVX2),  # torch uses AVX-512 without it
        ("", AVX2.instructions - {"abm"}, None),  # a virtual machine may hide it
        ("default", AVX512.instructions, None),
        ("", (), None),  # a CPU of another kind
    ],
)
def test_the_best_file_that_this_machine_runs_is_used(wheel, monkeypatch, limit, instructions, level):
    files = dict(zip(libraries.LEVELS, wheel(*libraries.LEVELS), strict=True))
    on_machine(monkeypatch, limit, *instructions)
    assert libraries.find_file(KERNEL) == files.get(level)
    state = f"prebuilt {level.name}" if level else "off"  # ATTNREG_BUILD=off: the tests compile nothing
    assert building.status(KERNEL)[:2] == (state, files.get(level))


def test_the_instructions_that_torch_uses_here_are_those_of_the_level(monkeypatch):
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    level = libraries.machine_level()
    assert torch.backends.cpu.get_cpu_capability() == (level.capability.upper() if level else "DEFAULT")


def test_torchs_versions_are_read_without_importing_torch():
    found, folder = libraries.installed_torch(), Path(torch.__file__).parent
    assert found == (folder, str(torch.__version__), torch.version.git_version, torch.version.cuda)


def test_a_wheel_without_a_file_for_this_level_is_as_no_wheel(wheel, monkeypatch):
    wheel(AVX512)
    on_machine(monkeypatch, "", *AVX2.instructions)
    with pytest.raises(BuildError, match="the CPU kernel isn't compiled for this torch, Python and machine"):
        libraries.check_file(KERNEL)


def test_a_file_of_another_source_is_not_used(wheel, monkeypatch):
    (file,) = wheel(AVX2)
    on_machine(monkeypatch, "", *AVX2.instructions)
    file.rename(file.with_name("attnreg_cpu-0123456789abcdef.so"))
    assert libraries.find_file(KERNEL) is None


def test_what_is_compiled_here_goes_first_and_the_wheels_file_replaces_a_damaged_one(wheel, monkeypatch):
    (file,) = wheel(AVX2)
    on_machine(monkeypatch, "", *AVX2.instructions)
    compiled = stand_in(KERNEL)
    assert libraries.find_file(KERNEL) == compiled and building.status(KERNEL).state == "built"
    compiled.write_bytes(b"cut off")
    assert libraries.find_file(KERNEL) == file


def test_a_damaged_file_of_a_wheel_is_an_error_that_says_what_to_do(wheel, monkeypatch):
    (file,) = wheel(AVX2)
    on_machine(monkeypatch, "", *AVX2.instructions)
    file.write_bytes(whole()[:-1])
    reason = f"{file} is damaged: install attnreg again, or run `attnreg build`"
    with pytest.raises(BuildError, match="install attnreg again"):
        libraries.check_file(KERNEL)
    assert building.status(KERNEL)[::2] == ("built, not used", reason)


def test_a_user_without_a_home_folder_has_the_wheels_kernel(wheel, monkeypatch):
    (file,) = wheel(AVX2)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "relative")
    on_machine(monkeypatch, "", *AVX2.instructions)
    with pytest.raises(BuildError, match="HOME must be an absolute path"):
        libraries.target(KERNEL)
    assert libraries.find_file(KERNEL) == file


def test_only_the_call_cache_is_compiled_where_a_wheel_brought_the_kernel(wheel, monkeypatch):
    wheel(AVX2)
    on_machine(monkeypatch, "", *AVX2.instructions)
    assert building.background._missing() == [building.CALL_CACHE]


def test_info_names_the_level_of_a_file_that_a_wheel_brought(wheel, monkeypatch, built_cpu_kernel):
    level = libraries.machine_level()
    if level is None:
        pytest.skip("about machines with AVX2")
    (file,) = wheel(level)
    file.write_bytes(built_cpu_kernel.read_bytes())
    rows = json.loads(CliRunner().invoke(app, ["info", "--json"]).stdout)["compiled"]
    expected = {"library": "CPU kernel", "state": f"prebuilt {level.name}", "file": str(file), "reason": ""}
    assert rows[1] == expected
    shown = "".join(CliRunner().invoke(app, ["info"]).stdout.split())
    assert f"prebuilt{level.name}:{file}" in shown


def test_the_kernel_is_the_same_file_for_every_torch_and_python_and_the_call_cache_is_not(monkeypatch):
    before = [libraries.identity(library) for library in building.LIBRARIES]
    monkeypatch.setattr(libraries, "_versions", lambda: ("3.0.0", "other", "cpython-313"))
    after = [libraries.identity(library) for library in building.LIBRARIES]
    assert [one == other for one, other in zip(before, after, strict=True)] == [False, True]
