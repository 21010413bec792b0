"""The `zarr.json` documents of groups and arrays."""

from types import SimpleNamespace

from tests.support.independent_reader.codecs import parse_codecs
from tests.support.independent_reader.data_types import Type
from tests.support.independent_reader.frames import Newer, array, load_json, mapping, nat, need


def parse_document(data):
    d = load_json(data)
    need(
        type(d) is dict and d.get("zarr_format") == 3 and d.get("node_type") in ("group", "array"),
        "not a zarr.json",
    )
    known = {"zarr_format", "node_type", "attributes"}
    if d["node_type"] == "array":
        required = {"shape", "data_type", "chunk_grid", "fill_value", "codecs"}
        need(required <= set(d), "a key of the array is missing")
        known |= required | {"dimension_names", "chunk_key_encoding", "storage_transformers"}
    for k, value in d.items():
        if k not in known and not (type(value) is dict and value.get("must_understand") is False):
            raise Newer(f"key {k!r} of a zarr.json")
    need(type(d.get("attributes", {})) is dict and not d.get("storage_transformers"), "zarr.json is invalid")
    if d["node_type"] == "array":
        a = SimpleNamespace(
            shape=[nat(s) for s in array(d["shape"])], type=Type(d["data_type"]), fill=d["fill_value"]
        )
        grid = mapping(d["chunk_grid"])
        need(grid.get("name") == "regular" and set(grid) <= {"name", "configuration"}, "chunk grid")
        need(set(mapping(grid["configuration"])) == {"chunk_shape"}, "chunk grid")
        a.chunk = [nat(c) for c in array(grid["configuration"]["chunk_shape"])]
        need(
            len(a.shape) == len(a.chunk) <= 32 and all(c or not s for c, s in zip(a.chunk, a.shape, strict=True)),
            "chunk shape",
        )
        a.chunk = [c or 1 for c in a.chunk]
        a.codecs = parse_codecs(d["codecs"])
        a.type.fill(a.fill)
        own = d.get("tstore", {})
        a.sparse = type(own) is dict and own.get("sparse") is True
        names_ = d.get("dimension_names") or [None] * len(a.shape)
        need(len(names_) == len(a.shape) and all(n is None or type(n) is str for n in names_), "dimension names")
        d["_array"] = a
    return d


def grown(before, after):
    """Whether a document differs only in a greater first length."""
    before, after = load_json(before), load_json(after)
    old, new = before.pop("shape", None), after.pop("shape", None)
    return before == after and bool(old) and new[1:] == old[1:] and new[0] >= old[0]
