"""Promises of `attnreg build`, of what it makes, and of a home folder that can't be read."""

import ctypes
import errno
import json
import os
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.compiled_files import stand_in
from support.processes import forked, python
from typer.testing import CliRunner

from attnreg.backends.cpu.compiled import load as cpu_compiled_load
from attnreg.core.torchlib import background, building, caches, libraries, locks
from attnreg.errors import BuildError
from attnreg.tools.cli import app

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="attnreg compiles on Linux only")


def build(*options):
    return CliRunner().invoke(app, ["build", *options])


def info():
    found = json.loads(CliRunner().invoke(app, ["info", "--json"]).stdout)
    return {row.pop("library"): row for row in found["compiled"]}


def not_built(reason, state="not built"):
    row = {"state": state, "file": None, "reason": reason}
    return {"call cache": row, "CPU kernel": row}


def left_in(cache):
    return [file for file in cache.rglob("*") if file.is_file() and file.name != "build.lock"]


# attnreg build


def test_build_compiles_both_and_says_where_they_are(cache, compiler, copying, untried):
    compiler.does(copying)
    result = build()
    assert result.exit_code == 0, result.output
    words = " ".join(result.stdout.split())
    assert all(title in words for title in ("call cache", "CPU kernel", "compiled in"))
    call_cache, kernel = map(building.target, building.LIBRARIES)
    assert sorted(left_in(cache)) == sorted([call_cache, kernel])
    assert building.loaded().__file__ == str(call_cache) and building.loaded_cpu_kernel()
    built = {"state": "built", "reason": ""}
    assert info() == {
        "call cache": built | {"file": str(call_cache)}, "CPU kernel": built | {"file": str(kernel)}
    }  # fmt: skip
    compiler.does("echo it is compiled again >&2", "exit 1")
    result = build("--missing", "--json")
    assert result.exit_code == 0, result.output
    made = json.loads(result.stdout)
    assert (made["file"], made["cpu_kernel"]) == (str(call_cache), str(kernel))
    assert build("--missing").output == ""


def test_what_is_compiled_and_current_is_compiled_again_by_force_alone(cache, compiler, copying, untried):
    compiler.does(copying)
    assert "compiled in" in build().stdout
    runs = len(compiler.runs())
    found = build()
    assert (found.exit_code, len(compiler.runs())) == (0, runs)
    assert "both were compiled before; `attnreg build --force` compiles them again" in found.stdout
    assert build("--force").exit_code == 0 and len(compiler.runs()) == 2 * runs
    refused = build("--force", "--missing")
    assert refused.exit_code == 2 and "--force: got --missing as well" in refused.stderr


def test_what_is_compiled_is_reported_while_another_process_holds_the_lock(cache, compiler, copying, untried):
    compiler.does(copying)
    build()
    held = locks.lock_file(background.lock_path())
    assert building.build(building.CPU_KERNEL, only_missing=True) == building.target(building.CPU_KERNEL)
    locks.release(held)


def test_what_is_compiled_and_current_is_found_without_importing_torch(cache, compiler, copying, untried):
    compiler.does(copying)
    build()
    files = [str(building.target(library)) for library in building.LIBRARIES]
    program = (
        "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); "
        "sys.argv = ['attnreg', 'build', '--json']; from attnreg.tools.cli import main; main()"
    )
    ended = python("-c", program)
    assert (ended.returncode, ended.stderr) == (0, "")
    *shown, imported = ended.stdout.splitlines()
    found = json.loads("\n".join(shown))
    assert ([found["file"], found["cpu_kernel"]], imported) == (files, "False")
    assert len(compiler.runs()) == 2


def test_what_is_compiled_below_a_link_is_current(cache, compiler, copying, untried, tmp_path):
    compiler.does(copying)
    build()
    cache.symlink_to(cache.rename(tmp_path / "elsewhere"))
    assert "both were compiled before" in build().stdout


def test_a_file_that_does_not_load_is_compiled_again_by_force_as_its_error_says(
    cache, compiler, copying, untried
):
    for library, load in LOADS:
        stand_in(library)
        with pytest.raises(BuildError, match=r"can't be loaded: .*`attnreg build --force` compiles it again"):
            load()
    compiler.does(copying)
    assert "compiled in" in build("--force").stdout
    assert all(load() for _, load in LOADS)


def test_the_contents_of_a_library_are_on_the_disk_before_its_name_is(
    cache, compiler, copying, untried, monkeypatch
):
    compiler.does(copying)
    synced = []

    def fsync(descriptor):
        found = os.fstat(descriptor)
        synced.append((found.st_ino, found.st_size, libraries.target(building.CPU_KERNEL).exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    found = building.build(building.CPU_KERNEL).stat()
    assert synced == [(found.st_ino, found.st_size, False)]


def test_a_missing_compiler_is_named(cache, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.delenv("ATTNREG_BUILD")
    problem = "there is no C++ compiler, looked for CXX=no-such-compiler: install one"
    result = build()
    assert result.exit_code == 1
    assert f"attnreg: the call cache can't be compiled: {problem}\n" in result.stderr
    assert left_in(cache) == [] and info() == not_built(problem)
    monkeypatch.setenv("CXX", "g++ '-O2")
    assert "CXX=g++ '-O2: No closing quotation" in build().output
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    assert "there is no C++ compiler, looked for c++ or g++ or clang++" in build().output


def test_a_compiler_that_fails_is_quoted_and_run_anew(cache, compiler):
    for line in ("first", "second"):
        compiler.does(f"echo {line} >&2; echo more >&2", "exit 1")
        result = build("--json")
        assert result.exit_code == 1
        assert f"{compiler.script} says\n{line}\nmore" in json.loads(result.stdout)["error"]["message"]
    assert not list(cache.rglob("*.so")) and not list(cache.rglob(f"{libraries.SCRATCH}*"))
    # What has failed isn't retried by --missing, which logs a line for each.
    compiler.does("echo it is tried again >&2", "exit 1")
    os.utime(compiler.script, ns=(0, 0))
    build()
    result = build("--missing")
    assert result.exit_code == 1
    assert [line.partition(" (tried at ")[0] for line in result.stderr.splitlines()] == [
        f"attnreg: {library.title} can't be compiled: {compiler.script} says it is tried again"
        for library in building.LIBRARIES
    ]


def test_what_does_not_load_is_not_kept(cache, compiler, monkeypatch):
    compiler.does('echo junk > "$2"')
    python = libraries.python
    # Junk doesn't load with torch or without it, and importing torch takes longer than all else here.
    monkeypatch.setattr(
        libraries, "python", lambda script, *given: python(script.replace(", torch", ""), *given)
    )
    result = build()
    assert result.exit_code == 1
    assert "ImportError" in result.output and "OSError" in result.output
    assert not list(cache.rglob("*.so"))


def test_where_one_of_both_cannot_be_compiled_the_other_is_kept(cache, compiler, copying, untried):
    compiler.does('case "$2" in *attnreg_cpu*) echo no such instructions >&2; exit 1;; esac', copying)
    result = build("--json")
    assert result.exit_code == 1
    assert "the CPU kernel can't be compiled" in result.stderr and "no such instructions" in result.stderr
    made = json.loads(result.stdout)
    assert made["file"] == str(building.target()) and "cpu_kernel" not in made
    assert "the CPU kernel can't be compiled" in made["error"]["message"]
    assert building.loaded()
    found = info()
    assert (found["call cache"]["state"], found["CPU kernel"]["state"]) == ("built", "failed")


def test_build_waits_for_a_process_that_compiles_and_takes_what_it_made(cache, compiler, monkeypatch):
    compiler.does("echo it is compiled again >&2", "exit 1")
    for library in building.LIBRARIES:
        building.target(library).parent.mkdir(parents=True)
    background.lock_path().parent.mkdir()
    held, wait = locks.lock_file(background.lock_path()), locks.lock_file

    def finish(path, wait_for_it=False, **options):
        for library in building.LIBRARIES:
            stand_in(library)
        locks.release(held)
        monkeypatch.setattr(locks, "lock_file", wait)
        return wait(path, **options)

    assert info() == not_built(f"process {os.getpid()} is compiling now", "building")
    monkeypatch.setattr(locks, "lock_file", finish)
    result = build()
    assert result.exit_code == 0, result.output
    assert f"attnreg: process {os.getpid()} is compiling now, waiting for it" in result.stderr


def test_a_compiler_that_does_not_end_is_stopped(cache, compiler, monkeypatch):
    compiler.does("exec sleep 60")
    monkeypatch.setattr(libraries, "TIMEOUT", 0.1)
    with pytest.raises(BuildError, match=r"took more than 0\.1 s"):
        building.build(building.CPU_KERNEL)


def test_info_says_why_nothing_is_compiled(cache, compiler, monkeypatch):
    compiler.does("exit 1")
    assert info() == not_built("ATTNREG_BUILD=off forbids it; `attnreg build` does it", "off")
    monkeypatch.setenv("ATTNREG_ROUTERS", "python")
    assert info() == not_built("ATTNREG_ROUTERS=python leaves compiled libraries out", "off")
    monkeypatch.delenv("ATTNREG_ROUTERS")
    monkeypatch.setenv("ATTNREG_BUILD", "background")
    assert info() == not_built(
        "compiled in the background at a program's first call; `attnreg build` does it now"
    )
    monkeypatch.setenv("ATTNREG_BUILD", "now")
    monkeypatch.setattr(background, "_waited", True)
    assert info() == not_built("compiled before a program's first call; `attnreg build` does it now")
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    building.target.cache_clear()
    wanted = f"{os.devnull}/attnreg/call_cache"
    reason = f"{os.devnull} can't be written to, and compiled libraries go to {wanted}"
    assert info()["call cache"]["reason"] == reason
    words = " ".join(CliRunner().invoke(app, ["info"]).output.split())
    assert f"call cache not built: {os.devnull} can't be written to" in words
    assert "repeated calls run by Python" in words
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc")  # whoever runs this
    building.target.cache_clear()
    assert "/proc can't be written" in info()["call cache"]["reason"]


def test_info_says_of_what_cannot_be_read_what_the_call_says(cache, monkeypatch):
    is_file = Path.is_file

    def refuse(path):
        if path.is_relative_to(cache):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refuse)
    reasons = {
        f"{building.target(library)} can't be read: Permission denied" for library in building.LIBRARIES
    }
    assert {row["reason"] for row in info().values()} == reasons


# Loading


LOADS = tuple(zip(building.LIBRARIES, (building.loaded, building.loaded_cpu_kernel), strict=True))


@pytest.mark.parametrize("mode", [0o720, 0o702])
def test_what_others_can_write_to_or_replace_is_not_loaded(cache, monkeypatch, mode):
    monkeypatch.setattr(caches, "_is_private", lambda group: False)
    for library, load in LOADS:
        file = stand_in(library)
        with pytest.raises(BuildError, match=r"can't be loaded: .*`attnreg build --force` compiles it again"):
            load()
        for place in (file, file.parent, cache, cache.parent):
            before = place.stat().st_mode
            place.chmod(mode)
            with pytest.raises(BuildError, match=f"^others may write to {place} "):
                load()
            place.chmod(before)


def test_what_another_user_owns_is_not_loaded_nor_what_lies_below_it(cache, monkeypatch):
    file = stand_in(building.CPU_KERNEL)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    owners = owned_by(monkeypatch, {file: 12345, file.parent: 12345, cache: 54321})
    with pytest.raises(BuildError, match=rf"^{cache} belongs to another user \(id 54321\)$"):
        building.loaded_cpu_kernel()
    assert info()["CPU kernel"]["reason"] == f"{cache} belongs to another user (id 54321)"
    owners[cache] = 0
    with pytest.raises(BuildError, match="can't be loaded"):
        building.loaded_cpu_kernel()


def owned_by(monkeypatch, owners):
    """Have paths owned by these users, and all others by root."""
    lstat = Path.lstat

    def owned(path):
        found = list(lstat(path))
        found[stat.ST_UID] = owners.get(path, 0)
        return os.stat_result(found)

    monkeypatch.setattr(Path, "lstat", owned)
    return owners


@pytest.mark.parametrize("users", ["0 1000 1\n1 100000 65536", "0 0 4294967295"])
def test_in_a_user_namespace_folders_above_may_belong_to_users_whom_it_lacks(cache, monkeypatch, users):
    file = stand_in(building.CPU_KERNEL)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    lacked = dict.fromkeys(cache.parents, 65534)  # as root, who owns `/` and `/home`
    owners = owned_by(monkeypatch, {file: 12345, file.parent: 12345, cache: 12345} | lacked)
    read = Path.read_text
    given = {"/proc/self/uid_map": f"{users}\n", "/proc/sys/kernel/overflowuid": "65534\n"}
    monkeypatch.setattr(Path, "read_text", lambda path, **how: given.get(str(path)) or read(path, **how))
    if users.startswith("0 0"):
        with pytest.raises(BuildError, match=r"^/ belongs to another user \(id 65534\)"):
            libraries.check_file(building.CPU_KERNEL)
        return
    assert caches.unsafe(file) == ""
    caches.check_writable(cache.parent / "not there yet")
    owners[file] = 65534
    assert caches.unsafe(file).startswith(f"{file} belongs to another user (id 65534)")
    owners[file] = 12345
    cache.parent.chmod(0o777)
    assert caches.unsafe(file).startswith(f"others may write to {cache.parent} ")


def test_a_folder_where_only_owners_rename_may_hold_the_cache_but_not_the_files(cache):
    file = stand_in(building.CPU_KERNEL)
    cache.parent.chmod(0o1777)  # as /tmp is
    with pytest.raises(BuildError, match="can't be loaded"):
        building.loaded_cpu_kernel()
    caches.check_writable(cache.parent / "not there yet")
    with pytest.raises(PermissionError, match=f"others may write to {cache.parent} "):
        caches.check_writable(cache.parent)
    file.chmod(0o1777)
    with pytest.raises(BuildError, match=f"others may write to {file} "):
        building.loaded_cpu_kernel()


def test_a_link_is_followed_once_and_what_it_led_to_is_checked(cache, tmp_path):
    file = stand_in(building.CPU_KERNEL)
    (tmp_path / "others").mkdir()
    real = cache.rename(tmp_path / "others" / "cache")
    cache.symlink_to(real)
    assert libraries.check_file(building.CPU_KERNEL) == real / "cpu_kernel" / file.name
    (tmp_path / "others").chmod(0o777)
    with pytest.raises(BuildError, match=f"others may write to {tmp_path / 'others'} "):
        libraries.check_file(building.CPU_KERNEL)


def test_a_group_of_the_user_alone_may_write(cache, monkeypatch):
    stand_in(building.CPU_KERNEL)
    cache.chmod(0o770)
    members, users = [], [SimpleNamespace(pw_name="me", pw_gid=1000)]
    user, group = users[0], SimpleNamespace(gr_name="me", gr_mem=members)
    monkeypatch.setattr("pwd.getpwall", lambda: users)
    monkeypatch.setattr("pwd.getpwuid", lambda _: user)
    monkeypatch.setattr("grp.getgrgid", lambda _: group)
    is_private = caches._is_private.__wrapped__
    monkeypatch.setattr(caches, "_is_private", lambda _: is_private(1000))
    assert libraries.find_file(building.CPU_KERNEL)
    members.append("another")
    assert libraries.find_file(building.CPU_KERNEL) is None
    members.clear()
    users.append(SimpleNamespace(pw_name="another", pw_gid=1000))  # whose own group it is
    assert libraries.find_file(building.CPU_KERNEL) is None


def test_the_folders_are_for_this_user_alone_whatever_the_umask_is(cache):
    before = os.umask(0)
    try:
        caches.make(cache / "one" / "more")
    finally:
        os.umask(before)
    for place in (cache.parent, cache, cache / "one", cache / "one" / "more"):
        assert stat.S_IMODE(place.stat().st_mode) == 0o700


def test_a_file_that_has_another_library_is_not_loaded_and_cpu_keeps_torchs_kernel(
    cache, copying, compiler, untried, monkeypatch
):
    compiler.does(copying)
    files = {library: building.build(library) for library in building.LIBRARIES}
    whole = [file.read_bytes() for file in files.values()]
    for file, other in zip(files.values(), reversed(whole), strict=True):
        file.write_bytes(other)
    for library, load in LOADS:
        with pytest.raises(BuildError, match=f"^{files[library]} can't be loaded: .*`attnreg build --force`"):
            load()
    assert cpu_compiled_load.__wrapped__() is None  # another test may have had it load the right file
    # What was built before is of other flags, and of another name.
    monkeypatch.setattr(libraries.Library, "all_flags", lambda library: ("-O1",))
    building.target.cache_clear()
    for (library, load), contents in zip(LOADS, whole, strict=True):
        building.target(library).write_bytes(contents)
        with pytest.raises(
            BuildError, match=f"it has another library, {files[library].stem}, expected {library.name}"
        ):
            load()


DAMAGE = {
    "cut off": lambda whole: whole[: len(whole) // 2],
    "empty": lambda whole: b"",
    "torn": lambda whole: whole[:4096] + bytes(4096) + whole[8192:],
    "without a digest": lambda whole: whole[: -2 * libraries.DIGEST_BYTES],
}


def test_what_is_damaged_is_not_loaded_and_counts_as_missing(cache, copying, compiler, untried):
    compiler.does(copying)
    for library, load in LOADS:
        file = building.build(library)
        made = file.read_bytes()
        for damage in DAMAGE.values():
            file.write_bytes(damage(made))
            with pytest.raises(BuildError, match=f"^{file} is damaged"):
                load()
            row = info()[library.title.removeprefix("the ")]
            assert (row["state"], row["file"]) == ("built, not used", str(file))
            assert row["reason"].startswith(f"{file} is damaged")
            assert library in background._missing()
        background.build_missing()
        assert library not in background._missing()
        assert file.read_bytes() == made


def test_a_library_has_a_file_for_each_source_torch_and_flag(cache, monkeypatch, tmp_path):
    main = tmp_path / "source" / "module.cpp"
    main.parent.mkdir()
    main.write_text("int main() {}")
    library = building.CALL_CACHE._replace(main=main)
    files = [building.target(library)]

    def changed():
        building.target.cache_clear()
        files.append(building.target(library))

    (main.parent / "header.h").write_text("// one")
    changed()
    main.write_text("int main() { return 1; }")
    changed()
    library = library._replace(flags=("-O3",))
    changed()
    torch = libraries.installed_torch()
    monkeypatch.setattr(libraries, "installed_torch", lambda: torch._replace(version="9.9"))
    changed()
    assert len(set(files)) == 5


RUNTIME = """
#include <ostream>
#include <sstream>
extern "C" int attnreg_number() { std::ostringstream text; text << 12; return text.str() == "12"; }
"""


def test_a_compiler_that_brings_its_own_runtime_links_torchs(cache, untried, monkeypatch, tmp_path):
    source = tmp_path / "module.cpp"
    source.write_text(RUNTIME)
    library = libraries.CALL_CACHE._replace(main=source, libraries=("c10",))
    monkeypatch.setenv("CXX", shlex.join([*libraries.find(), "-static-libstdc++"]))
    made = ctypes.CDLL(str(libraries.compile_library(library)))
    assert made.attnreg_number() == 1
    runtime = ctypes.CDLL("libstdc++.so.6")
    # A function of the library itself would be another one.
    address = [ctypes.cast(x["_ZNSt6locale7classicEv"], ctypes.c_void_p).value for x in (made, runtime)]
    assert address[0] == address[1]


def test_torchs_runtime_is_found_also_where_nothing_has_imported_torch(monkeypatch):
    imported = []
    monkeypatch.setattr(libraries.importlib, "import_module", imported.append)
    assert [Path(file).name.partition(".so")[0] for file in libraries._find_runtime()] == ["libstdc++"]
    assert imported == ["torch"]


@pytest.mark.parametrize("name", [*libraries.COMPILERS, "named by CXX", ""])
def test_make_finds_a_compiler_where_attnreg_does(monkeypatch, tmp_path, name):
    if (make := shutil.which("make")) is None:
        pytest.skip("there is no make")
    (tmp_path / "bin").mkdir()
    if name:
        file = tmp_path / "bin" / name.split()[-1]
        file.write_text("#!/bin/sh\n")
        file.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("CXX", "CXX --an-option" if name == "named by CXX" else "")
    for variable in ("ROUTERS", "MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES"):  # of `make test ROUTERS=python`
        monkeypatch.delenv(variable, raising=False)
    makefile = Path(building.__file__).parents[3] / "Makefile"
    said = subprocess.run(
        [make, "-s", "-f", makefile, "--eval", "found:; $(info $(ROUTERS))", "found"],
        capture_output=True, text=True, check=True,
    ).stdout.split()[0]  # fmt: skip
    try:
        found = Path(libraries.find()[0]).name
    except BuildError:
        found = ""
    assert (said, found) == (("compiled", file.name) if name else ("python", ""))


@pytest.mark.usefixtures("python_routers")
@pytest.mark.parametrize("name", ["home", "resolve"])
def test_a_first_call_in_a_deep_recursion_does_not_leave_a_compiled_library_out(monkeypatch, name):
    """A RecursionError is a RuntimeError, which also says that there is no home folder."""

    def fail(*_, **__):
        raise RecursionError("maximum recursion depth exceeded")

    monkeypatch.setenv("XDG_CACHE_HOME", "")
    building.target.cache_clear()
    with monkeypatch.context() as patched, pytest.raises(RecursionError):
        patched.setattr(Path, name, fail)
        caches.resolve(caches.folder("build"))
    with monkeypatch.context() as patched, pytest.raises(RecursionError):
        patched.setattr(Path, "home", fail)
        building.loaded()
    building.target.cache_clear()


# A home folder that can't be read

PROGRAM = """
import logging, pathlib, os, sys, threading
home = os.environ["HOME"]

def refuse(function):
    def refusing(path, *arguments, **options):
        if os.fspath(path).startswith(home) and (hidden or os.fspath(path) != home):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return function(path, *arguments, **options)
    return refusing

hidden = sys.argv[1] == "hidden"
if "hidden" in sys.argv[1]:
    for name in ("stat", "is_file", "exists", "is_dir", "mkdir", "open", "read_text"):
        setattr(pathlib.Path, name, refuse(getattr(pathlib.Path, name)))
import pkgutil, torch, attnreg
from attnreg.core.torchlib import building
if sys.argv[1] == "another user":
    # Who may not even read the code.
    for module in pkgutil.walk_packages(attnreg.__path__, "attnreg."):
        if not module.name.startswith(("attnreg.tools.cli", "attnreg.tools.demo", "attnreg.__main__")):
            __import__(module.name)
    for library in building.LIBRARIES:
        building.target(library)
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
q = torch.randn(1, 2, 8, 16)
attnreg.explain(q, q, q)
building.ensure_built()
for thread in threading.enumerate():
    if thread is not threading.current_thread():
        thread.join()
if sys.argv[1] == "vanishes":
    import shutil
    shutil.rmtree(home)
with attnreg.register_backend("cpu"):
    torch.nn.functional.scaled_dot_product_attention(q, q, q)
ends = torch.tensor([0, 8], dtype=torch.int32)
attnreg.varlen_attn(*3 * [q[0].transpose(0, 1)], ends, ends, 8, 8)
print(attnreg.stats().calls)
"""


@pytest.fixture
def served(monkeypatch):
    """Return what runs a program that explains, registers a backend and makes a call of each kind."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def run(home, case, mode="background"):
        # Without torch's hook, as what can't be read can't be read from the start.
        hookless = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        variables = {"HOME": str(home), "ATTNREG_BUILD": mode, "CXX": "/bin/false"}
        done = forked(PROGRAM, case, cwd="/", **variables, **hookless)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.splitlines()

    return run


# As in a container that runs under a user id that the image doesn't know.
AS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="becoming another user takes root")
ANOTHER = pytest.param("another user", marks=[AS_ROOT, pytest.mark.slow])
UNREADABLE = "hidden", "its folders are hidden", ANOTHER


@pytest.mark.each_value("mode", "case")
@pytest.mark.parametrize("case", UNREADABLE)
@pytest.mark.parametrize("mode", ["background", "off"])
def test_a_home_folder_that_cannot_be_read_is_one_line(served, tmp_path, case, mode):
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    problem, calls = served(home, case, mode)
    assert problem.startswith("attnreg runs without its compiled part: ") and "Permission denied" in problem
    assert calls == "{'cpu': {'forward': 2, 'backward': 0}}"


def test_a_home_folder_that_is_not_there_is_no_matter(served):
    *_, calls = served(Path(os.devnull) / "nonexistent", "not there")
    assert calls == "{'cpu': {'forward': 2, 'backward': 0}}"


@pytest.mark.parametrize("case", ["a loop of links", "a file", "too long"])
def test_what_cannot_be_a_cache_folder_is_one_line(served, tmp_path, case):
    home = tmp_path / ("x" * 300 if case == "too long" else "home")
    if case == "a loop of links":
        home.symlink_to(home)
    elif case == "a file":
        home.touch()
    problem, calls = served(home, case)
    assert problem.startswith(f"attnreg runs without its compiled part: {home}")
    assert calls == "{'cpu': {'forward': 2, 'backward': 0}}"


def test_a_loop_of_links_is_an_error_of_the_file_system_in_every_python(cache, tmp_path):
    cache.parent.mkdir(exist_ok=True)
    cache.symlink_to(cache)
    for library, row in zip(building.LIBRARIES, info().values(), strict=True):
        folder = building.target(library).parent
        reason = f"{cache} can't be written to, and compiled libraries go to {folder}"
        assert row == {"state": "not built", "file": None, "reason": reason}
    with pytest.raises(BuildError, match=f"{cache} can't be written: a link to nothing, or to itself"):
        building.build(building.CPU_KERNEL)
    with pytest.raises(OSError, match="Too many levels of symbolic links"), locks.rewriting(cache):
        pass


def test_a_cache_folder_that_vanishes_while_the_program_runs_costs_no_call(served, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    *_, calls = served(home, "vanishes")
    assert calls == "{'cpu': {'forward': 2, 'backward': 0}}"
