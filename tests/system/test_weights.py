"""The weight plane on the real broker and S3 server."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator

import numpy as np
import pytest

from rollwire.consumers.weights.paths import plan_path
from rollwire.consumers.weights.publisher import PublisherConfig, SnapshotPublisher
from rollwire.consumers.weights.reader import load_version
from rollwire.consumers.weights.subscriber import WeightSubscriber
from rollwire.consumers.weights.verify import verify_version
from rollwire.kernels.digest import StateDigest
from rollwire.kernels.tensors import State, Tensor, tensor
from rollwire.ops.cli import run
from rollwire.ops.stack import StackInfo
from rollwire.schemas.errors import DeadlineExceeded
from rollwire.schemas.records import FleetStatus, WeightVersion
from rollwire.streams.emit import decode_record, outgoing
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.seams.scan import scan
from rollwire.streams.seams.store_s3 import S3Store

WAIT = 60.0

pytestmark = pytest.mark.system


@pytest.fixture
def log(stack: StackInfo, prefix: str) -> Iterator[KafkaLog]:
    log = KafkaLog(stack.bootstrap, prefix=prefix, client_id="test-weights")
    yield log
    log.close()


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
