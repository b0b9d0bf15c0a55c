"""The warm start of a run: made once per recipe, kept in the cache, found again by the recipe's digest."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3

from rollwire.ops.settings import RunSettings
from rollwire.ops.stack.config import default_cache
from rollwire.schemas.errors import EnvironmentMissing

if TYPE_CHECKING:
    from rollwire.kernels.tensors import State

# Counts up when the warm start's arithmetic changes: a cached state of another recipe must not be taken.
RECIPE_VERSION = 1


def recipe_digest(settings: RunSettings) -> str:
    recipe = {
        "recipe": RECIPE_VERSION,
        "environment": settings.environment,
        "seed": settings.seed,
        "policy": settings.policy.model_dump(mode="json"),
        "warm_start": settings.warm_start.model_dump(mode="json"),
    }
    return blake3(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:32]


def warm_start_folder(settings: RunSettings) -> Path:
    """Holds the state as Hugging Face writes it, so that `transformers` opens it as it is."""
    return default_cache() / "warm-starts" / recipe_digest(settings)


def has_warm_start(settings: RunSettings) -> bool:
    return warm_start_folder(settings).exists()


def load_warm_start(settings: RunSettings) -> State:
    """The fp32 state that training begins with. Raises `EnvironmentMissing` where it was not made yet."""
    from rollwire.consumers.weights.anchor import AnchorFile, read_anchor

    folder = warm_start_folder(settings)
    if not folder.exists():
        raise EnvironmentMissing(f"{folder} is missing: `rollwire run warm-start` makes it")
    return read_anchor([AnchorFile(file.name, file.read_bytes()) for file in sorted(folder.iterdir())])


def make_warm_start(settings: RunSettings, progress_file: Path | None = None) -> None:
    """Trains the warm start unless the cache has it. Progress goes to `progress_file` as `{"step", "steps", "loss"}`."""
    from rollwire.consumers.weights.anchor import write_anchor
    from rollwire.kernels.policy.config import hf_config
    from rollwire.kernels.policy.warm_start import warm_start
    from rollwire.producers.environments.known import make_environment

    folder = warm_start_folder(settings)
    if folder.exists():
        return
    config = settings.warm_start

    def progress(step: int, loss: float) -> None:
        if progress_file is not None:
            partial = progress_file.with_suffix(".partial")
            partial.write_text(json.dumps({"step": step, "steps": config.steps, "loss": loss}))
            partial.replace(progress_file)

    demonstrations = make_environment(settings.environment).demonstrations(
        config.demonstrations, settings.seed
    )
    state = warm_start(
        settings.policy,
        demonstrations,
        seed=settings.seed,
        steps=config.steps,
        batch_size=config.batch_size,
        learning_rate=config.learning_rate,
        progress=progress,
    )
    # Whole or not at all: the folder gets its name when everything is in it.
    partial = folder.with_name(f"{folder.name}.{os.getpid()}")
    partial.mkdir(parents=True)
    for file, data in write_anchor(
        state, shard_bytes=1 << 30, hf_config=hf_config(settings.policy, dtype="float32")
    ):
        (partial / file).write_bytes(data)
    partial.rename(folder)
