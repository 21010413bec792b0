"""The bars of `bench.scale`."""

from __future__ import annotations

from bench.bars import Bar
from bench.figures import NONE, lead
from bench.report import MIB
from bench.rounds import Results
from bench.scale.rounds import FEW_HOSTS, PLACES, Sizes

_RAW = ("raw1", "raw2")
_TENSORSTORE = ("ts-file", "ts-ocdbt")


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

    def most(work: str, *needs: tuple[str, float, str, float, str]) -> None:
        """Add bars for measures of tstore: the measure, the most, its unit, the factor to it, and what it is."""
        if work in results:
            mine = results[work].get("tstore", NONE)
            for measure, need, unit, factor, what in needs:
                out.append(Bar(f"{work}: {what}", need, mine.median(measure) * factor, most=True, unit=unit))

    def grown(work: str, former: str, measure: str, need: float, what: str) -> None:
        """Add a bar for the ratio of a measure to that of another work."""
        if work in results:
            by = results[work].get("tstore", NONE).ratio(measure, results[former]["tstore"])
            out.append(Bar(f"{work}: {what}", need, by, most=True))

    def faster(work: str, peers: tuple[str, ...], need: float, what: str) -> None:
        """Add a bar for the time of the fastest peer ÷ that of tstore."""
        if work in results:
            out.append(Bar(f"{work}: {what} ÷ tstore", need, lead(results[work], peers)))

    memory = ("memory", 256, " MiB", 1 / MIB)
    most("write", (*memory, "memory beyond the array"), ("cpu", 1.5, " µs", 1e6 / sizes.chunks, "CPU a chunk"))
    few_bytes = ("read", 4, " MiB", 1 / MIB, "bytes read")
    for work in ("open", "beside"):
        most(work, ("cpu", 40, " ms", 1e3, "CPU"), ("memory", 24, " MiB", 1 / MIB, "memory"), few_bytes)
    written = ("written", 64, " KiB", 1 / 1024, "bytes written a commit")
    most("change", ("cpu", 10, " ms", 1e3, "CPU a commit"), written)
    most("arrays: read one", ("cpu", 60, " ms", 1e3, "CPU"))
    most("arrays: restore a group", ("cpu", 60, " ms", 1e3, "CPU"), few_bytes)
    most("arrays: list a group", ("cpu", 20, " ms", 1e3, "CPU"))
    for count in sizes.leaves:
        for what in ("save", "restore warm"):
            faster(f"{count:,} leaves: {what}", ("safetensors",), 0.6, "safetensors")
            faster(f"{count:,} leaves: {what}", ("ts-ocdbt",), 6, "tensorstore ocdbt")
    few, many = (f"group: {hosts} hosts" for hosts in (FEW_HOSTS, sizes.hosts))
    finisher = (("cpu", 10, " s", 1, "CPU of the finisher"), (*memory, "memory of the finisher"))
    most(many, *finisher)
    grown(many, few, "seconds", 4, f"delay ÷ that of {FEW_HOSTS} hosts")
    most(f"group: {FEW_HOSTS} processes", *finisher)
    for place in PLACES:
        work = f"commits, {place}: 1 process"
        most(work, ("cpu", 0.5, " ms", 1e3, "CPU a commit"))
        if work in results:
            beyond = results[work].get("tstore", NONE).beyond("cpu", results[work].get("raw-files", NONE))
            out.append(Bar(f"{work}: CPU a commit beyond raw", 0.5, 1e3 * beyond, most=True, unit=" ms"))
        faster(f"commits, {place}: 8 processes", ("ts-ocdbt",), 2, "tensorstore ocdbt")
        faster(f"commits, {place}: 8 tasks", ("ts-ocdbt",), 1, "tensorstore ocdbt")
    grown("poll: last tenth", "poll: first tenth", "cpu", 1.5, "CPU of a poll ÷ first tenth")
    faster("chunks64k: restore warm", _TENSORSTORE, 2.5, "better tensorstore")
    faster("chunks64k: restore warm", _RAW, 0.75, "raw")
    faster("chunks64k: restore cold", _RAW, 0.9, "raw")
    for work in results:
        if work.startswith("large: "):
            faster(work, ("before",), 0.97, "before")
    return out
