"""Cells of bad input: what a replica is given is wrong, or what a trainer hands in is. Each is refused by name, the version that
serves goes on serving, and the next good version is served.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import msgspec
import numpy as np

from rollwire.consumers.weights.keys import anchor_key, sha256_hex
from rollwire.consumers.weights.links import put_shards
from rollwire.consumers.weights.manifest import FORMAT_MADE, Manifest, encode_manifest
from rollwire.consumers.weights.publisher import SnapshotPublisher
from rollwire.kernels.delta.encode import encode_delta
from rollwire.kernels.delta.format import Chunk, read_head, write_shard
from rollwire.kernels.tensors import State, Tensor
from rollwire.ops.chaos.weights.judge import CellFailed, Reports, ended_well, judge_status
from rollwire.ops.chaos.weights.lives import Role, Task
from rollwire.ops.chaos.weights.matrix import Bench, commit_event, new_lineage, stored
from rollwire.ops.chaos.weights.roles import WAIT_S
from rollwire.ops.chaos.weights.states import PUBLISHER, digest_of, model_of, state_of
from rollwire.schemas.errors import StateMismatch
from rollwire.schemas.records import LinkObject, WeightVersion
from rollwire.streams.seams.store import ObjectStore

Events = list[WeightVersion]
_NAME: Final = "layers.1.weight"
_GOOD: Final = 2  # the version after the bad one: it has an anchor, so it does not rest on it


class Input(NamedTuple):
    """`spoil` gives the events to commit one after the other; the last one is bad. It is refused with an error of this
    name, whose text has `says` in it."""

    name: str
    spoil: Callable[[ObjectStore, Events], Events]
    error: str
    says: str


def replica_input_cell(bench: Bench, bad: Input, role: Role = "numpy") -> None:
    """A replica is given something wrong. Raises `CellFailed`."""
    lineage = new_lineage()
    events = stored(bench.store, lineage)
    *good, spoilt = bad.spoil(bench.store, events)
    writer, reports = bench.log.writer(), Reports(bench.log, lineage)
    for event in good:
        commit_event(writer, event)
    life = bench.lives.start(Task(role, lineage, _GOOD))
    serving = good[-1].version if good else -1
    given, healed = not good, False
    if given:
        commit_event(writer, spoilt)
    deadline = time.monotonic() + WAIT_S
    try:
        while (end := life.ended()) is None:
            for status in reports.poll():
                judge_status(status, status.reason if given and status.state == "refused" else "")
                if status.state == "swapped" and status.version == serving and not given:
                    given = True
                    commit_event(writer, spoilt)
                if status.state == "refused" and not healed:
                    if status.version != serving:
                        raise CellFailed(f"version {status.version} serves, version {serving} did before")
                    if bad.error not in status.reason or bad.says not in status.reason:
                        raise CellFailed(f"it was refused as: {status.reason}")
                    healed = True
                    commit_event(writer, events[_GOOD])
            if time.monotonic() > deadline:
                raise CellFailed(
                    "it was never refused" if not healed else "the next good version is not served"
                )
        ended_well(end, "who follows")
        reports.drain()
        if not healed or reports.all[-1].version != _GOOD:
            raise CellFailed(
                f"it was {'' if healed else 'not '}refused; version {reports.all[-1].version} serves"
            )
    finally:
        life.kill()
        reports.close()
        writer.close()


def publisher_input_cell(bench: Bench, name: str) -> None:
    """A trainer hands in other tensors than before (C27, C31): no version, and the right ones make it afterwards. Raises
    `CellFailed`."""
    lineage = new_lineage()
    publisher = SnapshotPublisher(bench.store, model=model_of(lineage), lineage=lineage, config=PUBLISHER)
    try:
        publisher.publish(0, state_of(0)).result(WAIT_S)
        publisher.committed(0)
        spoilt = OTHER_TENSORS[name](state_of(1))
        try:
            publisher.submit(1, 1, spoilt).result(WAIT_S)
        except StateMismatch as error:
            if _NAME not in str(error):
                raise CellFailed(f"the error does not name {_NAME}: {error}") from error
        else:
            raise CellFailed("it was published")
        publisher.discard_from(1)
        if publisher.publish(1, state_of(1)).result(WAIT_S).state_digest != digest_of(1):
            raise CellFailed("what was published afterwards is not version 1")
    finally:
        publisher.close(WAIT_S)


def _renamed(state: State) -> State:
    return {("layers.1.other" if name == _NAME else name): t for name, t in state.items()}


def _missing(state: State) -> State:
    return {name: t for name, t in state.items() if name != _NAME}


def _extra(state: State) -> State:
    return {**state, f"{_NAME}.extra": state["norm.weight"]}


def _with(state: State, tensor: Callable[[Tensor], Tensor]) -> State:
    return {name: (tensor(t) if name == _NAME else t) for name, t in state.items()}


OTHER_TENSORS: Final[Mapping[str, Callable[[State], State]]] = {
    "a tensor is renamed": _renamed,
    "a tensor is missing": _missing,
    "a tensor is extra": _extra,
    "a tensor has another shape": lambda state: _with(state, lambda t: t._replace(shape=t.shape[::-1])),
    "a tensor has another type": lambda state: _with(state, lambda t: t._replace(dtype="F16")),
    "a tensor has an unknown type": lambda state: _with(state, lambda t: t._replace(dtype="F4_NEW")),
}


def _objects(store: ObjectStore, event: WeightVersion, old: State, new: State) -> tuple[LinkObject, ...]:
    delta = encode_delta(old, new, shard_bytes=1)
    return put_shards(store, event.model, delta.shards, delta.heads)


def _one_bit_off(state: State) -> State:
    """The last bit of the first element of one tensor is another one."""

    def flipped(t: Tensor) -> Tensor:
        bits = np.array(t.bits)
        bits[0] ^= 1
        return t._replace(bits=bits)

    return _with(state, flipped)


def _instead(event: WeightVersion, objects: tuple[LinkObject, ...]) -> WeightVersion:
    return msgspec.structs.replace(event, objects=objects)


def _overwritten(store: ObjectStore, key: str, data: bytes) -> None:
    store.delete(key)
    store.create(key, data)


def _cut(store: ObjectStore, events: Events) -> Events:
    key = events[1].objects[-1].key
    _overwritten(store, key, store.get(key)[:-1])
    return events[:2]


def _damaged(store: ObjectStore, events: Events) -> Events:
    key = events[1].objects[0].key
    data = bytearray(store.get(key))
    data[-1] ^= 1
    _overwritten(store, key, bytes(data))
    return events[:2]


def _gone(store: ObjectStore, events: Events) -> Events:
    store.delete(events[1].objects[-1].key)
    return events[:2]


def _made(store: ObjectStore, events: Events, forge: Callable[[bytes], bytes]) -> Events:
    """Version 1 with shards that are as they were announced, but made by something else."""
    shards = [forge(store.get(entry.key)) for entry in events[1].objects]
    heads = [
        min(entry.head_bytes, len(shard)) for entry, shard in zip(events[1].objects, shards, strict=True)
    ]
    return [events[0], _instead(events[1], put_shards(store, events[1].model, shards, heads))]


def _unknown_type(shard: bytes) -> bytes:
    head = read_head(shard)
    of = head.columns
    chunks: list[Chunk] = []
    for k, tensor in enumerate(of.tensor_K):
        start = head.head_bytes + int(of.offset_K[k])
        chunks.append(
            Chunk(
                name=of.names[tensor],
                dtype="F4_NEW",
                shape=of.shapes[tensor],
                chunk=int(of.chunk_K[k]),
                coder=int(of.coder_K[k]),
                changed=int(of.changed_K[k]),
                total=of.total(k),
                checksum=int(of.checksum_K[k]),
                payload=shard[start : start + int(of.size_K[k])],
            )
        )
    return write_shard(head.shard, head.shards, head.coder, head.base, head.result, chunks)[0]


def _newer_shard(shard: bytes) -> bytes:
    return shard[:4] + bytes([shard[4] + 1]) + shard[5:]


def _other_layout(change: Callable[[State], State]) -> Callable[[ObjectStore, Events], Events]:
    """Version 1 as a delta between states of other tensors, by somebody who always had them so."""

    def spoil(store: ObjectStore, events: Events) -> Events:
        first = events[0]
        publisher = SnapshotPublisher(store, model=first.model, lineage=first.lineage, config=PUBLISHER)
        try:
            publisher.publish(0, change(state_of(0))).result(WAIT_S)
            publisher.committed(0)
            other = publisher.publish(1, change(state_of(1))).result(WAIT_S)
        finally:
            publisher.close(WAIT_S)
        return [first, other]

    return spoil


def _manifest(change: Callable[[Manifest], object]) -> Callable[[ObjectStore, Events], Events]:
    """Version 0 with another manifest."""

    def spoil(store: ObjectStore, events: Events) -> Events:
        event = events[0]
        held = msgspec.json.decode(store.get(event.manifest.key), type=Manifest)
        made = change(held)
        if isinstance(made, Manifest):
            claim, data = encode_manifest(made)
        else:
            data = msgspec.json.encode(made)
            claim = msgspec.structs.replace(event.manifest, size=len(data), sha256=sha256_hex(data))
            claim = msgspec.structs.replace(claim, key=f"{event.manifest.key}.other")
        store.create(claim.key, data)
        return [msgspec.structs.replace(event, manifest=claim, anchor=claim)]

    return spoil


def _newer_manifest(manifest: Manifest) -> object:
    fields = {name: getattr(manifest, name) for name in manifest.__struct_fields__}
    return {**fields, "format": FORMAT_MADE + 1, "regions": ["new"]}


def _manifest_gone(store: ObjectStore, events: Events) -> Events:
    store.delete(events[0].manifest.key)
    return events[:1]


def _unknown_in_anchor(store: ObjectStore, events: Events) -> Events:
    """Version 0 whose snapshot has a type that nobody knows."""

    def change(manifest: Manifest) -> Manifest:
        objects = []
        for entry in manifest.objects:
            data = store.get(entry.key).replace(b'"BF16"', b'"XX16"')
            sha256 = sha256_hex(data)
            key = anchor_key(manifest.model, sha256, entry.file)
            store.create(key, data)
            objects.append(msgspec.structs.replace(entry, key=key, sha256=sha256))
        return msgspec.structs.replace(manifest, objects=tuple(objects))

    return _manifest(change)(store, events)


INPUTS: Final[tuple[Input, ...]] = (
    Input(
        "a delta for another base",
        lambda store, events: [events[0], _instead(events[1], events[4].objects)],
        "BaseMismatch",
        "version 1",
    ),
    Input(
        "a delta for a base that is one bit off",
        lambda store, events: [
            events[0],
            _instead(events[1], _objects(store, events[1], _one_bit_off(state_of(0)), state_of(1))),
        ],
        "BaseMismatch",
        "version 1",
    ),
    Input(
        "a delta whose result is one bit off",
        lambda store, events: [
            events[0],
            _instead(events[1], _objects(store, events[1], state_of(0), _one_bit_off(state_of(1)))),
        ],
        "DigestMismatch",
        "version 1",
    ),
    Input("a shard is missing: a pruned chain", _gone, "ObjectMissing", "/deltas/"),
    Input("a shard is cut", _cut, "DeltaCorrupt", "/deltas/"),
    Input("a shard is damaged", _damaged, "DeltaCorrupt", "/deltas/"),
    Input(
        "a shard is not named",
        lambda _, events: [events[0], _instead(events[1], events[1].objects[:-1])],
        "DeltaCorrupt",
        "shards",
    ),
    Input(
        "a shard is named twice",
        lambda _, events: [events[0], _instead(events[1], (*events[1].objects[:-1], events[1].objects[0]))],
        "DeltaCorrupt",
        "shard",
    ),
    Input(
        "a shard is of another delta",
        lambda _, events: [events[0], _instead(events[1], (*events[1].objects[:-1], events[4].objects[-1]))],
        "Mismatch",
        "version 1",
    ),
    Input(
        "a shard of a newer format", lambda store, events: _made(store, events, _newer_shard), "FormatUnknown", "upgrade"
    ),
    Input(
        "a shard with an unknown type",
        lambda store, events: _made(store, events, _unknown_type),
        "StateMismatch",
        "F4_NEW",
    ),
    *(
        Input(f"{name}, in a delta", _other_layout(change), "StateMismatch", "layers.1.")
        for name, change in OTHER_TENSORS.items()
        if "unknown" not in name
    ),
    Input("a manifest of a newer format", _manifest(_newer_manifest), "FormatUnknown", "upgrade"),
    Input("a manifest is missing", _manifest_gone, "ObjectMissing", "/manifests/"),
    Input(
        "a manifest of another version",
        _manifest(lambda held: msgspec.structs.replace(held, version=7)),
        "DeltaCorrupt",
        "manifest",
    ),
    Input(
        "a manifest that does not know a tensor",
        _manifest(lambda held: msgspec.structs.replace(held, tensors=held.tensors[1:])),
        "StateMismatch",
        "layers.0.weight",
    ),
    Input("a snapshot with an unknown type", _unknown_in_anchor, "", "version 0"),
)  # fmt: skip
