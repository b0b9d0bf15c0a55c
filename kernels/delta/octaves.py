"""Elements of a chunk by the octave of their magnitude, 64 at a time: the bit masks behind the context coder.

Magnitude = the bits without the sign bit; for floating-point bits it orders as |value| does. Octave classes are cut by 11
ascending thresholds: class 0 lies below the first, class c from threshold c - 1 to below threshold c, class 11 from the
last. The masks are written as vector instructions of LLVM's own language, which every processor's back end knows to
lower; numba finds them in no loop over lanes.

For compiled code only. All of them read elements [at, at + 64) of an array: the caller sees to it that they are there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from llvmlite.binding import get_host_cpu_features  # type: ignore[import-untyped]
from numba.core import config, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from rollwire.kernels.delta.codes import Int, Word, low_mask
from rollwire.kernels.digest import jit

CLASSES: Final = 12
BLOCK: Final = 64

_I64 = ir.IntType(64)


def _block(context: Any, builder: Any, array_type: Any, array: Any, at: Any) -> Any:
    """The 64 lanes from `at` on as one vector."""
    width = array_type.dtype.bitwidth
    data = context.make_array(array_type)(context, builder, array).data
    vector = ir.VectorType(ir.IntType(width), BLOCK)
    pointer = builder.bitcast(builder.gep(data, [at]), vector.as_pointer())
    return builder.load(pointer, align=width // 8)


def _splat(builder: Any, value: Any, width: int) -> Any:
    lane = ir.IntType(width)
    value = value if width == 64 else builder.trunc(value, lane)
    vector = ir.VectorType(lane, BLOCK)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), BLOCK), [0] * BLOCK)
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), zeros)


def _magnitudes(context: Any, builder: Any, array_type: Any, array: Any, at: Any) -> Any:
    width = array_type.dtype.bitwidth
    block = _block(context, builder, array_type, array, at)
    return builder.and_(block, ir.Constant(block.type, [(1 << (width - 1)) - 1] * BLOCK))


def _at_least(_context: Any, array: Any, at: Any, threshold: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array_type = signature.args[0]
        block = _magnitudes(context, builder, array_type, arguments[0], arguments[1])
        limit = _splat(builder, arguments[2], array_type.dtype.bitwidth)
        return builder.bitcast(builder.icmp_unsigned(">=", block, limit), _I64)

    return types.uint64(array, types.int64, types.uint64), generate


def _pass_block(_context: Any, array: Any, at: Any, thresholds: Any, left: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array_type, _, thresholds_type, left_type = signature.args
        block = _magnitudes(context, builder, array_type, arguments[0], arguments[1])
        limits = context.make_array(thresholds_type)(context, builder, arguments[2]).data
        counters = context.make_array(left_type)(context, builder, arguments[3]).data
        above = ir.Constant(_I64, BLOCK)  # elements of this class and those above it
        seen = ir.Constant(_I64, 0)
        for c in range(CLASSES):
            beyond = ir.Constant(_I64, 0)
            if c + 1 < CLASSES:
                limit = builder.load(builder.gep(limits, [ir.Constant(_I64, c)]))
                limit = _splat(builder, limit, array_type.dtype.bitwidth)
                mask = builder.bitcast(builder.icmp_unsigned(">=", block, limit), _I64)
                beyond = builder.ctpop(mask)
            counter = builder.gep(counters, [ir.Constant(_I64, c)])
            value = builder.sub(builder.load(counter), builder.sub(above, beyond))
            builder.store(value, counter)
            seen = builder.or_(seen, value)
            above = beyond
        return seen

    return types.int64(array, types.int64, thresholds, left), generate


def _due_classes(_context: Any, left: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        counters = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        due = ir.Constant(_I64, 0)
        for c in range(CLASSES):
            value = builder.load(builder.gep(counters, [ir.Constant(_I64, c)]))
            below = builder.ashr(value, ir.Constant(_I64, 63))
            due = builder.or_(due, builder.and_(below, ir.Constant(_I64, 1 << c)))
        return due

    return types.uint64(left), generate


def _deposit(_context: Any, value: Any, mask: Any) -> Any:
    def generate(_c: Any, builder: Any, _s: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(_I64, [_I64, _I64])
        return builder.call(builder.module.declare_intrinsic("llvm.x86.bmi.pdep.64", (), kind), arguments)

    return types.uint64(types.uint64, types.uint64), generate


def _popcount(_context: Any, value: Any) -> Any:
    def generate(_c: Any, builder: Any, _s: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), generate


# Bit k is set where |array[at + k]| >= threshold.
at_least: Callable[[NDArray[Any], Int, Word], Word] = cast(Any, intrinsic(_at_least))
# Takes the number of the block's elements in each class from left[12] (int64); below 0 if one of them then is.
pass_block: Callable[[NDArray[Any], Int, NDArray[np.uint64], NDArray[np.int64]], Int] = cast(
    Any, intrinsic(_pass_block)
)
# Bit c is set where left[c] is below 0.
due_classes: Callable[[NDArray[np.int64]], Word] = cast(Any, intrinsic(_due_classes))
# The lowest bits of a number, put to the places of a mask's set bits: an instruction of some x86 processors alone.
_put_to_places: Callable[[Word, Word], Word] = cast(Any, intrinsic(_deposit))
popcount: Callable[[Word], Word] = cast(Any, intrinsic(_popcount))

_U0, _U1, _U32 = np.uint64(0), np.uint64(1), np.uint64(32)


@jit()
def nth_set_by_halves(bits: Word, n: Int) -> Word:
    """The set bit above `n` others, by itself. More than n bits are set."""
    at, left, size = _U0, np.uint64(n), _U32
    while size:
        below = popcount(bits & (low_mask(size) << at))
        if below <= left:
            left -= below
            at += size
        size >>= _U1
    return _U1 << at


@jit()
def _nth_set_at_once(bits: Word, n: Int) -> Word:
    return _put_to_places(_U1 << np.uint64(n), bits)


# As numba sees the processor that it compiles for: its settings may ask for less than there is.
_ASKED_FOR: Final[str | None] = getattr(config, "CPU_FEATURES", None)
_FEATURES: Final[str] = get_host_cpu_features().flatten() if _ASKED_FOR is None else _ASKED_FOR
nth_set = _nth_set_at_once if "+bmi2" in _FEATURES.split(",") else nth_set_by_halves


@jit()
def thresholds_from(e: Int, exponent_bits: int, mantissa_bits: int) -> NDArray[np.uint64]:
    """The thresholds of classes that are cut at the exponent fields e, e + 1, ..., e + 10."""
    limits_C = np.empty(CLASSES - 1, np.uint64)
    for c in range(CLASSES - 1):
        # At most an exponent field that no number has: nothing lies above it.
        field = min(np.int64(e + c), np.int64(1) << exponent_bits)
        limits_C[c] = np.uint64(field) << np.uint64(mantissa_bits)
    return limits_C


@jit()
def field_of(bits: Word, exponent_bits: int, mantissa_bits: int) -> Int:
    """The exponent field."""
    return np.int64((bits >> np.uint64(mantissa_bits)) & low_mask(np.uint64(exponent_bits)))


@jit()
def class_of(field: Int, e: Int) -> Int:
    return min(max(np.int64(field - e + 1), np.int64(0)), np.int64(CLASSES - 1))


@jit()
def octaves_below(field: Int, e: Int) -> Word:
    """Octaves between an element of class 0 and class 1; subnormal numbers have the least exponent's spacing."""
    return np.uint64(max(np.int64(e - 1) - max(np.int64(field), np.int64(1)), np.int64(0)))
