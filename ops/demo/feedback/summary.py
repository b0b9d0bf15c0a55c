"""The feedback demo's last words: what was checked, what it came to, where to look next."""

from __future__ import annotations

from rich.console import Console

from rollwire.ops.broker import DEFAULT_DIR
from rollwire.ops.demo.feedback.checks import points
from rollwire.ops.demo.feedback.run import FeedbackOutcome
from rollwire.ops.demo.page import percent
from rollwire.ops.demo.summary import print_checks, print_next


def print_feedback_summary(outcome: FeedbackOutcome, console: Console | None = None) -> None:
    console = console or Console()
    print_checks(outcome.checks, console)
    facts = outcome.facts
    before, after = facts.before_versions, facts.after_versions
    lines = [
        (
            f"likes {percent(facts.likes_before)} of the first {facts.likes_of} answers (versions {before[0]} to {before[1]}), "
            f"{percent(facts.likes_after)} of the last ones (versions {after[0]} to {after[1]}): {points(facts.gain)}"
        ),
        (
            f"{facts.answers:,} answers, {facts.clicks:,} clicks on {facts.clicked:,} of them, {facts.trained:,} trained on, "
            f"{facts.versions} versions, {outcome.wall_s:.0f} s"
        ),
    ]
    console.print("\n" + "\n".join(lines), highlight=False)
    where = "" if outcome.dir == DEFAULT_DIR else f" --dir {outcome.dir}"
    prefix = f" --prefix {outcome.settings.prefix}"
    print_next(
        (
            (str(outcome.folder / "rules.toml"), "what a click is worth"),
            (f"rollwire up{where}", "the log is kept; then"),
            (f"rollwire cat user-feedback{where}{prefix} --max 1", "what a click is"),
            (f"rollwire cat train-steps{where}{prefix} --max 1", "coverage, by step"),
            (
                f"rollwire erase --subject person-1 --tenant {outcome.settings.serving.tenant}{where}{prefix}",
                "how far one person's data went, and its end",
            ),
            (
                f"rollwire demo --feedback{where} --continue --steps {outcome.settings.steps + 20}",
                "go on from here",
            ),
            ("rollwire demo --feedback --control", "what shuffled advantages do"),
        ),
        console,
    )
