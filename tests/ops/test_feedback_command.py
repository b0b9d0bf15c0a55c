"""`rollwire feedback`: what is wrong is said before anything is sent."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollwire.ops.cli import run

ROLLOUT = "0199a0b2-7c31-7abc-8def-0123456789ab.0"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "say which answer and what"),
        ([ROLLOUT], "say which answer and what"),
        ([ROLLOUT, "thumb", "up"], "'up' is no number, and not true or false; a word is --label"),
        ([ROLLOUT, "thumb", "NaN"], "value is nan"),
        ([ROLLOUT, "thumb"], "says nothing"),
        (["answer", "thumb", "1"], "rollout id 'answer'"),
        ([ROLLOUT, "thumb", "1", "--url", "gateway"], "no http or https address"),
        ([ROLLOUT, "thumb", "1", "--url", "https://gateway.example.com"], "ROLLWIRE_FEEDBACK_KEY"),
    ],
)
def test_what_cannot_be(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ROLLWIRE_FEEDBACK_URL", raising=False)
    monkeypatch.delenv("ROLLWIRE_FEEDBACK_KEY", raising=False)
    assert run(["feedback", "send", *words]) in (1, 2)
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: no JSON"),
        ("[]", "line 2: no JSON object"),
        ('{"rollout": 1}', "line 2: unknown field 'rollout'; known are comment,"),
        ('{"rollout_id": "x"}', "line 2: without signal"),
        ('{"rollout_id": "x", "signal": "thumb", "value": 1}', "line 2: rollout id 'x'"),
        ('{"rollout_id": "x", "signal": "thumb", "happened_at": "now"}', "line 2: happened_at is no time"),
    ],
)
def test_a_line_that_cannot_be_is_named(
    line: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lines"
    file.write_text(f"\n{line}\n")
    assert run(["feedback", "send", "--lines", str(file)]) in (1, 2)
    assert said in capsys.readouterr().err


def test_a_spool_or_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["feedback", "flush", "--spool", str(tmp_path / "none")]) == 2
    assert run(["feedback", "send", "--lines", str(tmp_path / "none")]) == 2
    assert "there is no spool" in capsys.readouterr().err
