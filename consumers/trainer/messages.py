"""What rank 0 and the other ranks' processes say to each other: msgpack over a pipe, never pickle.

Weights and gradients do not travel here; they go through torch.distributed.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Final

import msgspec

from rollwire.consumers.trainer.figures import Figures
from rollwire.consumers.trainer.learner import Head
from rollwire.schemas import errors
from rollwire.schemas.errors import RankLost, RollwireError


class Place(msgspec.Struct, frozen=True):
    """Where a rank reads on: the arguments of `RankWorker.start`."""

    version: int
    offset: int
    last_digest: str | None
    newest_revert: int | None


class Start(msgspec.Struct, frozen=True, tag=True):
    """Take over rank 0's weights by broadcast, then read on from `place`."""

    place: Place
    updates: int
    rng: bytes


class Move(msgspec.Struct, frozen=True, tag=True):
    """Read on from `place`, with the weights held."""

    place: Place


class Read(msgspec.Struct, frozen=True, tag=True):
    """Read the next plan; it is known to be in the log."""


class Compute(msgspec.Struct, frozen=True, tag=True):
    pass


class Apply(msgspec.Struct, frozen=True, tag=True):
    """Reduce and update: a collective, sent only when every rank has its gradient."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    pass


class Done(msgspec.Struct, frozen=True, tag=True):
    pass


class HasPlan(msgspec.Struct, frozen=True, tag=True):
    head: Head


class Computed(msgspec.Struct, frozen=True, tag=True):
    figures: Figures


class Failed(msgspec.Struct, frozen=True, tag=True):
    error: str  # name of a class in rollwire.schemas.errors
    text: str


Command = Start | Move | Read | Compute | Apply | Stop
Reply = Done | HasPlan | Computed | Failed

_commands: Final = msgspec.msgpack.Decoder(Command)
_replies: Final = msgspec.msgpack.Decoder(Reply)


def send(connection: Connection, message: Command | Reply) -> None:
    """Raises `RankLost` when the other side is gone."""
    try:
        connection.send_bytes(msgspec.msgpack.encode(message))
    except OSError as error:
        raise RankLost(f"a rank's pipe is closed: {error}") from error


def receive_command(connection: Connection) -> Command:
    """Waits for rank 0; its death closes the pipe, which is a `Stop`."""
    try:
        return _commands.decode(connection.recv_bytes())
    except (EOFError, OSError):
        return Stop()


def receive_reply(connection: Connection, rank: int, deadline_s: float) -> Reply:
    """Raises what the rank failed with, and `RankLost` for a dead or silent one."""
    try:
        if not connection.poll(deadline_s):
            raise RankLost(f"rank {rank} did not answer within {deadline_s:g} s")
        reply = _replies.decode(connection.recv_bytes())
    except (EOFError, OSError) as error:
        raise RankLost(f"rank {rank} died: see its log") from error
    if isinstance(reply, Failed):
        raise _error(reply, rank)
    return reply


def _error(failed: Failed, rank: int) -> RollwireError:
    kind = getattr(errors, failed.error, RollwireError)
    if not (isinstance(kind, type) and issubclass(kind, RollwireError)) or kind is errors.Refused:
        kind = RollwireError
    return kind(f"rank {rank}: {failed.text}")
