"""zstd frames of deltas: one whole frame or an error, from any number of threads, and no memory spent on what lies."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import tracemalloc
from typing import Final

import pytest
import zstandard
from blake3 import blake3

from rollwire.kernels.delta import frames
from rollwire.kernels.delta.format import PRELUDE_BYTES, read_head
from rollwire.kernels.delta.prepare import prepare_delta
from rollwire.kernels.digest import StateDigest
from rollwire.kernels.tensors import tensor
from rollwire.schemas.errors import DeltaCorrupt

ONE: Final = frames.pack(b"A" * 1_000)
TWO: Final = frames.pack(b"B" * 1_000)
SKIPPABLE: Final = (0x184D2A50).to_bytes(4, "little") + (4).to_bytes(4, "little") + b"note"

_MAGIC: Final = b"\x28\xb5\x2f\xfd"
CLAIMS_2_40: Final = _MAGIC + b"\xe0" + (1 << 40).to_bytes(8, "little") + b"\x01\x00\x00"
"""An empty frame whose header states 2^40 bytes of content."""
WINDOW_512_MIB: Final = _MAGIC + b"\x80\x98" + (1_000).to_bytes(4, "little") + b"\x43\x1f\x00A"
"""1,000 times A, by a frame that asks for a window of 512 MiB."""
SIZELESS: Final = zstandard.ZstdCompressor(level=1, write_content_size=False).compress(b"A" * 1_000)


@pytest.mark.parametrize(
    ("data", "size"),
    [
        (ONE + TWO, 2_000),
        (ONE + TWO, 1_000),
        (ONE + SKIPPABLE, 1_000),
        (SKIPPABLE + ONE, 1_000),
        (ONE + b"junk", 1_000),
    ],
    ids=["two frames", "two frames, one asked for", "a skippable one behind", "one before", "junk"],
)
def test_c79_more_than_one_frame_is_an_error(data: bytes, size: int) -> None:
    with pytest.raises(DeltaCorrupt):
        frames.unpack(data, size)


def test_c81_sixteen_threads_and_four_thousand_payloads() -> None:
    """C81: no frame of another thread, no crash."""
    payloads = [os.urandom(n % 61) + bytes([n % 251]) * (n % 300) for n in range(4_000)]
    wrong: list[int] = []
    start = threading.Barrier(16)

    def work() -> None:
        start.wait(60)
        wrong.extend(n for n, raw in enumerate(payloads) if frames.unpack(frames.pack(raw), len(raw)) != raw)

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


@pytest.mark.parametrize("data", [CLAIMS_2_40, SIZELESS, frames.pack(bytes(200 << 20))])
def test_c82_the_size_that_was_announced_is_the_limit(data: bytes) -> None:
    with pytest.raises(DeltaCorrupt):
        frames.unpack(data, 1_000)


def test_c82_a_shard_announces_no_more_than_its_table_can_hold() -> None:
    """A bomb as the table of a shard: its own header states the 200 MiB, and it is refused before a byte is unpacked."""
    bomb = frames.pack(bytes(200 << 20))
    header = bytearray(PRELUDE_BYTES)
    header[:6] = b"RWDL\x02\x01"
    header[12:16] = (1).to_bytes(4, "little")
    header[80:84] = (1 << 18).to_bytes(4, "little")
    header[104:112] = len(bomb).to_bytes(8, "little")
    header[112:120] = (200 << 20).to_bytes(8, "little")
    with pytest.raises(DeltaCorrupt, match=r"impossible header.*209715200"):
        read_head(bytes(header) + bomb)


_CHILD: Final = """
import sys
from rollwire.kernels.delta import frames
from rollwire.schemas.errors import DeltaCorrupt

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

frames.unpack(frames.pack(b"warm"), 4)
before = peak()
for data in map(bytes.fromhex, sys.stdin.read().split()):
    try:
        frames.unpack(data, 1_000)
    except DeltaCorrupt:
        pass
print(peak() - before)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="the peak of memory is read there")
def test_c82_what_lies_costs_no_memory() -> None:
    bad = [CLAIMS_2_40, WINDOW_512_MIB, SIZELESS, frames.pack(bytes(200 << 20)), ONE + TWO]
    child = subprocess.run(
        [sys.executable, "-P", "-c", _CHILD],
        input=" ".join(data.hex() for data in bad),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert int(child.stdout) < 50 << 10  # KiB


def test_c82_a_table_is_no_larger_than_that_of_the_state_at_hand() -> None:
    """A head whose size allows a table of 8 MB, which could name millions of tensors: refused before it is unpacked."""
    raw = 8_000_000
    packed = frames.pack(bytes(raw)) + bytes(raw // 1_000)
    head = bytearray(PRELUDE_BYTES - 16)
    head[:6] = b"RWDL\x02\x01"
    head[12:16] = (1).to_bytes(4, "little")
    head[80:84] = (1 << 18).to_bytes(4, "little")
    head[104:112] = len(packed).to_bytes(8, "little")
    head[112:120] = raw.to_bytes(8, "little")
    shard = bytes(head) + blake3(bytes(head) + packed).digest(length=16) + packed
    state = {"w": tensor("U8", (4,), bytes(4))}
    digest = StateDigest.of(state)
    with pytest.raises(DeltaCorrupt):  # what is compiled or imported on the way is not what is measured
        prepare_delta(state, digest, [shard])
    tracemalloc.start()
    try:
        with pytest.raises(DeltaCorrupt, match="no delta of this model"):
            prepare_delta(state, digest, [shard])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
