"""What serves weights, one behaviour for all: nothing changes before the swap, everything by it, and back by `undo`."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import pytest

from rollwire.consumers.weights.anchor import AnchorFile, read_anchor
from rollwire.consumers.weights.targets.folder import BOOK, CURRENT, FolderTarget
from rollwire.consumers.weights.targets.numpy_state import NumpyTarget
from rollwire.consumers.weights.targets.scatter import Scatter
from rollwire.consumers.weights.targets.target import Sample, Serving, Target, Update
from rollwire.consumers.weights.targets.torch_module import TorchTarget
from rollwire.kernels.digest import StateDigest
from rollwire.kernels.tensors import State, Tensor, tensor
from rollwire.schemas.errors import ConfigError, StateMismatch, TargetFailed
from rollwire.schemas.golden import load_examples
from rollwire.schemas.records import WeightVersion

KINDS = ("numpy", "torch", "torch-strided", "folder")


class MakeTarget(Protocol):
    def __call__(self) -> tuple[Target, Callable[[], State]]: ...


def state_of(seed: int) -> State:
    rng = np.random.default_rng(seed)
    return {
        "weight": tensor("BF16", (30, 20), rng.integers(0, 1 << 16, 600, dtype=np.uint16)),
        "bias": tensor("F32", (20,), rng.standard_normal(20, dtype=np.float32)),
        "steps": tensor("I64", (), np.array([seed], np.int64)),
    }


def event_of(version: int, state: State) -> WeightVersion:
    example = next(e.event for e in load_examples("weight-versions") if e.name == "anchor")
    assert isinstance(example, WeightVersion)
    return msgspec.structs.replace(example, version=version, state_digest=StateDigest.of(state).hex)


def bits(state: State) -> dict[str, bytes]:
    return {name: one.bits.tobytes() for name, one in state.items()}


def whole(target: Target, state: State) -> dict[str, bytes]:
    samples = [Sample(name, 0, one.elements) for name, one in state.items()]
    found = target.read_back(samples)
    assert found is not None
    return {sample.name: array.tobytes() for sample, array in zip(samples, found, strict=True)}


def update_for(target: Target, version: int, state: State) -> Update:
    """As the follower makes it."""
    held = target.held()
    if not held:
        return Update(event_of(version, state), state)
    change = Scatter(held, state)
    return Update(event_of(version, state), held, change, change.names)


@pytest.fixture(params=KINDS)
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Target]:
    made: Target
    if request.param == "numpy":
        made = NumpyTarget()
    elif request.param == "folder":
        made = FolderTarget(tmp_path / "root")
    else:
        made = TorchTarget(torch_module(strided=request.param == "torch-strided"))
    yield made
    made.close()


def torch_module(*, strided: bool = False) -> Any:
    import torch

    module = torch.nn.Module()
    weight = torch.zeros(30, 20, dtype=torch.bfloat16)
    weight = torch.zeros(20, 30, dtype=torch.bfloat16).t() if strided else weight
    module.weight = torch.nn.Parameter(weight)
    module.bias = torch.nn.Parameter(torch.zeros(20))
    module.register_buffer("steps", torch.zeros((), dtype=torch.int64))
    module.register_buffer("scratch", torch.zeros(3), persistent=False)
    return module


def test_a_version_is_served_from_the_swap_on_and_until_the_undo(target: Target) -> None:
    states = [state_of(seed) for seed in range(4)]
    target.stage(update_for(target, 0, states[0]))
    target.swap()
    target.keep()
    assert whole(target, states[0]) == bits(states[0])
    for version in (1, 2):
        target.stage(update_for(target, version, states[version]))
        assert whole(target, states[0]) == bits(states[version - 1])
        assert target.swap() >= 0
        assert whole(target, states[0]) == bits(states[version])
        if version == 1:
            target.keep()
    target.undo()
    target.undo()
    assert whole(target, states[0]) == bits(states[1])
    target.stage(update_for(target, 3, states[3]))
    target.undo()  # before its swap
    assert whole(target, states[0]) == bits(states[1])
    target.stage(update_for(target, 3, states[3]))
    target.swap()
    target.keep()
    target.undo()  # nothing is staged any more
    assert whole(target, states[0]) == bits(states[3])


def test_a_part_is_read_back(target: Target) -> None:
    state = state_of(5)
    target.stage(update_for(target, 0, state))
    target.swap()
    found = target.read_back([Sample("weight", 100, 103), Sample("bias", 0, 0), Sample("steps", 0, 1)])
    assert found is not None
    assert [array.tolist() for array in found] == [state["weight"].bits[100:103].tolist(), [], [5]]


@pytest.mark.parametrize("kind", ["numpy", "torch", "torch-strided"])
def test_c27_other_tensors_are_refused_by_name_and_nothing_is_written(kind: str) -> None:
    made: Target = (
        NumpyTarget(dict(state_of(0))) if kind == "numpy" else TorchTarget(torch_module(strided="s" in kind))
    )
    before = whole(made, state_of(0))
    renamed = {("wait" if name == "weight" else name): one for name, one in state_of(1).items()}
    reshaped = {**state_of(1), "weight": state_of(1)["weight"]._replace(shape=(20, 30))}
    retyped = {**state_of(1), "weight": state_of(1)["weight"]._replace(dtype="F16")}
    for wrong, named in ((renamed, "wait"), (reshaped, "weight"), (retyped, "weight"), ({}, "bias")):
        with pytest.raises(StateMismatch, match=named):
            made.stage(Update(event_of(1, state_of(1)), wrong))
        made.undo()
    assert whole(made, state_of(0)) == before


@pytest.mark.parametrize("pause", [None, nullcontext])
def test_a_reader_never_sees_half_a_swap(pause: Callable[[], nullcontext[None]] | None) -> None:
    """Whoever holds `reading` keeps the swap waiting, and reads one version."""
    old, new = state_of(0), state_of(1)
    mine = {name: one._replace(bits=one.bits.copy()) for name, one in old.items()}
    target = NumpyTarget(mine, pause=pause)
    target.stage(update_for(target, 1, new))
    with target.reading() as seen:
        swapping = threading.Thread(target=target.swap)
        swapping.start()
        swapping.join(0.2)
        assert swapping.is_alive()
        assert bits(seen) == bits(old)
    swapping.join(30)
    with target.reading() as seen:
        assert bits(seen) == bits(new)


def test_arrays_that_cannot_be_written_are_refused_at_once() -> None:
    frozen = state_of(0)["weight"].bits.copy()
    frozen.flags.writeable = False
    with pytest.raises(TargetFailed, match="'weight' is read-only"):
        NumpyTarget({"weight": Tensor("BF16", (30, 20), frozen)})


def test_arrays_that_serve_take_nothing_but_a_change() -> None:
    target = NumpyTarget(dict(state_of(0)))
    with pytest.raises(TargetFailed, match="in place"):
        target.stage(Update(event_of(1, state_of(1)), state_of(1)))
    with pytest.raises(TargetFailed, match="nothing is staged"):
        target.swap()


def test_a_scatter_writes_what_differs_and_takes_it_back() -> None:
    old, new = state_of(0), dict(state_of(0))
    moved = old["weight"].bits.copy()
    moved[[3, 599]] ^= 1
    new["weight"] = old["weight"]._replace(bits=moved)
    change = Scatter(old, new)
    assert (change.changed, change.names) == (2, frozenset({"weight"}))
    held = bits(old)
    change.apply()
    assert bits(old) == bits(new)
    change.undo()
    assert bits(old) == held


def test_c31_a_dtype_that_no_version_has_is_refused_by_name() -> None:
    import torch

    module = torch.nn.Module()
    module.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(StateMismatch, match="phase is complex64"):
        TorchTarget(module)


def test_a_tied_parameter_stands_once() -> None:
    module = torch_module()
    module.tied = module.weight
    assert set(TorchTarget(module).held() or {}) == {"weight", "bias", "steps"}


def read_folder(root: Path) -> State:
    current = root / CURRENT
    return read_anchor([AnchorFile(f.name, f.read_bytes()) for f in sorted(current.glob("*.safetensors"))])


def serve(target: Target, version: int, state: State) -> None:
    target.stage(update_for(target, version, state))
    target.swap()
    target.keep()


def test_a_folder_names_its_version_and_goes_on_after_a_restart(tmp_path: Path) -> None:
    root, extra = tmp_path / "root", tmp_path / "extra"
    extra.mkdir()
    (extra / "tokenizer.json").write_text("{}")
    first = FolderTarget(root, extra=extra, shard_bytes=700)
    assert first.serving() is None
    for version in range(3):
        serve(first, version, state_of(version))
    assert bits(read_folder(root)) == bits(state_of(2))
    assert (root / CURRENT / "tokenizer.json").read_text() == "{}"
    assert (root / CURRENT / "model.safetensors.index.json").exists()
    assert len(list((root / "versions").iterdir())) == 2  # it and the one before: somebody may still read it
    with pytest.raises(ConfigError, match="held by another process"):
        FolderTarget(root)
    first.close()
    again = FolderTarget(root)
    event = event_of(2, state_of(2))
    assert again.serving() == Serving(event.lineage, 2, event.state_digest)
    assert bits(again.reread()) == bits(state_of(2))
    assert len(list((root / "versions").iterdir())) == 1
    again.close()


def test_the_version_before_stays_for_its_readers_until_the_next_one_is_kept(tmp_path: Path) -> None:
    target = FolderTarget(tmp_path)

    def take(number: int) -> None:
        target.stage(Update(event_of(number, state_of(number)), state_of(number)))
        target.swap()
        target.keep()

    take(0)
    read = (tmp_path / CURRENT).resolve()
    take(1)
    for swapped in (False, True):
        target.stage(Update(event_of(2, state_of(2)), state_of(2)))
        if swapped:
            target.swap()
        target.undo()
        assert read.is_dir()
        assert sorted(path.name[:8] for path in (tmp_path / "versions").iterdir()) == ["00000000", "00000001"]
    target.stage(Update(event_of(2, state_of(2)), state_of(2)))
    target.swap()
    target.keep()
    assert not read.exists()
    target.close()


def test_a_folder_of_another_life_is_not_believed(tmp_path: Path) -> None:
    """Its bits may have rotted: it is written anew beside, and served until that is done."""
    root = tmp_path / "root"
    first = FolderTarget(root)
    serve(first, 1, state_of(1))
    first.close()
    file = next((root / CURRENT).glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    again = FolderTarget(root)
    again.stage(update_for(again, 1, state_of(1)))
    assert bits(read_folder(root)) != bits(state_of(1))
    again.swap()
    again.keep()
    assert bits(read_folder(root)) == bits(state_of(1))
    again.close()


def test_a_folder_that_cannot_be_written_fails_and_serves_on(tmp_path: Path) -> None:
    root, extra = tmp_path / "root", tmp_path / "extra"
    extra.mkdir()
    target = FolderTarget(root, extra=extra)
    serve(target, 0, state_of(0))
    os.mkfifo(extra / "pipe")  # no file: passed over
    serve(target, 1, state_of(1))
    (extra / "pipe").unlink()
    extra.rmdir()
    with pytest.raises(TargetFailed, match="version 2 was not written"):
        target.stage(update_for(target, 2, state_of(2)))
    target.undo()
    assert bits(read_folder(root)) == bits(state_of(1))
    extra.mkdir()
    serve(target, 2, state_of(2))
    assert len(list((root).glob(".staging-*"))) == 0
    assert bits(read_folder(root)) == bits(state_of(2))
    target.close()


def test_c27_a_folder_takes_whole_tensors_only(tmp_path: Path) -> None:
    target = FolderTarget(tmp_path)
    whole_one = state_of(0)["weight"]
    part = {"weight": whole_one._replace(bits=whole_one.bits[:300])}
    with pytest.raises(StateMismatch, match="in part"):
        target.stage(Update(event_of(0, state_of(0)), part))
    target.close()


def test_an_unfinished_folder_is_removed_at_the_next_start(tmp_path: Path) -> None:
    target = FolderTarget(tmp_path)
    serve(target, 0, state_of(0))
    target.close()
    (tmp_path / ".staging-dead").mkdir()
    (tmp_path / ".staging-dead" / BOOK).write_text("{")
    (tmp_path / "versions" / "00000009-whole-but-unlinked").mkdir()
    FolderTarget(tmp_path).close()
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", CURRENT, "versions"]
    assert bits(read_folder(tmp_path)) == bits(state_of(0))
