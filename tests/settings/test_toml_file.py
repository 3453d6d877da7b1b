"""Promises of reading a TOML file: every key has its place, every failure names the file."""

import errno
import tomllib
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.refusals import refusal

from attnreg.core.settings.toml_file import Origin, key_text, lines_of, read
from attnreg.errors import ConfigError

EVERY_FORM = '''# every form in which TOML nests keys
title = "a # that is no comment, [nor] a = {table}" # but this is
"quoted key" = 'C:\\no\\escape'
"\\u0061b.c" = 1
'literal "key"' = -1_000.5e+3
"" = "empty key"
3 = 1979-05-27 07:32:00Z
site."google.com".up = true
spaced . dotted	.  key = inf

text = """
[not.a.table]
x = 1 \\""" still inside
""" # closed
quotes = """"two"" at both ends"""""
literal = \'\'\'
y = [1, 2]'\'\'\'

flat = [1, 2.5, "three", ]
nested = [ [ 1, [] ], {a = {b.c = [0]}, "d" = {}}, # a comment with ] in it
  "last",

  # and a line of its own
  'really'
]
empty = []
  indented = false

[table]
key = 1
[table."sub.table".deeper]
key = 2
[ other . "spaced" ]
key = 3
[table.again]
inline = { one = 1, two = ["x", "y"], three = 3 }
after = 1'''


def paths(value, prefix=()):
    """Yield the path of everything inside a parsed value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        yield (*prefix, name)
        yield from paths(inner, (*prefix, name))


LINES = {
    ("title",): 2,
    ("site", "google.com", "up"): 8,
    ("spaced", "dotted"): 9,
    ("spaced", "dotted", "key"): 9,
    ("quotes",): 15,
    ("flat", 2): 19,
    ("nested", 0, 1): 20,
    ("nested", 1, "a", "b", "c", 0): 20,
    ("nested", 1, "d"): 20,
    ("nested", 2): 21,
    ("nested", 3): 24,
    ("indented",): 27,
    ("table",): 29,
    ("table", "key"): 30,
    ("table", "sub.table", "deeper", "key"): 32,
    ("other", "spaced"): 33,
    ("table", "again", "inline", "two", 1): 36,
    ("table", "again", "after"): 37,
}


def test_every_key_and_element_that_tomllib_finds_has_its_line_and_nothing_else_has_one():
    lines = lines_of(EVERY_FORM)
    assert set(lines) == set(paths(tomllib.loads(EVERY_FORM)))
    assert {key: lines[key] for key in LINES} == LINES


def test_the_first_of_an_array_of_tables_gives_its_place():
    assert lines_of("[[device]]\nname = 1\n[[device]]\nname = 2\n") == {
        ("device",): 1,
        ("device", "name"): 2,
    }


def test_a_text_without_keys_has_no_lines():
    assert [lines_of(text) for text in ("", "\n\n", "# only a comment", "   \t")] == [{}] * 4


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ((), ""),
        (("strict",), "strict"),
        (("log_level",), "log_level"),
        (("devices", "sm_90", "order", 2), 'devices."sm_90".order[2]'),
        (("devices", "cuda", "order"), "devices.cuda.order"),
        (("devices", 'a "b".ü'), r'devices."a \"b\".ü"'),
        (("disabled", 0), "disabled[0]"),
    ],
)
def test_a_key_is_shown_as_it_would_be_written(key, text):
    assert key_text(key) == text


def test_what_is_not_written_is_placed_at_the_table_that_lacks_it():
    origin = Origin(Path("attnreg.toml"), {("devices",): 3, ("devices", "cuda"): 4})
    assert origin.line(("devices", "cuda", "order", 1)) == 4
    assert origin.line(("devices", "cpu")) == 3
    assert origin.line(("strict",)) == 0
    assert origin.describe(("devices", "cuda", "order")) == "attnreg.toml:4"
    assert origin.describe(("strict",)) == origin.describe() == "attnreg.toml"


@pytest.mark.parametrize(
    "raw",
    [b"a = 1\nb = [\n2]\n", b"\xef\xbb\xbfa = 1\nb = [\n2]\n", b"a = 1\r\nb = [ # c\r\n2]\r\n"],
    ids=["plain", "byte order mark", "CRLF"],
)
def test_a_byte_order_mark_and_windows_line_ends_change_nothing(tmp_path, raw):
    file = tmp_path / "attnreg.toml"
    file.write_bytes(raw)
    data, origin = read(file)
    assert data == {"a": 1, "b": [2]}
    assert origin.lines == {("a",): 1, ("b",): 2, ("b", 0): 3}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("attnreg.toml", "no such file or directory"),
        (".", "is a directory"),
        ("file/attnreg.toml", "not a directory"),
        ("loop.toml", "too many levels of symbolic links"),
        ("nul\0.toml", "embedded null byte"),
    ],
    ids=["missing", "folder", "below a file", "symlink loop", "null byte"],
)
def test_a_file_that_cannot_be_read_is_refused_with_its_absolute_path(tmp_path, name, reason):
    (tmp_path / "file").touch()
    (tmp_path / "loop.toml").symlink_to("loop.toml")
    path = tmp_path / name
    assert refusal(read, path) == f"{path}: can't be read ({reason}), expected a settings file in TOML"


def test_a_file_without_permission_is_refused_and_a_relative_path_reported_as_an_absolute_one(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    # Raised by a fake: an administrator, whom tests may run as, can read every file.
    denied = PermissionError(errno.EACCES, "Permission denied")
    monkeypatch.setattr(Path, "read_bytes", Mock(side_effect=denied))
    with pytest.raises(ConfigError) as error:
        read("attnreg.toml")
    expected = "can't be read (permission denied), expected a settings file in TOML"
    assert str(error.value) == f"{tmp_path / 'attnreg.toml'}: {expected}"
    assert error.value.__cause__ is denied


def test_a_tilde_is_the_home_folder_and_refused_without_one(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "attnreg.toml").touch()
    assert read("~/attnreg.toml")[1].path == tmp_path / "attnreg.toml"
    assert refusal(read, "~no-such-user/x.toml") == (
        "~no-such-user/x.toml: can't be read (could not determine home directory), "
        "expected a settings file in TOML"
    )


@pytest.mark.parametrize(
    ("raw", "place_and_reason"),
    [
        (b"\xff\xfea\0", ":1: got byte 0xff, expected UTF-8 text"),
        (b"a = 1\n# gr\xfcn\n", ":2: got byte 0xfc, expected UTF-8 text"),
        ("# grün\r\nb = 'ü".encode() + b"\xe9'", ":2: got byte 0xe9, expected UTF-8 text"),
        (b"a = 1\nb = \n", ":2: not TOML: got nothing, expected a value"),
        (b"a =", ":1: not TOML: got nothing, expected a value, at the end"),
        (b"a = # why", ":1: not TOML: got nothing, expected a value"),
        (b"a = == 1", ":1: not TOML: invalid value"),
        (b"a: 1", ":1: not TOML: expected '=' after a key in a key/value pair"),
        (b"[a\n", ":1: not TOML: expected ']' at the end of a table declaration"),
        (b"a = 'x' 'y'", ":1: not TOML: expected newline or end of document after a statement"),
        (b"a = true false", ":1: not TOML: expected newline or end of document after a statement"),
        (b"a = 'x\ny'", ":1: not TOML: found invalid character"),
        (b"a = [1,\n2\n", ":2: not TOML: unclosed array, at the end"),
        (b"[t]\n[t]\n", ":2: not TOML: cannot declare ('t',) twice"),
        (b"a = " + 5000 * b"[", ": got TOML that is nested too deeply, expected a settings file"),
    ],
)
def test_a_file_that_is_not_toml_is_refused_with_its_line(tmp_path, raw, place_and_reason):
    file = tmp_path / "attnreg.toml"
    file.write_bytes(raw)
    with pytest.raises(ConfigError) as error:
        read(file)
    # Python may add to its own message on recursion what it was doing then.
    assert str(error.value).startswith(f"{file}{place_and_reason}")
    assert error.value.__cause__ is not None


@pytest.mark.parametrize(
    ("text", "line", "got", "plain"),
    [
        ("backend = FA2", 1, "FA2", "FA2"),
        ("\ufeffa = 1\r\n\r\nb = yes # why\r\n", 3, "yes", "yes"),
        # tomllib reads a number and stops behind it.
        ("log_level = info", 1, "info", "info"),
        ("tuned = 4090.json", 1, "4090.json", "4090.json"),
        ("[devices.cuda]\norder = ['FA2',\n  info]", 3, "info", "info"),
        ("modules = {'*' = nano}", 1, "nano", "nano"),
        ("disabled = [\n 'FA2',\n flex]", 3, "flex", "flex"),
        ("lock = ~/a/b.lock", 1, "~/a/b.lock", "~/a/b.lock"),
        ("modules = {'*' = math}", 1, "math", "math"),
        ("policy = fast path", 1, "fast", "fast"),
    ],
)
def test_a_string_without_quotes_is_shown_with_quotes(tmp_path, text, line, got, plain):
    file = tmp_path / "attnreg.toml"
    file.write_text(text, encoding="utf-8", newline="")
    assert refusal(read, file) == (
        f'{file}:{line}: not TOML: got {got}, expected a value; a string needs quotes: "{plain}"'
    )


def test_quotes_of_a_text_processor_and_names_of_python_are_shown_as_toml_has_them(tmp_path):
    file = tmp_path / "attnreg.toml"
    file.write_text("policy = \u201cadaptive\u201d", encoding="utf-8")
    assert refusal(read, file) == (
        f"{file}:1: not TOML: got \u201cadaptive\u201d, expected a value; a string needs straight quotes: "
        '"adaptive"'
    )
    file.write_text("strict = True", encoding="utf-8")
    assert refusal(read, file) == f"{file}:1: not TOML: got True, expected true, in lower case"


@pytest.mark.parametrize("path", ["", "  "])
def test_an_empty_path_is_no_file(path):
    assert refusal(read, path) == f"settings file: got {path!r}, expected the path of a file in TOML"


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("a = 1,", "expected newline or end of document after a statement"),
        ("a = 1,000", "expected newline or end of document after a statement"),
        ("a = 5]", "expected newline or end of document after a statement"),
        ("a = 07", "got 07, expected a value"),
        ("a = 1e", "got 1e, expected a value"),
        ("a = 2.11.0", 'got 2.11.0, expected a value; a string needs quotes: "2.11.0"'),
        (r"a = C:\locks\x", r"got C:\locks\x, expected a value; a string needs quotes: 'C:\locks\x'"),
    ],
)
def test_only_what_may_be_a_string_is_said_to_need_quotes(tmp_path, text, end):
    file = tmp_path / "attnreg.toml"
    file.write_text(text)
    assert refusal(read, file) == f"{file}:1: not TOML: {end}"
