"""The topic catalogue: what it says, and that a wrong topic file is refused by name."""

from __future__ import annotations

import re

import pytest

from rollwire.schemas.catalogue import BROKER_MESSAGE_MAX_BYTES, TOPICS, parse_topic
from rollwire.schemas.errors import ConfigError
from rollwire.schemas.identity import IDS, KEYS

SPINE = {
    "rollouts": 4,
    "production-rollouts": 4,
    "rewards": 4,
    "user-feedback": 4,
    "routing-traces": 4,
    "groups": 4,
    "group-fates": 4,
    "groups-closed": 4,
    "production-groups-closed": 4,
    "packed-batches": 8,
    "train-steps": 1,
    "weight-versions": 1,
    "weight-links": 1,
    "fleet-status": 1,
    "evaluations": 1,
    "notices": 1,
    "erasures": 1,
    "dead-letters": 1,
}
ROOMS = {"schemas", "kernels", "streams", "producers", "consumers", "ops"}

GOOD = """
name = "x"
description = "d"
owner = "ops"
producers = ["ops"]
consumers = ["ops"]
key = "model"
partitions = 1
retention_ms = -1
cleanup_policy = "delete"
max_message_bytes = 8388608
record = "Notice"
[[schemas]]
version = 1
file = "notices.v1.avsc"
compatibility = "FULL"
examples = "notices/v1"
[production]
replication_factor = 3
min_insync_replicas = 2
unclean_leader_election = false
[local]
replication_factor = 1
min_insync_replicas = 1
unclean_leader_election = false
"""


def test_the_spines_topics_and_their_partitions() -> None:
    assert {name: spec.partitions for name, spec in TOPICS.items()} == SPINE


def test_joined_topics_have_equal_partitions_and_keys() -> None:
    joined = [TOPICS[t] for t in ("rollouts", "rewards", "routing-traces", "groups-closed")]
    assert len({(spec.partitions, spec.key) for spec in joined}) == 1


def test_production_is_safe_and_dead_letters_hold_every_source() -> None:
    for spec in TOPICS.values():
        assert spec.production.replication_factor == 3
        assert spec.production.min_insync_replicas == 2
        assert not spec.production.unclean_leader_election
        if spec.name == "dead-letters":
            assert spec.max_message_bytes > BROKER_MESSAGE_MAX_BYTES
        else:
            assert spec.max_message_bytes == BROKER_MESSAGE_MAX_BYTES


def test_every_record_has_one_topic_a_key_and_an_id() -> None:
    classes = [spec.record_class for spec in TOPICS.values()]
    assert len(set(classes)) == len(classes)
    assert set(IDS) == set(classes)
    assert {spec.key for spec in TOPICS.values()} == set(KEYS)


def test_owners_producers_and_consumers_are_rooms() -> None:
    for spec in TOPICS.values():
        for who in (spec.owner, *spec.producers, *spec.consumers):
            assert who.split("/")[0] in ROOMS, (spec.name, who)


def test_a_good_file_is_read() -> None:
    spec = parse_topic(GOOD, "x.toml")
    assert spec.record_class.__name__ == "Notice"
    assert not spec.compacted
    assert spec.current.version == 1


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("retention_ms", "retention_sm", "unknown key 'retention_sm'; did you mean 'retention_ms'?"),
        ("owner =", "zzz =", "unknown key 'zzz'; known are name, description"),
        ('file = "', 'fiel = "', "[[schemas]]: unknown key 'fiel'; did you mean 'file'?"),
        (
            "min_insync_replicas = 2",
            "min_insync_replica = 2",
            "[production]: unknown key 'min_insync_replica'",
        ),
        ("partitions = 1\n", "", "partitions"),
        ("partitions = 1\n", 'partitions = "1"\n', "partitions"),
        ("partitions = 1\n", "partitions = 0\n", "at least 1"),
        ('name = "x"', 'name = "a.b"', "lower-case words"),
        ('key = "model"', 'key = "modle"', "is not one of"),
        ('"delete"', '"never"', "is not one of"),
        ("retention_ms = -1", "retention_ms = 0", "unlimited"),
        ("retention_ms = -1", "retention_ms = -1\narchive_ms = -2", "archive for ever"),
        ("8388608", "1000", "no room"),
        ("version = 1", "version = 2", "1, 2, 3"),
        ('"FULL"', '"NONE"', "FULL compatible"),
        ("notices.v1.avsc", "nowhere.v1.avsc", "is not there"),
        ('"Notice"', '"Nothing"', "no event"),
        ('"Notice"', '"annotations"', "no event"),
        ("min_insync_replicas = 2", "min_insync_replicas = 4", "between 1 and"),
        ('name = "x"', "name = x", "not TOML"),
    ],
)
def test_a_wrong_file_is_refused_by_name(old: str, new: str, message: str) -> None:
    assert old in GOOD
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        parse_topic(GOOD.replace(old, new), "x.toml")
    assert "x.toml" in str(caught.value)
