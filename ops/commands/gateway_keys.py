"""`rollwire gateway-keys add | list | rotate | revoke`: the API keys of feedback gateways, in the object store."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

from rollwire.ops.broker import DEFAULT_DIR, Folder
from rollwire.ops.stores import bucket_store
from rollwire.producers.gateway.access import Scope
from rollwire.producers.gateway.key_store import KeysConfig, change_table, new_secret, read_table
from rollwire.producers.gateway.keys import (
    ApiKey,
    KeyTable,
    NewKey,
    add_key,
    revoke_key,
    rotate_key,
    shown,
)
from rollwire.streams.seams.clock import SystemClock
from rollwire.streams.seams.store_s3 import S3Store

app = App(name="gateway-keys", help="Make, show, rotate and revoke the API keys of feedback gateways.")

Bucket = Annotated[
    str | None, Parameter(name="--bucket", help="Bucket with the keys; by default the stack's own.")
]
In = Annotated[str, Parameter(name="--folder", help="Folder of the bucket with the keys.")]
_FOLDER = KeysConfig().folder


@app.command
def add(
    *,
    tenant: str,
    scope: tuple[Scope, ...] = ("feedback:write",),
    origin: tuple[str, ...] = (),
    rate: float = 1_000.0,
    burst: int = 10_000,
    starts: datetime | None = None,
    expires_in: timedelta | None = None,
    note: str = "",
    folder: In = _FOLDER,
    bucket: Bucket = None,
    dir: Folder = DEFAULT_DIR,
) -> None:
    """Make a key and print it, this once: only a hash of its secret is kept.

    Parameters
    ----------
    tenant
        Whose feedback arrives by this key. A feedback id is one tenant's.
    scope
        feedback:write, feedback:read, metrics; may be given several times.
    origin
        A page that may use the key (https://app.example.com, https://*.example.com); may be given several times. With it
        the key is publishable: it may stand in pages, and it only writes.
    rate
        Events a second, over all gateways.
    burst
        Events at once after a pause.
    starts
        First moment at which the key is valid, UTC unless it says otherwise; by default now.
    expires_in
        Lifetime, such as 90d; by default without end.
    note
        What it is for; shown by list.
    """
    key_id, secret = new_secret()
    now_us = SystemClock().now_us()
    first_us = None if starts is None else _micros(starts)
    new = NewKey(
        tenant=tenant,
        scopes=scope,
        rate=rate,
        burst=burst,
        origins=origin,
        not_before_us=first_us,
        expires_us=None if expires_in is None else (first_us or now_us) + _span_us(expires_in),
        note=note,
    )
    _change(dir, bucket, folder, lambda table: add_key(table, key_id, secret, new, now_us))
    _say(shown(key_id, secret, publishable=bool(origin)), f"key {key_id} of tenant {tenant}")


@app.command
def rotate(
    key_id: str,
    /,
    *,
    overlap: timedelta = timedelta(hours=24),
    folder: In = _FOLDER,
    bucket: Bucket = None,
    dir: Folder = DEFAULT_DIR,
) -> None:
    """Give a key a new secret and print it, this once. The old one works on until the overlap is over.

    Parameters
    ----------
    overlap
        How long both secrets are valid.
    """
    _, secret = new_secret()
    now_us = SystemClock().now_us()
    table = _change(
        dir,
        bucket,
        folder,
        lambda before: rotate_key(before, key_id, secret, now_us, overlap.total_seconds()),
    )
    key = next(key for key in table.keys if key.key_id == key_id)
    _say(
        shown(key_id, secret, publishable=key.publishable), f"the older secret of {key_id} ends in {overlap}"
    )


@app.command
def revoke(key_id: str, /, *, folder: In = _FOLDER, bucket: Bucket = None, dir: Folder = DEFAULT_DIR) -> None:
    """End a key, with all its secrets: gateways refuse it within 5 s."""
    now_us = SystemClock().now_us()
    _change(dir, bucket, folder, lambda table: revoke_key(table, key_id, now_us))
    print(f"{key_id} is revoked", file=sys.stderr)


@app.command(name="list")
def list_(*, folder: In = _FOLDER, bucket: Bucket = None, dir: Folder = DEFAULT_DIR) -> None:
    """List the keys. Secrets cannot be shown: only their hashes are kept."""
    now_us = SystemClock().now_us()
    table = Table(box=None, pad_edge=False)
    for column in ("key", "tenant", "state", "scopes", "events/s", "burst", "secrets", "origins", "note"):
        table.add_column(column, justify="right" if column in ("events/s", "burst", "secrets") else "left")
    for key in read_table(bucket_store(dir, bucket), folder).keys:
        valid = sum(1 for secret in key.secrets if secret.ends_us is None or secret.ends_us > now_us)
        table.add_row(
            key.key_id,
            key.tenant,
            _state(key, now_us),
            " ".join(key.scopes),
            f"{key.rate:g}",
            str(key.burst),
            str(valid),
            " ".join(key.origins),
            key.note,
        )
    # Into a pipe a line is never folded: it goes on to grep or awk.
    Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 240).print(table)


def _state(key: ApiKey, now_us: int) -> str:
    if key.revoked_us is not None:
        return f"revoked {_shown_time(key.revoked_us)}"
    if key.expires_us is not None and key.expires_us <= now_us:
        return f"expired {_shown_time(key.expires_us)}"
    if key.not_before_us is not None and key.not_before_us > now_us:
        return f"from {_shown_time(key.not_before_us)}"
    return "valid" if key.expires_us is None else f"until {_shown_time(key.expires_us)}"


def _change(folder: Path, bucket: str | None, keys: str, change: Callable[[KeyTable], KeyTable]) -> KeyTable:
    store: S3Store = bucket_store(folder, bucket)
    store.ensure_bucket()
    return change_table(store, keys, change, SystemClock().now_us())


def _say(key: str, note: str) -> None:
    """The key alone goes to standard output: `KEY=$(rollwire gateway-keys add --tenant acme)`."""
    print(f"{note}; it is shown this once:", file=sys.stderr)
    print(key)


def _micros(moment: datetime) -> int:
    return round((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1e6)


def _span_us(span: timedelta) -> int:
    return round(span.total_seconds() * 1e6)


def _shown_time(moment_us: int) -> str:
    return datetime.fromtimestamp(moment_us / 1e6, UTC).isoformat(timespec="minutes")
