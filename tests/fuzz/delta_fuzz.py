"""Fuzzes the readers of deltas, guided by coverage: python -P tests/fuzz/delta_fuzz.py [libFuzzer's options]

An input is one byte that chooses what the rest of it is: a whole shard, the inside of a table, or a chunk's payload with its
count; the latter two get a header and checksums that hold, so that what lies behind these checks is reached. Whatever comes:
a `WeightError`, or a prepared delta; the state's bytes stay. libFuzzer ends the run with an error for a crash, for an input
that takes longer than `-timeout`, and for more memory than `-rss_limit_mb`.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zstandard
from blake3 import blake3

from rollwire.kernels.delta import compose, format, frames, prepare, slices
from rollwire.kernels.delta.apply import DeltaStage
from rollwire.kernels.delta.encode import Coder, encode_delta
from rollwire.kernels.digest import StateDigest
from rollwire.kernels.tensors import CHUNK_ELEMENTS, State, Tensor, part_of, tensor
from rollwire.schemas.errors import WeightError

atheris: Any = importlib.import_module("atheris")  # it has no types

_CODERS: tuple[Coder, ...] = ("gap", "context")
_DTYPES = (("BF16", 2), ("F32", 4), ("F8_E4M3", 1), ("U8", 1), ("I64", 8))


def states() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Two small states: every lane, a tensor of two chunks, an empty one and a scalar."""
    rng = np.random.default_rng(5)
    old, new = {}, {}
    for dtype, lane in _DTYPES:
        size = CHUNK_ELEMENTS + 4_097 if dtype == "BF16" else 1_031
        bits = (rng.standard_normal(size) * 0.02).astype(np.float32).view(np.uint32)
        before = (bits >> np.uint32(16 if lane == 2 else 0)).astype(f"<u{lane}")
        after = before.copy()
        after[rng.random(size) < 0.01] ^= np.asarray(3, after.dtype)
        old[dtype], new[dtype] = tensor(dtype, (size,), before), tensor(dtype, (size,), after)
    for both in (old, new):
        both["empty"] = tensor("F32", (0, 4), b"")
        both["scalar"] = tensor("I64", (), np.array(7, "<u8"))
    return old, new


def sealed(
    table: bytes, payloads: bytes, limits: tuple[int, int, int], base: str, result: str, coder: int
) -> bytes:
    """A shard around any table: its header and its checksum hold. `limits`: largest payload, changes, all payloads."""
    packed = frames.pack(table)
    largest, changed, total = (min(n, 2**32 - 1) for n in limits)
    prelude = format._PRELUDE.pack(
        format.MAGIC, format.FORMAT_VERSION, coder, 0, 0, 1, bytes.fromhex(base), bytes.fromhex(result),
        CHUNK_ELEMENTS, largest, changed, total, len(packed), len(table), bytes(16),
    )[:-16]  # fmt: skip
    return prelude + blake3(prelude + packed).digest(length=16) + packed + payloads


class Harness:
    def __init__(self) -> None:
        self.old, new = states()
        self.kept = {name: t.bits.copy() for name, t in self.old.items()}
        self.digest = StateDigest.of(self.old)
        self.part: State = {"BF16": part_of(self.old["BF16"], CHUNK_ELEMENTS, CHUNK_ELEMENTS + 1)}
        self.result = StateDigest.of(new)
        deltas = [encode_delta(self.old, new, base=self.digest, coder=coder) for coder in _CODERS]
        self.whole = [delta.shards[0] for delta in deltas]
        self.heads = [format.read_head(shard) for shard in self.whole]

    def seeds(self) -> list[bytes]:
        """Inputs that pass, to start from."""
        found: list[bytes] = []
        for shard, head in zip(self.whole, self.heads, strict=True):
            found.append(b"\x00" + shard)
            packed = memoryview(shard)[format.PRELUDE_BYTES : head.head_bytes]
            found.append(b"\x01" + frames.unpack(packed, frames_size(packed)))
            columns = head.columns
            for k in range(columns.chunk_K.size):
                at = head.head_bytes + int(columns.offset_K[k])
                dtype = columns.dtypes[columns.tensor_K[k]]
                which = [name for name, _ in _DTYPES].index(dtype)
                count = int(columns.changed_K[k]).to_bytes(3, "little")
                payload = shard[at : at + int(columns.size_K[k])]
                found.append(
                    bytes([2, which, int(columns.coder_K[k]), int(columns.chunk_K[k])]) + count + payload
                )
        return found

    def one(self, data: bytes) -> None:
        if len(data) < 2:
            return
        kind, rest = data[0] % 3, data[1:]
        shard = rest if kind == 0 else self._of_table(rest) if kind == 1 else self._of_payload(rest)
        if shard is None:
            return
        self._try(lambda: prepare.prepare_delta(self.old, self.digest, [shard]))
        self._try(lambda: prepare.prepare_delta(self.old, self.result, [shard], backwards=True))
        self._try(lambda: DeltaStage(self.old, self.digest).apply([shard]))
        self._try(lambda: compose.compose_deltas([shard], [self.whole[0]]))

        def by_ranges() -> object:
            head = format.read_head(shard)
            return slices.prepare_chunks(self.part, self.digest, head, lambda _, start, end: shard[start:end])

        self._try(by_ranges)

    def _of_table(self, table: bytes) -> bytes | None:
        head = self.heads[0]
        payloads = self.whole[0][head.head_bytes :]
        try:
            columns = msgspec.msgpack.decode(table, type=format.Table)
            found = format._columns(columns)
        except (msgspec.MsgspecError, WeightError, ValueError, OverflowError):
            limits = (0, 0, len(payloads))
        else:
            limits = (int(found.size_K.max(initial=0)), int(found.changed_K.sum()), int(found.size_K.sum()))
        return sealed(table, payloads, limits, head.base, head.result, head.coder)

    def _of_payload(self, data: bytes) -> bytes | None:
        if len(data) < 7:
            return None
        dtype, _ = _DTYPES[data[0] % len(_DTYPES)]
        chunk, changed, payload = data[2] % 2, int.from_bytes(data[3:6], "little"), data[6:]
        t = self.old[dtype]
        row = format.Chunk(
            dtype, dtype, t.shape, chunk, data[1], changed, 0,
            format.payload_checksum(payload), payload,
        )  # fmt: skip
        head = self.heads[0]
        return format.write_shard(0, 1, head.coder, head.base, head.result, [row])[0]

    def _try(self, work: Callable[[], object]) -> None:
        with contextlib.suppress(WeightError):
            work()
        for name, bits in self.kept.items():
            if not np.array_equal(self.old[name].bits, bits):
                raise RuntimeError(f"{name} was written to")


def frames_size(frame: bytes | memoryview) -> int:
    return zstandard.frame_content_size(bytes(frame))


def main() -> None:
    # Only what runs as bytecode: compiled loops cannot be compiled from instrumented functions.
    for function in (
        format.read_head, format._columns, frames.unpack, prepare.read_shard, prepare.check_tensors,
        prepare.decode_chunks, prepare.settle, slices.ranges_of, slices.prepare_chunks,
        compose.compose_deltas, compose._parts, compose._compose,
    ):  # fmt: skip
        atheris.instrument_func(function)
    harness = Harness()
    for seed in harness.seeds():
        harness.one(seed)  # compiles every loop before the clock of an input runs
    if "--seeds" in sys.argv:
        at = sys.argv.index("--seeds")
        folder = Path(sys.argv[at + 1])
        folder.mkdir(parents=True, exist_ok=True)
        for i, seed in enumerate(harness.seeds()):
            (folder / f"seed-{i}").write_bytes(seed)
        del sys.argv[at : at + 2]
        sys.argv.append(str(folder))
    atheris.Setup(sys.argv, harness.one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
