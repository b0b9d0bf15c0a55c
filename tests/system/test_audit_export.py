"""The lake on the real broker and store: an export that is killed in the middle is run again, and nothing is there twice."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from rollwire.consumers.audit.lake_export import read_stretches
from rollwire.ops.demo.supervisor import rollwire_command
from rollwire.ops.stack import StackInfo
from rollwire.schemas.golden import all_examples, load_examples
from rollwire.schemas.records import Rollout
from rollwire.streams.emit import outgoing
from rollwire.streams.findings import Report
from rollwire.streams.seams.log import Outgoing
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.seams.scan import scan
from rollwire.streams.seams.store_s3 import S3Store

pytestmark = pytest.mark.system

LARGE = 60_000  # bytes of poison on one of the last topics: the export has work left when it is killed


def fill(log: KafkaLog) -> None:
    rollout = load_examples("rollouts")[0].event
    assert isinstance(rollout, Rollout)
    many = [msgspec.structs.replace(rollout, seed=seed) for seed in range(500)]
    records = [Outgoing(e.topic, e.key, e.value, tuple(e.headers)) for e in all_examples()]
    records += [outgoing(one, source="rollwire/test", time_us=1_767_225_600_000_000) for one in many]
    # Transactions leave control records, so that offsets have holes.
    writer = log.transactional_writer("filling")
    for first in range(0, len(records), 100):
        writer.begin()
        writer.write(records[first : first + 100])
        writer.commit("nobody", {})
    writer.close()
    log.writer().write([Outgoing("user-feedback", None, bytes(LARGE), (), i % 4) for i in range(400)])


def test_an_export_that_is_killed_goes_on_and_nothing_is_there_twice(
    stack: StackInfo,
    prefix: str,
    log: KafkaLog,
    store: S3Store,
    wait_for: Callable[[Callable[[], bool], float], None],
    tmp_path: Path,
) -> None:
    fill(log)
    root = f"lake-{prefix}/"
    to = f"s3://{stack.bucket}/{root}"
    command = [
        *rollwire_command(),
        "audit",
        "export",
        "--to",
        to,
        "--dir",
        str(stack.dir),
        "--prefix",
        prefix,
    ]

    def stretches() -> int:
        return sum(1 for _ in store.list(f"{root}_manifest/stretches/"))

    with (tmp_path / "export.log").open("wb") as out:
        killed = subprocess.Popen(command, stdout=out, stderr=out)
        try:
            wait_for(lambda: stretches() >= 2 or killed.poll() is not None, 60)
        finally:
            killed.send_signal(signal.SIGKILL)
            killed.wait(10)
    done = stretches()
    assert done >= 2
    report = tmp_path / "report.json"
    again = subprocess.run(
        [*command, "--json", str(report)], capture_output=True, text=True, timeout=120, check=False
    )
    assert again.returncode in (0, 1), again.stdout + again.stderr
    written = read_stretches(store, root)
    assert len(written) > done
    topics = {stretch.topic for stretch in written}
    assert sum(stretch.rows for stretch in written) == sum(1 for _ in scan(log, sorted(topics)))
    files = [file.key for stretch in written for file in stretch.files]
    assert sorted(
        info.key.removeprefix(root) for info in store.list(root) if info.key.endswith(".parquet")
    ) == sorted(files)
    checked = subprocess.run(
        [*command, "--check", "--json", str(report)], capture_output=True, text=True, timeout=120, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    found = msgspec.json.decode(report.read_bytes(), type=Report)
    assert found.results == {"export.rows_equal": 1.0, "export.digests_equal": 1.0}
    assert found.checked["files"] == len(files)
