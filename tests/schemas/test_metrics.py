"""Metric names are of Prometheus's form."""

from __future__ import annotations

import re

import pytest

from rollwire.schemas.metrics import METRICS

UNITS = (
    "_total",
    "_seconds",
    "_bytes",
    "_nats",
    "_versions",
    "_events",
    "_ratio",
    "_open",
    "_pending",
    "_version",
    "_epoch",
    "_segments",
)


@pytest.mark.parametrize("name", METRICS)
def test_names_have_the_prefix_and_a_unit(name: str) -> None:
    assert re.fullmatch(r"rollwire_[a-z]+(_[a-z]+)*", name)
    assert name.endswith(UNITS)


def test_names_are_distinct() -> None:
    assert len(set(METRICS)) == len(METRICS)
