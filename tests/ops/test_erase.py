"""Erasing a person: what they reached, in which order it is done, what a call that died leaves, and what is exported."""

from __future__ import annotations

import hashlib
import json
import stat
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rollwire.consumers.audit.versions import carried_by, ranges
from rollwire.ops.commands import subject as command
from rollwire.ops.erase.erase import Request, erase, recorded
from rollwire.ops.erase.export import export
from rollwire.ops.erase.reach import Reach, trace
from rollwire.ops.looking import Looking
from rollwire.ops.person import person_of
from rollwire.ops.readable import shut
from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.errors import ConfigError, Erased, LogUnavailable, Refused, TopicMismatch
from rollwire.schemas.golden import example
from rollwire.schemas.ids import new_group_id
from rollwire.schemas.pseudonyms import pseudonym_of
from rollwire.schemas.records import (
    DeadLetter,
    Erasure,
    Event,
    Feedback,
    FleetStatus,
    GroupFate,
    Header,
    ProductionRollout,
    Reward,
    TrainStep,
    WeightVersion,
)
from rollwire.streams.emit import outgoing
from rollwire.streams.seams.cache_memory import MemoryCache
from rollwire.streams.seams.clock import ManualClock
from rollwire.streams.seams.keys import KeyStore
from rollwire.streams.seams.keys_memory import MemoryKeys
from rollwire.streams.seams.log import Outgoing, Writer
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.sealing import seal_field

ADA, BOB = pseudonym_of(bytes(32), "acme", "ada"), pseudonym_of(bytes(32), "acme", "bob")
START_US = 1_767_225_600_000_000
ASKED = Request(ADA, "r-1", "asked", "ann")


def group(n: int) -> str:
    return new_group_id(START_US + n * 1_000_000, n)


def rollout(keys: KeyStore, person: str, n: int) -> ProductionRollout:
    made = example(ProductionRollout, "sealed")
    name = f"{group(n)}.0"
    tokens = np.arange(len(made.loss_mask), dtype="<u4").tobytes()
    held, seal = seal_field(keys, person, name, "token_ids", tokens)
    return msgspec.structs.replace(
        made, rollout_id=name, group_id=group(n), token_ids=held, sealed=seal, environment="countdown"
    )


def comment(keys: KeyStore, person: str, n: int, text: str) -> Feedback:
    made = example(Feedback, "sealed-comment")
    held, seal = seal_field(keys, person, f"f-{n}-{person[:4]}", "comment", text.encode())
    return msgspec.structs.replace(
        made,
        feedback_id=f"f-{n}-{person[:4]}",
        rollout_id=f"{group(n)}.0",
        group_id=group(n),
        subject=person,
        comment=held,
        seal=seal,
    )


def digest(version: int) -> str:
    return hashlib.sha256(str(version).encode()).hexdigest()


def versions(lineage: str, reverts: dict[int, int], newest: int) -> list[Event]:
    made = example(WeightVersion)
    step = example(TrainStep)
    events: list[Event] = []
    for n in range(newest + 1):
        back = reverts.get(n)
        state = digest(n if back is None else back)
        events.append(
            msgspec.structs.replace(
                made,
                lineage=lineage,
                version=n,
                kind="anchor" if n == 0 else "delta" if back is None else "revert",
                base_version=None if n == 0 else n - 1,
                step=n,
                state_digest=state,
                reverts_to=back,
            )
        )
        if n:
            settings = {} if back is None else {"revert_to": str(back)}
            events.append(
                msgspec.structs.replace(
                    step,
                    lineage=lineage,
                    step=n,
                    version=n,
                    base_version=n - 1,
                    state_digest=state,
                    settings=settings,
                )
            )
    return events


def write(log: MemoryLog, *events: Event) -> None:
    log.writer().write([outgoing(event, source="test", time_us=START_US) for event in events])


def history(keys: KeyStore) -> MemoryLog:
    """Ada's rollouts 1 and 2, Bob's 3; Ada's words about 1 and 3, Bob's about 3. 1 is trained into version 2 and 3 into
    version 6; version 4 goes back to 1, so 2 and 3 are carried by nothing later."""
    log = MemoryLog({name: spec.partitions for name, spec in TOPICS.items()})
    rollouts = [rollout(keys, ADA, 1), rollout(keys, ADA, 2), rollout(keys, BOB, 3)]
    lineage = rollouts[0].lineage
    fate = example(GroupFate, "trained")
    reward = example(Reward)
    status = example(FleetStatus, "channel-swapped")
    # What the codec refused stands in the dead letter as it came.
    refused = outgoing(comment(keys, ADA, 2, "late"), source="test", time_us=START_US)
    letter = example(DeadLetter, "short-logprobs")
    letter = msgspec.structs.replace(
        letter,
        value=refused.value,
        key=refused.key,
        headers=tuple(Header(key=k, value=v) for k, v in refused.headers),
    )
    write(
        log,
        *rollouts,
        comment(keys, ADA, 1, "my name is Ada"),
        comment(keys, ADA, 3, "so is mine"),
        comment(keys, BOB, 3, "I am Bob"),
        *(
            msgspec.structs.replace(reward, rollout_id=f"{group(n)}.0", group_id=group(n), source="user")
            for n in (1, 2, 3)
        ),
        *(
            msgspec.structs.replace(
                fate, group_id=group(n), members=(f"{group(n)}.0",), for_version=base, group_size=1
            )
            for n, base in ((1, 1), (3, 5))
        ),
        letter,
        *versions(lineage, {4: 1}, 7),
        msgspec.structs.replace(status, replica="old", version=3, state_digest=digest(3)),
        msgspec.structs.replace(status, replica="between", version=5, state_digest=digest(5)),
        msgspec.structs.replace(status, replica="new", version=6, state_digest=digest(6)),
        msgspec.structs.replace(status, replica="new", version=7, state_digest=digest(7)),
    )
    return log


def test_what_a_person_reached() -> None:
    log = history(MemoryKeys())
    seen: list[tuple[int, int]] = []
    reach = trace(log, ADA, lambda done, of: seen.append((done, of)))
    assert reach.topics == {
        "dead-letters": 1, "group-fates": 2, "production-rollouts": 2, "rewards": 3, "user-feedback": 2,
    }  # fmt: skip
    assert reach.generations == 1
    assert reach.rollouts == (f"{group(1)}.0", f"{group(2)}.0")
    assert reach.feedback == (f"f-1-{ADA[:4]}", f"f-3-{ADA[:4]}")
    (lineage,) = reach.lineages
    assert (lineage.trained, lineage.carried, lineage.newest) == ((2, 6), (2, 3, 6, 7), 7)
    assert [(s.replica, s.version) for s in reach.served] == [("new", 7), ("old", 3)]
    assert seen[-1][0] == seen[-1][1] > 0
    bob = trace(log, BOB)
    assert [one.trained for one in bob.lineages] == [(6,)]
    assert "dead-letters" not in bob.topics
    assert trace(log, "c" * 32).nothing


def test_what_carries_a_version() -> None:
    made = example(WeightVersion)

    def line(*reverts: int | None) -> dict[int, WeightVersion]:
        return {n: msgspec.structs.replace(made, version=n, reverts_to=to) for n, to in enumerate(reverts)}

    plain = line(None, None, None, None)
    assert carried_by([2], plain) == (2, 3)
    assert carried_by([], plain) == ()
    assert carried_by([1], line(None, None, None, 0, None, 2, None)) == (1, 2, 5, 6)
    assert ranges([1, 2, 3, 7, 9, 10]) == "1-3, 7, 9-10"
    assert ranges([]) == ""


def test_an_erasure_destroys_records_and_purges_and_a_repeat_changes_nothing() -> None:
    keys, clock, cache = MemoryKeys(), ManualClock(START_US), MemoryCache()
    log = history(keys)
    cache.set_many({"a": f"{ADA} was here".encode(), "b": BOB.encode()})
    done = erase(log, keys, cache, ASKED, clock)
    assert (done.event.generations, done.repeated, done.purged) == (1, False, 1)
    with pytest.raises(Erased):
        keys.key_of(ADA, 1)
    assert keys.key_of(BOB, 1)
    clock.advance(60)
    again = erase(log, keys, cache, ASKED._replace(request_id="r-2"), clock)
    assert (again.event, again.repeated, again.purged) == (done.event, True, 0)
    keys.data_key(ADA)  # the person comes again, and asks again
    third = erase(log, keys, cache, ASKED._replace(request_id="r-3"), clock)
    assert (third.event.generations, third.event.request_id, third.repeated) == (2, "r-3", False)
    assert recorded(log, ADA, 3) is None


@pytest.mark.parametrize("dies", ["keys", "event", "purge"])
def test_a_call_that_dies_never_leaves_an_event_before_the_fact_and_the_next_one_finishes(dies: str) -> None:
    keys, clock = MemoryKeys(), ManualClock(START_US)
    log = history(keys)

    class DyingKeys(MemoryKeys):
        def destroy(self, subject: str) -> int:
            raise LogUnavailable("killed")

    class DyingLog(MemoryLog):
        def writer(self) -> Writer:
            raise LogUnavailable("killed")

    class DyingCache(MemoryCache):
        def purge(self, text: str) -> int | None:
            raise LogUnavailable("killed")

    first_keys = DyingKeys() if dies == "keys" else keys
    first_log = DyingLog({"erasures": 1}) if dies == "event" else log
    with pytest.raises(LogUnavailable):
        erase(first_log, first_keys, DyingCache() if dies == "purge" else MemoryCache(), ASKED, clock)
    said = recorded(log, ADA, 1)
    if said is not None:  # never before the keys are gone
        assert keys.state(ADA) == ((), (1,))
    assert (said is not None) == (dies == "purge")
    done = erase(log, keys, MemoryCache(), ASKED, clock)
    assert done.repeated == (dies == "purge")
    assert keys.state(ADA) == ((), (1,))
    assert recorded(log, ADA, 1) == done.event


def test_nothing_is_destroyed_where_it_could_not_be_recorded() -> None:
    keys = MemoryKeys()
    keys.data_key(ADA)
    with pytest.raises(TopicMismatch, match=r"topics apply|erasures"):
        erase(MemoryLog({"rewards": 1}), keys, MemoryCache(), ASKED, ManualClock())
    assert keys.state(ADA) == ((1,), ())


def exported(log: MemoryLog, keys: KeyStore, reach: Reach) -> list[tuple[str, Any, bool]]:
    rows: list[tuple[str, Any, bool]] = []
    for one in export(log, reach, Looking(log, lambda: keys), lambda event, tokens: f"{len(tokens)} bytes"):
        event = one.shown["event"]
        content = event.get("comment", event.get("token_ids", event.get("reward")))
        rows.append((one.topic, (content, one.shown.get("text")), one.erased))
    return rows


def test_an_export_is_in_the_clear_and_only_of_the_person() -> None:
    keys = MemoryKeys()
    log = history(keys)
    reach = trace(log, ADA)
    rows = exported(log, keys, reach)
    count = len(example(ProductionRollout, "sealed").loss_mask)
    assert [r[1][0] for r in rows if r[0] == "user-feedback"] == ["my name is Ada", "so is mine"]
    assert [r[1] for r in rows if r[0] == "production-rollouts"] == [
        (list(range(count)), f"{4 * count} bytes")
    ] * 2
    assert len([r for r in rows if r[0] == "rewards"]) == 2
    assert "Bob" not in json.dumps(rows)
    keys.destroy(ADA)
    after = exported(log, keys, reach)
    assert [(topic, content[0], erased) for topic, content, erased in after if topic != "rewards"] == [
        ("user-feedback", "erased", True), ("user-feedback", "erased", True),
        ("production-rollouts", "erased", True), ("production-rollouts", "erased", True),
    ]  # fmt: skip
    assert not any(one.erased for one in export(log, reach, shut, lambda *_: None))


def test_the_file_of_an_export_is_its_owners(tmp_path: Path) -> None:
    path = tmp_path / "ada.json"
    command._write(path, {"events": {}})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_text()) == {"events": {}}
    assert [p.name for p in tmp_path.iterdir()] == ["ada.json"]


def test_text_is_of_known_environments_alone() -> None:
    made = rollout(MemoryKeys(), ADA, 1)
    assert isinstance(command._text(made, np.array([1, 2], "<u4").tobytes()), str)
    assert command._text(msgspec.structs.replace(made, environment="chat"), b"") is None


def test_an_erasure_is_refused_for_what_is_no_pseudonym() -> None:
    keys = MemoryKeys()
    log = MemoryLog({"erasures": 1})
    event = Erasure(subject="ada", request_id="r", generations=1, reason="", by="x", erased_us=START_US)
    with pytest.raises(Refused, match="no pseudonym"):
        log.writer().write([outgoing(event, source="test", time_us=START_US)])
    log.writer().write([Outgoing("erasures", ADA.encode(), b"nonsense")])
    assert erase(log, keys, MemoryCache(), ASKED, ManualClock(START_US)).event.generations == 0


@pytest.mark.parametrize(
    ("subject", "tenant", "pseudonym"),
    [(None, None, None), ("ada", None, None), ("ada", "acme", ADA), (None, "acme", ADA), (None, None, "ADA")],
)
def test_who_is_meant_is_said_once(subject: str | None, tenant: str | None, pseudonym: str | None) -> None:
    with pytest.raises(ConfigError, match=r"--subject and --tenant|32 hex digits"):
        person_of(None, subject, tenant, pseudonym)  # type: ignore[arg-type]
