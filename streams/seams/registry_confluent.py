"""A schema registry through confluent-kafka's own client: Confluent's, Apicurio's (`/apis/ccompat/v7`), Karapace's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar

from rollwire.schemas.errors import EnvironmentMissing, RegistryError, RegistryUnavailable

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import SchemaRegistryClient

REQUEST_TIMEOUT_S: Final = 5.0
RETRIES: Final = 2
"""Of one request, so that a call ends within `REQUEST_TIMEOUT_S * (RETRIES + 1)` and the waits between (1 s each)."""

_T = TypeVar("_T")


class ConfluentRegistry:
    """Implements `rollwire.schemas.framing.SchemaRegistry`. Subjects are `<prefix><topic>-value`."""

    def __init__(self, url: str, prefix: str = "rollwire.") -> None:
        """`mock://<name>` is a registry inside this process (confluent-kafka's own), for tests.

        Raises `EnvironmentMissing` where the `registry` extra is not installed.
        """
        try:
            import httpx2
            from confluent_kafka.schema_registry import SchemaRegistryClient, SchemaRegistryError
        except ImportError as error:
            raise EnvironmentMissing(
                f"a schema registry needs more packages ({error}): install rollwire[registry]"
            ) from None
        self._unreachable = httpx2.HTTPError
        self._refused = SchemaRegistryError
        self._url = url
        self._prefix = prefix
        self._heads: dict[tuple[str, str], bytes] = {}
        self._lock = threading.Lock()
        self._client: SchemaRegistryClient = SchemaRegistryClient.new_client(
            {
                "url": url,
                "timeout": REQUEST_TIMEOUT_S,
                "max.retries": RETRIES,
                "retries.wait.ms": 200,
                "retries.max.wait.ms": 1_000,
            }
        )

    def head(self, topic: str, schema: str) -> bytes:
        known = self._heads.get((topic, schema))
        if known is not None:
            return known
        from confluent_kafka.schema_registry import Schema
        from confluent_kafka.schema_registry.serde import SchemaId

        subject = f"{self._prefix}{topic}-value"  # TopicNameStrategy
        what = f"register a schema under {subject}"
        with self._lock:
            schema_id = self._answer(
                what, lambda: self._client.register_schema(subject, Schema(schema, "AVRO"))
            )
        head = SchemaId("AVRO", schema_id).id_to_bytes()
        self._heads[topic, schema] = head
        return head

    def schema_of(self, schema_id: int) -> str | None:
        try:
            found = self._answer(f"give schema {schema_id}", lambda: self._client.get_schema(schema_id))
        except _Unknown:
            return None
        return found.schema_str if found.schema_type == "AVRO" else None

    def close(self) -> None:
        """Closes the connections. A process that uses a registry to its end need not."""
        self._client.close()

    def _answer(self, what: str, ask: Callable[[], _T]) -> _T:
        try:
            return ask()
        except self._unreachable as error:
            raise RegistryUnavailable(
                f"{self._url} did not {what}: {error or type(error).__name__}"
            ) from error
        except self._refused as error:
            if error.http_status_code == 404:
                raise _Unknown(f"{self._url} did not {what}: {error}") from error
            kind = RegistryUnavailable if error.http_status_code >= 500 else RegistryError
            raise kind(f"{self._url} did not {what}: {error}") from error


class _Unknown(RegistryError):
    """The registry has no such thing."""
