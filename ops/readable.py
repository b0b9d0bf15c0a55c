"""An event as something to read: plain JSON values, arrays as numbers, dead letters opened, sealed content as a word.

Legend: T tokens, S sampled or trained tokens, B sequences, L layers, K experts a token.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, Final

import msgspec
import numpy as np

from rollwire.schemas import records as r
from rollwire.schemas.codec import decode
from rollwire.schemas.errors import Refused
from rollwire.schemas.routes import decode_ids
from rollwire.streams.emit import decode_record, deletes
from rollwire.streams.seams.log import Record

_Array = Callable[[Any, bytes], Any]
Look = Callable[[r.Seal, str, str, bytes], bytes | str]
"""What is shown of a sealed field, given (seal, event id, field, ciphertext): its plaintext, or a word in its place."""


def shut(seal: r.Seal, event_id: str, field: str, ciphertext: bytes) -> str:
    """A `Look` that opens nothing and asks nobody."""
    return "sealed"


def _numbers(dtype: str) -> _Array:
    return lambda event, data: np.frombuffer(data, dtype).tolist()


def _floats(event: Any, data: bytes) -> list[float]:
    """The shortest decimal that names each f4: 0.1, not 0.10000000149011612."""
    return [float(str(value)) for value in np.frombuffer(data, "<f4")]


def _tokens(event: r.Rollout, data: bytes) -> Any:
    return np.frombuffer(data, f"<{event.token_dtype}").tolist()


def _routes(event: r.RoutingTrace, data: bytes) -> Any:
    shape = (event.rows, len(event.layers), event.top_k)
    return decode_ids(event.encoding, data, math.prod(shape), event.num_experts).reshape(shape).tolist()


ARRAYS: Final[dict[tuple[type[r.Event], str], _Array]] = {
    **{
        (kind, name): read
        for kind in (r.Rollout, r.ProductionRollout)
        for name, read in (("token_ids", _tokens), ("loss_mask", _numbers("u1")), ("logprobs", _floats))
    },
    (r.RoutingTrace, "data"): _routes,
    (r.Microbatch, "cu_seqlens"): _numbers("<i4"),
    (r.Microbatch, "token_ids"): _numbers("<u4"),
    (r.Microbatch, "loss_mask"): _numbers("u1"),
    (r.Microbatch, "logprobs"): _floats,
    (r.Microbatch, "versions"): _numbers("<i8"),
    (r.Microbatch, "advantages"): _floats,
}
"""How the byte fields of the records are read. What is not here is raw: text where it is UTF-8, else base64."""


def readable_event(event: r.Event, look: Look = shut) -> dict[str, Any]:
    """The event's fields in order, as JSON values. NaN and infinity become words, since JSON has no such numbers; sealed
    content is what `look` says. Of microbatches with seals, `token_ids` has one element a sequence."""
    shown = {name: _value(event, name, getattr(event, name), look) for name in event.__struct_fields__}
    if isinstance(event, r.DeadLetter):
        shown["inner"] = _inner(event, look)
    return shown


def readable_record(record: Record, look: Look = shut) -> dict[str, Any]:
    """One record of the log: where it stands, its headers, and its event, or why it is none."""
    shown: dict[str, Any] = {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "time": datetime.fromtimestamp(record.timestamp_ms / 1_000, UTC).isoformat(timespec="milliseconds"),
        "key": raw(record.key),
        "headers": {name: raw(value) for name, value in record.headers},
    }
    if deletes(record):
        return {**shown, "deleted": True}
    try:
        return {**shown, "event": readable_event(decode_record(record), look)}
    except Refused as refused:
        return {
            **shown,
            "refused": {"reason": refused.reason, "detail": refused.detail},
            "value": raw(record.value),
        }


def raw(data: bytes | None) -> str | None:
    """Bytes as text: themselves where they are printable UTF-8, else `base64:...`."""
    if data is None:
        return None
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = "\x00"
    return text if text.isprintable() else f"base64:{base64.b64encode(data).decode()}"


def _inner(letter: r.DeadLetter, look: Look) -> dict[str, Any]:
    """The refused event where its body can be read after all (it was late, say), else why not."""
    if letter.reason == "kills_worker":  # whoever decodes it dies, we too
        return {"refused": {"reason": letter.reason, "detail": letter.detail}}
    headers = tuple((header.key, header.value) for header in letter.headers)
    try:
        inner = decode(letter.source.topic, letter.value, headers, letter.key)
    except Refused as refused:
        return {"refused": {"reason": refused.reason, "detail": refused.detail}}
    return {"event": readable_event(inner, look)}


def _value(owner: r.Event, name: str, value: Any, look: Look) -> Any:
    if isinstance(value, bytes):
        match owner, name:
            case (r.Rollout(sealed=r.Seal() as seal), "token_ids"):
                return _looked(owner, name, look(seal, owner.rollout_id, name, value))
            case (r.Feedback(seal=r.Seal() as seal), "comment"):
                return _looked(owner, name, look(seal, owner.feedback_id, name, value))
            case (r.Microbatch(), "token_ids") if owner.seals:
                return list(_by_sequence(owner, look))
            case _:
                pass
        read = ARRAYS.get((type(owner), name))
        return raw(value) if read is None else read(owner, value)
    if isinstance(value, r.Event):
        return readable_event(value, look)
    if isinstance(value, tuple):
        return [_value(owner, name, item, look) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{'-' if value < 0 else ''}Infinity"
    return value


def _looked(owner: r.Event, name: str, seen: bytes | str) -> Any:
    if isinstance(seen, str):
        return seen
    if (read := ARRAYS.get((type(owner), name))) is not None:
        return read(owner, seen)
    try:
        return seen.decode()  # a person's words, line breaks and all
    except UnicodeDecodeError:
        return raw(seen)


def _by_sequence(micro: r.Microbatch, look: Look) -> Iterator[Any]:
    bounds = np.frombuffer(micro.cu_seqlens, "<i4").tolist()
    for index, (start, end) in enumerate(pairwise(bounds)):
        held: bytes | str = micro.token_ids[4 * start : 4 * end]
        if (seal := micro.seals[index]) is not None and isinstance(held, bytes):
            held = look(seal, micro.rollout_ids[index], "token_ids", held)
        yield _looked(micro, "token_ids", held)


def matches(shown: Any, path: str, wanted: str) -> bool:
    """Whether the value at a dotted path is `wanted`. A step into a list is an index, or any element that fits.

    Text is compared as it is; anything else with `wanted` read as JSON, so that 1 equals 1.0 and null is null.
    """
    return _matches(shown, path.split("."), wanted)


def _matches(shown: Any, steps: list[str], wanted: str) -> bool:
    if isinstance(shown, list) and not (steps and steps[0].isdigit()):
        return any(_matches(item, steps, wanted) for item in shown)
    if not steps:
        return _equal(shown, wanted)
    step, rest = steps[0], steps[1:]
    if isinstance(shown, list):
        return int(step) < len(shown) and _matches(shown[int(step)], rest, wanted)
    if isinstance(shown, Mapping):
        # A name with dots of its own (`headers`, `settings`) may stand in one piece.
        whole = ".".join(steps)
        if whole in shown:
            return _matches(shown[whole], [], wanted)
        return step in shown and _matches(shown[step], rest, wanted)
    return False


def _equal(value: Any, wanted: str) -> bool:
    if isinstance(value, str):
        return value == wanted
    try:
        parsed = json.loads(wanted)
    except ValueError:
        return False
    return isinstance(parsed, bool) == isinstance(value, bool) and parsed == value


def json_line(shown: Mapping[str, Any]) -> str:
    """One line of JSON."""
    return msgspec.json.encode(shown).decode()
