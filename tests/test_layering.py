"""The layers of the code: imports point down, the core is pure, modules and functions are short."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "kvfuse"
MODULE_LINES_MAX = 500
FUNCTION_LINES_MAX = 60

# The packages, lowest first: one imports those before it, and never one after it. What lies in no
# package stands here by its own name.
LAYERS = [
    *("core", "system", "disks", "catalog", "space", "heart", "verbs", "cleaning", "scan", "pool"),
    *("drivers", "control", "steward", "supervision", "doctor", "daemon", "output", "bench"),
    *("cli", "__main__"),
]
# What has effects or asks the machine: the core gets time, randomness, environment as arguments.
IMPURE = {
    *("os", "pathlib", "shutil", "tempfile", "ctypes", "fcntl", "mmap", "socket", "select"),
    *("time", "random", "secrets", "uuid", "logging", "signal"),
    *("threading", "subprocess", "multiprocessing", "asyncio", "trio"),
    *("lmdb", "pyfuse3", "prometheus_client", "click", "rich"),
}


def names_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {names_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
PURE = [name for name in MODULES if name.partition(".")[0] == "core"]
PURE += ["drivers.direct.abi", "drivers.direct.protocol"]


def layer_of(module: str) -> int | None:
    package = module.partition(".")[0]
    return LAYERS.index(package) if package in LAYERS else None


def walk(node: ast.AST, *, into_functions: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        yield child
        if into_functions or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from walk(child, into_functions=into_functions)


def imports(module: str, *, into_functions: bool = True) -> set[str]:
    """Return the dotted names *module* imports, those of kvfuse without the package's name."""
    found = set()
    for node in walk(ast.parse(MODULES[module].read_bytes()), into_functions=into_functions):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{MODULES[module]}:{node.lineno}: relative import"
            base = (node.module or "").removeprefix("kvfuse").removeprefix(".")
            if not (node.module or "").startswith("kvfuse"):
                found.add(node.module or "")
                continue
            for alias in node.names:
                full = f"{base}.{alias.name}" if base else alias.name
                found.add(f"kvfuse.{full if full in MODULES else base}".rstrip("."))
    return found


def own_imports(module: str, *, into_functions: bool = True) -> set[str]:
    found = imports(module, into_functions=into_functions)
    return {name.removeprefix("kvfuse.") for name in found if name.startswith("kvfuse.")}


@pytest.mark.parametrize("module", [name for name in MODULES if name])
def test_every_module_has_a_layer(module):
    """A module that the table does not know is given a layer before it is merged."""
    assert layer_of(module) is not None, f"{MODULES[module]}: put its package into {__file__}"


def test_package_itself_imports_nothing():
    """`import kvfuse` is free, and cannot start a cycle."""
    assert imports("") == set()


@pytest.mark.parametrize("module", [name for name in MODULES if name])
def test_imports_point_down(module):
    """A module imports its own package or lower ones, inside functions too."""
    for imported in own_imports(module):
        target = layer_of(imported)
        assert target is not None, f"{module} imports {imported}, which is in no layer"
        assert target <= layer_of(module), f"{module} imports {imported}, which is above it"


def test_imports_have_no_cycle():
    """Modules can be imported in any order: no import at the top of one leads back to it."""
    graph = {name: own_imports(name, into_functions=False) - {name} for name in MODULES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as exc:
        pytest.fail(" -> ".join(exc.args[1]))


@pytest.mark.parametrize("module", [name for name in PURE if name in MODULES])
def test_core_is_pure(module):
    """No clock, no randomness, no system call and no FUSE in the core, nor in what it imports."""
    assert {name.partition(".")[0] for name in imports(module)} & IMPURE == set()
    assert own_imports(module) <= set(PURE)


@pytest.mark.parametrize("module", MODULES)
def test_modules_are_short(module):
    """A module of over 500 lines has more than one noun in it."""
    lines = len(MODULES[module].read_text().splitlines())
    assert lines <= MODULE_LINES_MAX, f"{MODULES[module]}: {lines} lines"


@pytest.mark.parametrize("module", MODULES)
def test_functions_are_short(module):
    """A function of over 60 lines does more than one thing."""
    for node in ast.walk(ast.parse(MODULES[module].read_bytes())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            where = f"{MODULES[module]}:{node.lineno}: {node.name}"
            assert lines <= FUNCTION_LINES_MAX, f"{where}: {lines} lines"


def test_table_names_what_there_is():
    """A layer that nothing is in would hide a mistake in its name."""
    assert {name.partition(".")[0] for name in MODULES if name} == set(LAYERS)
