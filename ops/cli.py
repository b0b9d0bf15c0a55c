"""The `rollwire` command: a table of commands and the process edge.

A command is a function in `rollwire/ops/commands/`, one file a group, and a line in `COMMANDS`. Its module is imported when the
command runs, so that `rollwire --help` and `rollwire status` need neither torch nor a client library.

Exit codes: 0 done; 1 failed, with a traceback where the cause is a fault of ours; 2 wrong use, or something on this
machine is missing; 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import NamedTuple

from cyclopts import App

from rollwire.schemas.errors import RollwireError


class Command(NamedTuple):
    name: str
    target: str  # "module:function"; a function's parameters are its options (cyclopts)
    help: str  # said here too, so that the list of commands imports none of them
    group: str


STACK, LOOK, RUN = "Local stack", "Look", "Run"

# fmt: off
COMMANDS: tuple[Command, ...] = (
    Command("up", "rollwire.ops.commands.stack:up", "Start Kafka, an S3 server and Redis here, or use yours.", STACK),
    Command("down", "rollwire.ops.commands.stack:down", "End what `up` started; the log and the buckets stay.", STACK),
    Command("status", "rollwire.ops.commands.stack:status", "Show the services: pid, address, uptime, memory.", STACK),
    Command("logs", "rollwire.ops.commands.stack:logs", "Print the logs of the services.", STACK),
    Command("topics", "rollwire.ops.commands.topics:app", "Create and check the topics.", LOOK),
    Command("schemas", "rollwire.ops.commands.schemas:app", "Compare schemas with released ones; export them.", LOOK),
    Command("cat", "rollwire.ops.commands.cat:cat", "Print the events of a topic as JSON lines.", LOOK),
    Command("weights", "rollwire.ops.commands.weights:app", "List, show, verify, export and collect weight versions; go back to one.", LOOK),
    Command("fleet", "rollwire.ops.commands.fleet:app", "Keep a replica at a version; pin, promote; show who serves what.", RUN),
    Command("audit", "rollwire.ops.commands.audit:app", "Explain, verify, rebuild and export the history of a run.", LOOK),
    Command("replay", "rollwire.ops.commands.replay:replay", "Run processors over a history again with changed settings: what if?", LOOK),
    Command("archive", "rollwire.ops.commands.archive:archive", "Seal the history of a run and copy it into the store, to outlive retention.", RUN),
    Command("ledger", "rollwire.ops.commands.ledger:ledger", "Add up every topic; name what is missing.", LOOK),
    Command("dlq", "rollwire.ops.commands.dlq:app", "List, show, replay and drop what was refused.", LOOK),
    Command("erase", "rollwire.ops.commands.subject:erase", "Erase a person: their keys, what is cached of them; say what it reached.", RUN),
    Command("subject", "rollwire.ops.commands.subject:app", "Export all that log and archive hold of a person.", LOOK),
    Command("bench", "rollwire.ops.commands.bench:bench", "Measure parts of Rollwire on this machine.", RUN),
    Command("simulate", "rollwire.ops.commands.simulate:simulate", "Run the processors in memory under seeded faults; check the laws.", RUN),
    Command("gateway", "rollwire.ops.commands.gateway:gateway", "Take user feedback over HTTP into the log.", RUN),
    Command("gateway-keys", "rollwire.ops.commands.gateway_keys:app", "Make, show, rotate and revoke the API keys of feedback gateways.", RUN),
    Command("feedback", "rollwire.ops.commands.feedback:app", "Send user feedback to a gateway.", RUN),
    Command("attribute", "rollwire.ops.commands.attribute:attribute", "Join feedback to live answers, one reward each, by rules.", RUN),
    Command("fetch", "rollwire.ops.commands.stack:fetch", "Fetch the jars that `up` needs, once.", STACK),
    Command("demo", "rollwire.ops.commands.demo:demo", "Run the whole loop on this machine, on one page.", RUN),
    Command("chaos", "rollwire.ops.commands.chaos:app", "Kill and pause processes and the broker; count what is lost or doubled.", RUN),
    Command("stub-engine", "rollwire.ops.commands.stub_engine:stub_engine", "Answer vLLM's or SGLang's HTTP calls with the built-in policy.", RUN),
    Command("serve-at", "rollwire.ops.commands.serve_at:serve_at", "Serve an old version: a replica pinned to the past.", RUN),
    Command("run", "rollwire.ops.commands.run:run", "Run one process of a run: fleet, assemble, pack, trainer, ...", RUN),
)
# fmt: on


def build_app(called: str | None = None) -> App:
    """The command-line application, with every command of `COMMANDS` registered by name only. `called`: the one that is
    going to run; it is imported anyway, so its help is its own."""
    application = App(
        name="rollwire",
        help="The event-sourced data plane for RL post-training of language models.",
        version=lambda: metadata.version("rollwire"),
        help_format="markdown",  # paragraphs fit the terminal
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    for command in COMMANDS:
        told = {} if command.name == called else {"help": command.help}
        application.command(command.target, name=command.name, group=command.group, **told)
    return application


def run(tokens: Sequence[str]) -> int:
    """Runs one command line; the exit code. An error of ours is one sentence, any other exception goes on up."""
    try:
        result = build_app(tokens[0] if tokens else None)(list(tokens))
    except RollwireError as error:
        sys.stderr.write(f"rollwire: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("rollwire: interrupted\n")
        return 130
    except BrokenPipeError:
        # The reader of our output has gone (`rollwire logs | head`): nothing is left to say, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return result if isinstance(result, int) else 0


def main() -> None:
    """Entry point of the console script. Logs go to standard error: standard output is the command's answer."""
    tokens = sys.argv[1:]
    if tokens and not {"--help", "-h", "--version"} & set(tokens):  # these answer at once, and log nothing
        from rollwire.ops.logs import configure_logging

        configure_logging()
    sys.exit(run(tokens))
