"""Publishes the versions of a `transformers.Trainer`, and so of every trainer of TRL, while it trains.

    publisher = VersionPublisher(log, store, model="policy", lineage=lineage, ranks=0, hf_config=model.config.to_dict())
    trainer = GRPOTrainer(..., callbacks=[PublishVersions(publisher)])

Fleets that follow `weight-versions` swap to each version as to any other. The trainer's rollouts do not come through the
log, so there are no `train-steps`, and its checkpoints are its own: what it restores from them is not published again
until it is past the last version's step.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from rollwire.consumers.torch_states import module_sources, module_state
from rollwire.consumers.version_publisher import VersionPublisher
from rollwire.schemas.errors import ConfigError


class PublishVersions(TrainerCallback):
    """A version every `every` optimiser steps and one at the end; version 0 is what the trainer began with.

    Only the first process of a distributed run publishes, so the module must be whole there (DDP; a sharded module is
    not). The publisher is closed at the end of training; if training fails, close it with `flush=False`.
    """

    def __init__(
        self,
        publisher: VersionPublisher,
        *,
        every: int = 1,
        dtype: Literal["BF16", "F16", "F32"] = "BF16",
    ) -> None:
        if every < 1:
            raise ConfigError(f"every={every}: a version every so many steps, at least 1")
        self._publisher = publisher
        self._every = every
        self._dtype: Literal["BF16", "F16", "F32"] = dtype
        self._step = -1  # of the last version

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            self._step = self._publisher.start(module_state(_module(kwargs), self._dtype)).step

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step % self._every == 0:
            self._publish(state, kwargs)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._publish(state, kwargs)
        if state.is_world_process_zero:
            self._publisher.close()

    def _publish(self, state: TrainerState, kwargs: dict[str, Any]) -> None:
        if state.is_world_process_zero and state.global_step > self._step:
            # The trainer goes on as soon as the weights are copied.
            sources = module_sources(_module(kwargs), self._dtype)
            self._publisher.publish_alone(sources, state.global_step, copy=True)
            self._step = state.global_step


def _module(kwargs: dict[str, Any]) -> torch.nn.Module:
    model = kwargs.get("model")
    if not isinstance(model, torch.nn.Module):
        raise ConfigError("the trainer hands no model to its callbacks")
    # A wrapper of torch's (DDP) puts its own prefix before every name.
    inner = getattr(model, "module", model)
    return inner if isinstance(inner, torch.nn.Module) else model
