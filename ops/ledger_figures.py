"""The account by hour as figures, for tools that end with it.

ledger.gap              received - accepted - refused - shed - pending, and whatever is there too often, over all topics
ledger.gap.<hour>       the same of the records of one hour (UTC), as in ledger.gap.2026-11-30T06
ledger.unclosed         started - closed - open over all flows, and whatever was closed and never started
"""

from __future__ import annotations

from rollwire.consumers.audit.hours import HourLedger
from rollwire.ops.figures import Figure


def ledger_figures(hours: HourLedger) -> list[Figure]:
    unclosed = sum(flow.lost + flow.unstarted for flow in hours.flows)
    return [
        Figure(name="ledger.gap", value=hours.gap, unit="events"),
        *(Figure(name=f"ledger.gap.{hour}", value=gap, unit="events") for hour, gap in hours.gaps().items()),
        Figure(name="ledger.unclosed", value=unclosed, unit="1"),
    ]
