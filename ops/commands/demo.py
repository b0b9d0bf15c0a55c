"""`rollwire demo`: the whole loop on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def demo(
    *,
    steps: Annotated[int | None, Parameter(help="Optimiser steps in all; 250 if not given.")] = None,
    seed: Annotated[
        int | None, Parameter(help="Seed of the initial weights, the tasks and the samples; 0 if not given.")
    ] = None,
    environment: Annotated[
        str | None, Parameter(help="What is learnt: countdown, or calculator; countdown if not given.")
    ] = None,
    feedback: Annotated[
        bool,
        Parameter(negative="", help="Learn from people's clicks on a live policy; 60 steps if not given."),
    ] = False,
    control: Annotated[
        bool, Parameter(negative="", help="Shuffle the advantages: a run that must not learn.")
    ] = False,
    continue_: Annotated[
        bool, Parameter(name="--continue", negative="", help="Go on with the newest run where it stopped.")
    ] = False,
    max_lag: Annotated[
        int | None, Parameter(help="Versions that a rollout may be old at its use; 3 if not given.")
    ] = None,
    no_ratio: Annotated[
        bool, Parameter(negative="", help="Train without the truncated ratio, to see what staleness does.")
    ] = False,
    set_: Annotated[
        tuple[str, ...],
        Parameter(
            name="--set",
            negative="",
            show_default=False,
            help="Any setting of the run, as fleet.group_size=4; may be given several times.",
        ),
    ] = (),
    json: Annotated[Path | None, Parameter(help="Write the figures there, in the common form.")] = None,
    plain: Annotated[bool, Parameter(negative="", help="Lines instead of a live page.")] = False,
    dir: Annotated[Path, Parameter(help="Folder of the stack's and the runs' state.")] = Path(".rollwire"),
) -> int:
    """Run the whole loop on this machine: a policy learns a small task, and every token of it is an event.

    Exit code 0 only if every check held; 1 if one did not; 2 if it could not start.
    """
    from rollwire.ops.demo.feedback.run import run_feedback_demo
    from rollwire.ops.demo.feedback.summary import print_feedback_summary
    from rollwire.ops.demo.options import DemoOptions
    from rollwire.ops.demo.run import run_demo
    from rollwire.ops.demo.summary import print_summary

    options = DemoOptions(
        dir=dir,
        steps=steps,
        seed=seed,
        environment=environment,
        feedback=feedback,
        control=control,
        resume=continue_,
        max_lag=max_lag,
        no_ratio=no_ratio,
        overrides=set_,
        json_file=json,
        plain=plain,
    )
    try:
        if feedback:
            told = run_feedback_demo(options)
            print_feedback_summary(told)
            return 0 if told.ok else 1
        outcome = run_demo(options)
    except KeyboardInterrupt:
        sys.stderr.write("stopped; the log stays, and `rollwire demo --continue` goes on from it\n")
        return 130
    print_summary(outcome)
    return 0 if outcome.ok else 1
