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
        Path | None, Parameter(help="Use the stack that runs there, and leave it running.")
    ] = None,
    keep: Annotated[bool, Parameter(negative="", help="Keep the logs, however it ends.")] = False,
    plain: Annotated[bool, Parameter(negative="", help="Lines alone, no bar.")] = False,
    json: Json = None,
) -> int:
    """Bounce every process and the broker under a known load: a reader during it and one afterwards must see everything once.

    Two assemble, two pack (one of them standing by), a trainer with an arithmetic model, the producer and the broker are
    killed, terminated and paused in turn. Exit code 1 on anything lost, repeated, torn or otherwise wrong, on a stop that takes
    longer than 10 s and on fewer faults than planned; then the logs stay. Without --dir it has a stack of its own.

    Parameters
    ----------
    rollouts
        Rollouts of the known load, in groups of four.
    full
        100,000 rollouts and 90 faults in ten minutes.
    seconds
        From the first group to the last; 240 if not given, 600 with --full.
    faults
        Faults, spread evenly; 33 if not given, 90 with --full.
    seed
        Of the load and of the order of the faults.
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
