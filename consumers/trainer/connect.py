"""How a rank's own process opens the log and the store of a live stack (see `ranks.Connect`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rollwire.schemas.codec import use_registry
from rollwire.schemas.errors import ConfigError
from rollwire.streams.seams.keys import KeyStore
from rollwire.streams.seams.keys_cached import CachedKeys
from rollwire.streams.seams.keys_store import StoredKeys
from rollwire.streams.seams.log import Log
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.seams.master_key import LocalMasterKey
from rollwire.streams.seams.registry_confluent import ConfluentRegistry
from rollwire.streams.seams.store import ObjectStore
from rollwire.streams.seams.store_s3 import S3Store


@dataclass(frozen=True)
class LiveStack:
    """Calling it connects; it goes to another process as it is, unlike a connection."""

    bootstrap: str
    prefix: str
    endpoint: str | None
    bucket: str
    access_key: str | None
    secret_key: str | None
    region: str = "us-east-1"
    registry_url: str | None = None

    def __call__(self) -> tuple[Log, ObjectStore]:
        if self.registry_url is not None:  # the rank's process is a new one
            use_registry(ConfluentRegistry(self.registry_url, self.prefix))
        return (
            KafkaLog(self.bootstrap, prefix=self.prefix, client_id="rollwire-trainer-rank"),
            S3Store(self.endpoint, self.bucket, self.access_key, self.secret_key, self.region),
        )


@dataclass(frozen=True)
class LiveKeys:
    """Calling it opens the key store; the master key itself does not travel, its file's name does."""

    master_key_file: Path
    endpoint: str | None
    bucket: str
    access_key: str | None
    secret_key: str | None
    region: str = "us-east-1"

    def __call__(self) -> KeyStore:
        """Raises `ConfigError` where the master key cannot be read."""
        try:
            master = LocalMasterKey(self.master_key_file.read_bytes())
        except OSError as error:
            raise ConfigError(
                f"the master key {self.master_key_file} cannot be read: {error.strerror}"
            ) from None
        store = S3Store(self.endpoint, self.bucket, self.access_key, self.secret_key, self.region)
        return CachedKeys(StoredKeys(store, master))
