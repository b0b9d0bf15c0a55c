"""With which settings each processor decided, as the log says, and what of it a replay changes. Pure but for `read_spoken`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from rollwire.kernels.policy.config import PolicyConfig
from rollwire.schemas.errors import ConfigError
from rollwire.schemas.records import Notice
from rollwire.streams.assemble_config import AssembleConfig, JoinConfig, ProductionConfig
from rollwire.streams.attribution.rulebook import Rulebook
from rollwire.streams.pack import PackConfig
from rollwire.streams.seams.log import Log
from rollwire.streams.settings_notice import NAME, Told, notices, told_in, told_of

SECTIONS: Mapping[str, str] = {"assemble": "assemble", "assemble-production": "production", "pack": "pack"}
"""Processors that a replay runs by settings -> the section of a run's settings that they stand in."""

C = TypeVar("C", bound=BaseModel)


class Since(NamedTuple):
    """Settings that hold from a moment on."""

    from_us: int
    values: Mapping[str, Any]
    model: str
    lineage: str


class Spoken:
    """What processors said of their settings, in order, with `changes` laid over all of it (`section.key` -> value)."""

    def __init__(self, said: Iterable[tuple[Told, str]], changes: Mapping[str, Any] | None = None) -> None:
        """`said`: with the model that each was said for."""
        self._changes = dict(changes or {})
        self._by: dict[str, list[Since]] = {}
        self._built: dict[tuple[str, int], JoinConfig] = {}
        for told, model in said:
            section = SECTIONS.get(told.processor)
            if section is not None:
                values = json.loads(told.config)[section]
                since = Since(told.at_us, values, model, told.lineage)
                self._by.setdefault(told.processor, []).append(since)
        for processor, spoken in self._by.items():
            # Where it is said again (by other code, say), nothing is decided in another way from then on.
            self._by[processor] = _changed(sorted(spoken, key=lambda one: one.from_us))

    def since(self, processor: str, lineage: str | None = None) -> list[Since]:
        """All that a processor decided by, ascending. Empty where it never said so."""
        return [one for one in self._by.get(processor, ()) if lineage in (None, one.lineage)]

    def at(self, processor: str, at_us: int, lineage: str | None = None) -> Since:
        """What a processor decided by at a moment: what it had said last, else what it said first.

        Raises `ConfigError` where it never said so.
        """
        said = self.since(processor, lineage)
        if not said:
            raise ConfigError(
                f"the log does not say by which settings {processor} decided: name the run's folder, or all that differs "
                f"from the defaults with --set {SECTIONS[processor]}.key=value"
            )
        return next((one for one in reversed(said) if one.from_us <= at_us), said[0])

    def pack(self, since: Since) -> PackConfig:
        return self._made(PackConfig, "pack", since.values)

    def join(self, processor: str, since: Since) -> JoinConfig:
        """Of `assemble` or `assemble-production`."""
        built = self._built.get((processor, since.from_us))
        if built is None:
            section = SECTIONS[processor]
            kind = ProductionConfig if section == "production" else AssembleConfig
            built = self._built[processor, since.from_us] = self._made(kind, section, since.values)
        return built

    def _made(self, kind: type[C], section: str, values: Mapping[str, Any]) -> C:
        merged = json.loads(json.dumps(values))
        for name, value in self._changes.items():
            head, *parents, leaf = name.split(".")
            if head != section or not leaf:
                continue
            node = merged
            for parent in parents:
                node = node.setdefault(parent, {})
            node[leaf] = value
        try:
            return kind.model_validate(merged)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join((section, *map(str, first["loc"])))
            raise ConfigError(f"{where}: {first['msg']}") from error


def _changed(said: Sequence[Since]) -> list[Since]:
    return [one for i, one in enumerate(said) if i == 0 or one[1:] != said[i - 1][1:]]


def read_spoken(log: Log, changes: Mapping[str, Any] | None = None) -> Spoken:
    """From `notices`: what processors said themselves, and what a whole run was begun with."""
    return Spoken(spoken_in(notices(log)), changes)


def spoken_in(said: Iterable[Notice]) -> Iterable[tuple[Told, str]]:
    for notice in said:
        told = told_in(notice)
        if told is not None:
            yield told, notice.model
        elif notice.name == NAME and "processor" not in notice.attributes:
            yield from ((one, notice.model) for one in _of_run(notice))


def _of_run(notice: Notice) -> Iterable[Told]:
    """A run's settings as dotted names; nothing of what is no setting of this release."""
    values: dict[str, Any] = {}
    try:
        for name, text in notice.attributes.items():
            *parents, leaf = name.split(".")
            node = values
            for parent in parents:
                node = node.setdefault(parent, {})
            node[leaf] = json.loads(text)
        pack = PackConfig.model_validate(values.get("pack", {}))
        policy = PolicyConfig.model_validate(values.get("policy", {}))
        values["pack"] = pack.for_policy(policy).model_dump(mode="json")
    except (AttributeError, TypeError, ValueError):  # pydantic's and json's errors are `ValueError`s
        return
    for processor, section in SECTIONS.items():
        if section in values:
            yield told_of(
                processor,
                {section: values[section]},
                lineage=str(values.get("lineage", "")),
                code="",
                at_us=notice.at_us,
            )


def read_rulebook(log: Log) -> Rulebook:
    """The rules that the log says, as every worker of attribution reads them."""
    book = Rulebook()
    for notice in notices(log):
        try:
            book = book.after(notice)
        except ConfigError:
            continue  # no worker took them either
    return book
