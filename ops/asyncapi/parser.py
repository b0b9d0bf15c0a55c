"""AsyncAPI's own parser, run by Node.js; its packages are installed once into the cache, not into the tree."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from rollwire.ops.programs import find_node
from rollwire.schemas.errors import EnvironmentMissing, RollwireError

_HERE: Final = Path(__file__).parent
_FILES: Final = ("package.json", "validate.cjs")
_INSTALL_DEADLINE_S: Final = 600.0
_PARSE_DEADLINE_S: Final = 120.0


class Diagnostic(msgspec.Struct, frozen=True):
    severity: str  # "error", "warning", "information", "hint"
    code: str
    message: str
    path: str  # into the document, steps joined by "/"


class Read(msgspec.Struct, frozen=True):
    """What the parser made of a document."""

    version: str  # of AsyncAPI
    channels: tuple[str, ...]
    operations: tuple[str, ...]
    messages: tuple[str, ...]


class Verdict(msgspec.Struct, frozen=True):
    diagnostics: tuple[Diagnostic, ...]
    read: Read | None  # None: the document has errors


def ensure_parser(cache: Path, report: Callable[[str], None]) -> Path:
    """The folder of the parser's packages, installed by npm if need be (55 MB). Two processes may call this at once.

    Raises `EnvironmentMissing` where Node.js or npm is missing, or npm cannot reach its registry.
    """
    digest = hashlib.sha256(b"".join((_HERE / name).read_bytes() for name in _FILES)).hexdigest()[:12]
    folder = cache / f"asyncapi-{digest}"
    if folder.is_dir():
        return folder
    node = find_node()
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "asyncapi.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # held as long as another installs, which has a deadline
        if folder.is_dir():
            return folder
        report(f"installing AsyncAPI's parser with npm into {folder} (once)")
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        for name in _FILES:
            shutil.copyfile(_HERE / name, partial / name)
        # No scripts: none of these packages needs one to work.
        options = ["--ignore-scripts", "--no-package-lock", "--no-audit", "--no-fund", "--loglevel=error"]
        done = _run([*node.npm, "install", *options], partial, _INSTALL_DEADLINE_S)
        if done.returncode != 0:
            raise EnvironmentMissing(f"npm could not install AsyncAPI's parser: {_first_words(done.stderr)}")
        partial.rename(folder)
    return folder


def check_document(text: str, cache: Path, report: Callable[[str], None] = lambda _: None) -> Verdict:
    """What AsyncAPI's parser says of a document. Raises `EnvironmentMissing` where it cannot be had."""
    folder = ensure_parser(cache, report)
    done = _run([str(find_node().node), "validate.cjs"], folder, _PARSE_DEADLINE_S, text)
    if done.returncode != 0:
        raise RollwireError(f"AsyncAPI's parser in {folder} failed: {_first_words(done.stderr)}")
    return msgspec.json.decode(done.stdout, type=Verdict)


def _run(
    command: list[str], folder: Path, deadline_s: float, text: str = ""
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, cwd=folder, input=text, capture_output=True, text=True, timeout=deadline_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise EnvironmentMissing(f"`{' '.join(command)}` had not ended after {deadline_s:.0f} s") from None


def _first_words(said: str) -> str:
    """The first lines of a program's complaint, which say what it is; the rest says where."""
    return " | ".join(line.strip() for line in said.splitlines()[:4] if line.strip())[:400]
