"""The demo's last words: what was checked, what it came to, where to look next."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from rollwire.ops.broker import DEFAULT_DIR
from rollwire.ops.demo.checks import Check
from rollwire.ops.demo.judge import Outcome


def print_checks(checks: Sequence[Check], console: Console) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    for check in checks:
        mark = "[green]held[/]" if check.ok else "[bold red]broken[/]"
        table.add_row(mark, check.name, check.text)
    console.print()
    console.print(table)


def print_next(look: Sequence[tuple[str, str]], console: Console) -> None:
    """Commands with what they show."""
    width = max(len(command) for command, _ in look)
    console.print("\n[bold]Look next[/]", highlight=False)
    for command, what in look:
        console.print(f"  {command:<{width}}  {what}", highlight=False, markup=False, soft_wrap=True)
    console.print()


def print_summary(outcome: Outcome, console: Console | None = None) -> None:
    console = console or Console()
    print_checks(outcome.checks, console)
    facts = outcome.facts
    kept = sum(n for (fate, _), n in facts.fates.items() if fate == "kept")
    totals = (
        f"{facts.rollouts:,} rollouts, {facts.sampled_tokens:,} sampled tokens, {kept:,} of "
        f"{sum(facts.fates.values()):,} groups trained on, {facts.versions} versions, {outcome.wall_s:.0f} s"
    )
    lines = [totals]
    if facts.delta_pct is not None and facts.pause_ms_p50 is not None:
        lines.append(
            f"delta {facts.delta_pct:.1f} % of the state at learning rate {facts.learning_rate:g}, "
            f"swap pause {facts.pause_ms_p50:.1f} ms (median)"
        )
    if facts.mismatch_p99 is not None and facts.mismatch_p99_no_replay is not None:
        lines.append(
            f"mismatch p99 {facts.mismatch_p99:.2g} nats with routing replay, {facts.mismatch_p99_no_replay:.2g} without; "
            f"{facts.routes_differing or 0:.2%} of routes differ"
        )
    console.print("\n" + "\n".join(lines), highlight=False)
    where = "" if outcome.dir == DEFAULT_DIR else f" --dir {outcome.dir}"
    look = (
        (str(outcome.picture), "the curves"),
        (f"rollwire up{where}", "the log is kept; then"),
        (f"rollwire cat train-steps{where} --max 1", "what a step is"),
        (f"rollwire weights ls{where}", "every version, and what it costs to store"),
        (f"rollwire ledger{where}", "every topic's account"),
        (f"rollwire demo{where} --continue --steps {outcome.settings.steps + 50}", "go on from here"),
        (
            "rollwire demo --max-lag 0, --no-ratio, --control",
            "what the filter, the ratio and the signal are for",
        ),
    )
    print_next(look, console)
