"""Texts that begin alike go to one replica, which may have computed their beginning.

Nothing is asked of replicas: what each was sent is remembered here, and may be forgotten there.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any, TypeVar

from tandem.peers.grpc.clients import DrafterClient, TargetClient
from tandem.peers.replicas.replica import Replica

# Tokens of a block, as in OpenVINO's cache; replicas may have others.
BLOCK = 32
# Two million tokens: the caches of several replicas. It takes about 15 MB.
MOST_BLOCKS = 1 << 16
# Of a block. What more replicas than these hold is near every text.
MOST_PROCESSES = 8
# A replica may be a quarter busier than the mean where it spares a text a quarter of its prompt.
# The bound is that of consistent hashing with bounded loads (arXiv 1608.01350), rounded up like it.
SHARE = 0.25

C = TypeVar("C", DrafterClient, TargetClient)


class Prefix:
    """The beginnings of a text, as hashes: of each full block with all that comes before it.

    Attributes:
        blocks: of the first block, the first two, ...
        hint: of the caller's key; None without one.

    Args:
        token_ids: of the text, so far.
        salt: texts with different ones have no beginning in common.
        key: texts with the same one prefer one replica; empty for none.
    """

    def __init__(self, token_ids: Sequence[int], salt: str = "", key: str = "") -> None:
        self._root = _hash(salt.encode(), b"salt")
        self.hint = _hash(self._root + key.encode(), b"key") if key else None
        self.blocks: list[bytes] = []
        self.grow(token_ids)

    def grow(self, token_ids: Sequence[int]) -> None:
        """Take in the text as it is by now: the same tokens, and those that followed."""
        known, full = len(self.blocks) * BLOCK, len(token_ids) // BLOCK * BLOCK
        tokens = array("I", token_ids[known:full])
        parent = self.blocks[-1] if self.blocks else self._root
        for begin in range(0, len(tokens), BLOCK):
            parent = _hash(parent + tokens[begin : begin + BLOCK].tobytes(), b"block")
            self.blocks.append(parent)


class SentPrefixes:
    """Which processes of a service were last sent which beginnings.

    It is bounded: what was not sent for the longest is forgotten, the end of a text before its
    beginning.

    Args:
        most: blocks that are remembered.
    """

    def __init__(self, most: int = MOST_BLOCKS) -> None:
        self._most = most
        self._sent: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sent)

    def note(self, prefix: Prefix | None, replica: Replica[Any]) -> None:
        """A replica is sent a text. A process that names no incarnation is not remembered."""
        process = replica.reply.info.incarnation
        if prefix is None or not process:
            return
        hint = () if prefix.hint is None else (prefix.hint,)
        for each in (*reversed(prefix.blocks), *hint):
            known = self._sent.get(each, ())
            if known[:1] != (process,):
                others = [other for other in known if other != process]
                self._sent[each] = (process, *others[: MOST_PROCESSES - 1])
            self._sent.move_to_end(each)
        while len(self._sent) > self._most:
            self._sent.popitem(last=False)

    def found(self, prefix: Prefix) -> dict[int, int]:
        """How many of a text's first blocks each process was sent; the caller's key counts as much
        as the whole text, and one block more."""
        found: dict[int, int] = {}
        for count, each in enumerate(prefix.blocks, 1):
            if each not in self._sent:
                break
            found.update(dict.fromkeys(self._sent[each], count))
        if prefix.hint is not None:
            for process in self._sent.get(prefix.hint, ()):
                found[process] = found.get(process, 0) + len(prefix.blocks) + 1
        return found

    def choose(
        self, replicas: Iterable[Replica[C]], prefix: Prefix | None, zone: str = ""
    ) -> Replica[C] | None:
        """The replica for a text: the one that was sent most of its beginning, if it is among the
        least loaded, else the one with the least load; None of none.

        One that has failed a text, has no room or is in another zone than the least loaded comes
        after those that are not, whatever it was sent.

        Args:
            replicas: that may serve it.
            prefix: of the text; None takes the least loaded.
            zone: that is preferred; empty for none.
        """
        ordered = sorted(replicas, key=lambda replica: replica.order(zone))
        if not ordered:
            return None
        if prefix is None or not (found := self.found(prefix)):
            return ordered[0]
        rank = ordered[0].rank(zone)
        level = [replica for replica in ordered if replica.rank(zone) == rank]
        load = sum(replica.taken for replica in level) + 1
        share = (1 + SHARE) * load / sum(replica.all_slots for replica in level)

        def sent(replica: Replica[C]) -> int:
            return found.get(replica.reply.info.incarnation, 0)

        light = [each for each in level if each.taken < math.ceil(share * each.all_slots)]
        warm = max(light, key=sent, default=ordered[0])
        spared = sent(warm) - sent(ordered[0])
        return warm if spared > SHARE * len(prefix.blocks) else ordered[0]


def _hash(data: bytes, kind: bytes) -> bytes:
    return blake2b(data, digest_size=16, person=kind).digest()
