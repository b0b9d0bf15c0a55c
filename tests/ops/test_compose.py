"""compose.yaml runs the local stack's servers with the local stack's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from rollwire.ops.stack.kafka import server_properties as kafka_properties
from rollwire.ops.stack.s3 import server_properties as s3_properties

COMPOSE = Path(__file__).resolve().parents[2] / "compose.yaml"
# What follows from the machine, not from what Rollwire needs.
OWN = {
    "process.roles", "node.id", "controller.listener.names", "controller.quorum.voters", "listeners",
    "advertised.listeners", "listener.security.protocol.map", "inter.broker.listener.name", "log.dirs",
}  # fmt: skip


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())["services"]
    return found


def properties(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines())


def test_the_three_servers_are_there_and_reached_from_this_machine_only(services: dict[str, Any]) -> None:
    assert set(services) == {"kafka", "s3", "redis"}
    for service in services.values():
        for port in service["ports"]:
            assert port.startswith("127.0.0.1:")


def test_images_name_no_host(services: dict[str, Any]) -> None:
    for service in services.values():
        image, _, tag = service["image"].partition(":")
        assert tag
        assert "." not in image.split("/")[0]


def test_kafka_has_the_settings_of_the_local_stack(services: dict[str, Any]) -> None:
    ours = properties(kafka_properties(Path("data"), 1, 2))
    there = {
        name.removeprefix("KAFKA_").lower().replace("_", "."): value
        for name, value in services["kafka"]["environment"].items()
    }
    assert {name: value for name, value in there.items() if name not in OWN} == {
        name: ours.get(name) for name in there if name not in OWN
    }
    # The last one: a single broker that hands over its partitions loses the markers of transactions under way.
    for needed in (
        "message.max.bytes",
        "auto.create.topics.enable",
        "transaction.state.log.min.isr",
        "controlled.shutdown.enable",
    ):
        assert needed in there


def test_s3_has_the_settings_of_the_local_stack(services: dict[str, Any]) -> None:
    ours = properties(s3_properties(Path("data"), 1, "rollwire", "rollwire-local"))
    there = services["s3"]["environment"]
    for variable, name in (
        ("S3PROXY_AUTHORIZATION", "s3proxy.authorization"),
        ("S3PROXY_IDENTITY", "s3proxy.identity"),
        ("S3PROXY_CREDENTIAL", "s3proxy.credential"),
        ("S3PROXY_V4_MAX_NON_CHUNKED_REQ_SIZE", "s3proxy.v4-max-non-chunked-request-size"),
        ("JCLOUDS_PROVIDER", "jclouds.provider"),
    ):
        assert there[variable] == ours[name]
