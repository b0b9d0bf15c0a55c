"""Memory of processes that handle events by the thousand: cycles are looked for less often, and freed memory is kept."""

from __future__ import annotations

import ctypes
import gc
from typing import Final

# New containers before the youngest are looked at; looks at the youngest before the middle generation; and at that before all.
_THRESHOLDS: Final = (100_000, 50, 100)

# glibc's `mallopt` (malloc.h). Blocks below the first come from the heap; that much of it may lie free at its end; it
# grows by that much.
_MMAP_THRESHOLD: Final = (-3, 32 << 20)
_TRIM_THRESHOLD: Final = (-1, 256 << 20)
_TOP_PAD: Final = (-2, 32 << 20)


def tune_memory() -> None:
    """Call it when a process starts, after its imports.

    Collector: records, their headers and events are tuples and structs without cycles, they go when nobody holds them.
    By default CPython searches for cycles after every 700 new ones, a batch is thousands at once, and that search took a
    quarter of the time of `assemble`; here it comes 140 times less often.

    Heap: by default glibc gives blocks of 128 KiB and more back to the kernel as soon as they are free, and gets them again
    page by page for the next event. With rollouts of 100 KB, a copy of one then costs eight times what the copying costs.
    Up to 256 MiB are kept instead. Another C library is left as it is.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    for parameter, value in (_MMAP_THRESHOLD, _TRIM_THRESHOLD, _TOP_PAD):
        mallopt(parameter, value)
