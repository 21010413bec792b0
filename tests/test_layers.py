"""The layers of the source: a module imports only from layers below its own.

`LAYERS` has the place of each, lowest layer first; "Reading the source" in the README is the same for people. The
command line stands above `testing`, whose suite `tstore probe` runs and whose hosts `tstore demo` starts. A module
that is not in the table fails the test: give it a place. Imports inside functions and under TYPE_CHECKING count
like any other.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent

# Names are relative to tstore; "" is tstore/__init__.py.
LAYERS: list[tuple[str, ...]] = [
    ("errors",),
    ("bounds",),
    ("arguments", "layout", "sharding", "threads", "turns", "world"),
    ("chunks", "chunks.grid", "chunks.table"),
    ("pool", "chunks.compressors"),
    ("chunks.chain",),
    ("chunks.metadata", "checkpoint", "checkpoint.leaves"),
    ("commits", "commits.frame", "commits.wellformed", "checkpoint.shards"),
    ("commits.references",),
    ("commits.manifest",),
    (
        "commits.tree",
        "checkpoint.patterns",
        "checkpoint.structure",
        "commits.retention",
        "transactions",
        "transactions.tags",
        "transactions.lifecycle",
    ),
    ("transactions.fragments", "commits.validation", "commits.condemned"),
    ("quantization.policy", "commits.queue"),
    ("kv", "kv.base"),
    ("kv.newfile", "kv.objects", "kv.plain", "kv.http_answer", "kv.secret_file"),
    ("kv.http_token", "kv.pace", "kv.room"),
    ("kv.http_body",),
    ("kv.http_reply",),
    ("kv.http_session", "kv.http_pass", "kv.gcs_login", "kv.s3_answer", "kv.s3_session"),
    ("kv.gcs_answer", "kv.local_pack"),
    ("kv.listing", "kv.upload", "kv.retry", "kv.limits", "kv.trace", "kv.prefix", "kv.readonly", "kv.faults"),
    ("kv.memory", "kv.local", "kv.http", "kv.gcs", "kv.s3", "kv.fsspec"),
    ("kv.remote", "kv.cache", "kv.watch"),
    ("kv.cached",),
    ("kv.url",),
    ("kv.probe",),
    ("commits.objects", "commits.recent", "commits.search", "marker", "chunks.writer", "chunks.boxes"),
    ("commits.records",),
    ("commits.log",),
    ("chunks.reader", "commits.expiry"),
    ("chunks.packed", "commits.history"),
    ("array",),
    ("snapshot", "transactions.staged_array", "transactions.group", "transactions.read_set"),
    ("transactions.staged_tree", "transactions.roster"),
    ("transactions.validation",),
    ("transactions.transaction",),
    ("check", "collect", "contents", "repair"),
    ("diff",),
    ("store",),
    (
        "quantization",
        "quantization.allocation",
        "quantization.regrid",
        "quantization.report",
        "quantization.request",
        "quantization.values",
    ),
    ("quantization.study",),
    ("quantization.encoding",),
    ("quantization.plan", "quantization.work", "quantization.plot"),
    ("checkpoint.steps",),
    ("checkpoint.save", "checkpoint.restore"),
    ("copying", "copying.inventory", "copying.source_records"),
    ("copying.destination",),
    ("copying.shipment",),
    ("copying.copy",),
    ("quantization.quantize", "convert", "convert.safetensors_header"),
    ("convert.safetensors",),
    ("convert.checkpoint",),
    ("",),
    ("server.names", "server.limits", "server.answers", "server.access", "server.journal", "server.listings"),
    ("server.metadata", "server.shares", "server.spool", "server.transfers", "server.connections"),
    ("server.served", "server.listening", "server.standing"),
    ("server.folder", "server.bodies", "server.admission"),
    ("server.storing",),
    ("server.app",),
    ("server.running",),
    ("background",),
    ("sync", "server"),
    ("testing", "testing.model", "testing.hosts", "testing.faults", "testing.virtual"),
    ("testing.weather", "testing.miniature", "testing.store_model"),
    ("testing.storage",),
    ("testing.history", "testing.racers", "testing.relay", "testing.benchmark"),
    ("testing.subject", "testing.retained"),
    ("testing.promises", "testing.checker"),
    ("testing.conformance", "testing.site"),
    ("testing.edits",),
    ("testing.groups",),
    ("testing.upkeep", "testing.judge", "testing.scenario"),
    ("testing.workload",),
    ("testing.simulation",),
    ("testing.fuzz", "testing.fuzz.journal"),
    ("testing.fuzz.timeline", "testing.fuzz.odd"),
    ("testing.fuzz.worker",),
    ("testing.fuzz.transactions", "testing.fuzz.checkpoints", "testing.fuzz.places"),
    ("testing.fuzz.verbs",),
    ("testing.fuzz.crew",),
    ("testing.fuzz.episode",),
    ("testing.fuzz.__main__",),
    ("cli.text",),
    ("cli.columns", "cli.progress"),
    ("cli.tables", "cli.console", "cli.demo"),
    ("cli.bench", "cli.copy", "cli.gc", "cli.probe", "cli.quantize", "cli.repair", "cli.serve"),
    ("cli.commands",),
    ("cli",),
    ("__main__",),
]

# What a module may import besides the layers below its own; a name stands for its submodules too.
ALSO: dict[str, tuple[str, ...]] = {
    "testing.model": ("testing",),
    "testing.hosts": ("testing",),
    "testing.faults": ("testing",),
    "testing.virtual": ("testing",),
}

LONGEST = 400  # lines; a module has fewer


@dataclass(frozen=True)
class Module:
    """One source file: its dotted name, and the tree of its syntax."""

    name: str
    path: Path
    text: str

    @property
    def syntax(self) -> ast.Module:
        return ast.parse(self.text, str(self.path))

    @property
    def package(self) -> str:
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]


@dataclass(frozen=True)
class Import:
    """One imported name: `from module import name`, or `import module` with no name."""

    module: str
    name: str
    line: int


def modules_of(folder: Path) -> dict[str, Module]:
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = [folder.name, *path.relative_to(folder).with_suffix("").parts]
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = Module(name, path, path.read_text())
    return found


def imports_of(module: Module) -> Iterator[Import]:
    for node in ast.walk(module.syntax):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield Import(alias.name, "", node.lineno)
            case ast.ImportFrom(module=origin, names=names, level=level):
                base = module.package.split(".")
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


def layer_faults(
    modules: Mapping[str, Module], layers: Sequence[Sequence[str]], also: Mapping[str, Sequence[str]]
) -> list[str]:
    level = {name: number for number, layer in enumerate(layers) for name in layer}
    faults = []
    for module in modules.values():
        own = module.name.partition(".")[2]
        if own not in level:
            faults.append(f"{module.name} is in no layer: give it a place in LAYERS")
            continue
        for found in imports_of(module):
            target = f"{found.module}.{found.name}" if f"{found.module}.{found.name}" in modules else found.module
            if not within(target, "tstore") or target == module.name:
                continue
            other = target.partition(".")[2]
            if target not in modules:
                faults.append(f"{module.name}:{found.line} imports {target}, which does not exist")
            elif other not in level:
                faults.append(f"{module.name}:{found.line} imports {target}, which is in no layer")
            elif level[other] >= level[own] and not any(within(other, name) for name in also.get(own, ())):
                faults.append(f"{module.name}:{found.line} imports {target}, which is not in a layer below it")
    return faults


def foreign_faults(modules: Mapping[str, Module], forbidden: str) -> list[str]:
    return [
        f"{module.name}:{found.line} imports {found.module}, and must know nothing of {forbidden}"
        for module in modules.values()
        for found in imports_of(module)
        if within(found.module, forbidden)
    ]


def privacy_faults(modules: Mapping[str, Module]) -> list[str]:
    faults = []
    for module in modules.values():
        for found in imports_of(module):
            parts = [*found.module.split("."), found.name]
            private = [i for i, part in enumerate(parts) if part.startswith("_") and not part.startswith("__")]
            if private and ".".join(parts[: private[0]]) not in owners(module, modules):
                name = ".".join(part for part in parts if part)
                faults.append(f"{module.name}:{found.line} imports the private name {name} of another package")
    return faults


def owners(module: Module, modules: Mapping[str, Module]) -> set[str]:
    return {module.package} | {other.name for other in modules.values() if other.package == module.package}


def form_faults(modules: Mapping[str, Module]) -> list[str]:
    faults = []
    for module in modules.values():
        lines = len(module.text.splitlines())
        if lines >= LONGEST:
            faults.append(f"{module.name} has {lines} lines, and must have fewer than {LONGEST}: split it")
        if not ast.get_docstring(module.syntax):
            faults.append(f"{module.name} has no docstring: say what it is")
    return faults


def guide_faults(modules: Mapping[str, Module]) -> list[str]:
    """Modules that the first lines of their package do not name, as `name` or by the beginning of it, `http_…`."""
    faults = []
    for module in modules.values():
        package, _, name = module.name.rpartition(".")
        if package in ("", "tstore") or name.startswith("_"):
            continue
        guide = ast.get_docstring(modules[package].syntax) or ""
        if f"`{name}`" not in guide and f"`{name.partition('_')[0]}_…`" not in guide:
            faults.append(f"{module.name} is not named at the top of {package}/__init__.py: say what it is for")
    return faults


# ---- the source


TSTORE = modules_of(REPOSITORY / "tstore")
EXMY = modules_of(REPOSITORY / "codecs" / "exmy")


def test_the_source_was_found() -> None:
    assert "tstore.errors" in TSTORE
    assert "exmy" in {name.partition(".")[0] for name in EXMY}


def test_every_module_is_in_one_layer() -> None:
    names = [name for layer in LAYERS for name in layer]
    assert sorted(names) == sorted(name.partition(".")[2] for name in TSTORE)


def test_modules_import_only_from_layers_below() -> None:
    assert layer_faults(TSTORE, LAYERS, ALSO) == []


def test_exmy_knows_nothing_of_tstore() -> None:
    assert foreign_faults(EXMY, "tstore") == []


def test_no_private_name_crosses_packages() -> None:
    assert privacy_faults(TSTORE) + privacy_faults(EXMY) == []


def test_every_module_is_short_and_says_what_it_is() -> None:
    assert form_faults(TSTORE) + form_faults(EXMY) == []


def test_every_package_says_what_its_modules_are() -> None:
    assert guide_faults(TSTORE) + guide_faults(EXMY) == []


def test_the_readme_names_what_lies_at_the_top() -> None:
    guide = (REPOSITORY / "README.md").read_text().partition("## Reading the source")[2]
    packages = [f"{path.parent.name}/" for path in (REPOSITORY / "tstore").glob("*/__init__.py")]
    modules = [path.stem for path in (REPOSITORY / "tstore").glob("[a-z]*.py")]
    assert [name for name in sorted([*packages, *modules]) if f"`{name}`" not in guide] == []


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


ORDER = [("low", "lower"), ("kv", "kv.base"), ("kv.local",), ("high",), ("",), ("testing", "testing.model")]


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
def test_an_import_from_above_is_found(tmp_path: Path, name: str, text: str) -> None:
    files = {"testing/__init__.py": "", "testing/model.py": "", name: text}
    [fault] = layer_faults(fabricated(tmp_path, files), ORDER, {})
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
def test_an_import_from_below_is_fine(tmp_path: Path, name: str, text: str) -> None:
    assert layer_faults(fabricated(tmp_path, {name: text}), ORDER, {}) == []


def test_an_import_that_is_listed_is_fine(tmp_path: Path) -> None:
    files = {"lower.py": "import tstore.low", "high.py": "import tstore.testing.model"}
    modules = fabricated(tmp_path, files | {"testing/model.py": "", "testing/__init__.py": ""})
    assert len(layer_faults(modules, ORDER, {})) == 2
    assert layer_faults(modules, ORDER, {"lower": ("low",), "high": ("testing",)}) == []


def test_a_module_in_no_layer_is_found(tmp_path: Path) -> None:
    faults = layer_faults(fabricated(tmp_path, {"new.py": "", "high.py": "import tstore.new"}), ORDER, {})
    assert len(faults) == 2
    assert any("tstore.new is in no layer" in fault for fault in faults)


def test_a_foreign_import_is_found(tmp_path: Path) -> None:
    modules = fabricated(tmp_path, {"low.py": "def f():\n    from numpy.random import x"})
    assert foreign_faults(modules, "numpy") == [
        "tstore.low:2 imports numpy.random, and must know nothing of numpy"
    ]
    assert foreign_faults(modules, "num") == []


@pytest.mark.parametrize(
    ("text", "found"),
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
def test_a_private_name_across_packages_is_found(tmp_path: Path, text: str, found: bool) -> None:
    assert bool(privacy_faults(fabricated(tmp_path, {"low.py": text}))) == found


def test_a_module_that_its_package_does_not_name_is_found(tmp_path: Path) -> None:
    files = {"kv/__init__.py": '"""`http`; `gcs_…`."""', "kv/http.py": "", "kv/gcs_login.py": "", "kv/s3.py": ""}
    found = [fault.split(" is ")[0] for fault in guide_faults(fabricated(tmp_path, files))]
    assert found == ["tstore.kv.base", "tstore.kv.s3"]


def test_a_long_module_and_one_without_docstring_are_found(tmp_path: Path) -> None:
    long, fine = '"""l."""\n' + "x = 1\n" * 399, '"""f."""\n' + "x = 1\n" * 398
    faults = form_faults(fabricated(tmp_path, {"long.py": long, "fine.py": fine, "bare.py": "x = 1"}))
    assert [fault.split(" has ")[0] for fault in faults] == ["tstore.bare", "tstore.long"]
