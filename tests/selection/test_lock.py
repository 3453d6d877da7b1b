"""Promises of a lockfile: decisions are the locked ones, or the call fails and says what differs."""

import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F
from support.command_line import NO_SYMBOL, broken_loader, invoke, words
from support.known import know, replace
from support.policies import put_in_force
from support.sdpa import attend

import attnreg
from attnreg.backends import math as math_backend
from attnreg.core import registry
from attnreg.core.contract.spec import Device
from attnreg.core.dispatch import planning
from attnreg.core.dispatch.state import state
from attnreg.core.policy import current as policy
from attnreg.core.policy import lockfile
from attnreg.core.policy.lockfile import LockInForce
from attnreg.core.selection.decision import Policy, tied_to
from attnreg.core.times import traces
from attnreg.core.torchlib import background, building
from attnreg.errors import BackendUnavailableError, ConfigError, UnsupportedInputError

pytestmark = pytest.mark.usefixtures("routers")


@pytest.fixture(autouse=True)
def known(monkeypatch, fake):
    """Know two fakes, the first preferred, and math."""
    made = [fake(name, priority=rank).backend for name, rank in (("first", 900), ("second", 800))]
    return know(monkeypatch, *made, math_backend.BACKEND)


def unread(file, monkeypatch):
    """Name a lock that nothing has read yet."""
    monkeypatch.setenv("ATTNREG_LOCK", str(file))
    monkeypatch.setattr(policy, "_sources", None)
    registry.changed()


@pytest.fixture
def locked_varlen(tmp_path, packed, ran, monkeypatch):
    """Lock a call of `varlen_attn` as it would run now, put the lock in force, and return the inputs."""

    def lock(grad):
        inputs = packed((5, 9), grad=grad)
        with attnreg.record(tmp_path / "trace.jsonl"):
            out = attnreg.varlen_attn(*inputs)
            if grad:
                out.sum().backward()
        invoke("lock", "--from", tmp_path / "trace.jsonl", "--out", tmp_path / "lock.json")
        ran()
        put_in_force(tmp_path / "lock.json", monkeypatch)
        return inputs

    return lock


@pytest.fixture
def trace(tmp_path):
    """Record a call without a gradient and one with one."""
    file = tmp_path / "trace.jsonl"
    with attnreg.record(file):
        attend(8)
        attend(24, grad=True)
    attnreg.reset_stats()
    return file


@pytest.fixture(scope="module")
def written():
    """Return a dict for the texts of trace and lock by name: each is made once, as it is always the same."""
    return {}


@pytest.fixture
def lock(request, written, tmp_path):
    """Lock the two calls while "second" is registered; afterwards it isn't."""
    file = tmp_path / "lock.json"
    if written:
        for name, text in written.items():
            (tmp_path / name).write_text(text)
        return file
    trace = request.getfixturevalue("trace")
    with attnreg.register_backend("second"):
        result = invoke("lock", "--from", trace, "--out", file)
    assert result.exit_code == 0, result.output
    written.update({each.name: each.read_text() for each in (trace, file)})
    return file


@pytest.fixture
def replaying(lock, monkeypatch):
    """Put the lock in force, with changes to its data."""

    def put(change=None):
        if change is not None:
            data = json.loads(lock.read_text())
            change(data)
            lock.write_text(json.dumps(data))
        put_in_force(lock, monkeypatch)
        return lock

    return put


def refused(run, *arguments, **options):
    with pytest.raises(UnsupportedInputError) as error:
        run(*arguments, **options)
    return str(error.value)


# What is written


def test_a_lock_has_a_row_for_each_direction_of_each_call_and_what_was_there_and_loads_as_saved(lock, trace):
    data = json.loads(lock.read_text())
    assert (data["format"], data["version"], data["device"]) == ("attnreg lockfile", 2, "cpu")
    assert data["environment"]["torch"] == torch.__version__
    assert data["environment"]["backends"]["second"] == "1.0"
    by = {(row["backend"], row["source"]) for row in data["rows"]}
    assert by == {("second", "register_backend('second')")}
    rows = [(row["spec"]["max_q"], row["direction"]) for row in data["rows"]]
    assert rows == [(8, "forward"), (24, "forward"), (24, "backward")]
    found, before = lockfile.load(lock), lock.read_text()
    recorded = [dataclasses.replace(one.spec, device=Device("cpu")) for one in traces.read(trace)]
    assert [row.spec for row in found.rows[:2]] == recorded
    found.save()
    assert lock.read_text() == before


# Replaying


def test_the_locked_backend_runs_though_the_default_order_has_another_first(replaying, ran):
    # Other versions of backends that run no locked call make no difference.
    replaying(lambda data: data["environment"]["backends"].update(first="0.9", gone="1.0"))
    attend(8)
    attend(24, grad=True)
    assert ran() == {"second": (2, 1)}
    spec = traces.read(replaying().parent / "trace.jsonl")[1].spec
    assert planning.decide(spec, "forward", registry.entries(), Policy()).backend == "first"


def test_forward_and_backward_may_be_locked_to_different_backends_one_of_them_torchs_own(
    replaying, ran, fake
):
    replace("cpu", fake("cpu").backend)

    def change(data):
        data["environment"]["backends"]["cpu"] = "1.0"
        data["rows"][0]["backend"] = "cpu"
        data["rows"][2]["backend"] = "math"

    replaying(change)
    attend(8)
    attend(24, grad=True)
    assert ran() == {"cpu": (1, 0), "second": (1, 0), "math": (0, 1)}


@pytest.fixture
def site(lock):
    """Return a settings file that names the lock."""
    file = lock.parent / "site.toml"
    file.write_text('on_error = "native"\nlock = "lock.json"\n')
    return file


def test_a_settings_file_names_a_lockfile_in_its_own_folder(site, lock, ran, monkeypatch):
    monkeypatch.chdir(site.parent.parent)
    attnreg.configure(site)
    attend(8)
    assert ran() == {"second": (1, 0)}
    without = f"site.toml:2: {lock} has no row for this forward"
    query = torch.randn(1, 2, 8, 24)
    said = refused(F.scaled_dot_product_attention, query, query, query)
    assert said.startswith(without) and "record the program without the line site.toml:2 into" in said
    settings = json.loads(invoke("info", "--json").stdout)["settings"]["in_force"]
    assert ["lock", f"{lock}, 3 rows", "site.toml:2"] in [list(row.values()) for row in settings]


def test_a_fault_of_a_lockfile_that_a_settings_file_names_is_an_error_but_for_attnreg_lock(
    site, lock, trace, monkeypatch
):
    lock.write_text("{}")
    with pytest.raises(
        ConfigError, match=r"(?s)site\.toml:2: .*lock\.json: format: got None.* lock is set, so"
    ):
        attnreg.configure(site)
    monkeypatch.setenv("ATTNREG_CONFIG", str(site))
    monkeypatch.setattr(policy, "_sources", None)
    registry.changed()
    assert "lock.json: format: got None" in invoke("check", site).stdout
    lock.unlink()
    assert invoke("lock", "--from", trace, "--out", lock).exit_code == 0
    assert {row.backend for row in lockfile.load(lock).rows} == {"first"}


def test_packed_calls_are_locked_too(locked_varlen, packed, ran):
    with attnreg.register_backend("math"):
        inputs = locked_varlen(grad=True)
    attnreg.varlen_attn(*inputs).sum().backward()
    assert ran() == {"math": (1, 1)}
    other = packed((5, 9), dim=8, grad=False)
    assert "has no row for this forward" in refused(attnreg.varlen_attn, *other)


def test_a_repeated_call_does_not_look_into_the_lock(replaying, monkeypatch):
    looked_up, expected = [], LockInForce.expected
    monkeypatch.setattr(LockInForce, "expected", lambda *given: looked_up.append(given) or expected(*given))
    replaying()
    for _ in range(4):
        attend(8)
        assert len(looked_up) == 1


def test_explain_names_the_lock_and_its_row(replaying):
    file = replaying()
    query = torch.randn(1, 2, 24, 16, requires_grad=True)
    found = attnreg.explain(query, query, query)
    assert (found.forward.backend, found.backward.backend) == ("second", "second")
    assert found.source == f"ATTNREG_LOCK: {file}: rows[1]"
    assert found.backward.source == f"ATTNREG_LOCK: {file}: rows[2]"


def test_a_preference_for_the_locked_backend_is_no_error(replaying, ran, monkeypatch):
    replaying()
    with attnreg.use_backend("second"):
        attend(8)
    monkeypatch.setenv("ATTNREG_BACKEND", "SECOND")
    attnreg.reload()
    attend(8)
    assert ran() == {"second": (2, 0)}


# Everything that may differ


def test_a_call_that_is_not_in_the_lock_is_refused_and_the_error_says_how_to_add_it(replaying, ran):
    file = replaying()
    query = torch.randn(1, 2, 40, 24)
    with pytest.raises(UnsupportedInputError) as error:
        F.scaled_dot_product_attention(query, query, query)
    assert len(error.traceback) < 6  # what attnreg did before it refused the call is no news
    message = str(error.value)
    call, nearest, remedy = message.splitlines()
    assert call.startswith(f"ATTNREG_LOCK: {file} has no row for this forward on cpu: query (1, 40, 2, 24)")
    assert nearest == "  nearest: rows[0], second, with head_dim 16 (here 24), head_dim_v 16 (here 24)"
    assert (
        "record the program without ATTNREG_LOCK into the same trace, which keeps the calls in it" in remedy
    )
    assert remedy.endswith("then `attnreg lock --from TRACE --out FILE`")
    found = attnreg.explain(query, query, query)
    assert (found.backend, found.runs, found.forward.refusal) == (None, False, message)
    query = query.requires_grad_()
    backward = refused(F.scaled_dot_product_attention, query, query, query)
    assert "has no row for this forward, nor for its backward, on cpu: query" in backward
    assert ran() == {}


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"torch": f"{torch.__version__}.7"}, f"locked with torch {torch.__version__}.7, here it is"),
        ({"attnreg": "0.1.99"}, "locked with attnreg 0.1.99, here it is"),
        ({"torch": "1.2.0"}, f"locked with torch 1.2.0, here it is {torch.__version__}"),
        ({"attnreg": "9.9.0"}, f"locked with attnreg 9.9.0, here it is {attnreg.__version__}"),
        ({"device": "another"}, "locked with device another, here it is"),
        ({"backends": {"second": "0.9"}}, "locked with second 0.9, here it is 1.0"),
        (None, "locked on cuda, here it is cpu"),
    ],
)
def test_another_environment_is_refused_and_named(replaying, ran, change, difference):
    file = replaying(
        lambda data: data["environment"].update(change) if change else data.update(device="cuda")
    )
    start = f"ATTNREG_LOCK: {file}: rows[0] says second for this forward, but it was {difference}"
    assert refused(attend, 8).startswith(start)
    assert ran() == {}


@pytest.mark.parametrize(
    ("locked", "here", "remedy"),
    [
        ("1.0", "1.0 (compiled kernel)", "lock it again, the kernel is compiled now"),
        ("1.0 (compiled kernel)", "1.0", "`attnreg build` compiles the kernel (`attnreg info` says why"),
    ],
    ids=["compiled since", "not compiled"],
)
def test_a_lock_with_and_without_the_compiled_kernel_says_what_to_do(
    lock, monkeypatch, fake, locked, here, remedy
):
    data = json.loads(lock.read_text())
    data["environment"]["backends"]["second"] = locked
    lock.write_text(json.dumps(data))
    replace("second", fake("second", version=lambda: here).backend)
    put_in_force(lock, monkeypatch)
    differs = f"locked with second {locked}, here it is {here}: {remedy}"
    assert f"rows[0] says second for this forward, but it was {differs}" in refused(attend, 8)
    assert differs in words(invoke("lock", "--check", lock))
    assert background._kernel_is_required == locked.endswith("kernel)")


def test_the_kernel_is_compiled_before_calls_are_locked(trace, tmp_path, monkeypatch):
    waits = []
    monkeypatch.setattr(building, "wait_built", lambda: waits.append(background._kernel_is_required))
    assert invoke("lock", "--from", trace, "--out", tmp_path / "lock.json").exit_code == 0
    assert waits[0]


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"unavailable": lambda: "not installed"}, "not installed"),
        ({"dtypes": ("float64",)}, "float64, got float32"),
        ({"load": broken_loader}, NO_SYMBOL),
        ({"disabled": True}, "disabled by ATTNREG_DISABLE"),
        (None, "no backend of that name is known here"),
    ],
)
def test_a_locked_backend_that_cannot_run_the_call_is_refused_with_its_reasons(
    replaying, fake, ran, monkeypatch, limits, reason
):
    if limits == {"disabled": True}:
        monkeypatch.setenv("ATTNREG_DISABLE", "second")
    else:
        replace("second", None if limits is None else fake("second", **limits).backend)
    replaying()
    message = refused(attend, 8)
    assert "rows[0] says second for this forward, which can't run it here (" in message
    assert reason in message
    assert ran() == {}


def test_a_preference_for_another_backend_is_refused_and_named(replaying, ran, monkeypatch, packed):
    replaying()
    with attnreg.use_backend("first"):
        assert "but use_backend('first') would have first run it" in refused(attend, 8)
    with attnreg.register_backend("math"):
        assert "but register_backend('math') would have math run it" in refused(attend, 8)
    monkeypatch.setenv("ATTNREG_BACKEND", "math")
    attnreg.reload()
    assert "but ATTNREG_BACKEND would have math run it" in refused(attend, 8)
    assert ran() == {}


def test_a_backend_of_the_call_is_refused_unless_it_is_the_locked_one(locked_varlen, ran):
    inputs = locked_varlen(grad=False)
    attnreg.varlen_attn(*inputs, backend="first")
    message = refused(attnreg.varlen_attn, *inputs, backend="math")
    assert "but backend='math' would have math run it" in message
    assert ran() == {"first": (1, 0)}


def test_a_backward_that_a_dropout_mask_ties_is_locked_with_its_forward(trace, tmp_path, monkeypatch):
    line = trace.read_text().splitlines()[1]
    trace.write_text(line.replace('"needs_backward":true', '"needs_backward":true,"dropout":0.5') + "\n")
    file = tmp_path / "lock.json"
    assert invoke("lock", "--from", trace, "--out", file).exit_code == 0
    rows = lockfile.load(file).rows
    assert [(row.direction, row.backend) for row in rows] == [("forward", "first"), ("backward", "first")]
    put_in_force(file, monkeypatch)

    def decide(forward):
        policy = state().policy.with_first(tied_to(forward))
        return planning.decide(rows[1].spec, "backward", state().entries, policy)

    assert decide("first").backend == "first"
    assert "but the forward's dropout mask would have second run it" in refused(decide, "second")


def test_with_strict_a_call_that_torch_sends_past_the_lock_is_an_error(replaying, ran, monkeypatch):
    monkeypatch.setenv("ATTNREG_STRICT", "1")
    replaying()
    query = torch.randn(1, 2, 8, 16)
    message = refused(F.scaled_dot_product_attention, query, query, query, dropout_p=0.5)
    assert "so that ATTNREG_LOCK doesn't hold for it, and strict (ATTNREG_STRICT) makes that an" in message
    found = attnreg.explain(query, query, query, dropout_p=0.5)
    assert not found.runs
    attend(8)
    assert ran() == {"second": (1, 0)}


# A file that is no lock


BROKEN = {
    "not there": (None, "", "can't be read"),
    "no JSON": (-9, "", "got no JSON"),
    "another file": ("attnreg lockfile", "x", "format: got 'x', expected 'attnreg lockfile'"),
    "a newer one": ('"version": 2', '"version": 3', "version: got 3, expected 2: lock it again"),
    "key": ('"rows"', '"row"', "row: unknown key"),
    "device": ('"device": "cpu"', '"device": ""', "device: got '', expected a type of device such as 'cuda'"),
    "key of a row": ('"source"', '"sauce"', "rows[0].sauce: unknown key"),
    "direction": (
        '"backward"', '"sideways"', "rows[2].direction: got 'sideways', expected forward or backward",
    ),
    "backend": (
        '"backend":"second"', '"backend":"third"',
        "rows[0].backend: got 'third', expected one of environment.backends",
    ),
    "spec": ('"max_q":8', '"max_q":"8"', "rows[0].spec: max_q: got '8'"),
    "key of a spec": ('"max_q"', '"max"', "rows[0].spec.max: unknown key"),
    "flag": ('"max_q":8', '"max_q":8,"varlen":[]', "rows[0].spec: unhashable"),
    "twice": ('"backward"', '"forward"', "rows[2]: is there twice, expected each direction of a call once"),
    "environment": ('"torch": "', '"torhc": "', "environment.torch: missing"),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new", "message"), BROKEN.values(), ids=BROKEN)
def test_a_file_that_is_no_lock_is_an_error_of_every_call_that_names_file_and_key(
    lock, monkeypatch, old, new, message
):
    text = lock.read_text()
    lock.write_text(text[:old] if isinstance(old, int) else text.replace(str(old), new, 1))
    if old is None:
        lock.unlink()
    monkeypatch.chdir(lock.parent)
    unread(lock.name, monkeypatch)
    for _ in range(2):
        with pytest.raises(ConfigError) as error:
            attend(8)
        assert str(error.value).startswith(f"ATTNREG_LOCK: {lock}: {message}")


# The command line


def test_the_command_says_what_it_locked_as_text_and_as_json(trace, tmp_path, fake):
    options = ("lock", "--from", trace, "--out", tmp_path / "lock.json")
    shown = invoke(*options)
    assert shown.exit_code == 0
    assert "default order for cpu" in shown.output
    assert "3 rows" in words(shown)

    def locked(*more):
        data = json.loads(invoke(*options, *more, "--json").stdout)
        return data["device"], data["refused"], [row["backend"] for row in data["rows"]]

    assert locked("--device", "cpu") == ("cpu", [], ["first"] * 3)
    replace("first", fake("first", load=broken_loader, priority=900).backend)
    assert locked() == ("cpu", [], ["second"] * 3)  # what doesn't really load isn't locked


def test_a_lock_in_force_does_not_count_when_another_is_written(replaying, tmp_path):
    file = replaying()
    trace = tmp_path / "more.jsonl"
    trace.write_text((tmp_path / "trace.jsonl").read_text().replace('"max_q":8', '"max_q":9'))
    result = invoke("lock", "--from", trace, "--out", file, "--json")
    assert result.exit_code == 0
    assert {row["backend"] for row in json.loads(result.stdout)["rows"]} == {"first"}


def test_a_call_that_no_backend_can_run_is_listed_and_exits_1(trace, tmp_path, known, fake):
    for name in known:
        replace(name, fake(name, head_dim=attnreg.Range(32, 64)).backend)
    file = tmp_path / "lock.json"
    result = invoke("lock", "--from", trace, "--out", file, "--json")
    assert result.exit_code == 1
    data = json.loads(result.stdout)
    assert [one["direction"] for one in data["refused"]] == ["forward", "forward", "backward"]
    assert "first" in data["refused"][0]["reasons"]
    assert data["rows"] == json.loads(file.read_text())["rows"] == []
    assert "No backend can run" in invoke("lock", "--from", trace, "--out", file).output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--from no-such.jsonl --out lock.json", "no-such.jsonl: can't be read"),
        ("--from trace.jsonl --out no/such/lock.json", "--out: no/such/lock.json: can't be written"),
        ("--from empty.jsonl --out lock.json", "--from: got empty.jsonl, expected a file with at least one"),
        ("--from mixed.jsonl --out lock.json", "--from: got calls on cpu and cuda, expected --device"),
        ("--from trace.jsonl --out lock.json --device cpuu", "--device: got 'cpuu'"),
    ],
)
def test_wrong_usage_exits_2_and_writes_nothing(trace, monkeypatch, options, message):
    monkeypatch.chdir(trace.parent)
    (trace.parent / "empty.jsonl").write_text("")
    lines = trace.read_text()
    (trace.parent / "mixed.jsonl").write_text(lines + lines.replace('"type":"cpu"', '"type":"cuda"'))
    result = invoke("lock", *options.split())
    assert result.exit_code == 2
    assert result.stderr.startswith(f"attnreg: {message}")
    assert not (trace.parent / "lock.json").exists()


def test_settings_that_ask_for_what_cannot_load_exit_1(trace, tmp_path, fake, monkeypatch):
    replace("absent", fake("absent", unavailable=lambda: "not installed").backend)
    monkeypatch.setenv("ATTNREG_BACKEND", "absent")
    attnreg.reload()
    with pytest.raises(BackendUnavailableError):
        attend(8)
    assert invoke("lock", "--from", trace, "--out", tmp_path / "lock.json").exit_code == 1


@pytest.mark.parametrize("rest", ['"version": 1, "rows": [', '"version": 0}'])
def test_a_lock_replaces_one_that_cannot_be_read_or_is_older(tmp_path, packed, monkeypatch, rest):
    with attnreg.record(tmp_path / "trace.jsonl"):
        attnreg.varlen_attn(*packed((5, 9)))
    file = tmp_path / "lock.json"
    file.write_text('{"format": "attnreg lockfile", ' + rest)
    unread(file, monkeypatch)
    result = invoke("lock", "--from", tmp_path / "trace.jsonl", "--out", file)
    assert (result.exit_code, len(lockfile.load(file).rows)) == (0, 2)


def test_info_shows_the_lock_in_force_and_why_it_refuses_the_calls_on_a_device(replaying):
    file = replaying()
    found = json.loads(invoke("info", "--json").stdout)
    setting = {"setting": "lock", "value": f"{file}, 3 rows", "source": "ATTNREG_LOCK"}
    assert setting in found["settings"]["in_force"]
    variables = {one["name"]: one["value"] for one in found["settings"]["variables"]}
    assert variables["ATTNREG_LOCK"] == str(file)
    assert found["devices"][0]["problem"] == ""
    replaying(lambda data: data["environment"].update(torch="1.2.0"))
    devices = {one["device"]: one for one in json.loads(invoke("info", "--json").stdout)["devices"]}
    differs = f"ATTNREG_LOCK: locked with torch 1.2.0, here it is {torch.__version__}"
    assert devices["cpu"]["problem"] == f"{differs}: calls on this device are refused"


@pytest.mark.parametrize("text", ["import torch", "[]", '{"format": "attnreg measured table"}'])
def test_a_file_that_the_command_has_not_written_is_not_replaced(trace, tmp_path, text):
    file = tmp_path / "program.py"
    file.write_text(text)
    result = invoke("lock", "--from", trace, "--out", file)
    assert result.exit_code == 2
    assert "exists, and isn't a file that this command writes" in words(result)
    assert file.read_text() == text


def test_a_program_that_changes_its_threads_goes_on_under_the_lock(replaying, ran, monkeypatch):
    replaying()
    attend()
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    attend(24, grad=True)
    assert ran() == {"second": (2, 1)}
