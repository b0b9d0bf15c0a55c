"""The verifier's loop: reads `rollouts`, has them scored in the sandbox, writes `rewards` exactly once.

One Kafka transaction holds the rewards of a batch and the offsets of its rollouts. Any doubt about an outcome ends the
writer; a new one is made and the committed offsets tell what happened (law 4). A second verifier with the same prefix
fences the first, which then stops.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Final, NamedTuple

import structlog
from pydantic import BaseModel, ConfigDict, Field

from rollwire.producers.emit import outgoing
from rollwire.producers.verifier.judging import (
    Case,
    RecentIds,
    Skips,
    offsets_before,
    reward_event,
    score_request,
    select,
)
from rollwire.producers.verifier.sandbox import Sandbox, SandboxConfig
from rollwire.schemas.errors import LogUnavailable, Refused, RollwireError, TransactionUnknown
from rollwire.streams.seams.clock import Clock, SystemClock
from rollwire.streams.seams.environment import Environment, Verdict
from rollwire.streams.seams.log import Log, Outgoing, Reader, Record, TopicPartition, TransactionalWriter

_log = structlog.get_logger()

SOURCE: Final = "rollwire/verifier"
INPUT: Final = "rollouts"


class VerifierConfig(BaseModel):
    """How rollouts are scored."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: str = Field(
        default="1", description="version of the verifier's rules, written into every reward"
    )
    max_batch: int = Field(default=2_000, ge=1, description="rollouts of one transaction")
    poll_s: float = Field(default=0.2, gt=0, description="seconds to wait for rollouts")
    batch_s: float = Field(
        default=4.0,
        gt=0,
        description="seconds of scoring before what is scored is committed; keeps a stop below 10 s amid hanging answers",
    )
    commit_s: float = Field(
        default=8.0, gt=0, description="seconds for one commit before its outcome is in doubt"
    )
    retry_s: float = Field(default=0.5, gt=0, description="seconds between attempts to reach the broker")
    patience_s: float = Field(default=300.0, gt=0, description="seconds without the broker before giving up")
    remember: int = Field(default=65_536, ge=1, description="rollout ids kept to pass over repeats")
    sandbox: SandboxConfig = Field(
        default_factory=SandboxConfig, description="limits of the evaluator's process"
    )


class VerifierReport(NamedTuple):
    """What one run of the verifier did; `scored` counts the unscorable ones too."""

    scored: int
    unscorable: int
    skips: Skips
    transactions: int
    recoveries: int  # new writers after the first
    evaluator_restarts: int


def target_of(environment: Environment) -> str:
    """Where the evaluator's process finds the environment's class: `MODULE:CLASS`, or its file where the module has
    no importable name."""
    kind = type(environment)
    if kind.__module__.startswith("rollwire."):
        return f"{kind.__module__}:{kind.__qualname__}"
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return f"{file or kind.__module__}:{kind.__qualname__}"


def run_verifier(
    log: Log,
    environment: Environment,
    config: VerifierConfig | None = None,
    *,
    prefix: str,
    stop: threading.Event,
    clock: Clock | None = None,
    target: str | None = None,
) -> VerifierReport:
    """Scores until `stop`. `target` (default: the class of `environment`) is what the evaluator's process builds.

    Raises `Fenced` where another verifier took over, `OffsetLost` where rollouts were removed unread, `LogUnavailable`
    when the broker stays away for `patience_s`, `EnvironmentMissing` where the evaluator does not start.
    """
    config = config or VerifierConfig()
    clock = clock or SystemClock()
    with Sandbox(target or target_of(environment), config.sandbox) as sandbox:
        verifier = _Verifier(log, environment.name, config, prefix, clock, sandbox)
        return verifier.run(stop)


class _Session:
    """One reader and one writer, from the committed offsets on."""

    def __init__(self, log: Log, prefix: str) -> None:
        self.group = f"{prefix}verifier"
        # Its creation finishes the predecessor's transaction: only then are the committed offsets final (law 4).
        self.writer: TransactionalWriter = log.transactional_writer(f"{prefix}verifier", timeout_s=8.0)
        self.unhandled: list[Record] = []
        try:
            self.reader = self._reader(log)
        except RollwireError:
            self.writer.close()
            raise

    def _reader(self, log: Log) -> Reader:
        partitions = [TopicPartition(INPUT, p) for p in range(log.partitions(INPUT))]
        committed = log.committed(self.group, partitions)
        begins = log.beginning_offsets([p for p in partitions if p not in committed])
        reader = log.reader()
        reader.assign({**begins, **committed})
        return reader

    def close(self) -> None:
        self.reader.close()
        self.writer.close()


class _Verifier:
    def __init__(
        self, log: Log, environment: str, config: VerifierConfig, prefix: str, clock: Clock, sandbox: Sandbox
    ) -> None:
        self._log = log
        self._environment = environment
        self._config = config
        self._prefix = prefix
        self._clock = clock
        self._sandbox = sandbox
        self._recent = RecentIds(config.remember)
        self._scored = 0
        self._unscorable = 0
        self._skips = Skips()
        self._transactions = 0
        self._sessions = 0

    def run(self, stop: threading.Event) -> VerifierReport:
        session: _Session | None = None
        away_since: float | None = None
        try:
            while not stop.is_set():
                try:
                    if session is None:
                        session = _Session(self._log, self._prefix)
                        self._sessions += 1
                    self._turn(session)
                    away_since = None
                except (LogUnavailable, TransactionUnknown) as error:
                    now = self._clock.monotonic_s()
                    away_since = now if away_since is None else away_since
                    if now - away_since > self._config.patience_s:
                        raise
                    _log.warning("verifier_recovers", error=str(error))
                    if session is not None:
                        session.close()
                        session = None
                    self._recent.clear()  # what was rewarded is not known until the offsets are read
                    stop.wait(self._config.retry_s)
        finally:
            if session is not None:
                session.close()
        report = VerifierReport(
            self._scored,
            self._unscorable,
            self._skips,
            self._transactions,
            max(self._sessions - 1, 0),
            self._sandbox.restarts,
        )
        _log.info("verifier_stopped", **report._asdict())
        return report

    def _turn(self, session: _Session) -> None:
        """Scores and commits one batch, or what `batch_s` allowed of it; the rest stays in `session.unhandled`."""
        records = session.unhandled or session.reader.poll(self._config.max_batch, self._config.poll_s)
        if not records:
            return
        cases, skips = select(records, self._environment, self._recent)
        verdicts = self._sandbox.score(
            [score_request(c.rollout) for c in cases], budget_s=self._config.batch_s
        )
        unhandled: list[Record] = []
        if len(verdicts) < len(cases):
            unhandled = records[records.index(cases[len(verdicts)].record) :]
            handled = records[: len(records) - len(unhandled)]
            cases, skips = select(handled, self._environment, self._recent)
        records_out, scored, unscorable = self._encode(cases, verdicts)
        session.writer.begin()
        session.writer.write(records_out)
        offsets = offsets_before(session.reader.positions(), unhandled)
        session.writer.commit(session.group, offsets, timeout_s=self._config.commit_s)
        session.unhandled = unhandled
        self._recent.add(case.rollout.rollout_id for case in cases)
        self._transactions += 1
        self._scored += scored
        self._unscorable += unscorable
        self._skips = self._skips.plus(skips).plus(Skips(refused=len(cases) - scored))

    def _encode(self, cases: Sequence[Case], verdicts: Sequence[Verdict]) -> tuple[list[Outgoing], int, int]:
        """Rewards to write, how many, and how many of them are null. A reward that the codec refuses (the record's time
        is absurd, say) is named and left out: its group ends at the deadline, the others go on."""
        encoded: list[Outgoing] = []
        unscorable = 0
        for case, verdict in zip(cases, verdicts, strict=True):
            reward = reward_event(
                case, verdict, verifier=f"{self._environment}-exact", version=self._config.version
            )
            try:
                encoded.append(outgoing(reward, source=SOURCE, time_us=reward.scored_us))
            except Refused as refused:
                _log.warning("reward_refused", rollout=reward.rollout_id, detail=str(refused))
                continue
            unscorable += reward.reward is None
        return encoded, len(encoded), unscorable
