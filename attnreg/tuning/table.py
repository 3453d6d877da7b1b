"""The file of a measured table: points and the environment that they were measured in, as JSON."""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from attnreg.errors import ConfigError
from attnreg.tuning.points import Front, Malformed, Point

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

FORMAT = "attnreg measured table"
VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What a measurement depends on.

    Attributes:
        device: the GPU's name, or the processor's.
        compute_capability: `"9.0"`; empty on a CPU.
        torch, cuda, cudnn, driver, attnreg: versions; empty where there is none.
        threads: how many torch uses; empty on a GPU.
        backends: the version of each backend that loads there.
    """

    device: str
    compute_capability: str = ""
    torch: str = ""
    cuda: str = ""
    cudnn: str = ""
    driver: str = ""
    attnreg: str = ""
    threads: str = ""
    backends: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Table:
    """Points and host times of one environment; `name` is the table's name in messages."""

    environment: Environment
    points: tuple[Point, ...]
    name: str = "table"
    fronts: tuple[Front, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain data."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "environment": asdict(self.environment),
            "fronts": [front.to_dict() for front in self.fronts],
            "points": [point.to_dict() for point in self.points],
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file atomically, one point per line.

        Raises:
            OSError: it can't be written.
        """
        data = self.to_dict()
        rows = ",\n  ".join(json.dumps(row, separators=(",", ":")) for row in data.pop("points"))
        head = json.dumps(data, indent=1)[:-2]
        write_whole(Path(path), f'{head},\n "points": [\n  {rows}\n ]\n}}\n')


def load(path: str | os.PathLike[str]) -> Table:
    """Read a table.

    Raises:
        ConfigError: there is none, or something in it is wrong; names the file and the key.
    """
    file = Path(path)
    return read_whole(file, "a table of `attnreg tune`", lambda data: _read(data, file.name))


def read_whole(file: Path, expected: str, read: Callable[[object], T]) -> T:
    """Return what `read` makes of a file's JSON; `expected` names what the file should be.

    Raises:
        ConfigError: it can't be read, is no JSON, or `read` finds it malformed; names the file.
    """
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: can't be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{file}: got no JSON ({error}), expected {expected}") from error
    try:
        return read(data)
    except Malformed as error:
        raise ConfigError(f"{file}: {error}") from None


def _read(data: object, name: str) -> Table:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        got = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise Malformed(f"format: got {got!r}, expected {FORMAT!r}, as `attnreg tune` writes it")
    if data.get("version") != VERSION:
        raise Malformed(f"version: got {data.get('version')!r}, expected {VERSION}: measure it again")
    fronts = _each(data, "fronts", Front.from_dict)
    points = _each(data, "points", Point.from_dict)
    places = [point.place for point in points]
    if len(set(places)) < len(places):
        twice = next(i for i, place in enumerate(places) if place in places[:i])
        raise Malformed(f"points[{twice}]: is there twice, expected each kind and size once")
    return Table(environment_from(data.get("environment")), tuple(points), name, tuple(fronts))


def _each(data: dict[str, Any], key: str, read: Callable[[object], T]) -> list[T]:
    rows = data.get(key)
    if not isinstance(rows, list):
        raise Malformed(f"{key}: got {rows!r}, expected a list of {key}")
    found = []
    for number, row in enumerate(rows):
        try:
            found.append(read(row))
        except Malformed as error:
            joint = ": " if str(error).startswith("got ") else "."
            raise Malformed(f"{key}[{number}]{joint}{error}") from None
    return found


def environment_from(data: object) -> Environment:
    """Return the environment of a file's data.

    Raises:
        Malformed: the data has another form; the message begins with the key.
    """
    if not isinstance(data, dict):
        raise Malformed(f"environment: got {data!r}, expected a device and its versions")
    names = {one.name for one in fields(Environment)}
    if wrong := sorted(names.symmetric_difference(data)):
        problem = "missing" if wrong[0] in names else "unknown key"
        raise Malformed(f"environment.{wrong[0]}: {problem}")
    for key, value in data.items():
        versions = value if key == "backends" else {"": value}
        if not isinstance(versions, dict):
            raise Malformed(f"environment.{key}: got {value!r}, expected the versions of backends")
        for name, text in versions.items():
            if not isinstance(text, str):
                place = f"environment.{key}{'.' if name else ''}{name}"
                raise Malformed(f"{place}: got {text!r}, expected a text")
    if not data["device"]:
        raise Malformed("environment.device: got '', expected the name of a device")
    return Environment(**data)


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically: a reader sees the old contents or the new, also after an interruption.

    Raises:
        OSError: it can't be written.
    """
    target = path.resolve()
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        mode = target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~_umask()
        Path(temporary).chmod(mode)
        Path(temporary).replace(target)
    except BaseException:
        with suppress(OSError):
            Path(temporary).unlink()
        raise


def check_writable(path: Path, mark: str = "") -> None:
    """Check that `write_whole` can write a file, without touching what it has.

    With a `mark`, an existing file has to contain it in its first kilobyte: files of other programs aren't
    replaced.

    Raises:
        ConfigError: it can't, or the existing file lacks the mark.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(0, "is a folder")
        with tempfile.TemporaryFile(dir=path.resolve().parent):
            pass
        begins = path.read_bytes()[:1024] if mark and path.is_file() else b""
    except OSError as error:
        raise ConfigError(f"{path}: can't be written: {error.strerror or error}") from error
    if begins and mark.encode() not in begins:
        raise ConfigError(f"{path}: exists, and isn't a file that this command writes: give another file")


def _umask() -> int:
    # The only way to read the umask is to set it.
    before = os.umask(0o022)
    os.umask(before)
    return before
