"""Exported folders are whole, verified, and open elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from rollwire.consumers.weights.anchor import AnchorFile, read_anchor
from rollwire.consumers.weights.export import export_version
from rollwire.consumers.weights.links import gone_link
from rollwire.consumers.weights.publisher import PublisherConfig, SnapshotPublisher
from rollwire.consumers.weights.snapshot import SnapshotWriter
from rollwire.kernels.tensors import State
from rollwire.schemas.errors import ConfigError, ObjectMissing, WeightError
from rollwire.schemas.records import WeightVersion
from rollwire.streams.seams.store_memory import MemoryStore

MakeState = Callable[..., State]
Move = Callable[..., State]


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def states(make_state: MakeState, move: Move) -> list[State]:
    made = [make_state()]
    for version in range(1, 4):
        made.append(move(made[-1], version))
    return made


@pytest.fixture
def events(store: MemoryStore, states: list[State]) -> list[WeightVersion]:
    publisher = SnapshotPublisher(
        store,
        model="m",
        lineage="L",
        config=PublisherConfig(anchor_every=3),
        hf_config={"model_type": "tiny"},
    )
    found = []
    for version, state in enumerate(states):
        found.append(publisher.submit(version, version, state).result(20))
        publisher.committed(version)
    publisher.close()
    return found


@pytest.mark.parametrize("shard_bytes", [1 << 30, 5_000])
def test_a_version_without_a_snapshot_of_its_own(
    store: MemoryStore, states: list[State], events: list[WeightVersion], tmp_path: Path, shard_bytes: int
) -> None:
    folder = tmp_path / "deep" / "v2"
    files = export_version(store, events, (), 2, folder, shard_bytes=shard_bytes)
    assert sorted(files) == sorted(path.name for path in folder.iterdir())
    assert json.loads((folder / "config.json").read_text()) == {"model_type": "tiny"}
    found = read_anchor([AnchorFile(file, (folder / file).read_bytes()) for file in files])
    assert {n: (t.dtype, t.shape, t.bits.tobytes()) for n, t in found.items()} == {
        n: (t.dtype, t.shape, t.bits.tobytes()) for n, t in states[2].items()
    }
    assert ("model.safetensors.index.json" in files) == (shard_bytes == 5_000)
    if shard_bytes > 5_000:
        with safe_open(folder / "model.safetensors", framework="numpy") as opened:
            assert np.array_equal(
                opened.get_tensor("layers.1.weight").reshape(-1).view(np.uint32),
                states[2]["layers.1.weight"].bits,
            )
    assert [path.name for path in folder.parent.iterdir()] == ["v2"]


def test_the_config_is_that_of_the_nearest_snapshot_that_still_has_one(
    store: MemoryStore, states: list[State], events: list[WeightVersion], tmp_path: Path
) -> None:
    """Not of one that the collector took, nor of a snapshot that was written without."""
    gone = gone_link(events[3], None, events[3].published_us)
    assert events[3].anchor is not None
    store.delete(events[3].anchor.key)
    bare = SnapshotWriter(
        store,
        model="m",
        lineage="L",
        shard_bytes=1 << 20,
        anchor_shard_bytes=1 << 20,
        threads=1,
        hf_config=None,
    )
    events.append(bare.write_first(4, 4, states[1], events[3].published_us).event)
    for version in (3, 4):
        folder = tmp_path / str(version)
        assert "config.json" in export_version(store, events, (gone,), version, folder)
        assert json.loads((folder / "config.json").read_text()) == {"model_type": "tiny"}


def test_nothing_is_overwritten_and_nothing_half_done_stays(
    store: MemoryStore, events: list[WeightVersion], tmp_path: Path
) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine").write_text("x")
    with pytest.raises(ConfigError, match="is not empty"):
        export_version(store, events, (), 1, full)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "config.json" in export_version(store, events, (), 1, empty)
    for event in events[1:]:
        store.delete(event.objects[0].key)
    with pytest.raises(ObjectMissing):
        export_version(store, events, (), 2, tmp_path / "new")
    with pytest.raises(WeightError, match="no way"):
        export_version(store, events, (), 9, tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "full"]
