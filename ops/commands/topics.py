"""`rollwire topics apply | list | describe`: topics on the broker, from the topic files."""

from __future__ import annotations

from typing import Literal

from cyclopts import App
from rich.console import Console
from rich.table import Table

from rollwire.ops.broker import DEFAULT_DIR, Bootstrap, Folder, Prefix, broker
from rollwire.ops.topics import apply_topics, declared_configs, differences, list_topics
from rollwire.schemas.catalogue import TOPICS, topic_named

app = App(name="topics", help="Create and check the topics.")


@app.command
def apply(
    *,
    profile: Literal["local", "production"] = "local",
    dir: Folder = DEFAULT_DIR,
    bootstrap: Bootstrap = None,
    prefix: Prefix = None,
) -> None:
    """Create the declared topics that are missing, and check those that are there. Nothing that exists is changed.

    Parameters
    ----------
    profile
        production demands replication 3, min.insync.replicas 2 and no unclean election.
    """
    at = broker(dir, bootstrap, prefix)
    applied = apply_topics(at.bootstrap, at.prefix, profile)
    out = Console(highlight=False)
    for name in applied.created:
        out.print(f"created    {name}")
    for name in applied.unchanged:
        out.print(f"unchanged  {name}")


@app.command(name="list")
def list_(*, dir: Folder = DEFAULT_DIR, bootstrap: Bootstrap = None, prefix: Prefix = None) -> int:
    """List the topics under the prefix as the broker has them. Exit code 0 only if all are as declared."""
    at = broker(dir, bootstrap, prefix)
    states = {state.name: state for state in list_topics(at.bootstrap, at.prefix)}
    table = Table(box=None, pad_edge=False)
    for column in ("topic", "partitions", "replicas", "cleanup", "state"):
        table.add_column(column, justify="right" if column in ("partitions", "replicas") else "left")
    fine = True
    for name in sorted({at.prefix + name for name in TOPICS} | set(states)):
        state, spec = states.get(name), TOPICS.get(name.removeprefix(at.prefix))
        if state is None:
            table.add_row(name, "", "", "", "missing")
            fine = False
            continue
        wrong = differences(spec, state, "local") if spec is not None else []
        fine = fine and not wrong
        word = "not declared" if spec is None else "differs" if wrong else "as declared"
        cleanup = state.configs.get("cleanup.policy", "")
        table.add_row(name, str(state.partitions), str(state.replication_factor), cleanup, word)
    Console(highlight=False).print(table)
    return 0 if fine else 1


@app.command
def describe(
    topic: str,
    /,
    *,
    dir: Folder = DEFAULT_DIR,
    bootstrap: Bootstrap = None,
    prefix: Prefix = None,
) -> int:
    """Show what a topic is declared as, what the broker has, and every difference.

    Parameters
    ----------
    topic
        The topic, without the prefix.
    """
    spec = topic_named(topic)
    at = broker(dir, bootstrap, prefix)
    state = next((s for s in list_topics(at.bootstrap, at.prefix) if s.name == at.prefix + topic), None)
    out = Console(highlight=False, soft_wrap=True, markup=False)
    out.print(f"{topic}: {spec.description}")
    out.print(
        f"owner {spec.owner}; producers {', '.join(spec.producers)}; consumers {', '.join(spec.consumers)}"
    )
    out.print(f"key {spec.key}; record {spec.record}; schema {spec.current.file}")
    table = Table(box=None, pad_edge=False)
    for column in ("setting", "declared", "on the broker"):
        table.add_column(column)
    has = {} if state is None else {"partitions": str(state.partitions), **state.configs}
    for name, value in {"partitions": str(spec.partitions), **declared_configs(spec, "local")}.items():
        table.add_row(name, value, has.get(name, "missing"))
    out.print(table)
    wrong = [f"topic {at.prefix}{topic} is missing: `rollwire topics apply` makes it"]
    if state is not None:
        wrong = differences(spec, state, "local")
    for sentence in wrong:
        out.print(sentence)
    return 1 if wrong else 0
