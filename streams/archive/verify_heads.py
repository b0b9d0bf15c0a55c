"""Whether the heads of a run are what was signed: numbering, signatures, the line from one to the next, and what an auditor saw
of them before. Pure.

Numbers say that none was taken out, `previous` that none was exchanged, and what was seen before that the newest ones were
not taken away: nothing in the store itself could say that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rollwire.schemas.errors import AuditError, KeyUnknown, SignatureInvalid
from rollwire.streams.archive.heads import Head, read_head
from rollwire.streams.archive.sealed import StoredHead, Trusted
from rollwire.streams.findings import Finding, Kind

Pinned = Mapping[int, str]
"""Heads that were seen before, or are kept elsewhere: epoch to the SHA-256 of the object."""


class CheckedHeads(NamedTuple):
    heads: tuple[Head, ...]  # those that are right by themselves, ascending
    findings: tuple[Finding, ...]
    newest: StoredHead | None  # of the heads that are right


def check_heads(stored: Sequence[StoredHead], name: str, trusted: Trusted, pinned: Pinned) -> CheckedHeads:
    """`stored`: ascending by epoch."""
    findings: list[Finding] = []
    heads: list[Head] = []
    newest: StoredHead | None = None
    before: StoredHead | None = None
    right = True  # the one before
    for one in stored:
        expected = 1 if before is None else before.epoch + 1
        if one.epoch != expected:
            findings.append(_missing(expected, one.epoch))
        head = _read(one, name, trusted, findings)
        if head is not None:
            neighbours = one.epoch == expected and right
            if neighbours and head.previous != ("" if before is None else before.digest):
                findings.append(_forked(one, head, before))
            if neighbours and heads and (wrong := _shrunk(heads[-1], head)) is not None:
                findings.append(_finding(Kind.HEAD_INVALID, one.epoch, f"{one.key}: {wrong}"))
            heads.append(head)
            newest = one
        before, right = one, head is not None
    findings += _against(stored, pinned)
    if not stored and not pinned:
        findings.append(
            Finding(
                kind=Kind.HEAD_MISSING,
                where="head 1",
                detail=f"nothing of {name!r} is sealed in this bucket: `rollwire audit seal` or `rollwire archive` seals",
            )
        )
    return CheckedHeads(tuple(heads), tuple(findings), newest)


def _read(one: StoredHead, name: str, trusted: Trusted, findings: list[Finding]) -> Head | None:
    try:
        head = read_head(one.data, trusted)
    except KeyUnknown as error:
        findings.append(
            _finding(Kind.KEY_UNKNOWN, one.epoch, f"{one.key}: {error}: name the key if it is one of yours")
        )
        return None
    except SignatureInvalid as error:
        findings.append(_finding(Kind.SIGNATURE_INVALID, one.epoch, f"{one.key}: {error}"))
        return None
    except AuditError as error:
        findings.append(_finding(Kind.HEAD_INVALID, one.epoch, f"{one.key}: {error}"))
        return None
    if head.name != name or head.epoch != one.epoch:
        what = f"this is the head of {head.name!r}, epoch {head.epoch}, put in another's place"
        findings.append(_finding(Kind.HEAD_INVALID, one.epoch, f"{one.key}: {what}"))
        return None
    return head


def _shrunk(before: Head, head: Head) -> str | None:
    """What a later head takes back, which none may."""
    now = {p.at: p for p in head.partitions}
    for was in before.partitions:
        at = now.get(was.at)
        place = f"{was.topic}[{was.partition}]"
        if at is None:
            return f"{place}, sealed in epoch {before.epoch}, is not in it"
        if (at.begin, at.next >= was.next, at.records >= was.records, at.segments >= was.segments) != (
            was.begin,
            True,
            True,
            True,
        ):
            return f"{place} has less in it than in epoch {before.epoch}"
    return None


def _against(stored: Sequence[StoredHead], pinned: Pinned) -> list[Finding]:
    found: list[Finding] = []
    there = {one.epoch: one for one in stored}
    newest = max(there, default=0)
    if gone := sorted(epoch for epoch in pinned if epoch > newest):
        found.append(
            _finding(
                Kind.HEAD_ROLLED_BACK,
                gone[-1],
                f"it was seen before, the newest in the store is {newest}: what was sealed since was taken away",
            )
        )
    for epoch, sha256 in sorted(pinned.items()):
        one = there.get(epoch)
        if one is not None and one.digest != sha256:
            found.append(
                _finding(
                    Kind.HEAD_FORKED, epoch, f"{one.key} has SHA-256 {one.digest}; {sha256} was seen before"
                )
            )
    return found


def _missing(first: int, next: int) -> Finding:
    those = f"head {first}" if next == first + 1 else f"heads {first} to {next - 1}"
    return Finding(kind=Kind.HEAD_MISSING, where=those, detail=f"the store has head {next}, and not {those}")


def _forked(one: StoredHead, head: Head, before: StoredHead | None) -> Finding:
    if before is None:
        detail = f"{one.key} is the first, and names {head.previous} as the one before"
    else:
        detail = (
            f"{one.key} follows a head with SHA-256 {head.previous}; the one in the place of epoch {before.epoch} has "
            f"{before.digest}: one of the two is not what was sealed"
        )
    return _finding(Kind.HEAD_FORKED, one.epoch if before is None else before.epoch, detail)


def _finding(kind: Kind, epoch: int, detail: str) -> Finding:
    return Finding(kind=kind, where=f"head {epoch}", detail=detail)
