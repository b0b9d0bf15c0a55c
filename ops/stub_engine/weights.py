"""What a stub engine reads from a folder, file by file, as the real loaders do."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from rollwire.consumers.weights.anchor import CONFIG_FILE, AnchorFile, read_anchor, write_anchor
from rollwire.kernels.policy.config import PolicyConfig, hf_config, policy_of
from rollwire.kernels.tensors import State, Tensor
from rollwire.schemas.errors import ConfigError, StateMismatch


def read_config(folder: Path) -> PolicyConfig:
    """Raises `ConfigError` where there is no `config.json`, or that of another model."""
    try:
        found: Any = json.loads((folder / CONFIG_FILE).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / CONFIG_FILE}: {error}") from error
    return policy_of(found)


def overlay_folder(state: dict[str, Tensor], folder: Path) -> None:
    """Puts the folder's tensors into `state`, one file after the other.

    What was read before an error stays: a real engine writes into its weights as it reads, and is torn then. Tensors that
    the folder lacks keep their old bits, which vLLM tells its log and nobody else.

    Raises `ConfigError` where the folder holds no safetensors, `DeltaCorrupt` for a file that does not parse,
    `StateMismatch` for a tensor that the model has not, or has in another shape or type.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"Cannot find any model weights with `{folder}`")
    for path in files:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{path}: {error}") from error
        for name, tensor in read_anchor([AnchorFile(path.name, data)]).items():
            held = state.get(name)
            if held is None:
                raise StateMismatch(f"There is no module or parameter named {name!r}")
            if (held.shape, held.dtype) != (tensor.shape, tensor.dtype):
                raise StateMismatch(
                    f"{name}: {tensor.dtype} {tensor.shape} does not fit {held.dtype} {held.shape}"
                )
            state[name] = tensor


def read_folder(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, for the start. Raises as `overlay_folder`."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"Cannot find any model weights with `{folder}`")
    return read_anchor([AnchorFile(path.name, path.read_bytes()) for path in files])


def checksums(state: State) -> dict[str, str]:
    """SHA-256 of each tensor's bits, hex."""
    return {name: hashlib.sha256(tensor.bits.tobytes()).hexdigest() for name, tensor in sorted(state.items())}


def write_policy(folder: Path, state: State, config: PolicyConfig, *, shard_bytes: int = 1 << 30) -> None:
    """A folder that either server could be started with."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in write_anchor(state, shard_bytes=shard_bytes, hf_config=hf_config(config)):
        (folder / file.file).write_bytes(file.data)


def fresh_policy(config: PolicyConfig, seed: int) -> State:
    """A random policy. Needs torch."""
    from rollwire.kernels.policy.model import Policy
    from rollwire.kernels.policy.states import to_state

    return to_state(Policy(config, seed=seed))
