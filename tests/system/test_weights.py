"""The weight plane on the real broker and S3 server."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import numpy as np
import pytest

from rollwire.consumers.weights.anchor import AnchorFile, read_anchor
from rollwire.consumers.weights.census import read_books, take_census
from rollwire.consumers.weights.collect import collect
from rollwire.consumers.weights.links import write_link
from rollwire.consumers.weights.paths import plan_path
from rollwire.consumers.weights.publisher import PublisherConfig, SnapshotPublisher
from rollwire.consumers.weights.reader import load_version
from rollwire.consumers.weights.retention import RetentionConfig, plan_retention
from rollwire.consumers.weights.snapshot import SnapshotWriter
from rollwire.consumers.weights.subscriber import WeightSubscriber
from rollwire.consumers.weights.verify import verify_version
from rollwire.kernels.delta.encode import encode_delta
from rollwire.kernels.digest import StateDigest
from rollwire.kernels.tensors import State, Tensor, tensor
from rollwire.ops.cli import run
from rollwire.ops.stack import StackInfo
from rollwire.schemas.errors import DeadlineExceeded, WeightError
from rollwire.schemas.records import FleetStatus, WeightVersion
from rollwire.streams.emit import decode_record, outgoing
from rollwire.streams.seams.clock import ManualClock, SystemClock
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.seams.scan import scan
from rollwire.streams.seams.store_s3 import S3Store

WAIT = 60.0
CLOCK = SystemClock()

pytestmark = pytest.mark.system


@pytest.fixture
def bucket() -> str:
    return f"weights-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def store(stack: StackInfo, bucket: str) -> S3Store:
    store = S3Store(stack.s3_endpoint, bucket, stack.access_key, stack.secret_key)
    store.ensure_bucket()
    return store


def states(count: int) -> list[State]:
    rng = np.random.default_rng(0)
    made: list[State] = []
    bits = ((rng.standard_normal(200_000, dtype=np.float32) * 0.02).view(np.uint32) >> 16).astype(np.uint16)
    for version in range(count):
        made.append(
            {
                "model.layers.0.weight": tensor("BF16", (500, 400), bits),
                "model.norm.weight": tensor("F32", (16,), np.full(16, version // 2, np.float32)),
            }
        )
        bits = bits ^ (rng.random(bits.size) < 0.02).astype(np.uint16)
    return made


def same(a: State, b: State) -> bool:
    def plain(tensor: Tensor) -> tuple[str, tuple[int, ...], bytes]:
        return tensor.dtype, tensor.shape, tensor.bits.tobytes()

    return {n: plain(t) for n, t in a.items()} == {n: plain(t) for n, t in b.items()}


def test_published_followed_and_resumed(
    stack: StackInfo,
    prefix: str,
    bucket: str,
    log: KafkaLog,
    store: S3Store,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lineage = str(uuid.uuid4())
    wanted = states(5)
    config = PublisherConfig(anchor_every=3)
    publisher = SnapshotPublisher(store, model="policy", lineage=lineage, config=config)
    subscriber = WeightSubscriber(log, store, fleet="fleet", replica="replica-0", lineage=lineage)
    writer = log.transactional_writer(f"trainer-{lineage}")
    events: list[WeightVersion] = []

    def commit(event: WeightVersion) -> None:
        writer.begin()
        writer.write([outgoing(event, source="rollwire/trainer", time_us=event.published_us)])
        writer.commit("trainer", {})
        events.append(event)

    try:
        for version in range(4):
            event = publisher.submit(version, version, wanted[version]).result(WAIT)
            if version == 1:  # in the store, but its transaction is aborted: nobody sees it
                writer.begin()
                writer.write([outgoing(event, source="rollwire/trainer", time_us=event.published_us)])
                writer.abort()
                with pytest.raises(DeadlineExceeded):
                    subscriber.wait(0.5)
            commit(event)
            publisher.committed(version)
            staged = subscriber.wait(WAIT)
            assert staged.event == event
            assert same(staged.state, wanted[version])
            subscriber.swapped(staged, 0.5, 1)

        # The trainer dies with version 4 in the store and no event; its successor publishes the same objects.
        orphan = publisher.submit(4, 4, wanted[4]).result(WAIT)
        publisher.close()
        publisher = SnapshotPublisher(store, model="policy", lineage=lineage, config=config)
        publisher.resume(events[-1], load_version(store, plan_path(events, (), None, 3), None))
        again = publisher.submit(4, 4, wanted[4]).result(WAIT)
        assert again.manifest == orphan.manifest
        commit(again)
        publisher.committed(4)
        staged = subscriber.wait(WAIT)
        assert same(staged.state, wanted[4])
        subscriber.swapped(staged, 0.5, 0)
        subscriber.stopped(0)
    finally:
        subscriber.close()
        publisher.close()
        writer.close()

    for version, event in enumerate(events):
        state = load_version(store, plan_path(events, (), None, version), None)
        assert StateDigest.of(state).hex == event.state_digest
    ways = verify_version(store, events, (), 3)
    assert [way.steps for way in ways] == [("anchor 3",), ("anchor 0", "delta 0>1", "delta 1>2", "delta 2>3")]
    assert all(event.stored_bytes < event.full_bytes / 4 for event in events[1:])
    statuses = [e for e in map(decode_record, scan(log, ["fleet-status"])) if isinstance(e, FleetStatus)]
    assert [s.state for s in statuses] == ["staged", "swapped"] * 5 + ["stopped"]
    assert statuses[-1].state_digest == events[-1].state_digest

    where = ["--dir", str(stack.dir), "--prefix", prefix]
    assert run(["weights", "ls", *where]) == 0
    listed = capsys.readouterr().out
    assert all(event.state_digest[:16] in listed for event in events)
    assert run(["weights", "show", "4", "--bucket", bucket, *where]) == 0
    manifest = json.loads(capsys.readouterr().out)
    assert (manifest["version"], manifest["base"]["version"]) == (4, 3)
    assert run(["weights", "verify", "--bucket", bucket, *where]) == 0
    assert f"digest {events[4].state_digest}" in capsys.readouterr().out
    assert run(["weights", "verify", "9", "--bucket", bucket, *where]) == 1
    assert "version 9 is not known" in capsys.readouterr().err


def test_links_slices_export_and_collection(
    stack: StackInfo,
    prefix: str,
    log: KafkaLog,
    store: S3Store,
    bucket: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """On the real broker and store: what is linked is found, what is exported opens, what is kept stays readable."""
    wanted = states(13)
    snapshots = SnapshotWriter(
        store,
        model="m",
        lineage="L2",
        shard_bytes=1 << 20,
        anchor_shard_bytes=1 << 30,
        threads=1,
        hf_config={"model_type": "m"},
    )
    held = [snapshots.write_first(0, 0, wanted[0], CLOCK.now_us())]
    for version in range(1, 13):
        held.append(
            snapshots.write_next(
                held[-1], version, version, wanted[version], CLOCK.now_us(), anchor=version == 10
            )
        )
    delta = encode_delta(wanted[4], wanted[8])
    link = write_link(
        store,
        held[4].event,
        held[8].event,
        delta.shards,
        delta.heads,
        coder="gap",
        published_us=CLOCK.now_us(),
    )
    writer = log.writer()
    try:
        writer.write(
            [
                outgoing(event, source="test", time_us=CLOCK.now_us())
                for event in [*(h.event for h in held), link]
            ]
        )
    finally:
        writer.close()
    where = ["--dir", str(stack.dir), "--prefix", prefix]
    assert run(["weights", "ls", *where]) == 0
    assert "lineage L2" in capsys.readouterr().out
    assert run(["weights", "show", "8", "--links", "--bucket", bucket, *where]) == 0
    assert json.loads(capsys.readouterr().out)["base_version"] == 4
    assert run(["weights", "link", "--bucket", bucket, *where]) == 0
    assert "2 links made" in capsys.readouterr().out  # 0 to 4 and 8 to 12
    assert run(["weights", "link", "--bucket", bucket, *where]) == 0
    assert "0 links made" in capsys.readouterr().out
    assert run(["weights", "verify", "8", "--bucket", bucket, *where]) == 0
    assert "by skip: right" in capsys.readouterr().out
    assert run(["weights", "export", str(tmp_path / "v8"), "8", "--bucket", bucket, *where]) == 0
    exported = [AnchorFile(path.name, path.read_bytes()) for path in (tmp_path / "v8").iterdir()]
    assert same(read_anchor(exported), wanted[8])
    capsys.readouterr()

    gc = ["weights", "gc", "--keep-last", "2", "--bucket", bucket, *where]
    assert run([*gc, "--apply"]) == 0
    assert "deleted 0 objects" in capsys.readouterr().out  # all of it is young
    books = read_books(log, traces=True)
    tomorrow = ManualClock(CLOCK.now_us() + 25 * 3_600_000_000)
    config = RetentionConfig(keep_last=2, keep_every=1_000)
    plan = plan_retention(take_census(store, books), config, tomorrow.now_us())
    assert {verdict.fate for verdict in plan.verdicts} == {"live", "expired"}
    done = collect(log, store, books, plan, config, tomorrow)
    assert done.objects == len(plan.deletions) > 10
    books = read_books(log)
    for version in (0, 11, 12):
        path = plan_path(books.events, books.links, None, version)
        assert same(load_version(store, path, None), wanted[version])
    with pytest.raises(WeightError, match="no way"):
        plan_path(books.events, books.links, None, 8)
    assert run(["weights", "verify", "12", "--bucket", bucket, *where]) == 0
