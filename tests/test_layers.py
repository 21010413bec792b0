"""The layers of the source: a package imports only from packages above it in `LAYERS`.

A package is a layer as a whole, but for its own packages in the table; so is a module at the top. Those of one row
do not import each other, and imports form no cycle. A package that is not in the table fails the test. Imports
inside functions and under TYPE_CHECKING count like any other. "Reading the source" in the README is the same for
people.
"""

from __future__ import annotations

import ast
import functools
import graphlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent

COMPILED = ("exmy._kernels", "tstore.core.format.kernels")

# Names are relative to tstore; "" is tstore/__init__.py.
LAYERS: list[tuple[str, ...]] = [
    ("errors",),
    ("sharding", "core.hints", "core.runtime", "core.format"),
    ("core.format.arrays",),
    ("core.format.objects",),
    ("core.format.tree",),
    ("core.storage",),
    ("core.data", "core.log"),
    ("core.array",),
    ("core.calls",),
    ("core.snapshot",),
    ("core.transactions", "core.maintenance", "core.following"),
    ("core.store",),
    ("core.copying", "core.pickling", "core.steps"),
    ("core.opening", "core.tags"),
    ("core", "zarr"),
    ("quantization",),
    ("checkpoint", "service.statistics"),
    ("convert", "jax", "torch"),
    ("service.server",),
    ("service.page",),
    ("service", "tiers"),
    ("",),
    ("sync", "lab.conformance", "lab.hosts"),
    ("lab.demo", "lab.simulation", "trainers"),
    ("lab",),
    ("cli",),
    ("__main__",),
]

LONGEST = 450  # lines; a module has fewer, most of them fewer than 400


@dataclass(frozen=True)
class Import:
    """One imported name: `from module import name`, or `import module` with no name."""

    module: str
    name: str
    line: int


@dataclass(frozen=True)
class Module:
    """A source file: its dotted name, its docstring and its imports."""

    name: str
    path: Path
    text: str

    @property
    def package(self) -> str:
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]

    @property
    def docstring(self) -> str:
        return self._parsed[0]

    @property
    def imports(self) -> list[Import]:
        return self._parsed[1]

    @functools.cached_property
    def _parsed(self) -> tuple[str, list[Import]]:
        syntax = ast.parse(self.text, str(self.path))
        return ast.get_docstring(syntax) or "", list(imports_in(syntax, self.package))


def modules_of(folder: Path) -> dict[str, Module]:
    modules = {}
    for path in sorted(folder.rglob("*.py")):
        parts = [folder.name, *path.relative_to(folder).with_suffix("").parts]
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules[name] = Module(name, path, path.read_text())
    return modules


def imports_in(syntax: ast.Module, package: str) -> Iterator[Import]:
    for node in ast.walk(syntax):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield Import(alias.name, "", node.lineno)
            case ast.ImportFrom(module=origin, names=names, level=level):
                base = package.split(".")
                base = base[: len(base) - level + 1] if level else []
                for alias in names:
                    yield Import(".".join([*base, *([origin] if origin else [])]), alias.name, node.lineno)
            case ast.Call(
                func=ast.Name(id=name) | ast.Attribute(attr=name), args=[ast.Constant(value=str(to)), *_]
            ):
                if name in ("import_module", "__import__"):
                    yield Import(to, "", node.lineno)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def layer_of(module: str, layers: Sequence[Sequence[str]]) -> str:
    """Return the innermost package of a module that is in a layer, or else its outermost one."""
    name = module.partition(".")[2]
    known = [layer for row in layers for layer in row if within(name, layer)]
    return max(known, key=len, default=name.partition(".")[0])


def targets_of(module: Module, modules: Mapping[str, Module]) -> Iterator[tuple[str, int]]:
    """Yield the full names of the modules of its own library that a module imports, with line numbers."""
    for import_ in module.imports:
        full = f"{import_.module}.{import_.name}"
        if full in COMPILED:
            continue
        target = full if full in modules else import_.module
        if target.partition(".")[0] == module.name.partition(".")[0] and target != module.name:
            yield target, import_.line


def layer_faults(modules: Mapping[str, Module], layers: Sequence[Sequence[str]]) -> list[str]:
    level = {name: number for number, layer in enumerate(layers) for name in layer}
    faults = [
        f"{name} is in no layer: give its package a place in LAYERS"
        for name in modules
        if layer_of(name, layers) not in level
    ]
    for module in modules.values():
        own = layer_of(module.name, layers)
        for target, line in targets_of(module, modules):
            other = layer_of(target, layers)
            if target not in modules:
                faults.append(f"{module.name}:{line} imports {target}, which does not exist")
            elif own in level and other in level and other != own and level[other] >= level[own]:
                faults.append(f"{module.name}:{line} imports {target}, which is not in a layer below it")
    return faults


def cycle_faults(modules: Mapping[str, Module]) -> list[str]:
    imports = {
        module.name: {target for target, _ in targets_of(module, modules) if target in modules}
        for module in modules.values()
    }
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        return [f"imports go in a circle: {' -> '.join(reversed(error.args[1]))}"]
    return []


def foreign_faults(modules: Mapping[str, Module], forbidden: str) -> list[str]:
    return [
        f"{module.name}:{import_.line} imports {import_.module}, and must know nothing of {forbidden}"
        for module in modules.values()
        for import_ in module.imports
        if within(import_.module, forbidden)
    ]


def privacy_faults(modules: Mapping[str, Module]) -> list[str]:
    faults = []
    for module in modules.values():
        for import_ in module.imports:
            parts = [*import_.module.split("."), import_.name]
            private = [i for i, part in enumerate(parts) if part.startswith("_") and not part.startswith("__")]
            if private and ".".join(parts[: private[0]]) not in owners(module, modules):
                name = ".".join(part for part in parts if part)
                faults.append(f"{module.name}:{import_.line} imports the private name {name} of another package")
    return faults


def owners(module: Module, modules: Mapping[str, Module]) -> set[str]:
    return {module.package} | {other.name for other in modules.values() if other.package == module.package}


def form_faults(modules: Mapping[str, Module]) -> list[str]:
    faults = []
    for module in modules.values():
        lines = len(module.text.splitlines())
        if lines >= LONGEST:
            faults.append(f"{module.name} has {lines} lines, and must have fewer than {LONGEST}: split it")
        if not module.docstring:
            faults.append(f"{module.name} has no docstring: say what it is")
    return faults


def guide_faults(modules: Mapping[str, Module]) -> list[str]:
    """Return faults of modules that their package docstring does not name, as `name` or by a prefix, `http_…`."""
    faults = []
    for module in modules.values():
        package, _, name = module.name.rpartition(".")
        if package in ("", "tstore") or name.startswith("_"):
            continue
        guide = modules[package].docstring
        forms = (f"`{name}`", f"`{name}/`", f"`{name.partition('_')[0]}_…`")
        if not any(form in guide for form in forms):
            faults.append(f"{module.name} is not named at the top of {package}/__init__.py: say what it is for")
    return faults


# ---- the source


TSTORE = modules_of(REPOSITORY / "tstore")
EXMY = modules_of(REPOSITORY / "codecs" / "exmy")


def test_the_source_was_found() -> None:
    assert "tstore.errors" in TSTORE
    assert "exmy" in {name.partition(".")[0] for name in EXMY}


def test_every_package_is_in_one_layer() -> None:
    names = [name for layer in LAYERS for name in layer]
    assert sorted(names) == sorted({layer_of(name, LAYERS) for name in TSTORE})


def test_packages_import_only_from_layers_below() -> None:
    assert layer_faults(TSTORE, LAYERS) == []


def test_imports_are_acyclic() -> None:
    assert cycle_faults(TSTORE) + cycle_faults(EXMY) == []


def test_exmy_knows_nothing_of_tstore() -> None:
    assert foreign_faults(EXMY, "tstore") == []


def test_no_private_name_crosses_packages() -> None:
    assert privacy_faults(TSTORE) + privacy_faults(EXMY) == []


def test_every_module_is_short_and_documented() -> None:
    assert form_faults(TSTORE) + form_faults(EXMY) == []


def test_every_package_documents_its_modules() -> None:
    assert guide_faults(TSTORE) + guide_faults(EXMY) == []


def test_the_readme_names_every_top_level_module() -> None:
    guide = (REPOSITORY / "README.md").read_text().partition("## Reading the source")[2]
    packages = [f"{path.parent.name}/" for path in (REPOSITORY / "tstore").glob("*/__init__.py")]
    modules = [path.stem for path in (REPOSITORY / "tstore").glob("[a-z]*.py")]
    assert [name for name in sorted([*packages, *modules]) if name not in guide.split()] == []


# ---- the test itself, on a fabricated tree


def fabricated(folder: Path, files: Mapping[str, str]) -> dict[str, Module]:
    root = folder / "tstore"
    base = {
        "__init__.py": '"""t."""',
        "low.py": '"""l."""',
        "high.py": '"""h."""',
        "kv/__init__.py": '"""k."""',
    }
    for name, text in (base | {"kv/base.py": '"""b."""'} | dict(files)).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return modules_of(root)


ORDER = [("low", "lower"), ("kv",), ("high",), ("",), ("testing",)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("low.py", "import tstore.high"),
        ("low.py", "import tstore.high as h"),
        ("low.py", "from tstore.high import thing"),
        ("low.py", "from tstore import high"),
        ("low.py", "from . import high"),
        ("low.py", "from .high import thing"),
        ("low.py", "def f():\n    from tstore.high import thing"),
        ("low.py", "class C:\n    def f(self):\n        import tstore.high"),
        ("low.py", "if TYPE_CHECKING:\n    from tstore.high import thing"),
        ("low.py", "import importlib\nimportlib.import_module('tstore.high')"),
        ("low.py", "__import__('tstore.high')"),
        ("low.py", "import tstore"),
        ("low.py", "from tstore import save"),
        ("kv/base.py", "from .. import high"),
        ("kv/base.py", "from ..high import thing"),
        ("kv/__init__.py", "from .. import high"),
        ("kv/local.py", "from tstore.testing import model"),
        ("high.py", "from tstore.testing.model import transformer"),
        ("lower.py", "import tstore.low"),
        ("low.py", "import tstore.gone"),
    ],
)
def test_an_import_from_above_is_detected(tmp_path: Path, name: str, text: str) -> None:
    files = {"testing/__init__.py": "", "testing/model.py": "", name: text}
    [fault] = layer_faults(fabricated(tmp_path, files), ORDER)
    assert fault.startswith("tstore." + name.removesuffix(".py").replace("/", ".").removesuffix(".__init__"))
    assert "imports tstore" in fault


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "high.py",
            "from tstore.low import x\nfrom tstore.kv import base\nimport tstore.kv.base, os, json.decoder",
        ),
        ("kv/local.py", "from . import base\nfrom .base import x\nfrom ..low import y"),
        ("kv/__init__.py", "from ..low import y"),
        ("testing/model.py", "import tstore, tstore.high"),
        ("__init__.py", "from tstore.high import x"),
        ("low.py", "import tstore_other"),
    ],
)
def test_an_import_from_below_or_beside_is_fine(tmp_path: Path, name: str, text: str) -> None:
    assert layer_faults(fabricated(tmp_path, {name: text}), ORDER) == []


def test_a_package_within_a_package_may_be_a_layer_of_its_own(tmp_path: Path) -> None:
    order = [("kv",), ("kv.disk",), ("low",)]
    files = {"kv/disk/__init__.py": "from tstore.kv import base", "low.py": "from tstore.kv.disk import x"}
    only = {
        name: module
        for name, module in fabricated(tmp_path, files).items()
        if name not in ("tstore", "tstore.high")
    }
    assert layer_faults(only, order) == []
    files["kv/base.py"] = "from tstore.kv import disk"
    [fault] = layer_faults({**only, "tstore.kv.base": fabricated(tmp_path, files)["tstore.kv.base"]}, order)
    assert fault.startswith("tstore.kv.base:1 imports tstore.kv.disk")


def test_a_module_in_no_layer_is_detected(tmp_path: Path) -> None:
    assert layer_faults(fabricated(tmp_path, {"new.py": ""}), ORDER) == [
        "tstore.new is in no layer: give its package a place in LAYERS"
    ]


def test_an_import_cycle_inside_a_package_is_detected(tmp_path: Path) -> None:
    files = {"kv/base.py": "from tstore.kv import local", "kv/local.py": "def f():\n    import tstore.kv.base"}
    modules = fabricated(tmp_path, files)
    assert layer_faults(modules, ORDER) == []
    [fault] = cycle_faults(modules)
    assert "tstore.kv.base" in fault
    assert "tstore.kv.local" in fault
    assert cycle_faults(fabricated(tmp_path, {"kv/base.py": ""})) == []


def test_a_foreign_import_is_detected(tmp_path: Path) -> None:
    modules = fabricated(tmp_path, {"low.py": "def f():\n    from numpy.random import x"})
    assert foreign_faults(modules, "numpy") == [
        "tstore.low:2 imports numpy.random, and must know nothing of numpy"
    ]
    assert foreign_faults(modules, "num") == []


@pytest.mark.parametrize(
    ("text", "detected"),
    [
        ("from tstore.kv.base import _x", True),
        ("from exmy import _kernels", True),
        ("from exmy._kernels import x", True),
        ("import exmy._kernels", True),
        ("from tstore.kv import _base", True),
        ("from tstore.high import _x", False),
        ("from tstore import _x", False),
        ("from . import _x", False),
        ("from __future__ import annotations", False),
        ("from tstore import __version__", False),
    ],
)
def test_a_private_name_across_packages_is_detected(tmp_path: Path, text: str, detected: bool) -> None:
    assert bool(privacy_faults(fabricated(tmp_path, {"low.py": text}))) == detected


def test_a_module_that_its_package_does_not_name_is_detected(tmp_path: Path) -> None:
    files = {"kv/__init__.py": '"""`http`; `gcs_…`."""', "kv/http.py": "", "kv/gcs_login.py": "", "kv/s3.py": ""}
    faults = [fault.split(" is ")[0] for fault in guide_faults(fabricated(tmp_path, files))]
    assert faults == ["tstore.kv.base", "tstore.kv.s3"]


def test_long_and_undocumented_modules_are_detected(tmp_path: Path) -> None:
    long, fine = ('"""l."""\n' + "x = 1\n" * lines for lines in (LONGEST - 1, LONGEST - 2))
    faults = form_faults(fabricated(tmp_path, {"long.py": long, "fine.py": fine, "bare.py": "x = 1"}))
    assert [fault.split(" has ")[0] for fault in faults] == ["tstore.bare", "tstore.long"]
