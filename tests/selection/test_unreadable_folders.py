"""Promises where a home folder can't be read: attention runs, and a file named there is a ConfigError."""

import os

import pytest
from support.processes import forked

from attnreg.core.times import tables, traces
from attnreg.core.times.table import Environment, load
from attnreg.errors import ConfigError
from attnreg.tools.tuning.session import kept

HERE = Environment(device="a test")

# What is used is imported before the user changes: the interpreter's own files may be unreadable for them.
PROGRAM = """
import os, sys
import torch, attnreg
from attnreg.core.torchlib import libraries

q, k, v = torch.randn(3, 16, 2, 8).unbind()
ends = torch.tensor([0, 16], dtype=torch.int32)
spec = attnreg.AttentionSpec(
    device=attnreg.Device("cpu"), dtype="float32", batch=1, max_q=8, max_k=8, heads_q=1, heads_k=1,
    head_dim=8, head_dim_v=8,
)

def use():
    attnreg.varlen_attn(q, k, v, ends, ends, 16, 16)
    attnreg.register_backend("cpu").remove()
    return attnreg.explain(spec).backend

use()
os.environ["HOME"] = sys.argv[1]
os.environ.pop("XDG_CACHE_HOME", None)
libraries.target.cache_clear()
os.setgid(65534)
os.setuid(65534)
attnreg.reload()
print(use())
os.environ["ATTNREG_RECORD"] = os.path.join(sys.argv[1], "trace.jsonl")
try:
    attnreg.reload()
except attnreg.ConfigError as error:
    print(error)
"""


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="takes root to be another user")
def test_attention_runs_for_a_user_whose_home_folder_cannot_be_read(tmp_path):
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    done = forked(PROGRAM, str(home))
    assert done.returncode == 0, done.stderr
    backend, message = done.stdout.splitlines()
    assert backend == "cpu"
    assert message == f"ATTNREG_RECORD: {home}/trace.jsonl: can't be written: Permission denied"


@pytest.fixture
def unreadable(tmp_path, monkeypatch):
    """Return a folder in which nothing can be looked up or opened, as for a user without the right to."""
    folder = tmp_path / "home"
    folder.mkdir()

    def refuse(function):
        def call(path, *arguments, **options):
            if str(path).startswith(str(folder) + os.sep):
                raise PermissionError(13, "Permission denied", str(path))
            return function(path, *arguments, **options)

        return call

    for name in ("stat", "access", "open"):
        monkeypatch.setattr(os, name, refuse(getattr(os, name)))
    monkeypatch.setattr("io.open", refuse(open))
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).startswith(str(folder)))
    return folder


USES = {
    "settings": load,
    "table": lambda file: kept(file, HERE),
    "workload": traces.read,
    "recording": traces.check_writable,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_named_file_in_such_a_folder_is_an_error_with_its_path(unreadable, use):
    with pytest.raises(ConfigError, match=f"^{unreadable / 'file.json'}: can't be (read|written)"):
        use(unreadable / "file.json")


def test_a_shipped_table_that_cannot_be_read_is_none_and_logged(unreadable, caplog):
    assert tables._read(unreadable / "nvidia-h200.json") is None
    assert len(caplog.records) == 1
    assert "Permission denied" in caplog.text
