"""`rollwire fleet` on the real broker and S3 server: a folder that is followed, promoted, pinned, killed and followed on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from rollwire.consumers.weights.anchor import AnchorFile, read_anchor
from rollwire.consumers.weights.publisher import PublisherConfig, SnapshotPublisher
from rollwire.consumers.weights.targets.folder import BOOK, CURRENT, Book
from rollwire.kernels.digest import StateDigest
from rollwire.kernels.tensors import State, tensor
from rollwire.ops.cli import run
from rollwire.ops.stack import StackInfo
from rollwire.schemas.records import WeightVersion
from rollwire.streams.emit import outgoing
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.seams.store_s3 import S3Store

WAIT = 120.0
WaitFor = Callable[[Callable[[], bool], float], None]
SCRIPT = Path(sys.executable).with_name("rollwire")

pytestmark = pytest.mark.system


class Trainer:
    """Publishes versions of small weights."""

    def __init__(self, stack: StackInfo, prefix: str) -> None:
        self.bucket = f"fleet-{uuid.uuid4().hex[:12]}"
        store = S3Store(stack.s3_endpoint, self.bucket, stack.access_key, stack.secret_key)
        store.ensure_bucket()
        self.lineage = str(uuid.uuid4())
        self.events: list[WeightVersion] = []
        self._log = KafkaLog(stack.bootstrap, prefix=prefix, client_id="test-fleet")
        self._writer = self._log.writer()
        self._publisher = SnapshotPublisher(
            store, model="policy", lineage=self.lineage, config=PublisherConfig(anchor_every=3)
        )
        rng = np.random.default_rng(0)
        self._bits = rng.integers(0, 1 << 16, 40_000, dtype=np.uint16)

    def publish(self) -> WeightVersion:
        version = len(self.events)
        self._bits = self._bits.copy()
        self._bits[version * 7 :: 101] ^= 3
        state: State = {"model.norm.weight": tensor("BF16", (200, 200), self._bits)}
        event = self._publisher.submit(version, version, state).result(WAIT)
        self._writer.write([outgoing(event, source="rollwire/trainer", time_us=event.published_us)])
        self._publisher.committed(version)
        self.events.append(event)
        return event

    def close(self) -> None:
        self._publisher.close()
        self._writer.close()
        self._log.close()


@pytest.fixture
def trainer(stack: StackInfo, prefix: str) -> Iterator[Trainer]:
    trainer = Trainer(stack, prefix)
    yield trainer
    trainer.close()


def served(root: Path) -> Book | None:
    """What a reader of the folder finds, all of it checked."""
    try:
        folder = (root / CURRENT).resolve(strict=True)
    except FileNotFoundError:
        return None
    book = msgspec.json.decode((folder / BOOK).read_bytes(), type=Book)
    state = read_anchor([AnchorFile(f.name, f.read_bytes()) for f in sorted(folder.glob("*.safetensors"))])
    assert StateDigest.of(state).hex == book.state_digest
    return book


def test_a_folder_follows_is_pinned_killed_and_follows_on(
    stack: StackInfo,
    prefix: str,
    trainer: Trainer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    wait_for: WaitFor,
) -> None:
    root = tmp_path / "weights"
    where = ["--dir", str(stack.dir), "--prefix", prefix]
    line = [
        str(SCRIPT),
        "fleet",
        "follow",
        "--folder",
        str(root),
        "--replica",
        "r0",
        "--bucket",
        trainer.bucket,
    ]

    def at(version: int) -> bool:
        book = served(root)
        return book is not None and book.version == version

    for _ in range(2):
        trainer.publish()
    follower = subprocess.Popen([*line, *where])
    try:
        wait_for(lambda: at(1), WAIT)
        trainer.publish()
        wait_for(lambda: at(2), WAIT)
        assert run(["fleet", "pin", "r0", "0", "--reason", "to compare", *where]) == 0
        wait_for(lambda: at(0), WAIT)
        trainer.publish()
        assert run(["fleet", "pin", "r0", "--release", *where]) == 0
        wait_for(lambda: at(3), WAIT)
        follower.kill()
        assert follower.wait(WAIT) == -signal.SIGKILL
        trainer.publish()

        follower = subprocess.Popen([*line, "--channel", "canary", *where])
        assert run(["fleet", "promote", "--channel", "canary", "--version", "4", "--by", "ops", *where]) == 0
        wait_for(lambda: at(4), WAIT)
        trainer.publish()
        assert run(["fleet", "promote", "--channel", "canary", "--version", "1", *where]) == 0
        wait_for(lambda: at(1), WAIT)
        follower.send_signal(signal.SIGTERM)
        assert follower.wait(WAIT) == 0
    finally:
        follower.kill()
        follower.wait(WAIT)

    done = subprocess.run(
        [*line, "--until", "5", "--until-s", str(WAIT), *where], check=False, timeout=2 * WAIT
    )
    assert done.returncode == 0
    assert at(5)
    capsys.readouterr()
    rows = tmp_path / "rows.json"
    assert run(["fleet", "status", "--json", str(rows), *where]) == 0
    assert "fleet/r0" in capsys.readouterr().out
    (row,) = json.loads(rows.read_text())
    assert (row["state"], row["served"], row["lag"], row["target"]) == ("stopped", 5, 0, "folder")
    assert run(["fleet", "pin", "r0", "9", *where]) == 1
    assert "version 9 is not published" in capsys.readouterr().err
