"""`rollwire weights gc`: what may be deleted from the store, why, and deleting it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated

from cyclopts import Parameter, validators
from rich.console import Console
from rich.table import Table

from rollwire.consumers.weights.census import Books, read_books, take_census
from rollwire.consumers.weights.collect import collect
from rollwire.consumers.weights.retention import Retention, RetentionConfig, Verdict, plan_retention
from rollwire.ops.broker import DEFAULT_DIR, Bootstrap, Folder, Prefix, Registry, broker
from rollwire.ops.commands.weights_access import Bucket
from rollwire.ops.printing import console
from rollwire.ops.stores import bucket_store
from rollwire.schemas.errors import WeightError
from rollwire.streams.seams.clock import SystemClock

Positive = Annotated[int, Parameter(validator=validators.Number(gte=1))]

_SHOWN = 20
_DEFAULTS = RetentionConfig()  # type: ignore[call-arg,unused-ignore]


def gc(
    *,
    apply: Annotated[bool, Parameter(negative=())] = False,
    keep_last: Positive = _DEFAULTS.keep_last,
    keep_every: Positive = _DEFAULTS.keep_every,
    keep: Annotated[tuple[int, ...], Parameter(negative=())] = (),
    sole: Annotated[bool, Parameter(negative=())] = False,
    all: Annotated[bool, Parameter(negative=())] = False,
    bucket: Bucket = None,
    dir: Folder = DEFAULT_DIR,
    bootstrap: Bootstrap = None,
    prefix: Prefix = None,
    schema_registry: Registry = None,
) -> int:
    """Say what may be deleted from the bucket, and why; delete it with --apply.

    Promoted and served versions stay, and everything at or above a lineage's newest checkpoint. So does whatever a version
    that stays is read by. Nothing younger than 24 hours is deleted. Exit code 1: a version that should stay cannot be read.

    Parameters
    ----------
    apply
        Delete. Without it, only the plan is printed.
    keep_last
        Newest versions of each lineage that stay, with every way between them.
    keep_every
        One version in so many stays for good.
    keep
        Versions that stay as well.
    sole
        No other log names objects of this bucket: what is of lineages that this log does not know may go too.
    all
        Print every object, not only the first ones.
    """
    config = RetentionConfig(keep_last=keep_last, keep_every=keep_every)
    store, clock, out = bucket_store(dir, bucket), SystemClock(), console()
    with broker(dir, bootstrap, prefix, schema_registry).log("weights") as log:
        books = read_books(log, keep, traces=True)
        if not books.events:
            raise WeightError("no version is published under this prefix: nothing could be proved")
        plan = plan_retention(take_census(store, books, sole=sole), config, clock.now_us())
        _print_plan(out, books, plan, everything=all)
        if apply:
            done = collect(log, store, books, plan, config, clock)
            spared = f", {done.spared} spared: they are used again" if done.spared else ""
            out.print(f"deleted {done.objects} objects, {done.bytes:,} bytes{spared}")
        elif plan.deletions:
            out.print("nothing is deleted yet: `--apply` does it")
    return 1 if plan.broken else 0


def _print_plan(out: Console, books: Books, plan: Retention, *, everything: bool) -> None:
    reasons: Counter[str] = Counter(one.reasons[0] for one in plan.kept)
    out.print(f"{len(plan.kept)} of {len(books.events)} versions stay: " + _joined(reasons))
    table = Table(box=None, pad_edge=False)
    for column in ("objects", "count", "bytes"):
        table.add_column(column, justify="left" if column == "objects" else "right")
    for fate in ("live", "young", "unproved", "expired", "orphan"):
        of_fate = [verdict.info.size for verdict in plan.verdicts if verdict.fate == fate]
        table.add_row(fate, str(len(of_fate)), f"{sum(of_fate):,}")
    out.print(table)
    _print_verdicts(out, [v for v in plan.verdicts if v.fate == "unproved"], everything=everything)
    _print_verdicts(out, plan.deletions, everything=everything)
    for text in plan.broken:
        out.print(f"wrong: {text}; nothing of its lineage is deleted")


def _print_verdicts(out: Console, verdicts: Sequence[Verdict], *, everything: bool) -> None:
    shown = verdicts if everything else verdicts[:_SHOWN]
    for verdict in shown:
        out.print(
            f"{verdict.fate} {verdict.info.key} ({verdict.info.size:,} bytes): {verdict.proof}",
            soft_wrap=True,
        )
    if len(shown) < len(verdicts):
        out.print(f"... and {len(verdicts) - len(shown)} more: `--all` prints them")


def _joined(reasons: Counter[str]) -> str:
    return "; ".join(f"{count} as {reason}" for reason, count in reasons.most_common()) or "none"
