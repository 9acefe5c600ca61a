"""Names that runs of agents log: the same metrics in a record and live."""

from __future__ import annotations

from typing import Any

import pytest

from healthcheck.core.names import AgentNames, agent_metric
from healthcheck.engine.lookups import RuleDemand


def demand(*metrics: str) -> RuleDemand:
    return RuleDemand.of((), extra=metrics)


@pytest.mark.parametrize(
    ("written", "metric"),
    [
        ("charts/episodic_return", "reward"),
        ("rollout/ep_rew_mean", "reward"),
        ("critic/rewards/mean", "reward"),
        ("reward_std", "reward_std"),
        ("losses/approx_kl", "kl"),
        ("train/approx_kl", "kl"),
        ("objective/entropy", "entropy"),
        ("losses/clipfrac", "clip_fraction"),
        ("clip_ratio/region_mean", "clip_fraction"),
        ("sampling/importance_sampling_ratio/mean", "ratio"),
        ("completions/mean_length", "completion_length"),
        ("completions/clipped_ratio", "completions_cut"),
        ("response_length/clip_ratio", "completions_cut"),
        ("losses/explained_variance", "explained_variance"),
    ],
)
def test_the_names_of_four_tools_mean_what_they_mean_in_a_record(written: str, metric: str) -> None:
    found = agent_metric(written)
    assert found is not None
    assert found[0] == metric


@pytest.mark.parametrize(
    "written",
    [
        "loss",
        "lr",
        "eval/mean_reward",
        "val/ratio",
        "test_return",
        "rewards/format_reward/mean",
        "charts/SPS",
        "accuracy",
        "",
    ],
)
def test_evaluations_parts_of_a_reward_and_other_numbers_are_left_alone(written: str) -> None:
    assert agent_metric(written) is None


def test_only_what_a_rule_wants_is_given_under_another_name() -> None:
    names = AgentNames(demand("reward"))
    told: dict[str, Any] = {"charts/episodic_return": 3.0, "losses/approx_kl": 0.1}
    assert names.of(told) == {**told, "reward": 3.0}
    assert AgentNames(demand("loss")).of(told) is told


def test_the_surest_of_several_names_counts_and_the_others_no_longer() -> None:
    names = AgentNames(demand("reward"))
    assert names.of({"charts/episodic_return": 3.0})["reward"] == 3.0
    assert names.of({"charts/episodic_return": 4.0, "mean_reward": 5.0})["reward"] == 5.0
    assert "reward" not in names.of({"charts/episodic_return": 6.0})


def test_a_script_that_says_reward_itself_is_taken_at_its_word() -> None:
    names = AgentNames(demand("reward"))
    assert names.of({"reward": 1.0, "charts/episodic_return": 3.0})["reward"] == 1.0
    assert "reward" not in names.of({"charts/episodic_return": 3.0})


def test_what_is_no_number_is_left_to_whoever_says_so() -> None:
    assert AgentNames(demand("reward")).of({"episode_reward": "much"}) == {"episode_reward": "much"}
