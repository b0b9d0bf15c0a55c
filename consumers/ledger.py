"""The ledger: received = accepted + refused + shed + pending, per topic, added up by a reader that trusts no process (law 7).

It reads the topics and the committed offsets, nothing else. Each record is looked for where it must have gone:

    rollouts, rewards, routing-traces   the members of a group, the fate of one that `assemble` closed, a dead letter
    production-rollouts                 the same, by `assemble-production`, whose the rewards of what people said are too
    user-feedback                       the reward that closed its rollout's window, a dead letter
    groups                              a fate by `pack`, a dead letter
    (production-)groups-closed          the group or the fate that it announces
    group-fates                         of a trained group: its plan
    packed-batches                      the ranges that the training step of its number consumed, or a revert that passes it over
    train-steps, weight-versions        each other, one to one; versions without a hole
    dead-letters                        the record that was refused; of a replayed letter: its event, once a mark
    the rest                            the codec

    accepted    it went on: became part of a group, a plan, a step, a version
    refused     it lies whole in `dead-letters`
    shed        it was dropped by a rule, and a fate names the rule; a plan: by a revert that it did not know of
    pending     none of these, and at or above the committed offset of who reads it
    missing     none of these, and below that offset: lost
    extra       twice what may be once, or made from a record that does not exist
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.errors import Refused
from rollwire.schemas.records import (
    DeadLetter,
    Event,
    Feedback,
    Group,
    GroupFate,
    Notice,
    OffsetRange,
    PackedBatch,
    Reward,
    TrainStep,
    WeightVersion,
)
from rollwire.streams.emit import decode_record, deletes
from rollwire.streams.reverts import NO_REVERTS, Reverts
from rollwire.streams.seams.log import Log, Record, TopicPartition
from rollwire.streams.seams.scan import scan
from rollwire.streams.settlement import REPLAY_COUNT, REPLAY_OF, settlement_of

SHOWN: Final = 20  # ids of missing and extra events that a line carries
JOINED: Final = ("rollouts", "production-rollouts", "rewards", "routing-traces")
ASSEMBLERS: Final = ("assemble", "assemble-production")
# Who consumes a topic transactionally: what it committed is decided. `rewards` has two readers: see `_LIVE`.
CONSUMERS: Final = {
    **dict.fromkeys(JOINED, "assemble"),
    "production-rollouts": "assemble-production",
    "groups": "pack",
    "packed-batches": "trainer",
}
# Of the rewards, those of this kind are for `assemble-production`.
_LIVE: Final = ("rewards", "assemble-production", "user")
_SETTLE_S: Final = 1.0
_COUNTS: Final = 3


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One topic's account."""

    topic: str
    received: int
    accepted: int
    refused: int
    shed: int
    pending: int
    extra: int
    missing_ids: tuple[str, ...]  # the first `SHOWN`
    extra_ids: tuple[str, ...]

    @property
    def missing(self) -> int:
        return self.received - self.accepted - self.refused - self.shed - self.pending

    @property
    def gap(self) -> int:
        """What is not accounted for; 0 is the only good value."""
        return self.missing + self.extra


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    lines: tuple[Line, ...]  # by topic name

    @property
    def gap(self) -> int:
        return sum(line.gap for line in self.lines)

    def __getitem__(self, topic: str) -> Line:
        return next(line for line in self.lines if line.topic == topic)


class Seen(msgspec.Struct, frozen=True):
    """A record that was read. `identity`: its `ce_id`; "" = it has none, or does not decode."""

    partition: int
    offset: int
    identity: str


class Book:
    """Collects records in any order; `close` adds them up. Pure."""

    def __init__(self) -> None:
        self._seen: dict[str, list[Seen]] = {topic: [] for topic in TOPICS}
        self._refused: set[tuple[str, int, int]] = set()
        self._extra: dict[str, list[str]] = defaultdict(list)
        self._once: set[tuple[str, str]] = set()
        self._members: set[str] = set()  # rollout ids in groups
        self._traced: set[str] = set()
        self._groups: set[str] = set()
        self._partial: set[str] = set()  # groups that were closed without all members
        self._shed_members: set[str] = set()
        self._assembled: set[str] = set()  # groups with a fate by assemble
        self._fates: dict[str, GroupFate] = {}  # by pack
        self._planned: set[str] = set()
        self._said: dict[tuple[int, int], str] = {}  # feedback: of which rollout
        self._judged: set[str] = set()  # rollouts with a reward of what people said
        self._batches: dict[tuple[int, int], PackedBatch] = {}
        self._consumed: dict[tuple[str, int], tuple[OffsetRange, ...]] = {}
        self._version_of: dict[tuple[str, int], int] = {}  # lineage, step -> version
        self._versions: dict[tuple[str, int], WeightVersion] = {}
        self._reverts: dict[str, Reverts] = {}
        self._letters: dict[tuple[int, int], DeadLetter] = {}
        self._replayed: Counter[tuple[int, int]] = Counter()  # by the marks
        self._copies: Counter[str] = Counter()  # replayed records, by the letter they name

    def add(self, record: Record) -> None:
        identity = _header(record, "ce_id")
        if of := _header(record, REPLAY_OF):
            self._copies[of] += 1
            self._only_once(record.topic, f"replay {_header(record, REPLAY_COUNT)} of dead letter {of}")
        # Rollouts, rewards and traces are told by their headers: what they say is the codec's and assemble's to judge.
        if record.topic not in JOINED or _is_live(record.topic, identity):
            try:
                self._learn(record, decode_record(record))
            except Refused:
                identity = identity if deletes(record) else ""
        self._seen[record.topic].append(Seen(record.partition, record.offset, identity))

    def close(
        self,
        committed: Mapping[TopicPartition, int],
        begins: Mapping[TopicPartition, int],
        live: Mapping[TopicPartition, int] | None = None,
    ) -> Ledger:
        """`committed`: offsets of `CONSUMERS`, absent = none; `live`: those of `assemble-production` in `rewards`. `begins`: what
        lies below was removed by retention."""
        self._find_extra(begins)
        for (lineage, _), version in sorted(self._versions.items()):
            self._reverts[lineage] = self._reverts.get(lineage, NO_REVERTS).add(version)
        if not _whole("groups", begins):  # fates outlive groups, and name their members
            for group_id in self._fates.keys() - self._groups:
                self._traced.update(self._fates[group_id].members)
        if not _whole("packed-batches", begins):
            self._planned.update(self._fates)
        judges: dict[str, Callable[[Seen], str]] = {
            "rollouts": self._rollout,
            "production-rollouts": self._rollout,
            "user-feedback": self._feedback,
            "production-groups-closed": self._closed,
            "rewards": self._reward,
            "routing-traces": self._trace,
            "groups": self._group,
            "groups-closed": self._closed,
            "group-fates": self._fate,
            "packed-batches": self._batch,
            "train-steps": self._step,
            "weight-versions": self._version,
        }
        return Ledger(
            lines=tuple(
                self._line(topic, judges.get(topic, _decoded), committed, live or {})
                for topic in sorted(self._seen)
            )
        )

    def _line(
        self,
        topic: str,
        judge: Callable[[Seen], str],
        committed: Mapping[TopicPartition, int],
        live: Mapping[TopicPartition, int],
    ) -> Line:
        counts: dict[str, int] = {"accepted": 0, "refused": 0, "shed": 0, "pending": 0}
        missing: list[str] = []
        for seen in self._seen[topic]:
            verdict = "refused" if (topic, seen.partition, seen.offset) in self._refused else judge(seen)
            offsets = live if _is_live(topic, seen.identity) else committed
            pending = topic in CONSUMERS and seen.offset >= offsets.get(
                TopicPartition(topic, seen.partition), 0
            )
            if verdict:
                counts[verdict] += 1
            elif pending:
                counts["pending"] += 1
            else:
                missing.append(f"{seen.identity or 'unnamed'} at {topic}[{seen.partition}]:{seen.offset}")
        extra = self._extra[topic]
        return Line(
            topic=topic,
            received=len(self._seen[topic]),
            **counts,
            extra=len(extra),
            missing_ids=tuple(missing[:SHOWN]),
            extra_ids=tuple(extra[:SHOWN]),
        )

    # -- what the topics say ------------------------------------------------------------------------------------

    def _learn(self, record: Record, event: Event) -> None:
        match event:
            case Group():
                # A replayed dead letter stands there again on purpose.
                self._only_once("groups", event.group_id + _header(record, REPLAY_OF))
                self._groups.add(event.group_id)
                self._members.update(m.rollout.rollout_id for m in event.members)
                self._traced.update(m.rollout.rollout_id for m in event.members if m.trace is not None)
                if len(event.members) < event.group_size:
                    self._partial.add(event.group_id)
            case Reward():
                self._judged.add(event.rollout_id)
            case Feedback():
                self._said[record.partition, record.offset] = event.rollout_id
            case GroupFate() if event.decided_by in ASSEMBLERS:
                self._only_once("group-fates", event.group_id)
                self._assembled.add(event.group_id)
                self._shed_members.update(event.members)
            case GroupFate():
                self._only_once("group-fates", event.group_id)
                self._fates[event.group_id] = event
                self._members.update(event.members)
            case PackedBatch():
                self._only_once(
                    "packed-batches", f"{event.lineage}/{event.step}/{event.rank}/{event.newest_revert}"
                )
                if event.rank == 0:
                    for group_id in event.group_ids:
                        self._only_once("packed-batches", group_id)
                self._planned.update(event.group_ids)
                self._batches[record.partition, record.offset] = event
            case TrainStep():
                self._only_once("train-steps", f"{event.lineage}/{event.step}")
                self._consumed[event.lineage, event.step] = event.consumed
                self._version_of[event.lineage, event.step] = event.version
            case WeightVersion():
                self._only_once("weight-versions", f"{event.lineage}/{event.version}")
                self._versions[event.lineage, event.version] = event
            case DeadLetter():
                at = event.source
                self._only_once("dead-letters", f"{event.refused_by}: {at.topic}[{at.partition}]:{at.offset}")
                self._refused.add((at.topic, at.partition, at.offset))
                self._letters[record.partition, record.offset] = event
            case Notice() if (done := settlement_of(event)) is not None and done.action == "replayed":
                self._replayed.update((at.partition, at.offset) for at in done.letters)
            case _:
                pass

    def _only_once(self, topic: str, identity: str) -> None:
        if (topic, identity) in self._once:
            self._extra[topic].append(f"{identity} again")
        self._once.add((topic, identity))

    def _find_extra(self, begins: Mapping[TopicPartition, int]) -> None:
        """Records made from nothing, and holes in the versions."""
        kinds = ("rollouts", "production-rollouts")
        # Else retention may have taken the rollouts of groups that are still there.
        if all(_whole(topic, begins) for topic in kinds):
            rollouts = {seen.identity for topic in kinds for seen in self._seen[topic]}
            self._extra["groups"] += [
                f"{i} of no rollout" for i in sorted((self._members | self._shed_members) - rollouts)
            ]
        read = {(topic, s.partition, s.offset) for topic, seen in self._seen.items() for s in seen}
        for letter in self._letters.values():
            at = letter.source
            kept = at.offset >= begins.get(TopicPartition(at.topic, at.partition), 0)
            if kept and (at.topic, at.partition, at.offset) not in read:
                self._extra["dead-letters"].append(f"of no record: {at.topic}[{at.partition}]:{at.offset}")
        for (partition, offset), times in self._replayed.items():
            replayed = self._letters.get((partition, offset))
            copies = self._copies[f"{partition}:{offset}"]
            if replayed is not None and _whole(replayed.source.topic, begins) and copies < times:
                self._extra["dead-letters"].append(
                    f"{partition}:{offset} replayed {times} times, {copies} times there"
                )
        newest: dict[str, int] = {}
        for lineage, version in self._versions:
            newest[lineage] = max(newest.get(lineage, 0), version)
        self._extra["weight-versions"] += [
            f"{lineage}/{version} is a hole"
            for lineage, last in sorted(newest.items())
            for version in range(last)
            if (lineage, version) not in self._versions
        ]

    # -- where a record went: "" = nowhere that can be seen ---------------------------------------------------

    def _rollout(self, seen: Seen) -> str:
        group_id = seen.identity.rsplit(".", 1)[0]
        if seen.identity in self._members or group_id in self._partial:
            return "accepted"
        return "shed" if seen.identity in self._shed_members else ""

    def _reward(self, seen: Seen) -> str:
        return self._of_rollout(seen, self._members)

    def _trace(self, seen: Seen) -> str:
        return self._of_rollout(seen, self._traced)

    def _of_rollout(self, seen: Seen, members: set[str]) -> str:
        rollout_id = seen.identity.split("/", 1)[0]
        group_id = rollout_id.rsplit(".", 1)[0]
        if rollout_id in members or group_id in self._partial:
            return "accepted"
        # A fate names the rollouts that were seen; what came with them went with them.
        return "shed" if group_id in self._assembled else ""

    def _feedback(self, seen: Seen) -> str:
        said = self._said.get((seen.partition, seen.offset))
        if said is None:
            return ""
        # Before that its window is open. What the reward was made of is for the rules to say: not all that is said earns one.
        return "accepted" if said in self._judged else "pending"

    def _group(self, seen: Seen) -> str:
        fate = self._fates.get(seen.identity)
        if fate is None:
            return ""
        return "accepted" if fate.fate == "kept" else "shed"

    def _closed(self, seen: Seen) -> str:
        return "accepted" if seen.identity in self._groups or seen.identity in self._assembled else ""

    def _fate(self, seen: Seen) -> str:
        fate = self._fates.get(seen.identity)
        if fate is not None and fate.fate == "kept" and seen.identity not in self._planned:
            return ""
        return _decoded(seen)

    def _batch(self, seen: Seen) -> str:
        batch = self._batches.get((seen.partition, seen.offset))
        if batch is None:
            return ""
        if self._reverts.get(batch.lineage, NO_REVERTS).passes_over(batch.step, batch.newest_revert):
            return "shed"
        ranges = self._consumed.get((batch.lineage, batch.step), ())
        took = any(r.partition == seen.partition and r.start <= seen.offset < r.end for r in ranges)
        return "accepted" if took else ""

    def _step(self, seen: Seen) -> str:
        lineage, _, number = seen.identity.rpartition("/")
        step = int(number) if number.isdecimal() else -1
        version = self._versions.get((lineage, self._version_of.get((lineage, step), -1)))
        return "accepted" if version is not None and version.step == step else ""

    def _version(self, seen: Seen) -> str:
        lineage, _, number = seen.identity.rpartition("/")
        version = self._versions.get((lineage, int(number))) if number.isdecimal() else None
        if version is None:
            return ""
        # Version 0 is the anchor before training.
        taken = self._version_of.get((lineage, version.step)) == version.version
        return "accepted" if version.step == 0 or taken else ""


def _is_live(topic: str, identity: str) -> bool:
    """Whether a record is a reward of what people said, by its id: `<rollout id>/<source>/...`."""
    return topic == _LIVE[0] and identity.split("/", 2)[1:2] == [_LIVE[2]]


def _decoded(seen: Seen) -> str:
    return "accepted" if seen.identity else ""


def _whole(topic: str, begins: Mapping[TopicPartition, int]) -> bool:
    """Whether nothing of a topic was removed yet."""
    return all(offset == 0 for partition, offset in begins.items() if partition.topic == topic)


def _header(record: Record, name: str) -> str:
    value = next((value for key, value in record.headers if key == name), None)
    return "" if value is None else value.decode(errors="replace")


def count_ledger(log: Log, prefix: str) -> Ledger:
    """Counts all topics of the catalogue. `prefix` is that of the consumer groups.

    On a live log the markers of one transaction reach its partitions one after the other, so a gap is believed only
    when it is still there after `_COUNTS` counts. Raises `DeadlineExceeded` when the log does not answer.
    """
    ledger = _count(log, prefix)
    pause = threading.Event()
    for _ in range(_COUNTS - 1):
        if ledger.gap == 0:
            break
        pause.wait(_SETTLE_S)
        ledger = _count(log, prefix)
    return ledger


def _count(log: Log, prefix: str) -> Ledger:
    committed: dict[TopicPartition, int] = {}
    begins: dict[TopicPartition, int] = {}
    # The offsets first: whatever lies below them has left its trace in the topics by now.
    for topic, consumer in CONSUMERS.items():
        partitions = [TopicPartition(topic, p) for p in range(log.partitions(topic))]
        committed |= log.committed(f"{prefix}{consumer}", partitions)
    topic, consumer, _ = _LIVE
    partitions = [TopicPartition(topic, p) for p in range(log.partitions(topic))]
    live = log.committed(f"{prefix}{consumer}", partitions)
    for topic in TOPICS:
        begins |= log.beginning_offsets([TopicPartition(topic, p) for p in range(log.partitions(topic))])
    book = Book()
    # Against the flow, so that what an event was made from is read after it. What lies below a committed offset has
    # left its trace already; only `groups-closed` and `group-fates` are looked for in topics that come after them.
    flow = (
        "user-feedback",
        "groups-closed",
        "production-groups-closed",
        "group-fates",
        "groups",
        "packed-batches",
        "train-steps",
        "weight-versions",
        *JOINED,
    )
    for topic in (*(t for t in TOPICS if t not in flow), *flow):
        for record in scan(log, [topic]):
            book.add(record)
    return book.close(committed, begins, live)
