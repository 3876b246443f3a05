"""A file imports only files above it: the list below, read against every import of the package."""

import ast
import fnmatch
import pathlib

import pytest

import tokamax

PACKAGE = pathlib.Path(tokamax.__file__).parent
SRC = PACKAGE / "_src"

# Top to bottom: a module may import what stands above its own line. `*` is any name that no line spells out; modules
# of one such line are on a level and leave each other alone.
ORDER = """
errors
shapes
options
tpus
devices
resources
exporting
registry
serialization
environment
files
tables
bound_arguments
notation
op
estimates
capture
xspace
profiles
timing
numerics
inputs
benchmarking
autotuning/outcome
autotuning/gate
autotuning/journal
autotuning/worker
autotuning/processes
autotuning/isolation
autotuning/limits
autotuning/state
autotuning/search
autotuning/autotuner
costmodel/features
costmodel/dataset
costmodel/trees
costmodel/modelfile
costmodel/neighbours
costmodel/model
costmodel/rivals
costmodel/evaluate
autotuning/guide
autotuning/summary
autotuning/keyed
autotuning/estimated
autotuning/result
autotuning/store
autotuning/housekeeping
autotuning/session
aot/worker
aot/verdict
aot/processes
aot/check
aot/tune
training
dispatch
suggest
explanation
checking
tuning
report/sweeps
report/judged
report/content
report/svg
report/figures
report/style
report/page
ops/*
ops/*/base
ops/ragged_dot/megablox
ops/ragged_dot/tpu_estimate
ops/dot_product_attention/splash
ops/*/*
ops/*/api
api
tools/common
tools/targets
tools/*
tools/cli
tools/xplane_to_bound_args
""".split()

# Kernels never learn who chose their config: dispatch, stores and models are closed to them.
CLOSED_TO_OPS = ("dispatch", "api", "autotuning/*", "costmodel/*")


def name_of(path: pathlib.Path) -> str:
    return path.relative_to(SRC).with_suffix("").as_posix()


MODULES = {name_of(path): path for path in sorted(SRC.rglob("*.py")) if path.name != "__init__.py"}


def level(name: str) -> int:
    """The line of a module; of several that fit, the longest says most about it."""
    return ORDER.index(max((pattern for pattern in ORDER if fnmatch.fnmatchcase(name, pattern)), key=len))


def imports(path: pathlib.Path) -> list[str]:
    """Dotted names of everything a file imports, at its top or in its functions."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute here"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def own_imports(path: pathlib.Path) -> set[str]:
    """Modules of the package that a file imports, as in `ORDER`; a name inside a module counts as the module."""
    found = set()
    for dotted in imports(path):
        if dotted.split(".")[0] != "tokamax":
            continue
        if not dotted.startswith("tokamax._src."):
            assert path.parent.name == "tools", f"{path} imports {dotted}: public names are for users and tools"
            continue
        name = dotted.removeprefix("tokamax._src.").replace(".", "/")
        module = name if name in MODULES else name.rpartition("/")[0]
        assert module in MODULES, f"{path} imports {dotted}: no such module"
        found.add(module)
    return found


def is_foreign(other: str, name: str) -> bool:
    """Whether a module belongs to another op family; what lies directly in `ops` belongs to all of them."""
    return other.count("/") > 1 and other.split("/")[:2] != name.split("/")[:2]


@pytest.mark.parametrize("name", MODULES)
def test_module_stands_in_the_list(name):
    assert any(fnmatch.fnmatchcase(name, pattern) for pattern in ORDER), f"give {name} its place in ORDER"


@pytest.mark.parametrize("pattern", ORDER)
def test_list_names_modules_that_exist(pattern):
    assert fnmatch.filter(MODULES, pattern)


@pytest.mark.parametrize("name", MODULES)
def test_imports_only_what_stands_above(name):
    below = {other for other in own_imports(MODULES[name]) if level(other) >= level(name)}
    assert not below, f"{name} imports {sorted(below)}, which stand on its level or below it"


@pytest.mark.parametrize("name", fnmatch.filter(MODULES, "ops/*"))
def test_ops_know_neither_dispatch_nor_stores_nor_models(name):
    used = own_imports(MODULES[name])
    closed = {other for other in used if any(fnmatch.fnmatchcase(other, pattern) for pattern in CLOSED_TO_OPS)}
    foreign = {other for other in used if is_foreign(other, name)}
    assert not closed | foreign


@pytest.mark.parametrize("name", [name for name in MODULES if not name.startswith("ops/")])
def test_only_the_public_package_imports_ops(name):
    assert not {other for other in own_imports(MODULES[name]) if other.startswith("ops/")}


@pytest.mark.parametrize("path", sorted(SRC.rglob("__init__.py")), ids=lambda path: path.parent.name)
def test_inner_packages_hold_nothing(path):
    body = ast.parse(path.read_text()).body
    assert not [node for node in body if not isinstance(node, ast.Expr)]


def test_the_package_only_re_exports():
    for node in ast.parse((PACKAGE / "__init__.py").read_text()).body[1:]:
        assert isinstance(node, ast.ImportFrom), f"line {node.lineno}"
        assert all(alias.asname == alias.name for alias in node.names), f"line {node.lineno}: write `X as X`"
