"""Which rules hold for which rollout: those that the log says, for rollouts opened from a stated moment on. Pure.

Rules go into `notices` with their text. They hold from a little later than they were written, so that every worker has read
them before the first rollout they hold for is opened: workers never disagree, and a replay finds them in the log.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Final, NamedTuple

from rollwire.schemas.errors import ConfigError
from rollwire.schemas.records import Notice
from rollwire.schemas.rules import Rules, parse_rules

NAME: Final = "rules"
"""Name of the notices."""

DELAY_US: Final = 15_000_000
"""From the notice to the first rollout that the rules hold for. Workers read notices every few seconds."""


class Since(NamedTuple):
    from_us: int
    rules: Rules


class Rulebook(NamedTuple):
    """Rules by the moment from which they hold, ascending. The first ones hold for everything before as well."""

    entries: tuple[Since, ...] = ()

    @property
    def newest(self) -> Rules | None:
        return self.entries[-1].rules if self.entries else None

    def at(self, opened_us: int) -> Rules:
        """The rules for a rollout opened at a moment. Raises `IndexError` where there are none at all."""
        if len(self.entries) == 1:
            return self.entries[0].rules
        found = bisect_right(self.entries, opened_us, key=lambda entry: entry.from_us)
        return self.entries[max(found - 1, 0)].rules

    def after(self, notice: Notice) -> Rulebook:
        """With the rules of a notice; as it is for another notice, and for the rules that hold already.

        Raises `ConfigError` for rules that do not parse, or are not those that the notice names.
        """
        if notice.name != NAME:
            return self
        rules = parse_rules(notice.attributes.get("text", ""), f"notice {NAME!r} of {notice.at_us}")
        if rules.digest != notice.attributes.get("digest"):
            raise ConfigError(f"notice {NAME!r} of {notice.at_us}: its text has the digest {rules.digest}")
        newest = self.newest
        if newest is not None and newest.digest == rules.digest:
            return self
        from_us = notice.at_us + DELAY_US
        if self.entries:
            from_us = max(from_us, self.entries[-1].from_us)
        return Rulebook((*self.entries, Since(from_us, rules)))

    def after_all(self, notices: Iterable[Notice]) -> Rulebook:
        book = self
        for notice in notices:
            book = book.after(notice)
        return book


def rules_notice(text: str, model: str, now_us: int) -> Notice:
    """What goes into the log when rules change. Raises `ConfigError`."""
    rules = parse_rules(text)
    return Notice(
        model=model,
        name=NAME,
        severity="info",
        text=f"rules {rules.name} {rules.verifier_version} hold for rollouts opened {DELAY_US // 1_000_000} s from now on",
        attributes={
            "digest": rules.digest,
            "rules": rules.name,
            "version": rules.version,
            "text": text,
        },
        at_us=now_us,
    )
