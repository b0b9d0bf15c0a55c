"""What stands before a value's body and names its schema. Two framings, told apart by the first byte.

Single-object encoding: `C3 01`, the 8-byte little-endian CRC-64-AVRO fingerprint of the schema; it needs no registry.
Confluent's wire format: `00`, the 4-byte big-endian id that a schema registry gave.

Sources: Apache Avro specification, "Single-object encoding"; Confluent documentation, "Wire format".
"""

from __future__ import annotations

from typing import Final, Protocol

MARKER: Final = b"\xc3\x01"
PREFIX_BYTES: Final = 10  # marker and fingerprint
CONFLUENT_MAGIC: Final = 0
CONFLUENT_BYTES: Final = 5  # magic byte and id


class SchemaRegistry(Protocol):
    """A schema registry that speaks Confluent's API. Thread-safe.

    Both raise `RegistryUnavailable` where it does not answer in time and `RegistryError` where it refuses. Neither is a
    fault of an event: nothing goes to `dead-letters` because a registry is away.
    """

    def head(self, topic: str, schema: str) -> bytes:
        """The bytes before the body of a value under `schema` (its JSON text) on `topic` (without the prefix).

        Registers the schema where the registry does not know it.
        """
        ...

    def schema_of(self, schema_id: int) -> str | None:
        """The JSON text of the Avro schema with this id; None where there is none."""
        ...


def confluent_id(value: bytes) -> int | None:
    """The schema id of a value in Confluent's wire format; None for any other value."""
    if len(value) < CONFLUENT_BYTES or value[0] != CONFLUENT_MAGIC:
        return None
    return int.from_bytes(value[1:CONFLUENT_BYTES], "big")
