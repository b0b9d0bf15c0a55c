"""`rollwire chaos ...`: processes and the broker are killed and paused under a known load, and nothing may be lost or doubled."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter, validators

Json = Annotated[Path | None, Parameter(name="--json", help="Write the figures there, in the common form.")]

app = App(
    name="chaos",
    help="Kill and pause processes and the broker under a known load; count what is lost or doubled.",
)


@app.command
def bounce(
    *,
    rollouts: Annotated[int, Parameter(validator=validators.Number(gte=400))] = 20_000,
    full: Annotated[bool, Parameter(negative="")] = False,
    seconds: Annotated[float | None, Parameter(validator=validators.Number(gte=20))] = None,
    faults: Annotated[int | None, Parameter(validator=validators.Number(gte=1))] = None,
    seed: int = 0,
    dir: Annotated[
        Path | None,
        Parameter(help="Use the stack that runs there, under a new prefix, and leave it running."),
    ] = None,
    keep: Annotated[bool, Parameter(negative="", help="Keep the logs, however it ends.")] = False,
    plain: Annotated[bool, Parameter(negative="", help="Lines alone, no bar.")] = False,
    json: Json = None,
) -> int:
    """Bounce every process and the broker under a known load: a reader during it and one afterwards must see everything once.

    Two assemble, two pack (one of them standing by), a trainer with an arithmetic model, the producer and the broker are
    killed, terminated and paused in turn. Exit code 1 on anything lost, repeated, torn or otherwise wrong, on a stop that takes
    longer than 10 s and on fewer faults than planned; then the logs stay. Without --dir it has a stack of its own; with one
    whose Kafka is yours, the broker is left alone.

    Parameters
    ----------
    rollouts
        Rollouts of the known load, in groups of four.
    full
        100,000 rollouts and 90 faults in ten minutes, unless --seconds or --faults say otherwise.
    seconds
        Seconds from the first group to the last; 240 if not given, 600 with --full.
    faults
        Faults in all, spread evenly over that time; 33 if not given, 90 with --full.
    seed
        Seed of the load and of the order of the faults.
    """
    from rollwire.ops.chaos.bounce import BounceOptions, run_bounce
    from rollwire.ops.chaos.report import figures, open_page, print_outcome
    from rollwire.ops.figures import write_figures

    options = BounceOptions(
        rollouts=100_000 if full else rollouts,
        seconds=seconds or (600.0 if full else 240.0),
        faults=faults or (90 if full else 33),
        seed=seed,
        keep=keep,
        dir=dir,
    )
    try:
        with open_page(plain=plain) as page:
            outcome = run_bounce(options, page)
    except KeyboardInterrupt:
        sys.stderr.write("stopped; nothing was judged\n")
        return 130
    print_outcome(outcome)
    if json is not None:
        command = f"rollwire chaos bounce --rollouts {options.rollouts} --seconds {options.seconds:g} --faults {options.faults} --seed {seed}"
        write_figures(json, command, figures(outcome))
    return 0 if outcome.ok else 1


@app.command
def history(
    *,
    seconds: Annotated[float, Parameter(validator=validators.Number(gte=5))] = 300.0,
    every: Annotated[float, Parameter(validator=validators.Number(gte=1))] = 15.0,
    control_seconds: Annotated[float, Parameter(validator=validators.Number(gte=1))] = 120.0,
    rate: Annotated[float, Parameter(validator=validators.Number(gte=1))] = 100.0,
    seed: int = 0,
    json: Json = None,
) -> int:
    """Check the history of clients under faults: nothing acknowledged is lost, nothing is shown twice, early, aborted or torn.

    Clients write and read through our adapter on a stack of their own, while the broker is paused, producers are killed, EndTxn
    requests and their answers are held and cut, and group members come and go. Then the positive control: a
    producer that is used again after its EndTxn timed out. Exit code 1 on any error, on a run without faults, and on a
    control of which not every round goes red; then the books and logs stay.

    Parameters
    ----------
    seconds
        Length of the run, from the first echoed value on.
    every
        Seconds from one fault to the next.
    control_seconds
        Length of the control; two rounds at least.
    rate
        Transactions a second over all clients, about; each sends and polls up to four times.
    seed
        Seed of the load and the faults.
    """
    from rollwire.ops.chaos.history import HistoryOptions, figures, run_history
    from rollwire.ops.chaos.history_report import print_outcome
    from rollwire.ops.figures import write_figures

    options = HistoryOptions(
        seconds=seconds, every_s=every, control_s=control_seconds, per_second=rate, seed=seed
    )
    try:
        outcome = run_history(options, lambda line: print(line, flush=True))
    except KeyboardInterrupt:
        sys.stderr.write("stopped; nothing was judged\n")
        return 130
    print_outcome(outcome)
    if json is not None:
        command = f"rollwire chaos history --seconds {seconds:g} --every {every:g} --control-seconds {control_seconds:g} --rate {rate:g} --seed {seed}"
        write_figures(json, command, figures(outcome))
    return 0 if outcome.ok else 1


@app.command
def weights(
    *,
    every: Annotated[int, Parameter(validator=validators.Number(gte=1))] = 1,
    kills: Annotated[int, Parameter(validator=validators.Number(gte=0))] = 20,
    seed: int = 0,
    jobs: Annotated[int, Parameter(validator=validators.Number(gte=1))] = 3,
    dir: Annotated[
        Path | None,
        Parameter(help="Use the stack that runs there, under a new prefix and in a new bucket."),
    ] = None,
    keep: Annotated[bool, Parameter(negative="", help="Keep the logs, however it ends.")] = False,
    json: Json = None,
) -> int:
    """Kill who publishes and who follows weights at every effect, and break the store's word; all must be bit-equal or untouched.

    Each cell is a run of five versions with one death in it, before or after one put, get, transaction, report, swap or change
    in a folder; then the next life has to bring it to its end. Other cells cut uploads and downloads, lose replies, damage
    bytes, and publish what is wrong. Exit code 1 where a cell fails; then the logs stay.

    Parameters
    ----------
    every
        Take each n-th cell of every part.
    kills
        Kills at random points of a replica that writes a folder; half as many of who publishes.
    seed
        Seed of these points.
    jobs
        Cells that run side by side, of those with a death in them.
    """
    from rollwire.ops.chaos.report import console_of
    from rollwire.ops.chaos.weights.report import figures, print_outcome, print_result
    from rollwire.ops.chaos.weights.run import MatrixOptions, run_matrix
    from rollwire.ops.figures import write_figures
    from rollwire.ops.logs import configure_logging

    configure_logging("error")  # what is broken on purpose makes many warnings
    console = console_of()
    options = MatrixOptions(every=every, kills=kills, seed=seed, dir=dir, keep=keep, jobs=jobs)
    try:
        outcome = run_matrix(options, lambda result: print_result(console, result))
    except KeyboardInterrupt:
        sys.stderr.write("stopped; nothing was judged\n")
        return 130
    print_outcome(outcome)
    if json is not None:
        command = f"rollwire chaos weights --every {every} --kills {kills} --seed {seed}"
        write_figures(json, command, figures(outcome))
    return 0 if outcome.ok else 1
