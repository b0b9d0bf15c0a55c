"""The questions of the lake over a simulated run and hand-made events: what SQL answers is what the log's events say."""

from __future__ import annotations

import logging
import statistics
from collections import Counter, defaultdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
import structlog

from rollwire.consumers.audit.hours import hour_name, hour_of
from rollwire.consumers.audit.lake_export import export
from rollwire.ops.commands.audit_query import query
from rollwire.ops.lake.queries import Answer, ask, open_lake, queries, view_of
from rollwire.ops.simulate.run import REAL, Simulation
from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.errors import ConfigError
from rollwire.schemas.golden import load_examples
from rollwire.schemas.records import (
    DeadLetter,
    Event,
    Feedback,
    FleetStatus,
    GroupFate,
    PackedBatch,
    Reward,
    Rollout,
    TrainStep,
    WeightVersion,
)
from rollwire.streams.emit import decode_record, outgoing, take
from rollwire.streams.seams.log import Record
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.scan import scan
from rollwire.streams.seams.store_folder import FolderStore

T = TypeVar("T", bound=Event)
NAMES = (
    "fates",
    "feedback",
    "lag",
    "mismatch",
    "reached",
    "refused",
    "rewards",
    "served",
    "steps",
    "versions",
)
AT_US = 1_767_225_600_000_000


class Past:
    """A run, as a lake and as its events."""

    def __init__(self, log: MemoryLog, folder: Path) -> None:
        self.folder = folder
        self.records = {topic: list(scan(log, [topic])) for topic in TOPICS}
        export(log, FolderStore(folder), name="sim", topics=list(TOPICS))
        self.lake = open_lake(folder)

    def events(self, kind: type[T], topic: str) -> list[tuple[Record, T]]:
        found = map(take, self.records[topic])
        return [(one.record, one.event) for one in found if isinstance(one.event, kind)]

    def ask(self, name: str, where: str | None = None) -> list[dict[str, Any]]:
        answer: Answer = ask(self.lake, queries()[name].sql, where=where)
        return [dict(zip(answer.columns, row, strict=True)) for row in answer.rows]


def people(log: MemoryLog) -> None:
    """Feedback, swaps and refusals, which a simulation has none or few of."""
    said = load_examples("user-feedback")[0].event
    swapped = next(one.event for one in load_examples("fleet-status") if one.name.startswith("swapped"))
    letter = load_examples("dead-letters")[0].event
    assert isinstance(said, Feedback)
    assert isinstance(swapped, FleetStatus)
    assert isinstance(letter, DeadLetter)
    events: list[Event] = []
    for number in range(12):
        feedback = msgspec.structs.replace(
            said, feedback_id=f"f{number}", signal=("thumb", "accept")[number % 2], value=float(number % 3),
            label=None, subject=f"{number % 5:032x}", comment=None, seal=None,
        )  # fmt: skip
        events += [feedback] * (1 + number % 2)  # every second one comes twice
        events.append(
            msgspec.structs.replace(
                swapped,
                state=("swapped", "staged", "swapped")[number % 3],
                replica=f"r{number % 4}",
                reason="",
                version=number // 6,
                pause_ms=float(number),
                stage_ms=float(2 * number),
                at_us=AT_US + number,
            )
        )
        source = msgspec.structs.replace(letter.source, offset=1_000_000 + number)
        events.append(msgspec.structs.replace(letter, source=source, refused_us=AT_US + 100 - number))
    log.writer().write([outgoing(event, source="rollwire/test", time_us=AT_US) for event in events])


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> Past:
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    simulation = Simulation(0, REAL)
    for seed in range(50):
        simulation = Simulation(seed, REAL)
        simulation.run()
        steps = map(decode_record, scan(simulation.log, ["train-steps"]))
        if sum(step.sequences for step in steps if isinstance(step, TrainStep)) > 12:
            break
    structlog.configure(**before)
    people(simulation.log)
    return Past(simulation.log, tmp_path_factory.mktemp("lake"))


def first_of_each(found: list[tuple[Record, T]]) -> list[tuple[Record, T]]:
    """Without repeats of one event id."""
    kept: dict[Any, tuple[Record, T]] = {}
    for record, event in sorted(
        found, key=lambda one: (one[0].timestamp_ms, one[0].partition, one[0].offset)
    ):
        kept.setdefault(dict(record.headers)["ce_id"], (record, event))
    return list(kept.values())


def hour(record: Record) -> str:
    return hour_name(hour_of(record.timestamp_ms))


def when(us: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=us)


def test_there_are_ten_questions_and_each_is_documented() -> None:
    assert tuple(queries()) == NAMES
    text = (Path(__file__).parents[2] / "docs" / "lake.md").read_text()
    for one in queries().values():
        assert one.question.endswith("?")
        assert f"| `{one.name}` | {one.question} |" in text


def test_the_lake_has_every_event_of_the_run(past: Past) -> None:
    assert len(past.records["rollouts"]) > 50
    for topic, records in past.records.items():
        (count,) = ask(past.lake, f"SELECT count(*) FROM {view_of(topic)}").rows[0]
        assert count == sum(isinstance(take(record).event, Event) for record in records), topic


def test_fates(past: Past) -> None:
    wanted = Counter(
        (hour(record), fate.fate, fate.reason, fate.decided_by)
        for record, fate in past.events(GroupFate, "group-fates")
    )
    assert len(wanted) > 1
    found = past.ask("fates")
    assert {(r["hour"], r["fate"], r["reason"], r["decided_by"]): r["groups"] for r in found} == wanted


def test_steps(past: Past) -> None:
    steps = sorted(
        (step for _, step in past.events(TrainStep, "train-steps")),
        key=lambda step: (step.lineage, step.step),
    )
    assert len(steps) > 1
    found = past.ask("steps")
    assert [(r["step"], r["version"], r["loss"], r["trained_tokens"]) for r in found] == [
        (step.step, step.version, step.loss, step.trained_tokens) for step in steps
    ]
    assert [r["finished_us"] for r in found] == [when(step.finished_us) for step in steps]


def test_lag(past: Past) -> None:
    wanted: Counter[tuple[str, int]] = Counter()
    for _, step in past.events(TrainStep, "train-steps"):
        for one in step.lag_histogram:
            wanted[step.lineage, one.lag] += one.tokens
    found = past.ask("lag")
    assert {(r["lineage"], r["lag"]): r["tokens"] for r in found} == wanted
    for lineage in {r["lineage"] for r in found}:
        assert sum(r["share"] for r in found if r["lineage"] == lineage) == pytest.approx(1, abs=1e-4)


def test_mismatch(past: Past) -> None:
    steps = {(step.lineage, step.version): step for _, step in past.events(TrainStep, "train-steps")}
    found = past.ask("mismatch")
    assert len(found) == len(steps)
    for row in found:
        step = steps[row["lineage"], row["version"]]
        told = step.mismatch
        # NaN is what was measured where nothing could be.
        assert repr((row["p99"], row["mean"], row["max"])) == repr((told.p99, told.mean, told.max))
        worst = sorted((one.p99 for one in step.mismatch_by if one.version is not None), reverse=True)[:10]
        assert [one["p99"] for one in row["worst"]] == worst


def test_rewards(past: Past) -> None:
    begun = {
        event.rollout_id: event for _, event in reversed(first_of_each(past.events(Rollout, "rollouts")))
    }
    wanted: dict[Any, list[float | None]] = defaultdict(list)
    for _, reward in first_of_each(past.events(Reward, "rewards")):
        rollout = begun.get(reward.rollout_id)
        if rollout is not None:
            key = (rollout.lineage, rollout.environment, rollout.spans[0].version, reward.source)
            wanted[key].append(reward.reward)
    found = {(r["lineage"], r["environment"], r["version"], r["source"]): r for r in past.ask("rewards")}
    assert len(wanted) > 2
    assert found.keys() == wanted.keys()
    for key, rewards in wanted.items():
        scored = [one for one in rewards if one is not None]
        assert (found[key]["rollouts"], found[key]["scored"]) == (len(rewards), len(scored))
        mean = found[key]["reward_mean"]
        assert mean == (pytest.approx(statistics.fmean(scored)) if scored else None)


def test_feedback(past: Past) -> None:
    unique = first_of_each(past.events(Feedback, "user-feedback"))
    wanted = Counter((hour(record), one.signal) for record, one in unique)
    found: Counter[tuple[str, str]] = Counter()
    for row in past.ask("feedback"):
        found[row["hour"], row["signal"]] += row["events"]
        assert row["value_mean"] == pytest.approx(
            statistics.fmean(
                one.value or 0.0
                for record, one in unique
                if (hour(record), one.signal) == (row["hour"], row["signal"])
            )
        )
        assert row["persons"] == 5
    assert found == wanted
    assert sum(found.values()) == 12


def test_reached(past: Past) -> None:
    versions = {
        (step.lineage, step.plan_digest): step.version for _, step in past.events(TrainStep, "train-steps")
    }
    wanted = {
        (rollout_id, versions[batch.lineage, batch.plan_digest])
        for _, batch in past.events(PackedBatch, "packed-batches")
        if (batch.lineage, batch.plan_digest) in versions
        for microbatch in batch.microbatches
        for rollout_id in microbatch.rollout_ids
    }
    found = past.ask("reached")
    assert len(wanted) > 10
    assert sorted((r["rollout_id"], r["version"]) for r in found) == sorted(wanted)
    assert all(r["rollout_id"].startswith(r["group_id"] + ".") for r in found)
    one = found[0]["rollout_id"]
    assert past.ask("reached", f"rollout_id = '{one}'") == [r for r in found if r["rollout_id"] == one]


def test_refused(past: Past) -> None:
    letters = past.events(DeadLetter, "dead-letters")
    wanted = Counter((letter.source.topic, letter.reason, letter.refused_by) for _, letter in letters)
    found = {(r["topic"], r["reason"], r["refused_by"]): r for r in past.ask("refused")}
    assert {key: row["events"] for key, row in found.items()} == wanted
    for key, row in found.items():
        _, first = min(
            (pair for pair in letters if (pair[1].source.topic, pair[1].reason, pair[1].refused_by) == key),
            key=lambda pair: (pair[1].refused_us, pair[0].partition, pair[0].offset),
        )
        assert row["first"] == {"partition": first.source.partition, "offset": first.source.offset}


def test_served(past: Past) -> None:
    by: dict[tuple[str, int], list[FleetStatus]] = defaultdict(list)
    for _, status in past.events(FleetStatus, "fleet-status"):
        if status.state == "swapped":
            by[status.fleet, status.version].append(status)
    found = {(r["fleet"], r["version"]): r for r in past.ask("served")}
    assert len(by) > 1
    assert found.keys() == by.keys()
    for key, some in by.items():
        assert found[key]["replicas"] == len({one.replica for one in some})
        assert found[key]["first_served"] == when(min(one.at_us for one in some))
        assert found[key]["pause_ms_max"] == max(one.pause_ms for one in some)
        assert found[key]["stage_ms_median"] == pytest.approx(statistics.median(one.stage_ms for one in some))


def test_versions(past: Past) -> None:
    versions = sorted(
        (one for _, one in past.events(WeightVersion, "weight-versions")),
        key=lambda one: (one.lineage, one.version),
    )
    found = past.ask("versions")
    assert [(r["version"], r["kind"], r["stored_bytes"], r["base_version"]) for r in found] == [
        (one.version, one.kind, one.stored_bytes, one.base_version) for one in versions
    ]
    assert [r["share"] for r in found] == [one.stored_bytes / one.full_bytes for one in versions]


def test_the_command_prints_and_writes_answers(
    past: Past, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert query(lake=past.folder) == 0
    assert queries()["served"].question in capsys.readouterr().out
    file = tmp_path / "answer.json"
    assert query("steps", lake=past.folder, json=file, where="step = 1") == 0
    assert [row["step"] for row in msgspec.json.decode(file.read_bytes())] == [1]
    assert query(sql="SELECT 41 + 1 AS n", lake=past.folder, json=file) == 0
    assert msgspec.json.decode(file.read_bytes()) == [{"n": 42}]


@pytest.mark.parametrize(
    ("options", "word"),
    [({"name": "fate"}, "did you mean 'fates'"), ({"sql": "SELECT 1 FROM nothing"}, "nothing"), ({"name": "lag", "sql": "x"}, "not both")],
)  # fmt: skip
def test_a_wrong_question_is_told(
    past: Past, options: dict[str, str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        query(options.get("name"), sql=options.get("sql"), lake=past.folder)
    assert caught.value.code == 2
    assert word in capsys.readouterr().err


def test_a_folder_without_a_lake_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no lake"):
        open_lake(tmp_path)
