"""The parts around the fold of attribution: rules in the log, the watermark, what is written in which order, settings."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from rollwire.schemas.codec import decode
from rollwire.schemas.errors import ConfigError, LogUnavailable, TopicMismatch
from rollwire.schemas.golden import load_examples
from rollwire.schemas.records import DeadLetter, Feedback, Notice
from rollwire.schemas.rules import default_rules
from rollwire.schemas.rules.parse import default_text
from rollwire.streams.attribution.book import Effects, Write
from rollwire.streams.attribution.config import CHANGELOG, AttributionConfig, config_from_environment
from rollwire.streams.attribution.facts import Answered, Closed, Said, entry_of, key_of, value_of
from rollwire.streams.attribution.faust_app import make_app
from rollwire.streams.attribution.fold import Refusal
from rollwire.streams.attribution.letters import letters_of, refused_letter
from rollwire.streams.attribution.look import Look
from rollwire.streams.attribution.outbox import Outbox
from rollwire.streams.attribution.progress import Input, Progress
from rollwire.streams.attribution.rulebook import DELAY_US, Rulebook, rules_notice
from rollwire.streams.emit import outgoing
from rollwire.streams.seams.clock import ManualClock
from rollwire.streams.seams.log import Outgoing
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.scan import scan

US = 1_767_225_600_000_000
TOPICS = ("user-feedback", "production-rollouts")
OTHER = default_text().replace("window_s = 3600", "window_s = 60")
THUMB = next(e.event for e in load_examples("user-feedback") if e.name == "thumb")


def test_rules_hold_for_rollouts_opened_after_every_worker_has_read_them() -> None:
    book = Rulebook().after_all(
        [rules_notice(default_text(), "policy", US), rules_notice(OTHER, "policy", US + DELAY_US)]
    )
    assert [book.at(US + n * DELAY_US).window_s for n in (-9, 0, 1, 2, 3)] == [3600, 3600, 3600, 60, 60]
    newest = book.newest
    assert newest is not None
    assert newest.window_s == 60


def test_the_same_rules_again_and_other_notices_change_nothing() -> None:
    notice = rules_notice(default_text(), "policy", US)
    book = Rulebook().after(notice)
    assert book.after(msgspec.structs.replace(notice, at_us=US + 5)) is book
    assert book.after(msgspec.structs.replace(notice, name="settings")) is book


def test_a_notice_that_is_not_what_it_says_is_refused() -> None:
    notice = rules_notice(default_text(), "policy", US)
    wrong = {**notice.attributes, "text": OTHER}
    with pytest.raises(ConfigError, match="digest"):
        Rulebook().after(msgspec.structs.replace(notice, attributes=wrong))


def memory_log() -> MemoryLog:
    return MemoryLog(
        {**dict.fromkeys(TOPICS, 2), "notices": 1, "dead-letters": 1, "rewards": 2, CHANGELOG: 2}
    )


def notices(log: MemoryLog) -> list[Notice]:
    found = [decode(r.topic, r.value, r.headers, r.key) for r in scan(log, ["notices"])]
    return [event for event in found if isinstance(event, Notice)]


def test_rules_go_into_the_log_once_and_are_read_from_it(tmp_path: Path) -> None:
    log, clock = memory_log(), ManualClock()
    assert Look(log, clock, 0).start_rules(None, "policy").newest == default_rules()
    assert Look(log, clock, 0).start_rules(None, "policy").newest == default_rules()
    assert len(notices(log)) == 1
    path = tmp_path / "rules.toml"
    path.write_text(OTHER, "utf-8")
    clock.advance(100)
    running = Look(log, clock, 0)
    running.start_rules(None, "policy")
    newest = Look(log, clock, 0).start_rules(path, "policy").newest  # another worker, with a file
    assert newest is not None
    assert newest.window_s == 60
    assert Look(log, clock, 0).start_rules(path, "policy").newest == newest
    assert [n.attributes["digest"] for n in notices(log)] == [default_rules().digest, newest.digest]
    assert Look(log, clock, 0).start_rules(None, "policy").newest == newest  # they hold on without the file
    clock.advance(10)  # the one that runs learns of them
    assert running.around(Progress(), {}, TOPICS).rulebook.newest == newest


def restored_app(log: MemoryLog, look: Look, clock: ManualClock) -> Any:
    app: Any = make_app(AttributionConfig(web_port=6066), log, look, clock)
    app.consumer = SimpleNamespace(assignment=set)
    return app


def test_a_worker_that_restored_its_table_judges_by_the_rules_of_now(tmp_path: Path) -> None:
    """Nobody looks for rules while a table is restored, and whoever brings new ones causes a rebalance."""
    log, clock = memory_log(), ManualClock()
    look = Look(log, clock, 0)
    look.start_rules(None, "policy")
    app = restored_app(log, look, clock)
    path = tmp_path / "rules.toml"
    path.write_text(OTHER, "utf-8")
    clock.advance(1)
    Look(log, clock, 0).start_rules(path, "policy")
    asyncio.run(app.on_restored())
    assert app.loaded
    assert app.book.rulebook.at(clock.now_us() + DELAY_US).window_s == 60


class LateLook(Look):
    """The broker is away at first, as it may well be when partitions are shared out anew."""

    asked = 0

    def rules_now(self) -> Rulebook:
        self.asked += 1
        if self.asked == 1:
            raise LogUnavailable("away")
        return super().rules_now()


def test_a_broker_that_is_away_for_a_moment_costs_no_worker() -> None:
    log, clock = memory_log(), ManualClock()
    look = LateLook(log, clock, 0)
    look.start_rules(None, "policy")
    app = restored_app(log, look, clock)
    asyncio.run(app.on_restored())
    assert app.loaded


class SlowLook(Look):
    """Partitions are taken away while the rules are read."""

    app: Any

    def rules_now(self) -> Rulebook:
        asyncio.run(self.app.on_partitions_revoked.send(set()))
        return super().rules_now()


def test_a_table_whose_partitions_were_taken_away_meanwhile_is_not_taken_for_restored() -> None:
    log, clock = memory_log(), ManualClock()
    look = SlowLook(log, clock, 0)
    look.start_rules(None, "policy")
    look.app = app = restored_app(log, look, clock)
    asyncio.run(app.on_restored())
    assert not app.loaded


def test_rules_that_cannot_be_read_are_an_error_of_the_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        Look(memory_log(), ManualClock(), 0).start_rules(tmp_path / "nowhere.toml", "policy")


def test_topics_that_are_joined_must_have_equal_partitions() -> None:
    log = MemoryLog({"user-feedback": 2, "production-rollouts": 3})
    with pytest.raises(TopicMismatch, match="differ"):
        Look(log, ManualClock(), 0).partitions(TOPICS)


def test_the_watermark_is_that_of_the_slower_topic() -> None:
    progress = Progress()
    progress.start((Input(topic, 0), 0) for topic in TOPICS)
    progress.taken(Input(TOPICS[0], 0), 4, US + 9)
    assert progress.watermark_us(0, TOPICS) == 0
    progress.taken(Input(TOPICS[1], 0), 4, US + 3)
    progress.taken(Input(TOPICS[1], 0), 5, US + 2)  # a clock that was set back
    assert progress.watermark_us(0, TOPICS) == US + 3
    assert progress.next_offset(Input(TOPICS[1], 0)) == 6


def test_time_goes_on_where_nothing_comes_and_all_is_read() -> None:
    progress = Progress()
    progress.start((Input(topic, 0), 7) for topic in TOPICS)
    for topic in TOPICS:
        progress.caught_up(Input(topic, 0), 7, 8, US)  # one is written that was not read
    assert progress.watermark_us(0, TOPICS) == 0
    for topic in TOPICS:
        progress.caught_up(Input(topic, 0), 7, 7, US)
    assert progress.watermark_us(0, TOPICS) == US
    progress.skip(Input(TOPICS[0], 0), 7, 9)  # marks of a transaction
    assert progress.next_offset(Input(TOPICS[0], 0)) == 9
    progress.skip(Input(TOPICS[1], 0), 6, 9)  # read on meanwhile
    assert progress.next_offset(Input(TOPICS[1], 0)) == 7


def test_an_idle_log_is_looked_at_when_something_is_due(tmp_path: Path) -> None:
    log, clock = memory_log(), ManualClock()
    look = Look(log, clock, 1_000_000)
    look.start_rules(None, "policy")
    progress = Progress()
    progress.start((Input(topic, p), 0) for topic in TOPICS for p in range(2))
    now = clock.now_us()
    assert look.around(progress, {0: now}, TOPICS).ends == ()  # not before the margin of the clocks
    found = look.around(progress, {0: now - 1_000_000}, TOPICS)
    assert [(end.input, end.seen, end.end) for end in found.ends] == [(Input(t, 0), 0, 0) for t in TOPICS]
    assert found.asked_us == now - 1_000_000


def test_a_transaction_that_is_open_holds_time_back_and_its_marks_do_not() -> None:
    log, clock = memory_log(), ManualClock()
    look = Look(log, clock, 0)
    look.start_rules(None, "policy")
    progress = Progress()
    progress.start((Input(topic, 0), 0) for topic in TOPICS)
    due = {0: clock.now_us()}
    writer = log.transactional_writer("t")
    writer.begin()
    writer.write([Outgoing("user-feedback", b"k", b"v", (), 0)])

    def turn() -> int:
        found = look.around(progress, due, TOPICS)
        for input_, seen, position, end in found.ends:
            progress.skip(input_, seen, position)
            progress.caught_up(input_, position, end, found.asked_us)
        return progress.watermark_us(0, TOPICS)

    assert [turn() for _ in range(3)] == [0, 0, 0]
    writer.abort()
    turn()
    assert turn() == clock.now_us()


SAID = Said(5, US, "f", "acme", "thumb", 1.0, US, b"12345678")
ENTRIES = (
    SAID,
    SAID._replace(value=None, signal="comment"),
    Answered(7, US, "answered", "acme", 4),
    Closed(US, 9, "acme", "", 4, True, (("thumb", 2, 0.0),), ((b"12345678", b"87654321"),)),
)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: type(entry).__name__)
def test_entries_of_the_table_come_back_as_they_were(entry: Said | Answered | Closed) -> None:
    name = "019b76da-a800-7055-9555-555555555555.0"
    assert entry_of(key_of(name, entry), value_of(entry)) == (name, entry)


class Recorder:
    """A writer that says in which order it was called, and may be away."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.away = False

    def write(self, records: Sequence[Outgoing], timeout_s: float = 30.0) -> None:
        if self.away:
            raise LogUnavailable("away")
        self.calls.append([r.topic for r in records])

    def close(self) -> None:
        """Nothing to close."""


def test_marks_are_written_only_when_rewards_and_letters_are_durable() -> None:
    writer = Recorder()
    letter = refused_letter_of()
    outbox = Outbox(writer, lambda refusals: [letter] * len(refusals))
    assert not outbox
    outbox.entries([Write(0, b"a", b"1")])
    outbox.effects(
        Effects(refusals=[(0, Refusal(3, "late", "why", US))], after=[Write(0, b"a", None)], writes=[])
    )
    writer.away = True
    batch = outbox.take()
    with pytest.raises(LogUnavailable):
        outbox.deliver(batch)
    outbox.give_back(batch)
    outbox.entries([Write(1, b"b", b"2")])
    writer.away = False
    outbox.deliver(outbox.take())
    assert writer.calls == [[CHANGELOG, CHANGELOG, "dead-letters"], [CHANGELOG]]
    assert not outbox


def refused_letter_of() -> Outgoing:
    assert isinstance(THUMB, Feedback)
    record = outgoing(THUMB, source="test", time_us=US)
    log = memory_log()
    log.writer().write([record])
    (read,) = scan(log, ["user-feedback"])
    return refused_letter(read, "late", "why", US)


def test_letters_of_long_ago_hold_the_records_whole() -> None:
    assert isinstance(THUMB, Feedback)
    log = memory_log()
    records = [
        outgoing(msgspec.structs.replace(THUMB, feedback_id=f"f{n}"), source="test", time_us=US)._replace(
            partition=1
        )
        for n in range(1_200)
    ]
    log.writer().write(records)
    offsets = [3, 4, 900, 1_199]
    made = letters_of(log, [(1, Refusal(offset, "unknown_rollout", "none came", US)) for offset in offsets])
    found = [decode("dead-letters", m.value, m.headers[:6], m.key) for m in made]
    assert all(isinstance(letter, DeadLetter) for letter in found)
    assert [letter.source.offset for letter in found if isinstance(letter, DeadLetter)] == offsets
    assert [letter.value for letter in found if isinstance(letter, DeadLetter)] == [
        records[offset].value for offset in offsets
    ]
    again = letters_of(log, [(1, Refusal(3, "unknown_rollout", "none came", US))])
    assert again == made[:1]  # the same bytes whenever it is made


def test_settings_come_from_the_environment_too() -> None:
    found = config_from_environment({"ROLLWIRE_PREFIX": "x.", "ROLLWIRE_CLOCK_SKEW_S": "0.5"})
    assert found == AttributionConfig(prefix="x.", clock_skew_s=0.5)
    with pytest.raises(ConfigError, match="ROLLWIRE_ATTRIBUTION_PORT"):
        config_from_environment({"ROLLWIRE_ATTRIBUTION_PORT": "many"})
