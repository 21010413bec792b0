"""Records, fragments and roots: the contents of a store's metadata objects; pure, no I/O.

Decoding checks everything that can be checked without other objects, except that `decode_record` leaves inline
manifests to be checked at their first use. `validation` checks a record against its manifests and the tree.
"""

from __future__ import annotations

import contextlib
from typing import Annotated, Any, NamedTuple

import msgspec

from tstore.core.format.arguments import step_number
from tstore.core.format.bounds import MAX_NAMES, MAX_TAGS_SET, STRUCTURE_BYTES
from tstore.core.format.frame import NO_RECORD
from tstore.core.format.layout import (
    owner_of,
    parent_root,
    root_key,
)
from tstore.core.format.objects.collection import Collection, LivingVersion
from tstore.core.format.objects.object_ref import ObjectRef
from tstore.core.format.objects.references import Body, Checksum, Manifest, Message, Names, Natural
from tstore.core.format.objects.wellformed import (
    check_metadata,
    check_packs,
    check_paths,
    check_tags,
    check_time,
    check_transactions,
)
from tstore.errors import Corrupt

__all__ = [
    "INLINE_MANIFEST_BYTES",
    "MAX_PARTS_READ",
    "REPAIR",
    "REPLACED",
    "RESUMES",
    "VOID",
    "VOIDED",
    "Collection",
    "Fragment",
    "LivingVersion",
    "Part",
    "Record",
    "Root",
    "StoredRecord",
]

INLINE_MANIFEST_BYTES = 16 << 10
"""The largest `Manifest.size` of a manifest inside a record or fragment, instead of in an object of its own."""

REPAIR, VOIDED = "repair-", "voided"
"""The prefix of the transaction ids of `tstore repair`, and the metadata key for what it voided.

The commit of the repair lists versions there, a void record the ids in the record that it replaces."""

REPLACED = "replaced"
"""The metadata key, in a record that replaces a voided one, for the checksums by which others may refer to it."""

RESUMES = "resumes"
"""The metadata key, in a record that replaces a lost one, for the next version whose root has its changes."""

VOID = ".void"
"""The suffix of the transaction id of a void record, unless a repair wrote it. No transaction has such an id."""

MAX_PARTS_READ = 1024
"""The maximum transactions, and the maximum manifests, that readers accept in a record (writers: `MAX_PARTS`)."""

_MAX_HOSTS = 100_000
_LONG_BYTES = 256 << 10  # bytes of memory; a record that takes more is long (`StoredRecord.is_long`)

TagsSet = Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_TAGS_SET)]
TagTargets = Annotated[dict[str, Natural], msgspec.Meta(max_length=MAX_TAGS_SET)]
Checksums = Annotated[dict[str, bytes], msgspec.Meta(max_length=MAX_TAGS_SET)]


class Part(Body, frozen=True):
    """One of several transactions that share a record, with the values that the others do not share."""

    transaction: str
    time: float
    message: Message
    tags: TagsSet
    bytes_added: Natural
    metadata: dict[str, Any]

    def validate(self) -> None:
        """Raise `Corrupt` for invalid values."""
        check_transactions((self.transaction,))
        check_time(self.time)
        check_metadata(self.metadata)


class Record(Body, frozen=True):
    """One commit. It does not depend on its version, except through `collected`.

    Its frame has a link to an earlier record (`frame.Link`). A record that a repair put in the place of another
    one lists in its metadata the checksums by which later records may name the version (`REPLACED`).

    `replaces` says that the tree consists of this commit's nodes only. `tags` are set to the commit's own version,
    `tagged` maps other tags to earlier versions, and `dropped` are the tags that the commit removes. A `void`
    record changes nothing: it either occupies a version number, so that a delayed commit can't take it, or
    replaces a record that a repair voided. `durable` says that this commit and all before it survive a power
    failure. `collected` is the version of the newest garbage collection before it, 0 for none. `reused` are the
    packs of other transactions to which its manifests refer. The record of a garbage collection has a `collection`
    and does not change the tree. `parts` are the transactions that share the record, if there are several;
    `transaction` is then another id. `source` is the version of which this one is a copy, such as a quantized
    checkpoint, 0 for none: the tree of a copy consists of its nodes only, and the head keeps its own.
    """

    transaction: str
    base: Natural
    time: float
    message: Message = ""
    tags: TagsSet = ()
    replaces: bool = False
    deleted: Names = ()
    manifests: Annotated[tuple[ObjectRef | Manifest, ...], msgspec.Meta(max_length=MAX_PARTS_READ)] = ()
    bytes_added: Natural = 0
    void: bool = False
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)
    durable: bool = True
    collected: Natural = 0
    reused: Names = ()
    collection: Collection | None = None
    parts: Annotated[tuple[Part, ...], msgspec.Meta(max_length=MAX_PARTS_READ)] = ()
    dropped: Names = ()
    tagged: TagTargets = msgspec.field(default_factory=dict)
    source: Natural = 0

    def validate(self) -> None:
        """Raise `Corrupt` for invalid values."""
        self.validate_shallow()
        for manifest in self.manifests:
            manifest.validate()

    def validate_shallow(self) -> None:
        """Raise `Corrupt` for invalid values outside of inline manifests, which `Manifest.table` checks later."""
        check_transactions((self.transaction,))
        check_time(self.time)
        references = [manifest for manifest in self.manifests if isinstance(manifest, ObjectRef)]
        owners = set(self.transactions) if references else set()
        for reference in references:
            reference.validate()  # copying a store creates an object with this key without decoding the object
            if owner_of(reference.key) not in owners:  # gc would not keep it for this version
                raise Corrupt(f"{reference.key[:60]!r} is a manifest of another transaction")
        if self.tags or self.dropped or self.tagged:
            check_tags((*self.tags, *self.dropped, *self.tagged))
        if self.tagged and not 0 < min(self.tagged.values()) <= max(self.tagged.values()) <= self.base:
            raise Corrupt("it tags a version that does not exist as of its base")
        if self.deleted:
            check_paths(self.deleted)
        if self.metadata:
            check_metadata(self.metadata)
        if self.reused:
            check_packs(self.reused)
        if self.parts:
            self._check_parts()
        if self.source:
            self._check_copy()
        if self.collection is not None:
            self.collection.validate()
        if self.void or self.collection is not None:
            tags = self.tags or self.dropped or self.tagged
            listed = tags or self.deleted or self.manifests or self.reused or self.parts
            replaces = self.replaces or self.source
            if listed or replaces or self.bytes_added or (self.void and self.collection is not None):
                raise Corrupt("a void record, or that of a garbage collection, changes nodes or tags")
        if self.void and not (self.transaction.endswith(VOID) or self.was_voided):
            raise Corrupt("a void record has the id of a transaction, whose writer could believe it was committed")

    def _check_parts(self) -> None:
        for part in self.parts:
            part.validate()
        ids = {self.transaction, *self.transactions}
        if len(ids) <= len(self.parts):
            raise Corrupt("a record has the same transaction twice")
        if self.tags != tuple(tag for part in self.parts for tag in part.tags):
            raise Corrupt("the tags of a record are not those of its transactions")
        others = self.replaces or self.dropped or self.tagged or self.message or self.metadata or self.reused
        if others or self.bytes_added != sum(part.bytes_added for part in self.parts):
            raise Corrupt("a record has changes or bytes that are not those of its transactions")

    def _check_copy(self) -> None:
        if self.source > self.base:
            raise Corrupt("it is a copy of a version that does not exist as of its base")
        if self.replaces or self.deleted or self.parts:
            raise Corrupt("a copy changes nodes of the head")
        if any(step_number(tag) is not None for tag in self.tags):
            raise Corrupt("a copy has the tag of a step")

    def check_number(self, version: int) -> None:
        """Raise `Corrupt` if the record refers to its own version or a later one: that could form a loop.

        Tags need no check: `validate_shallow` refuses a tag of a version above the base.
        """
        latest = max(self.base, self.collected)
        if self.collection is not None:
            living = [entry.version for entry in self.collection.alive[-1:]]
            latest = max((latest, *living, *self.collection.expired[-1:]))
        if latest >= version:
            raise Corrupt(f"it refers to version {version} or a later one")

    @property
    def transactions(self) -> tuple[str, ...]:
        """The ids of all transactions that the record commits."""
        return tuple(part.transaction for part in self.parts) if self.parts else (self.transaction,)

    @property
    def paged_manifest(self) -> ObjectRef | None:
        """The reference to the record's manifest if it is the only one, and in pages."""
        match self.manifests:
            case (ObjectRef(pages=[_, *_]) as reference,):
                return reference
        return None

    @property
    def of_head(self) -> Record:
        """The record as it changes the head: that of a copy sets tags, but has no nodes."""
        return msgspec.structs.replace(self, manifests=()) if self.source else self

    @property
    def named_versions(self) -> set[int]:
        """The earlier versions that the record tags, and the source of which it is a copy."""
        return {*self.tagged.values(), *([self.source] if self.source else ())}

    @property
    def is_plain(self) -> bool:
        """Whether the record has no names or metadata but those in its inline manifests."""
        named = self.tags or self.deleted or self.dropped or self.tagged or self.reused or self.parts
        inline = {*map(type, self.manifests)} <= {Manifest}
        return inline and not (named or self.metadata or self.message or self.collection)

    @property
    def changes_nodes(self) -> bool:
        """Whether the record creates, changes or deletes groups or arrays, not only tags."""
        written = any(isinstance(m, ObjectRef) or m.paths for m in self.manifests)
        return bool(self.replaces or self.deleted or written)

    @property
    def by_repair(self) -> bool:
        """Whether a repair wrote the record, as its own commit or in place of a record that it voided."""
        return self.transaction.startswith(REPAIR)

    @property
    def was_voided(self) -> bool:
        """Whether a repair voided the version; this record replaces the one that was voided."""
        return self.void and self.by_repair

    @property
    def resumes(self) -> int:
        """The version from which on the effect of the lost record that this one replaces is known; 0 for none.

        It has a root, without which its tree, and those of later versions, can't be built.
        """
        version = self.metadata.get(RESUMES) if self.was_voided else None
        return version if isinstance(version, int) and version > 0 else 0

    @property
    def voids(self) -> tuple[int, ...]:
        """The versions that a repair voided, if this record is the repair's own commit; otherwise none."""
        if not self.by_repair:
            return ()
        listed = self.metadata.get(VOIDED)
        return tuple(v for v in listed if isinstance(v, int)) if isinstance(listed, list | tuple) else ()

    @property
    def voided_transactions(self) -> frozenset[str]:
        """The ids in the record that this one replaces, if a repair could read that; otherwise none."""
        listed = self.metadata.get(VOIDED) if self.was_voided else None
        return frozenset(map(str, listed)) if isinstance(listed, list | tuple) else frozenset()

    @property
    def ids(self) -> frozenset[str]:
        """The ids of the record and of all transactions that share it."""
        return frozenset((self.transaction, *self.transactions))

    @property
    def replaced(self) -> frozenset[bytes]:
        """The checksums of a record that a repair voided, by which the links of others may refer to this one."""
        listed = self.metadata.get(REPLACED) if self.was_voided else None
        if not isinstance(listed, list | tuple):
            return frozenset()
        with contextlib.suppress(TypeError, ValueError):
            return frozenset(map(bytes.fromhex, listed))
        return frozenset()

    def commits(self, transaction: str) -> bool:
        """Return whether the record commits a transaction, alone or together with others."""
        return not self.void and (transaction == self.transaction or transaction in self.transactions)


class StoredRecord(NamedTuple):
    """A record, the checksum at the end of its frame, and about how many bytes the record takes in memory."""

    record: Record
    check: bytes
    memory: int

    def accepts(self, check: bytes) -> bool:
        """Return whether others may name the record by a checksum: its own, or that of one that it replaces."""
        return check == self.check or check in self.record.replaced

    def has_root(self, root: Root) -> bool:
        """Return whether a root was written for this record, or for the lost one that it replaces."""
        return root.record_check == self.check or (
            self.record.resumes == root.version and root.record_check in self.record.replaced
        )

    @property
    def is_long(self) -> bool:
        """Whether the record takes so much memory that only a few such records may be in use at once."""
        return self.memory > _LONG_BYTES


class Fragment(Body, frozen=True):
    """One host's contribution to a cooperative transaction.

    `structure` is the checksum of the tree's structure. `replicated` has checksums of the values that every host
    must pass, by path.
    """

    transaction: str
    host: Natural
    hosts: Natural
    base: Natural
    message: Message
    tags: TagsSet
    replaces: bool
    deleted: Names
    manifest: ObjectRef | Manifest
    bytes_added: Natural
    structure: Annotated[bytes, msgspec.Meta(max_length=STRUCTURE_BYTES)]
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)
    durable: bool = True
    replicated: Checksums = msgspec.field(default_factory=dict)

    def validate(self) -> None:
        """Raise `Corrupt` for invalid values."""
        check_transactions((self.transaction,))
        check_tags(self.tags)
        check_paths(self.deleted)
        self.manifest.validate()
        check_metadata(self.metadata)
        if not self.host < self.hosts <= _MAX_HOSTS:
            raise Corrupt(f"host {self.host} of {self.hosts} is impossible")


class Root(Body, frozen=True):
    """The whole tree and all tags as of one version; `record_check` is the checksum of that version's record.

    The nodes are those of `manifest`, which may be in pages before the root in the same object. Others, except at
    the paths in `deleted`, are those of `base`, an earlier commit's manifest in pages, or those as of the version
    `parent`, which has a root and a record with the checksum `parent_check`. The last `copies` versions are
    copies; the tree is that of the head before them.
    """

    version: Natural
    record_check: Checksum
    tags: Annotated[dict[str, Natural], msgspec.Meta(max_length=MAX_NAMES)]
    manifest: ObjectRef | Manifest
    base: ObjectRef | None = None
    deleted: Names = ()
    parent: Natural = 0
    copies: Natural = 0
    parent_check: Checksum = NO_RECORD

    def validate(self) -> None:
        """Raise `Corrupt` for invalid values."""
        check_tags(self.tags)
        if self.tags and not 0 < min(self.tags.values()) <= max(self.tags.values()) <= self.version:
            raise Corrupt("a tag of a root names a version that the root cannot contain")
        check_paths(list(filter(None, self.deleted)))
        if isinstance(self.manifest, ObjectRef):
            self.manifest.check_pages()
            if self.manifest.key != root_key(self.version) or not self.manifest.pages:
                raise Corrupt("the nodes of a root are not in pages of its own object")
        else:
            self.manifest.validate()
            if not set(self.deleted).isdisjoint(self.manifest.paths):
                raise Corrupt("a root has a node that it deletes")
        if self.parent not in (0, parent_root(self.version)) or (self.parent and self.base is not None):
            raise Corrupt("a root refers to another root than to that which its version implies")
        if self.base is not None:
            self.base.validate()
            if not self.base.pages:
                raise Corrupt("the base of a root has no pages")
        elif self.deleted and not self.parent:
            raise Corrupt("a root without a base deletes nodes")
        if self.copies >= max(self.version, 1):
            raise Corrupt("a root has no head, only copies")
