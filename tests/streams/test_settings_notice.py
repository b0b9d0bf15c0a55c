"""A processor says its settings once, and again only where they or the code changed."""

from __future__ import annotations

import msgspec
import pytest

from rollwire.schemas.catalogue import TOPICS
from rollwire.streams.pack import PackConfig
from rollwire.streams.seams.clock import ManualClock
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.settings_notice import notices, settings_notice, tell, told_in, told_of


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog(dict.fromkeys(TOPICS, 1), ManualClock())


def _tell(log: MemoryLog, config: PackConfig, code: str = "1", processor: str = "pack") -> bool:
    return tell(
        log, processor, {"pack": config}, model="policy", lineage="line", code=code, clock=ManualClock()
    )


def test_it_is_said_where_it_changed(log: MemoryLog) -> None:
    assert _tell(log, PackConfig())
    assert not _tell(log, PackConfig())
    assert _tell(log, PackConfig(max_lag_versions=2))
    assert _tell(log, PackConfig(max_lag_versions=2), code="2")
    assert _tell(log, PackConfig(), processor="other")
    assert not _tell(log, PackConfig(max_lag_versions=2), code="2")
    assert _tell(log, PackConfig())
    said = [told_in(notice) for notice in notices(log)]
    assert [one and (one.processor, one.code) for one in said] == [
        ("pack", "1"),
        ("pack", "1"),
        ("pack", "2"),
        ("other", "1"),
        ("pack", "1"),
    ]
    newest = said[-1]
    assert newest is not None
    assert PackConfig.model_validate(msgspec.json.decode(newest.config)["pack"]) == PackConfig()


def test_the_digest_does_not_depend_on_the_order_of_sections() -> None:
    one = told_of("p", {"a": {"x": 1}, "b": {"y": 2}}, lineage="l", code="1", at_us=1)
    other = told_of("p", {"b": {"y": 2}, "a": {"x": 1}}, lineage="l", code="1", at_us=2)
    assert one.same(other)


def test_a_notice_whose_digest_is_not_its_own_says_nothing() -> None:
    told = told_of("p", {"a": {"x": 1}}, lineage="l", code="1", at_us=1)
    notice = settings_notice(told, model="policy")
    assert told_in(notice) == told
    changed = msgspec.structs.replace(notice, attributes={**notice.attributes, "config": "{}"})
    assert told_in(changed) is None
    assert told_in(msgspec.structs.replace(notice, name="drift")) is None
    whole_run = msgspec.structs.replace(notice, attributes={"pack.ranks": "1"})
    assert told_in(whole_run) is None
