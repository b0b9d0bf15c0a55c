"""The simulation can fail: bugs planted in the real processors are found, each within a few of the seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import pytest

from rollwire.consumers.packed_batches import PackedBatchReader
from rollwire.consumers.trainer.arithmetic import ArithmeticLearner
from rollwire.consumers.trainer.books import Books, Entry
from rollwire.kernels.advantages import AdvantageResult, group_advantages
from rollwire.ops.simulate.run import REAL, Bench, make_assemble, make_pack
from rollwire.ops.simulate.sweep import search
from rollwire.schemas.records import Group, PackedBatch
from rollwire.streams import pack, pack_cohort, pack_mix
from rollwire.streams.assemble import Assembler
from rollwire.streams.assemble_config import Kind
from rollwire.streams.pack_judge import Facts, examine
from rollwire.streams.seams.forwarding import ForwardingLog, ForwardingTransactions
from rollwire.streams.seams.log import Log, Outgoing, TopicPartition, TransactionalWriter

SEEDS: Final = 1_000  # a bug that none of these finds is not found


OFTEN: Final = REAL._replace(reverts=0.1)  # somebody takes the lineage back all the time


class WrappedLog(ForwardingLog):
    """A log whose transactional writers are others."""

    def __init__(
        self, log: Log, wrap: Callable[[Callable[[], TransactionalWriter]], TransactionalWriter]
    ) -> None:
        super().__init__(log)
        self._wrap = wrap

    def transactional_writer(self, transactional_id: str, timeout_s: float = 60.0) -> TransactionalWriter:
        return self._wrap(lambda: self._inner.transactional_writer(transactional_id, timeout_s))


class LateWriter:
    """`init_transactions` only when something is to be written: after memories and offsets were read."""

    def __init__(self, make: Callable[[], TransactionalWriter]) -> None:
        self._make = make
        self._made: TransactionalWriter | None = None

    def begin(self) -> None:
        self._made = self._made or self._make()
        self._made.begin()

    def write(self, records: Sequence[Outgoing]) -> None:
        self._there().write(records)

    def commit(
        self,
        group: str,
        offsets: Mapping[TopicPartition, int],
        timeout_s: float = 30.0,
        *,
        also: Mapping[str, Mapping[TopicPartition, int]] | None = None,
    ) -> None:
        self._there().commit(group, offsets, timeout_s, also=also)

    def abort(self) -> None:
        self._there().abort()

    def close(self) -> None:
        if self._made is not None:
            self._made.close()

    def _there(self) -> TransactionalWriter:
        assert self._made is not None
        return self._made


class EarlyWriter(ForwardingTransactions):
    """Offsets first, in a transaction of their own; then the outputs."""

    def __init__(self, make: Callable[[], TransactionalWriter]) -> None:
        super().__init__(make())
        self._held: Sequence[Outgoing] = ()

    def write(self, records: Sequence[Outgoing]) -> None:
        self._held = records

    def commit(
        self,
        group: str,
        offsets: Mapping[TopicPartition, int],
        timeout_s: float = 30.0,
        *,
        also: Mapping[str, Mapping[TopicPartition, int]] | None = None,
    ) -> None:
        self._inner.commit(group, offsets, timeout_s, also=also)
        self._inner.begin()
        self._inner.write(self._held)
        self._inner.commit(group, {}, timeout_s)


class Bug(NamedTuple):
    """`attribute` of `owner` becomes `value`, or the processors are made by `bench`."""

    laws: tuple[str, ...]  # any of these is broken by it
    bench: Bench = REAL
    owner: object = None
    attribute: str = ""
    value: object = None


def _newest(group: Group, *, token_budget: int) -> Facts:
    facts = examine(group, token_budget=token_budget)
    return facts._replace(oldest_version=facts.newest_version)


def _wrapped(wrap: Callable[[Callable[[], TransactionalWriter]], TransactionalWriter]) -> Bench:
    return REAL._replace(
        assemble=lambda log, partition, settings, world, life: make_assemble(
            WrappedLog(log, wrap), partition, settings, world, life
        ),
        pack=lambda log, settings, world, life: make_pack(WrappedLog(log, wrap), settings, world, life),
    )


def _last(books: Books) -> Entry | None:
    return books.open[-1] if books.open else None


def _of_no_version(group: Group, *, token_budget: int) -> Facts:
    return examine(group, token_budget=token_budget)._replace(versions=())


def _takes_all(reader: PackedBatchReader, batch: PackedBatch) -> bool:
    return batch.step <= reader.version


def _forgets(
    learner: ArithmeticLearner,
    version: int,
    offsets: Sequence[int],
    last_digest: str | None,
    newest_revert: int | None,
) -> None:
    learner.begin()
    learner.start(version, offsets, last_digest, newest_revert)


def _with_itself(rewards: Sequence[float | None], _baseline: str) -> AdvantageResult:
    return group_advantages(rewards, "mean")


BUGS: Final[dict[str, Bug]] = {
    "the closed-set is skipped": Bug(("4", "9"), owner=Assembler, attribute="restore", value=lambda *_: None),
    "the closed-set is read before init_transactions": Bug(("4", "7"), _wrapped(LateWriter)),
    "offsets are committed before outputs": Bug(("2", "4", "7"), _wrapped(EarlyWriter)),
    "what was read is acknowledged": Bug(
        ("2", "7"), owner=Assembler, attribute="committable", value=Assembler.read
    ),
    "the lag leaves the oldest span out": Bug(("6", "7"), owner=pack, attribute="examine", value=_newest),
    "what an abandoned version sampled is trained on": Bug(
        ("6",), OFTEN, owner=pack, attribute="examine", value=_of_no_version
    ),
    "a plan that knew of no revert is trained": Bug(
        ("3", "6", "7", "8", "9"), OFTEN, owner=PackedBatchReader, attribute="_passes_by", value=_takes_all
    ),
    "over a revert the weights are lost": Bug(
        ("5", "7"), OFTEN, owner=ArithmeticLearner, attribute="move", value=_forgets
    ),
    "each assemble takes the other's rewards": Bug(
        ("4", "7", "10"), owner=Kind, attribute="passes_by", value=lambda *_: False
    ),
    "an answer is never too old": Bug(("6", "8"), owner=pack, attribute="judge_age", value=lambda *_: None),
    "an answer is compared with itself too": Bug(
        ("10",), owner=pack_cohort, attribute="group_advantages", value=_with_itself
    ),
    "one kind alone waits for ever": Bug(
        ("8",), owner=pack_mix, attribute="_alone_since_us", value=lambda *_, **__: None
    ),
    "step n+1 is committed before n": Bug(("3", "7"), owner=Books, attribute="first", value=property(_last)),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bug = BUGS[name]
    if bug.owner is not None:
        monkeypatch.setattr(bug.owner, bug.attribute, bug.value)
    found = next((outcome for outcome in search(0, SEEDS, bug.bench) if outcome.failure is not None), None)
    assert found is not None
    assert found.failure is not None
    assert found.failure.startswith(tuple(f"law {law}:" for law in bug.laws)), found.failure
