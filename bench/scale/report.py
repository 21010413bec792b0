"""The bars of `bench.scale`, and its figures as JSON."""

from __future__ import annotations

from typing import Any

from bench.bars import Bar, bars_as_data
from bench.figures import Figures
from bench.rounds import Results
from bench.scale.rounds import FEW_HOSTS, PLACES, Sizes

_MIB = 2**20
_RAW = ("raw1", "raw2")
_TENSORSTORE = ("ts-file", "ts-ocdbt")
_NONE = Figures("")


def remarks(results: Results) -> list[str]:
    """Return what the table does not say."""
    if not any(work.startswith("group") for work in results):
        return []
    return [
        "group: seconds from the last byte to the commit, virtual for virtual hosts; the costs of the finisher"
    ]


def bars(results: Results, sizes: Sizes) -> list[Bar]:
    """Return the bars of the rows that ran."""
    out: list[Bar] = []

    def most(
        work: str, measure: str, need: float, unit: str, scale: float, what: str, *, against: str = ""
    ) -> None:
        if work in results:
            mine = results[work].get("tstore", _NONE)
            value = mine.ratio(measure, results[against]["tstore"]) if against else mine.median(measure) * scale
            out.append(Bar(f"{work}: {what}", need, value, most=True, unit=unit))

    def faster(work: str, peers: tuple[str, ...], need: float, what: str) -> None:
        """Add a bar for the time of the fastest peer ÷ that of tstore."""
        if work in results:
            figures = results[work]
            have = [figures[name] for name in peers if name in figures and figures[name].of("seconds")]
            peer = min(have, key=lambda f: f.median("seconds"), default=_NONE)
            out.append(Bar(f"{work}: {what} ÷ tstore", need, peer.ratio("seconds", figures.get("tstore", _NONE))))

    most("write", "memory", 256, " MiB", 1 / _MIB, "memory beyond the array")
    most("write", "cpu", 1.5, " µs", 1e6 / sizes.chunks, "CPU a chunk")
    for work in ("open", "beside"):
        most(work, "cpu", 40, " ms", 1e3, "CPU")
        most(work, "memory", 24, " MiB", 1 / _MIB, "memory")
        most(work, "read", 4, " MiB", 1 / _MIB, "bytes read")
    most("change", "cpu", 10, " ms", 1e3, "CPU a commit")
    most("change", "written", 64, " KiB", 1 / 1024, "bytes written a commit")
    most("arrays: read one", "cpu", 60, " ms", 1e3, "CPU")
    most("arrays: restore a group", "cpu", 60, " ms", 1e3, "CPU")
    most("arrays: restore a group", "read", 4, " MiB", 1 / _MIB, "bytes read")
    most("arrays: list a group", "cpu", 20, " ms", 1e3, "CPU")
    for count in sizes.leaves:
        for what in ("save", "restore warm"):
            faster(f"{count:,} leaves: {what}", ("safetensors",), 0.6, "safetensors")
            faster(f"{count:,} leaves: {what}", ("ts-ocdbt",), 6, "tensorstore ocdbt")
    few, many = (f"group: {hosts} hosts" for hosts in (FEW_HOSTS, sizes.hosts))
    most(many, "cpu", 10, " s", 1, "CPU of the finisher")
    most(many, "memory", 256, " MiB", 1 / _MIB, "memory of the finisher")
    most(many, "seconds", 4, "×", 1, f"delay ÷ that of {FEW_HOSTS} hosts", against=few)
    real = f"group: {FEW_HOSTS} processes"
    most(real, "cpu", 10, " s", 1, "CPU of the finisher")
    most(real, "memory", 256, " MiB", 1 / _MIB, "memory of the finisher")
    for place in PLACES:
        work = f"commits, {place}: 1 process"
        most(work, "cpu", 0.5, " ms", 1e3, "CPU a commit")
        if work in results:
            beyond = results[work].get("tstore", _NONE).beyond("cpu", results[work].get("raw-files", _NONE))
            out.append(Bar(f"{work}: CPU a commit beyond raw", 0.5, 1e3 * beyond, most=True, unit=" ms"))
        faster(f"commits, {place}: 8 processes", ("ts-ocdbt",), 2, "tensorstore ocdbt")
        faster(f"commits, {place}: 8 tasks", ("ts-ocdbt",), 1, "tensorstore ocdbt")
    most("poll: last tenth", "cpu", 1.5, "×", 1, "CPU of a poll ÷ first tenth", against="poll: first tenth")
    faster("chunks64k: restore warm", _TENSORSTORE, 2.5, "better tensorstore")
    faster("chunks64k: restore warm", _RAW, 0.75, "raw")
    faster("chunks64k: restore cold", _RAW, 0.9, "raw")
    for work in results:
        if work.startswith("large: "):
            faster(work, ("before",), 0.97, "before")
    return out


def as_data(about: dict[str, Any], results: Results, sizes: Sizes) -> dict[str, Any]:
    """Return the data that `--json` writes, without NaN."""
    return {
        "machine": about,
        "unit": "seconds and bytes: of one commit for change and commits, of one read for poll",
        "sizes": sizes._asdict(),
        "works": {work: {name: f.as_data() for name, f in figures.items()} for work, figures in results.items()},
        "bars": bars_as_data(bars(results, sizes)),
    }
