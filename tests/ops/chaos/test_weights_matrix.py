"""The crash matrix in memory: every third death, and what the matrix says where somebody breaks his word."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from rollwire.consumers.weights.targets.folder import FolderTarget
from rollwire.consumers.weights.targets.target import Update
from rollwire.ops.chaos.weights.effects import DIED, Crash, Effects
from rollwire.ops.chaos.weights.inputs import (
    INPUTS,
    OTHER_TENSORS,
    Input,
    publisher_input_cell,
    replica_input_cell,
)
from rollwire.ops.chaos.weights.judge import CellFailed, judge_status
from rollwire.ops.chaos.weights.lives import MemoryLives, Role, Task
from rollwire.ops.chaos.weights.matrix import (
    Bench,
    Result,
    collector_cell,
    crashes,
    judged,
    publisher_cell,
    replica_cell,
)
from rollwire.ops.chaos.weights.report import cells_table, figures, what_of
from rollwire.ops.chaos.weights.run import Outcome, crash_cells, killed_cells, publisher_cells, replica_cells
from rollwire.ops.chaos.weights.states import EMPTY, LAST, digest_of, state_of
from rollwire.ops.chaos.weights.targets import FAILURES, KINDS, Failure, Kind
from rollwire.schemas.records import FleetState, FleetStatus
from rollwire.streams.seams.clock import SystemClock
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.store_memory import MemoryStore

# A life in memory ends by SystemExit, in its threads too; Python's own hook keeps quiet about it, pytest's does not.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

EVERY = 11
TOPICS = {"weight-versions": 1, "weight-links": 1, "evaluations": 1, "fleet-status": 1}


def bench_of(store: MemoryStore) -> Bench:
    log = MemoryLog(TOPICS, SystemClock())
    return Bench(MemoryLives(log, store), log, store)


def names(results: Iterable[Result]) -> set[str]:
    return {what_of(result.cell) for result in results}


def test_c24_c26_whoever_publishes_may_die_anywhere() -> None:
    """C24, C26, law 3: what is visible is whole, the next life goes on, each version is there once."""
    results = list(publisher_cells(bench_of(MemoryStore()), EVERY))
    assert {result.part for result in results} == {"publish", "publish, context", "publish again"}
    assert [result for result in results if result.problem] == []
    assert len(results) > 15
    assert names(results) >= {"put deltas", "put anchors", "put manifests", "begin", "commit"}
    sides = {result.cell.split()[0] for result in results}
    assert sides >= {"before", "after"}


def test_c23_c34_whoever_follows_may_die_anywhere(tmp_path: Path) -> None:
    """C23, C34, law 3: it serves one version or the other, says so truthfully, and the next life goes on; a target that fails
    it serves the version before."""
    results = list(replica_cells(bench_of(MemoryStore()), tmp_path, 9))
    assert [result for result in results if result.problem] == []
    assert {result.part for result in results} == {
        "follow",
        "serve, numpy",
        "serve, slice",
        "serve, folder",
        "serve again, folder",
    }
    assert len(results) > 40
    assert "get deltas" in names(results)
    for effect in ("stage", "swap", "read back", "keep", "report staged", "report swapped"):
        assert {f"{effect} {version}" for version in range(LAST + 1)} & names(results), effect


def test_whoever_collects_may_die_anywhere() -> None:
    """Law 3: whatever is deleted by then, the newest version can be read, and so can all that a way still leads to."""

    @contextmanager
    def fresh() -> Iterator[Bench]:
        yield bench_of(MemoryStore())

    results = list(crash_cells("collect", bench_of(MemoryStore()), partial(collector_cell, fresh), EVERY))
    assert [result for result in results if result.problem] == []
    assert len(results) > 5
    assert "delete deltas" in names(results)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("failure", FAILURES)
def test_a_target_that_fails_leaves_the_version_before(kind: Kind, failure: Failure, tmp_path: Path) -> None:
    folder = tmp_path if kind == "folder" else None
    replica_cell(bench_of(MemoryStore()), None, kind, folder=folder, failure=failure)


class TornFolder(FolderTarget):
    """Writes the files of the next version over those of the version that serves."""

    def stage(self, update: Update) -> None:
        linked = self.current.resolve()
        super().stage(update)
        if update.event.version == 1 and self.staged is not None:
            for file in self.staged.glob("*.safetensors"):
                (linked / file.name).write_bytes(file.read_bytes())


def test_c34_a_folder_that_is_written_in_place_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C34: a death after the files and before the link leaves a version that says it is another one."""
    monkeypatch.setattr("rollwire.ops.chaos.weights.lives.FolderTarget", TornFolder)
    crash = Crash("swap 1", 1, "before")
    with pytest.raises(CellFailed, match="says version 0 and is another one"):
        replica_cell(bench_of(MemoryStore()), crash, "folder", folder=tmp_path)


def test_c34_kills_at_random_points_of_a_follower_and_a_publisher(tmp_path: Path) -> None:
    results = list(killed_cells(bench_of(MemoryStore()), tmp_path, 4, seed=1))
    assert [result for result in results if result.problem] == []
    assert len(results) == (1 + 4) + (1 + 2)


@pytest.mark.parametrize("name", OTHER_TENSORS)
def test_c27_c31_other_tensors_make_no_version(name: str) -> None:
    """C27, C31: the error names the tensor; the right ones make the version afterwards."""
    publisher_input_cell(bench_of(MemoryStore()), name)


@pytest.mark.parametrize("role", ["numpy", "follow"])
@pytest.mark.parametrize("bad", INPUTS, ids=lambda bad: bad.name)
def test_c23_c26_c27_c31_what_is_wrong_is_refused_by_name(bad: Input, role: Role) -> None:
    """C23, C26, C27, C31: the version that serves goes on serving, the next good one is served."""
    replica_input_cell(bench_of(MemoryStore()), bad, role)


class LyingStore(MemoryStore):
    """Says that it holds the second delta that it was given, and does not."""

    def __init__(self) -> None:
        super().__init__()
        self.deltas = 0

    def create(self, key: str, data: bytes) -> bool:
        if "/deltas/" in key:
            self.deltas += 1
            if self.deltas == 2:
                return True
        return super().create(key, data)


def test_a_version_that_cannot_be_read_is_a_finding() -> None:
    result = judged("publish", "nobody dies", lambda: publisher_cell(bench_of(LyingStore()), None))
    assert "is visible and cannot be read" in result.problem


def test_a_death_that_does_not_come_is_a_finding() -> None:
    crash = Crash("put deltas", 1_000, "before")
    with pytest.raises(CellFailed, match="was to die before put deltas #1000, and ended with exit code 0"):
        publisher_cell(bench_of(MemoryStore()), crash)


def test_a_life_that_ends_in_an_error_says_which() -> None:
    life = MemoryLives(MemoryLog({}, SystemClock()), MemoryStore()).start(Task("publish", "L", LAST))
    end = life.ended(60.0)
    assert end is not None
    assert end.code not in (0, DIED)
    assert not end.died
    assert "weight-versions" in end.why


def status(version: int, digest: str, state: FleetState = "swapped", reason: str = "") -> FleetStatus:
    return FleetStatus(
        fleet="f",
        replica="r",
        state=state,
        version=version,
        wanted_version=version,
        state_digest=digest,
        stage_ms=0.0,
        pause_ms=0.0,
        reason=reason,
        open_rollouts=0,
        at_us=0,
    )


def test_a_replica_that_lies_is_a_finding() -> None:
    judge_status(status(-1, ""))
    judge_status(status(1, digest_of(1)))
    judge_status(status(1, digest_of(1), "refused", "DeltaCorrupt: k"), "DeltaCorrupt")
    for lie in (status(1, digest_of(2)), status(-1, digest_of(0)), status(1, "")):
        with pytest.raises(CellFailed, match="with the digest"):
            judge_status(lie)
    with pytest.raises(CellFailed, match="version 1 was refused: DeltaCorrupt: k"):
        judge_status(status(1, digest_of(1), "refused", "DeltaCorrupt: k"))


def test_the_table_and_the_figures_count_every_cell(tmp_path: Path) -> None:
    results = (
        Result("publish", "nobody dies", 1.0, ""),
        Result("publish", "before put deltas #1", 1.0, ""),
        Result("publish", "after put deltas #2", 3.0, "lost"),
        Result("store, up", "a slow store", 2.0, ""),
    )
    outcome = Outcome(results, tmp_path, 7.0)
    assert not outcome.ok
    assert [result.problem for result in outcome.failed] == ["lost"]
    values = {figure.name: figure.value for figure in figures(outcome)}
    assert values["crash.cells"] == 4
    assert values["crash.failed"] == 1
    assert values["crash.failed.store_up"] == 0
    assert cells_table(outcome).row_count == 3
    assert not Outcome((), tmp_path, 0.0).ok


def test_effects_are_numbered_by_name_and_end_a_life_once() -> None:
    done: list[str] = []
    effects = Effects(Crash("put", 2, "after"))
    effects.around("put", lambda: done.append("first"))
    effects.around(["get", "report"], lambda: done.append("other"))
    with pytest.raises(SystemExit) as died:
        effects.around(["get", "put"], lambda: done.append("second"))
    assert died.value.code == DIED
    with pytest.raises(SystemExit):
        effects.around("get", lambda: done.append("from the grave"))
    assert done == ["first", "other", "second"]
    assert effects.seen == {"put": 2, "get": 2, "report": 1}
    before = Effects(Crash("put", 1, "before"))
    with pytest.raises(SystemExit):
        before.around("put", lambda: done.append("never"))
    assert "never" not in done


def test_both_sides_of_every_effect_are_cells() -> None:
    assert [str(crash) for crash in crashes({"put": 2, "commit": 1})] == [
        "before put #1",
        "after put #1",
        "before put #2",
        "after put #2",
        "before commit #1",
        "after commit #1",
    ]


def test_the_versions_of_the_matrix_are_those_that_it_needs() -> None:
    assert digest_of(EMPTY) == digest_of(EMPTY - 1)
    assert len({digest_of(version) for version in range(LAST + 1)}) == LAST
    assert not any(t.bits.flags.writeable for t in state_of(LAST).values())
