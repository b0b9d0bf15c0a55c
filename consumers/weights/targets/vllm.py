"""vLLM (0.33) as what serves weights: the HTTP calls that put a folder's weights into a running server.

They are there under VLLM_SERVER_DEV_MODE=1, and --api-key does not guard them: bind the server to a private network.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Final, Literal

import structlog

from rollwire.schemas.errors import EngineRefused
from rollwire.streams.seams.engine_calls import EngineCalls, field

_log = structlog.get_logger()

Kv = Literal["keep", "recompute"]
_SLACK_S: Final = 10.0  # the HTTP call may take this much longer than what the server waits for its workers


class VllmWeights:
    """Implements `targets.engine.EngineWeights`.

    `kv`: what becomes of the cache of running requests at a swap. "keep": they go on with older keys and values; blocks of
    ended requests are forgotten only where none runs, so requests should carry the version as `cache_salt`. "recompute":
    running requests are preempted and read from their start by the new weights.
    """

    def __init__(self, calls: EngineCalls, *, kv: Kv = "keep", load_s: float = 600.0) -> None:
        self._calls = calls
        self._kv = kv
        self._load_s = load_s

    @property
    def name(self) -> str:
        return "vllm"

    def label(self) -> str:
        label: str = field(self._calls.get("/weight_info"), "weight_version", str)
        return label

    def pause(self) -> None:
        """Requests are frozen where they are, new ones queue."""
        self._calls.post("/pause", query={"mode": "keep"})

    def load(self, folder: Path, label: str) -> None:
        """While paused. After an error the weights may be torn."""
        call: dict[str, Any] = {
            "method": "reload_weights",
            "kwargs": {"weights_path": str(folder), "is_checkpoint_format": True},
            "timeout": self._load_s,
        }
        self._calls.post("/collective_rpc", call, timeout_s=self._load_s + _SLACK_S)
        anew = {"reset_running_requests": "true"} if self._kv == "recompute" else None
        forgotten = field(self._calls.post("/reset_prefix_cache", query=anew), "success", bool)
        if not forgotten and anew is not None:
            raise EngineRefused("vLLM did not reset its prefix cache")
        if not forgotten:
            _log.info("engine.cache_kept", engine=self.name, label=label)
        self._calls.post("/update_weight_version", {"new_version": label})

    def resume(self) -> None:
        self._calls.post("/resume")

    def fingerprint(self) -> str:
        """Of all weights as the workers hold them: each copies and hashes its share, so it takes seconds for a large model."""
        answer = self._calls.post("/weight_checker", {"action": "checksum"}, timeout_s=self._load_s)
        checksums: dict[str, str] = field(answer, "checksums", dict)
        lines = "\n".join(f"{name} {digest}" for name, digest in sorted(checksums.items()))
        return hashlib.sha256(lines.encode()).hexdigest()

    def close(self) -> None:
        self._calls.close()
