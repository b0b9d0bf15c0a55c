"""C34: a process that is killed anywhere in the middle of an apply leaves a folder with one whole version."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rollwire.consumers.weights.anchor import AnchorFile, read_anchor
from rollwire.consumers.weights.targets.folder import BOOK, CURRENT, Book, FolderTarget
from rollwire.consumers.weights.targets.target import Update
from rollwire.kernels.digest import StateDigest
from rollwire.kernels.tensors import State, tensor
from rollwire.schemas.golden import load_examples
from rollwire.schemas.records import WeightVersion


def state_of(version: int) -> State:
    rng = np.random.default_rng(version)
    return {
        name: tensor("BF16", (64, 8), rng.integers(0, 1 << 16, 512, dtype=np.uint16)) for name in ("a", "b")
    }


def event_of(version: int) -> WeightVersion:
    example = next(e.event for e in load_examples("weight-versions") if e.name == "anchor")
    assert isinstance(example, WeightVersion)
    digest = StateDigest.of(state_of(version)).hex
    return msgspec.structs.replace(example, version=version, state_digest=digest)


def put(root: Path, version: int) -> None:
    target = FolderTarget(root, shard_bytes=1_100)
    target.stage(Update(event_of(version), state_of(version)))
    target.swap()
    target.keep()
    target.close()


def killed_at(effect: int, root: Path, work: Callable[[], None]) -> bool:
    """Runs `work` in a process that kills itself before its `effect`-th effect on the files under `root` (every open,
    rename, link and removal); whether it got that far."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # of a fork beside threads: the child touches files alone
        child = os.fork()
    if child == 0:
        left = effect

        def audit(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal left
            if event in EFFECTS and any(str(root) in str(one) for one in arguments):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.addaudithook(audit)
            work()
        finally:
            os._exit(0 if sys.exc_info()[0] is None else 1)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


EFFECTS = frozenset({"open", "os.rename", "os.symlink", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"})


def whole_version(root: Path) -> int:
    """The version that a reader finds; every bit of it is checked."""
    folder = (root / CURRENT).resolve(strict=True)
    book = msgspec.json.decode((folder / BOOK).read_bytes(), type=Book)
    state = read_anchor([AnchorFile(f.name, f.read_bytes()) for f in sorted(folder.glob("*.safetensors"))])
    assert StateDigest.of(state).hex == book.state_digest == event_of(book.version).state_digest
    return book.version


def test_c34_killed_at_any_effect_of_an_apply_a_folder_holds_one_whole_version(tmp_path: Path) -> None:
    put(tmp_path, 0)
    served: list[int] = []
    version = 1
    effect = 1
    while killed_at(effect, tmp_path, lambda: put(tmp_path, version)):  # noqa: B023  # it is called at once
        served.append(whole_version(tmp_path) - version)
        # Whoever comes next starts from whatever lies there, and ends with the version it wants.
        put(tmp_path, version)
        assert whole_version(tmp_path) == version
        version += 1
        effect += 1
    assert whole_version(tmp_path) == version
    # Before the link was replaced it was the version before, from then on the new one; both were seen.
    assert served == sorted(served)
    assert set(served) == {-1, 0}
    assert len(served) > 15
    assert not list(tmp_path.glob(".staging-*"))
