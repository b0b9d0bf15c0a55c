from __future__ import annotations

from pathlib import Path

import pytest

from rollwire.ops.demo.feedback.recipe import settle
from rollwire.ops.demo.folders import latest_run, new_run, runs
from rollwire.ops.demo.options import DemoOptions, new_settings, refuse_fixed, refuse_other_kind, with_final
from rollwire.ops.gateway import read_rules
from rollwire.ops.role_run import environment_of
from rollwire.ops.settings import build_settings, flattened, load_settings, save_settings, with_overrides
from rollwire.ops.warm import recipe_digest
from rollwire.schemas.errors import ConfigError, EnvironmentMissing


def test_options_reach_the_settings_of_every_process_they_concern() -> None:
    settings = new_settings(
        DemoOptions(
            dir=Path(),
            steps=7,
            seed=3,
            control=True,
            max_lag=0,
            no_ratio=True,
            overrides=("fleet.group_size=4",),
        ),
        "run-1",
    )
    assert settings.steps == settings.evaluator.final_version == 7
    assert (settings.seed, settings.fleet.seed, settings.trainer.seed) == (3, 3, 3)
    assert settings.trainer.control
    assert not settings.trainer.use_ratio
    assert settings.pack.max_lag_versions == 0
    assert settings.fleet.group_size == 4
    assert settings.prefix == "rollwire.run-1."
    assert settings.assemble.equal_rewards == "keep"
    assert (settings.pack.groups_per_step, settings.fleet.max_open_groups) == (96, 192)


@pytest.mark.parametrize(
    ("override", "nearest"),
    [("trainer.learning_rat=1", "trainer.learning_rate"), ("flete.seed=1", "fleet"), ("stepz=3", "steps")],
)
def test_a_setting_that_does_not_exist_is_refused_with_the_nearest_right_one(
    override: str, nearest: str
) -> None:
    with pytest.raises(ConfigError, match=nearest) as caught:
        new_settings(DemoOptions(dir=Path(), overrides=(override,)), "x")
    assert caught.value.exit_code == 2


def test_overrides_read_values_as_json_and_text_where_they_are_not() -> None:
    merged = with_overrides({"a": {"b": 1}}, ("a.b=2.5", "a.c=word", "d.e=true"))
    assert merged == {"a": {"b": 2.5, "c": "word"}, "d": {"e": True}}


@pytest.mark.parametrize("override", ["trainer", "=3", "a.b.c=1"])
def test_an_override_that_makes_no_sense_is_refused(override: str) -> None:
    with pytest.raises(ConfigError):
        with_overrides({"a": {"b": 1}}, (override,))


def test_settings_come_back_from_their_folder_as_they_were(tmp_path: Path) -> None:
    settings = new_settings(DemoOptions(dir=tmp_path), "run-1")
    save_settings(tmp_path / "run", settings)
    assert load_settings(tmp_path / "run") == settings


def test_a_longer_continuation_is_the_same_run(tmp_path: Path) -> None:
    settings = new_settings(DemoOptions(dir=tmp_path), "run-1")
    longer = with_final(settings, 300)
    assert (longer.steps, longer.evaluator.final_version) == (300, 300)
    assert longer.lineage == settings.lineage


def test_a_folder_without_a_run_says_how_to_begin_one(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentMissing, match="rollwire demo"):
        load_settings(tmp_path)
    with pytest.raises(EnvironmentMissing, match="rollwire demo"):
        latest_run(tmp_path)


def test_runs_are_numbered_and_the_newest_is_last(tmp_path: Path) -> None:
    settings = new_settings(DemoOptions(dir=tmp_path), "x")
    folders = [new_run(tmp_path, kind) for kind in ("demo", "control", "demo")]
    for folder in folders[:2]:
        save_settings(folder, settings)
    assert [f.name for f in folders] == ["0001-demo", "0002-control", "0003-demo"]
    assert runs(tmp_path) == folders[:2]  # a folder without settings is no run
    assert latest_run(tmp_path) == folders[1]


def test_the_warm_start_depends_on_the_recipe_alone() -> None:
    def digest(*overrides: str, seed: int = 0) -> str:
        return recipe_digest(new_settings(DemoOptions(dir=Path(), seed=seed, overrides=overrides), "x"))

    assert digest() == digest("trainer.learning_rate=1", "fleet.group_size=4")
    assert (
        len({digest(), digest(seed=1), digest("warm_start.steps=10"), digest("policy.hidden_size=32")}) == 4
    )


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="same number"):
        new_settings(DemoOptions(dir=Path(), overrides=("pack.ranks=2",)), "x")
    with pytest.raises(ConfigError, match="name them apart"):
        new_settings(DemoOptions(dir=Path(), overrides=("fleet.replica=evaluator-0",)), "x")
    with pytest.raises(ConfigError, match="no plan would ever be full"):
        new_settings(DemoOptions(dir=Path(), overrides=("fleet.max_open_groups=47",)), "x")
    # Half of a plan is live traffic: where that ends, whole plans of the other half are made.
    mixed = ("pack.cohort.production_share=0.5", "fleet.max_open_groups={}")
    with pytest.raises(ConfigError, match="no plan would ever be full"):
        new_settings(DemoOptions(dir=Path(), overrides=(mixed[0], mixed[1].format(47))), "x")
    new_settings(DemoOptions(dir=Path(), overrides=(mixed[0], mixed[1].format(48))), "x")


def test_settings_follow_from_the_environment() -> None:
    countdown = new_settings(DemoOptions(dir=Path()), "x")
    assert (countdown.environment, countdown.policy.vocab_size) == ("countdown", 20)
    defaults = build_settings({}, where="the defaults")
    assert (countdown.warm_start, countdown.policy) == (defaults.warm_start, defaults.policy)
    assert countdown.trainer == defaults.trainer
    calculator = new_settings(DemoOptions(dir=Path(), seed=2, environment="calculator"), "x")
    assert calculator.environment == environment_of(calculator).name == "calculator"
    assert calculator.policy.vocab_size == environment_of(calculator).vocab_size == 22
    assert (calculator.trainer.seed, calculator.fleet.seed) == (2, 2)
    assert calculator.trainer.learning_rate < countdown.trainer.learning_rate
    assert recipe_digest(calculator) != recipe_digest(new_settings(DemoOptions(dir=Path(), seed=2), "x"))
    changed = new_settings(
        DemoOptions(dir=Path(), environment="calculator", overrides=("trainer.learning_rate=0.5",)), "x"
    )
    assert changed.trainer.learning_rate == 0.5
    # What one run changes for itself reaches no other.
    again = new_settings(DemoOptions(dir=Path(), seed=2, environment="calculator"), "x")
    assert again.trainer == calculator.trainer


def test_an_environment_that_does_not_exist_or_does_not_fit_the_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="countdown, calculator"):
        new_settings(DemoOptions(dir=Path(), environment="chess"), "x")
    with pytest.raises(ConfigError, match="countdown, calculator"):
        new_settings(DemoOptions(dir=Path(), overrides=("environment=chess",)), "x")
    with pytest.raises(ConfigError, match="vocab_size is 20, the environment 'calculator' has 22"):
        new_settings(DemoOptions(dir=Path(), overrides=("environment=calculator",)), "x")


def test_what_a_run_has_fixed_cannot_be_changed_by_continuing_it() -> None:
    refuse_fixed(DemoOptions(dir=Path(), steps=300, resume=True))
    with pytest.raises(ConfigError, match=r"--seed, --environment, --control, --max-lag, --no-ratio, --set"):
        refuse_fixed(
            DemoOptions(
                dir=Path(),
                seed=1,
                environment="countdown",
                control=True,
                max_lag=0,
                no_ratio=True,
                overrides=("steps=1",),
                resume=True,
            )
        )


def test_no_steps_are_not_the_default_number_of_steps() -> None:
    with pytest.raises(ConfigError):
        new_settings(DemoOptions(dir=Path(), steps=0), "x")


def test_settings_flatten_into_dotted_names() -> None:
    flat = dict(flattened(new_settings(DemoOptions(dir=Path(), seed=4), "x")))
    assert flat["trainer.seed"] == "4"
    assert flat["prefix"] == '"rollwire.x."'
    assert list(flat) == sorted(flat)


def test_a_feedback_demo_trains_on_live_traffic_alone(tmp_path: Path) -> None:
    options = DemoOptions(dir=tmp_path, feedback=True, seed=2, overrides=("people.questions_per_s=7",))
    settings = new_settings(options, "run-1")
    assert settings.live
    assert settings.pack.live_groups == settings.pack.groups_per_step
    assert (settings.people.seed, settings.trainer.seed, settings.serving.seed) == (2, 2, 2)
    assert settings.people.questions_per_s == 7
    assert settings.trainer.learning_rate < new_settings(DemoOptions(dir=tmp_path), "x").trainer.learning_rate
    settled = settle(tmp_path, settings)
    ports = {settled.gateway.port, settled.serving.port}
    assert len(ports) == 2
    assert 0 not in ports
    assert settled.gateway.rules == tmp_path.absolute() / "rules.toml"
    assert read_rules(settled.gateway.rules).name == "demo"
    # The join must still be open when the window of the feedback has closed.
    rules = read_rules(settled.gateway.rules)
    assert settled.production.group_deadline_s > rules.window_s + rules.grace_s
    assert new_settings(DemoOptions(dir=tmp_path, feedback=True, control=True), "x").trainer.control


def test_the_people_of_a_feedback_demo_know_one_environment() -> None:
    with pytest.raises(ConfigError, match="calculator"):
        new_settings(DemoOptions(dir=Path(), feedback=True, environment="calculator"), "x")


def test_a_run_goes_on_as_what_it_is() -> None:
    feedback, ordinary = DemoOptions(dir=Path(), feedback=True), DemoOptions(dir=Path())
    refuse_other_kind(feedback, new_settings(feedback, "x"))
    refuse_other_kind(ordinary, new_settings(ordinary, "x"))
    with pytest.raises(ConfigError, match="with --feedback"):
        refuse_other_kind(ordinary, new_settings(feedback, "x"))
    with pytest.raises(ConfigError, match="without --feedback"):
        refuse_other_kind(feedback, new_settings(ordinary, "x"))
