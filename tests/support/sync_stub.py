"""Write the stubs of `tstore.sync`, the types of the blocking names, from the signatures of the async ones.

Run `python -m tests.support.sync_stub` after a change of a signature or docstring; test_sync fails until then.
A stub has the members that its module has at run time, with the parameters of the functions they wrap.

The modules for JAX and PyTorch have stubs too, without types of these: type checkers follow `import tstore` to
them, and would spend most of their time on the frameworks.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import re
import subprocess
import sys
import textwrap
import typing
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import tstore
import tstore.sync

PACKAGE = Path(tstore.__file__).parent
MODULES = ["tstore.sync", "tstore.sync.jax", "tstore.sync.torch", "tstore.jax", "tstore.torch"]
FRAMEWORKS = ("jax", "torch")
OPTIONS = ["tstore.checkpoint.options", "tstore.checkpoint.checkpointer"]  # which declare what `**options` may be
LAZY = "from tstore import zarr as zarr\nfrom tstore.sync import jax as jax, torch as torch"  # by `__getattr__`
HEADER = '"""Types of the public names, written by tests/support/sync_stub.py from those in `tstore`."""\n'
BLOCKING = {"AsyncIterator": "Iterator", "ArrayCall": "Array", "SnapshotCall": "Snapshot"}


def stub_path(module: str) -> Path:
    """Return the path of a module's stub."""
    return Path(str(importlib.import_module(module).__file__)).with_suffix(".pyi")


def sync_stub(module: str) -> str:
    """Return the text of a module's stub, formatted."""
    names: list[str] = importlib.import_module(module).__all__
    members = {name: getattr(importlib.import_module(module), name) for name in names}
    is_sync = module.startswith("tstore.sync")
    own = {name for name, member in members.items() if not is_sync or getattr(member, "__module__", "") == module}
    definitions: list[ast.stmt] = []
    origins: dict[str, ast.stmt] = {}
    for name in sorted(own, key=lambda name: (not inspect.isclass(members[name]), name)):
        if inspect.isclass(members[name]):
            definitions.append(_class(members[name], origins, is_sync=is_sync))
        else:
            overloads = typing.get_overloads(inspect.unwrap(members[name]))
            for each in overloads:
                definitions.append(_function(name, each, origins, is_sync=is_sync))
                definitions[-1].decorator_list = [ast.Name("overload")]
                definitions[-1].body = [ast.Expr(ast.Constant(inspect.getdoc(members[name])))]
                origins["overload"] = ast.ImportFrom("typing", [ast.alias("overload")], 0)
            if not overloads:
                definitions.append(_function(name, members[name], origins, is_sync=is_sync))
    imports = [origins[name] for name in sorted(origins) if name not in names]
    others = sorted(set(members) - own)
    shared = ast.parse(f"from {module.replace('.sync', '')} import {', '.join(others)}").body if others else []
    listed = ast.parse(f"__all__ = {names!r}").body
    lazy = ast.parse(LAZY).body if module == "tstore.sync" else []
    tree = ast.Module([*imports, *shared, *lazy, *listed, *definitions], [])
    text = ast.unparse(ast.fix_missing_locations(tree)).replace("(Any):", "(Any):  # type: ignore[misc]")
    return _formatted(HEADER + text)


def _class(cls: type, origins: dict[str, ast.stmt], *, is_sync: bool) -> ast.ClassDef:
    """Return the class with its public members and the special methods that it defines.

    Of a class of a framework's interface, such as `Writer`, only that framework calls the other methods.
    """
    body: list[ast.stmt] = [ast.Expr(ast.Constant(inspect.getdoc(cls)))]
    is_foreign = cls.__base__ is not None and cls.__base__.__module__.startswith(FRAMEWORKS)
    for name, member in vars(cls).items():
        if name != "__init__" and (is_foreign or re.match("_[^_]", name)):
            continue
        if isinstance(member, property):
            getter = _function(name, member.fget, origins, is_sync=is_sync)
            getter.decorator_list = [ast.Name("property")]
            body.append(getter)
        elif isinstance(member, FunctionType):
            body.append(_function(name, member, origins, is_sync=is_sync))
        elif name == "__iter__":
            body.append(ast.AnnAssign(ast.Name(name), ast.Constant(None), None, simple=1))
    bases: list[ast.expr] = []
    if cls.__base__ is not None and cls.__base__.__module__ == "tstore.sync":  # of a framework's module
        bases = [ast.Attribute(ast.Name("sync"), cls.__base__.__name__)]
        origins["sync"] = ast.ImportFrom("tstore", [ast.alias("sync")], 0)
    elif cls.__base__ is tstore.Checkpointer:
        bases = [ast.Attribute(ast.Name("tstore"), "Checkpointer")]
        origins["tstore"] = ast.Import([ast.alias("tstore")])
    elif is_foreign:
        bases = [ast.Name("Any")]
        origins["Any"] = ast.ImportFrom("typing", [ast.alias("Any")], 0)
    return ast.ClassDef(cls.__name__, bases, [], body, [], type_params=[])  # type: ignore[call-arg,unused-ignore]


def _function(
    name: str, function: Any, origins: dict[str, ast.stmt], *, is_sync: bool
) -> ast.FunctionDef | ast.AsyncFunctionDef:
    """Return the signature and docstring of a function by its public name; add imports it needs to `origins`."""
    original: Callable[..., Any] = inspect.unwrap(function)
    [head] = ast.parse(textwrap.dedent(inspect.getsource(original))).body
    assert isinstance(head, ast.FunctionDef | ast.AsyncFunctionDef)
    assert head.returns is not None
    match head.returns:
        case ast.Subscript(ast.Name("Coroutine"), ast.Tuple([_, _, result])) if (
            is_sync
        ):  # a function that starts its work at once
            head.returns = result
        case ast.Subscript(ast.Name("AsyncGenerator"), ast.Tuple([item, _])):
            head.returns = ast.Subscript(ast.Name("Iterator" if is_sync else "AsyncGenerator"), item)
    defined = _origins(inspect.getsourcefile(original) or "")
    public = "tstore.sync" if is_sync else "tstore"
    if head.args.kwarg is not None and "Unpack[" in ast.unparse(head.args.kwarg):
        _expand_options(head.args, original, defined)
    general = _WithoutFrameworks(defined)
    head.returns = general.visit(head.returns)
    arguments = [*head.args.posonlyargs, *head.args.args, *head.args.kwonlyargs]
    arguments += [a for a in (head.args.vararg, head.args.kwarg) if a is not None]
    for argument in arguments:
        argument.annotation = argument.annotation and general.visit(argument.annotation)
    for annotation in [head.returns, *(a.annotation for a in arguments if a.annotation is not None)]:
        for node in ast.walk(annotation):
            if isinstance(node, ast.Name):
                node.id = BLOCKING.get(node.id, node.id) if is_sync else node.id
                if node.id in tstore.__all__:
                    origins[node.id] = ast.ImportFrom(public, [ast.alias(node.id)], 0)
                elif node.id in defined:
                    known = origins.setdefault(node.id, defined[node.id])
                    assert ast.dump(known) == ast.dump(defined[node.id]), f"two things are called {node.id}"
    for defaults in (head.args.defaults, head.args.kw_defaults):
        defaults[:] = [d if d is None or isinstance(d, ast.Constant) else ast.Constant(...) for d in defaults]
    text = None if name == "__init__" else inspect.getdoc(function)
    body = ast.Expr(ast.Constant(... if text is None else text))
    kind = ast.FunctionDef if is_sync else type(head)
    return kind(name, head.args, [body], [], head.returns, type_params=[])  # type: ignore[call-arg,unused-ignore]


def _expand_options(arguments: ast.arguments, function: Callable[..., Any], defined: dict[str, ast.stmt]) -> None:
    """Replace `**options` by the parameters for which it stands: some editors can't read a `TypedDict`."""
    arguments.kwarg = None
    own = {a.arg for a in (*arguments.args, *arguments.kwonlyargs)}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name not in own:
            annotation = ast.parse(parameter.annotation, mode="eval").body
            arguments.kwonlyargs.append(ast.arg(parameter.name, annotation))
            arguments.kw_defaults.append(ast.Constant(parameter.default))
    for module in OPTIONS:
        defined.update(_origins(str(importlib.import_module(module).__file__)))


class _WithoutFrameworks(ast.NodeTransformer):
    """Replaces the types of JAX and PyTorch by `Any`."""

    def __init__(self, defined: dict[str, ast.stmt]) -> None:
        self._defined = defined

    def _is_foreign(self, node: ast.expr) -> bool:
        while isinstance(node, ast.Attribute):
            node = node.value
        match self._defined.get(node.id) if isinstance(node, ast.Name) else None:
            case ast.Import([ast.alias(module)]) | ast.ImportFrom(str(module)):
                return module.split(".")[0] in FRAMEWORKS
        return False

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name("Any") if self._is_foreign(node) else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        return ast.Name("Any") if self._is_foreign(node) else node


def _origins(file: str) -> dict[str, ast.stmt]:
    """Return, for each top-level name of a module, a statement that imports it from its defining module."""
    path = Path(file)
    module = ".".join(("tstore", *path.relative_to(PACKAGE).with_suffix("").parts))
    origins: dict[str, ast.stmt] = {"Iterator": ast.ImportFrom("collections.abc", [ast.alias("Iterator")], 0)}
    statements = ast.parse(path.read_text()).body
    for_checkers = [s.body for s in statements if isinstance(s, ast.If) and ast.unparse(s.test) == "TYPE_CHECKING"]
    for statement in itertools.chain(statements, *for_checkers):
        match statement:
            case ast.Import(names):
                for alias in names:
                    origins[alias.asname or alias.name] = ast.Import([alias])
            case ast.ImportFrom(origin, names):
                for alias in names:
                    origins[alias.asname or alias.name] = ast.ImportFrom(origin, [alias], 0)
            case ast.ClassDef(name) | ast.Assign([ast.Name(name)]):
                origins[name] = ast.ImportFrom(module, [ast.alias(name)], 0)
    return origins


def _formatted(text: str) -> str:
    for command in (["check", "--select", "I", "--fix"], ["format"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--quiet", "--stdin-filename", "stub.pyi", "-"]
        text = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True).stdout
    return text


if __name__ == "__main__":
    for name in MODULES:
        stub_path(name).write_text(sync_stub(name))
