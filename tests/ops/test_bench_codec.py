"""The benchmark of weight deltas measures what it says: rivals are exact, limits are limits, every figure has its name."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rollwire.kernels.tensors import State, tensor
from rollwire.ops.bench.codec import RATES, bench_codec, limits
from rollwire.ops.bench.codec_rivals import PIECE, pieces, rivals

OTHERS = ("xor", "split", "index", "full")


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("share", [0.0, 1e-5, 0.01, 1.0])
def test_rivals_give_every_bit_back(name: str, share: float) -> None:
    rng = np.random.default_rng(0)
    old = rng.integers(0, 1 << 16, 300_000, dtype=np.uint16)
    new = np.where(rng.random(old.size) < share, old ^ np.uint16(0x8001), old)
    rival = next(rival for rival in rivals(zipnn=False) if rival.name == name)
    (back,) = rival.decode([old], rival.encode([old], [new]))
    assert np.array_equal(back, new)


def test_pieces_hold_all_elements_in_order() -> None:
    arrays = [np.arange(n, dtype=np.uint16).reshape(-1, 2) for n in (6, 2 * PIECE, 4)]
    cut = pieces(arrays)
    assert [piece.size for piece in cut] == [PIECE, PIECE, 10]
    assert np.array_equal(np.concatenate(cut), np.concatenate([a.reshape(-1) for a in arrays]))


def state(*bits: int) -> State:
    return {"w": tensor("BF16", (len(bits),), np.array(bits, dtype=np.uint16))}


def test_limits_are_the_entropies_of_a_small_example() -> None:
    # Four elements of one exponent, of which two go up by one step and one goes down; four of another that stay.
    old = state(*[0x3F80 + i for i in range(4)], *[0x4000] * 4)
    new = state(0x3F81, 0x3F82, 0x3F81, 0x3F83, *[0x4000] * 4)
    conditional, naive = limits([(old, new)])
    assert conditional * 8 == pytest.approx(4 * 1.5)
    fifth = 5 * math.log2(8 / 5) + 2 * math.log2(8 / 2) + math.log2(8)
    assert naive * 8 == pytest.approx(fifth)


def test_steps_across_zero_and_below_are_told_apart_by_the_old_exponent() -> None:
    # +0 to -0 and its reverse are one step; a smaller exponent with a step downwards does not borrow from the next.
    conditional, naive = limits(
        [(state(0x0000, 0x8000, 0x0080, 0x0100), state(0x8000, 0x0000, 0x007F, 0x00FF))]
    )
    assert conditional * 8 == pytest.approx(2.0)  # which way the two zeros went; the others are alone
    assert naive * 8 == pytest.approx(3 * math.log2(4 / 3) + math.log2(4))


def test_the_short_form_has_every_figure_and_they_fit_one_another() -> None:
    figures = {figure.name: figure for figure in bench_codec(repeats=1, short=True, mib=2)}
    for rate in RATES:
        size = {name: figures[f"codec.{name}_pct_{rate}"].value for name in ("gap", "context", *OTHERS)}
        limit = figures[f"codec.entropy_pct_{rate}"].value
        assert limit < figures[f"codec.entropy_naive_pct_{rate}"].value
        assert limit < size["context"] < size["gap"] < size["index"] < size["split"] < size["full"]
        over = figures[f"codec.context_over_entropy_{rate}"].value
        assert over == pytest.approx(size["context"] / limit)
        assert over < 1.08
        assert figures[f"codec.inverse_pct_{rate}"].value == pytest.approx(size["context"], rel=0.05)
        for name in ("gap", "context", *OTHERS):
            for way in ("encode", "apply"):
                figure = figures[f"codec.{name}_{way}_gbps_{rate}"]
                assert figure.value > 0
                assert figure.baseline == figures[f"codec.gap_encode_gbps_{rate}"].baseline
    assert figures["codec.context_over_entropy"].value == max(
        figures[f"codec.context_over_entropy_{rate}"].value for rate in RATES
    )
    for coder in ("gap", "context"):
        for way in ("encode", "apply"):
            ratio = figures[f"codec.{coder}_{way}_gbps_1e-6"].ratio
            assert figures[f"codec.{coder}_{way}_ratio"].value == ratio
