"""A change of a released schema is judged, and names who breaks."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.compat import schema_files
from rollwire.schemas.diff import Change, TopicSchemas, compare, read_tree
from rollwire.schemas.errors import ConfigError

SPEC = TOPICS["notices"]
V1 = schema_files(SPEC)[1]
RELEASED = TopicSchemas(SPEC.name, SPEC.key, SPEC.partitions, SPEC.producers, SPEC.consumers, {1: V1})
WITH_DEFAULT = {"name": "room", "type": "string", "default": "", "doc": "x"}
WITHOUT = {"name": "room", "type": "string", "doc": "x"}


def with_field(field: dict[str, Any], base: Any = V1) -> Any:
    schema = copy.deepcopy(base)
    schema["fields"].append(field)
    return schema


def changes(now: TopicSchemas) -> list[Change]:
    return compare({"notices": RELEASED}, {"notices": now})


def test_no_change_is_no_change_and_documentation_is_none() -> None:
    described = copy.deepcopy(V1)
    described["doc"] = "Said better."
    described["fields"][0]["doc"] = "said better"
    assert changes(RELEASED) == []
    assert changes(RELEASED._replace(schemas={1: described})) == []


def test_a_compatible_next_version_breaks_nobody() -> None:
    (change,) = changes(RELEASED._replace(schemas={1: V1, 2: with_field(WITH_DEFAULT)}))
    assert change == Change("notices", "v2 is new (+room)", ())


def test_a_next_version_that_cannot_read_the_old_events_names_the_consumers() -> None:
    (change,) = changes(RELEASED._replace(schemas={1: V1, 2: with_field(WITHOUT)}))
    assert "v2 cannot read what v1 wrote" in change.text
    assert "room" in change.text
    assert change.breaks == SPEC.consumers


def test_a_next_version_that_old_readers_cannot_follow_names_them() -> None:
    shorter = copy.deepcopy(V1)
    shorter["fields"] = [field for field in V1["fields"] if field["name"] != "text"]
    (change,) = changes(RELEASED._replace(schemas={1: V1, 2: shorter}))
    assert "a reader of v1 cannot read what v2 writes" in change.text
    assert change.breaks == SPEC.consumers


def test_two_new_versions_are_judged_against_each_other_once() -> None:
    third = with_field({"name": "floor", "type": "long"}, with_field(WITH_DEFAULT))
    found = changes(RELEASED._replace(schemas={1: V1, 2: with_field(WITH_DEFAULT), 3: third}))
    assert [change.text.partition(":")[0] for change in found] == [
        "v2 is new (+room)",
        "v3 cannot read what v1 wrote",
        "v3 cannot read what v2 wrote",
    ]


@pytest.mark.parametrize("field", [WITH_DEFAULT, WITHOUT])
def test_a_released_schema_is_never_edited_in_place(field: dict[str, Any]) -> None:
    """Even where Avro could resolve it: the log holds events under the old fingerprint."""
    (change,) = changes(RELEASED._replace(schemas={1: with_field(field)}))
    assert "v1 was edited after its release (+room)" in change.text
    assert "make it v2" in change.text
    assert set(change.breaks) == {*SPEC.producers, *SPEC.consumers}
    assert ("new readers of old events" in change.text) is (field is WITHOUT)


def test_what_else_others_depend_on() -> None:
    for now, word in (
        (RELEASED._replace(key="group_id"), "the key was model and is group_id"),
        (RELEASED._replace(partitions=3), "there were 1 partitions and are 3"),
        (RELEASED._replace(schemas={2: V1}), "v1 is gone"),
    ):
        found = [change for change in changes(now) if change.breaks]
        assert [word in change.text for change in found] == [True]
        assert set(found[0].breaks) == {*SPEC.producers, *SPEC.consumers}


def test_topics_come_and_go() -> None:
    assert compare({}, {"notices": RELEASED}) == [Change("notices", "a new topic", ())]
    (gone,) = compare({"notices": RELEASED}, {})
    assert set(gone.breaks) == {*SPEC.producers, *SPEC.consumers}


def test_a_wrong_file_is_named() -> None:
    for files in (
        {"topics/x.toml": "name ="},
        {"topics/x.toml": 'name = "x"'},
        {
            "topics/x.toml": 'name="x"\nkey="k"\npartitions=1\nproducers=[]\nconsumers=[]\n[[schemas]]\nversion=1\nfile="x.avsc"'
        },
    ):
        with pytest.raises(ConfigError, match=r"schemas/topics/x\.toml"):
            read_tree(files)
