"""One event judged, and the record made of it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwire.kernels.seal import open_sealed, place_of
from rollwire.producers.emit import decode_record, outgoing
from rollwire.producers.gateway.access import Refusal
from rollwire.producers.gateway.encode import SOURCE, Encoder
from rollwire.producers.gateway.item import Item
from rollwire.producers.gateway.judge import Context, Draft, judge
from rollwire.producers.gateway.records import feedback_of, sealed_entry
from rollwire.schemas.ids import new_group_id
from rollwire.schemas.pseudonyms import pseudonym_of
from rollwire.schemas.records import Feedback
from rollwire.schemas.rules import Rules, default_rules, parse_rules
from rollwire.streams.seams.keys import DataKey
from rollwire.streams.seams.log import Outgoing, Record

SECRET = b"s" * 32
NOW_US = 1_790_000_000_000_000
SECOND_US = 1_000_000
RULES = default_rules()
KEY = DataKey(3, b"k" * 32)


def context(tenant: str = "acme", **changed: Any) -> Context:
    made = Context(
        tenant, "key1", "rollwire", SECRET, lambda t, s: pseudonym_of(SECRET, t, s), 1_000, 300 * SECOND_US
    )
    return made._replace(**changed)


def rollout(opened_us: int = NOW_US - SECOND_US, bits: int = 7) -> str:
    return f"{new_group_id(opened_us, bits)}.0"


def item(**fields: Any) -> Item:
    made: dict[str, Any] = {"rollout_id": rollout(), "signal": "thumb", "value": 1.0, "feedback_id": "f"}
    return Item(**made | fields)


def draft(said: Item, tenant: str = "acme", rules: Rules = RULES, now_us: int = NOW_US) -> Draft:
    made = judge(said, context(tenant), rules, now_us)
    assert isinstance(made, Draft), made
    return made


def refused(said: Item, rules: Rules = RULES) -> tuple[str, str]:
    made = judge(said, context(), rules, NOW_US)
    assert isinstance(made, Refusal), made
    assert made.status in (400, 413)
    return made.code, made.field


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"rollout_id": "nobody"}, "id_invalid", "rollout_id"),
        ({"rollout_id": rollout()[:-2]}, "id_invalid", "rollout_id"),
        ({"rollout_id": rollout(NOW_US + 301 * SECOND_US)}, "time_invalid", "rollout_id"),
        ({"rollout_id": rollout(NOW_US - RULES.horizon_us - SECOND_US)}, "late", "rollout_id"),
        ({"feedback_id": "a/b"}, "id_invalid", "feedback_id"),
        ({"feedback_id": ""}, "id_invalid", "feedback_id"),
        ({"feedback_id": "a" * 129}, "id_invalid", "feedback_id"),
        ({"signal": "thumbs"}, "unknown_signal", "signal"),
        ({"value": 0.0}, "value_out_of_range", "value"),
        ({"value": True}, "wrong_type", "value"),
        ({"signal": "rating", "value": True}, "wrong_type", "value"),
        ({"signal": "accept", "value": 2.0}, "value_out_of_range", "value"),
        ({"signal": "comment", "value": None}, "wrong_type", "value"),
        ({"subject": "a\x00b"}, "text_invalid", "subject"),
        ({"subject": "a\nb"}, "text_invalid", "subject"),
        ({"subject": ""}, "text_invalid", "subject"),
        ({"subject": "a" * 257}, "text_invalid", "subject"),
        ({"comment": "hello"}, "missing_field", "subject"),
        ({"comment": "a\x00b", "subject": "me"}, "text_invalid", "comment"),
        ({"comment": "", "subject": "me"}, "text_invalid", "comment"),
        ({"comment": "\ufffd" * 334, "subject": "me"}, "too_large", "comment"),
        ({"happened_at": "yesterday"}, "time_invalid", "happened_at"),
        ({"happened_at": "2026-09-21T14:13:20"}, "time_invalid", "happened_at"),
        ({"happened_at": "2026-W39-1T14:13:20Z"}, "time_invalid", "happened_at"),
        ({"happened_at": NOW_US / 1e3}, "time_invalid", "happened_at"),
        ({"happened_at": NOW_US / 1e6 + 301}, "time_invalid", "happened_at"),
        ({"happened_at": NOW_US / 1e6 - 302}, "time_invalid", "happened_at"),
        ({"happened_at": -1.0}, "time_invalid", "happened_at"),
    ],
)
def test_what_is_wrong_is_refused_with_its_field(fields: dict[str, Any], code: str, field: str) -> None:
    assert refused(item(**fields)) == (code, field)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.5, -0.0])
def test_c72_both_ends_of_a_range_are_taken(value: float) -> None:
    assert repr(draft(item(signal="rating", value=value)).value) == repr(value)


@pytest.mark.parametrize("value", [1.0000001, -1e-12, 10001.0, 123456789012345678901234567890.0])
def test_c71_c72_what_is_outside_is_refused_never_clamped(value: float) -> None:
    assert refused(item(signal="rating", value=value)) == ("value_out_of_range", "value")


def test_a_boolean_signal_takes_true_false_and_its_words() -> None:
    assert draft(item(signal="accept", value=True)).value == 1.0
    assert draft(item(signal="accept", value=False)).value == 0.0
    labelled = Item(rollout_id=rollout(), signal="accept", label="rejected")
    assert (draft(labelled).value, draft(labelled).label) == (0.0, "rejected")


def test_times_are_kept_to_the_microsecond_in_either_form() -> None:
    for said in ("2026-09-21T14:13:19.123456Z", "2026-09-21t16:13:19.123456+02:00", 1789999999.123456):
        assert draft(item(happened_at=said)).happened_us == NOW_US - SECOND_US + 123_456
    assert draft(item()).happened_us == NOW_US


def test_an_id_is_derived_from_the_content_alone() -> None:
    said = item(feedback_id=None)
    one = draft(said)
    assert one.id_source == "content"
    assert one.feedback_id.startswith("sha256:")
    assert len(one.feedback_id) == 71
    assert draft(said, now_us=NOW_US + 1).feedback_id == one.feedback_id
    others = [
        draft(said, tenant="other"),
        draft(item(feedback_id=None, value=-1.0)),
        draft(item(feedback_id=None, rollout_id=rollout(bits=8))),
        draft(item(feedback_id=None, subject="me")),
        draft(item(feedback_id=None, happened_at=NOW_US / 1e6)),
    ]
    assert len({other.feedback_id for other in others} | {one.feedback_id}) == 6


def test_c70_the_digest_tells_contents_apart_and_nothing_else() -> None:
    same = [draft(item()), draft(item(), now_us=NOW_US + SECOND_US), draft(item(feedback_id="other"))]
    assert len({one.digest for one in same}) == 1
    assert draft(item(value=-1.0)).digest != same[0].digest
    assert draft(item(happened_at=NOW_US / 1e6)).digest != same[0].digest


def test_a_person_is_a_pseudonym_of_the_tenant() -> None:
    mine = draft(item(subject="me"))
    assert mine.subject == pseudonym_of(SECRET, "acme", "me")
    assert draft(item(subject="me"), tenant="other").subject != mine.subject


def decoded(record: Outgoing) -> Feedback:
    event = decode_record(
        Record("user-feedback", 0, 0, 0, record.key, record.value, record.headers),
    )
    assert isinstance(event, Feedback)
    return event


def test_a_comment_is_sealed_and_sent_again_the_same_record() -> None:
    said = item(signal="comment", value=1.0)
    said = Item(rollout_id=said.rollout_id, signal="comment", comment="not what I asked", subject="me")
    made = draft(said)
    entry = sealed_entry(made, context(), NOW_US, KEY)
    event = decoded(entry.record)
    assert b"asked" not in (entry.record.value or b"")
    assert event.seal is not None
    assert (event.seal.subject, event.seal.key) == (made.subject, 3)
    plain = open_sealed(
        KEY.key,
        event.comment or b"",
        nonce=event.seal.nonce,
        tag=event.seal.tag,
        aad=place_of(event.feedback_id, "comment"),
    )
    assert plain == b"not what I asked"
    assert sealed_entry(made, context(), NOW_US, KEY).record == entry.record
    other = draft(Item(rollout_id=said.rollout_id, signal="comment", comment="another", subject="me"))
    seal = decoded(sealed_entry(other, context(), NOW_US, KEY).record).seal
    assert seal is not None
    assert seal.nonce != event.seal.nonce


names = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1, max_size=256)
WORDS = parse_rules(
    """
    name = "words"
    version = "1"
    window_s = 10
    grace_s = 1
    horizon_s = 100
    max_events = 5
    reward = [-1.0, 1.0]
    [signals.number]
    kind = "number"
    range = [-1e300, 1e300]
    labels = { ja = 1.0, "größer" = 2.5 }
    [signals.yes]
    kind = "boolean"
    """
)
said: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.builds(dict, signal=st.just("number"), value=st.floats(-1e300, 1e300)),
    st.builds(dict, signal=st.just("number"), label=st.sampled_from(["ja", "größer"])),
    st.builds(dict, signal=st.just("yes"), value=st.booleans()),
)


@given(
    said,
    st.integers(0, (1 << 74) - 1),
    st.integers(0, 999_999),
    st.from_regex(r"\A[A-Za-z0-9._:-]{1,128}\Z"),
    names | st.none(),
    st.integers(946_684_801_000_000, 4_102_444_700_000_000),
    st.integers(-1_000_000, 90_000_000),
    st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._:-]{0,127}\Z"),
    st.from_regex(r"\A[A-Za-z0-9._-]{0,64}\Z"),
)
def test_the_straight_encoder_gives_what_the_codec_gives(
    fields: dict[str, Any],
    bits: int,
    index: int,
    feedback_id: str,
    subject: str | None,
    opened_us: int,
    later_us: int,
    tenant: str,
    key_id: str,
) -> None:
    now_us = opened_us // 1_000 * 1_000 + later_us
    who = context(tenant, key_id=key_id, dialect="otel")
    item = Item(
        rollout_id=f"{new_group_id(opened_us, bits)}.{index}",
        feedback_id=feedback_id,
        subject=subject,
        **fields,
    )
    made = judge(item, who, WORDS, now_us)
    assert isinstance(made, Draft), made
    encoder = Encoder(tenant, key_id, "otel")
    encoder.received(now_us)
    event = feedback_of(made, who, now_us, None)
    assert encoder.record(made) == outgoing(event, source=SOURCE, time_us=now_us)
    assert decoded(encoder.record(made)) == event
