"""Object keys: by content, never by version or time (law 3). Equal content has one key, whoever writes it, however often."""

from __future__ import annotations

import hashlib
from urllib.parse import quote


def sha256_hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def delta_key(model: str, sha256: str) -> str:
    """A delta shard (`rollwire.kernels.delta.format`)."""
    return f"weights/{_folder(model)}/deltas/{sha256}.rwdl"


def anchor_key(model: str, sha256: str, file: str) -> str:
    """A file of an anchor; `file` is its name in Hugging Face's layout, whose ending the key keeps."""
    return f"weights/{_folder(model)}/anchors/{sha256}.{file.rsplit('.', 1)[-1]}"


def sums_key(model: str, sha256: str) -> str:
    """The chunk sums of an anchor (`rollwire.consumers.weights.sums`)."""
    return f"weights/{_folder(model)}/sums/{sha256}.sums"


def manifest_key(model: str, sha256: str) -> str:
    return f"weights/{_folder(model)}/manifests/{sha256}.json"


def model_prefix(model: str) -> str:
    """Everything of a model's weights, except for checkpoints."""
    return f"weights/{_folder(model)}/"


def _folder(model: str) -> str:
    return quote(model, safe="")  # "org/name" is one folder
