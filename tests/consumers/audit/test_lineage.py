"""Lineage over whole histories: what it says of a version is what the version's bits were made from, and the way back agrees."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import cache

import msgspec
import pytest
import structlog

from rollwire.consumers.audit.lineage import Answer
from rollwire.consumers.audit.lineage_trace import Tracer
from rollwire.consumers.audit.rebuild_past import read_past
from rollwire.consumers.audit.rebuild_run import wanted
from rollwire.consumers.audit.versions import VersionBook, carried_by, left_by, line_to, ranges
from rollwire.consumers.trainer.sums import sums_of
from rollwire.consumers.weights.manifest import MadeFrom, decode_manifest, encode_manifest
from rollwire.consumers.weights.paths import plan_path
from rollwire.consumers.weights.reader import load_version
from rollwire.ops.simulate.run import REAL, Simulation
from rollwire.schemas.golden import load_examples
from rollwire.schemas.records import FleetStatus, OffsetRange, Position, WeightVersion
from rollwire.streams.archive.archiver import archive_sealed
from rollwire.streams.archive.heads import LocalSigner, new_signing_key
from rollwire.streams.archive.log import ArchivedLog
from rollwire.streams.archive.sealed import sealed
from rollwire.streams.archive.sealer import seal_epoch
from rollwire.streams.emit import decode_record, outgoing
from rollwire.streams.findings import Kind
from rollwire.streams.seams.clock import ManualClock
from rollwire.streams.seams.log import Outgoing, TopicPartition
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.scan import scan
from rollwire.streams.seams.store_memory import MemoryStore
from rollwire.streams.settings_notice import settings_notice, told_of

SEEDS = range(16)  # processes die, versions are taken back, live traffic and poison are among it
NO_FEEDBACK = (
    "user-feedback"  # the simulated people say nothing that is an event: their rewards name what is not there
)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Processes that die in a simulation say so."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.configure(**before)


def simulated(seed: int) -> Simulation:
    simulation = Simulation(seed, REAL._replace(reverts=0.04))
    simulation.run()
    return simulation


@cache
def kept(seed: int) -> Simulation:
    """Not to be written to."""
    return simulated(seed)


def trained(answer: Answer) -> set[str]:
    return {one.rollout_id for one in answer.rollouts if one.trained}


def found(answer: Answer) -> list[tuple[Kind, str]]:
    return [(one.kind, one.where) for one in answer.report.findings if not one.where.startswith(NO_FEEDBACK)]


def with_versions(least: int, *, reverts: bool = False) -> int:
    """A seed that has so many."""
    return next(
        seed
        for seed in range(200)
        if len(kept(seed).laws.versions) > least and (not reverts or kept(seed).laws.reverts.known)
    )


# -- from versions back -------------------------------------------------------------------------------------------------


def test_what_a_version_was_made_from_is_what_its_bits_count() -> None:
    """The weights count every rollout that was trained on, through all steps and reverts that led to them."""
    reverted = 0
    for seed in SEEDS:
        simulation = kept(seed)
        versions = simulation.laws.versions
        answers = [Tracer(simulation.log, simulation.store).version(one.version) for one in versions]
        by_number = {one.version: one for one in versions}
        for version, answer in zip(versions, answers, strict=True):
            assert found(answer) == []
            assert answer.line == line_to(version.version, by_number)
            path = plan_path(versions, [], None, version.version)
            counted = sums_of(dict(load_version(simulation.store, path, None))).trained
            assert sum(len(trained(answers[number])) for number in answer.line) == counted
            if version.reverts_to is not None:
                reverted += 1
                assert (answer.steps[0].reverts_to, answer.groups) == (version.reverts_to, ())
    assert reverted > 0


def test_the_fates_say_the_same_where_the_plans_are_gone() -> None:
    compared = 0
    for seed in SEEDS[:8]:
        whole, simulation = kept(seed), simulated(seed)
        trim(simulation.log, "packed-batches")
        for version in whole.laws.versions:
            before = Tracer(whole.log, whole.store).version(version.version)
            after = Tracer(simulation.log, simulation.store).version(version.version)
            assert found(after) == []
            assert {g.group_id for g in after.groups} == {g.group_id for g in before.groups}
            if after.groups:
                compared += 1
                assert {one.trained for one in after.rollouts} == {None}
                assert any("is not in packed-batches any more" in note for note in after.report.notes)
    assert compared > 10


def test_settings_and_code_and_the_way_to_the_weights_are_told() -> None:
    simulation = kept(with_versions(2))
    answer = Tracer(simulation.log, simulation.store).version(2, simulation.laws.versions[0].lineage[:8])
    (step,), (version,) = answer.steps, answer.versions
    assert step.code == step.settings["code"] != ""
    assert (step.version, step.state_digest) == (2, version.state_digest)
    assert [one.version for one in answer.way][-1] == 2
    assert answer.objects
    assert all(one.there for one in answer.objects)


def test_the_settings_of_the_processors_are_those_of_then() -> None:
    simulation = simulated(with_versions(2))
    lineage = simulation.laws.versions[0].lineage
    steps = {one.version: one.finished_us for one in simulation.laws.steps}

    def say(at_us: int, lag: int, of: str = lineage) -> None:
        told = told_of("pack", {"pack": {"max_lag": lag}}, lineage=of, code="1", at_us=at_us)
        event = settings_notice(told, model="policy")
        simulation.log.writer().write([outgoing(event, source="test", time_us=at_us)])

    first, second = steps[1], steps[2]
    assert first < second
    say(first - 2, 1)
    say(first - 1, 7, of=lineage[::-1])  # another run's
    say(first + 1, 2)
    say(second + 1, 3)
    asked = [Tracer(simulation.log, None).version(version).decided_by for version in (1, 2)]
    assert [[one.config for one in some] for some in asked] == [
        [{"pack": {"max_lag": 1}}],
        [{"pack": {"max_lag": 2}}],
    ]


def test_the_manifest_says_what_the_step_consumed() -> None:
    simulation = kept(with_versions(2))
    for version, step in zip(simulation.laws.versions[1:], simulation.laws.steps, strict=True):
        manifest = decode_manifest(simulation.store.get(version.manifest.key))
        if version.reverts_to is None:
            assert manifest.made_from == MadeFrom(step.consumed, step.plan_digest)
        else:
            assert manifest.made_from is None


def test_the_archive_answers_as_the_log_did() -> None:
    """The whole beginning of every topic is gone from the log: nothing in an answer changes."""
    seed = with_versions(2, reverts=True)
    whole, simulation = kept(seed), simulated(seed)
    clock, name = simulation.world.clock, "run"
    seal_epoch(simulation.log, simulation.store, LocalSigner(new_signing_key()), name=name, clock=clock)
    archive_sealed(
        simulation.log,
        simulation.store,
        name=name,
        sealed=sealed(simulation.store, name),
        clock=clock,
        stop=threading.Event(),
    )
    for topic in simulation.partitions:
        trim(simulation.log, topic)
    with closing(ArchivedLog(simulation.log, simulation.store, name)) as log:
        for version in whole.laws.versions:
            before = Tracer(whole.log, whole.store).version(version.version)
            after = Tracer(log, simulation.store).version(version.version)
            assert msgspec.structs.replace(after, report=before.report) == before
            assert after.report.findings == before.report.findings


# -- from events forwards ------------------------------------------------------------------------------------------------


def test_a_rollout_reached_the_versions_that_were_made_from_it() -> None:
    reached = 0
    for seed in SEEDS:
        simulation = kept(seed)
        versions = {one.version: one for one in simulation.laws.versions}
        made = {v: trained(Tracer(simulation.log, simulation.store).version(v)) for v in versions}
        names = {m.rollout.rollout_id for group in simulation.laws.groups.values() for m in group.members}
        for name in sorted(names)[:24]:
            answer = Tracer(simulation.log, simulation.store).rollout(name)
            assert found(answer) == []
            into = tuple(sorted(v for v, some in made.items() if name in some))
            # Its group lives or dies whole: what was made from a sibling's comparison with it counts too.
            group = name.rpartition(".")[0]
            whole = tuple(sorted(v for v, some in made.items() if any(s.startswith(group) for s in some)))
            assert tuple(one for r in answer.reached for one in r.trained) == whole
            assert set(into) <= set(whole)
            assert [c for r in answer.reached for c in r.carried] == list(carried_by(whole, versions))
            for one in answer.reached:
                assert one.left == left_by(one.carried, versions)
                reached += 1
    assert reached > 50


def test_who_served_it_and_when() -> None:
    simulation = simulated(with_versions(2))
    clock_us = simulation.world.clock.now_us()
    status: FleetStatus = load_examples("fleet-status")[-1].event  # type: ignore[assignment]
    first, second, third = simulation.laws.versions[:3]

    def said(replica: str, version: WeightVersion, seconds: int, state: str = "swapped") -> Outgoing:
        event = msgspec.structs.replace(
            status,
            fleet="live",
            replica=replica,
            state=state,
            version=version.version,
            wanted_version=version.version,
            state_digest=version.state_digest,
            at_us=clock_us + seconds * 1_000_000,
        )
        return outgoing(event, source="test", time_us=clock_us)

    others = msgspec.structs.replace(
        first, state_digest=third.state_digest
    )  # that number, of another lineage
    simulation.log.writer().write(
        [
            said("a", first, 0),
            said("a", second, 10),
            said("a", second, 12, "staged"),
            said("a", third, 20),
            said("b", second, 5),
            said("b", second, 9, "stopped"),
            said("c", others, 1),
        ]
    )
    answer = Tracer(simulation.log, simulation.store).version(1)
    stretches = [
        (one.replica, one.version, one.from_us - clock_us, one.until_us and one.until_us - clock_us)
        for one in answer.served
    ]
    assert stretches == [("a", 1, 10_000_000, 20_000_000), ("b", 1, 5_000_000, 9_000_000)]
    newest = Tracer(simulation.log, simulation.store).version(2)
    assert [(one.replica, one.until_us) for one in newest.served] == [("a", None)]


# -- what is missing, wrong or not known ------------------------------------------------------------------------------------


def test_what_is_not_known_is_a_finding() -> None:
    simulation = kept(with_versions(2))
    last = simulation.laws.versions[-1].version

    def kinds(answer: Answer) -> list[Kind]:
        return [one.kind for one in answer.report.findings]

    tracer = Tracer(simulation.log, simulation.store)
    missing = tracer.version(last + 7)
    assert kinds(missing) == [Kind.VERSION_UNKNOWN]
    assert f"0-{last}" in missing.report.findings[0].detail
    assert (missing.versions, missing.groups, missing.report.exit_code) == ((), (), 1)
    assert kinds(Tracer(simulation.log, None).version(1, "no such lineage")) == [Kind.VERSION_UNKNOWN]
    assert kinds(Tracer(simulation.log, None).rollout("nonsense")) == [Kind.EVENT_UNKNOWN]
    unknown = simulation.laws.versions[0].lineage + ".0"
    assert kinds(Tracer(simulation.log, None).rollout(unknown)) == [Kind.EVENT_UNKNOWN]
    assert kinds(Tracer(simulation.log, None).feedback("f-1")) == [Kind.EVENT_UNKNOWN]
    assert kinds(Tracer(simulation.log, None).person("ab" * 16)) == [Kind.EVENT_UNKNOWN]


def test_a_version_whose_event_is_gone_was_published_all_the_same() -> None:
    simulation = simulated(with_versions(2))
    place, second = TopicPartition("weight-versions", 0), simulation.laws.stands[1]
    simulation.log.trim(place, second)
    answer = Tracer(simulation.log, None).version(0)
    cut, unknown = answer.report.findings
    assert [cut.kind, unknown.kind] == [Kind.HISTORY_GAP, Kind.HISTORY_GAP]
    # A topic that is kept for ever has lost its beginning: that has a place.
    assert cut.position == Position(topic="weight-versions", partition=0, offset=0)
    assert [one.version for one in Tracer(simulation.log, None).version(1).versions] == [1]


def test_where_all_versions_are_gone_none_is_said_to_be_unknown() -> None:
    simulation = simulated(with_versions(2))
    place = TopicPartition("weight-versions", 0)
    simulation.log.trim(place, simulation.log.end_offsets([place])[place])
    findings = Tracer(simulation.log, None).version(1).report.findings
    assert {one.kind for one in findings} == {Kind.HISTORY_GAP}
    asked = wanted(read_past(simulation.log, None), 1, None)
    assert [one.kind for one in asked.findings] == [Kind.HISTORY_GAP, Kind.HISTORY_GAP]
    assert asked.versions == ()


def test_an_empty_log_answers_as_well() -> None:
    answer = Tracer(MemoryLog({"weight-versions": 1}), None).version(0)
    assert [one.kind for one in answer.report.findings] == [Kind.VERSION_UNKNOWN]


def test_events_that_retention_took_are_a_gap() -> None:
    simulation = simulated(with_versions(2))
    whole = Tracer(simulation.log, simulation.store).version(1)
    assert whole.rollouts
    for topic in ("rollouts", "production-rollouts", "rewards"):
        trim(simulation.log, topic)
    answer = Tracer(simulation.log, simulation.store).version(1)
    gaps = [one for one in answer.report.findings if one.kind is Kind.HISTORY_GAP]
    assert [one.where.partition(",")[0] for one in gaps] == ["rollouts"]
    assert {name for g in answer.groups for name in g.absent} == {one.rollout_id for one in whole.rollouts}
    for topic in ("packed-batches", "group-fates"):
        trim(simulation.log, topic)
    lost = Tracer(simulation.log, simulation.store).version(1)
    assert (Kind.HISTORY_GAP, "step 1") in found(lost)


def test_a_reward_that_is_gone_is_a_gap() -> None:
    simulation = simulated(with_versions(2))
    trim(simulation.log, "rewards")
    answer = Tracer(simulation.log, simulation.store).version(1)
    assert [one.where.partition(",")[0] for one in answer.report.findings] == ["rewards"]


def test_objects_that_are_gone_are_named() -> None:
    simulation = simulated(with_versions(2))
    version = next(one for one in simulation.laws.versions[1:] if one.objects)
    simulation.store.delete(version.objects[0].key)
    answer = Tracer(simulation.log, simulation.store).version(version.version)
    assert (Kind.OBJECT_MISSING, version.objects[0].key) in found(answer)
    simulation.store.delete(version.manifest.key)
    again = Tracer(simulation.log, simulation.store).version(version.version)
    assert (Kind.OBJECT_MISSING, version.manifest.key) in found(again)


def test_a_manifest_that_names_other_plans_than_the_log_is_found() -> None:
    """The two are held against each other: whoever changes one of them is seen."""
    simulation = simulated(with_versions(2))
    version = next(one for one in simulation.laws.versions[1:] if one.reverts_to is None)
    manifest = decode_manifest(simulation.store.get(version.manifest.key))
    assert manifest.made_from is not None
    forged = msgspec.structs.replace(
        manifest,
        made_from=MadeFrom(
            (OffsetRange(topic="packed-batches", partition=0, start=90, end=91),),
            manifest.made_from.plan_digest,
        ),
    )
    claim, data = encode_manifest(forged)
    store = MemoryStore(simulation.world.clock)
    for info in simulation.store.list(""):
        if info.key != version.manifest.key:
            store.create(info.key, simulation.store.get(info.key))
    store.create(claim.key, data)
    log = rewritten(simulation.log, version, msgspec.structs.replace(version, manifest=claim))
    answer = Tracer(log, store).version(version.version)
    assert [one.kind for one in answer.report.findings if one.where == claim.key] == [Kind.DIGEST_DIFFERS]
    assert "packed-batches[0] 90-91" in next(
        one.detail for one in answer.report.findings if one.where == claim.key
    )


def test_a_step_of_another_state_is_found() -> None:
    simulation = kept(with_versions(2))
    version = simulation.laws.versions[1]
    log = rewritten(simulation.log, version, msgspec.structs.replace(version, state_digest="00" * 32))
    kinds = {one.kind for one in Tracer(log, None).version(1).report.findings}
    assert Kind.DIGEST_DIFFERS in kinds


def test_a_record_that_does_not_decode_is_a_finding_with_its_position() -> None:
    simulation = simulated(with_versions(2))
    answer = Tracer(simulation.log, None).version(1)
    group = answer.groups[0].group_id
    headers = (("ce_id", b"x"),)
    simulation.log.writer().write([Outgoing("group-fates", group.encode(), b"\xc3\x01nonsense", headers)])
    broken = Tracer(simulation.log, None).version(1)
    (finding,) = [
        one for one in broken.report.findings if one.kind in (Kind.UNDECODABLE, Kind.SCHEMA_UNKNOWN)
    ]
    assert finding.position is not None
    assert finding.position.topic == "group-fates"
    assert broken.groups[0] == answer.groups[0]  # the audit goes on


# -- small things -----------------------------------------------------------------------------------------------------


def test_versions_carry_what_they_were_built_on_until_a_revert() -> None:
    base: WeightVersion = load_examples("weight-versions")[-1].event  # type: ignore[assignment]
    versions = {
        n: msgspec.structs.replace(base, version=n, reverts_to=to, base_version=n - 1 if n else None)
        for n, to in enumerate((None, None, None, None, 1, None))
    }
    assert carried_by([2], versions) == (2, 3)
    assert left_by((2, 3), versions) == ((4, 1),)
    assert line_to(5, versions) == (0, 1, 4, 5)
    assert line_to(3, versions) == (0, 1, 2, 3)
    assert ranges([5, 0, 1, 4]) == "0-1, 4-5"


def test_the_first_of_a_repeat_counts_and_the_last_lineage_is_the_newest() -> None:
    base: WeightVersion = load_examples("weight-versions")[-1].event  # type: ignore[assignment]
    log = MemoryLog({"weight-versions": 1}, ManualClock())
    other = base.lineage[:-1] + ("0" if base.lineage[-1] != "0" else "1")
    repeated = msgspec.structs.replace(base, state_digest="ab" * 32)
    events = [base, repeated, msgspec.structs.replace(base, lineage=other)]
    log.writer().write([outgoing(event, source="test", time_us=base.published_us) for event in events])
    book = VersionBook()
    for record in scan(log, ("weight-versions",)):
        book.add(record, decode_record(record))
    assert book.of(base.lineage) == {base.version: base}
    assert book.newest_lineage() == other


def trim(log: MemoryLog, topic: str) -> None:
    for partition in range(log.partitions(topic)):
        place = TopicPartition(topic, partition)
        log.trim(place, log.end_offsets([place])[place])


def rewritten(log: MemoryLog, old: WeightVersion, new: WeightVersion) -> MemoryLog:
    """The same records in the same order, `new` in place of `old`. Control records are gone, so offsets are others."""
    topics = ("weight-versions", "train-steps", "weight-links")
    copy = MemoryLog({topic: log.partitions(topic) for topic in topics})
    records: Sequence[Outgoing] = [
        outgoing(new, source="test", time_us=new.published_us)
        if decode_record(record) == old
        else Outgoing(record.topic, record.key, record.value, record.headers, record.partition)
        for record in scan(log, topics)
    ]
    copy.writer().write(records)
    return copy


def test_a_rollout_tells_who_sampled_it() -> None:
    simulation = kept(with_versions(2))
    rollout = next(iter(simulation.laws.groups.values())).members[0].rollout
    answer = Tracer(simulation.log, None).rollout(rollout.rollout_id)
    (line,) = [one for one in answer.rollouts if one.rollout_id == rollout.rollout_id]
    assert line.versions == tuple(dict.fromkeys(span.version for span in rollout.spans))
    assert (line.fleet, line.replica, line.environment) == (
        rollout.fleet,
        rollout.replica,
        rollout.environment,
    )
