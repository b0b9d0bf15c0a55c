"""The topic files and schemas of a checkout, as they are and as a release of it had them."""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from rollwire.schemas.errors import ConfigError, EnvironmentMissing

CHECKOUT: Final = Path(__file__).resolve().parent.parent
_FOLDERS: Final = ("schemas/topics", "schemas/avro")
_DEADLINE_S: Final = 60.0


def tree_of_folder(checkout: Path) -> Mapping[str, str]:
    """Path below `schemas/` -> content. Raises `ConfigError` where there are none."""
    found = {
        path.relative_to(checkout / "schemas").as_posix(): path.read_text("utf-8")
        for folder in _FOLDERS
        for path in sorted((checkout / folder).glob("*.*"))
        if path.suffix in (".toml", ".avsc")
    }
    if not found:
        raise ConfigError(f"{checkout} holds no schemas/topics and schemas/avro: name a checkout of Rollwire")
    return found


def tree_of_ref(checkout: Path, ref: str) -> Mapping[str, str]:
    """The same as a git commit, tag or branch has it. Raises `ConfigError` for a ref that is none, or has no schemas."""
    if ref.startswith("-"):
        raise ConfigError(f"{ref!r} is no git ref")
    done = _git(checkout, "archive", "--format=tar", ref, "--", *_FOLDERS)
    if done.returncode != 0:
        why = done.stderr.decode(errors="replace").strip()
        raise ConfigError(f"git has no schemas under {ref!r}: {why}")
    found: dict[str, str] = {}
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        for member in archive:
            content = archive.extractfile(member) if member.isfile() else None
            if content is not None and member.name.endswith((".toml", ".avsc")):
                found[member.name.removeprefix("schemas/")] = content.read().decode()
    return found


def newest_release(checkout: Path) -> str | None:
    """The newest tag that the checked-out commit descends from; None where nothing was released yet."""
    done = _git(checkout, "describe", "--tags", "--abbrev=0")
    return done.stdout.decode().strip() if done.returncode == 0 else None


def _git(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(
            ["git", "-C", str(checkout), *arguments], capture_output=True, timeout=_DEADLINE_S, check=False
        )
    except FileNotFoundError:
        raise EnvironmentMissing("git is missing: released schemas are read from its history") from None
    except subprocess.TimeoutExpired:
        raise EnvironmentMissing(f"git had not ended after {_DEADLINE_S:.0f} s") from None
