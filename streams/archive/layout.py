"""Where the archive of a run stands in the object store. Pure.

    archive/<name>/heads/<epoch>.json                                     signed heads, one an epoch
    archive/<name>/tables/<epoch>-<sha256>.bin                            the segments of an epoch
    archive/<name>/marks/<epoch>-<sha256>.bin                             the first bytes of each record's digest
    archive/<name>/records/<topic>/<partition>/<first>-<next>-<sha256[:16]>.seg   archived records

Everything is created once and never changed. `<name>` is the prefix of the run's topics without its last dot.
"""

from __future__ import annotations

import re
from typing import Final

from rollwire.streams.seams.log import TopicPartition

ROOT: Final = "archive/"
_HEAD: Final = re.compile(r"(\d{12})\.json")


def heads_folder(name: str) -> str:
    return f"{ROOT}{name}/heads/"


def head_key(name: str, epoch: int) -> str:
    return f"{heads_folder(name)}{epoch:012d}.json"


def epoch_of(name: str, key: str) -> int | None:
    """The epoch that a key in `heads_folder` is for; None: it is no head's."""
    found = _HEAD.fullmatch(key.removeprefix(heads_folder(name)))
    return int(found[1]) if found else None


def table_key(name: str, epoch: int, sha256: str) -> str:
    return f"{ROOT}{name}/tables/{epoch:012d}-{sha256}.bin"


def marks_key(name: str, epoch: int, sha256: str) -> str:
    return f"{ROOT}{name}/marks/{epoch:012d}-{sha256}.bin"


def archived_folder(name: str) -> str:
    """Of all archived records."""
    return f"{ROOT}{name}/records/"


def records_folder(name: str, topic: str) -> str:
    return f"{archived_folder(name)}{topic}/"


def stretch_key(name: str, partition: TopicPartition, first: int, next: int, digest: str) -> str:
    """`digest`: the first 16 hex digits of the object's SHA-256."""
    folder = records_folder(name, partition.topic)
    return f"{folder}{partition.partition}/{first:020d}-{next:020d}-{digest}.seg"
