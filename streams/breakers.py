"""Two breakers of a session: one for a stream that is all refusals, one for the record that kills whoever reads it. Pure.

**Circuit.** Dead letters are for the odd bad event. When nearly everything is refused, the producers or this release are
wrong, and going on would drain the topic into `dead-letters`. So a run of refusals, or a large share of the latest records,
halts the processor before that batch is committed. Where it opened is kept in the log: until a record was taken well
behind that place, a restart halts at the first refusal again.

**Crash loop.** Some bytes end the process (a decoder that overruns its stack), and every restart reads them again. After a
start, what may have killed the last owner (everything up to a batch's length that stood in the log then) is taken in
slices, and a note in the log says which, *before* it is decoded. A slice whose owner died is taken record by record; a record that
was alone when its owner died, `deaths` times, is refused undecoded with `kills_worker`. Notes ride on the read positions as
their metadata, so that progress wipes them out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

from rollwire.schemas.errors import CircuitOpen, Refused
from rollwire.streams.dead_letter import Letter, Place, letter_of
from rollwire.streams.seams.log import Noted, Outgoing, Record, TopicPartition

SLICE: Final = 200  # records that share one note

# These come in bulk after an outage or a change of lineage, and say nothing of the events' form.
_EXEMPT: Final = frozenset({"late", "lineage_abandoned", "kills_worker"})


class Circuit:
    """Counts refusals. `run`: that many in a row open it; `share` of the latest `window` records too; 0 = neither.

    `half_open`: it opened in an earlier life, and no record behind that place was taken well yet.
    """

    def __init__(self, *, run: int, share: float, window: int, half_open: bool = False) -> None:
        self._limit = run
        self._share = share
        self._window = window
        self._half_open = half_open
        self._run = 0
        self._now, self._before = _Count(0, 0), _Count(0, 0)  # two halves of the window

    def check(self, records: Sequence[Record], outputs: Sequence[Outgoing]) -> None:
        """A batch and what the step made of it. Raises `CircuitOpen`, then nothing of it may be committed."""
        letters = [letter for output in outputs if (letter := letter_of(output)) is not None]
        counted = {letter.at: letter for letter in letters if letter.reason not in _EXEMPT}
        exempt = {letter.at for letter in letters} - counted.keys()
        if not counted and len(records) > len(exempt):
            self._run, self._half_open = 0, False
        elif counted:
            self._walk(records, counted, exempt)
        self._count(max(0, len(records) - len(exempt)), len(counted))
        seen, refused = self._now.seen + self._before.seen, self._now.refused + self._before.refused
        if self._share and seen * 2 >= self._window and refused > self._share * seen:
            raise _open(f"{refused} of the last {seen} records were refused", list(counted.values()))

    def _walk(
        self, records: Sequence[Record], counted: Mapping[Place, Letter], exempt: Collection[Place]
    ) -> None:
        for record in records:
            at = (record.topic, record.partition, record.offset)
            if at in counted:
                self._run += 1
                if self._limit and self._half_open:
                    raise _open("it was open, and the first record is refused again", list(counted.values()))
                if self._limit and self._run >= self._limit:
                    raise _open(f"{self._run} records in a row were refused", list(counted.values()))
            elif at not in exempt:
                self._run, self._half_open = 0, False

    def _count(self, seen: int, refused: int) -> None:
        self._now = _Count(self._now.seen + seen, self._now.refused + refused)
        if self._now.seen * 2 >= self._window:
            self._before, self._now = self._now, _Count(0, 0)


class _Count(NamedTuple):
    seen: int
    refused: int


def _open(why: str, letters: Sequence[Letter]) -> CircuitOpen:
    reasons = ", ".join(
        f"{count} {reason}" for reason, count in Counter(letter.reason for letter in letters).most_common(3)
    )
    places = ""
    if letters:
        first, last = letters[0], letters[-1]
        places = f" (from {first.at[0]}[{first.at[1]}] at {first.at[2]} to {last.at[0]}[{last.at[1]}] at {last.at[2]})"
    return CircuitOpen(
        f"{why}: in this batch {reasons or 'none'}{places}. Nothing of the batch was committed. Mend the producers or this "
        "release and start again; to refuse them all to dead-letters, set max_refused_run and max_refused_share to 0"
    )


class Note(NamedTuple):
    """What is being tried in one partition: records `first` to `last`, `alone` or with others."""

    life: str  # of whom
    first: int
    last: int
    alone: bool
    deaths: int  # that this record saw before, alone
    skipped: tuple[int, ...]  # records that are not decoded any more
    opened: bool = False  # the circuit opened here

    def text(self) -> str:
        flags = f"{int(self.alone)} {int(self.opened)}"
        skipped = ",".join(map(str, self.skipped))
        return f"{self.life or '-'} {self.first} {self.last} {flags} {self.deaths} {skipped or '-'}"


_NOTHING: Final = Note("", -1, -1, False, 0, ())


def parse_note(text: str) -> Note:
    """The note of a text; what is no note of ours says nothing."""
    try:
        life, first, last, alone, opened, deaths, skipped = text.split(" ")
        return Note(
            "" if life == "-" else life,
            int(first),
            int(last),
            alone == "1",
            int(deaths),
            () if skipped == "-" else tuple(map(int, skipped.split(","))),
            opened == "1",
        )
    except ValueError:
        return _NOTHING


class CrashLoop:
    """What one session takes with care. `life` names its process: a session that ended without its process is no death."""

    def __init__(
        self,
        *,
        life: str,
        deaths: int,
        read: Mapping[TopicPartition, int],
        guarded_to: Mapping[TopicPartition, int],
    ) -> None:
        """`read`: where each guarded partition was read to, `Noted` where a note stands; `guarded_to`: up to where the
        last owner may have come. `deaths` = 0: nothing is guarded."""
        self._life = life
        self.was_open = False  # the circuit opened where no progress was made since
        self._guarded = {p: (at, guarded_to.get(p, at)) for p, at in read.items()} if deaths else {}
        self._suspects: dict[TopicPartition, Note] = {}
        self._standing: dict[TopicPartition, Note] = {}  # of this life: not to be written again
        self._skipped: dict[TopicPartition, tuple[int, ...]] = {}
        for partition, at in read.items():
            if not isinstance(at, Noted):
                continue
            note = parse_note(at.note)
            if note.skipped:
                self._skipped[partition] = note.skipped
            if note.first < at:
                continue  # it was survived
            if note.opened:
                self.was_open = True
                continue
            if note.life == life:
                self._standing[partition] = note
                if not note.alone:
                    continue
            elif note.alone:
                note = note._replace(deaths=note.deaths + 1)
            if deaths and note.alone and note.deaths >= deaths:
                self._skipped[partition] = (*note.skipped, note.first)
            else:
                self._suspects[partition] = note

    @property
    def active(self) -> bool:
        return bool(self._guarded or self._skipped)

    def passed(self, positions: Mapping[TopicPartition, int]) -> None:
        """Everything below `positions` was taken: what was guarded there needs no more care."""
        self._guarded = {p: span for p, span in self._guarded.items() if positions.get(p, 0) < span[1]}

    def opened(self, read: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """The read positions, unmoved, with the note that the circuit opened here."""
        return {
            p: Noted(at, Note(self._life, at, at, False, 0, self._skipped.get(p, ()), opened=True).text())
            for p, at in read.items()
        }

    def length(self, records: Sequence[Record]) -> int:
        """How many of the next records are to be taken together."""
        for number, record in enumerate(records):
            if self._alone(record):
                return number or 1
            if self.watched(record) and number >= SLICE:
                return number
        return len(records)

    def before(self, records: Sequence[Record]) -> dict[TopicPartition, Note]:
        """What has to be noted before these are decoded; empty = nothing."""
        notes: dict[TopicPartition, Note] = {}
        for record in records:
            if not self.watched(record) or self.refusal(record) is not None:
                continue
            partition = TopicPartition(record.topic, record.partition)
            known = notes.get(partition)
            if known is not None:
                notes[partition] = known._replace(last=record.offset)
                continue
            suspect = self._suspects.get(partition, _NOTHING)
            again = suspect.alone and suspect.first == record.offset
            notes[partition] = Note(
                self._life,
                record.offset,
                record.offset,
                len(records) == 1,
                suspect.deaths if again else 0,
                self._skipped.get(partition, ()),
            )
        return {p: note for p, note in notes.items() if not self._stands(p, note)}

    def _stands(self, partition: TopicPartition, note: Note) -> bool:
        known = self._standing.get(partition)
        return known is not None and known._replace(last=note.last) == note and note.last <= known.last

    def refusal(self, record: Record) -> Refused | None:
        """What is said of a record instead of decoding it."""
        if not self._skipped:
            return None
        if record.offset not in self._skipped.get(TopicPartition(record.topic, record.partition), ()):
            return None
        return Refused(
            "kills_worker",
            f"workers died while they decoded {record.topic}[{record.partition}] at {record.offset}; it is kept as it "
            "came and not decoded any more",
        )

    def marked(
        self, read: Mapping[TopicPartition, int], committed: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, int]:
        """The read positions to commit, with the records that a restart must not decode."""
        found = dict(read)
        for partition, skipped in self._skipped.items():
            kept = tuple(at for at in skipped if at >= committed.get(partition, 0))
            if kept and partition in found:
                note = _NOTHING._replace(life=self._life, skipped=kept)
                found[partition] = Noted(found[partition], note.text())
        return found

    def watched(self, record: Record) -> bool:
        """Whether it is taken with care: the last owner may have died of it."""
        if not self._guarded:
            return False
        start, end = self._guarded.get(TopicPartition(record.topic, record.partition), (0, 0))
        return start <= record.offset < end

    def _alone(self, record: Record) -> bool:
        partition = TopicPartition(record.topic, record.partition)
        if record.offset in self._skipped.get(partition, ()):
            return self.watched(record)
        suspect = self._suspects.get(partition)
        return suspect is not None and suspect.first <= record.offset <= suspect.last
