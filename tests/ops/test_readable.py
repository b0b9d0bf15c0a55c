"""What `rollwire cat` shows of each event, and how filters find it."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import numpy as np
import pytest

from rollwire.ops.looking import Looking
from rollwire.ops.readable import json_line, matches, raw, readable_event, readable_record
from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.golden import Example, all_examples, load_examples
from rollwire.schemas.records import (
    DeadLetter,
    Erasure,
    Event,
    Feedback,
    Header,
    Microbatch,
    ProductionRollout,
)
from rollwire.streams.emit import outgoing
from rollwire.streams.seams.keys_memory import MemoryKeys
from rollwire.streams.seams.log import Record
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.sealing import seal_field

EXAMPLES = all_examples()


def record_of(example: Example, **changes: Any) -> Record:
    record = Record(example.topic, 1, 7, 1_767_225_603_000, example.key, example.value, example.headers)
    return record._replace(**changes)


@pytest.mark.parametrize("example", EXAMPLES, ids=[f"{e.topic}-{e.name}" for e in EXAMPLES])
def test_every_example_is_shown_whole_as_one_line_of_json(example: Example) -> None:
    line = json_line(readable_record(record_of(example)))
    assert "\n" not in line
    shown = json.loads(line)
    assert (shown["topic"], shown["partition"], shown["offset"]) == (example.topic, 1, 7)
    assert shown["time"] == "2026-01-01T00:00:03.000+00:00"
    fields = set(shown["event"]) - {"inner"}
    if example.version == TOPICS[example.topic].current.version:
        assert fields == set(example.plain)
    else:  # what came after its schema has its default
        assert fields == set(example.event.__struct_fields__)
    for name, value in example.plain.items():
        if not isinstance(value, list | dict | str):
            assert shown["event"][name] == value


def test_arrays_are_numbers() -> None:
    named = {example.name: readable_event(example.event) for example in load_examples("rollouts")}
    rollout, wide = named["two-versions"], named["tool-call"]
    assert rollout["token_ids"] == [11, 3, 5, 7, 12, 3, 14, 5, 0]
    assert rollout["loss_mask"] == [0, 0, 0, 0, 0, 1, 1, 1, 1]
    assert rollout["logprobs"] == [-0.5, -1.25, -0.0, -0.125]
    assert rollout["segments"][1] == {"kind": "sampled", "start": 5, "end": 9}
    assert wide["token_ids"][0] == 70_000
    trace = readable_event(load_examples("routing-traces")[1].event)
    assert trace["data"] == [[[0, 1], [2, 3], [4, 5]], [[6, 7], [1, 0], [3, 2]]]
    batch = readable_event(load_examples("packed-batches")[0].event)["microbatches"][0]
    assert batch["cu_seqlens"] == [0, 9, 18]
    assert batch["versions"] == [3, 3, 4, 4, 4, 4, 4, 4]
    assert batch["advantages"] == [0.5, -0.5]
    assert batch["traces"][1] is None


def test_a_float_is_the_shortest_decimal_that_names_it() -> None:
    event: Any = load_examples("rollouts")[1].event
    odd = msgspec.structs.replace(event, logprobs=bytes.fromhex("cdcccc3d") * 4)  # f4 0.1
    assert readable_event(odd)["logprobs"] == [0.1] * 4


def test_numbers_that_json_lacks_are_words() -> None:
    event: Any = load_examples("train-steps")[0].event
    odd = msgspec.structs.replace(event, loss=math.nan, grad_norm=math.inf, entropy=-math.inf)
    shown = readable_event(odd)
    assert (shown["loss"], shown["grad_norm"], shown["entropy"]) == ("NaN", "Infinity", "-Infinity")


def letter(inner: Example, **changes: Any) -> Event:
    base = load_examples("dead-letters")[0].event
    assert isinstance(base, DeadLetter)
    return msgspec.structs.replace(
        base,
        source=msgspec.structs.replace(base.source, topic=inner.topic),
        key=inner.key,
        value=inner.value,
        headers=tuple(Header(key=k, value=v) for k, v in inner.headers),
        **changes,
    )


def test_a_dead_letter_is_opened() -> None:
    inner = load_examples("rewards")[1]
    shown = readable_event(letter(inner, reason="late"))
    assert shown["inner"]["event"] == readable_event(inner.event)
    broken = readable_event(load_examples("dead-letters")[0].event)
    assert broken["inner"]["refused"]["reason"] == "not_framed"
    assert broken["value"] == "base64:wwFyYXc="


def test_what_is_no_event_is_shown_with_its_reason() -> None:
    example = load_examples("rewards")[0]
    shown = readable_record(record_of(example, value=b"hello"))
    assert shown["refused"]["reason"] == "not_framed"
    assert shown["value"] == "hello"
    assert readable_record(record_of(example, value=None))["refused"]["reason"] == "tombstone_not_allowed"
    assert readable_record(record_of(example, key=None))["refused"]["reason"] == "key_mismatch"
    status = load_examples("fleet-status")[0]
    assert readable_record(record_of(status, value=None))["deleted"] is True


@pytest.mark.parametrize(
    ("data", "text"),
    [(None, None), (b"", ""), (b"abc", "abc"), (b"\xff", "base64:/w=="), (b"a\n", "base64:YQo=")],
)
def test_raw_bytes(data: bytes | None, text: str | None) -> None:
    assert raw(data) == text


@pytest.mark.parametrize(
    ("path", "wanted", "found"),
    [
        ("reward", "1", True),
        ("reward", "1.0", True),
        ("reward", "true", False),
        ("reward", "one", False),
        ("name", "right", True),
        ("name", "wrong", False),
        ("nothing", "null", True),
        ("absent", "null", False),
        ("spans.version", "4", True),
        ("spans.version", "5", False),
        ("spans.1.version", "4", True),
        ("spans.0.version", "4", False),
        ("spans.9.version", "4", False),
        ("numbers", "7", True),
        ("deep.er.est", "x", True),
        ("settings.a.b", "1", True),
        ("name.further", "1", False),
    ],
)
def test_filters(path: str, wanted: str, found: bool) -> None:
    shown = {
        "reward": 1.0,
        "name": "right",
        "nothing": None,
        "spans": [{"version": 3}, {"version": 4}],
        "numbers": [5, 7],
        "deep": {"er": {"est": "x"}},
        "settings": {"a.b": "1"},
    }
    assert matches(shown, path, wanted) is found


def test_sealed_content_is_a_word_erased_or_in_the_clear() -> None:
    log, keys = MemoryLog({"erasures": 1}), MemoryKeys()
    tokens, person = np.array([5, 6, 7], "<u4"), "a" * 32
    (example,) = load_examples("production-rollouts")[:1]
    rollout = example.event
    assert isinstance(rollout, ProductionRollout)
    held, seal = seal_field(keys, person, rollout.rollout_id, "token_ids", tokens.tobytes())
    shut = msgspec.structs.replace(rollout, token_ids=held, sealed=seal)
    said, comment_seal = seal_field(keys, person, "f-1", "comment", "schön\n".encode())
    feedback = next(e.event for e in load_examples("user-feedback") if isinstance(e.event, Feedback))
    comment = msgspec.structs.replace(feedback, feedback_id="f-1", comment=said, seal=comment_seal)
    micro = Microbatch(
        rollout_ids=("x.0", rollout.rollout_id, rollout.rollout_id),
        cu_seqlens=np.array([0, 2, 5, 8], "<i4").tobytes(),
        token_ids=np.array([1, 2], "<u4").tobytes() + held + bytes(12),
        loss_mask=b"",
        logprobs=b"",
        versions=b"",
        advantages=b"",
        traces=(),
        seals=(None, seal, seal),
    )
    assert readable_event(shut)["token_ids"] == "sealed"
    assert readable_event(shut)["sealed"]["subject"] == person
    for look, word in ((Looking(log), "sealed"), (Looking(log, MemoryKeys), "no key")):
        assert readable_event(shut, look)["token_ids"] == word
        assert readable_event(comment, look)["comment"] == word
        assert readable_event(micro, look)["token_ids"] == [[1, 2], word, word]
    opened = Looking(log, lambda: keys)
    assert readable_event(shut, opened)["token_ids"] == [5, 6, 7]
    assert readable_event(comment, opened)["comment"] == "schön\n"
    assert readable_event(micro, opened)["token_ids"] == [[1, 2], [5, 6, 7], "does not open"]
    keys.destroy(person)
    erasure = Erasure(
        subject=person, request_id="r", generations=1, reason="", by="x", erased_us=1_767_225_600_000_000
    )
    assert readable_event(shut, Looking(log, lambda: keys))["token_ids"] == "erased"  # nobody has said so yet
    log.writer().write([outgoing(erasure, source="test", time_us=erasure.erased_us)])
    for look in (Looking(log), Looking(log, lambda: keys)):
        assert readable_event(shut, look)["token_ids"] == "erased"
        assert readable_event(comment, look)["comment"] == "erased"
        assert readable_event(micro, look)["token_ids"] == [[1, 2], "erased", "erased"]
    again, seal = seal_field(keys, person, rollout.rollout_id, "token_ids", tokens.tobytes())
    later = msgspec.structs.replace(rollout, token_ids=again, sealed=seal)
    assert readable_event(later, Looking(log))["token_ids"] == "sealed"  # of the person who came again
