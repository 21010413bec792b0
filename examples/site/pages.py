"""What the site adds to the guides: README and other documents, the reference, and links from names to it.

MkDocs calls the functions whose names begin with `on_`; mkdocstrings loads `Docstrings`.
"""

from __future__ import annotations

import posixpath
import re
import shutil
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent.parent
GUIDES = "examples/guides"
DOCUMENTS = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    ".github/CONTRIBUTING.md": "contributing.md",
    ".github/SECURITY.md": "security.md",
    "tests/README.md": "promises.md",
    "codecs/exmy/README.md": "exmy.md",
    "codecs/exmy/FORMAT.md": "exmy_format.md",
    "tstore/core/format/FORMAT.md": "format.md",
    "examples/pytorch_fsdp.py": "examples/pytorch_fsdp.md",
    "examples/jax_resume.py": "examples/jax_resume.md",
    "examples/volume.py": "examples/volume.md",
}
"""The pages made of other files of the repository."""

INTRODUCTION = """# Reference

Names are shown as `import tstore.sync as tstore` has them: calls block. Examples run as they stand, after
`import exmy, numpy as np`.

`import tstore` has the same names to await. There, what does I/O is a coroutine: `await tstore.save(…)`,
`await array.read()`, `async with store.transaction() as tx`, `async for commit in store.history()`. Properties,
and classes that only hold values, are the same in both.

Shapes are tuples of ints and count elements. Sizes are in bytes, times in seconds, and ratios of signal to noise
in dB. Every error of tstore is a `TStoreError`, every error of exmy an `ExmyError`; each function names those to
expect.
"""

# Page: title, introduction, and names by module. The modules `tstore.sync…` stand for `tstore…` too.
PAGES: dict[str, tuple[str, str, dict[str, str]]] = {
    "checkpoints": (
        "Checkpoints",
        "Trees of arrays, each saved as one commit, and restored whole, in part, or for another topology.",
        {
            "tstore.sync": "save restore stream steps explain RestorePlan Mapped Checkpointer EverySteps"
            " EverySeconds Continuous OnPreemption SaveReport save_async BackgroundSave Shards PackedShards"
            " PerHost Step Tiers TierStep"
        },
    ),
    "stores": (
        "Stores and transactions",
        "Everything under one URL, and the transactions that change it.",
        {
            "tstore.sync": "open Store Transaction Retry Commit PendingTransaction Follower copy CopyReport Cache",
            "tstore.core.storage.base": "Storage",
        },
    ),
    "arrays": (
        "Arrays and snapshots",
        "What a version holds, and how it is indexed, read and written.",
        {"tstore.sync": "Snapshot Array Appended Patch", "tstore.core.data.planning": "ReadPlan"},
    ),
    "maintenance": (
        "Retention and maintenance",
        "Which versions are kept, how two of them differ, and whether everything can be read.",
        {
            "tstore.sync": "Keep CollectReport Diff ArrayDiff",
            "tstore.core.maintenance.verify": "VerifyReport",
            "tstore.core.maintenance.repair": "RepairReport",
        },
    ),
    "quantization": (
        "Low-bit copies",
        "Copies of a version in eXmY formats, and their errors.",
        {"tstore.sync": "quantize Bits MinSqnr quantize_report QuantizeReport QuantizedArray"},
    ),
    "statistics": (
        "Statistics",
        "Numbers about the values of an array, computed a part at a time.",
        {"tstore.sync": "summarize Summary heat_map HeatMap quantization_loss QuantizationLoss baseline"},
    ),
    "sharding": (
        "Shardings",
        "Which part of an array lies on which device and host.",
        {
            "tstore.sharding": "Mesh P Shard Part Index Placements Pipeline ReplicaSplit Halo tile_in_halo"
            " with_halo common_shard_shape spec_from_rules pod"
        },
    ),
    "jax": (
        "JAX",
        "Pytrees of arrays on devices: `import tstore.sync as tstore`, then `tstore.jax`.",
        {"tstore.sync.jax": "save restore metadata explain Checkpointer save_async"},
    ),
    "torch": (
        "PyTorch",
        "Tensors, modules, optimizers and `DTensor`s: `import tstore.sync as tstore`, then `tstore.torch`.",
        {"tstore.sync.torch": "save restore stream load_into Checkpointer save_async Writer Reader"},
    ),
    "trainers": (
        "Trainers",
        "Plugins for trainers. Each module is imported by its own name.",
        {
            "tstore.trainers.lightning": "CheckpointIO ModelParallelStrategy RandomStates CheckpointFiles",
            "tstore.trainers.huggingface": "TStoreCallback",
            "tstore.trainers.keras": "BackupAndRestore ModelCheckpoint restore_model",
            "tstore.trainers.orbax": "CheckpointManager",
            "tstore.trainers.torchtitan": "CheckpointManager",
        },
    ),
    "zarr": ("Zarr", "::: tstore.zarr", {"tstore.zarr": "ZarrStore"}),
    "errors": (
        "Errors",
        "::: tstore.errors",
        {
            "tstore.errors": "TStoreError InvalidArgument InvalidIndex StructureMismatch NotFinite Misuse NotFound"
            " NotAStore SnapshotExpired AlreadyExists Conflict SourceCondemned Inconsistent Corrupt"
            " TimelineChanged UnsupportedFormat Denied StorageFull Unavailable Unreachable TemporaryFailure"
            " Throttled DeadlineExceeded CommitOutcomeUnknown"
        },
    ),
    "exmy": (
        "exmy",
        "::: exmy",
        {
            "exmy": "Format formats encode decode round quantize Quantized choose Choice survey Candidate"
            " exponents Exponents sqnr compare Difference energy pack unpack packed_size slice_bytes TILE"
            " encode_packed decode_packed Groups GroupScales BLOCKS FLOAT_SCALES TensorFit ChunkCodec ChunkSlice"
            " ExmyError FormatError DtypeError SizeError CodeError NonFiniteError KernelError"
            " SlowPathWarning kernels step"
        },
    ),
    "exmy_frameworks": (
        "exmy for frameworks",
        "The same codes in JAX and PyTorch, on any device, and as codecs of Zarr and numcodecs.",
        {
            "exmy.jax": "quantize Quantized fake_quantize round pack unpack",
            "exmy.torch": "quantize Quantized fake_quantize round pack unpack",
            "exmy.zarr": "ExmyCodec",
            "exmy.numcodecs": "Exmy",
        },
    ),
}


def entries() -> dict[str, str]:
    """Return the page of each name in the reference."""
    return {
        f"{module}.{name}": page
        for page, (_, _, modules) in PAGES.items()
        for module, names in modules.items()
        for name in names.split()
    }


def alias(entry: str) -> str:
    """Return the name that is awaited where `entry` blocks."""
    return entry.replace("tstore.sync.", "tstore.", 1)


IDS = {spelling: entry for entry in entries() for spelling in (alias(entry), entry)}
"""The entry of each name as documents spell it."""
for _entry in entries():
    if _entry.startswith(("tstore.sync.", "tstore.errors.")) and _entry.count(".") == 2:
        IDS.setdefault(_entry.rpartition(".")[2], _entry)


def described(introduction: str) -> str:
    """Return an introduction that is a module's docstring, or a text, as Markdown."""
    alone = "members: false, show_root_heading: false, show_root_toc_entry: false"
    return f"{introduction}\n    options: {{{alone}}}" if introduction.startswith(":::") else introduction


def reference(page: str) -> str:
    """Return the Markdown of a page of the reference."""
    title, introduction, modules = PAGES[page]
    parts = [f"# {title}", described(introduction)]
    for module, names in modules.items():
        if module not in ("tstore.sync", "exmy"):
            blocking = module.replace("tstore.", "tstore.sync.") if module.count(".") == 1 else module
            parts.append(" ".join(f"[](){{#{name}}}" for name in sorted({module, alias(module), blocking})))
        if page == "exmy_frameworks":
            parts += [f"## {module}", described(f"::: {module}")]
        for name in names.split():
            entry = f"{module}.{name}"
            anchors = "" if alias(entry) == entry else f"[](){{#{alias(entry)}}}\n\n"
            members = {"kernels": "level, levels, use", "step": "encode, decode"}.get(name)
            kept = f"\n    options: {{members: [{members}]}}" if members else ""
            parts.append(f"{anchors}::: {entry}{kept}")
    return "\n\n".join(parts)


SPECIAL = ("__init__", "__getitem__", "__setitem__", "__contains__", "__iter__", "__call__")

FENCE = re.compile(r"(^```.*?^```$)", re.M | re.S)
VERBATIM = re.compile(r"(^```.*?^```$|^[#|].*?$)", re.M | re.S)
"""Code, and headings and tables, whose names may be those of other libraries."""
CODE = re.compile(r"(?<!\[)`([A-Za-z_][\w.]*)(\([^`]*\))?`(?!\])")


def linked(text: str, within: str = "") -> str:
    """Return Markdown in which code that is a name leads to its entry, where there is one."""

    package = within.partition(".")[0]

    def link(code: re.Match[str]) -> str:
        first, _, member = code[1].partition(".")
        entry = IDS.get(f"{package}.{code[1]}") or IDS.get(code[1])
        if entry is None and member and first in IDS:  # such as `Store.collect`
            entry = f"{IDS[first]}.{member}"
        if entry is None or within == entry or within.startswith(f"{entry}."):
            return code[0]
        return f'<autoref optional identifier="{entry}">{code[0]}</autoref>'

    return "".join(
        part if number % 2 else CODE.sub(link, part) for number, part in enumerate(VERBATIM.split(text))
    )


def relinked(text: str, path: str) -> str:
    """Return the Markdown of a file with links to pages of the site, and without those to other files."""
    here = posixpath.dirname(path)
    page = DOCUMENTS.get(path) or posixpath.relpath(path, GUIDES)

    def move(link: re.Match[str]) -> str:
        label, target = link[1], link[2]
        file, hash_, anchor = target.partition("#")
        goal = posixpath.normpath(posixpath.join(here, file))
        if not file or "://" in target:
            return link[0]
        if goal.startswith(f"{GUIDES}/"):
            to = posixpath.relpath(goal, GUIDES)
        elif goal in DOCUMENTS:
            to = DOCUMENTS[goal]
        else:
            return label
        return f"[{label}]({posixpath.relpath(to, posixpath.dirname(page) or '.')}{hash_}{anchor})"

    link = re.compile(r"(?<!!)\[((?:[^\[\]`]|`[^`]*`)*)\]\(([^)\s]+)\)")
    return "".join(part if number % 2 else link.sub(move, part) for number, part in enumerate(FENCE.split(text)))


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not guides."""
    for path, page in DOCUMENTS.items():
        text = (ROOT / path).read_text()
        if path.endswith(".py"):
            text = f"# {Path(path).name}\n\n```python\n{text}```\n"
        files.append(File.generated(config, page, content=linked(relinked(text, path))))
    for page in PAGES:
        files.append(File.generated(config, f"reference/{page}.md", content=reference(page)))
    files.append(File.generated(config, "reference/index.md", content=linked(INTRODUCTION)))
    style = Path(__file__).with_name("site.css").read_text()
    files.append(File.generated(config, "site.css", content=style))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Link the guides, whose text is read from the folder."""
    own = page.file.generated_by is None
    return linked(relinked(markdown, f"{GUIDES}/{page.file.src_uri}")) if own else markdown


def on_post_page(output: str, **_: Any) -> str:
    """Mend what stops a keyboard or a screen reader: anchors that are links, and a dialog without a name."""
    output = re.sub(r'<a href="" id="([^"]+)"></a>', r'<span id="\1"></span>', output)
    return output.replace(' role="dialog"', ' role="dialog" aria-label="Search"')


def on_post_build(config: Any) -> None:
    """Remove the addresses from which the theme may fetch scripts, and files that no page uses."""
    scripts = Path(config.site_dir, "assets", "javascripts")
    shutil.rmtree(scripts / "lunr")  # the search in other languages
    for path in scripts.rglob("*.map"):
        path.unlink()
    for path in scripts.rglob("*.js"):
        path.write_text(re.sub(r"https://(unpkg\.com|api\.github\.com)/[\w@./-]*", "", path.read_text()))


def as_markdown(docstring: str) -> str:
    """Return the Markdown of a docstring with NumPy's sections."""
    description, *sections = re.split(r"^(\w+)\n-+\n", docstring, flags=re.M)
    parts = [description]
    for title, text in zip(sections[::2], sections[1::2], strict=True):
        if title == "Parameters":  # "host, hosts" above an indented description
            text = re.sub(r"^(\S.*)$", lambda names: f"- `{names[1].replace(', ', '`, `')}`:", text, flags=re.M)
        parts.append(f"**{title}**\n\n{text}")
    text = "\n\n".join(part.strip() for part in parts)
    return re.sub(r"^>>> (?:.+(?:\n|$))+", r"```pycon\n\g<0>\n```\n", text, flags=re.M)


def trim(cls: griffe.Class) -> None:
    """Move the fields of a class that holds values to its docstring; remove special methods and wrapped values."""
    holds_values = "dataclass" in cls.labels or "NamedTuple" in map(str, cls.bases)
    fields = []
    for name, member in list(cls.members.items()):
        is_special = name.startswith("__") and not (name in SPECIAL and member.docstring)
        is_field = member.is_attribute and "property" not in member.labels and member.annotation is not None
        if is_special and (name != "__init__" or cls.name == "BlockingWrapper"):
            del cls.members[name]
        elif holds_values and is_field and not name.startswith("_"):
            text = f": {member.docstring.value}" if member.docstring else ""
            if text or "dataclass" not in cls.labels:  # the signature of a dataclass lists its fields
                fields.append(f"- `{name}` (`{member.annotation}`){text}")
            del cls.members[name]
        elif member.is_attribute:
            member.value = None
    if fields and cls.docstring:
        cls.docstring.value += "\n\n**Fields**\n\n" + "\n".join(fields)


class Docstrings(griffe.Extension):
    """Docstrings as Markdown in which names lead to their entries."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object."""
        if obj.docstring:
            text = obj.docstring.value
            if obj.is_module:  # without the walk through its source
                text = re.sub(r"( Reading the source:)?\n\n1\. .*", "", text, flags=re.S)
            obj.docstring.value = linked(as_markdown(text), obj.path)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Remove from all classes what is no use to a reader."""
        griffe.DataclassesExtension().on_package(pkg=pkg)  # before the fields are moved
        modules = [pkg]
        while modules:
            members = [member for member in modules.pop().members.values() if not member.is_alias]
            modules += [member for member in members if member.is_module]
            for member in members:
                if member.is_class:
                    trim(member)

    def on_module_members(self, *, mod: griffe.Module, **_: Any) -> None:
        """Add the functions of which a stub has only overloads."""
        for name, overloads in mod.overloads.items():
            if name not in mod.members:
                mod.set_member(name, overloads[-1])
                overloads[-1].overloads = overloads
