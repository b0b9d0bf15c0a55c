"""Rules of feedback: which signals there are, what each may say, and how they become one reward."""

from __future__ import annotations

from rollwire.schemas.rules.check import check_value as check_value
from rollwire.schemas.rules.parse import default_rules as default_rules
from rollwire.schemas.rules.parse import parse_rules as parse_rules
from rollwire.schemas.rules.score import Given as Given
from rollwire.schemas.rules.score import Scored as Scored
from rollwire.schemas.rules.score import score as score
from rollwire.schemas.rules.types import Outcome as Outcome
from rollwire.schemas.rules.types import Rules as Rules
from rollwire.schemas.rules.types import Signal as Signal
