"""Checkpoints: their structure, and the values for each host."""

import re

from tests.support.independent_reader.codecs import to_array
from tests.support.independent_reader.data_types import Type
from tests.support.independent_reader.frames import (
    Refused,
    array,
    blob,
    mapping,
    nat,
    need,
    path_,
    text,
    unpack_msgpack,
)


def step(store, n=None):
    """Return the version of a step, by default of the highest one."""
    tags = store.tags()
    steps = {int(t[5:]): v for t, v in tags.items() if re.fullmatch("step/(0|[1-9][0-9]{0,17})", t)}
    if n is None:
        return steps[max(steps)] if steps else store.head(store.newest())
    need(n in steps, f"there is no step {n}")
    return steps[n]


def restore(store, v, host=0, hosts=1):
    """Return the tree of a checkpoint, of which PerHost values are those of one host."""
    tree = store.tree(v)
    arrays = {p for p, (d, _) in tree.items() if d["node_type"] == "array"}

    def load(path):
        return store.read(v, path, tree)

    attributes = tree[""][0].get("attributes", {}) if "" in tree else {}
    own = attributes.get("tstore")
    node = own.get("structure") if type(own) is dict else None
    try:
        leaves = structure_leaves(node, "", 0) if node is not None else []
    except Refused:
        node, leaves = None, []
    paths = [p for kind, _, ps in leaves for p in ps]
    if node is not None and sorted(paths) == sorted(arrays):
        return build(node, load, host, hosts)
    flat, had, hidden = {}, set(paths), set()

    def under(group, some):
        return any(p.startswith(group + "/") for p in some)

    for kind, (path, leaf), ps in sorted(leaves, key=lambda leaf: leaf[0] == "empty"):  # after all others
        above = [path[:i] for i in range(len(path)) if path[i] == "/"]
        if kind == "host":
            if set(ps) <= arrays:
                flat[path] = build(leaf, load, host, hosts)
                hidden.update(ps)
            hidden.update(p for p in arrays if p.startswith(path + "/%host="))
        elif kind == "value" or (kind == "empty" and path):
            others = arrays if kind == "value" else arrays | set(flat)
            taken = {path, *above} & others or under(path, others)
            if not taken and not any(under(g, had) and not under(g, arrays) for g in above):
                flat[path] = build(leaf, load, host, hosts)
    flat.update({p: load(p) for p in arrays - hidden})
    out = {}
    for p, value in sorted(flat.items(), key=lambda item: item[0]):
        at = out
        *groups, name = p.split("/")
        for g in groups:
            at = at.setdefault(g, {})
        at[name] = value
    return out


SCALARS = {
    "none": lambda: None,
    "bool": lambda x: {"True": True, "False": False}[x],
    "int": lambda x: int(x) if re.fullmatch("-?[0-9]+", x) else int(""),
    "float": float.fromhex,
    "complex": lambda x: complex(*(float.fromhex(p) for p in x.split(" "))),
    "str": text,
    "bytes": bytes.fromhex,
}


def scalar(node):
    need(type(node) is list and node and node[0] in SCALARS, "not a scalar")
    need(all(type(x) is str for x in node[1:]), "not a scalar")
    try:
        return SCALARS[node[0]](*node[1:])
    except (TypeError, ValueError, KeyError) as e:
        raise Refused(f"scalar {node}: {e}") from e


def key_scalar(node):
    value = scalar(node)
    need(node[0] in ("str", "int", "float", "bool", "bytes"), "not a key")
    return value


def key_name(key, used):
    name = str(key)
    if isinstance(key, str):
        name = re.sub("[%/\0-\x1f]", lambda c: f"%{ord(c[0]):02x}", key) or "%"
        name = "%" + name if name in (".", "..", "zarr.json") else name
    while name in used:
        name += "%"
    used.add(name)
    return name


def host_items(node):
    """[(host, path)] if the node is a value for each host."""
    if node[0] == "arrays":
        items = [node[1] + k for k in node[2]]
    elif node[0] == "dict" and all(n[0] == "array" for _, n in node[1]):
        items = [n[1] for _, n in node[1]]
    else:
        return None
    if not items or not items[0].rsplit("/", 1)[-1].startswith("%host="):
        return None
    out = {int(p.rsplit("%host=", 1)[1]): p for p in items}
    need(sorted(out) == list(range(len(items))), "hosts of a value for each host")
    return out


def structure_leaves(node, path, depth):
    """[(kind, (path, node), paths of arrays)]: kind is `array`, `host` or `value`."""
    need(type(node) is list and node and type(node[0]) is str and depth <= 200, "structure")
    kind, *rest = node

    def join(name):
        return f"{path}/{name}" if path else name

    if kind in SCALARS:
        scalar(node)
        return [("empty", (path, node), [])] if kind == "none" else [("value", (path or "value", node), [])]
    if kind in ("array", "scalar"):
        need(len(rest) == 1, "structure")
        return [("array", (path, node), [path_(rest[0])])]
    if kind == "arrays":
        need(len(rest) == 2, "structure")
        paths = [path_(text(rest[0]) + text(k)) for k in array(rest[1])]
        if hosts := host_items(node):
            return [("host", (path, node), list(hosts.values()))]
        return [("array", (path, node), paths)]
    out, used = [], set()
    need(rest and type(rest[-1]) is list, "structure")
    if path and not rest[-1]:
        return [("empty", (path, node), [])]
    if kind == "dict":
        for k, n in rest[0]:
            out += structure_leaves(n, join(key_name(key_scalar(k), used)), depth + 1)
        if hosts := host_items(node):
            return [("host", (path, node), list(hosts.values()))]
    elif kind in ("list", "tuple"):
        for i, n in enumerate(rest[0]):
            out += structure_leaves(n, join(str(i)), depth + 1)
    else:
        need(kind in ("dataclass", "namedtuple") and len(rest) == 2, f"structure {kind!r}")
        for k, n in rest[1]:
            out += structure_leaves(n, join(text(k)), depth + 1)
    return out


def build(node, load, host, hosts):
    kind, *rest = node
    if kind in SCALARS:
        return scalar(node)
    if kind == "array":
        return load(rest[0])
    if kind == "scalar":
        value = load(rest[0])
        need(value.shape == (), "a scalar that is none")
        return value[()]
    if kind in ("arrays", "dict") and (items := host_items(node)):
        need(len(items) == hosts, f"values of {len(items)} hosts")
        return per_host(bytes(load(items[host])))
    if kind == "arrays":
        return {k: load(rest[0] + k) for k in rest[1]}
    if kind == "dict":
        return {key_scalar(k): build(n, load, host, hosts) for k, n in rest[0]}
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(build(n, load, host, hosts) for n in rest[0])
    return {k: build(n, load, host, hosts) for k, n in rest[1]}


def per_host(data):
    value = mapping(unpack_msgpack(data))
    arrays = mapping(value["arrays"])
    structure_leaves(value["structure"], "", 0)

    def load(path):
        spec, shape, raw = arrays[path]
        return to_array("bytes", {}, blob(raw), Type(spec), tuple(nat(s) for s in shape), None)

    return build(value["structure"], load, 0, 1)
