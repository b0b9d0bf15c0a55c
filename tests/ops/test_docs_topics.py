"""docs/topics.md is what the catalogue says now."""

from __future__ import annotations

import msgspec

from rollwire.ops.docs_topics import TARGET, archived, kept, reason_texts, topics_page
from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.reasons import REASONS


def test_the_committed_page_is_current() -> None:
    assert TARGET.read_text("utf-8") == topics_page(), "run `python -P -m rollwire.ops.docs_topics`"


def test_the_page_names_every_topic_field_and_reason() -> None:
    page = topics_page()
    for spec in TOPICS.values():
        assert f"\n## {spec.name}\n" in page
        for field in spec.record_class.__struct_fields__:
            assert f"| `{field}` | " in page
    for reason in REASONS:
        assert f"| `{reason}` | " in page


def test_every_reason_has_a_meaning() -> None:
    texts = reason_texts()
    assert tuple(texts) == REASONS
    assert all(texts.values())


def test_retention_for_people() -> None:
    assert kept(TOPICS["rollouts"]) == "30 d"
    assert kept(TOPICS["fleet-status"]) == "compacted, 7 d"
    assert kept(TOPICS["train-steps"]) == "unlimited"
    assert kept(msgspec.structs.replace(TOPICS["rollouts"], retention_ms=5_400_000)) == "1.5 h"


def test_how_long_topics_are_archived() -> None:
    assert archived(TOPICS["rollouts"]) == "for ever"
    assert archived(TOPICS["dead-letters"]) == "30 d"
    assert archived(TOPICS["groups-closed"]) == "not"
