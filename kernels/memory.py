"""Arrays by address, for compiled loops over many arrays in one call: a call of compiled code costs as much as a small chunk.

The caller keeps the arrays alive, contiguous and aligned, and states their true lengths: nothing checks either.
"""

from __future__ import annotations

from typing import Any, cast

import numba
from numba.core import types
from numba.extending import intrinsic
from numpy.typing import NDArray


def _pointer(_context: Any, address: Any, like: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    signature: Any = types.CPointer(like.dtype)  # type: ignore[no-untyped-call]
    return signature(types.uint64, like), generate


carray: Any = getattr(numba, "carray")  # noqa: B009  # numba's stubs do not list it
# For compiled code only: (uint64, array) -> a pointer to elements of the array's type, for `carray`.
pointer: Any = cast(Any, intrinsic(_pointer))


def address_of(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])
