"""Promises about imports: what `import attnreg` costs, what it offers, and which module may know which."""

import ast
import functools
import importlib
import json
import os
import sys
from pathlib import Path

import pytest
from support.processes import WITHOUT_PACKAGES, forked, python

import attnreg

ROOT = Path(attnreg.__file__).parent

# The lowest first: a room knows rooms before it only. Imports under TYPE_CHECKING count as well.
LAYERS = (
    "errors, settings, torchlib, contract, launching, adaptation, backends registry, selection, times, "
    "policy, dispatch, aten, varlen, measure, masks, flash_attn, integrations, _autoload, api, assignment, "
    "lines, explanation, parallel, tuning, warmup, testing, drawing, bench, demo report, cli, __main__"
)
# What a call passes knows nothing of the other wings.
WINGS = {
    "core": "settings torchlib contract launching adaptation backends registry selection times policy "
    "dispatch aten varlen",
    "for other libraries": "masks flash_attn integrations parallel",
    "tools": "measure lines explanation tuning warmup testing drawing bench demo report cli",
}
WINGS = {wing: set(rooms.split()) for wing, rooms in WINGS.items()}
# The rooms of the third wing are where programs import them, and `backends` is where kernel authors look.
FOLDERS = ("core", "tools")
LAYER = {room: number for number, rooms in enumerate(LAYERS.split(",")) for room in rooms.split()}

# Who may import what from outside the standard library; "torch" any module may.
OUTSIDE = {
    "pydantic": {"settings"},
    "pydantic_core": {"settings"},
    "typer": {"cli"},
    "rich": {"cli", "bench"},
    "matplotlib": {"drawing", "bench", "report"},
    "packaging": {"registry"},
    "pytest": {"testing"},
    "cudnn": {"backends"},
    "flash_attn": {"backends"},
    "flash_attn_3": {"backends"},
    "transformers": {"integrations", "bench"},
}


def name_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


# The two folders are no rooms; their `__init__` is empty but for a docstring.
NO_ROOMS = {ROOT / "__init__.py", *(ROOT / folder / "__init__.py" for folder in FOLDERS)}
MODULES = {name_of(path): path for path in sorted(ROOT.rglob("*.py")) if path not in NO_ROOMS}


@functools.cache
def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def room(module):
    first, *rest = module.split(".")
    return rest[0] if first in FOLDERS and rest else first


def imports(module, only_at_import=False):
    """Return what a module imports: names below "attnreg." without it.

    `only_at_import` leaves out functions and what stands under TYPE_CHECKING.
    """
    return imports_of(MODULES[module], only_at_import)


@functools.cache
def imports_of(path, only_at_import):
    found = set()

    def visit(node):
        if only_at_import and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if only_at_import and isinstance(node, ast.FunctionDef | ast.Lambda):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full.removeprefix("attnreg.") in MODULES else node.module)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(parsed(path))
    return {name.removeprefix("attnreg.") for name in found}


def inner(module, **options):
    """Return the modules of attnreg that a module imports."""
    return {name for name in imports(module, **options) if name in MODULES}


# What `import attnreg` costs

AUDIT = """
import json, sys
before, touched = set(sys.modules), []
WATCHED = ("open", "os.listdir", "os.scandir", "ctypes.dlopen", "subprocess.Popen", "socket.connect")

def watch(event, arguments):
    if event in WATCHED and not sys._getframe(1).f_code.co_filename.startswith("<frozen importlib"):
        touched.append(f"{event} {arguments[0]}")

sys.addaudithook(watch)
exec(sys.argv[1])
roots = {name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
print(json.dumps([sorted(roots), touched]))
"""


def cost_of(statement):
    """Return the packages that a statement loads beyond Python's own, and what it opens or starts."""
    run = python("-W", "error", "-c", AUDIT, statement)
    assert (run.returncode, run.stderr) == (0, "")
    return json.loads(run.stdout)


def test_importing_attnreg_loads_nothing_but_itself_and_opens_no_file():
    assert cost_of("import attnreg; attnreg.__version__; dir(attnreg)") == [["attnreg"], []]


def test_the_check_of_what_an_import_loads_sees_files_packages_and_processes():
    loaded, touched = cost_of(
        "import attnreg.tools.cli, attnreg.core.settings.config, os, subprocess; "
        f"open({os.devnull!r}).close(); os.listdir({os.sep!r}); subprocess.run(['true'])"
    )
    assert {"attnreg", "pydantic", "typer"} <= set(loaded)
    assert {f"open {os.devnull}", f"os.listdir {os.sep}", "subprocess.Popen true"} <= set(touched)


# What it offers


def test_all_public_names_can_be_imported_and_are_at_home_where_they_say():
    for name in attnreg.__all__:
        home = importlib.import_module(f"attnreg.{attnreg._HOME[name]}")
        assert getattr(attnreg, name) is getattr(home, name)
        assert name in home.__all__
    assert len(set(attnreg.__all__)) == len(attnreg.__all__)


def test_no_name_is_offered_that_is_not_public():
    assert set(attnreg._HOME) == set(attnreg.__all__)
    namespace = {}
    exec("from attnreg import *", namespace)  # noqa: S102
    assert set(namespace) - {"__builtins__"} == set(attnreg.__all__)
    assert set(attnreg.__all__) <= set(dir(attnreg))


def test_type_checkers_see_the_same_names_from_the_same_modules():
    tree = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if ast.unparse(node).startswith("if TYPE_CHECKING:"))
    declared = {
        alias.name: node.module.removeprefix("attnreg.")
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert declared == attnreg._HOME


def test_a_name_that_is_not_there_is_an_attribute_error_as_anywhere():
    with pytest.raises(AttributeError) as error:
        attnreg.register_backends  # noqa: B018
    assert str(error.value) == "module 'attnreg' has no attribute 'register_backends'"


def test_parts_that_have_names_of_their_own_need_no_import():
    lines = "print(attnreg.flash_attn.flash_attn_func.__name__, attnreg.integrations.transformers.NAME)"
    done = forked("import attnreg\n" + lines)
    assert (done.returncode, done.stdout) == (0, "flash_attn_func attnreg\n"), done.stderr


def test_every_name_in_an_all_is_there():
    for name in MODULES:
        if name != "__main__":
            module = importlib.import_module(f"attnreg.{name}")
            assert {n for n in getattr(module, "__all__", ()) if not hasattr(module, n)} == set(), name


ALONE = """
import gc, json, os, sys, warnings
warnings.simplefilter("error")
import packaging.version, pydantic, pytest, rich.progress, rich.table, torch, torch.utils.flop_counter, typer
import matplotlib.figure, statistics, tomllib
gc.disable()
gc.freeze()
assert "attnreg.errors" not in sys.modules
behind = json.loads(sys.argv[1])

def visit(names):
    for name in names:
        child = os.fork()
        if not child:
            __import__(f"attnreg.{name}")
            visit(behind[name])
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            print(name)

visit(behind[""])
"""


inner_at_import = functools.cache(functools.partial(inner, only_at_import=True))


@functools.cache
def needed(module):
    """Return the modules that are loaded once a module is imported, without itself."""
    found, new = set(), {module}
    while new:
        found |= new
        parents = {name[:end] for name in new for end, letter in enumerate(name) if letter == "."} & set(
            MODULES
        )
        new = parents.union(*map(inner_at_import, new)) - found
    return found - {module}


def behind():
    """Return the modules to import next in a process that has imported a module; those of "" are first.

    Each is behind the one of those that it needs which loads the most: so nothing is loaded that it doesn't
    need.
    """
    found = {module: [] for module in ("", *MODULES)}
    for module in sorted(set(MODULES) - {"__main__"}):
        found[max(sorted(needed(module)), key=lambda name: len(needed(name)), default="")].append(module)
    return found


@pytest.mark.slow
def test_every_module_can_be_imported_first():
    # Forked from a process that has what they all use, which takes longer than they do.
    tree = behind()
    tree[""].append("no_such_module")
    run = forked(ALONE, json.dumps(tree), TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert run.stdout.split() == ["no_such_module"]
    assert run.stderr.count("Traceback") == 1


# Which module may know which


def test_every_module_has_its_place_in_the_layers():
    assert {room(module) for module in MODULES} == set(LAYER)


def test_what_a_call_passes_imports_no_other_wing():
    wing_of = {room: wing for wing, rooms in WINGS.items() for room in rooms}
    assert set(LAYER) - set(wing_of) == {"errors", "_autoload", "api", "assignment", "__main__"}
    assert {room(name) for name in MODULES if name.startswith("core.")} == WINGS["core"] - {"backends"}
    assert {room(name) for name in MODULES if name.startswith("tools.")} == WINGS["tools"] - {"testing"}
    arrows = {
        (module, name)
        for module in MODULES
        if room(module) in WINGS["core"]
        for name in inner(module)
        if room(name) != "errors" and wing_of.get(room(name)) != "core"
    }
    assert arrows == set()


def test_a_decision_needs_no_torch():
    modules = sorted(name for name in MODULES if name.startswith("core.selection"))
    lines = [f"import attnreg.{module}; print({module!r})" for module in (*modules, "core.dispatch.planning")]
    run = python("-c", "\n".join(("import sys; sys.modules['torch'] = None", *lines)))
    assert run.stdout.split() == modules
    assert "ModuleNotFoundError: import of torch halted" in run.stderr


def test_a_module_imports_lower_rooms_only():
    for module in MODULES:
        others = {name for name in inner(module) if room(name) != room(module)}
        assert {name for name in others if LAYER[room(name)] >= LAYER[room(module)]} == set(), module


def test_no_module_imports_itself_by_way_of_others():
    done, path = set(), []

    def visit(module):
        assert module not in path, " -> ".join([*path, module])
        if module not in done:
            path.append(module)
            for name in inner(module):
                visit(name)
            done.add(path.pop())

    for module in MODULES:
        visit(module)


def test_a_backend_knows_its_own_folder_and_no_other_backend():
    files = [module for module in MODULES if module.startswith("backends.")]
    assert "backends.math" in files
    for module in files:
        own = module.split(".")[1]
        others = {name.split(".")[1] for name in inner(module) if name.startswith("backends.")}
        assert others <= {own}, module


def test_no_other_room_imports_a_backend():
    known = {name for module in MODULES if room(module) != "backends" for name in inner(module)}
    assert {name for name in known if name.startswith("backends.")} == set()


def test_measure_knows_the_contract_only():
    known = {name for module in MODULES if room(module) == "measure" for name in inner(module)}
    below = ("contract.spec", "contract.capabilities", "contract.backend", "contract.options")
    below += ("launching.launchers", "launching.validation", "registry.known_issues")
    allowed = {"errors", *(f"core.{name}" for name in below)}
    assert {name for name in known if room(name) != "measure"} <= allowed


def test_looking_a_call_up_needs_no_torch_and_nothing_that_measures():
    names = ("kinds", "points", "table", "index", "lookup")
    pure = {f"core.times.{name}" for name in names}
    # Tables are files that are written whole.
    files = "core.torchlib.caches"
    below = {"errors", "core.contract.spec", "core.contract.options", "core.selection.predictions", files}
    for module in pure:
        assert inner(module, only_at_import=True) <= pure | below, module
    for module in (*pure, files):
        assert "torch" not in imports(module), module
    # Comparing environments needs none.
    assert "torch" not in imports("core.times.tables", only_at_import=True)


def test_only_the_programs_on_top_use_the_public_names():
    users = {room(module) for module in MODULES if "attnreg" in imports(module)}
    assert users <= {"cli", "demo"}


def test_a_package_from_outside_is_imported_where_it_belongs_only():
    found = {}
    for module in MODULES:
        for name in imports(module):
            package = name.partition(".")[0]
            if package not in sys.stdlib_module_names and room(name) not in LAYER and package != "attnreg":
                found.setdefault(package, set()).add(room(module))
    found.pop("torch")
    assert found.keys() <= OUTSIDE.keys()
    assert {package: rooms for package, rooms in found.items() if not rooms <= OUTSIDE[package]} == {}


def test_a_backend_imports_a_kernel_package_inside_a_function_only():
    for module in MODULES:
        if room(module) == "backends":
            outside = {
                name.partition(".")[0] for name in imports(module, only_at_import=True) if name not in MODULES
            }
            assert outside <= {"torch", *sys.stdlib_module_names}, module


@pytest.mark.parametrize(
    ("source", "seen"),
    [
        ("import attnreg.core.policy.current", {"core.policy.current"}),
        ("from attnreg.core.policy import current", {"core.policy.current"}),
        ("from attnreg.core.aten import flash, ensure", {"core.aten.flash", "core.aten"}),
        ("def f():\n    from attnreg.core.policy import current", {"core.policy.current"}),
        ("if TYPE_CHECKING:\n    from attnreg.core.policy import current", {"core.policy.current"}),
        ("import torch, attnreg", set()),
    ],
)
def test_the_import_graph_has_every_form_of_import(source, seen, monkeypatch, tmp_path):
    file = tmp_path / "sample.py"
    file.write_text(source)
    monkeypatch.setitem(MODULES, "sample", file)
    assert inner("sample") == seen
    deferred = source.startswith(("def", "if"))
    assert inner("sample", only_at_import=True) == (set() if deferred else seen)


# Conditions that only tell the type checker what is so anyway.
NARROWING = {"rest is not None", "part is not None", "isinstance(out, torch.Tensor)"}


def test_no_check_is_an_assert_so_that_python_without_asserts_refuses_the_same():
    found = {
        module: ast.unparse(node)
        for module, path in MODULES.items()
        for node in ast.walk(parsed(path))
        if (isinstance(node, ast.Assert) and ast.unparse(node.test) not in NARROWING)
        or (isinstance(node, ast.Name) and node.id == "__debug__")
    }
    assert found == {}


def test_registering_and_running_a_backend_needs_no_pydantic():
    program = (
        "import sys, torch, attnreg, torch.nn.functional as F\n"
        "attnreg.register_backend('math')\n"
        "x = torch.randn(1, 2, 4, 8)\n"
        "F.scaled_dot_product_attention(x, x, x)\n"
        "assert attnreg.stats().calls == {'math': {'forward': 1, 'backward': 0}}\n"
        "print([name for name in ('pydantic', 'rich', 'typer') if name in sys.modules])"
    )
    run = forked(WITHOUT_PACKAGES + program)
    assert run.stdout.split("\n")[0] == "[]", run.stdout + run.stderr
