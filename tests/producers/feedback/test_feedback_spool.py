"""The spool: nothing that was taken is lost, whatever happens between two calls."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollwire.producers.feedback import spool_format as form
from rollwire.producers.feedback.spool import Spool
from rollwire.producers.feedback.waiting import MemoryWaiting, Waiting
from rollwire.schemas.errors import ConfigError, SpoolFull

ROOM = 1 << 20
EVENTS = st.binary(min_size=1, max_size=200).filter(lambda data: b"\n" not in data)


@given(st.lists(EVENTS, max_size=20), st.integers(0, 4_000))
def test_a_segment_cut_anywhere_gives_its_whole_lines(events: list[bytes], cut: int) -> None:
    data = b"".join(map(form.line, events))[:cut]
    lines = form.read_lines(data, form.HEAD_BYTES, 100)
    assert lines.whole == tuple(events[: len(lines.whole)])
    assert lines.damaged == 0
    assert len(data) - (lines.end - form.HEAD_BYTES) <= 210, "at most one line is torn"
    assert lines.end - form.HEAD_BYTES == sum(len(form.line(event)) for event in lines.whole)


@given(st.lists(EVENTS, min_size=1, max_size=20), st.data())
def test_a_flipped_bit_costs_two_lines_at_most_and_gives_no_other_event(
    events: list[bytes], data: st.DataObject
) -> None:
    whole = bytearray(b"".join(map(form.line, events)))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= 1 << data.draw(st.integers(0, 7))
    lines = form.read_lines(bytes(whole), 0, 100)
    assert set(lines.whole) <= set(events)
    assert len(lines.whole) >= len(events) - 2


@given(st.integers(form.HEAD_BYTES, 1 << 40))
def test_a_head_reads_back_and_a_torn_one_means_the_beginning(position: int) -> None:
    head = form.head(position)
    assert len(head) == form.HEAD_BYTES
    assert form.read_head(head) == position
    assert form.read_head(head[:25] + b"f" + head[26:]) in (position, form.HEAD_BYTES)
    assert form.read_head(b"something else, that is long enough for a head of ours") is None


class SpoolMachine(RuleBasedStateMachine):
    """Processes that share a folder: one lives and sends, others died and left theirs. The model: what waits, in order of
    taking within a process, and what was handed out and settled."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="spool"))
        self.spool = Spool(self.folder, ROOM)
        self.waits: set[bytes] = set()  # taken and not settled, by whichever process
        self.settled: set[bytes] = set()
        self.number = 0

    def teardown(self) -> None:
        self.spool.close()
        shutil.rmtree(self.folder)

    @rule(count=st.integers(1, 30), size=st.integers(0, 3_000))
    def send(self, count: int, size: int) -> None:
        for _ in range(count):
            self.number += 1
            event = b'{"n":%d,"x":"%b"}' % (self.number, b"x" * size)
            self.spool.append(event)
            self.waits.add(event)

    @rule(most=st.integers(1, 40))
    def deliver(self, most: int) -> None:
        taken = self.spool.take(most)
        again = self.spool.take(most)
        assert taken == again, "taking moves nothing"
        if taken is None:
            return
        assert set(taken.lines) <= self.waits
        self.spool.settle(taken)
        self.waits -= set(taken.lines)
        self.settled |= set(taken.lines)

    @rule()
    def sync(self) -> None:
        self.spool.sync()

    @rule(torn=st.binary(max_size=30).filter(lambda data: b"\n" not in data))
    def die(self, torn: bytes) -> None:
        """kill -9, in the middle of writing a line; another process comes."""
        for segment in self.spool._segments:
            if segment is self.spool._active:
                os.pwrite(segment.fd, torn, segment.size)
            os.close(segment.fd)  # as the kernel does, and with it goes the lock
        self.spool._segments.clear()
        self.spool = Spool(self.folder, ROOM)
        self.spool.adopt()

    @rule()
    def restart(self) -> None:
        self.spool.close()
        self.spool = Spool(self.folder, ROOM)
        self.spool.adopt()

    @rule(torn=st.integers(0, 60))
    def lose_the_position(self, torn: int) -> None:
        """A power cut tears the first line of what a dead process left: events come again, none is lost."""
        self.spool.close()
        for path in sorted(self.folder.glob("*.jsonl"))[:1]:
            with path.open("r+b") as file:
                file.seek(min(17 + torn, form.HEAD_BYTES - 2))
                file.write(b"0")
        self.waits |= self.settled  # may come again, under the same ids
        self.spool = Spool(self.folder, ROOM)
        self.spool.adopt()
        counted = self.spool.count()
        left: set[bytes] = set()
        while (taken := self.spool.take(1_000)) is not None:
            left |= set(taken.lines)
            self.spool.settle(taken)
        assert self.waits - self.settled <= left <= self.waits
        assert counted.added >= len(self.waits - self.settled)
        self.waits.clear()

    @precondition(lambda self: not self.waits)
    @rule()
    def nothing_is_left(self) -> None:
        assert self.spool.take(10) is None

    @invariant()
    def the_count_holds(self) -> None:
        counted = self.spool.count()
        assert counted.added - counted.settled == len(self.waits)


SpoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestSpool = SpoolMachine.TestCase


def test_order_is_kept_over_files(tmp_path: Path) -> None:
    spool = Spool(tmp_path, ROOM)
    events = [b"%06d" % number + b"y" * 900 for number in range(300)]
    for event in events:
        spool.append(event)
    assert len(list(tmp_path.glob("*.jsonl"))) > 2
    seen: list[bytes] = []
    while (taken := spool.take(70)) is not None:
        seen += taken.lines
        spool.settle(taken)
    assert seen == events
    spool.close()
    assert list(tmp_path.iterdir()) == [], "what is settled leaves nothing behind"


def test_a_living_process_keeps_its_own(tmp_path: Path) -> None:
    mine, yours = Spool(tmp_path, ROOM), Spool(tmp_path, ROOM)
    mine.append(b"mine")
    assert yours.adopt() == 0
    assert yours.take(10) is None
    mine.close()
    assert yours.adopt() == 1
    taken = yours.take(10)
    assert taken is not None
    assert taken.lines == (b"mine",)
    yours.close()


def _fill(waiting: Waiting, events: list[bytes]) -> int:
    """How many it took before it said that it is full; all the rest are refused as well."""
    refused = 0
    for event in events:
        try:
            waiting.append(event)
            assert not refused
        except SpoolFull:
            refused += 1
    assert refused
    return len(events) - refused


@pytest.mark.parametrize("kind", ["memory", "spool"])
def test_a_full_one_says_so_and_drops_nothing(kind: str, tmp_path: Path) -> None:
    waiting: Waiting = MemoryWaiting(128 * 1024) if kind == "memory" else Spool(tmp_path, 128 * 1024)
    events = [b"%06d" % number + b"z" * 4_000 for number in range(100)]
    taken_in = _fill(waiting, events)
    with pytest.raises(SpoolFull, match="not taken"):
        waiting.append(events[-1])
    assert 25 < taken_in < 40
    seen: list[bytes] = []
    while (taken := waiting.take(7)) is not None:
        seen += taken.lines
        waiting.settle(taken)
    assert seen == events[:taken_in]
    waiting.append(b"there is room again")
    waiting.close()


def test_the_bound_holds_over_processes(tmp_path: Path) -> None:
    mine = Spool(tmp_path, 128 * 1024)
    for _ in range(20):
        mine.append(b"m" * 5_000)
    yours = Spool(tmp_path, 128 * 1024)
    yours.append(b"y" * 5_000)
    assert _fill(yours, [b"y" * 5_000] * 20) < 6
    mine.close()
    yours.close()


def test_a_damaged_line_is_counted_its_neighbours_sent_its_file_kept(tmp_path: Path) -> None:
    spool = Spool(tmp_path, ROOM)
    for number in range(5):
        spool.append(b"event %d" % number)
    spool.close()
    (path,) = tmp_path.glob("*.jsonl")
    path.write_bytes(path.read_bytes().replace(b"event 2", b"event X"))
    again = Spool(tmp_path, ROOM)
    assert again.adopt() == 5
    taken = again.take(10)
    assert taken is not None
    assert taken.lines == (b"event 0", b"event 1", b"event 3", b"event 4")
    assert taken.damaged == 1
    again.settle(taken)
    assert again.count() == (5, 5)
    again.close()
    (kept,) = tmp_path.iterdir()
    assert kept.suffix == ".damaged"
    assert b"event X" in kept.read_bytes()


def test_files_of_others_are_let_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.jsonl").write_text(
        "a file of somebody else, with text enough to be taken for a segment\n"
    )
    (tmp_path / "00-empty.jsonl").touch()
    spool = Spool(tmp_path, ROOM)
    assert spool.adopt() == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.jsonl"], (
        "an empty one is what is left of a process that died before its first line"
    )
    spool.close()


def test_only_the_owner_reads_what_people_wrote(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", ROOM)
    spool.append(b"a secret")
    (path,) = (tmp_path / "spool").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "spool").stat().st_mode & 0o777 == 0o700
    spool.close()


def test_a_folder_that_cannot_be_is_a_wrong_setting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be made"):
        Spool(tmp_path / "file", ROOM)


_DISK_FULL = """
import resource, signal, sys
from pathlib import Path
from rollwire.producers.feedback.spool import Spool
from rollwire.schemas.errors import SpoolFull
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
spool = Spool(Path(sys.argv[1]), 1 << 20)
spool.append(b"first" * 200)
resource.setrlimit(resource.RLIMIT_FSIZE, (1500, resource.RLIM_INFINITY))
try:
    spool.append(b"second" * 200)
except SpoolFull as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
spool.append(b"third")
taken = spool.take(10)
print([line[:5] for line in taken.lines], taken.damaged)
"""


def test_a_write_that_stops_half_way_leaves_no_half_event(tmp_path: Path) -> None:
    """A full disk, played by the kernel's limit on the size of a file."""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    done = subprocess.run(
        [sys.executable, "-P", "-c", _DISK_FULL, tmp_path],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    said, read = done.stdout.splitlines()
    assert "no room" in said
    assert read == "[b'first', b'third'] 0"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_the_child_of_a_fork_has_files_of_its_own(tmp_path: Path) -> None:
    spool = Spool(tmp_path, ROOM)
    spool.append(b"of the parent")
    child = os.fork()
    if child == 0:
        spool.append(b"of the child")
        os._exit(0 if spool.count() == (1, 0) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert spool.adopt() == 1, "the child ended: what it left is the parent's to send"
    taken = spool.take(1)
    assert taken is not None
    assert taken.lines == (b"of the parent",)
    spool.settle(taken)
    taken = spool.take(1)
    assert taken is not None
    assert taken.lines == (b"of the child",)
    spool.settle(taken)
    spool.close()
    assert list(tmp_path.iterdir()) == []
