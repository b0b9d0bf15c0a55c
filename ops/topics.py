"""Topics on the broker, from the catalogue: create what is missing, check what is there.

Nothing is ever changed silently on a topic that exists: another partition count would move keys to other partitions
and break every join, and another retention may be someone's decision. A difference is `TopicMismatch`, with what to do.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final, Literal, NamedTuple

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka import TopicPartition as WirePartition
from confluent_kafka.admin import AdminClient

# `confluent_kafka.admin` re-exports these without saying so, which type checkers refuse.
from confluent_kafka.admin._config import ConfigResource
from confluent_kafka.admin._listoffsets import LatestSpec
from confluent_kafka.admin._resource import ResourceType
from confluent_kafka.cimpl import NewTopic

from rollwire.schemas.catalogue import TOPICS, Placement, TopicSpec
from rollwire.schemas.errors import LogUnavailable, TopicMismatch
from rollwire.streams.seams.rdkafka_logs import bridge

Profile = Literal["local", "production"]

_REQUEST_S: Final = 30.0
_PAUSE_S: Final = 0.05


class TopicState(NamedTuple):
    """A topic as the broker has it."""

    name: str  # with the prefix
    partitions: int
    replication_factor: int
    configs: Mapping[str, str]


class Applied(NamedTuple):
    """What `apply_topics` did: names with the prefix."""

    created: tuple[str, ...]
    unchanged: tuple[str, ...]


def placement(spec: TopicSpec, profile: Profile) -> Placement:
    return spec.production if profile == "production" else spec.local


def declared_configs(spec: TopicSpec, profile: Profile) -> dict[str, str]:
    """The broker settings a topic is declared with."""
    place = placement(spec, profile)
    return {
        "cleanup.policy": spec.cleanup_policy,
        "retention.ms": str(spec.retention_ms),
        "max.message.bytes": str(spec.max_message_bytes),
        "min.insync.replicas": str(place.min_insync_replicas),
        "unclean.leader.election.enable": str(place.unclean_leader_election).lower(),
        # The record's time is the broker's: a producer's clock in another unit would delete at once or never (C45).
        "message.timestamp.type": "LogAppendTime",
    }


def differences(spec: TopicSpec, state: TopicState, profile: Profile) -> list[str]:
    """How a topic differs from its declaration, each as a sentence that says what to do. Pure."""
    found: list[str] = []
    if state.partitions != spec.partitions:
        found.append(
            f"topic {state.name} has {state.partitions} partitions, {spec.partitions} are declared; keys would land on "
            f"other partitions, so it cannot be changed in place: choose another prefix, or end its writers, delete it "
            f"and apply again"
        )
    wanted = placement(spec, profile)
    if state.replication_factor < wanted.replication_factor:
        found.append(
            f"topic {state.name} has replication factor {state.replication_factor}, {wanted.replication_factor} is "
            f"declared; reassign it with kafka-reassign-partitions.sh"
        )
    for name, value in declared_configs(spec, profile).items():
        actual = state.configs.get(name)
        if actual is None or _normal(actual) != _normal(value):
            found.append(
                f"topic {state.name} has {name}={actual}, {value} is declared; set it with kafka-configs.sh --alter "
                f"--entity-type topics --entity-name {state.name} --add-config {name}=[{value}]"
            )
    return found


def _normal(value: str) -> str:
    return ",".join(sorted(value.split(",")))  # the broker may list policies in its own order


def apply_topics(
    bootstrap: str,
    prefix: str = "rollwire.",
    profile: Profile = "local",
    topics: Mapping[str, TopicSpec] = TOPICS,
) -> Applied:
    """Creates the declared topics that are missing and checks those that are there.

    Checks come first: where one differs, nothing is created. Raises `TopicMismatch`, `LogUnavailable`.
    """
    admin = _admin(bootstrap)
    names = [prefix + name for name in topics]
    states = _describe(admin, names)
    _check(topics, states, prefix, profile)
    missing = [spec for name, spec in topics.items() if prefix + name not in states]
    _create(admin, missing, prefix, profile)
    # A broker learns of a new topic a moment after the controller made it; whoever goes on from here may use all. The
    # second check is for a topic that another process made meanwhile.
    deadline = time.monotonic() + _REQUEST_S
    while len(now := _describe(admin, names)) < len(names):
        if time.monotonic() > deadline:
            raise LogUnavailable(
                f"the broker does not know {sorted(set(names) - set(now))} after {_REQUEST_S:g} s"
            )
        time.sleep(_PAUSE_S)
    _check(topics, now, prefix, profile)
    _wait_led(admin, [now[prefix + spec.name] for spec in missing], deadline)
    return Applied(tuple(prefix + spec.name for spec in missing), tuple(sorted(states)))


def _check(
    topics: Mapping[str, TopicSpec], states: Mapping[str, TopicState], prefix: str, profile: Profile
) -> None:
    wrong = [
        text
        for name, spec in topics.items()
        if (state := states.get(prefix + name)) is not None
        for text in differences(spec, state, profile)
    ]
    if wrong:
        raise TopicMismatch("\n".join(wrong))


def list_topics(bootstrap: str, prefix: str = "rollwire.") -> list[TopicState]:
    """The topics under a prefix as the broker has them, declared or not, by name. Raises `LogUnavailable`."""
    admin = _admin(bootstrap)
    states = _describe(admin, [name for name in _names(admin) if name.startswith(prefix)])
    return [states[name] for name in sorted(states)]


def _admin(bootstrap: str) -> AdminClient:
    config: dict[str, Any] = {
        "bootstrap.servers": bootstrap,
        "client.id": "rollwire-topics",
        "broker.address.family": "v4",
        "logger": bridge(),
    }
    return AdminClient(config)


def _names(admin: AdminClient) -> list[str]:
    try:
        return list(admin.list_topics(timeout=_REQUEST_S).topics)
    except KafkaException as error:
        raise LogUnavailable(f"the broker did not list its topics in {_REQUEST_S:g} s: {error}") from error


def _describe(admin: AdminClient, names: Sequence[str]) -> dict[str, TopicState]:
    """The topics among `names` that exist."""
    if not names:
        return {}
    try:
        known = admin.describe_topics(TopicCollection(list(names)), request_timeout=_REQUEST_S)
        found: dict[str, tuple[int, int]] = {}
        for name, future in known.items():
            description = _answer(future, missing_ok=True)
            if description is not None:
                partitions = description.partitions
                found[name] = (len(partitions), min((len(p.replicas) for p in partitions), default=0))
        if not found:
            return {}
        resources = [ConfigResource(ResourceType.TOPIC, name) for name in found]
        configs = admin.describe_configs(resources, request_timeout=_REQUEST_S)
        values = {resource.name: _answer(future) for resource, future in configs.items()}
    except KafkaException as error:
        raise LogUnavailable(f"the broker did not describe its topics: {error}") from error
    return {
        name: TopicState(
            name, count, replicas, {k: v.value for k, v in values[name].items() if v.value is not None}
        )
        for name, (count, replicas) in found.items()
    }


def _create(admin: AdminClient, specs: Sequence[TopicSpec], prefix: str, profile: Profile) -> None:
    if not specs:
        return
    futures = admin.create_topics(
        [
            NewTopic(
                prefix + spec.name,
                num_partitions=spec.partitions,
                replication_factor=placement(spec, profile).replication_factor,
                config=declared_configs(spec, profile),
            )
            for spec in specs
        ],
        request_timeout=_REQUEST_S,
        operation_timeout=_REQUEST_S,
    )
    for name, future in futures.items():
        try:
            _answer(future)
        except KafkaException as error:
            code = error.args[0].code()
            if (
                code == KafkaError.TOPIC_ALREADY_EXISTS
            ):  # another process was quicker; it is checked afterwards
                continue
            if code == KafkaError.INVALID_REPLICATION_FACTOR:
                raise TopicMismatch(
                    f"topic {name} cannot be created: {error.args[0].str()}; a {profile} stack needs that many brokers"
                ) from error
            raise LogUnavailable(f"topic {name} was not created: {error}") from error


def _wait_led(admin: AdminClient, states: Sequence[TopicState], deadline: float) -> None:
    """Returns when every partition of new topics has a leader that serves it. Raises `LogUnavailable` at the deadline.

    Who writes before then may have its first batch turned away and its second one taken: see `Delivery` in
    `rollwire.streams.seams.log_kafka_write`.
    """
    left = {WirePartition(state.name, p) for state in states for p in range(state.partitions)}
    while left:
        asked = admin.list_offsets(dict.fromkeys(left, LatestSpec()), request_timeout=_REQUEST_S)  # type: ignore[no-untyped-call]
        why = ""
        for partition, future in asked.items():
            try:
                future.result(timeout=_REQUEST_S + 5.0)
                left.discard(partition)
            except (KafkaException, TimeoutError) as error:
                why = str(error)
        if left and time.monotonic() > deadline:
            raise LogUnavailable(
                f"{len(left)} partitions of new topics have no leader after {_REQUEST_S:g} s: {why}"
            )
        if left:
            time.sleep(_PAUSE_S)


def _answer(future: Future[Any], *, missing_ok: bool = False) -> Any:
    try:
        return future.result(timeout=_REQUEST_S + 5.0)
    except KafkaException as error:
        if missing_ok and error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
            return None
        raise
    except TimeoutError as error:
        raise LogUnavailable(f"the broker did not answer in {_REQUEST_S:g} s") from error
