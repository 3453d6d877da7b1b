"""The file of a measured table: points, and the environment of their measurement, as JSON."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from attnreg.core.times.points import ANY_TEXT, Front, Malformed, Point, checked, is_dict, with_keys
from attnreg.core.torchlib import caches
from attnreg.errors import MOST_LISTED, ConfigError, file_errors, first_ten, short_repr

T = TypeVar("T")

FORMAT = "attnreg measured table"
VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The machine and the versions that a measurement depends on.

    Attributes:
        device: the name of the GPU, or of the processor.
        compute_capability: `"9.0"`; empty on a CPU.
        torch, cuda, cudnn, driver, attnreg: versions; empty if missing.
        threads: the number of torch's threads; empty on a GPU.
        backends: the version of each backend that loads.
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
    """Points and host times of an environment; `name` is the table's name in messages."""

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
        """Write the file atomically, one point per line; raises `OSError` if it can't be written."""
        write_rows(Path(path), self.to_dict(), "points")


def load(path: str | os.PathLike[str], most: int = MOST_LISTED) -> Table:
    """Read a table; raises a `ConfigError` that names the file and wrong keys, `most` of them at most."""
    file = Path(path)

    def read(data: object) -> Table:
        contents = of_format(data, FORMAT, VERSION, "`attnreg tune` writes it", "measure it again")
        fronts, points = each(contents, "fronts", Front.from_dict), each(contents, "points", Point.from_dict)
        check_once([point.place for point in points], "points", "kind and size")
        return Table(environment_from(contents.get("environment")), points, file.name, fronts)

    return read_whole(file, "a table of `attnreg tune`", read, most)


def read_whole(file: Path, expected: str, read: Callable[[object], T], most: int = MOST_LISTED) -> T:
    """Return the result of `read` for a file's JSON.

    Args:
        file: the file.
        expected: what the file should be, for messages.
        read: converts the JSON; raises `Malformed`.
        most: how many faults of rows the message lists.

    Raises:
        ConfigError: the file can't be read, is no JSON, or is malformed. Each line of the message names the
            file.
    """
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: can't be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{file}: got no JSON ({error}), expected {expected}") from error
    except RecursionError:
        raise ConfigError(f"{file}: got JSON that is nested too deeply, expected {expected}") from None
    try:
        return read(data)
    except Malformed as error:
        faults = [f"{file}: {fault}" for fault in str(error).splitlines()]
        raise ConfigError("\n".join(first_ten(faults, most=most))) from None
    except RecursionError:  # of a value, where it is hashed or compared
        raise ConfigError(f"{file}: got JSON that is nested too deeply, expected {expected}") from None


def of_format(data: Any, name: str, version: int, written: str, remedy: str) -> dict[str, Any]:
    """Return the data of a file; raises `Malformed` if it has another format or version."""
    if not isinstance(data, dict) or data.get("format") != name:
        got = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise Malformed(f"format: got {short_repr(got)}, expected {name!r}, as {written}")
    if data.get("version") != version:
        raise Malformed(f"version: got {short_repr(data.get('version'))}, expected {version}: {remedy}")
    return data


def each(data: Mapping[str, Any], key: str, read: Callable[[object, str], T]) -> tuple[T, ...]:
    """Return the results of `read` for each row and its place in the file.

    Raises:
        Malformed: rows are wrong; the message has a line for each of them.
    """
    rows = checked(data.get(key), key, (f"a list of {key}", lambda rows: isinstance(rows, list)))
    results, faults = [], []
    for number, row in enumerate(rows):
        try:
            results.append(read(row, f"{key}[{number}]"))
        except Malformed as error:
            faults.append(str(error))
    if faults:
        raise Malformed("\n".join(faults))
    return tuple(results)


def check_once(keys: Sequence[Hashable], place: str, expected: str) -> None:
    """Check that no key occurs twice; raises `Malformed`."""
    known: set[Hashable] = set()
    for number, key in enumerate(keys):
        if key in known:
            raise Malformed(f"{place}[{number}]: is there twice, expected each {expected} once")
        known.add(key)


def environment_from(data: object) -> Environment:
    """Return the environment of a file's data; raises `Malformed`."""
    names = [entry.name for entry in fields(Environment)]
    values = with_keys(data, names, "environment", "a device and its versions")
    for key, value in values.items():
        place = f"environment.{key}"
        if key != "backends":
            checked(value, place, ANY_TEXT)
            continue
        for name, version in checked(value, place, ("the versions of backends", is_dict)).items():
            checked(version, f"{place}.{name}", ANY_TEXT)
    checked(values["device"], "environment.device", ("the name of a device", bool))
    return Environment(**values)


def write_rows(path: Path, data: dict[str, Any], key: str) -> None:
    """Write JSON atomically, a line for each row of `data[key]`; raises `OSError`."""
    rows = ",\n  ".join(json.dumps(row, separators=(",", ":")) for row in data.pop(key))
    caches.write_whole(path, f'{json.dumps(data, indent=1)[:-2]},\n "{key}": [\n  {rows}\n ]\n}}\n')


def check_writable(path: Path, mark: str = "") -> None:
    """Check that `caches.write_whole` can write a file, without changing it.

    An existing file has to contain `mark` in its first kilobyte, so that files of other programs aren't
    replaced.

    Raises:
        ConfigError: the file can't be written, or hasn't the mark.
    """
    with file_errors(path):
        if path.exists() and not path.is_file():  # replacing a device such as /dev/null breaks other programs
            raise OSError(0, "is a folder" if path.is_dir() else "isn't a regular file")
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(0, "Permission denied")
        with tempfile.TemporaryFile(dir=caches.resolve(path).parent):
            pass
        begins = path.read_bytes()[:1024] if mark and path.is_file() else b""
    if begins and mark.encode() not in begins:
        raise ConfigError(f"{path}: exists, and isn't a file that this command writes: give another file")
