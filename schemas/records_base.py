"""The base of all events. They are to be had from `rollwire.schemas.records`, all of them."""

from __future__ import annotations

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Base of all events and of the records inside them."""
