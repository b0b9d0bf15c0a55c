"""The gap coder: exact for every bit pattern and dtype, refuses every damage, writes the documented bytes."""

from __future__ import annotations

import struct
import threading

import msgspec
import numpy as np
import pytest
import zstandard
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwire.kernels.delta import frames
from rollwire.kernels.delta.apply import DeltaStage, apply_delta
from rollwire.kernels.delta.encode import Delta, encode_delta
from rollwire.kernels.delta.format import PRELUDE_BYTES, payload_checksum, read_head
from rollwire.kernels.delta.gap import OK, parse_gap
from rollwire.kernels.digest import StateDigest
from rollwire.kernels.tensors import CHUNK_ELEMENTS, LANE_BYTES, State, Tensor, tensor
from rollwire.schemas.errors import (
    BaseMismatch,
    DeltaCorrupt,
    DigestMismatch,
    FormatUnknown,
    StateMismatch,
    WeightError,
)


def raw_bits(state: State) -> dict[str, bytes]:
    return {name: t.bits.tobytes() for name, t in state.items()}


def assert_round_trip(old: State, new: State) -> Delta:
    before = raw_bits(old)
    delta = encode_delta(old, new)
    applied = apply_delta(old, delta.shards)
    assert raw_bits(applied.state) == raw_bits(new)
    assert {n: (t.dtype, t.shape) for n, t in applied.state.items()} == {
        n: (t.dtype, t.shape) for n, t in new.items()
    }
    assert applied.digest.hex == delta.result.hex == StateDigest.of(new).hex
    assert raw_bits(old) == before
    return delta


def pair(dtype: str, size: int, density: float, seed: int) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    lane = LANE_BYTES[dtype]
    old = rng.integers(0, 256, size * lane, dtype=np.uint8).view(f"<u{lane}")
    new = np.where(
        rng.random(size) < density, rng.integers(0, 256, size * lane, dtype=np.uint8).view(f"<u{lane}"), old
    )
    return tensor(dtype, (size,), old), tensor(dtype, (size,), new)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted(LANE_BYTES)),
            st.integers(0, 2000),
            st.sampled_from([0.0, 0.002, 0.1, 1.0]),
            st.integers(0, 2**31),
        ),
        max_size=5,
    )
)
@settings(max_examples=150, deadline=None)
def test_any_states_round_trip(recipe: list[tuple[str, int, float, int]]) -> None:
    pairs = [pair(*entry) for entry in recipe]
    old = {f"t{i}": a for i, (a, _) in enumerate(pairs)}
    new = {f"t{i}": b for i, (_, b) in enumerate(pairs)}
    delta = assert_round_trip(old, new)
    assert delta.changed_elements == sum(int((a.bits != b.bits).sum()) for a, b in pairs)
    assert delta.total_elements == sum(a.bits.size for a, _ in pairs)


@given(st.lists(st.tuples(st.integers(0, 0xFFFF), st.integers(0, 0xFFFF)), max_size=64))
def test_c32_any_bf16_patterns(patterns: list[tuple[int, int]]) -> None:
    old = np.array([a for a, _ in patterns], dtype=np.uint16)
    new = np.array([b for _, b in patterns], dtype=np.uint16)
    assert_round_trip({"w": tensor("BF16", old.shape, old)}, {"w": tensor("BF16", new.shape, new)})


def test_c32_signed_zeros_and_nan_payloads_are_bit_changes() -> None:
    """C32."""
    old = np.array([0x0000, 0x8000, 0x7FC0, 0x7FC0, 0x7FC0, 0x7F80], dtype=np.uint16)
    new = np.array([0x8000, 0x0000, 0x7FC1, 0xFFC0, 0x7F81, 0x7F80], dtype=np.uint16)
    delta = assert_round_trip({"w": tensor("BF16", (6,), old)}, {"w": tensor("BF16", (6,), new)})
    assert delta.changed_elements == 5


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F8_E4M3", "F8_E5M2"])
def test_every_pattern_to_a_shuffled_one(dtype: str) -> None:
    lane = LANE_BYTES[dtype]
    every = np.arange(256**lane, dtype=f"<u{lane}")
    other = np.random.default_rng(3).permutation(every)
    assert_round_trip({"w": tensor(dtype, every.shape, every)}, {"w": tensor(dtype, other.shape, other)})


def test_small_steps_across_zero_are_one_ulp() -> None:
    """-0.0 and the smallest negative number are neighbours: a change costs the value 1 or 2, not a jump of half the range."""
    old = np.full(4096, 0x0000, dtype=np.uint16)
    new = np.full(4096, 0x8000, dtype=np.uint16)
    near = assert_round_trip({"w": tensor("BF16", (4096,), old)}, {"w": tensor("BF16", (4096,), new)})
    payload = np.frombuffer(near.shards[0][near.heads[0] :], dtype=np.uint8)
    positions, steps = np.empty(4096, np.uint32), np.empty(4096, np.uint16)
    assert parse_gap(payload, 4096, positions, steps) == OK
    assert (positions == np.arange(4096)).all()
    assert set(steps) == {0xFFFF}  # one step down
    assert payload.size < 4096 * 2 / 8 + 4  # a bit for the gap, a bit for the sign


def test_c30_scalars_empty_tensors_and_one_change() -> None:
    """C30."""
    old = {
        "step": tensor("I64", (), (41).to_bytes(8, "little")),
        "empty": tensor("F32", (0, 4), b""),
        "one": tensor("F32", (1,), bytes(4)),
    }
    new = old | {"step": tensor("I64", (), (42).to_bytes(8, "little"))}
    delta = assert_round_trip(old, new)
    assert delta.changed_elements == 1
    assert delta.total_elements == 2


def test_c29_layouts_keep_their_logical_order() -> None:
    """C29: transposed, sliced, expanded and Fortran-order arrays."""
    base = np.arange(12, dtype=np.float32).reshape(3, 4)
    views = {
        "transposed": base.T,
        "column": base[:, 1:2],
        "expanded": np.broadcast_to(base[0], (5, 4)),
        "fortran": np.asfortranarray(base),
    }
    old = {name: tensor("F32", view.shape, np.zeros(view.shape, np.float32)) for name, view in views.items()}
    new = {name: tensor("F32", view.shape, view) for name, view in views.items()}
    applied = apply_delta(old, encode_delta(old, new).shards)
    for name, view in views.items():
        result = applied.state[name].bits.view(np.float32).reshape(view.shape)
        assert (result == view).all()


def test_c31_odd_widths_and_packed_formats() -> None:
    """C31: padded E8M0 scales, odd rows of packed 4-bit values, bools."""
    for dtype, shape in (("F8_E8M0", (7, 3)), ("U8", (5, 13)), ("BOOL", (9,)), ("I8", (1, 1, 11))):
        size = int(np.prod(shape))
        old, new = pair(dtype, size, 0.5, seed=size)
        assert_round_trip({"w": Tensor(dtype, shape, old.bits)}, {"w": Tensor(dtype, shape, new.bits)})


def test_c31_a_made_up_dtype_is_refused_before_anything() -> None:
    fake = Tensor("F4_E9M9", (4,), np.zeros(4, np.uint8))
    with pytest.raises(StateMismatch, match="F4_E9M9"):
        encode_delta({"w": fake}, {"w": fake})


def test_wide_gaps_and_several_chunks_and_shards() -> None:
    size = 2 * CHUNK_ELEMENTS + 12_345
    old = np.zeros(size, dtype=np.uint8)
    new = old.copy()
    for at in (0, 254, 255 + 255, 1000, CHUNK_ELEMENTS - 1, CHUNK_ELEMENTS, size - 1):
        new[at] = 9
    dense = np.random.default_rng(0).integers(0, 2**16, 3 * CHUNK_ELEMENTS, dtype=np.uint16)
    states = (
        {"big": tensor("U8", (size,), old), "dense": tensor("BF16", dense.shape, np.zeros_like(dense))},
        {"big": tensor("U8", (size,), new), "dense": tensor("BF16", dense.shape, dense)},
    )
    assert_round_trip(*states)
    one = encode_delta(*states)
    several = encode_delta(*states, shard_bytes=1 << 20, threads=2)
    assert len(one.shards) == 1
    assert len(several.shards) == 3
    assert several == encode_delta(*states, shard_bytes=1 << 20)._replace(result=several.result)
    applied = apply_delta(states[0], reversed(several.shards))
    assert applied.digest.hex == one.result.hex


def test_c24_equal_states_have_no_shards() -> None:
    """C24: an empty delta, with an equal digest."""
    old, _ = pair("BF16", 100, 0.5, seed=1)
    delta = encode_delta({"w": old}, {"w": Tensor(old.dtype, old.shape, old.bits.copy())})
    assert delta.shards == ()
    assert delta.result.hex == delta.base
    applied = apply_delta({"w": old}, delta.shards)
    assert applied.state["w"].bits is old.bits


@pytest.mark.parametrize(
    "new_names", [["blocks.0.to_q.weight", "b"], ["b"], ["blocks.0.attn1.to_q.weight", "b", "c"]]
)
def test_c27_renamed_dropped_and_added_tensors_are_refused(new_names: list[str]) -> None:
    """C27."""
    t, _ = pair("BF16", 10, 0.0, seed=0)
    with pytest.raises(StateMismatch, match="lacks"):
        encode_delta({"blocks.0.attn1.to_q.weight": t, "b": t}, dict.fromkeys(new_names, t))


def test_other_dtype_or_shape_is_refused_on_both_sides() -> None:
    a, b = pair("BF16", 12, 1.0, seed=0)
    for other in (Tensor("F16", (12,), b.bits), Tensor("BF16", (3, 4), b.bits)):
        with pytest.raises(StateMismatch, match="w:"):
            encode_delta({"w": a}, {"w": other})
        with pytest.raises(StateMismatch, match="w:"):
            apply_delta(
                {"w": Tensor(other.dtype, other.shape, a.bits)}, encode_delta({"w": a}, {"w": b}).shards
            )
    with pytest.raises(StateMismatch, match="not held"):
        apply_delta({"v": a}, encode_delta({"w": a}, {"w": b}).shards)


def test_c23_another_base_is_refused_and_nothing_moves() -> None:
    """C23: a delta on v2 is not applied to v1, nor twice."""
    v1, v2 = pair("BF16", 500, 0.1, seed=1)
    _, v3 = pair("BF16", 500, 0.1, seed=2)
    delta = encode_delta({"w": v2}, {"w": v3})
    before = v1.bits.copy()
    with pytest.raises(BaseMismatch, match="held is"):
        apply_delta({"w": v1}, delta.shards)
    with pytest.raises(BaseMismatch):
        apply_delta({"w": v3}, delta.shards)
    assert (v1.bits == before).all()


def test_a_base_digest_that_lies_is_caught_by_the_next_full_check() -> None:
    """Somebody flipped a bit in memory: the incremental digest believes its base, blake3 and a recount do not."""
    v1, v2 = pair("BF16", 500, 0.1, seed=1)
    delta = encode_delta({"w": v1}, {"w": v2})
    damaged = v1.bits.copy()
    damaged[int(np.flatnonzero(v1.bits == v2.bits)[0])] ^= 1
    applied = apply_delta(
        {"w": Tensor("BF16", (500,), damaged)}, delta.shards, digest=StateDigest.of({"w": v1})
    )
    assert StateDigest.of(applied.state).hex != applied.digest.hex
    with pytest.raises(BaseMismatch):
        apply_delta({"w": Tensor("BF16", (500,), damaged)}, delta.shards)


def small_delta() -> tuple[State, Delta]:
    a, b = pair("BF16", 300, 0.05, seed=5)
    c, d = pair("F32", 20, 0.5, seed=6)
    old = {"a": a, "c": c}
    return old, encode_delta(old, {"a": b, "c": d})


def test_every_single_byte_of_damage_is_refused() -> None:
    old, delta = small_delta()
    before = raw_bits(old)
    shard = delta.shards[0]
    for at in range(len(shard)):
        for flip in (0x01, 0x80, 0xFF):
            bad = bytearray(shard)
            bad[at] ^= flip
            with pytest.raises((DeltaCorrupt, FormatUnknown)):
                apply_delta(old, [bytes(bad)])
    for length in range(len(shard)):
        with pytest.raises(DeltaCorrupt):
            apply_delta(old, [shard[:length]])
    with pytest.raises(DeltaCorrupt):
        apply_delta(old, [shard + b"\0"])
    assert raw_bits(old) == before


def unsealed(shard: bytes) -> tuple[bytearray, list[bytearray]]:
    """The table's MessagePack and the payloads of a shard."""
    head = read_head(shard)
    packed, raw = struct.unpack_from("<QQ", shard, 104)
    table = bytearray(frames.unpack(shard[PRELUDE_BYTES : PRELUDE_BYTES + packed], raw))
    payloads, at = [], head.head_bytes
    for size in head.columns.size_K.tolist():
        payloads.append(bytearray(shard[at : at + size]))
        at += size
    return table, payloads


def resealed(shard: bytes, table: bytes, payloads: list[bytes]) -> bytes:
    """The shard with another content and sums that hold: damage by a writer, not by the way."""
    try:
        columns = msgspec.msgpack.decode(table)
        columns[6] = b"".join(payload_checksum(payload).to_bytes(8, "little") for payload in payloads)
        table = msgspec.msgpack.encode(columns)
    except (msgspec.MsgspecError, UnicodeDecodeError, TypeError, LookupError):
        pass  # not a table any more: what the reader must survive
    packed = frames.pack(table)
    prelude = bytearray(shard[: PRELUDE_BYTES - 16])
    struct.pack_into("<QQQ", prelude, 96, sum(len(p) for p in payloads), len(packed), len(table))
    seal = blake3(bytes(prelude) + packed).digest(length=16)
    return b"".join([bytes(prelude), seal, packed, *payloads])


@given(st.data())
@settings(max_examples=400, deadline=None)
def test_damage_under_right_checksums_never_passes_as_the_result(data: st.DataObject) -> None:
    """Bounds are checked, not only sums: whatever the bytes are, an error of ours or the right state comes out."""
    old, delta = small_delta()
    shard = delta.shards[0]
    table, payloads = unsealed(shard)
    victim = data.draw(st.sampled_from([table, *payloads]))
    for _ in range(data.draw(st.integers(1, 4))):
        victim[data.draw(st.integers(0, len(victim) - 1))] ^= data.draw(st.integers(1, 255))
    before = raw_bits(old)
    bad = resealed(shard, bytes(table), [bytes(payload) for payload in payloads])
    for backwards in (False, True):
        base = apply_delta(old, delta.shards).state if backwards else old
        wanted = StateDigest.of(old).hex if backwards else delta.result.hex
        try:
            applied = apply_delta(base, [bad], backwards=backwards)
        except WeightError:
            pass
        else:  # the bits behind the last change, say
            assert StateDigest.of(applied.state).hex == wanted
    assert raw_bits(old) == before


def test_missing_repeated_and_foreign_shards() -> None:
    old, new = pair("BF16", 2 * CHUNK_ELEMENTS, 1.0, seed=1)
    delta = encode_delta({"w": old}, {"w": new}, shard_bytes=1)
    assert len(delta.shards) == 2
    with pytest.raises(DeltaCorrupt, match="1 of 2"):
        apply_delta({"w": old}, delta.shards[:1])
    with pytest.raises(DeltaCorrupt, match="repeat"):
        apply_delta({"w": old}, [delta.shards[0], delta.shards[0]])


def test_unknown_versions_and_coders_are_named() -> None:
    old, delta = small_delta()
    shard = bytearray(delta.shards[0])
    shard[4] = 3
    with pytest.raises(FormatUnknown, match=r"version 3.*upgrade"):
        apply_delta(old, [bytes(shard)])
    shard[4], shard[5] = 2, 9
    with pytest.raises(FormatUnknown, match="coder 9"):
        apply_delta(old, [bytes(shard)])


def test_wrong_result_is_refused() -> None:
    old, delta = small_delta()
    shard = bytearray(delta.shards[0])
    shard[48] ^= 1
    table, payloads = unsealed(delta.shards[0])
    with pytest.raises(DigestMismatch, match="announced"):
        apply_delta(old, [resealed(bytes(shard), bytes(table), [bytes(p) for p in payloads])])


def test_stage_applies_several_deltas_and_copies_once() -> None:
    v1, v2 = pair("BF16", 400, 0.1, seed=1)
    rng = np.random.default_rng(9)
    v3 = Tensor("BF16", (400,), v2.bits ^ (rng.random(400) < 0.1).astype(np.uint16))
    still, _ = pair("F32", 10, 0.0, seed=2)
    states: list[State] = [{"w": t, "still": still} for t in (v1, v2, v3)]
    stage = DeltaStage(states[0], StateDigest.of(states[0]))
    stage.apply(encode_delta(states[0], states[1]).shards)
    staged = stage.done().state["w"].bits
    stage.apply(encode_delta(states[1], states[2]).shards)
    done = stage.done()
    assert done.state["w"].bits is staged
    assert done.state["still"].bits is still.bits
    assert raw_bits(done.state) == raw_bits(states[2])


def test_c79_c82_frames_refuse_a_second_frame_and_lying_sizes() -> None:
    """C79, C82."""
    one, two = frames.pack(b"A" * 1000), frames.pack(b"B" * 1000)
    for bad, size in (
        (one + two, 2000),
        (one + two, 1000),
        (one + b"junk", 1000),
        (one, 999),
        (b"", 0),
        (one[:-1], 1000),
    ):
        with pytest.raises(DeltaCorrupt):
            frames.unpack(bad, size)
    bomb = frames.pack(bytes(64 << 20))
    assert len(bomb) < 10_000
    with pytest.raises(DeltaCorrupt, match="states"):
        frames.unpack(bomb, 1000)
    sizeless = zstandard.ZstdCompressor(level=1, write_content_size=False).compress(b"A" * 1000)
    with pytest.raises(DeltaCorrupt):
        frames.unpack(sizeless, 1000)


def test_c81_sixteen_threads_at_once() -> None:
    """C81: one compressor a thread."""
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for i in range(40):
                old, new = pair("BF16", 500, 0.2, seed * 1000 + i)
                assert_round_trip({"w": old}, {"w": new})
        except BaseException as error:  # noqa: BLE001  # a thread's failure must fail the test
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures


class Bits:
    """The documented bit stream, in plain Python."""

    def __init__(self, data: bytes) -> None:
        self.bits = "".join(f"{byte:08b}"[::-1] for byte in data)
        self.at = 0

    def take(self, count: int) -> int:
        taken = self.bits[self.at : self.at + count]
        assert len(taken) == count
        self.at += count
        return int(taken[::-1] or "0", 2)

    def run_of(self, bit: str, most: int = 64) -> int:
        count = 0
        while count < most and self.bits[self.at] == bit:
            self.at += 1
            count += 1
        return count

    def rice(self, k: int) -> int:
        quotient = self.run_of("1", 16)
        if quotient == 16:
            return self.take(18)
        assert self.take(1) == 0
        return quotient << k | self.take(k)

    def golomb(self, k: int) -> int:
        zeros = self.run_of("0")
        assert self.take(1) == 1
        return (((1 << zeros) | self.take(zeros)) - 1) << k | self.take(k)


def read_by_hand(payload: bytes, changed: int) -> list[tuple[int, int]]:
    """(position, step) of each change."""
    bits = Bits(payload)
    g, e, m = bits.take(5), bits.take(5), bits.take(6)
    exceptions = bits.golomb(0)
    positions: list[int] = []
    steps: list[int] = []
    for _ in range(changed):
        positions.append((positions[-1] if positions else -1) + 1 + bits.rice(g))
        steps.append(-1 if bits.take(1) else 1)
    rank = -1
    for _ in range(exceptions):
        rank += 1 + bits.rice(e)
        steps[rank] *= 2 + bits.golomb(m)
    assert len(bits.bits) - bits.at < 8
    assert "1" not in bits.bits[bits.at :]
    return list(zip(positions, steps, strict=True))


@given(
    st.lists(
        st.tuples(st.integers(0, 3000), st.integers(-(2**31), 2**31 - 1).filter(bool)),
        min_size=1,
        max_size=80,
    )
)
def test_the_gap_stream_is_the_documented_one(gaps: list[tuple[int, int]]) -> None:
    positions = np.cumsum([gap + 1 for gap, _ in gaps]) - 1
    old = np.zeros(int(positions[-1]) + 3, np.uint32)
    new = old.copy()
    new[positions] = np.array([step for _, step in gaps], np.int64).astype(np.uint32)
    delta = encode_delta({"w": tensor("I32", old.shape, old)}, {"w": tensor("I32", new.shape, new)})
    found = read_by_hand(delta.shards[0][delta.heads[0] :], len(gaps))
    assert found == [(int(p), step) for p, (_, step) in zip(positions, gaps, strict=True)]


def test_golden_shard() -> None:
    """Format 2, byte by byte where zstd leaves no freedom: what was written stays readable."""
    old = {
        "a": tensor("BF16", (300,), np.zeros(300, np.uint16)),
        "b": tensor("U8", (3,), np.array([1, 2, 3], np.uint8)),
    }
    a = np.zeros(300, np.uint16)
    a[0], a[280], a[299] = 1, 5, 0x8000
    new = {"a": tensor("BF16", (300,), a), "b": tensor("U8", (3,), np.array([1, 1, 3], np.uint8))}
    golden = bytes.fromhex(
        "5257444c020100000000000001000000a0bf9f4676fd6c11f65f2c90e3d44d91a727d623c6b9902d568b21f74ad64023"
        "f578f0bd310f17b09252ea8f16e2fef2d68507efef9937c7f1449df6aa8121e7000004000700000004000000000000000"
        "a000000000000006d000000000000006b00000000000000ddb98bf8fc69914fe90aec613020ad7b28b52ffd206b250300"
        "a4059892a161a16292a442463136a255389291cd012c9103920101c41800030100070300c4020101c4103a6d56106a43a"
        "b0ec2095abcc804f547c4209ee6c49390616cd249dd69215fbb2f4dcf6c9ab9c04a0a7afe09d5f062037f5903100032ee"
        "2073020608027817d20e00000b"
    )
    assert raw_bits(apply_delta(old, [golden]).state) == raw_bits(new)
    assert raw_bits(apply_delta(new, [golden], backwards=True).state) == raw_bits(old)

    for shard in (golden, encode_delta(old, new).shards[0]):
        assert shard[:16] == b"RWDL\x02\x01\0\0" + struct.pack("<II", 0, 1)
        assert shard[16:48].hex() == StateDigest.of(old).hex
        assert shard[48:80].hex() == StateDigest.of(new).hex
        elements, largest, changed, payloads, packed, raw = struct.unpack("<IIQQQQ", shard[80:120])
        assert (elements, largest, changed, payloads) == (1 << 18, 7, 4, 10)
        assert shard[120:136] == blake3(shard[:120] + shard[136 : 136 + packed]).digest(length=16)
        table = zstandard.ZstdDecompressor().decompress(shard[136 : 136 + packed])
        assert len(table) == raw
        columns = msgspec.msgpack.decode(table)
        assert columns[:4] == [["a", "b"], ["BF16", "U8"], [[300], [3]], [1, 1]]
        # chunk numbers 0 and 0; 3 changes and 1; 7 bytes and 3: lowest bytes first
        assert columns[4] == bytes([0, 0] + 6 * [0] + [3, 1] + 6 * [0] + [7, 3] + 6 * [0])
        assert columns[5] == b"\x01\x01"
        first, second = shard[136 + packed : 143 + packed], shard[143 + packed :]
        assert columns[6] == b"".join(payload_checksum(p).to_bytes(8, "little") for p in (first, second))
        assert columns[7] == b"".join(
            sum(StateDigest.of(new).chunk_sums(name)).to_bytes(16, "little") for name in "ab"
        )
        assert read_by_hand(first, 3) == [(0, 1), (280, 5), (299, -1)]
        assert read_by_hand(second, 1) == [(1, -1)]


def test_many_tensors_of_long_and_like_names_are_read() -> None:
    names = [f"{'model.layers.' * 60}{i:05d}.weight" for i in range(2_000)]
    old = {name: tensor("U8", (1,), b"\x00") for name in names}
    new = {name: tensor("U8", (1,), b"\x01") for name in names}
    delta = encode_delta(old, new)
    assert read_head(delta.shards[0]).columns.names == tuple(sorted(names))
    assert apply_delta(old, delta.shards).digest.hex == StateDigest.of(new).hex
