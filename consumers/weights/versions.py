"""The versions of one lineage, folded from `weight-versions`."""

from __future__ import annotations

from rollwire.schemas.records import WeightVersion


class Versions:
    """`lineage=None` follows whichever lineage was started last: its first event makes the others' versions history."""

    def __init__(self, lineage: str | None = None, model: str | None = None) -> None:
        self._lineage = lineage
        self._fixed = lineage is not None
        self._model = model
        self._seen: set[str] = set()
        self._events: dict[int, WeightVersion] = {}

    @property
    def lineage(self) -> str | None:
        return self._lineage

    @property
    def events(self) -> list[WeightVersion]:
        return list(self._events.values())

    @property
    def newest(self) -> WeightVersion | None:
        return self._events[max(self._events)] if self._events else None

    def add(self, event: WeightVersion) -> bool:
        """Whether the event was news. Repeats (the same version again) and other models and lineages are not."""
        if self._model is not None and event.model != self._model:
            return False
        if event.lineage != self._lineage:
            if self._fixed or event.lineage in self._seen:
                return False
            self._lineage = event.lineage
            self._seen.add(event.lineage)
            self._events = {}
        if event.version in self._events:
            return False
        self._events[event.version] = event
        return True
