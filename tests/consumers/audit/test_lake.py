"""The lake: every topic's events as rows, exactly once whatever happens, and a check that finds what is not so."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from rollwire.consumers.audit import lake_write
from rollwire.consumers.audit.lake_check import check
from rollwire.consumers.audit.lake_export import Exported, export, read_rounds, read_stretches
from rollwire.consumers.audit.lake_schema import WITHHELD, table_of
from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.errors import ConfigError, StoreUnavailable
from rollwire.schemas.golden import Example, all_examples, load_examples
from rollwire.schemas.records import GroupFate
from rollwire.streams.emit import outgoing
from rollwire.streams.findings import Kind
from rollwire.streams.seams.clock import ManualClock
from rollwire.streams.seams.log import Outgoing, TopicPartition
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.scan import scan
from rollwire.streams.seams.store_memory import MemoryStore

EXAMPLES = all_examples()
HOUR_S = 3600.0
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def a_log(clock: ManualClock | None = None) -> MemoryLog:
    return MemoryLog({topic: spec.partitions for topic, spec in TOPICS.items()}, clock or ManualClock())


def written(log: MemoryLog, *examples: Example) -> None:
    log.writer().write([Outgoing(e.topic, e.key, e.value, tuple(e.headers)) for e in examples])


def exported(log: MemoryLog, store: MemoryStore, *topics: str, **more: Any) -> Exported:
    return export(log, store, name="demo", topics=topics or tuple(TOPICS), **more)


def objects(store: MemoryStore) -> dict[str, bytes]:
    return {info.key: store.get(info.key) for info in store.list("")}


def rows(store: MemoryStore, topic: str, kind: str = "") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for info in store.list(f"{kind}topic={topic}/"):
        found += pq.ParquetFile(io.BytesIO(store.get(info.key))).read().to_pylist()
    return sorted(found, key=lambda row: (row["_partition"], row["_offset"]))


def plain(value: Any, name: str = "") -> Any:
    """An event's value as Arrow gives it back."""
    match value:
        case msgspec.Struct():
            return {field: plain(getattr(value, field), field) for field in value.__struct_fields__}
        case tuple() | list():
            return [plain(one, name) for one in value]
        case dict():
            return [(key, plain(one)) for key, one in value.items()]
        case int() if name.endswith("_us"):
            return _EPOCH + timedelta(microseconds=value)
        case float() if math.isnan(value):
            return "nan"
    return value


def no_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: no_nan(one) for key, one in value.items()}
    if isinstance(value, list):
        return [no_nan(one) for one in value]
    return "nan" if isinstance(value, float) and math.isnan(value) else value


@pytest.mark.parametrize("topic", TOPICS)
def test_every_field_of_every_event_comes_back(topic: str) -> None:
    log, store = a_log(), MemoryStore()
    examples = load_examples(topic)
    written(log, *examples)
    assert exported(log, store).rows == len(examples)
    records = sorted(scan(log, [topic]), key=lambda record: (record.partition, record.offset))
    by_value = {example.value: example for example in examples}
    for record, row in zip(records, rows(store, topic), strict=True):
        example = by_value[record.value or b""]
        assert row["_event_id"].encode() == dict(example.headers)["ce_id"]
        wanted = {k: v for k, v in plain(example.event).items() if k not in WITHHELD.get(topic, ())}
        assert no_nan({name: one for name, one in row.items() if not name.startswith("_")}) == wanted
        assert row["_key"] == example.key.decode()
        assert [(one["name"], one["value"]) for one in row["_headers"]] == list(example.headers)
    assert not check(log, store, name="demo").findings


def test_times_words_and_documentation_keep_their_meaning() -> None:
    schema = table_of("group-fates").schema
    assert schema.field("fate").type == pa.dictionary(pa.int32(), pa.string())
    assert schema.field("cut").type.field("clock_us").type == pa.timestamp("us", "UTC")
    assert schema.field("members").type == pa.list_(pa.string())
    assert schema.field("reward_mean").nullable
    assert not schema.field("group_id").nullable
    assert schema.field("group_id").metadata[b"doc"]
    assert table_of("train-steps").schema.field("settings").type == pa.map_(pa.string(), pa.string())
    assert table_of("rollouts").schema.field("token_ids").type == pa.binary()


def test_raw_bytes_of_refused_events_do_not_outlive_their_topic() -> None:
    assert not {"key", "value", "headers"} & set(table_of("dead-letters").schema.names)
    assert "source" in table_of("dead-letters").schema.names


def fates(log: MemoryLog, count: int, first: int = 0) -> None:
    event = load_examples("group-fates")[0].event
    assert isinstance(event, GroupFate)
    many = [
        msgspec.structs.replace(event, detail=f"number {number}") for number in range(first, first + count)
    ]
    log.writer().write([outgoing(one, source="rollwire/test", time_us=1_767_225_600_000_000) for one in many])


class Dying(MemoryStore):
    """Takes so many objects, then dies before or after it wrote the next one."""

    def __init__(self, takes: int, *, after: bool) -> None:
        super().__init__(ManualClock())
        self.takes: int | None = takes
        self._after = after

    def create(self, key: str, data: bytes) -> bool:
        if self.takes == 0:
            if self._after:
                super().create(key, data)
            raise StoreUnavailable("killed")
        if self.takes is not None:
            self.takes -= 1
        return super().create(key, data)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stretches of seven records."""
    monkeypatch.setattr(lake_write, "STRETCH_RECORDS", 7)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("after", [False, True])
def test_wherever_an_export_dies_the_next_one_makes_the_same_lake(after: bool) -> None:
    clock = ManualClock()
    log = a_log(clock)
    fates(log, 20)
    clock.advance(HOUR_S)
    fates(log, 13, 20)
    undisturbed = MemoryStore()
    exported(log, undisturbed, "group-fates")
    wanted = objects(undisturbed)
    assert len(wanted) > 12
    store = Dying(0, after=after)
    for takes in range(len(wanted)):
        store = Dying(takes, after=after)
        with pytest.raises(StoreUnavailable):
            exported(log, store, "group-fates")
        store.takes = None
        exported(log, store, "group-fates")
        assert objects(store) == wanted
    assert [row["detail"] for row in rows(store, "group-fates")] == [f"number {n}" for n in range(33)]


@pytest.mark.usefixtures("short")
def test_records_that_come_while_an_export_is_dead_are_a_round_of_their_own() -> None:
    log, store = a_log(), Dying(5, after=True)
    fates(log, 20)
    with pytest.raises(StoreUnavailable):
        exported(log, store, "group-fates")
    store.takes = None
    fates(log, 9, 20)
    exported(log, store, "group-fates")
    assert len(read_rounds(store, "")) == 2
    assert [row["detail"] for row in rows(store, "group-fates")] == [f"number {n}" for n in range(29)]
    assert exported(log, store, "group-fates").rows == 0
    assert len(read_rounds(store, "")) == 2
    # A topic that was not asked for can follow.
    written(log, *load_examples("rewards"))
    assert exported(log, store).rows == len(load_examples("rewards"))


@pytest.mark.usefixtures("short")
def test_a_file_that_no_manifest_names_is_replaced() -> None:
    log, store = a_log(), Dying(3, after=True)
    fates(log, 20)
    with pytest.raises(StoreUnavailable):
        exported(log, store, "group-fates")
    named = {file.key for stretch in read_stretches(store, "") for file in stretch.files}
    orphans = {key for key in objects(store) if key.endswith(".parquet")} - named
    assert orphans
    store.takes = None
    for key in orphans:
        store.delete(key)
        store.create(key, b"what another release of Arrow wrote")
    exported(log, store, "group-fates")
    assert len(rows(store, "group-fates")) == 20
    assert not check(log, store, name="demo").findings


def test_rows_stand_in_the_hour_of_the_broker() -> None:
    clock = ManualClock()
    log, store = a_log(clock), MemoryStore()
    for number in range(3):
        fates(log, 2, 2 * number)
        clock.advance(HOUR_S)
    exported(log, store, "group-fates")
    keys = [info.key for info in store.list("topic=")]
    assert [key.split("/")[1] for key in keys] == [f"hour=2026-01-01T0{hour}" for hour in range(3)]
    assert all(
        row["_timestamp"].strftime("%Y-%m-%dT%H") in key
        for key in keys
        for row in pq.ParquetFile(io.BytesIO(store.get(key))).read().to_pylist()
    )


def test_a_lake_may_be_of_some_hours_and_stays_so() -> None:
    clock = ManualClock()
    log, store = a_log(clock), MemoryStore()
    start_ms = clock.now_us() // 1_000
    for number in range(4):
        fates(log, 2, 2 * number)
        clock.advance(HOUR_S)
    times = {"from_ms": start_ms + 3_600_000, "to_ms": start_ms + 3 * 3_600_000}
    exported(log, store, "group-fates", **times)
    assert [row["detail"] for row in rows(store, "group-fates")] == [f"number {n}" for n in range(2, 6)]
    assert not check(log, store, name="demo").findings
    with pytest.raises(ConfigError, match="folder of its own"):
        exported(log, store, "group-fates")
    with pytest.raises(ConfigError, match="folder of its own"):
        export(
            log,
            store,
            name="other",
            topics=["group-fates"],
            from_ms=times["from_ms"],
            to_ms=times["to_ms"],
        )


def test_what_is_no_event_is_found_and_its_place_is_kept() -> None:
    log, store = a_log(), MemoryStore()
    written(log, *load_examples("groups-closed"), *load_examples("rewards"))
    log.writer().write(
        [
            Outgoing("rewards", b"k", b"somebody's words", partition=0),
            Outgoing("groups-closed", load_examples("groups-closed")[0].key, None),
        ]
    )
    made = exported(log, store)
    (finding,) = made.findings
    assert finding.kind is Kind.UNDECODABLE
    assert finding.position is not None
    (undecoded,) = rows(store, "rewards", "_undecoded/")
    place = (undecoded["_partition"], undecoded["_offset"])
    assert place == (finding.position.partition, finding.position.offset)
    assert undecoded["reason"] == "not_framed"
    assert not any(b"somebody's words" in data for data in objects(store).values())
    assert len(rows(store, "groups-closed", "_deleted/")) == 1
    report = check(log, store, name="demo")
    assert not report.findings
    assert report.results == {"export.rows_equal": 1.0, "export.digests_equal": 1.0}


def lost_file(store: MemoryStore, key: str) -> None:
    store.delete(key)


def changed_file(store: MemoryStore, key: str) -> None:
    data = bytearray(store.get(key))
    data[len(data) // 2] ^= 1
    store.delete(key)
    store.create(key, bytes(data))


@pytest.mark.parametrize(
    ("harm", "kind"), [(lost_file, Kind.OBJECT_MISSING), (changed_file, Kind.OBJECT_CORRUPT)]
)
def test_the_check_finds_a_harmed_file(harm: Callable[[MemoryStore, str], None], kind: Kind) -> None:
    log, store = a_log(), MemoryStore()
    written(log, *EXAMPLES)
    exported(log, store)
    (key,) = [info.key for info in store.list("topic=train-steps/")]
    harm(store, key)
    report = check(log, store, name="demo")
    assert [(one.kind, one.where) for one in report.findings] == [(kind, key)]
    assert report.results["export.digests_equal"] == 0


def test_the_check_finds_another_history() -> None:
    log, store, other = a_log(), MemoryStore(), a_log()
    fates(log, 5)
    fates(other, 4)
    fates(other, 1, 77)
    exported(log, store, "group-fates")
    assert [one.kind for one in check(other, store, name="demo").findings] == [Kind.DIGEST_DIFFERS]
    with pytest.raises(ConfigError, match="no lake"):
        check(log, store, name="another")


def test_rows_that_outlived_their_topic_are_a_note() -> None:
    log, store = a_log(), MemoryStore()
    fates(log, 6)
    exported(log, store, "group-fates")
    (info,) = store.list("topic=")
    partition = int(info.key.rsplit("/", 1)[1].split("-")[0])
    log.trim(TopicPartition("group-fates", partition), 4)
    report = check(log, store, name="demo")
    assert not report.findings
    assert [note.split(": ")[1] for note in report.notes] == ["4 of 6 rows stand in the lake alone"]


@pytest.mark.usefixtures("short")
def test_what_a_dead_export_left_under_other_names_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where stretches end elsewhere since, as after compaction, its files would stand beside the new ones."""
    log, store = a_log(), Dying(5, after=True)
    fates(log, 20)
    with pytest.raises(StoreUnavailable):
        exported(log, store, "group-fates")
    store.takes = None
    named = {file.key for stretch in read_stretches(store, "") for file in stretch.files}
    [left] = {key for key in objects(store) if key.endswith(".parquet")} - named
    found = check(log, store, name="demo")
    assert [(one.kind, one.where) for one in found.findings] == [(Kind.UNACCOUNTED, left)]
    monkeypatch.setattr(lake_write, "STRETCH_RECORDS", 5)
    exported(log, store, "group-fates")
    assert left not in objects(store)
    assert [row["detail"] for row in rows(store, "group-fates")] == [f"number {n}" for n in range(20)]
    assert not check(log, store, name="demo").findings


def test_a_file_of_somebody_else_is_named_and_stays() -> None:
    log, store = a_log(), MemoryStore()
    fates(log, 5)
    exported(log, store, "group-fates")
    (info,) = store.list("topic=")
    foreign = info.key.replace(".parquet", "-copy.parquet")
    store.create(foreign, store.get(info.key))
    report = check(log, store, name="demo")
    assert [(one.kind, one.where) for one in report.findings] == [(Kind.UNACCOUNTED, foreign)]
    assert report.results["export.rows_equal"] == 0
    exported(log, store, "group-fates")
    assert foreign in objects(store)


def test_a_delete_of_a_key_that_is_no_text_ends_no_export() -> None:
    log, store = a_log(), MemoryStore()
    log.writer().write(
        [Outgoing("groups-closed", b"\xffk", None), Outgoing("groups-closed", None, None, (), 0)]
    )
    assert exported(log, store).findings == ()
    assert sorted(str(row["_key"]) for row in rows(store, "groups-closed", "_deleted/")) == ["None", "\\xffk"]
    assert not check(log, store, name="demo").findings
