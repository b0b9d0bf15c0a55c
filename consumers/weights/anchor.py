"""Anchors: full snapshots that any Hugging Face tool opens (sharded safetensors, index, config.json)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, TensorSpec, deserialize, serialize

from rollwire.kernels.tensors import State, Tensor, lane_dtype, tensor
from rollwire.schemas.errors import DeltaCorrupt, StateMismatch

# safetensors writes its tags, but wants them spelt as torch spells its types.
_SPELLING: Final = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
}
PATTERN: Final = "model{suffix}.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
CONFIG_FILE: Final = "config.json"


class AnchorFile(NamedTuple):
    file: str
    data: bytes


class AnchorPlan(NamedTuple):
    """Which tensors go into which file, before a byte of them is read."""

    files: tuple[tuple[str, tuple[str, ...]], ...]  # name of the file, names of its tensors
    others: tuple[
        AnchorFile, ...
    ]  # the index where there are several shards, `config.json` where it is known


def plan_anchor(
    nbytes: Mapping[str, int], *, shard_bytes: int, hf_config: Mapping[str, Any] | None = None
) -> AnchorPlan:
    """`nbytes`: size of each tensor. The same for equal sizes, whatever the order of the mapping."""
    split = split_state_dict_into_shards_factory(
        {name: nbytes[name] for name in sorted(nbytes)},
        get_storage_size=lambda size: size,
        filename_pattern=PATTERN,
        max_shard_size=shard_bytes,
    )
    others: list[AnchorFile] = []
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        others.append(AnchorFile(INDEX_FILE, _json(index)))
    if hf_config is not None:
        others.append(AnchorFile(CONFIG_FILE, _json(hf_config)))
    files = tuple((file, tuple(names)) for file, names in split.filename_to_tensors.items())
    return AnchorPlan(files, tuple(others))


def write_anchor(
    state: State, *, shard_bytes: int, hf_config: Mapping[str, Any] | None = None
) -> list[AnchorFile]:
    """The files of one snapshot: shards, the index where there are several, `config.json` where it is known.

    Equal states give equal bytes, whatever the order of the mapping. Raises `StateMismatch` for an unknown dtype.
    """
    sizes = {name: t.nbytes for name, t in state.items()}
    plan = plan_anchor(sizes, shard_bytes=shard_bytes, hf_config=hf_config)
    return [*(AnchorFile(file, anchor_file(state, names)) for file, names in plan.files), *plan.others]


def read_anchor(files: Sequence[AnchorFile]) -> dict[str, Tensor]:
    """The state of an anchor's shards; files of other kinds are skipped. Raises `DeltaCorrupt`, `StateMismatch`."""
    state: dict[str, Tensor] = {}
    for file, data in files:
        if not file.endswith(".safetensors"):
            continue
        try:
            entries: list[tuple[str, dict[str, Any]]] = deserialize(data)  # type: ignore[no-untyped-call]
        except SafetensorError as error:
            raise DeltaCorrupt(f"{file} is no safetensors file: {error}") from error
        for name, entry in entries:
            if name in state:
                raise StateMismatch(f"{name!r} is in two shards of an anchor")
            state[name] = tensor(entry["dtype"], tuple(entry["shape"]), entry["data"])
    return state


def safetensors_head(file: str, data: bytes) -> int:
    """Bytes before the first tensor's: what a reader of a slice reads first. 0 for a file of another kind."""
    return 8 + int.from_bytes(data[:8], "little") if file.endswith(".safetensors") else 0


class Extent(NamedTuple):
    """Where a tensor lies in its file, in bytes from the file's start."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class _Stored(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_extents(file: str, head: bytes, size: int) -> dict[str, Extent]:
    """The tensors of a safetensors file of `size` bytes, from its first bytes (`safetensors_head` of them).

    Raises `DeltaCorrupt` for anything else, and for a tensor beyond the file.
    """
    try:
        header = msgspec.json.decode(head[8:], type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        stored = {name: msgspec.json.decode(raw, type=_Stored) for name, raw in header.items()}
    except msgspec.MsgspecError as error:
        raise DeltaCorrupt(f"{file} is no safetensors file: {error}") from error
    extents: dict[str, Extent] = {}
    for name, entry in stored.items():
        start, end = (len(head) + offset for offset in entry.data_offsets)
        length = math.prod(entry.shape) * lane_dtype(entry.dtype).itemsize
        if not len(head) <= start <= end <= size or end - start != length:
            raise DeltaCorrupt(
                f"{file}: {name!r} at {start} to {end} of {size} bytes, its shape needs {length}"
            )
        extents[name] = Extent(entry.dtype, entry.shape, start, end)
    return extents


def anchor_file(state: State, names: Sequence[str]) -> bytes:
    """One safetensors file of whole tensors. Raises `StateMismatch` for an unknown dtype."""
    for name in names:
        if state[name].dtype not in _SPELLING:
            raise StateMismatch(f"{name}: safetensors has no dtype {state[name].dtype!r}")
    # The arrays outlive the call, as safetensors demands of what it gets by address.
    held = {name: np.ascontiguousarray(state[name].bits) for name in sorted(names)}
    specs = {
        name: TensorSpec(
            dtype=_SPELLING[state[name].dtype],
            shape=list(state[name].shape),
            data_ptr=bits.ctypes.data,
            data_len=bits.nbytes,
        )
        for name, bits in held.items()
    }
    return bytes(serialize(specs, {"format": "pt"}))  # transformers opens no file without this note


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()
