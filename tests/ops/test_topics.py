"""How a topic on the broker may differ from its declaration, and what is said then."""

from __future__ import annotations

import pytest

from rollwire.ops.topics import Profile, TopicState, declared_configs, differences
from rollwire.schemas.catalogue import TOPICS

SPEC = TOPICS["rollouts"]


def as_declared(profile: Profile = "local") -> TopicState:
    replicas = 3 if profile == "production" else 1
    return TopicState("p.rollouts", SPEC.partitions, replicas, declared_configs(SPEC, profile))


@pytest.mark.parametrize("profile", ["local", "production"])
def test_a_topic_as_declared_has_no_difference(profile: Profile) -> None:
    assert differences(SPEC, as_declared(profile), profile) == []


def test_other_partitions_are_named_with_what_to_do() -> None:
    (said,) = differences(SPEC, as_declared()._replace(partitions=6), "local")
    assert "p.rollouts has 6 partitions, 4 are declared" in said
    assert "another prefix" in said


@pytest.mark.parametrize("name", declared_configs(SPEC, "local"))
def test_another_setting_is_named_with_the_command_that_sets_it(name: str) -> None:
    configs = {**declared_configs(SPEC, "local"), name: "7"}
    (said,) = differences(SPEC, as_declared()._replace(configs=configs), "local")
    assert f"{name}=7" in said
    assert f"--add-config {name}=[" in said


def test_production_demands_more_than_local() -> None:
    said = differences(SPEC, as_declared("local"), "production")
    assert any("replication factor 1, 3 is declared" in s for s in said)
    assert any("min.insync.replicas=1, 2 is declared" in s for s in said)
    assert differences(SPEC, as_declared("production"), "local") != []  # a local stack has one broker to ask


def test_the_order_of_policies_does_not_matter() -> None:
    spec = TOPICS["fleet-status"]
    configs = {**declared_configs(spec, "local"), "cleanup.policy": "delete,compact"}
    assert differences(spec, TopicState("p.fleet-status", 1, 1, configs), "local") == []


def test_a_setting_that_the_broker_does_not_tell_is_a_difference() -> None:
    configs = declared_configs(SPEC, "local")
    del configs["retention.ms"]
    (said,) = differences(SPEC, as_declared()._replace(configs=configs), "local")
    assert "retention.ms=None" in said
