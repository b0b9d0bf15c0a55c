"""The documents say what is: links lead somewhere, commands and settings exist, examples run."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollwire.ops.cli import COMMANDS
from rollwire.ops.http_server import served
from rollwire.producers.feedback import FeedbackClient
from rollwire.producers.gateway.serve import make_app
from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.ids import new_group_id, rollout_id
from rollwire.schemas.records import Reward
from rollwire.streams.emit import decode_record
from rollwire.streams.seams.clock import ManualClock
from rollwire.streams.seams.keys_memory import MemoryKeys
from rollwire.streams.seams.log import TopicPartition
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.store_memory import MemoryStore

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def _blocks(page: Path, language: str) -> Iterator[str]:
    yield from re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def _anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings: lower case, punctuation gone, blanks as hyphens."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings: list[str] = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_into_pages_lead_to_a_heading(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([\w./-]*)#([^)]+)\)", page.read_text()):
        there = page if not target else (page.parent / target).resolve()
        assert anchor in _anchors(there), f"{page.name} links to {target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_commands_exist(page: Path) -> None:
    names = {command.name for command in COMMANDS}
    used = re.findall(r"(?:^|`)rollwire ([a-z-]+)", page.read_text(), flags=re.MULTILINE)
    assert set(used) <= names, f"{page.name} names {set(used) - names}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page: Path) -> None:
    for name in re.findall(
        r"`((?:schemas|kernels|streams|producers|consumers|ops|src|tests)/[\w./-]*)`", page.read_text()
    ):
        assert (ROOT / name).exists() or (ROOT / f"{name}.py").exists(), f"{page.name} names {name}"


def test_the_architecture_names_every_room() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    for room in ("schemas", "kernels", "streams", "producers", "consumers", "ops"):
        assert f"| `{room}/` |" in text


def _function(page: Path, name: str) -> Callable[..., Any]:
    for block in _blocks(page, "python"):
        if f"def {name}(" in block:
            scope: dict[str, Any] = {}
            exec(compile(block, f"{page.name}:{name}", "exec"), scope)  # noqa: S102 - our own text
            function: Callable[..., Any] = scope[name]
            return function
    pytest.fail(f"{page.name} has no example {name}")


def test_the_reward_example_writes_a_reward_that_reads_back() -> None:
    clock = ManualClock()
    log = MemoryLog({name: spec.partitions for name, spec in TOPICS.items()}, clock)
    group = new_group_id(clock.now_us(), 7)
    _function(ROOT / "README.md", "publish")(log, rollout_id(group, 2), 1.0)
    partitions = [TopicPartition("rewards", number) for number in range(TOPICS["rewards"].partitions)]
    reader = log.reader()
    reader.assign(dict.fromkeys(partitions, 0))
    (record,) = reader.poll(10, 1.0)
    event = decode_record(record)
    assert isinstance(event, Reward)
    assert (event.group_id, event.reward, event.verifier) == (group, 1.0, "my-checker")


def test_what_the_trainers_example_publishes_the_followers_example_serves(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = MemoryLog({name: spec.partitions for name, spec in TOPICS.items()})
    store = MemoryStore()
    steps = [{"bias": np.zeros(3, np.float32), "table": np.full((40, 5), n, np.float32)} for n in range(4)]
    _function(ROOT / "README.md", "train")(log, store, "run", steps)
    _function(ROOT / "README.md", "serve")(log, store, 3)
    assert capsys.readouterr().out == "['bias', 'table']\n"


def test_the_feedback_examples_are_taken_by_a_gateway(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = MemoryLog({name: spec.partitions for name, spec in TOPICS.items()})
    answer = rollout_id(new_group_id(time.time_ns() // 1_000, 7), 0)
    app: Any = make_app(log, MemoryKeys(), b"s" * 32)
    with served(app, lifespan=True) as at:
        _function(ROOT / "docs" / "feedback.md", "main")(at.url, "rw_k", str(tmp_path), answer)
        with FeedbackClient(at.url, key="rw_k") as feedback:
            _function(ROOT / "README.md", "clicked")(feedback, answer, False, "user-7")
        assert feedback.counts().accepted == 1
    assert "accepted=1" in capsys.readouterr().out
