"""What the collector deletes, keeps, and says of it; what is kept can still be read afterwards, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwire.consumers.weights.census import Books, read_books, take_census
from rollwire.consumers.weights.collect import collect
from rollwire.consumers.weights.follow import promotion
from rollwire.consumers.weights.links import skips_due, write_link
from rollwire.consumers.weights.manifest import decode_manifest
from rollwire.consumers.weights.paths import plan_path
from rollwire.consumers.weights.reader import load_path
from rollwire.consumers.weights.retention import Held as Served
from rollwire.consumers.weights.retention import Retention, RetentionConfig, plan_retention, reasons_to_keep
from rollwire.consumers.weights.snapshot import Held, SnapshotWriter
from rollwire.kernels.delta.encode import encode_delta
from rollwire.kernels.digest import StateDigest
from rollwire.kernels.tensors import State
from rollwire.schemas.errors import WeightError
from rollwire.schemas.records import (
    Claim,
    Evaluation,
    Event,
    FleetStatus,
    WeightLink,
    WeightVersion,
)
from rollwire.streams.archive.layout import head_key, marks_key, stretch_key, table_key
from rollwire.streams.emit import outgoing
from rollwire.streams.seams.clock import ManualClock
from rollwire.streams.seams.log import TopicPartition
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.store import ObjectInfo
from rollwire.streams.seams.store_memory import MemoryStore

MakeState = Callable[..., State]
Move = Callable[..., State]

HOUR_US = 3_600_000_000
TOPICS = ("weight-versions", "weight-links", "fleet-status", "evaluations", "routing-traces")
CONFIG = RetentionConfig(keep_last=8, keep_every=20)


class World:
    """A log, a store, and a lineage that is published into both."""

    def __init__(self, make_state: MakeState, move: Move, lineage: str = "L") -> None:
        self.clock = ManualClock()
        self.log = MemoryLog(dict.fromkeys(TOPICS, 1))
        self.store = MemoryStore(self.clock)
        self.states: list[State] = [make_state()]
        self.held: list[Held] = []
        self._move = move
        self._writer = self.log.writer()
        self._lineage = lineage

    def publish(self, count: int, *, anchor_every: int = 10, coder: str = "gap") -> None:
        snapshots = SnapshotWriter(
            self.store,
            model="m",
            lineage=self._lineage,
            shard_bytes=4_000,
            anchor_shard_bytes=1 << 20,
            threads=1,
            hf_config=None,
        )
        for version in range(len(self.held), len(self.held) + count):
            now_us = self.clock.now_us()
            if version == 0:
                held = snapshots.write_first(0, 0, self.states[0], now_us)
            else:
                self.states.append(self._move(self.states[-1], version, 0.02))
                anchor = version % anchor_every == 0
                held = snapshots.write_next(
                    self.held[-1], version, version, self.states[-1], now_us, anchor=anchor
                )
            self.held.append(held)
            self.write(held.event)
            for base, _ in skips_due(version, 0):
                delta = encode_delta(self.states[base], held.state)
                link = write_link(
                    self.store,
                    self.held[base].event,
                    held.event,
                    delta.shards,
                    delta.heads,
                    coder="gap",
                    published_us=now_us,
                )
                self.write(link)

    def write(self, event: Event) -> None:
        self._writer.write([outgoing(event, source="test", time_us=self.clock.now_us())])

    def plan(self, config: RetentionConfig = CONFIG, *pinned: int) -> tuple[Books, Retention]:
        books = read_books(self.log, pinned, traces=True)
        return books, plan_retention(take_census(self.store, books), config, self.clock.now_us())

    def gc(self, config: RetentionConfig = CONFIG, *pinned: int) -> Retention:
        books, plan = self.plan(config, *pinned)
        collect(self.log, self.store, books, plan, config, self.clock)
        return plan

    def stored(self) -> set[str]:
        return {info.key for info in self.store.list("")}

    def read(self, version: int, have: int | None = None) -> None:
        books = read_books(self.log)
        path = plan_path(books.events, books.links, have, version)
        base = (
            None
            if have is None
            else load_path(self.store, plan_path(books.events, books.links, None, have), None)
        )
        loaded = load_path(self.store, path, base)
        assert loaded.digest.hex == StateDigest.of(self.states[version]).hex


@pytest.fixture
def world(make_state: MakeState, move: Move) -> World:
    return World(make_state, move)


def later(world: World, hours: float = 25) -> None:
    world.clock.advance(hours * 3600)


def test_the_newest_and_one_in_so_many_stay_and_can_be_read_others_are_gone(world: World) -> None:
    world.publish(50)
    later(world)
    before = world.stored()
    plan = world.gc()
    assert not plan.broken
    kept = {one.event.version: one.reasons for one in plan.kept}
    assert set(kept) == {0, 20, 40, *range(42, 50)}
    assert kept[45] == ("one of the newest 8",)
    for version in kept:
        world.read(version)
    world.read(42, 49)  # between the newest, every way stays
    for version in (13, 35):
        with pytest.raises(WeightError, match="no way"):
            world.read(version)
    deleted = before - world.stored()
    assert deleted == {verdict.info.key for verdict in plan.deletions}
    assert all("named only by what is not kept" in verdict.proof for verdict in plan.deletions)
    assert len(deleted) > 50
    assert not world.plan()[1].deletions  # nothing is left to do
    assert not world.plan()[1].gone


def test_nothing_that_stays_is_named_by_nobody(world: World) -> None:
    """Whatever is left is live, and every kept version's way is whole in the store."""
    world.publish(30)
    later(world)
    world.gc()
    plan = world.plan()[1]
    assert {verdict.fate for verdict in plan.verdicts} == {"live"}
    assert all(step.event.version <= one.event.version for one in plan.kept for step in one.path or ())


def test_what_is_served_promoted_pinned_or_checkpointed_stays(world: World) -> None:
    world.publish(30)
    status = FleetStatus(
        fleet="f",
        replica="r",
        state="swapped",
        version=7,
        wanted_version=7,
        state_digest=world.held[7].event.state_digest,
        stage_ms=0.0,
        pause_ms=0.0,
        reason="",
        open_rollouts=0,
        at_us=world.clock.now_us(),
    )
    world.write(status)
    for version in (3, 9):  # the last one counts
        world.write(promoted(world, "stable", version))
    later(world)
    kept = {one.event.version: one.reasons for one in world.gc(CONFIG, 11).kept}
    assert kept[7] == ("a replica serves it",)
    assert kept[9] == ("channel stable was promoted to it",)
    assert kept[11] == ("asked for",)
    assert 3 not in kept
    for version in (7, 9, 11):
        world.read(version)
    world.write(msgspec.structs.replace(status, state="stopped"))
    world.write(promoted(world, "stable", -1))
    assert {7, 9}.isdisjoint(one.event.version for one in world.gc(CONFIG).kept)


def promoted(world: World, channel: str, version: int) -> Evaluation:
    at_us = world.clock.now_us()
    return promotion(version, channel, model="m", lineage="L", by="person", at_us=at_us)


def test_from_the_newest_checkpoint_on_everything_stays(world: World) -> None:
    world.publish(20)
    claims = []
    for version in (4, 9):
        vector = f"checkpoints/L/{version:064x}.safetensors"
        world.store.create(vector, b"v%d" % version)
        data = (
            b'{"format":"rollwire.checkpoint.1","model":"m","lineage":"L","step":1,"version":1,"state_digest":"",'
            b'"updates":1,"next_offsets":[],"parameters":[],"vectors":{"w":{"key":"%s","size":2,"sha256":""}},'
            b'"settings":{}}' % vector.encode()
        )
        claim = Claim(key=f"checkpoints/L/{version}.json", size=len(data), sha256=f"{version:064x}")
        world.store.create(claim.key, data)
        claims.append((claim.key, vector))
        event = msgspec.structs.replace(world.held[version].event, checkpoint=claim)
        world.held[version] = world.held[version]._replace(event=event)
    again = MemoryLog(dict.fromkeys(TOPICS, 1))
    world.log, world._writer = again, again.writer()
    for held in world.held:
        world.write(held.event)
    later(world)
    plan = world.gc(RetentionConfig(keep_last=4, keep_every=1_000))
    kept = {one.event.version: one.reasons for one in plan.kept}
    assert set(kept) == {0, *range(9, 20)}
    assert kept[9] == ("the newest checkpoint is of version 9",)
    assert set(claims[1]) <= world.stored()
    assert not set(claims[0]) & world.stored()
    world.read(9)


def test_the_checkpoint_before_a_revert_stays_though_newer_ones_were_given_up(world: World) -> None:
    world.publish(11)
    claim = Claim(key="checkpoints/L/c.json", size=1, sha256="0" * 64)
    known = {held.event.version: held.event for held in world.held}
    for version in (0, 4, 8):
        known[version] = msgspec.structs.replace(known[version], checkpoint=claim)
    nothing = Served()
    config = RetentionConfig(keep_last=2, keep_every=1_000)
    assert set(reasons_to_keep(nothing, config, known)) == {0, 8, 9, 10}
    known[10] = msgspec.structs.replace(known[10], kind="revert", reverts_to=5)
    found = reasons_to_keep(nothing, config, known)
    assert set(found) == {0, *range(4, 11)}
    assert found[4] == ["the newest checkpoint is of version 4"]


def test_c26_young_objects_are_spared_and_orphans_wait_for_their_grace(world: World) -> None:
    world.publish(30)
    orphan = "weights/m/deltas/" + "0" * 64 + ".rwdl"
    world.store.create(orphan, b"of a trainer that died")
    later(world, 23)
    plan = world.gc()
    assert not plan.deletions
    assert not plan.gone
    assert {verdict.fate for verdict in plan.verdicts} == {"live", "young"}
    later(world, 2)
    proofs = {verdict.info.key: verdict for verdict in world.gc().deletions}
    assert proofs[orphan].fate == "orphan"
    assert "nothing in the log names it, and it is 25.0 h old" in proofs[orphan].proof
    assert orphan not in world.stored()


def test_of_two_links_between_the_same_versions_the_one_that_is_needed_stays(world: World) -> None:
    """Made by two builders of other shard sizes."""
    world.publish(50, anchor_every=1_000)
    base, target = world.held[0], world.held[40]
    links: list[WeightLink] = []
    for shard_bytes in (1, 1 << 20):
        delta = encode_delta(base.state, target.state, shard_bytes=shard_bytes)
        links.append(
            write_link(
                world.store,
                base.event,
                target.event,
                delta.shards,
                delta.heads,
                coder="gap",
                published_us=world.clock.now_us(),
            )
        )
        world.write(links[-1])
    later(world)
    plan = world.gc()
    way = next(one.path for one in plan.kept if one.event.version == 40)
    assert way is not None
    assert way[-1].source == links[1]  # the smaller one
    world.read(40)
    assert not any((one.event.version, one.base_version) == (40, 0) for one in plan.gone)
    assert not world.plan()[1].broken


def test_what_is_put_again_or_named_after_the_plan_is_spared(world: World) -> None:
    world.publish(30)
    later(world)
    books, plan = world.plan()
    victims = [verdict.info.key for verdict in plan.deletions]
    data = world.store.get(victims[0])
    world.store.create(victims[0], data)  # a writer found it in place of his own, and it was old
    shard = next(o for o in world.held[5].event.objects if o.key in victims[1:])
    revived = msgspec.structs.replace(
        world.held[29].event, version=30, base_version=29, objects=(shard,), stored_bytes=shard.size
    )
    world.write(revived)
    done = collect(world.log, world.store, books, plan, CONFIG, world.clock)
    assert done.spared == 2
    assert {victims[0], shard.key} <= world.stored()
    assert done.objects == len(victims) - 2


def test_followers_are_told_before_anything_is_deleted(world: World) -> None:
    """A collector that dies after its first delete: nobody plans over what is gone, and the next run ends it."""
    world.publish(40)
    later(world)
    books, plan = world.plan()

    class Died(BaseException):
        pass

    class Dying(MemoryStore):
        def delete(self, key: str) -> None:
            world.store.delete(key)
            raise Died

        def head(self, key: str) -> ObjectInfo | None:
            return world.store.head(key)

    with pytest.raises(Died):
        collect(world.log, Dying(), books, plan, CONFIG, world.clock)
    for one in plan.kept:
        world.read(one.event.version)
    with pytest.raises(WeightError, match="no way"):
        world.read(13)
    rest = world.gc()
    assert {v.info.key for v in rest.deletions} == {v.info.key for v in plan.deletions[1:]}
    assert not rest.gone
    assert {v.fate for v in world.plan()[1].verdicts} == {"live"}


def test_a_kept_version_that_cannot_be_read_stops_deletion_in_its_lineage(world: World) -> None:
    world.publish(30)
    later(world)
    shard = world.held[27].event.objects[0].key
    world.store.delete(shard)
    plan = world.gc()
    assert any("version 27" in text and "are missing" in text and shard in text for text in plan.broken)
    assert not plan.deletions
    assert not plan.gone


def test_another_logs_objects_in_the_same_bucket_are_left_alone(
    world: World, make_state: MakeState, move: Move
) -> None:
    world.publish(30)
    other = World(make_state, move, lineage="M")
    other.store, other.clock = world.store, world.clock
    other.publish(3)
    loose = "weights/m/deltas/" + "1" * 64 + ".rwdl"
    world.store.create(loose, b"of either")
    world.store.create("checkpoints/M/x.json", b"{}")
    world.store.create("somebody/else", b"")
    later(world)
    before = world.stored()
    plan = world.gc()
    fates = {verdict.info.key: verdict.fate for verdict in plan.verdicts}
    assert fates[loose] == fates["checkpoints/M/x.json"] == "unproved"
    assert "somebody/else" not in fates
    assert not plan.deletions
    assert world.stored() == before
    for version in range(3):
        other.read(version)
    books = read_books(world.log)
    alone = plan_retention(take_census(world.store, books, sole=True), CONFIG, world.clock.now_us())
    assert {"checkpoints/M/x.json", loose} <= {verdict.info.key for verdict in alone.deletions}


def test_the_archive_and_its_heads_are_never_collected(world: World) -> None:
    at = TopicPartition("rollouts", 0)
    keys = {
        head_key("rollwire", 1),
        table_key("rollwire", 1, "ab"),
        marks_key("rollwire", 1, "cd"),
        stretch_key("rollwire", at, 0, 9, "ef"),
    }
    for key in keys:
        world.store.create(key, b"sealed")
    world.publish(3)
    later(world)
    books = read_books(world.log, traces=True)
    for sole in (False, True):
        plan = plan_retention(take_census(world.store, books, sole=sole), CONFIG, world.clock.now_us())
        collect(world.log, world.store, books, plan, CONFIG, world.clock)
        assert not keys & {verdict.info.key for verdict in plan.verdicts}
    assert keys <= world.stored()


def test_orphaned_routing_traces_are_collected_where_the_log_reaches_back(world: World) -> None:
    world.publish(2)
    world.store.create("routing/m/abc", b"trace")
    later(world)
    assert "routing/m/abc" in {verdict.info.key for verdict in world.gc().deletions}
    world.store.create("routing/m/abd", b"trace")
    later(world)
    books = read_books(world.log, traces=True)._replace(traces_from_us=world.clock.now_us())
    plan = plan_retention(take_census(world.store, books), CONFIG, world.clock.now_us())
    assert [verdict.fate for verdict in plan.verdicts if "abd" in verdict.info.key] == ["unproved"]
    named = books._replace(traces=frozenset({"routing/m/abd"}))
    plan = plan_retention(take_census(world.store, named), CONFIG, world.clock.now_us())
    assert [verdict.fate for verdict in plan.verdicts if "abd" in verdict.info.key] == ["live"]


def test_an_anchors_files_and_sums_are_deleted_with_it(world: World) -> None:
    world.publish(30)
    event = world.held[10].event
    assert event.anchor is not None
    manifest = decode_manifest(world.store.get(event.anchor.key))
    assert manifest.sums is not None
    later(world)
    world.gc()
    keys = world.stored()
    assert not keys & {event.anchor.key, manifest.sums.key, *(o.key for o in manifest.objects)}


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_whatever_was_published_what_is_kept_can_be_read(
    data: st.DataObject, make_state: MakeState, move: Move
) -> None:
    world = World(make_state, move)
    for _ in range(data.draw(st.integers(1, 3))):
        world.publish(data.draw(st.integers(1, 12)), anchor_every=data.draw(st.integers(2, 9)))
        later(world)
        config = RetentionConfig(
            keep_last=data.draw(st.integers(1, 6)), keep_every=data.draw(st.integers(2, 9))
        )
        pinned = data.draw(st.sets(st.integers(0, len(world.held) - 1), max_size=2))
        readable = {v for v in range(len(world.held)) if can_read(world, v)}
        plan = world.gc(config, *(pinned & readable))
        kept = {one.event.version for one in plan.kept}
        assert len(world.held) - 1 in kept
        if not plan.broken:
            assert pinned & readable <= kept
            for version in kept:
                world.read(version)


def can_read(world: World, version: int) -> bool:
    books = read_books(world.log)
    try:
        return bool(plan_path(books.events, books.links, None, version))
    except WeightError:
        return False


def test_events_of_two_lineages_are_judged_apart(make_state: MakeState, move: Move) -> None:
    world = World(make_state, move)
    world.publish(12)
    first: list[WeightVersion] = [held.event for held in world.held]
    later(world)
    second = World(make_state, move, lineage="M")
    second.store, second.log, second.clock = world.store, world.log, world.clock
    second._writer = world.log.writer()
    second.publish(12)
    later(second)
    plan = second.gc(RetentionConfig(keep_last=2, keep_every=1_000))
    kept = {(one.event.lineage, one.event.version) for one in plan.kept}
    assert kept == {("L", 0), ("L", 10), ("L", 11), ("M", 0), ("M", 10), ("M", 11)}
    assert len(first) == 12
    assert second.store.head(first[11].manifest.key) is not None
