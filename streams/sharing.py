"""Rollouts that share tokens: is each sampled token of a group trained on exactly once? Pure.

A trajectory that branches repeats the tokens before the fork in every branch; one that is summarised repeats the summary as
the context of what follows. `Rollout.shared` says where such tokens were sampled. They count once, however many members hold
them: the member that sampled them trains on them, the others' loss masks leave them out.

Legend: T tokens of one member
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollwire.schemas.errors import Refused
from rollwire.schemas.ids import parse_rollout_id
from rollwire.schemas.records import Rollout, SharedRun

_TOKEN_DTYPES: Final = {"u1": "<u1", "u2": "<u2", "u4": "<u4"}


class _Laid(NamedTuple):
    """One member, token by token."""

    rollout_id: str
    token_ids_T: NDArray[Any]
    trained_T: NDArray[np.bool_]
    sampled_T: NDArray[np.bool_]
    logprob_T: NDArray[np.uint32]  # bits; 0 where nothing was sampled
    version_T: NDArray[np.int64]  # -1 where nothing was sampled
    owner_T: NDArray[np.int64]  # the member that the token comes from
    place_T: NDArray[np.int64]  # and where it stands there


def _lay(index: int, rollout: Rollout) -> _Laid:
    token_ids_T = np.frombuffer(rollout.token_ids, _TOKEN_DTYPES[rollout.token_dtype])
    tokens = token_ids_T.size
    sampled_T = np.zeros(tokens, np.bool_)
    for segment in rollout.segments:
        sampled_T[segment.start : segment.end] = segment.kind == "sampled"
    logprob_T, version_T = np.zeros(tokens, np.uint32), np.full(tokens, -1, np.int64)
    logprob_T[sampled_T] = np.frombuffer(rollout.logprobs, "<u4")
    version_T[sampled_T] = np.concatenate(
        [np.full(span.end - span.start, span.version, np.int64) for span in rollout.spans]
    )
    return _Laid(
        rollout.rollout_id,
        token_ids_T,
        np.frombuffer(rollout.loss_mask, np.uint8) != 0,
        sampled_T,
        logprob_T,
        version_T,
        np.full(tokens, index, np.int64),
        np.arange(tokens),
    )


def _share(own: _Laid, run: SharedRun, origin: _Laid) -> None:
    """Points the run's tokens to where they come from. Raises `Refused` where they are not the same tokens."""
    here, there = slice(run.start, run.end), slice(run.from_start, run.from_start + run.end - run.start)
    if there.stop > origin.token_ids_T.size:
        raise Refused("sharing_invalid", f"{own.rollout_id} shares tokens behind the end of {run.rollout_id}")
    if not np.array_equal(own.token_ids_T[here], origin.token_ids_T[there]):
        raise Refused("sharing_invalid", f"{own.rollout_id} shares other tokens than {run.rollout_id} has")
    claimed = own.sampled_T[here]  # a summary carries no logprobs: its tokens are context here
    for name in ("sampled_T", "logprob_T", "version_T"):
        if not np.array_equal(getattr(own, name)[here][claimed], getattr(origin, name)[there][claimed]):
            raise Refused(
                "sharing_invalid",
                f"{own.rollout_id} shares tokens of {run.rollout_id} with another {name[:-2]}",
            )
    own.owner_T[here], own.place_T[here] = origin.owner_T[there], origin.place_T[there]


def check_sharing(members: Mapping[int, Rollout]) -> None:
    """`members` by index: those that are to be trained on together.

    Raises `Refused("sharing_invalid")` where a shared run is not what it says it is (other tokens, logprobs or versions
    than its origin's, an origin that is not among the members or not of lower index), or a shared sampled token is trained
    on other than exactly once.
    """
    if not any(rollout.shared for rollout in members.values()):
        return
    laid: dict[int, _Laid] = {}
    for index in sorted(members):  # origins come first: they have lower indices
        own = laid[index] = _lay(index, members[index])
        for run in members[index].shared:
            origin = parse_rollout_id(run.rollout_id)[1]
            if origin >= index or origin not in laid or laid[origin].rollout_id != run.rollout_id:
                raise Refused(
                    "sharing_invalid",
                    f"{own.rollout_id} shares tokens of {run.rollout_id}, which is not trained on",
                )
            _share(own, run, laid[origin])
    for owner, origin_laid in laid.items():
        tokens = origin_laid.token_ids_T.size
        times_T, shared_T = np.zeros(tokens, np.int64), np.zeros(tokens, np.bool_)
        for index, own in laid.items():
            from_owner = own.owner_T == owner
            np.add.at(times_T, own.place_T[from_owner & own.trained_T], 1)
            if index != owner:
                shared_T[own.place_T[from_owner]] = True
        wrong = np.flatnonzero(shared_T & origin_laid.sampled_T & (times_T != 1))
        if wrong.size:
            raise Refused(
                "sharing_invalid",
                f"token {wrong[0]} of {origin_laid.rollout_id} is trained on {times_T[wrong[0]]} times",
            )
