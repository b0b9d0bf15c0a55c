"""The rules of feedback: what a file may say, what an event may say, and what it is worth together."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwire.schemas.errors import ConfigError, Refused
from rollwire.schemas.reasons import REASONS
from rollwire.schemas.rules import Given, Rules, check_value, default_rules, parse_rules, score
from rollwire.schemas.rules.parse import default_text

RULES = default_rules()
HEAD = """
name = "mine"
version = "3"
window_s = 60
grace_s = 5
horizon_s = 600
max_events = 10
reward = [-1.0, 1.0]
"""


def one_signal(lines: str) -> Rules:
    return parse_rules(f"{HEAD}\n[signals.rating]\n{lines}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("window = 60", "did you mean 'window_s'"),
        (HEAD + "[signals.rating]\nkind = 'number'\nrnage = [0, 1]", "did you mean 'range'"),
        (HEAD + "[outcomes.tool_error]\nslient = 0.0", "did you mean 'silent'"),
        (HEAD, "signals"),
        (HEAD + "[signals.rating]\nkind = 'number'", "a number needs a range"),
        (HEAD + "[signals.rating]\nkind = 'nubmer'\nrange = [0.0, 1.0]", "Invalid enum value"),
        (HEAD + "[signals.rating]\nkind = 'number'\nrange = [1.0, 0.0]", "the lower one first"),
        (HEAD + "[signals.rating]\nkind = 'number'\nrange = [0.0, nan]", "finite"),
        (HEAD + "[signals.rating]\nkind = 'number'\nrange = [0.0, 1.0]\nweight = 1.0", "needs a worth"),
        (HEAD + "[signals.rating]\nkind = 'number'\nrange = [0.0, 1.0]\nworth = [0.0, 2.0]", "outside"),
        (HEAD + "[signals.rating]\nkind = 'number'\nrange = [0.0, 1.0]\nfold = 'any'", "for booleans"),
        (HEAD + "[signals.rating]\nkind = 'number'\nrange = [0.0, 1.0]\nlabels = {up = 2.0}", "outside"),
        (HEAD + "[signals.accept]\nkind = 'boolean'\nrange = [0.0, 2.0]", "boolean"),
        (HEAD + "[signals.comment]\nkind = 'text'\nweight = 1.0", "a text has neither"),
        (HEAD + "[signals.Rating]\nkind = 'number'\nrange = [0.0, 1.0]", "lower-case"),
        (HEAD.replace("window_s = 60", "window_s = 0"), "signals"),
        (HEAD + "[outcomes.x]\nsilent = -2.0\n[signals.accept]\nkind = 'boolean'", "outside"),
        ("name = ", "not TOML"),
        (HEAD + "signals = 3", "must be a table"),
    ],
)
def test_what_a_file_may_not_say_is_named(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match="rules") as caught:
        parse_rules(text)
    assert said in str(caught.value)


def test_the_digest_is_of_what_the_rules_say_not_of_how_they_are_written() -> None:
    reworded = default_text().replace("#", "# again:").replace("  ", " ")
    assert parse_rules(reworded).digest == RULES.digest
    changed = parse_rules(default_text().replace("window_s = 3600", "window_s = 3601"))
    assert changed.digest != RULES.digest
    assert RULES.verifier_version == f"1+{RULES.digest[:12]}"


@pytest.mark.parametrize("value", [0.0, 1.0, 0.5, -0.0])
def test_c72_both_ends_of_a_range_are_allowed(value: float) -> None:
    assert check_value(RULES, "edit_survival", value, None) == value


@pytest.mark.parametrize("value", [1.0000001, -1e-12, 10001.0])
def test_c72_what_is_outside_is_refused_never_clamped(value: float) -> None:
    with pytest.raises(Refused) as caught:
        check_value(RULES, "edit_survival", value, None)
    assert (caught.value.reason, caught.value.field) == ("value_out_of_range", "value")


def test_c72_a_number_without_a_range_is_an_error_of_the_file() -> None:
    with pytest.raises(ConfigError, match="a number needs a range"):
        one_signal("kind = 'number'")


@pytest.mark.parametrize(
    ("signal", "value", "label", "reason", "field"),
    [
        ("thmub", 1.0, None, "unknown_signal", "signal"),
        ("thumb", None, None, "value_missing", "value"),
        ("edit_survival", None, "most", "value_missing", "label"),
        ("thumb", 0.5, None, "value_out_of_range", "value"),
        ("accept", 2.0, None, "value_out_of_range", "value"),
        ("thumb", None, "sideways", "label_unknown", "label"),
        (
            "rating",
            1.0,
            "her name is Ann",
            "label_unknown",
            "label",
        ),  # free text belongs in the comment, sealed
        ("comment", None, "w" * 65, "label_unknown", "label"),
        ("thumb", 1.0, "down", "inconsistent", "label"),
        ("rating", math.nan, None, "not_finite", "value"),
        ("rating", math.inf, None, "not_finite", "value"),
        ("comment", 1.0, None, "inconsistent", "value"),
    ],
)
def test_a_refusal_names_the_field(
    signal: str, value: float | None, label: str | None, reason: str, field: str
) -> None:
    with pytest.raises(Refused) as caught:
        check_value(RULES, signal, value, label)
    assert (caught.value.reason, caught.value.field) == (reason, field)
    assert caught.value.reason in REASONS


def test_a_label_stands_for_its_value() -> None:
    assert check_value(RULES, "thumb", None, "down") == -1.0
    assert check_value(RULES, "accept", None, "true") == 1.0
    assert check_value(RULES, "thumb", 1.0, "up") == 1.0
    assert check_value(RULES, "rating", 0.25, "so-so") == 0.25  # a signal without labels: a word for people
    assert check_value(RULES, "comment", None, None) is None


def said(signal: str, value: float | None, at: int = 0, name: str = "a") -> Given:
    return Given(at, name, signal, value)


@pytest.mark.parametrize(
    ("given_", "reward"),
    [
        ([said("thumb", 1.0)], 1.0),
        ([said("thumb", 1.0, 1, "a"), said("thumb", -1.0, 2, "b")], -1.0),  # the last one counts
        ([said("thumb", 1.0, 2, "a"), said("thumb", -1.0, 2, "b")], -1.0),  # at the same time: by id
        ([said("dissatisfied_follow_up", 0.0), said("dissatisfied_follow_up", 1.0, 0, "b")], -1.0),
        ([said("thumb", 1.0), said("accept", 0.0, 0, "b")], 0.0),
        ([said("edit_survival", 0.75)], 0.5),
        ([said("comment", None)], None),
        ([said("latency_ms", 100.0)], None),  # shades, makes none by itself
        ([], None),
    ],
)
def test_a_reward_is_the_weighted_mean_of_what_signals_are_worth(
    given_: list[Given], reward: float | None
) -> None:
    assert score(RULES, "answered", given_).reward == reward


def test_c78_silence_is_worth_what_the_rules_say_for_its_class() -> None:
    silent = score(RULES, "tool_error", [said("latency_ms", 5.0), said("comment", None, 0, "b")])
    assert (silent.reward, silent.components, silent.evidence) == (-1.0, (), ())
    assert score(RULES, "clarifying_question", []).reward is None
    assert score(RULES, "tool_error", [said("thumb", 1.0)]).reward == 1.0


def test_a_slow_answer_shades_the_reward_of_others() -> None:
    found = score(RULES, "answered", [said("thumb", 1.0), said("latency_ms", 3_600_000.0, 0, "b")])
    assert found.reward == pytest.approx((1.0 - 0.05) / 1.05)
    assert found.evidence == ("a", "b")
    assert found.components == (("latency_ms", -1.0), ("thumb", 1.0))


VALUES = {
    "thumb": st.sampled_from([-1.0, 1.0]),
    "accept": st.sampled_from([0.0, 1.0]),
    "edit_survival": st.floats(0, 1),
    "dissatisfied_follow_up": st.sampled_from([0.0, 1.0]),
    "rating": st.floats(0, 1),
    "latency_ms": st.floats(0, 3.6e6),
    "comment": st.none(),
}


@st.composite
def events(draw: st.DrawFn) -> list[Given]:
    names = draw(st.lists(st.text("abc", min_size=1, max_size=3), unique=True, max_size=12))
    made = []
    for name in names:
        signal = draw(st.sampled_from(sorted(VALUES)))
        made.append(Given(draw(st.integers(0, 3)), name, signal, draw(VALUES[signal])))
    return made


@given(events(), st.randoms(use_true_random=False), st.sampled_from(sorted(RULES.signals)))
def test_the_order_that_events_are_given_in_changes_no_bit(
    given_: list[Given], random: object, signal: str
) -> None:
    shuffled = list(given_)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    # The same with `mean`, whose sums must be exact for this to hold.
    kind = msgspec.structs.replace(RULES.signals[signal], fold="mean")
    rules = msgspec.structs.replace(RULES, signals={**RULES.signals, signal: kind})
    for judged in (RULES, rules):
        first, second = score(judged, "answered", given_), score(judged, "answered", shuffled)
        assert msgspec.json.encode(first) == msgspec.json.encode(second)
        assert first.reward is None or judged.reward[0] <= first.reward <= judged.reward[1]
