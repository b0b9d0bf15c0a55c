"""The example runs: a person asks, clicks, and the click is in the log."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from rollwire.ops.http_server import served
from rollwire.producers.emit import decode_record
from rollwire.producers.gateway.serve import TOPIC, make_app
from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.records import Feedback
from rollwire.streams.seams.keys_memory import MemoryKeys
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.scan import scan

EXAMPLE = Path(__file__).parents[3] / "examples" / "feedback_app.py"


def test_a_click_on_the_examples_page_is_in_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = MemoryLog({name: spec.partitions for name, spec in TOPICS.items()})
    gateway: Any = make_app(log, MemoryKeys(), b"s" * 32)
    with served(gateway, lifespan=True) as at:
        monkeypatch.setenv("ROLLWIRE_FEEDBACK_URL", at.url)
        monkeypatch.setenv("FEEDBACK_SPOOL", str(tmp_path))
        spec = importlib.util.spec_from_file_location("feedback_app", EXAMPLE)
        assert spec is not None
        assert spec.loader is not None
        example = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(example)
        with TestClient(example.app) as browser:
            page = browser.get("/").text
            found = re.search(r'rollout: "([^"]+)"', page)
            assert found is not None
            said = {"rollout": found[1], "thumb": 1}
            assert browser.post("/thumb", json=said).status_code == 202
            assert browser.post("/thumb", json=said | {"rollout": "x"}).status_code == 400
    (event,) = (decode_record(record) for record in scan(log, [TOPIC]))
    assert isinstance(event, Feedback)
    assert (event.rollout_id, event.value) == (found[1], 1.0)
    assert event.subject
