"""Trainers of others: a Hugging Face model on step plans, and a `transformers.Trainer` that publishes its versions."""

from __future__ import annotations

import importlib.util
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset  # type: ignore[import-untyped]
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Trainer,
    TrainingArguments,
)
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from rollwire.consumers.packed_batches import PackedBatchReader, Plan
from rollwire.consumers.torch_states import load_module, module_state
from rollwire.consumers.trainer.history import History, read_history
from rollwire.consumers.trainer.rehearsal import TOPICS, Rehearsal, rehearsal_log, write_plans
from rollwire.consumers.trl_callback import PublishVersions
from rollwire.consumers.version_publisher import VersionPublisher, step_of
from rollwire.consumers.weights.manifest import MadeFrom, decode_manifest
from rollwire.consumers.weights.paths import plan_path
from rollwire.consumers.weights.publisher_config import PublisherConfig
from rollwire.consumers.weights.reader import load_version
from rollwire.kernels.policy.config import PolicyConfig
from rollwire.kernels.tensors import State
from rollwire.schemas.errors import (
    ConfigError,
    Fenced,
    OffsetLost,
    PlanViolation,
    StateMismatch,
    StoreUnavailable,
)
from rollwire.schemas.records import TrainStep, WeightVersion
from rollwire.streams.emit import decode_record
from rollwire.streams.seams.clock import SystemClock
from rollwire.streams.seams.log import TopicPartition
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.scan import scan
from rollwire.streams.seams.store import ObjectStore
from rollwire.streams.seams.store_memory import MemoryStore

pytestmark = pytest.mark.torch

LINEAGE = "0197a1b2-0000-7000-8000-0000000000aa"
SPEC = Rehearsal(PolicyConfig(num_hidden_layers=2, num_experts=4), LINEAGE)
PARTITION = TopicPartition("packed-batches", 0)


@pytest.fixture(scope="module")
def example() -> Any:
    path = Path(__file__).parents[2] / "examples" / "train_hf.py"
    spec = importlib.util.spec_from_file_location("train_hf", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def a_model(kind: str = "qwen2", *, tied: bool = False) -> Any:
    torch.manual_seed(1)
    sizes: dict[str, Any] = {
        "vocab_size": 20,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tied,
    }
    if kind == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**sizes))  # type: ignore[no-untyped-call]
    return LlamaForCausalLM(LlamaConfig(**sizes))  # type: ignore[no-untyped-call]


def history_of(log: MemoryLog) -> History:
    return read_history(log, "policy", LINEAGE, deadline_s=5, clock=SystemClock())


def versions_of(log: MemoryLog) -> list[WeightVersion]:
    events = [decode_record(record) for record in scan(log, ("weight-versions",))]
    return [event for event in events if isinstance(event, WeightVersion)]


def weights_of(store: ObjectStore, versions: list[WeightVersion], version: int) -> State:
    return load_version(store, plan_path(versions, (), None, version), None)


def check_same(one: State, other: State) -> None:
    assert {n: (t.dtype, t.shape, t.bits.tobytes()) for n, t in one.items()} == {
        n: (t.dtype, t.shape, t.bits.tobytes()) for n, t in other.items()
    }


def plans_of(log: MemoryLog, store: ObjectStore, upto: int) -> list[Plan]:
    reader = PackedBatchReader(log, store, model="policy", lineage=LINEAGE)
    reader.start(0, 0)
    return list(reader.plans(timeout_s=5, until_step=upto))


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_packed_sequences_do_not_see_one_another(example: Any, kind: str) -> None:
    """The same logprobs as one sequence at a time."""
    model = a_model(kind).eval()
    plan = plans_of(rehearsal_log(SPEC, 1), MemoryStore(), 1)[0]
    for packed in plan.microbatches:
        got = example.logprobs(model, packed)
        alone = []
        for start, end in pairwise(packed.arrays.cu_seqlens.tolist()):
            tokens_T = torch.tensor(packed.arrays.tokens_T[start:end])
            logp_TV = model(tokens_T[None]).logits[0].log_softmax(-1)
            target_S = torch.tensor(np.flatnonzero(packed.arrays.mask_T[start:end]))
            alone.append(logp_TV[target_S - 1, tokens_T[target_S]])
        torch.testing.assert_close(got, torch.cat(alone), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_a_hugging_face_model_trains_from_plans_and_goes_on_after_a_restart(example: Any, kind: str) -> None:
    log, store = rehearsal_log(SPEC, 4), MemoryStore()
    model = a_model(kind)
    began = module_state(model)
    example.train(model, log, store, "t.", LINEAGE, 2)
    assert log.committed("t.trainer", [PARTITION]) == {PARTITION: 2}
    example.train(a_model(kind), log, store, "t.", LINEAGE, 4)
    history = history_of(log)  # refuses holes and ranges that do not join
    assert [v.kind for v in history.versions] == ["anchor", "delta", "delta", "delta", "delta"]
    assert log.committed("t.trainer", [PARTITION]) == {PARTITION: 4}
    versions = list(history.versions)
    check_same(weights_of(store, versions, 0), began)
    check_same(weights_of(store, versions, 2), module_state(model))
    for number, step in enumerate(history.steps, 1):
        assert [(r.start, r.end) for r in step.consumed] == [(number - 1, number)]
        assert step.state_digest == versions[number].state_digest
        assert step.grad_norm > 0
        assert step.sequences == 16
        assert {row.environment for row in step.mismatch_by} == {"rehearsal"}


def test_the_steps_event_says_what_was_measured() -> None:
    plan = plans_of(rehearsal_log(SPEC, 1), MemoryStore(), 1)[0]
    mu_S = np.concatenate([arrays.logp_S for arrays in plan.arrays])
    step = step_of(
        [(plan, mu_S + np.float32(0.25))],
        loss=1.5,
        grad_norm=2.0,
        learning_rate=0.1,
        duration_s=2.0,
        truncated=3,
    )
    assert (step.loss, step.grad_norm, step.step, step.version) == (1.5, 2.0, 1, 1)
    assert step.mismatch.p99 == pytest.approx(0.25, abs=1e-6)
    assert step.ratio_truncated == 3 / mu_S.size
    assert np.isnan(step.entropy)  # nothing is invented
    with pytest.raises(PlanViolation):
        step_of([(plan, mu_S[1:])], loss=1.5, grad_norm=2.0, learning_rate=0.1, duration_s=2.0)


def publisher_of(log: MemoryLog, store: ObjectStore, *, ranks: int = 1) -> VersionPublisher:
    config = PublisherConfig(store_patience_s=1.0)
    return VersionPublisher(
        log, store, model="policy", lineage=LINEAGE, ranks=ranks, prefix="t.", config=config
    )


def a_step(log: MemoryLog, number: int) -> TrainStep:
    plan = plans_of(log, MemoryStore(), number)[-1]
    mu_S = np.concatenate([arrays.logp_S for arrays in plan.arrays])
    return step_of([(plan, mu_S)], loss=0.0, grad_norm=1.0, learning_rate=0.1, duration_s=1.0)


def test_steps_out_of_order_and_lost_positions_are_refused() -> None:
    log, store, state = rehearsal_log(SPEC, 3), MemoryStore(), module_state(a_model())
    publisher = publisher_of(log, store)
    publisher.start(state)
    with pytest.raises(PlanViolation):
        publisher.publish(state, a_step(log, 2))
    with pytest.raises(ConfigError):
        publisher.publish_alone(state, 1)
    publisher.publish(state, a_step(log, 1))
    with pytest.raises(PlanViolation):
        publisher.publish(state, a_step(log, 1))
    publisher.close()
    assert publisher.last is not None
    assert publisher.last.kind == "empty"
    log.set_committed("t.trainer", PARTITION, 0)
    again = publisher_of(log, store)
    with pytest.raises(OffsetLost):
        again.start(None)
    again.close(flush=False)


def test_a_second_trainer_fences_the_first() -> None:
    log, store, state = rehearsal_log(SPEC, 3), MemoryStore(), module_state(a_model())
    first = publisher_of(log, store)
    first.start(state)
    second = publisher_of(log, store)
    held = second.start(None)
    assert (held.version, held.offsets, held.plan_digest) == (0, (0,), None)
    first.publish(state, a_step(log, 1))
    with pytest.raises(Fenced):
        first.flush()
    first.close(flush=False)
    second.publish(state, a_step(log, 1))
    second.close()
    assert [v.version for v in history_of(log).versions] == [0, 1]


def test_a_version_whose_objects_do_not_stand_is_never_seen_and_can_be_made_again() -> None:
    class Failing(MemoryStore):
        away = False

        def create(self, key: str, data: bytes) -> bool:
            if self.away:
                raise StoreUnavailable("away")
            return super().create(key, data)

    log, store, model = rehearsal_log(SPEC, 3), Failing(), a_model()
    publisher = publisher_of(log, store)
    publisher.start(module_state(model))
    store.away = True
    changed = {n: t._replace(bits=t.bits ^ 1) for n, t in module_state(model).items()}
    publisher.publish(changed, a_step(log, 1))
    with pytest.raises(StoreUnavailable):
        publisher.flush()
    publisher.close(flush=False)
    assert [v.version for v in versions_of(log)] == [0]
    assert log.committed("t.trainer", [PARTITION]) == {PARTITION: 0}
    store.away = False
    again = publisher_of(log, store)
    assert again.start(None).version == 0
    again.publish(changed, a_step(log, 1))
    again.close()
    check_same(weights_of(store, versions_of(log), 1), changed)
    (step,) = history_of(log).steps
    manifest = decode_manifest(store.get(versions_of(log)[1].manifest.key))
    assert manifest.made_from == MadeFrom(step.consumed, step.plan_digest)


def test_a_lineage_without_versions_needs_weights() -> None:
    publisher = publisher_of(rehearsal_log(SPEC, 1), MemoryStore())
    with pytest.raises(ConfigError):
        publisher.start(None)
    publisher.close(flush=False)


def test_c27_a_module_makes_the_round_trip_and_a_renamed_parameter_is_refused() -> None:
    """C27."""
    model, other = a_model(), a_model()
    state = module_state(model, "F32")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    load_module(other, state)
    check_same(module_state(other, "F32"), state)
    assert set(state) == set(model.state_dict())
    assert "lm_head.weight" not in module_state(a_model(tied=True))
    load_module(a_model(tied=True), module_state(a_model(tied=True)))
    renamed = {name.replace("q_proj", "to_q"): one for name, one in state.items()}
    with pytest.raises(StateMismatch, match="q_proj"):
        load_module(other, renamed)
    with pytest.raises(StateMismatch, match="float64"):
        module_state(torch.nn.Linear(2, 2).double())


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens_T = torch.arange(8) * (index + 1) % 20
        return {"input_ids": tokens_T, "labels": tokens_T}


def the_trainer(kind: str, folder: Path, model: Any, callback: PublishVersions, steps: int) -> Trainer:
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": steps,
        "per_device_train_batch_size": 4,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "disable_tqdm": True,
        "learning_rate": 1e-2,
        "logging_strategy": "no",
        "dataloader_pin_memory": False,
        "gradient_checkpointing": False,
    }
    if kind == "transformers":
        return Trainer(
            model=model, args=TrainingArguments(**settings), train_dataset=Tokens(), callbacks=[callback]
        )
    vocabulary = {f"w{i}": i for i in range(18)} | {"<pad>": 18, "<eos>": 19}
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="w0")),
        pad_token="<pad>",
        eos_token="<eos>",
    )
    return SFTTrainer(
        model=model,
        args=SFTConfig(**settings, max_length=16),
        train_dataset=Dataset.from_dict(
            {"input_ids": [Tokens()[i]["input_ids"].tolist() for i in range(16)]}
        ),
        processing_class=tokenizer,
        callbacks=[callback],
    )


def run_trainer_of_others(
    kind: str, folder: Path, log: MemoryLog, store: ObjectStore, *, steps: int, every: int
) -> Any:
    model = a_model()
    publisher = VersionPublisher(
        log, store, model="policy", lineage=LINEAGE, ranks=0, prefix="t.", hf_config=model.config.to_dict()
    )
    the_trainer(kind, folder, model, PublishVersions(publisher, every=every), steps).train()
    return model


@pytest.mark.parametrize("kind", ["transformers", "trl"])
def test_the_callback_publishes_the_versions_of_a_trainer(kind: str, tmp_path: Path) -> None:
    log, store = MemoryLog(TOPICS), MemoryStore()
    model = run_trainer_of_others(kind, tmp_path, log, store, steps=5, every=2)
    versions = versions_of(log)
    assert [(v.version, v.step, v.kind) for v in versions] == [
        (0, 0, "anchor"), (1, 2, "delta"), (2, 4, "delta"), (3, 5, "delta"),
    ]  # fmt: skip
    check_same(weights_of(store, versions, 0), module_state(a_model()))
    check_same(weights_of(store, versions, 3), module_state(model))
    # Started again from the beginning, it publishes nothing a second time.
    run_trainer_of_others(kind, tmp_path, log, store, steps=7, every=1)
    assert [(v.version, v.step) for v in versions_of(log)][3:] == [(3, 5), (4, 6), (5, 7)]


def test_the_documents_example_runs(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    scope: dict[str, Any] = {}
    exec(compile(block, "docs/trainers.md", "exec"), scope)  # noqa: S102 - our own text
    log, store = MemoryLog(TOPICS), MemoryStore()
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=12, per_device_train_batch_size=4, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True, logging_strategy="no", dataloader_pin_memory=False,
    )  # fmt: skip
    scope["train"](Trainer, a_model(), arguments, Tokens(), log, store, LINEAGE)
    assert [(v.version, v.step) for v in versions_of(log)] == [(0, 0), (1, 10), (2, 12)]


def test_a_callback_for_every_0th_step_is_refused() -> None:
    publisher = publisher_of(MemoryLog(TOPICS), MemoryStore(), ranks=0)
    with pytest.raises(ConfigError):
        PublishVersions(publisher, every=0)
    publisher.close(flush=False)


def test_plans_that_come_later_are_waited_for(example: Any) -> None:
    log, store = rehearsal_log(SPEC, 1), MemoryStore()
    example.train(a_model(), log, store, "t.", LINEAGE, 1)
    write_plans(log, SPEC, range(2, 3))
    example.train(a_model(), log, store, "t.", LINEAGE, 2)
    assert len(history_of(log).steps) == 2
