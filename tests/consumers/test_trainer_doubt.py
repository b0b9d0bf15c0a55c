"""A doubt about a version that another trainer has committed meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import msgspec
import pytest

from rollwire.consumers.trainer.commit import Committer, Taken
from rollwire.schemas.errors import Fenced, OffsetLost, ReplayDiverged, TransactionUnknown
from rollwire.schemas.records import WeightVersion
from rollwire.streams import synthetic
from rollwire.streams.seams.clock import ManualClock
from rollwire.streams.seams.log import Outgoing, TopicPartition
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.work import Inline

MINE, OTHERS = "1" * 32, "2" * 32
AT = TopicPartition("packed-batches", 0)


class Doubtful:
    """A writer whose answer never comes."""

    def begin(self) -> None: ...

    def write(self, records: Sequence[Outgoing]) -> None: ...

    def commit(
        self,
        group: str,
        offsets: Mapping[TopicPartition, int],
        timeout_s: float = 30.0,
        *,
        also: Mapping[str, Mapping[TopicPartition, int]] | None = None,
    ) -> None:
        raise TransactionUnknown("no answer")

    def abort(self) -> None: ...

    def close(self) -> None: ...


def version(digest: str = MINE, number: int = 0) -> WeightVersion:
    lineage = "0197a1b2-0000-7000-8000-0000000000aa"
    return synthetic.version(number, lineage=lineage, at_us=1_767_225_600_000_000, digest=digest)


def published() -> Future[WeightVersion]:
    done: Future[WeightVersion] = Future()
    done.set_result(version())
    return done


def doubtful(
    log: MemoryLog, clock: ManualClock, work: Inline, found: Sequence[WeightVersion], done: list[int]
) -> Committer:
    """A pipeline whose transaction of version 0, which ends at offset 0, got no answer; the log has `found`."""
    committer = Committer(
        log,
        Doubtful(),
        transactional_id="t.trainer",
        group="t.trainer",
        source="rollwire/test",
        clock=clock,
        publish_deadline_s=60.0,
        commit_deadline_s=60.0,
        committed=lambda made, _: done.append(made.version),
        logged=lambda number: found[number] if number < len(found) else None,
        work=work,
    )
    committer.take(Taken(0, None, published(), None, {}, {AT: 0}))
    for _ in range(4):
        clock.advance(1.0)
        work.turn()
    return committer


@pytest.mark.parametrize("found", [None, MINE, OTHERS])
def test_what_another_trainer_committed_counts_only_with_the_same_bits(found: str | None) -> None:
    clock, work, done = ManualClock(), Inline(), list[int]()
    log = MemoryLog({"weight-versions": 1, AT.topic: 1}, clock)
    if found is not None:
        log.set_committed("t.trainer", AT, 0)
    committer = doubtful(log, clock, work, [] if found is None else [version(found)], done)
    if found == OTHERS:
        with pytest.raises(ReplayDiverged, match="another trainer"):
            committer.check()
    else:
        committer.check()
    assert done == ([] if found == OTHERS else [0])
    assert log.end_offsets([TopicPartition("weight-versions", 0)]) == {
        TopicPartition("weight-versions", 0): 0 if found else 2
    }
    committer.close()


def test_an_anchor_from_which_another_trainer_went_on_is_not_taken_for_ones_own() -> None:
    clock, work, done = ManualClock(), Inline(), list[int]()
    log = MemoryLog({"weight-versions": 1, AT.topic: 1}, clock)
    log.set_committed("t.trainer", AT, 1)  # step 1 is trained: whoever goes on from offset 0 trains it again
    committer = doubtful(log, clock, work, [version()], done)
    with pytest.raises(OffsetLost, match="another trainer has taken steps"):
        committer.check()
    assert done == []
    assert log.committed("t.trainer", [AT]) == {AT: 1}
    committer.close()


@pytest.mark.parametrize("in_its_place", [True, False])
def test_a_lineage_that_was_taken_back_meanwhile_fences(in_its_place: bool) -> None:
    clock, work, done = ManualClock(), Inline(), list[int]()
    log = MemoryLog({"weight-versions": 1, AT.topic: 1}, clock)
    log.set_committed("t.trainer", AT, 3)
    reverted = msgspec.structs.replace(version(OTHERS, 1), kind="revert", reverts_to=0)
    found = [reverted] if in_its_place else [version(), reverted]
    committer = doubtful(log, clock, work, found, done)
    with pytest.raises(Fenced, match="taken back"):
        committer.check()
    assert done == []
    committer.close()
