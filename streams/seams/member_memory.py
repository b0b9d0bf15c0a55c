"""The in-memory twin of a consumer group's members: generations, `range`, and a rebalance that waits for everybody.

A rebalance begins when a member joins or leaves. Everybody lets go of what it holds at its next poll (eager protocol), and
when all have, the partitions are shared out anew. Who does not poll is waited for, until a test says that its time is up
(`expire`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from rollwire.schemas.errors import LogError, LogUnavailable
from rollwire.streams.seams.forwarding import ForwardingTransactions
from rollwire.streams.seams.log import TopicPartition, TransactionalWriter


class MemoryGroup:
    """The coordinator of one group."""

    def __init__(self, name: str, count: Callable[[str], int], changed: threading.Condition) -> None:
        self.name = name
        self.generation = 0
        self._count = count
        self._changed = changed
        self._members: list[MemoryMember] = []  # those that hold a place, oldest first
        self._waited_for: set[MemoryMember] = set()  # who has not let go yet

    def join(
        self,
        topics: Sequence[str],
        revoke: Callable[[frozenset[TopicPartition]], None],
        make_writer: Callable[[str, float], TransactionalWriter],
    ) -> MemoryMember:
        for topic in topics:
            self._count(topic)
        member = MemoryMember(self, topics, revoke, make_writer, self._changed)
        with self._changed:
            self.enter(member)
        return member

    def enter(self, member: MemoryMember) -> None:
        self._members.append(member)
        self._rebalance()

    def leave(self, member: MemoryMember) -> None:
        if member in self._members:
            self._members.remove(member)
            self._rebalance()

    def expire(self, member: MemoryMember) -> None:
        """What the broker does when a member was silent for too long."""
        with self._changed:
            self.leave(member)

    def holds(self, member: MemoryMember, generation: int) -> bool:
        return member in self._members and generation == self.generation

    def waits_for(self, member: MemoryMember) -> bool:
        return member in self._waited_for

    def has_let_go(self, member: MemoryMember) -> None:
        self._waited_for.discard(member)
        if not self._waited_for:
            self._share()

    def _rebalance(self) -> None:
        self._waited_for = set(self._members)
        self._changed.notify_all()

    def _share(self) -> None:
        self.generation += 1
        for member in self._members:
            member.granted = set()
        for topic in sorted({topic for member in self._members for topic in member.topics}):
            readers = [member for member in self._members if topic in member.topics]
            each, more = divmod(self._count(topic), len(readers))
            first = 0
            for number, member in enumerate(readers):
                after = first + each + (number < more)
                member.granted |= {TopicPartition(topic, p) for p in range(first, after)}
                first = after
        self._changed.notify_all()


class MemoryMember:
    """A place in a group; see `rollwire.streams.seams.log.Member`."""

    def __init__(
        self,
        group: MemoryGroup,
        topics: Sequence[str],
        revoke: Callable[[frozenset[TopicPartition]], None],
        make_writer: Callable[[str, float], TransactionalWriter],
        changed: threading.Condition,
    ) -> None:
        self.topics = tuple(topics)
        self.granted: set[TopicPartition] = set()
        self._group = group
        self._revoke = revoke
        self._make_writer = make_writer
        self._changed = changed
        self._generation = -1  # of what is held
        self._held: frozenset[TopicPartition] = frozenset()
        self._closed = False

    def poll(self, timeout_s: float) -> frozenset[TopicPartition]:
        deadline = time.monotonic() + timeout_s
        if self._closed:
            raise LogError(f"this member of group {self._group.name!r} is closed")
        if not self._group.holds(self, self._generation) or self._group.waits_for(self):
            self._let_go()
            with self._changed:
                if self not in self._group._members:  # its place was lost: it joins again
                    self._group.enter(self)
                if self._group.waits_for(self):
                    self._group.has_let_go(self)
        with self._changed:
            while not self._settled() and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            if self._settled() and self._generation != self._group.generation:
                self._generation, self._held = self._group.generation, frozenset(self.granted)
            elif self._settled() and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
        return self._held

    def transactional_writer(self, transactional_id: str, timeout_s: float = 60.0) -> TransactionalWriter:
        return _PlacedWriter(self, self._make_writer(transactional_id, timeout_s))

    def close(self) -> None:
        self._let_go()
        self._closed = True
        with self._changed:
            self._group.leave(self)

    @property
    def placed(self) -> bool:
        """Whether the broker takes offsets from it: while a rebalance waits for it, it still does."""
        return self._group.holds(self, self._generation)

    def names(self, group: str) -> bool:
        return group == self._group.name

    def _settled(self) -> bool:
        return self in self._group._members and not self._group._waited_for

    def _let_go(self) -> None:
        held, self._held = self._held, frozenset()
        if held:
            self._revoke(held)


class _PlacedWriter(ForwardingTransactions):
    """A transactional writer that commits its group's offsets only while the place is held."""

    def __init__(self, member: MemoryMember, inner: TransactionalWriter) -> None:
        super().__init__(inner)
        self._member = member

    def commit(
        self,
        group: str,
        offsets: Mapping[TopicPartition, int],
        timeout_s: float = 30.0,
        *,
        also: Mapping[str, Mapping[TopicPartition, int]] | None = None,
    ) -> None:
        if not self._member.placed and any(self._member.names(name) for name in (group, *(also or {}))):
            self.abort()
            raise LogUnavailable(
                f"no longer a member of group {group!r} in this generation; the transaction is aborted, nothing of it "
                "is visible"
            )
        super().commit(group, offsets, timeout_s, also=also)
