"""The log of a store: its marker, records, archives and versions."""

import os
import re
import uuid

from tests.support.independent_reader.frames import (
    MIB,
    Newer,
    Refused,
    array,
    blob,
    boolean,
    checksum,
    fields,
    frame,
    load_json,
    mapping,
    names,
    nat,
    need,
    optional,
    path_,
    text,
    tid,
    time,
    unpack_msgpack,
    versions_of,
)

RECORD = (
    ("transaction", tid), ("base", nat), ("time", time), ("message", text, ""), ("tags", names, []),
    ("replaces", boolean, False), ("deleted", names, []), ("manifests", array, []), ("bytes_added", nat, 0),
    ("void", boolean, False), ("metadata", mapping, {}), ("durable", boolean, True), ("collected", nat, 0),
    ("reused", names, []), ("collection", optional, None), ("parts", array, []), ("dropped", names, []),
    ("tagged", versions_of, {}), ("source", nat, 0),
)  # fmt: skip
PART = (("transaction", tid), ("time", time), ("message", text), ("tags", names), ("bytes_added", nat))


class Log:
    """The marker, the records and the versions of a store in a folder."""

    def __init__(self, folder, every_archive=512, every_root=64):
        self.folder, self.every_archive, self.every_root = os.fspath(folder), every_archive, every_root
        self.records, self.trees, self.seen, self.archives = {}, {}, {}, {}
        m = load_json(self.get("tstore.json", 4096))
        need(type(m) is dict and type(m.get("format")) is int, "tstore.json is invalid")
        if m["format"] > 1:
            raise Newer(f"format {m['format']}")
        need(m["format"] == 1 and type(m.get("uuid")) is str, "tstore.json is invalid")
        log = m.get("origin", m["uuid"])
        parts = [str(m["format"]), m["uuid"], m.get("created", "")] + ([log] if "origin" in m else [])
        need(all(type(p) is str for p in parts), "tstore.json is invalid")
        if m.get("checksum", "") != "":
            need(checksum("\n".join(parts).encode()).hex() == m["checksum"], "tstore.json has a wrong checksum")
        for u in (m["uuid"], log):
            need(re.fullmatch("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", u), "invalid UUID")
        self.log = uuid.UUID(log).bytes

    # objects

    def get(self, key, limit, missing=False):
        try:
            with open(os.path.join(self.folder, *key.split("/")), "rb") as f:
                need(os.fstat(f.fileno()).st_size <= limit, f"{key} is too long")
                return f.read()
        except FileNotFoundError:
            if missing:
                return None
            raise Refused(f"{key} is missing") from None

    def part(self, key, offset, length):
        try:
            with open(os.path.join(self.folder, *key.split("/")), "rb") as f:
                need(offset + length <= os.fstat(f.fileno()).st_size, f"{key} is too short")
                f.seek(offset)
                return f.read(length)
        except FileNotFoundError:
            raise Refused(f"{key} is missing") from None

    def archive(self, end):
        if end not in self.archives:
            data = self.get(f"archives/{end:020}", 32 * MIB, missing=True)
            if data is None:
                return None
            a = fields(unpack_msgpack(frame(data, b"A", f"archive {end}")), ("end", nat), ("records", array))
            need(a.end == end and len(a.records) == self.every_archive, f"archive {end} is invalid")
            self.archives[end] = [blob(r) for r in a.records]
        return self.archives[end]

    def raw(self, n):
        """The bytes of the record of n, or None."""
        end = -(-n // self.every_archive) * self.every_archive
        for _ in range(2):
            if records := self.archive(end):
                return records[(n - 1) % self.every_archive]
            if data := self.get(f"commits/{n:020}", 32 * MIB, missing=True):
                return data
        return None

    def bare(self, n):
        """The record of n, without a look at its link."""
        if n not in self.records:
            data = self.raw(n)
            need(data is not None, f"version {n} does not exist")
            body = frame(data, b"R", f"record {n}")
            need(len(body) >= 40, f"record {n} is too short")
            r = fields(unpack_msgpack(body[:-40]), *RECORD)
            link = body[-40:]
            r.log, r.earlier, r.earlier_check = link[:16], int.from_bytes(link[16:24], "little"), link[24:]
            r.check, r.version, r.alive = data[-16:], n, None
            need(r.collection is not None or len(data) <= 8 * MIB, f"record {n} is too long")
            need(r.base < n and r.collected < n and r.source <= r.base, f"record {n} refers to later versions")
            need(all(1 <= v <= r.base for v in r.tagged.values()), f"record {n} tags later versions")
            need(
                len(r.message) <= 65536 and len(r.manifests) <= 1024 and len(r.parts) <= 1024,
                f"record {n}: limits",
            )
            for p in r.deleted:
                path_(p)
            need(not (r.source and (r.replaces or r.deleted or r.parts)), f"record {n} is a copy with changes")
            r.parts = [fields(p, *PART, ("metadata", mapping)) for p in r.parts]
            changes = (
                r.tags or r.dropped or r.tagged or r.deleted or r.manifests or r.replaces or r.parts or r.source
            )
            need(not ((r.void or r.collection is not None) and changes), f"record {n} is void, with changes")
            need(not r.void or r.collection is None, f"record {n} is void, with a collection")
            r.replaced, r.resumes = set(), 0
            if r.void and r.transaction.startswith("repair-"):
                r.replaced = {bytes.fromhex(text(c)) for c in array(r.metadata.get("replaced", []))}
                r.resumes = nat(r.metadata.get("resumes", 0))
            if r.collection is not None:
                c = fields(r.collection, ("alive", array), ("expired", array), ("tags", versions_of),
                           ("transactions", names), ("objects", names))  # fmt: skip
                r.alive = [nat(array(a)[0]) for a in c.alive]
                need(
                    r.alive == sorted(set(r.alive)) and max(r.alive, default=0) < n, f"record {n}: living versions"
                )
            need(self.seen.setdefault(r.check, n) == n, f"version {n} is version {self.seen[r.check]}")
            self.records[n] = r
        return self.records[n]

    def record(self, n):
        r = self.bare(n)
        need(r.log == self.log, f"record {n} is of another store")
        need(
            self.every_root * ((n - 1) // self.every_root) <= r.earlier < n, f"record {n} has a link out of range"
        )
        if r.earlier == 0:
            need(r.earlier_check == bytes(16), f"record {n} has a wrong link")
        else:
            need(self.names_record(r.earlier, r.earlier_check), f"record {n} has a wrong link")
        return r

    def names_record(self, n, check):
        r = self.bare(n)
        return check == r.check or check in r.replaced

    # versions

    def newest(self):
        found = set()
        for folder in ("commits", "archives"):
            path = os.path.join(self.folder, folder)
            for name in os.listdir(path) if os.path.isdir(path) else ():
                if re.fullmatch("[0-9]{20}", name) and (n := int(name)) > 0:
                    if folder == "archives":
                        need(n % self.every_archive == 0, f"archives/{name} is no archive")
                        found.update(range(n - self.every_archive + 1, n + 1))
                    else:
                        found.add(n)
        need(len(found) == max(found, default=0), "versions are missing")
        return len(found)

    def probe(self):
        """The newest version without a list of keys."""

        def exists(n):
            return n == 0 or self.raw(n) is not None

        hint = self.get("latest", 64, missing=True) or b"0"
        b = int(hint) if re.fullmatch(b"[0-9]{1,19}", hint) and exists(int(hint)) else 0
        step = 1
        while exists(b + step):
            step *= 2
        low, high = b + step // 2, b + step
        while high - low > 1:
            mid = (low + high) // 2
            low, high = (mid, high) if exists(mid) else (low, mid)
        need(not any(exists(low + 2**i) for i in range(1, 8)), f"version {high} is missing")
        return low

    def versions(self):
        return [self.record(n) for n in range(1, self.newest() + 1)]

    def head(self, v):
        while v and self.record(v).source:
            v -= 1
        return v

    def collection(self):
        c = self.newest()
        while c and self.record(c).alive is None:
            c = self.record(c).collected
        return c

    def expired(self, v):
        c = self.collection()
        while 0 < v <= c:
            r = self.record(v)
            if not r.void and r.alive is None:
                return v not in self.record(c).alive
            v = self.head(v - 1)
        return False
