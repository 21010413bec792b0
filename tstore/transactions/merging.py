"""Merging the fragments of a cooperative transaction in a tree, so that no host reads thousands of them alone.

1. A host whose fragment is durable lists the fragments of its block of a hundred hosts. If the block is complete,
   the first host that claims it (`merging-…`, created if absent) merges it into `merge-1-<block>-of-<hosts>`.
2. Then it does the same with the block of merged fragments that this one belongs to, and so on up to the top
   level, which has at most a hundred members. Up to a hundred hosts need no step in between.
3. A host that waits helps now and then: it merges a complete block that its claimant left behind. Merging is
   deterministic and objects are created once, so it is harmless if several hosts merge the same block.
"""

from __future__ import annotations

import asyncio

from tstore.errors import AlreadyExists, Unavailable
from tstore.format.encoding import encode
from tstore.format.records import Fragment
from tstore.log.reader import LogReader
from tstore.runtime import world
from tstore.storage.objects import Durability
from tstore.transactions.fragments import FAN, merged
from tstore.transactions.membership import Membership

__all__ = ["FragmentTree"]


class FragmentTree:
    """The fragments of one cooperative transaction, as one host sees and merges them."""

    def __init__(self, log: LogReader, member: Membership, durability: Durability) -> None:
        self._objects = log.objects
        self._storage = log.storage
        self._member = member
        self._durability = durability

    async def climb(self) -> bool:
        """Merge every complete block from this host upwards that nobody else has claimed.

        Return whether the top level is complete and this host claimed it, so that it is the one to commit.
        """
        block = self._member.host // FAN
        for level in range(self._member.top + 1):
            if len(await self._present(level, block)) < len(self._member.block(level, block)):
                return False
            if not await self._claim(level, block):
                return False
            if level < self._member.top:
                await self._merge(level, block)
                block //= FAN
        return True

    async def help(self) -> bool:
        """Return whether the top level is complete; otherwise look for a complete block and merge it.

        The search follows this host's own branch of the tree, or a random one where its own is merged, so that the
        hosts together find all.
        """
        block, level = 0, self._member.top
        while True:
            present = await self._present(level, block)
            missing = [i for i in self._member.block(level, block) if i not in present]
            if not missing:
                break
            if level == 0:
                return False
            own = self._member.host // FAN**level
            block = own if own in missing else missing[int(world.uniform(0, len(missing)))]
            level -= 1
        if level < self._member.top:
            await self._merge(level, block)
        return level == self._member.top

    async def absent_hosts(self) -> list[int]:
        """Return the hosts whose fragment is absent, and merge every complete block that is not merged yet."""
        fragments = set(await self._storage.list(f"{self._member.folder}/part-"))

        async def absent_below(level: int, block: int) -> list[int]:
            members = self._member.block(level, block)
            if level == 0:
                return [i for i in members if self._member.fragment_key(0, i) not in fragments]
            present = await self._present(level, block)
            absent = []
            for number in members:
                if number not in present:
                    hosts = await absent_below(level - 1, number)
                    absent += hosts
                    if not hosts:
                        await self._merge(level - 1, number)
            return absent

        return await absent_below(self._member.top, 0)

    async def merged(self, level: int, block: int) -> Fragment:
        """Return the fragments of a block merged into one; raise `Inconsistent` if hosts contradict each other."""
        keys = [self._member.fragment_key(level, i) for i in self._member.block(level, block)]
        fragments = list(await asyncio.gather(*[self._objects.read(key, Fragment) for key in keys]))
        manifests = list(await asyncio.gather(*[self._objects.manifest(f.manifest) for f in fragments]))
        return merged(self._member.name, fragments, manifests)

    async def _present(self, level: int, block: int) -> set[int]:
        """Return the members of a block whose fragment exists."""
        keys = set(await self._storage.list(self._member.block_prefix(level, block)))
        return {i for i in self._member.block(level, block) if self._member.fragment_key(level, i) in keys}

    async def _claim(self, level: int, block: int) -> bool:
        key, host = self._member.claim_key(level, block), str(self._member.host).encode()
        try:
            await self._storage.create(key, host, Durability.NONE)
        except (AlreadyExists, Unavailable):
            return False  # another host merges the block; should it die, those that wait help
        return True

    async def _merge(self, level: int, block: int) -> None:
        try:
            data = encode(await self.merged(level, block))
            await self._storage.create(self._member.fragment_key(level + 1, block), data, self._durability)
        except AlreadyExists:
            return  # another host created the same bytes
