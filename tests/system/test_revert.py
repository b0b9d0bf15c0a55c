"""A lineage is taken back while its pack and its trainer run, on the real broker and store: training goes on from there."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rollwire.consumers.ledger import count_ledger
from rollwire.consumers.trainer.arithmetic import run_arithmetic_trainer
from rollwire.consumers.trainer.config import TrainerConfig
from rollwire.consumers.trainer.history import BATCHES, History, read_history
from rollwire.consumers.trainer.sums import NOTHING, Sums, fold, state_of, sums_of
from rollwire.consumers.weights.paths import delta_step, plan_path
from rollwire.consumers.weights.publisher import PublisherConfig
from rollwire.consumers.weights.reader import load_version
from rollwire.consumers.weights.subscriber import WeightSubscriber
from rollwire.kernels.digest import StateDigest
from rollwire.ops.cli import run
from rollwire.ops.stack import StackInfo
from rollwire.schemas.errors import DeadlineExceeded, Fenced, RollwireError
from rollwire.schemas.records import DeadLetter, Event, GroupFate, PackedBatch
from rollwire.streams import synthetic
from rollwire.streams.assemble_config import AssembleConfig
from rollwire.streams.emit import decode_record, outgoing
from rollwire.streams.pack import PackConfig
from rollwire.streams.run_assemble import run_assemble
from rollwire.streams.run_pack import run_pack
from rollwire.streams.seams.clock import SystemClock
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.seams.scan import scan
from rollwire.streams.seams.store_s3 import S3Store

pytestmark = pytest.mark.system

LINEAGE = synthetic.LINEAGE
MODEL = "policy"
WAIT_S = 90.0
ASSEMBLE = AssembleConfig(group_deadline_s=300.0, require_traces=False)
PACK = PackConfig(groups_per_step=2, token_budget=64, max_lag_versions=4, max_steps_ahead=2)
TRAINER = TrainerConfig(checkpoint_every=3)


class Role:
    """A process of the run, as a thread that its supervisor starts again when it was fenced."""

    def __init__(self, role: Callable[[threading.Event], object]) -> None:
        self.stop = threading.Event()
        self.fenced = 0
        self.failure: RollwireError | None = None
        self._role = role
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self.stop.is_set():
            try:
                self._role(self.stop)
            except Fenced:
                self.fenced += 1
            except RollwireError as failure:
                self.failure = failure
                return

    def end(self) -> None:
        self.stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        assert self.failure is None


class World:
    """A run, and the fleet that samples for it."""

    def __init__(self, stack: StackInfo, prefix: str) -> None:
        self.stack, self.prefix = stack, prefix
        self.logs: list[KafkaLog] = []
        self.log = self.client("watch")
        self.store = S3Store(stack.s3_endpoint, stack.bucket, stack.access_key, stack.secret_key)
        self.store.ensure_bucket()
        self.groups = 0
        self._writer = self.log.writer()
        assemble, pack = self.client("assemble"), self.client("pack")
        self.roles = [
            Role(lambda stop: run_assemble(assemble, ASSEMBLE, prefix=prefix, stop=stop)),
            Role(lambda stop: run_pack(pack, PACK, prefix=prefix, model=MODEL, lineage=LINEAGE, stop=stop)),
        ]

    def client(self, name: str) -> KafkaLog:
        self.logs.append(KafkaLog(self.stack.bootstrap, prefix=self.prefix, client_id=f"test-revert-{name}"))
        return self.logs[-1]

    def trainer(self) -> Role:
        log = self.client("trainer")
        made = Role(
            lambda stop: run_arithmetic_trainer(
                log,
                self.store,
                TRAINER,
                prefix=self.prefix,
                model=MODEL,
                lineage=LINEAGE,
                stop=stop,
                publisher_config=PublisherConfig(anchor_every=4),
            )
        )
        self.roles.append(made)
        return made

    def sample(self, *versions: int) -> list[str]:
        """A group of two rollouts from each of `versions`, with their rewards."""
        made: list[str] = []
        events: list[Event] = []
        now_us = SystemClock().now_us()
        for version in versions:
            self.groups += 1
            group = synthetic.group_id(now_us, self.groups)
            made.append(group)
            for index in range(2):
                events.append(
                    synthetic.rollout(
                        group, index, 2, at_us=now_us, version=version, top_k=0, seed=self.groups
                    )
                )
                events.append(synthetic.reward(group, index, float(index), at_us=now_us))
        self._writer.write([outgoing(event, source="test", time_us=now_us) for event in events], WAIT_S)
        return made

    def history(self) -> History:
        return read_history(self.log, MODEL, LINEAGE, deadline_s=WAIT_S, clock=SystemClock(), running=True)

    @property
    def newest(self) -> int:
        return len(self.history().versions) - 1

    def train_to(self, version: int) -> None:
        """The fleet samples from whatever is newest until the lineage has come to `version`."""
        end = time.monotonic() + WAIT_S
        while (newest := self.newest) < version:
            assert time.monotonic() < end, f"the lineage stands at version {newest}"
            assert all(role.failure is None for role in self.roles), [role.failure for role in self.roles]
            if self.groups < 2 * (newest + 4) + self.spare:
                self.sample(max(newest, 0), max(newest, 0))
            self.roles[0].stop.wait(0.2)

    spare = 0  # groups that were sampled beyond those

    def until(self, holds: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < end, what
            self.roles[0].stop.wait(0.2)

    def revert(self, to: int) -> int:
        where = ["--dir", str(self.stack.dir), "--prefix", self.prefix]
        return run(["weights", "revert", "--to", str(to), "--why", "a test", "--by", "ann", *where])

    def fates(self) -> Mapping[str, str]:
        events = map(decode_record, scan(self.log, ["group-fates"]))
        return {e.group_id: e.reason for e in events if isinstance(e, GroupFate)}

    def close(self) -> None:
        for role in self.roles:
            role.stop.set()
        for role in self.roles:
            role.end()
        self._writer.close()
        for log in self.logs:
            log.close()


@pytest.fixture
def world(stack: StackInfo, prefix: str) -> Iterator[World]:
    world = World(stack, prefix)
    try:
        yield world
    finally:
        world.close()


def check_weights(world: World) -> None:
    """Every version is, bit for bit, what the plans on the way to it make; its delta leads there from the one before."""
    slices = {
        event.plan_digest: event
        for event in map(decode_record, scan(world.log, [BATCHES]))
        if isinstance(event, PackedBatch)
    }
    history = world.history()
    sums: list[Sums] = [NOTHING]
    for version, step in zip(history.versions[1:], history.steps, strict=True):
        before = sums[version.version - 1]
        to = version.reverts_to
        sums.append(fold(before, [slices[step.plan_digest]]) if to is None else sums[to])
    for version in history.versions:
        want = StateDigest.of(state_of(sums[version.version])).hex
        state = load_version(world.store, plan_path(history.versions, (), None, version.version), None)
        assert StateDigest.of(state).hex == want == version.state_digest
        if version.base_version is not None:
            base = state_of(sums[version.base_version])
            assert StateDigest.of(load_version(world.store, [delta_step(version)], base)).hex == want


def check_lineage(world: World, given_up: str, tmp_path: Path) -> None:
    """What `audit lineage` says: the newest version's way leads around what was given up, and its bits count what it names."""
    where = ["--dir", str(world.stack.dir), "--prefix", world.prefix]
    out, picture = tmp_path / "lineage.json", tmp_path / "lineage.html"

    def asked(*question: str) -> dict[str, Any]:
        assert run(["audit", "lineage", *question, "--json", str(out), *where]) == 0
        answer: dict[str, Any] = json.loads(out.read_bytes())["answer"]
        return answer

    history = world.history()
    newest = asked("--version", str(world.newest), "--picture", str(picture))
    assert newest["line"] == [0, *(step.version for step in history.line(world.newest))]
    assert [(one["replica"], one["until_us"]) for one in newest["served"]] == [("f-0", None)]
    assert picture.read_text().startswith("<!doctype html>")
    state = load_version(world.store, plan_path(history.versions, (), None, world.newest), None)
    named = sum(
        one["trained"] is True
        for number in newest["line"]
        for group in asked("--version", str(number))["groups"]
        for one in group["rollouts"]
    )
    assert named == sums_of(dict(state)).trained > 0
    last = newest["groups"][0]["rollouts"][0]["rollout_id"]
    assert [one["trained"] for one in asked("--rollout", last)["reached"]] == [[world.newest]]
    (group,) = asked("--rollout", f"{given_up}.0")["groups"]
    assert (group["reason"], group["planned"], group["made"]) == ("lineage_abandoned", None, None)
    assert run(["audit", "lineage", "--version", "9999", *where]) == 1
    with pytest.raises(SystemExit, match="2"):
        run(["audit", "lineage", *where])


def test_training_goes_on_from_an_older_version_and_the_books_add_up(
    world: World, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trainer = world.trainer()
    fleet = WeightSubscriber(world.client("fleet"), world.store, fleet="f", replica="f-0", lineage=LINEAGE)
    world.train_to(7)

    # While everything runs: the trainer is fenced, starts again and goes on; a checkpoint of version 3 is there.
    assert world.revert(3) == 0
    assert "has the weights of version 3" in capsys.readouterr().out
    first = world.history().reverts.known[0]
    assert first.to == 3
    assert first.version > 7
    world.train_to(first.version + 1)  # pack knows of it
    given_up = world.sample(first.version - 2, first.version - 1)
    world.spare += 2
    world.train_to(first.version + 3)
    assert trainer.fenced >= 1
    world.until(lambda: world.fates().keys() >= set(given_up), "what was sampled before has no fate")
    assert {world.fates()[group] for group in given_up} == {"lineage_abandoned"}
    letters = [e for e in map(decode_record, scan(world.log, ["dead-letters"])) if isinstance(e, DeadLetter)]
    assert {letter.reason for letter in letters} == {"lineage_abandoned"}

    # While no trainer runs, with plans that were made and not taken, to a version without a checkpoint.
    trainer.end()
    stands = world.newest
    ahead = {e.step for e in map(decode_record, scan(world.log, [BATCHES])) if isinstance(e, PackedBatch)}
    if max(ahead) <= stands:
        world.sample(stands, stands)
        world.spare += 2
        world.until(
            lambda: any(
                isinstance(e, PackedBatch) and e.step > stands
                for e in map(decode_record, scan(world.log, [BATCHES]))
            ),
            "no plan was made ahead",
        )
    to = next(v.version for v in reversed(world.history().versions[:-1]) if v.checkpoint is None)
    assert world.revert(to) == 0
    second = world.newest
    assert (second, world.history().versions[second].checkpoint) == (stands + 1, None)
    trainer = world.trainer()
    world.train_to(second + 2)
    trainer.end()

    # A fleet that was there all the time serves the newest version.
    serves = -1
    end = time.monotonic() + WAIT_S
    while serves < second + 2 and time.monotonic() < end:
        try:
            staged = fleet.wait(1.0)
        except DeadlineExceeded:
            continue
        serves = staged.event.version
        fleet.swapped(staged, 0.1, 0)
    fleet.close()
    assert serves == world.newest

    check_weights(world)
    history = world.history()
    batches = [e for e in map(decode_record, scan(world.log, [BATCHES])) if isinstance(e, PackedBatch)]
    over = [b for b in batches if history.reverts.passes_over(b.step, b.newest_revert)]
    assert over  # made for the step of the second revert, at least
    trained = Counter(step.plan_digest for step in history.steps)
    assert not any(b.plan_digest in trained for b in over)
    ledger = count_ledger(world.log, world.prefix)
    assert {line.topic: (line.missing_ids, line.extra_ids) for line in ledger.lines if line.gap} == {}
    assert ledger["packed-batches"].shed == len(over)
    assert run(["weights", "ls", "--dir", str(world.stack.dir), "--prefix", world.prefix]) == 0
    listed = capsys.readouterr().out
    assert f"revert to {first.to} " in listed
    assert f"revert to {to} " in listed
    for number in (first.version, second):
        where = ["--dir", str(world.stack.dir), "--prefix", world.prefix]
        assert run(["weights", "verify", str(number), *where]) == 0
    check_lineage(world, given_up[0], tmp_path)
    assert world.revert(world.newest) == 1
    assert "is the newest" in capsys.readouterr().err
