"""Follows the run's low-volume topics to know how far it is. The page's figures come from the monitor; this decides the end."""

from __future__ import annotations

from rollwire.ops.demo.tally import DISTINCT, HELD_OUT
from rollwire.ops.settings import RunSettings
from rollwire.schemas.errors import Refused
from rollwire.schemas.records import Evaluation, FleetStatus, TrainStep
from rollwire.streams.emit import decode_record
from rollwire.streams.seams.log import Log
from rollwire.streams.seams.places import partitions_of

TOPICS = ("train-steps", "fleet-status", "evaluations")


class Watch:
    """A reader of its own: it believes the topics, not the processes."""

    def __init__(self, log: Log, settings: RunSettings) -> None:
        self._settings = settings
        self._reader = log.reader()
        partitions = partitions_of(log, TOPICS)
        self._reader.assign(log.beginning_offsets(partitions))
        self.steps: dict[int, TrainStep] = {}
        self.served: dict[str, int] = {}
        self.evaluations: dict[tuple[str, int], Evaluation] = {}

    def poll(self) -> None:
        """Takes in what has come; does not wait."""
        while records := self._reader.poll(1_000, 0.05):
            for record in records:
                try:
                    event = decode_record(record)
                except Refused:
                    continue  # it has its dead letter; a page must not end by it
                match event:
                    case TrainStep() as step if step.lineage == self._settings.lineage:
                        self.steps[step.step] = step
                    case FleetStatus() as status if status.state in ("swapped", "stopped"):
                        self.served[status.replica] = status.version
                    case Evaluation() as evaluation if (
                        evaluation.lineage == self._settings.lineage and evaluation.promotion is None
                    ):
                        self.evaluations[(evaluation.suite, evaluation.version)] = evaluation
                    case _:
                        pass

    def shown(self) -> None:
        """The page shows accuracy."""

    def progress(self) -> tuple[int, int, int]:
        """Grows while the run moves."""
        return len(self.steps), len(self.evaluations), sum(self.served.values())

    def complete(self) -> bool:
        """All steps taken, the last version served by every replica and fully evaluated."""
        final = self._settings.steps
        replicas = (self._settings.fleet.replica, self._settings.evaluator.replica)
        return (
            final in self.steps
            and all(self.served.get(replica, -1) >= final for replica in replicas)
            and self.measured(final)
        )

    def measured(self, version: int) -> bool:
        """Whether a version was evaluated on all held-out tasks."""
        suites = (f"{self._settings.environment}.{suite}" for suite in (HELD_OUT, DISTINCT))
        return all((suite, version) in self.evaluations for suite in suites)

    def describe(self) -> str:
        served = ", ".join(f"{replica} serves {version}" for replica, version in sorted(self.served.items()))
        return f"step {max(self.steps, default=0)} of {self._settings.steps} ({served or 'no replica serves yet'})"

    def close(self) -> None:
        self._reader.close()
