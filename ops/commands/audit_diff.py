"""`rollwire audit diff`: two outcomes of one history, as replays wrote them or as it was."""

from __future__ import annotations

from rollwire.ops.auditing import JsonFile, auditing
from rollwire.ops.broker import DEFAULT_DIR, Bootstrap, Folder, Registry
from rollwire.ops.history import open_history
from rollwire.ops.printing import console, table, write_json
from rollwire.schemas.errors import ConfigError
from rollwire.streams.replay.diff import Diff, Moved, Outcomes, compare, outcomes

_SHOWN = 20


def diff(
    prefix_a: str,
    prefix_b: str,
    /,
    *,
    json: JsonFile = None,
    dir: Folder = DEFAULT_DIR,
    bootstrap: Bootstrap = None,
    schema_registry: Registry = None,
) -> int:
    """Compare two outcomes: groups kept, drops by reason, rewards, batches. Exit codes: 0 equal, 1 they differ, 2 could not run.

    Only what both ran is compared: of a replay of `pack` alone, what `pack` decides.

    Parameters
    ----------
    prefix_a
        Prefix of the one's topics: the history's, or a replay's.
    prefix_b
        Of the other's.
    """
    with auditing():
        if prefix_a == prefix_b:
            raise ConfigError(f"both are {prefix_a!r}: name two prefixes")
        found: list[Outcomes] = []
        for prefix in (prefix_a, prefix_b):
            with open_history(
                "audit-diff", dir=dir, bootstrap=bootstrap, prefix=prefix, schema_registry=schema_registry
            ) as past:
                found.append(outcomes(past.log))
        compared = compare(*found)
        write_json(json, compared)
        show(compared, prefix_a, prefix_b)
        return 0 if compared.equal else 1


def show(compared: Diff, a: str, b: str) -> None:
    out = console()
    out.print(f"compared: what {', '.join(compared.processors) or 'nobody'} decided")
    counts = table("", a, b, "both")
    counts.add_row("groups kept", f"{compared.kept_a:,}", f"{compared.kept_b:,}", f"{compared.kept_both:,}")
    if compared.plans is not None:
        plans = compared.plans
        counts.add_row("plans", f"{plans.a:,}", f"{plans.b:,}", f"{plans.same:,}")
        counts.add_row("plans of the same groups", "", "", f"{plans.same_groups:,}")
        counts.add_row("sequences", f"{plans.sequences_a:,}", f"{plans.sequences_b:,}", "")
        counts.add_row("tokens", f"{plans.tokens_a:,}", f"{plans.tokens_b:,}", "")
    if compared.rewards_a or compared.rewards_b:
        same = compared.rewards_a - sum(m.a != "none" for m in compared.rescored)
        counts.add_row("rewards", f"{compared.rewards_a:,}", f"{compared.rewards_b:,}", f"{same:,}")
        counts.add_row("reward, mean", _number(compared.reward_mean_a), _number(compared.reward_mean_b), "")
    out.print(counts)
    fates = table("decided by", "fate", "reason", a, b, "difference")
    for row in compared.rows:
        more = f"{row.b - row.a:+,}" if row.b != row.a else ""
        fates.add_row(row.decided_by, row.fate, row.reason, f"{row.a:,}", f"{row.b:,}", more)
    out.print(fates)
    if compared.plans is not None and compared.plans.first is not None:
        out.print(f"plans have other groups from step {compared.plans.first} on")
    for name, moved in (("groups with another fate", compared.moved), ("rewards", compared.rescored)):
        _show_moved(name, moved, a, b)
    out.print("equal" if compared.equal else "they differ")


def _show_moved(name: str, moved: tuple[Moved, ...], a: str, b: str) -> None:
    if not moved:
        return
    out = console()
    rows = table(f"{len(moved):,} {name}", a, b)
    for one in moved[:_SHOWN]:
        rows.add_row(one.id, one.a, one.b)
    out.print(rows)
    if len(moved) > _SHOWN:
        out.print(f"and {len(moved) - _SHOWN:,} more: --json has all")


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"
