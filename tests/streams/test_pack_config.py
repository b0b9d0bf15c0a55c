"""What `PackConfig` derives: the cost of the policy, the budget of a rank of several devices."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rollwire.kernels.cost import CostModel, cost_model
from rollwire.kernels.packing import MAX_BUDGET
from rollwire.kernels.policy.config import PolicyConfig, hf_config
from rollwire.streams.pack import PackConfig


def test_the_cost_is_the_policys_unless_it_is_set() -> None:
    wide = PolicyConfig(hidden_size=128)
    assert PackConfig().cost == cost_model(hf_config(PolicyConfig()))
    assert PackConfig().for_policy(wide).cost == cost_model(hf_config(wide)) != PackConfig().cost
    own = PackConfig(cost_per_token=2.0, cost_per_token_squared=0.5)
    assert own.cost == own.for_policy(wide).cost == CostModel(2.0, 0.5)


def test_a_rank_of_several_devices_has_their_budgets() -> None:
    assert PackConfig(token_budget=33).microbatch_tokens == 33
    # A sequence is padded to two chunks a device, so an odd token of a device's budget is never used.
    assert PackConfig(token_budget=33, context_parallel=4).microbatch_tokens == 128


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cost_per_token": 1.0}, "set both"),
        ({"cost_per_token_squared": 1.0}, "set both"),
        ({"token_budget": 1, "context_parallel": 2}, "from 1 to"),
        ({"token_budget": MAX_BUDGET + 1}, "from 1 to"),
        ({"objective": "mean"}, "objective"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        PackConfig(**changes)
