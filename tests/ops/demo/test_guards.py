from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from rollwire.ops.demo.guards import interruptible, locked, undisturbed
from rollwire.ops.demo.history import announce, check_steps, events
from rollwire.ops.demo.options import DemoOptions, new_settings
from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.errors import ConfigError, StackError
from rollwire.schemas.golden import load_examples
from rollwire.schemas.records import Notice, TrainStep
from rollwire.streams.emit import outgoing
from rollwire.streams.seams.log import Outgoing
from rollwire.streams.seams.log_memory import MemoryLog


def test_a_run_has_one_demo_at_a_time(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(StackError, match="another demo") as caught, locked(tmp_path):
        pass
    assert caught.value.exit_code == 2
    with locked(tmp_path):
        pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_demo_as_ctrl_c_does(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), interruptible():
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_a_clean_up_is_not_broken_off() -> None:
    before = signal.getsignal(signal.SIGINT)
    with undisturbed():
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_history_passes_over_poison_and_refuses_fewer_steps_than_were_taken() -> None:
    log = MemoryLog({topic: spec.partitions for topic, spec in TOPICS.items()})
    step = next(e.event for e in load_examples("train-steps") if isinstance(e.event, TrainStep))
    log.writer().write(
        [
            Outgoing("train-steps", b"policy", b"poison", ()),
            outgoing(step, source="test", time_us=step.finished_us),
        ]
    )
    assert list(events(log, ("train-steps",))) == [step]
    settings = new_settings(DemoOptions(dir=Path()), "x").model_copy(update={"lineage": step.lineage})
    check_steps(log, settings.model_copy(update={"steps": step.step}))
    with pytest.raises(ConfigError, match=f"--steps {step.step + 1}"):
        check_steps(log, settings.model_copy(update={"steps": step.step - 1}))


def test_the_settings_of_a_run_stand_in_its_notices() -> None:
    log = MemoryLog({topic: spec.partitions for topic, spec in TOPICS.items()})
    settings = new_settings(DemoOptions(dir=Path(), seed=5), "x")
    announce(log, settings)
    (notice,) = events(log, ("notices",))
    assert isinstance(notice, Notice)
    assert notice.attributes["fleet.seed"] == "5"
    assert settings.lineage in notice.text
