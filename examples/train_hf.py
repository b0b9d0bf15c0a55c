"""Trains a causal LM of Hugging Face on step plans, and publishes each step as a weight version."""

import time

import torch
from transformers import PreTrainedModel

from rollwire.consumers.packed_batches import Packed, PackedBatchReader
from rollwire.consumers.torch_states import load_module, module_state
from rollwire.consumers.version_publisher import VersionPublisher, step_of
from rollwire.streams.seams.log import Log
from rollwire.streams.seams.store import ObjectStore


def logprobs(model: PreTrainedModel, packed: Packed) -> torch.Tensor:
    """log pi [S] of the trained tokens. Positions that begin again at 0 tell the model where sequences begin."""
    tokens_T, positions_T, target_S = map(
        torch.tensor, (packed.arrays.tokens_T, packed.arrays.positions_T, packed.arrays.target_S)
    )
    logits_TV = model(tokens_T[None], position_ids=positions_T[None], use_cache=False).logits[0]
    return logits_TV[target_S - 1].log_softmax(-1).gather(1, tokens_T[target_S][:, None])[:, 0]


def train(
    model: PreTrainedModel, log: Log, store: ObjectStore, prefix: str, lineage: str, steps: int
) -> None:
    publisher = VersionPublisher(
        log, store, model="policy", lineage=lineage, ranks=1, prefix=prefix, hf_config=model.config.to_dict()
    )
    held = publisher.start(module_state(model))  # version 0 of a new lineage, or the last version of this one
    load_module(model, held.state)
    reader = PackedBatchReader(log, store, model="policy", lineage=lineage)
    reader.start(held.version, held.offsets[0], held.plan_digest, held.newest_revert)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for plan in reader.plans(timeout_s=60, until_step=steps):
        began_s, logps, total = time.monotonic(), [], 0.0
        for packed in plan.microbatches:
            logp_S, arrays = logprobs(model, packed), packed.arrays
            ratio_S = (logp_S.detach() - torch.tensor(arrays.logp_S)).exp().clamp(max=2.0)
            advantage_S = torch.tensor(arrays.advantages_B[arrays.sequence_S])
            loss = -(ratio_S * advantage_S * logp_S).sum() / plan.batch.total_sequences
            loss.backward()
            total += loss.item()
            logps.append(logp_S.detach())
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
        step = step_of(
            [(plan, torch.cat(logps).numpy())],
            loss=total,
            grad_norm=norm,
            learning_rate=1e-3,
            duration_s=time.monotonic() - began_s,
        )
        publisher.publish(module_state(model), step)  # with the plan's position: one transaction
    publisher.close()
    reader.close()
