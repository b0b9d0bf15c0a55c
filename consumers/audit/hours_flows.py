"""What was opened and what was closed, by hour: open = started - closed. Pure.

Legend: N records or events, K keys (each once), P plans.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollwire.consumers.audit.hours import Flow, FlowHour, hour_name
from rollwire.consumers.audit.hours_columns import UNNAMED, First, Ints, Mask, among, first_of, sorted_once
from rollwire.consumers.audit.hours_facts import Facts
from rollwire.consumers.audit.hours_judge import (
    ACCEPTED,
    JOINED,
    LIVE_COLUMN,
    PENDING,
    REFUSED,
    SHED,
    Closing,
    Judged,
)


class _Ends(NamedTuple):
    """What became of everything that started: its hours, and where it is not closed, whether somebody is at it."""

    started_K: Ints  # hours
    closed_K: Ints  # hours; meaningless where not `is_closed_K`
    is_closed_K: Mask
    waits_K: Mask
    unstarted: Ints  # hours in which something was closed that never started
    unstarted_keys: Ints = np.empty(0, np.int64)


class Flows(NamedTuple):
    hours: tuple[FlowHour, ...]
    unstarted: frozenset[int]  # keys of groups that were closed and never started


def count_flows(facts: Facts, judged: Mapping[str, Judged], closing: Closing) -> Flows:
    flows: dict[Flow, _Ends] = {
        "groups": _groups(facts, judged, closing),
        "cohorts": _cohorts(facts, judged["groups"], closing),
        "plans": _plans(facts, judged["packed-batches"], closing),
        "feedback windows": _windows(facts, judged["production-rollouts"]),
        "dead letters": _letters(facts),
    }
    return Flows(
        tuple(line for name, ends in flows.items() for line in _by_hour(name, ends)),
        frozenset(key for ends in flows.values() for key in ends.unstarted_keys.tolist()),
    )


def _ends(keys_N: Ints, hours_N: Ints, codes_N: NDArray[np.int64], closed: First, *, whole: bool) -> _Ends:
    """Of what has a key of its own. `whole`: else what started may be gone, and only its end is there."""
    counts_N = (keys_N != UNNAMED) & (codes_N != REFUSED)
    started = First(keys_N[counts_N], hours_N[counts_N])
    is_closed_K = among(started.keys, closed.keys)
    closed_K = np.zeros(len(started.keys), np.int64)
    closed_K[is_closed_K] = closed.of(started.keys[is_closed_K])
    # Who refused one record of a group may have closed it by another one.
    alone = ~among(closed.keys, sorted_once(keys_N)) & whole
    return _Ends(
        started.hours,
        closed_K,
        is_closed_K,
        among(started.keys, sorted_once(keys_N[codes_N == PENDING])),
        closed.hours[alone],
        closed.keys[alone],
    )


def _groups(facts: Facts, judged: Mapping[str, Judged], closing: Closing) -> _Ends:
    columns = [judged[name] for name in (*JOINED, LIVE_COLUMN)]
    return _ends(
        np.concatenate([one.groups_N for one in columns]),
        np.concatenate([one.hours_N for one in columns]),
        np.concatenate([one.codes_N for one in columns]),
        # Groups are kept for a shorter time than fates: those by `pack` say as well that a group was made.
        first_of(facts.groups, facts.assembled, facts.kept, facts.dropped),
        whole=closing.whole(*JOINED),
    )


def _cohorts(facts: Facts, groups: Judged, closing: Closing) -> _Ends:
    closed = first_of(facts.kept, facts.dropped)
    return _ends(groups.keys_N, groups.hours_N, groups.codes_N, closed, whole=closing.whole("groups"))


def _plans(facts: Facts, batches: Judged, closing: Closing) -> _Ends:
    """One plan a place: a second one of the same name is an extra of its topic."""
    pending = frozenset(batches.places_N[batches.codes_N == PENDING].tolist())
    started_P = np.array([plan.hour for plan in facts.plans], np.int64)
    closed_P = np.zeros(len(facts.plans), np.int64)
    is_closed_P = np.zeros(len(facts.plans), np.bool_)
    waits_P = np.array([plan.place in pending for plan in facts.plans], np.bool_)
    for number, plan in enumerate(facts.plans):
        if (revert := closing.passed_over_by(plan)) is not None:
            closed_P[number] = max(plan.hour, facts.versions[plan.lineage, revert].hour)
            is_closed_P[number] = True
        elif facts.taken(plan):
            closed_P[number] = facts.steps[plan.lineage, plan.step].hour
            is_closed_P[number] = True
    return _Ends(started_P, closed_P, is_closed_P, waits_P, started_P[:0])


def _windows(facts: Facts, answers: Judged) -> _Ends:
    counts_N = (answers.keys_N != UNNAMED) & (answers.codes_N != REFUSED)
    keys_N, groups_N, hours_N = (
        answers.keys_N[counts_N],
        answers.groups_N[counts_N],
        answers.hours_N[counts_N],
    )
    codes_N = answers.codes_N[counts_N]
    judged = first_of(facts.judged)
    ended = first_of(facts.groups, facts.assembled, facts.kept, facts.dropped)
    by_reward_N = among(keys_N, judged.keys)
    by_fate_N = ~by_reward_N & among(groups_N, ended.keys) & np.isin(codes_N, (ACCEPTED, SHED))
    closed_N = np.zeros(len(keys_N), np.int64)
    closed_N[by_reward_N] = judged.of(keys_N[by_reward_N])
    closed_N[by_fate_N] = ended.of(groups_N[by_fate_N])
    # A rollout that stands there twice has one window.
    _, first_K = np.unique(keys_N, return_index=True)
    return _Ends(
        hours_N[first_K],
        closed_N[first_K],
        (by_reward_N | by_fate_N)[first_K],
        codes_N[first_K] == PENDING,
        hours_N[:0],
    )


def _letters(facts: Facts) -> _Ends:
    started = np.array([letter.hour for letter in facts.letters], np.int64)
    closed = np.array([facts.settled.get(letter.place, 0) for letter in facts.letters], np.int64)
    settled = np.array([letter.place in facts.settled for letter in facts.letters], np.bool_)
    return _Ends(started, closed, settled, np.ones(len(started), np.bool_), started[:0])


def _by_hour(flow: Flow, ends: _Ends) -> tuple[FlowHour, ...]:
    lost_K = ends.started_K[~ends.is_closed_K & ~ends.waits_K]
    # An event may carry an earlier hour than what it closes: brokers' clocks differ.
    closed_K = np.maximum(ends.closed_K, ends.started_K)[ends.is_closed_K]
    hours = sorted_once(ends.started_K, closed_K, ends.unstarted)
    if not len(hours):
        return ()

    def counted(hours_K: Ints) -> list[int]:
        return [int(n) for n in np.bincount(np.searchsorted(hours, hours_K), minlength=len(hours))]

    lines: list[FlowHour] = []
    still = 0
    rows = zip(
        hours.tolist(),
        counted(ends.started_K),
        counted(closed_K),
        counted(lost_K),
        counted(ends.unstarted),
        strict=True,
    )
    for hour, started, closed, lost, unstarted in rows:
        still += started - closed
        lines.append(
            FlowHour(
                flow=flow,
                hour=hour_name(hour),
                started=started,
                closed=closed,
                open=still,
                lost=lost,
                unstarted=unstarted,
            )
        )
    return tuple(lines)
