from __future__ import annotations

import io

from rich.console import Console

from rollwire.consumers.ledger import Ledger, Line
from rollwire.ops.commands.ledger import draw


def test_the_account_names_what_is_missing() -> None:
    line = Line(
        topic="rollouts",
        received=1_200,
        accepted=1_190,
        refused=2,
        shed=3,
        pending=4,
        extra=0,
        missing_ids=("g.0",),
        extra_ids=(),
    )
    out = io.StringIO()
    Console(file=out, width=120, color_system=None).print(draw(Ledger(lines=(line,))))
    header, row = out.getvalue().splitlines()
    assert header.split()[:7] == ["topic", "received", "accepted", "refused", "shed", "pending", "gap"]
    assert row.split() == ["rollouts", "1,200", "1,190", "2", "3", "4", "1", "g.0"]
