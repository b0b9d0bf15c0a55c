"""Audit replay: each processor decides its history again by the recorded cuts, and says the same (law 9)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from rollwire.schemas.errors import ConfigError, OffsetLost, Refused
from rollwire.schemas.records import Reward
from rollwire.streams.assemble_config import LIVE, SAMPLED
from rollwire.streams.attribution.replay import attributed
from rollwire.streams.emit import decode_record
from rollwire.streams.findings import Finding, Kind, Report, merged
from rollwire.streams.pack_step import NAME as PACK
from rollwire.streams.replay.audit_join import audit_join
from rollwire.streams.replay.audit_pack import audit_pack
from rollwire.streams.replay.settings import Spoken
from rollwire.streams.replay.tally import Tally, Told, untold
from rollwire.streams.seams.log import Log
from rollwire.streams.seams.places import partitions_of
from rollwire.streams.seams.scan import scan

ATTRIBUTE: Final = "attribute"


def audit_attribution(log: Log, _spoken: Spoken, told: Told = untold) -> Report:
    """Every reward that people's feedback earned, folded again from rollouts, feedback and the rules in the log. What it
    says has no cut: it follows from the records' own times. Rewards whose window is open yet are not missed."""
    tally = Tally(ATTRIBUTE)
    places = partitions_of(log, ("production-rollouts", "user-feedback"))
    gone = any(at > 0 for at in log.beginning_offsets(places).values())
    try:
        again = attributed(log).rewards
    except IndexError:
        tally.notes.append("attribute: the log has no rules, so nothing was attributed")
        return tally.report()
    except OffsetLost as lost:
        tally.findings.append(Finding(kind=Kind.HISTORY_GAP, where=ATTRIBUTE, detail=str(lost)))
        return tally.report()
    seen: set[str] = set()
    for record in scan(log, ["rewards"], lost=tally.lost):
        told(ATTRIBUTE, record.timestamp_ms * 1_000)
        try:
            event = decode_record(record)
        except Refused:
            continue
        if not isinstance(event, Reward) or event.source != "user" or event.rollout_id in seen:
            continue  # at least once: a repeat has the same id
        seen.add(event.rollout_id)
        made = again.get(event.rollout_id)
        if not tally.same(record, event, made):
            kind = Kind.HISTORY_GAP if gone else Kind.OUTCOME_DIFFERS
            why = "it does not follow" if made is None else "it is another one when it is folded again"
            tally.differs(record, f"the reward of {event.rollout_id}: {why}", kind)
    return tally.report()


_AUDITS: Final[dict[str, Callable[[Log, Spoken, Told], Report]]] = {
    SAMPLED.name: lambda log, spoken, told: audit_join(log, SAMPLED, spoken, told),
    LIVE.name: lambda log, spoken, told: audit_join(log, LIVE, spoken, told),
    PACK: audit_pack,
    ATTRIBUTE: audit_attribution,
}
PROCESSORS: Final = tuple(_AUDITS)


def audit_replay(log: Log, processors: Sequence[str], spoken: Spoken, told: Told = untold) -> Report:
    """One report over `processors` (none: all that said their settings).

    Raises `ConfigError` for a name that is none of `PROCESSORS`, and where the log does not say by which settings one of them
    decided.
    """
    unknown = [name for name in processors if name not in _AUDITS]
    if unknown:
        raise ConfigError(
            f"{unknown[0]!r} is no processor that is replayed; there are: {', '.join(PROCESSORS)}"
        )
    chosen = processors or [name for name in PROCESSORS if name == ATTRIBUTE or spoken.since(name)]
    return merged("replay", [_AUDITS[name](log, spoken, told) for name in chosen])
