"""`rollwire cat TOPIC`: events, readably. Stock tools cannot decode them."""

from __future__ import annotations

import sys
import threading
from functools import partial
from typing import Annotated

from cyclopts import Parameter

from rollwire.ops.broker import DEFAULT_DIR, Bootstrap, Folder, Prefix, Registry
from rollwire.ops.cat import Query, parse_where
from rollwire.ops.cat import cat as read
from rollwire.ops.history import open_reading
from rollwire.ops.keys import open_keys
from rollwire.ops.looking import Looking
from rollwire.ops.readable import json_line
from rollwire.ops.stack import read_stack


def cat(
    topic: str,
    /,
    *,
    where: Annotated[tuple[str, ...], Parameter(name=["--where", "-w"], negative=())] = (),
    key: str | None = None,
    partition: int | None = None,
    start: Annotated[str, Parameter(name="--from", allow_leading_hyphen=True)] = "beginning",
    limit: Annotated[int | None, Parameter(name=["--max", "-n"])] = None,
    follow: Annotated[bool, Parameter(name=["--follow", "-f"], negative=())] = False,
    open_seals: Annotated[bool, Parameter(name="--open", negative=())] = False,
    dir: Folder = DEFAULT_DIR,
    bootstrap: Bootstrap = None,
    prefix: Prefix = None,
    schema_registry: Registry = None,
) -> None:
    """Print the events of a topic, one JSON object a line. Arrays are shown as numbers, dead letters are opened.

    What retention took from the log comes from the archive, where the run has one.

    What is encrypted per person is shown as "sealed", or as "erased" once its key was destroyed.

    Parameters
    ----------
    topic
        The topic, without the prefix: rollouts, rewards, dead-letters, ...
    where
        field=value, as in `--where finish_reason=length --where spans.version=3`; all must hold.
    key
        Only records with this key.
    partition
        Only this partition.
    start
        beginning, end, an offset, or -n for the last n of each partition.
    limit
        End after this many.
    follow
        Go on with what is written from now on, until Ctrl-C.
    open_seals
        Show sealed content in the clear. Needs the stack's key store and master key.
    """
    keys = partial(open_keys, read_stack(dir), ttl_s=1.0) if open_seals else None
    query = Query(topic, parse_where(where), key, partition, start, limit, follow)
    with open_reading(
        "cat", dir=dir, bootstrap=bootstrap, prefix=prefix, schema_registry=schema_registry
    ) as log:
        try:
            for shown in read(log, query, threading.Event(), Looking(log, keys)):
                sys.stdout.write(json_line(shown) + "\n")
                if follow:
                    sys.stdout.flush()
        except KeyboardInterrupt:
            if not follow:  # Ctrl-C is how following ends
                raise
