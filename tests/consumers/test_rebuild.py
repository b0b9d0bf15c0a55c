"""Versions made anew, in memory: by deltas and by training, whole and with every thing missing that may be missing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import NamedTuple

import msgspec
import numpy as np
import pytest

from rollwire.consumers.audit.plans_log import DerivedPlansLog
from rollwire.consumers.audit.rebuild_compare import first_difference
from rollwire.consumers.audit.rebuild_deltas import DeltaRebuild, passes
from rollwire.consumers.audit.rebuild_past import Past, read_past
from rollwire.consumers.audit.rebuild_recipe import Recipe, recipe_of
from rollwire.consumers.audit.rebuild_run import Wanted, by_deltas, by_training, wanted
from rollwire.consumers.audit.rebuild_training import TrainingRebuild
from rollwire.consumers.audit.rebuild_ways import way_back
from rollwire.consumers.trainer.arithmetic import ArithmeticLearner, run_arithmetic_trainer
from rollwire.consumers.trainer.config import TrainerConfig
from rollwire.consumers.trainer.learner import Learner
from rollwire.consumers.trainer.rehearsal import TINY as POLICY
from rollwire.consumers.trainer.rehearsal import TOPICS, Rehearsal, plan, write_plans
from rollwire.consumers.weights.manifest import decode_manifest
from rollwire.consumers.weights.paths import Ways, cheapest
from rollwire.consumers.weights.publisher import PublisherConfig
from rollwire.consumers.weights.revert import RevertRun, revert
from rollwire.kernels.tensors import State, tensor
from rollwire.schemas.errors import ConfigError
from rollwire.schemas.records import Coverage, PackedBatch, Position, TrainStep, WeightVersion
from rollwire.streams.emit import decode_record, outgoing
from rollwire.streams.findings import Kind, Report
from rollwire.streams.seams.clock import SystemClock
from rollwire.streams.seams.keys_memory import MemoryKeys
from rollwire.streams.seams.log import Log, TopicPartition
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.scan import scan
from rollwire.streams.seams.sealing import seal_field
from rollwire.streams.seams.store_memory import MemoryStore

LINEAGE = "0197a1b2-0000-7000-8000-0000000000aa"
SPEC = Rehearsal(POLICY, LINEAGE, sequences=8)
PERSON = "1" * 32
NOW_US = 1_767_225_600_000_000


class Run(NamedTuple):
    log: MemoryLog
    store: MemoryStore

    def read(self, version: int | None = None) -> Wanted:
        return wanted(read_past(self.log, LINEAGE), version, LINEAGE)

    def past(self) -> Past:
        past = self.read().past
        assert past is not None
        return past

    def deltas(self, version: int | None = None) -> Report:
        asked = self.read(version)
        assert asked.past is not None
        with closing(DeltaRebuild(self.store, asked.past)) as made:
            return by_deltas(made, asked, lambda _: None).report

    def training(
        self, version: int | None = None, *, log: Log | None = None, keys: MemoryKeys | None = None
    ) -> Report:
        asked = self.read(version)
        past = asked.past
        assert past is not None
        over, opened = log or self.log, keys or MemoryKeys()

        def learner(recipe: Recipe) -> Learner:
            if recipe.policy is None:
                return ArithmeticLearner(
                    over,
                    self.store,
                    recipe.config,
                    model="policy",
                    lineage=LINEAGE,
                    clock=SystemClock(),
                    keys=lambda: opened,
                )
            from rollwire.consumers.trainer.ranks import RankGroup

            return RankGroup(
                over,
                self.store,
                recipe.policy,
                recipe.config,
                model="policy",
                lineage=LINEAGE,
                clock=SystemClock(),
                connect=None,
            )

        def published(version: int) -> State | None:
            with closing(DeltaRebuild(self.store, past)) as made:
                (one,) = made.versions([version])
                return None if one.digest is None else made.state

        with closing(TrainingRebuild(over, past, learner, published)) as made:
            return by_training(made, asked, lambda _: None).report


def arithmetic(run: Run, until: int, every: int = 3, ranks: int = 1, anchor_every: int = 4) -> None:
    run_arithmetic_trainer(
        run.log,
        run.store,
        TrainerConfig(checkpoint_every=every, ranks=ranks),
        prefix="t.",
        model="policy",
        lineage=LINEAGE,
        stop=threading.Event(),
        until_step=until,
        publisher_config=PublisherConfig(anchor_every=anchor_every),
    )


def fresh(steps: int, spec: Rehearsal = SPEC) -> Run:
    run = Run(MemoryLog({**TOPICS, "weight-links": 1}), MemoryStore())
    write_plans(run.log, spec, range(1, steps + 1))
    return run


def trained(steps: int = 10, *, every: int = 3, ranks: int = 1) -> Run:
    run = fresh(steps, SPEC._replace(ranks=ranks))
    arithmetic(run, steps, every, ranks)
    return run


def kinds_of(asked: Wanted) -> list[Kind]:
    return [finding.kind for finding in asked.findings]


def kinds(report: Report) -> list[Kind]:
    return [finding.kind for finding in report.findings]


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_version_comes_out_both_ways(ranks: int) -> None:
    run = trained(ranks=ranks)
    before = (
        run.log.end_offsets([TopicPartition(t, 0) for t in TOPICS]),
        sorted(o.key for o in run.store.list("")),
    )
    deltas, training = run.deltas(), run.training()
    assert (deltas.findings, training.findings, training.notes) == ((), (), ())
    assert deltas.digests == training.digests
    assert deltas.digests == {f"version {v}": e.state_digest for v, e in run.past().versions.items()}
    assert deltas.results == {"rebuild.deltas_equal": 11, "rebuild.versions": 11}
    assert training.results == {"rebuild.training_equal": 10, "rebuild.versions": 10}
    for version in (0, 3, 7):
        assert run.deltas(version).digests == run.training(version).digests
    after = (
        run.log.end_offsets([TopicPartition(t, 0) for t in TOPICS]),
        sorted(o.key for o in run.store.list("")),
    )
    assert before == after  # nothing is written


def without(log: MemoryLog, *versions: int) -> MemoryLog:
    """What names versions, without some of them."""
    made = MemoryLog({**TOPICS, "weight-links": 1})
    for record in scan(log, ["weight-versions", "train-steps", "weight-links"]):
        event = decode_record(record)
        if not (isinstance(event, WeightVersion) and event.version in versions):
            made.writer().write([outgoing(event, source="test", time_us=NOW_US)])
    return made


def lose(run: Run, version: int) -> str:
    """The delta of a version goes away, as does every link over it."""
    (entry,) = run.past().versions[version].objects
    run.store.delete(entry.key)
    return entry.key


def test_a_missing_object_is_a_finding_and_another_way_is_taken() -> None:
    run = trained(9)  # snapshots of 0, 4 and 8
    key = lose(run, 3)
    report = run.deltas()
    assert kinds(report) == [Kind.OBJECT_MISSING]
    assert report.findings[0].where == "version 3"
    assert key in report.findings[0].detail
    assert report.results["rebuild.deltas_equal"] == 10  # 3 from the snapshot of 4, backwards
    assert any("version 3 came out as published all the same" in note for note in report.notes)
    assert run.deltas(2).findings == ()


def test_what_no_way_leads_to_is_named_and_the_others_are_made() -> None:
    run = trained(3, every=1)
    for version in (2, 3):
        lose(run, version)
    report = run.deltas()
    assert [(f.kind, f.where) for f in report.findings] == [
        (Kind.OBJECT_MISSING, "version 2"),
        (Kind.OBJECT_MISSING, "version 2"),
        (Kind.OBJECT_MISSING, "version 3"),
    ]
    assert sorted(report.digests) == ["version 0", "version 1"]
    assert run.training().findings == ()  # needs no delta


def test_a_damaged_object_is_a_finding() -> None:
    run = trained(9)
    (entry,) = run.past().versions[6].objects
    data = bytearray(run.store.get(entry.key))
    data[-1] ^= 1
    run.store.delete(entry.key)
    run.store.create(entry.key, bytes(data))
    report = run.deltas()
    assert [(f.kind, f.where) for f in report.findings] == [(Kind.OBJECT_CORRUPT, "version 6")]
    assert report.results["rebuild.deltas_equal"] == 10


def test_a_damaged_snapshot_is_named_by_its_tensor() -> None:
    run = trained(3, every=1)
    manifest = decode_manifest(run.store.get(run.past().versions[0].manifest.key))
    (entry,) = [entry for entry in manifest.objects if entry.file.endswith(".safetensors")]
    data = bytearray(run.store.get(entry.key))
    data[-1] ^= 1
    run.store.delete(entry.key)
    run.store.create(entry.key, bytes(data))
    report = run.deltas()
    assert [(f.kind, f.where) for f in report.findings[:2]] == [
        (Kind.DIGEST_DIFFERS, "version 0"),
        (Kind.OBJECT_MISSING, "version 0"),
    ]
    assert "of the anchor of version 0 is not the published one" in report.findings[0].detail
    run.store.delete(entry.key)
    run.store.create(entry.key, bytes(data[: entry.size // 2]))
    assert run.deltas(0).findings[0].kind == Kind.OBJECT_CORRUPT


def test_a_version_that_was_never_published_and_a_hole_are_findings() -> None:
    run = trained(6)
    asked = run.read(99)
    assert (kinds_of(asked), asked.versions) == ([Kind.VERSION_UNKNOWN], ())
    assert "known are 0 to 6" in asked.findings[-1].detail
    torn = Run(without(run.log, 2), run.store)
    report = torn.deltas()
    assert [(f.kind, f.where) for f in report.findings][:1] == [(Kind.HISTORY_GAP, "version 2")]
    assert {f"version {v}" for v in (0, 1, 4, 5, 6)} <= report.digests.keys()
    nothing = Run(MemoryLog(TOPICS), run.store).read()
    assert (nothing.past, kinds_of(nothing)) == (None, [Kind.VERSION_UNKNOWN])


def test_a_changed_plan_is_named_by_step_and_tensor_and_the_rest_is_trained() -> None:
    run = trained(10, every=4)  # checkpoints at 0, 4 and 8

    def change(batch: PackedBatch) -> PackedBatch:
        if batch.step != 6:
            return batch
        micro = batch.microbatches[0]
        tokens = np.frombuffer(micro.token_ids, "<u4").copy()
        tokens[0] ^= 1
        return msgspec.structs.replace(
            batch,
            microbatches=(
                msgspec.structs.replace(micro, token_ids=tokens.tobytes()),
                *batch.microbatches[1:],
            ),
        )

    report = run.training(log=derived(run, run.past(), change))
    (finding,) = report.findings
    assert finding.kind == Kind.DIGEST_DIFFERS
    assert finding.where.startswith("version 6, step 6, tensor counted")
    assert "elements, first element" in finding.detail
    assert "the settings are the same" in finding.detail
    assert "not reached, since they follow from version 6: 7 to 8" in report.notes
    assert sorted(report.digests) == sorted(f"version {v}" for v in (0, 1, 2, 3, 4, 5, 9, 10))


def derived(
    run: Run, past: Past, change: Callable[[PackedBatch], PackedBatch] = lambda batch: batch
) -> DerivedPlansLog:
    """The run's log after retention took its plans; what is derived is what was recorded, but for `change`."""
    recorded: dict[int, list[PackedBatch]] = {}
    partitions = [TopicPartition("packed-batches", p) for p in range(run.log.partitions("packed-batches"))]
    for record in scan(run.log, ["packed-batches"]):
        batch = decode_record(record)
        assert isinstance(batch, PackedBatch)
        recorded.setdefault(batch.step, []).append(batch)
    for partition, end in run.log.end_offsets(partitions).items():
        run.log.trim(partition, end)

    def derive(first: int, last: int) -> Iterator[tuple[PackedBatch, ...]]:
        for step in range(first, last + 1):
            yield tuple(change(one) for one in sorted(recorded[step], key=lambda one: one.rank))

    return DerivedPlansLog(run.log, past, derive)


@pytest.mark.parametrize("ranks", [1, 2])
def test_plans_that_retention_took_are_derived_anew(ranks: int) -> None:
    run = trained(7, ranks=ranks)
    log = derived(run, run.past())
    bare = run.training()
    assert set(kinds(bare)) == {Kind.HISTORY_GAP}
    assert "packed-batches[0] from 0 to 1 is not kept any more" in bare.findings[0].detail
    report = run.training(log=log)
    assert (report.findings, report.results["rebuild.training_equal"]) == ((), 7)


def test_plans_are_derived_up_to_those_that_are_kept() -> None:
    run = trained(7)
    recorded = list(scan(run.log, ["packed-batches"]))
    past = run.past()
    run.log.trim(TopicPartition("packed-batches", 0), recorded[4].offset)
    asked: list[tuple[int, int]] = []

    def derive(first: int, last: int) -> Iterator[tuple[PackedBatch, ...]]:
        asked.append((first, last))
        for step in range(first, last + 1):
            batch = decode_record(recorded[step - 1])
            assert isinstance(batch, PackedBatch)
            yield (batch,)

    report = run.training(log=DerivedPlansLog(run.log, past, derive))
    assert (report.findings, report.results["rebuild.training_equal"]) == ((), 7)
    assert asked[0] == (1, 4)


def test_over_a_revert_the_abandoned_and_the_new_versions_come_out() -> None:
    run = fresh(6)
    arithmetic(run, 5, every=2)
    assert revert(RevertRun(run.log, run.store, "t.", "policy", LINEAGE, 3, "ann")).version == 6
    write_plans(run.log, SPEC, range(7, 10), newest_revert=6)
    arithmetic(run, 9, every=2)
    deltas, training = run.deltas(), run.training()
    assert (deltas.findings, training.findings) == ((), ())
    assert training.results["rebuild.training_equal"] == 9
    assert training.digests["version 6"] == training.digests["version 3"]
    assert run.training(6).digests == {"version 6": training.digests["version 3"]}
    assert run.training(9).digests == {"version 9": deltas.digests["version 9"]}


def test_older_checkpoints_stand_in_for_one_that_is_gone() -> None:
    run = trained(8, every=3)
    claim = run.past().versions[6].checkpoint
    assert claim is not None
    run.store.delete(claim.key)
    report = run.training(8)
    assert (report.findings, report.results["rebuild.training_equal"]) == ((), 1)
    assert any("the checkpoint of version 6 is not in the store" in note for note in report.notes)
    for version in (0, 3):
        older = run.past().versions[version].checkpoint
        assert older is not None
        run.store.delete(older.key)
    report = run.training(8)
    assert [(f.kind, f.where) for f in report.findings] == [(Kind.OBJECT_MISSING, "version 8")]


def test_what_was_erased_since_is_said_and_the_deltas_still_lead_there() -> None:
    run, keys = fresh(0), MemoryKeys()
    stands = [Position(topic="routing-traces", partition=0, offset=i) for i in range(SPEC.sequences)]
    for step in range(1, 8):
        (batch,) = plan(SPEC, step, stands)
        if step == 5:
            batch = sealed(batch, keys)
        run.log.writer().write([outgoing(batch, source="test", time_us=NOW_US)])
    run_arithmetic_trainer(
        run.log,
        run.store,
        TrainerConfig(checkpoint_every=3),
        prefix="t.",
        model="policy",
        lineage=LINEAGE,
        stop=threading.Event(),
        until_step=7,
        keys=lambda: keys,
    )
    assert run.training(keys=keys).findings == ()
    keys.destroy(PERSON)
    report = run.training(keys=keys)
    assert [(f.kind, f.where) for f in report.findings] == [(Kind.ERASED, "step 5")]
    assert "not reached, since they follow from version 5: 6" in report.notes
    assert "version 7" in report.digests
    assert run.deltas().findings == ()


def sealed(batch: PackedBatch, keys: MemoryKeys) -> PackedBatch:
    """Its first sequence is of a person."""
    micro = batch.microbatches[0]
    end = int(np.frombuffer(micro.cu_seqlens, "<i4")[1]) * 4
    held, seal = seal_field(keys, PERSON, micro.rollout_ids[0], "token_ids", micro.token_ids[:end])
    first = msgspec.structs.replace(
        micro,
        token_ids=held + micro.token_ids[end:],
        seals=(seal, *[None] * (len(micro.rollout_ids) - 1)),
    )
    return msgspec.structs.replace(
        batch,
        microbatches=(first, *batch.microbatches[1:]),
        coverage=(Coverage(outcome="answered", rollouts=1, signalled=1),),
        cohort_size=1,
        cohort_mean=0.5,
        max_age_ms=1_000,
    )


def test_ways_back_train_at_least_one_step() -> None:
    run = trained(7, every=3)
    past = run.past()
    there = {v for v, event in past.versions.items() if event.checkpoint is not None}
    assert there == {0, 3, 6}
    for version in range(1, 8):
        way = way_back(past, version, there.__contains__)
        assert way is not None
        assert way.start == max(v for v in there if v < version)
        assert [step.version for step in way.steps] == list(range(way.start + 1, version + 1))
    assert way_back(past, 5, {4}.__contains__) is not None
    assert way_back(past, 2, {3}.__contains__) is None
    own = way_back(past, 3, {3}.__contains__)
    assert own is not None
    assert (own.start, own.trains) == (3, False)


def test_the_first_tensor_that_differs_is_described() -> None:
    def state(*values: int) -> State:
        return {
            "a": tensor("BF16", (2,), np.array([1, 2], "<u2")),
            "b": tensor("BF16", (3,), np.array(values, "<u2")),
        }

    assert first_difference(state(1, 2, 3), state(1, 2, 3)) is None
    found = first_difference(state(1, 0x8000, 3), state(1, 0x0002, 3))
    assert found is not None
    assert str(found) == (
        "tensor b: 1 of 3 elements, first element 1: 0x8000 published, 0x0002 rebuilt, at most 2 ULP apart"
    )
    assert str(first_difference(state(1, 2, 3), {})) == "tensor a: only published; 1 more tensors differ"


def test_settings_say_the_recipe_and_those_of_other_trainers_are_refused() -> None:
    config = TrainerConfig(learning_rate=1e-3, token_mask=True, ranks=2, no_replay_every=0)
    said = config.settings(torch_version="2", policy=POLICY.model_dump_json(), cpu="x86_64 AVX2", code="1")
    assert recipe_of(said) == Recipe(config, POLICY)
    assert recipe_of({"learner": "arithmetic", "ranks": "2"}).policy is None
    with pytest.raises(ConfigError, match="name no policy"):
        recipe_of({"trainer": "theirs"})
    with pytest.raises(ConfigError, match="another release"):
        recipe_of({**said, "forward": "sideways"})


@pytest.mark.torch
def test_the_policy_is_trained_again_to_the_same_bits() -> None:
    from rollwire.consumers.trainer.run import run_trainer
    from rollwire.kernels.policy.model import Policy
    from rollwire.kernels.policy.states import to_state

    run = fresh(6)
    run_trainer(
        run.log,
        run.store,
        POLICY,
        TrainerConfig(checkpoint_every=2),
        prefix="t.",
        model="policy",
        lineage=LINEAGE,
        initial=to_state(Policy(POLICY, seed=3), "F32"),
        stop=threading.Event(),
        until_step=6,
    )
    training = run.training()
    assert (training.findings, training.notes) == ((), ())
    assert training.digests == run.deltas().digests
    assert training.results["rebuild.training_equal"] == 6
    # Elsewhere: what the settings say is another machine's, and two steps were taken at another rate than they say.
    other = MemoryLog({**TOPICS, "weight-links": 1})
    for record in scan(run.log, ["routing-traces", "packed-batches", "weight-versions", "train-steps"]):
        event = decode_record(record)
        if isinstance(event, TrainStep):
            rate = "0.0004" if event.step in (3, 4) else event.settings["learning_rate"]
            said = {**event.settings, "cpu": "x86_64 AVX9", "learning_rate": rate}
            event = msgspec.structs.replace(event, settings=said)
        other.writer().write(
            [outgoing(event, source="test", time_us=NOW_US)._replace(partition=record.partition)]
        )
    elsewhere = Run(other, run.store).training()
    (finding,) = elsewhere.findings
    assert finding.kind == Kind.DIGEST_DIFFERS
    assert finding.where.startswith("version 3, step 3, tensor ")
    assert "cpu: x86_64 AVX9 -> " in finding.detail
    assert "not reached, since they follow from version 3: 4" in elsewhere.notes
    assert any("though settings differ" in note and "AVX9" in note for note in elsewhere.notes)
    assert "version 5" in elsewhere.digests


def test_a_pass_holds_many_small_deltas_and_few_large_ones() -> None:
    past = trained(3, every=1).past()
    way = cheapest(Ways(past.versions, past.links).into, 2, 3)
    assert way is not None
    (step,) = way
    small, large = ([step._replace(bytes=nbytes)] * 150 for nbytes in (100_000, 5 << 20))
    assert [len(some) for some in passes(small)] == [64, 64, 22]
    assert [len(some) for some in passes(large)] == [16] * 9 + [6]
