"""Apache Kafka as one KRaft node: broker and controller in one process, on 127.0.0.1."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Sequence
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from rollwire.ops.stack.info import Choices
from rollwire.ops.stack.ports import HOST
from rollwire.ops.stack.service import Service, last_words
from rollwire.schemas.errors import StackError

MAX_MESSAGE_BYTES = 8 << 20
_FORMAT_DEADLINE_S = 60.0
_LOG4J = """\
status = error
rootLogger.level = warn
rootLogger.appenderRef.console.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{ISO8601} %p %c{1} %m%n
logger.server.name = kafka.server.KafkaRaftServer
logger.server.level = info
"""


def server_properties(
    data: Path, port: int, controller_port: int, proxied: tuple[int, int] | None = None
) -> str:
    """The broker's configuration. `proxied`: port of a second listener, and the port that it advertises.

    A client is told addresses by the listener that it asks: who bootstraps through the proxy stays behind it.
    """
    listeners = {"PLAINTEXT": (port, port), "CONTROLLER": (controller_port, controller_port)}
    if proxied is not None:
        listeners["PROXIED"] = proxied
    settings = {
        "process.roles": "broker,controller",
        "node.id": 1,
        "controller.quorum.bootstrap.servers": f"{HOST}:{controller_port}",
        "controller.listener.names": "CONTROLLER",
        "listeners": ",".join(f"{name}://{HOST}:{own}" for name, (own, _) in listeners.items()),
        "advertised.listeners": ",".join(f"{name}://{HOST}:{told}" for name, (_, told) in listeners.items()),
        "listener.security.protocol.map": ",".join(f"{name}:PLAINTEXT" for name in listeners),
        "inter.broker.listener.name": "PLAINTEXT",
        "log.dirs": data.as_posix(),
        # One node: everything that is three by default has to be one.
        "default.replication.factor": 1,
        "offsets.topic.replication.factor": 1,
        "transaction.state.log.replication.factor": 1,
        "transaction.state.log.min.isr": 1,
        "share.coordinator.state.topic.replication.factor": 1,
        "share.coordinator.state.topic.min.isr": 1,
        # Each partition of these is a folder with open files; 50 of them cost a second at first use.
        "offsets.topic.num.partitions": 4,
        "transaction.state.log.num.partitions": 4,
        "share.coordinator.state.topic.num.partitions": 4,
        # A broker that is paused for longer than its session is fenced when it comes back, and for a moment its
        # partitions have no leader. A transaction whose commit was acknowledged right then is lost: the coordinator
        # takes partitions without a leader for deleted ones and writes no markers (KAFKA-20734; 4.4 has it). So the
        # session is longer than pauses that happen; after a kill -9 the broker is let in again only when it has run out.
        "broker.session.timeout.ms": 9_000,
        "broker.heartbeat.interval.ms": 500,
        # A group of one process has nobody to wait for.
        "group.initial.rebalance.delay.ms": 0,
        "group.min.session.timeout.ms": 1_000,
        # A broker that is told to stop gives its partitions away first. With one broker nobody takes them, and Kafka 4.4 counts
        # a partition without a leader as deleted when it ends a transaction: told committed, its markers are never
        # written, and it hangs for ever (KRaftMetadataCache.getPartitionLeaderEndpoint gives an empty Optional for it).
        "controlled.shutdown.enable": "false",
        # A transaction left open by a killed process holds back readers until it is found.
        "transaction.abort.timed.out.transaction.cleanup.interval.ms": 1_000,
        "message.max.bytes": MAX_MESSAGE_BYTES,
        "replica.fetch.max.bytes": MAX_MESSAGE_BYTES,
        # Topics are declared; a misspelt name has to fail.
        "auto.create.topics.enable": "false",
        "num.network.threads": 2,
        "num.io.threads": 4,
        "background.threads": 4,
        "log.cleaner.threads": 1,
        # The default of 128 MiB is a quarter of the heap.
        "log.cleaner.dedupe.buffer.size": 16 << 20,
    }
    return "".join(f"{key}={value}\n" for key, value in settings.items())


def kafka_service(java: Path, jars: Path, folder: Path, choices: Choices, heap_mib: int) -> Service:
    """`choices` must have both of Kafka's ports."""
    if choices.kafka_port is None or choices.controller_port is None:
        raise StackError("Kafka's ports have not been chosen")
    bootstrap = f"{HOST}:{choices.kafka_port}"
    properties, log4j, data = folder / "server.properties", folder / "log4j2.properties", folder / "data"
    # One collector thread on a heap this small; G1's threads would compete with the processes beside it.
    flags = ["-XX:+UseSerialGC", "-Xshare:auto", f"-Dlog4j2.configurationFile={log4j}", "-cp", f"{jars}/*"]
    proxied = None
    if choices.kafka_proxied_port is not None and choices.kafka_proxy_port is not None:
        proxied = (choices.kafka_proxied_port, choices.kafka_proxy_port)
    text = server_properties(data, choices.kafka_port, choices.controller_port, proxied)

    def prepare() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        properties.write_text(text)
        log4j.write_text(_LOG4J)
        if not (data / "meta.properties").exists():
            _format(
                [str(java), "-XX:TieredStopAtLevel=1", *flags],
                properties,
                choices.cluster_id,
                folder / "format.log",
            )

    # A client of this kind reports each refused connection on stderr unless it is given a logger.
    silent = logging.getLogger("rollwire.ops.stack.kafka")
    silent.addHandler(logging.NullHandler())
    silent.propagate = False
    client = AdminClient(
        {
            "bootstrap.servers": bootstrap,
            "reconnect.backoff.ms": 20,
            "reconnect.backoff.max.ms": 100,
            "log_level": 0,
        },
        logger=silent,
    )

    def ask() -> bool:
        try:
            answer = client.list_topics(timeout=1.0)
        except KafkaException:
            return False
        if answer.cluster_id != choices.cluster_id:
            raise StackError(
                f"the broker at {bootstrap} belongs to another cluster ({answer.cluster_id}): end it, then try again"
            )
        return bool(answer.brokers)  # empty while the broker is still fenced

    heap = [f"-Xmx{heap_mib}m", f"-Xms{min(heap_mib, 128)}m", "-XX:+ExitOnOutOfMemoryError"]
    return Service(
        "kafka", bootstrap, [str(java), *heap, *flags, "kafka.Kafka", str(properties)], prepare, ask
    )


def _format(java: Sequence[str], properties: Path, cluster_id: str, log: Path) -> None:
    command = [
        *java,
        "kafka.tools.StorageTool",
        "format",
        "--standalone",
        "-t",
        cluster_id,
        "-c",
        str(properties),
    ]
    with log.open("w") as out:
        try:
            done = subprocess.run(
                command,
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                timeout=_FORMAT_DEADLINE_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise StackError(
                f"Kafka's storage was not formatted within {_FORMAT_DEADLINE_S:.0f} s (log: {log})"
            ) from None
    if done.returncode != 0:
        raise StackError(f"Kafka's storage could not be formatted: {last_words(log)} (log: {log})")
