"""The store of a stack, as commands and roles open it."""

from __future__ import annotations

from pathlib import Path

from rollwire.ops.stack import StackInfo, read_stack
from rollwire.streams.seams.store_s3 import S3Store


def stack_store(stack: StackInfo, bucket: str | None, *, timeout_s: float | None = None) -> S3Store:
    """None: the stack's own bucket. Nothing is asked or made yet. `timeout_s` bounds each call, for who polls."""
    where = (stack.s3_endpoint, bucket or stack.bucket, stack.access_key, stack.secret_key, stack.region)
    if timeout_s is None:
        return S3Store(*where)
    return S3Store(*where, timeout_s=timeout_s, read_timeout_s=timeout_s)


def bucket_store(folder: Path, bucket: str | None) -> S3Store:
    """Of the local stack whose state is in `folder`. Raises `StackError` where none is recorded."""
    return stack_store(read_stack(folder), bucket)
