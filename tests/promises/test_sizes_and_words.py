"""Promises about the source: how long pages and functions may be, modules outside of rooms, plain words."""

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]

# The most lines of a page, and pages that are longer: only ever less, until they keep the limit.
PAGE_LIMITS = {"docs/**/*.md": 200, "README.md": 120}
LONGER_PAGES = {"docs/faults.md": 203}

MODULES_OUTSIDE_OF_ROOMS = 9

# What may be called `Turn`: backends that take turns at the calls of a kind.
TURNS = {"attnreg/core/selection/protocols.py"}

# Words that name nothing, and the modules in which one is the name of a public field.
NO_NAMES = {"found", "given", "one", "there", "seen"}
FIELDS = {"attnreg/core/dispatch/counters.py": {"seen"}, "attnreg/masks/structure.py": {"seen"}}

# The most lines of a function without its signature and docstring, and functions that have more: only ever
# less, until they keep the limit.
BODY_LIMIT = 40
LONGER_BODIES: dict[str, int] = {}


def lines_of(file):
    return len(file.read_text(encoding="utf-8").splitlines())


def test_no_page_is_longer_than_its_limit():
    lengths = {
        file.relative_to(ROOT).as_posix(): (lines_of(file), limit)
        for pattern, limit in PAGE_LIMITS.items()
        for file in ROOT.glob(pattern)
    }
    assert len(lengths) > 20
    too_long = {page: n for page, (n, limit) in lengths.items() if n > LONGER_PAGES.get(page, limit)}
    assert too_long == {}
    short_enough = [page for page in LONGER_PAGES if lengths.get(page, (0, 0))[0] <= lengths[page][1]]
    assert short_enough == [], "these keep the limit: take them out of LONGER_PAGES"


@functools.cache
def sources():
    """Return the text of each module of attnreg by its path."""
    return {
        file.relative_to(ROOT).as_posix(): file.read_text("utf-8")
        for file in sorted((ROOT / "attnreg").rglob("*.py"))
    }


@functools.cache
def nodes_of(source):
    """Parse a module once for all tests."""
    return list(ast.walk(ast.parse(source)))


def bodies(source):
    """Return how many lines each function of a module has between its signature or docstring and its end."""
    found = {}
    for node in nodes_of(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            code = node.body[ast.get_docstring(node) is not None :]
            length = node.end_lineno - code[0].lineno + 1 if code else 0
            found[node.name] = max(length, found.get(node.name, 0))  # of methods of one name the longest
    return found


def test_no_functions_body_is_longer_than_its_limit():
    source = 'def f(\n    a,\n):\n    """Do.\n\n    More."""\n    a = 1\n    # why\n\n    return a\n'
    assert bodies(source) == {"f": 4}
    assert bodies('def g():\n    """Do."""\n\n\nclass A:\n    def h(self): ...\n') == {"g": 0, "h": 1}
    lengths = {
        f"{file} {name}": length
        for file, source in sources().items()
        for name, length in bodies(source).items()
    }
    too_long = {name: n for name, n in lengths.items() if n > LONGER_BODIES.get(name, BODY_LIMIT)}
    assert too_long == {}
    short_enough = [name for name in LONGER_BODIES if lengths.get(name, 0) <= BODY_LIMIT]
    assert short_enough == [], "these are gone or keep the limit: take them out of LONGER_BODIES"


def test_modules_are_in_rooms():
    outside = sorted(file.name for file in (ROOT / "attnreg").glob("*.py"))
    assert len(outside) <= MODULES_OUTSIDE_OF_ROOMS, outside


def class_names(source):
    """Return the names of a module's classes, also of those within functions and classes."""
    return [node.name for node in nodes_of(source) if isinstance(node, ast.ClassDef)]


def test_no_two_classes_have_the_same_name():
    source = "class A:\n    class B: ...\n\n\ndef f():\n    class A: ...\n"
    assert sorted(class_names(source)) == ["A", "A", "B"]
    files_of = {}
    for file, source in sources().items():
        for name in class_names(source):
            files_of.setdefault(name, []).append(file)
    assert len(files_of) > 200
    assert {name: files for name, files in files_of.items() if len(files) > 1} == {}


def test_one_thing_is_called_a_turn():
    wanted = re.compile(r"\b(class|struct) Turn\b")
    files = [file for file in (ROOT / "attnreg").rglob("*") if file.suffix in {".py", ".h", ".cpp"}]
    found = {file.relative_to(ROOT).as_posix() for file in files if wanted.search(file.read_text("utf-8"))}
    assert found == TURNS


@functools.cache
def texts(source):
    """Return the texts of a module without its docstrings; of an f-string those between its values."""
    documentation = {node.value for node in nodes_of(source) if isinstance(node, ast.Expr)}
    return {
        node.value
        for node in nodes_of(source)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in documentation
    }


def names_in(source):
    """Return the names that a module gives to arguments, variables and attributes."""
    nodes = nodes_of(source)
    bound = [node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Store)]
    names = {name for node in bound for name in (getattr(node, "id", ""), getattr(node, "attr", ""))}
    return names | {node.arg for node in nodes if isinstance(node, ast.arg)}


def test_no_name_is_a_word_that_names_nothing():
    assert names_in("def f(one):\n    found = self.given = one") == {"one", "found", "given", ""}
    names = {
        path: names_in(source) & NO_NAMES - FIELDS.get(path, set()) for path, source in sources().items()
    }
    assert {path: words for path, words in names.items() if words} == {}


def test_no_name_in_cpp_is_a_word_that_names_nothing():
    files = [
        file for suffix in ("h", "cpp", "cu") for file in sorted((ROOT / "attnreg").rglob(f"*.{suffix}"))
    ]
    assert len(files) > 20
    for file in files:
        code = re.sub(r'"(\\.|[^"\\\n])*"|//[^\n]*', "", file.read_text("utf-8"))
        assert {*re.findall(r"\w+", code)} & NO_NAMES == set(), file.name


def test_messages_call_sequences_packed_and_only_names_say_varlen():
    def amiss(source):  # an option and a subcommand have that name
        return {text for text in texts(source) if re.search(r"(?<![\w`'-])(?<!bench )varlen(?=[ ,])", text)}

    source = '"varlen calls"\nf("got varlen, not x", "--varlen x", "bench varlen", "varlen", f"varlen {x}")'
    assert amiss(source) == {"got varlen, not x", "varlen "}
    found = set().union(*map(amiss, sources().values()))
    assert found == set()


# Texts that another library fills in.
TEMPLATES = {"{task.description}", "{x:,.0f}", "Expected {expected}"}


def unfilled(source):
    """Return the texts, also those within an f-string, that have a name in braces as it stands."""
    return {text for text in texts(source) if re.search(r"\{[a-z_][^{}]*\}", text)}


def test_no_message_shows_a_name_in_braces_instead_of_its_value():
    assert unfilled('def f(x):\n    "{doc}"\n    raise E(f"{x}: " f"got {x}")\n') == set()
    assert unfilled('raise E("got {x}, not " f"{y}")\nlog("{x.name}")') == {"got {x}, not ", "{x.name}"}
    found = set().union(*map(unfilled, sources().values()))
    assert found == TEMPLATES


# What benchmarks do by themselves that `tools/measure/` does for the others, by what they call. The tensors
# of an option, of a cache, or of a module, aren't part of a case; ranks start and end a measurement together;
# an import takes a process of its own; another checkout may be older than `measure`.
OWN = {
    "two_checkouts.py": {"randn", "perf_counter"},
    "_clients.py": {"randn", "randn_like"},
    "options.py": {"randn", "rand"},
    "context_parallel.py": {"perf_counter"},
    "import_cost.py": {"perf_counter"},
}


def test_benchmarks_draw_inputs_check_results_and_take_times_by_measure():
    own = re.compile(r"\b(randn|rand|randn_like|rand_like|assert_close|allclose|perf_counter)\(")
    found = {file.name: set(own.findall(file.read_text("utf-8"))) for file in ROOT.glob("benchmarks/*.py")}
    assert {name: calls for name, calls in found.items() if calls} == OWN
