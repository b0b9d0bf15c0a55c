"""`rollwire audit ...`: one file a question, imported when it is asked."""

from __future__ import annotations

from typing import Final

from cyclopts import App

app = App(
    name="audit",
    help="Explain, verify, rebuild and export the history of a run. Exit codes: 0 clean, 1 findings, 2 could not run.",
    result_action="return_value",
)

# fmt: off
_COMMANDS: Final[tuple[tuple[str, str, str], ...]] = (
    ("replay", "rollwire.ops.commands.audit_replay:replay", "Decide the history again by its recorded cuts; name what differs."),
    ("diff", "rollwire.ops.commands.audit_diff:diff", "Compare two outcomes of one history: fates, rewards, plans."),
    ("seal", "rollwire.ops.commands.audit_seal:seal", "Seal what was written: a signed head in the store for every epoch."),
    ("verify", "rollwire.ops.commands.audit_verify:verify", "Hold log and archive against what was sealed."),
    ("prove", "rollwire.ops.commands.audit_prove:prove", "Prove that one event was sealed; check such a proof."),
    ("lineage", "rollwire.ops.commands.audit_lineage:lineage", "Explain a version; follow an event or a person to the versions they reached."),
    ("rebuild", "rollwire.ops.commands.audit_rebuild:rebuild", "Make a version anew, two independent ways; compare it bit for bit."),
    ("ledger", "rollwire.ops.commands.audit_ledger:ledger", "Add up every topic by the hour; name what is missing."),
    ("export", "rollwire.ops.commands.audit_export:export", "Write the history as Parquet, once and resumable, to a folder or S3."),
    ("query", "rollwire.ops.commands.audit_query:query", "Ask such a folder: the commonest questions, or any in SQL."),
)
# fmt: on

for _name, _target, _help in _COMMANDS:
    app.command(_target, name=_name, help=_help)
