"""SGLang (0.5.23) as what serves weights: the HTTP calls that put a folder's weights into a running server.

`--admin-api-key` (else `--api-key`) guards them, where the server has one.
"""

from __future__ import annotations

from pathlib import Path

from rollwire.consumers.weights.targets.vllm import Kv
from rollwire.schemas.errors import EngineRefused
from rollwire.streams.seams.engine_calls import EngineCalls, field


class SglangWeights:
    """Implements `targets.engine.EngineWeights`.

    `kv`: "keep" pauses in place, and running requests go on with older keys and values; the prefix cache stays as well, so
    requests should carry the version as `extra_key`. "recompute" retracts them: they are read from their start by the new
    weights, and the cache is flushed. Flushing with requests in place is refused by the server, *after* it took the weights.
    """

    def __init__(self, calls: EngineCalls, *, kv: Kv = "keep", load_s: float = 600.0) -> None:
        self._calls = calls
        self._kv = kv
        self._load_s = load_s

    @property
    def name(self) -> str:
        return "sglang"

    def label(self) -> str:
        label: str = field(self._calls.get("/model_info"), "weight_version", str)
        return label

    def pause(self) -> None:
        """Requests are frozen where they are or queued again, new ones wait."""
        self._calls.post("/pause_generation", {"mode": "in_place" if self._kv == "keep" else "retract"})

    def load(self, folder: Path, label: str) -> None:
        """While paused. After an error the weights may be torn, or new under the old label."""
        body = {"model_path": str(folder), "weight_version": label, "flush_cache": self._kv == "recompute"}
        answer = self._calls.post("/update_weights_from_disk", body, timeout_s=self._load_s)
        if not field(answer, "success", bool):
            raise EngineRefused(f"SGLang did not take {folder}: {answer.get('message')}")

    def resume(self) -> None:
        self._calls.post("/continue_generation", {})

    def fingerprint(self) -> str:
        """Of all weights as the ranks hold them."""
        answer = self._calls.post("/weights_checker", {"action": "checksum"}, timeout_s=self._load_s)
        checksum: str = field(answer, "per_engine_checksum", str)
        return checksum

    def close(self) -> None:
        self._calls.close()
