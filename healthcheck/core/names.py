"""Canonical names for metrics that scripts and frameworks log under their own. Standard library only.

``train/loss`` and ``loss`` are the same thing, ``val_loss`` is ``eval.loss``. Names that are not
known keep their words; separators become dots. What runs of agents call their numbers has a table of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from healthcheck.core.protocols import Demand

_EVAL_WORDS = ("eval", "val", "valid", "validation", "dev")
_TEST_WORDS = ("test",)
_TRAIN_WORDS = ("train", "training", "trainer")

_SAME = {
    "learning_rate": "lr",
    "gradient_norm": "grad_norm",
    "gradnorm": "grad_norm",
    "grad-norm": "grad_norm",
    "loss_train": "loss",
    "train_loss": "loss",
    "training_loss": "loss",
    "eval_loss": "eval.loss",
    "valid_loss": "eval.loss",
    "validation_loss": "eval.loss",
    "val_loss": "eval.loss",
    "acc": "accuracy",
}

_HEAD = re.compile(
    rf"^({'|'.join((*_EVAL_WORDS, *_TEST_WORDS, *_TRAIN_WORDS))})[/._\- ](.+)$",
    re.IGNORECASE,
)
_TAIL = re.compile(rf"^(.+)[/._\- ]({'|'.join((*_EVAL_WORDS, *_TEST_WORDS, *_TRAIN_WORDS))})$", re.IGNORECASE)
_SEPARATORS = re.compile(r"[/\s]+")
_ODD = re.compile(r"[^0-9A-Za-z_.\-@]")


def canonical_metric(name: str) -> str:
    """``Train/Loss`` -> ``loss``; ``val_loss`` and ``loss/val`` -> ``eval.loss``; ``rewards/mean`` -> ``rewards.mean``."""
    plain = name.strip()
    match = _HEAD.match(plain)
    phase, bare = (match[1].lower(), match[2]) if match else ("", plain)
    if not match:
        tail = _TAIL.match(plain)
        if tail:
            phase, bare = tail[2].lower(), tail[1]
    bare = _ODD.sub("_", _SEPARATORS.sub(".", bare.strip(" /")))
    bare = _SAME.get(bare.lower(), bare.lower() if bare.lower() in ("loss", "lr", "grad_norm", "accuracy") else bare)
    if phase in _EVAL_WORDS:
        return bare if bare.startswith("eval.") else f"eval.{bare}"
    if phase in _TEST_WORDS:
        return f"test.{bare}"
    return bare


def is_evaluation(name: str) -> bool:
    """Whether a canonical name is a result of an evaluation."""
    return name.startswith("eval.")


# --------------------------------------------------------------------------------------------------
# What runs of agents (reinforcement learning, post-training) call their numbers, tool by tool: in records and live. TRL, verl,
# cleanrl, Stable-Baselines3, RLlib, Spinning Up, OpenAI Baselines and their copies.


# "actor_entropy_loss": verl's older name of the entropy itself, not negated.
# "mean_100_episode_reward": OpenAI Baselines' loggers and what descends from them.
NAMES: dict[str, tuple[str, ...]] = {
    "reward": (
        "reward", "rewards", "mean_reward", "reward_mean", "ep_rew_mean", "rollout_ep_rew_mean", "episode_reward",
        "episode_reward_mean", "mean_episode_reward", "episode_return", "episode_return_mean", "mean_return", "return",
        "returns", "avg_reward", "average_reward", "ep_reward", "ep_ret", "averageepret", "eprewmean", "rewards_mean",
        "critic_rewards_mean", "critic_score_mean", "average_return", "mean_100_episode_reward", "charts_episodic_return",
        "total_reward", "cumulative_reward", "rollout_return_history", "rollout_return",
        "episodic_return", "env_runners_episode_return_mean", "objective_scores", "eplenrewmean", "env_return",
    ),
    "reward_std": ("reward_std", "rewards_std", "critic_rewards_std", "std_reward", "ep_rew_std", "stdepret", "std_ep_ret"),
    "kl": ("kl", "approx_kl", "objective_kl", "mean_kl", "kl_mean", "actor_ppo_kl", "ppo_mean_non_score_reward_kl", "kl_div", "approxkl"),
    "entropy": ("entropy", "policy_entropy", "objective_entropy", "actor_entropy", "mean_entropy", "policy_entropy_mean", "actor_entropy_loss", "approx_entropy", "token_entropy", "dist_entropy"),
    "clip_fraction": (
        "clip_fraction", "clipfrac", "clip_frac", "pg_clipfrac", "ppo_clip_ratio", "clip_ratio", "clip_ratio_region",
        "clip_ratio_region_mean", "clipfraction", "clipped_fraction", "fraction_clipped", "clip_rate",
    ),
    "ratio": (
        "ratio", "importance_ratio", "importance_sampling_ratio", "sampling_importance_sampling_ratio", "val_ratio", "prob_ratio",
        "probs_ratio", "policy_ratio", "is_ratio",
    ),
    "completion_length": (
        "completion_length", "completions_length", "completions_mean_length", "response_length", "responses_length", "responses_len",
        "response_len", "tokens_responses_len", "generation_length", "gen_length", "gen_tokens_per_sample", "response_tokens",
        "completion_tokens", "output_length",
    ),
    "completions_cut": (
        "completions_clipped_ratio", "completion_clipped_ratio", "response_length_clip_ratio", "response_clip_ratio", "clipped_ratio",
        "completions_clipped", "truncated_ratio", "truncation_rate", "response_aborted_ratio",
    ),
    "exploration": (
        "exploration_rate", "rollout_exploration_rate", "epsilon", "eps", "exploration", "eps_greedy", "epsilon_greedy", "exploration_epsilon",
        "rollout_epsilon", "current_epsilon", "explore_rate", "exploration_eps", "charts_epsilon",
    ),
    "episode_length": (
        "episode_length", "ep_length", "ep_len", "episodic_length", "episode_len", "eplen", "eplenmean", "averageeplen",
    ),
}  # fmt: skip

_BY_NAME = {alias: (metric, rank) for metric, names in NAMES.items() for rank, alias in enumerate(names)}
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z][a-z])|(?<=[a-z])(?=[A-Z])")
_SPLIT = re.compile(r"[^A-Za-z0-9]+")
_ELSEWHERE = frozenset({"eval", "evaluation", "val", "valid", "validation", "test", "testing", "dev"})
CONTAINERS = frozenset(
    {"metrics", "metric", "scalars", "scalar", "logs", "log", "stats", "history", "trainer", "charts", "losses"}
)
"""Words in front of a name that only say where a tool keeps it."""
_BEFORE = CONTAINERS | {"train", "training"}

# What every tool's name of a metric ends in, with the words that only say of what, of whom or how it was averaged.
MEANS = frozenset({"mean", "avg", "average", "averaged"})
AGENT_PREFIXES = frozenset(
    {"actor", "policy", "pi", "ppo", "grpo", "objective", "algo", "agent", "learner", "losses", "charts", "sampling"}
)
"""Words in front of a KL, an entropy, a ratio that only say whose it is."""
OF_AGENTS = frozenset(
    {
        "reward",
        "reward_std",
        "kl",
        "entropy",
        "clip_fraction",
        "ratio",
        "episode_length",
        "explained_variance",
        "completions_cut",
    }
)
"""Metrics that only runs of agents have."""
_REWARD = frozenset({"reward", "rewards", "rew", "rews", "return", "returns", "ret"})
_REWARD_BESIDE = MEANS | frozenset(
    {"total", "cumulative", "cum", "sum", "episode", "episodes", "ep", "episodic", "eps", "env", "environment", "rollout", "runners", "charts",
     "running", "moving", "smoothed", "last", "recent", "step", "steps", "per", "iter", "iteration", "batch", "raw", "overall", "undiscounted",
     "agent", "objective", "critic", "sampler", "results", "stat", "all", "task", "score", "window"}
)  # fmt: skip
"""Words beside a reward that do not make it another one: ``Avg_Reward_100`` is the reward, ``reward_format`` a part of it."""
_STD = frozenset({"std", "stdev", "stddev", "sd"})
_SHARE = frozenset({"frac", "fraction", "ratio", "rate", "share"})
_OF_VALUES = MEANS | frozenset(
    {"vf", "value", "values", "val", "critic", "ppo", "old", "train", "variance", "var", "explained", "returns"}
)


def of_agent(rest: list[str]) -> tuple[str, int] | None:
    """Metric and rank of a name that reinforcement learning and post-training use, by its words."""
    said = set(rest)
    if "explained" in said and said & {"var", "variance"} and said <= _OF_VALUES:
        return "explained_variance", 5 + len(rest)
    if {"zero", "std"} <= said and said & _SHARE:
        return "frac_reward_zero_std", len(rest)
    if said & _REWARD:
        beside = said - _REWARD
        spread = bool(beside & _STD)
        if all(w in _REWARD_BESIDE or w in _STD or w.isdigit() for w in beside):
            return ("reward_std" if spread else "reward"), 60 + len(rest)
        return None
    core = [w for w in rest if w not in MEANS]
    found = _known(core, AGENT_PREFIXES, OF_AGENTS) or _known(core, _OF_LENGTHS, _LENGTHS)
    return (found[0], 60 + found[1]) if found is not None else None


_LENGTHS = frozenset({"episode_length", "completion_length"})
_OF_LENGTHS = frozenset({"rollout", "env", "environment", "runners", "train", "charts", "tokens", "sampler", "results"})


def _known(core: list[str], before: frozenset[str], metrics: frozenset[str]) -> tuple[str, int] | None:
    """One of these metrics, by the words that are left when those that may stand before them are gone."""
    for start in range(len(core)):
        found = _BY_NAME.get("_".join(core[start:]))
        if found is not None and found[0] in metrics:
            return found
        if core[start] not in before:
            return None
    return None


@lru_cache(maxsize=4096)
def agent_metric(name: str) -> tuple[str, int] | None:
    """Metric and rank (0 is the surest name) of a number that a run of agents logs while it trains; None for all others."""
    said = [w.lower() for w in _SPLIT.split(_CAMEL.sub("_", name)) if w]
    if not said or _ELSEWHERE & set(said):
        return None
    while len(said) > 1 and said[0] in _BEFORE:
        said.pop(0)
    return _BY_NAME.get("_".join(said)) or of_agent(said)


class AgentNames:
    """Gives what a script logs under its tool's names to the rules on ``reward``, ``kl`` and so on.

    Of several names for one metric the surest counts, from its first value on.
    """

    def __init__(self, demand: Demand) -> None:
        self._demand = demand
        self._best: dict[str, tuple[int, str]] = {}
        """Metric -> rank and name of what it is taken from."""

    def of(self, metrics: Mapping[str, Any]) -> Mapping[str, Any]:
        """The same metrics, with those that rules want under another name as well."""
        found: dict[str, tuple[int, str]] = {}
        for name, value in metrics.items():
            known = agent_metric(name)
            if known is None or not hasattr(value, "__float__") or not self._demand.wants(known[0]):
                continue
            metric, rank = known
            ranked = (-1, name) if metric == name else (rank, name)
            if ranked <= self._best.get(metric, ranked) and ranked <= found.get(metric, ranked):
                found[metric] = ranked
        self._best.update(found)
        more = {metric: metrics[name] for metric, (_, name) in found.items() if metric != name}
        return {**metrics, **more} if more else metrics
