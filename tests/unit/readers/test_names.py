"""Columns as tools call them end up under one name for each metric, whatever else stands beside them."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from healthcheck.core.samples import series_name
from healthcheck.readers.columns import identify
from healthcheck.readers.series import RecordedRun, decide


def read_as(columns: list[str]) -> dict[str, str]:
    """What becomes of these columns if each has a number in each of five rows: metric -> column."""
    rows = [(None, {name: float(row) for name in columns}) for row in range(1, 6)]
    targets = decide(rows).targets
    return {series_name(t.metric, t.labels): name for name, t in targets.items() if t is not None}


AGENTS: dict[str, dict[str, str]] = {
    "TRL, GRPO": {
        "reward": "reward",
        "reward_std": "reward_std",
        "frac_reward_zero_std": "frac_reward_zero_std",
        "kl": "kl",
        "entropy": "entropy",
        "clip_fraction": "clip_ratio/region_mean",
        "ratio": "sampling/importance_sampling_ratio/mean",
        "completion_length": "completions/mean_length",
        "rewards.format.mean": "rewards/format/mean",
        "rewards.format.std": "rewards/format/std",
        "completions.max_length": "completions/max_length",
    },
    "TRL, GRPO in event files": {
        "reward": "train/reward",
        "reward_std": "train/reward_std",
        "frac_reward_zero_std": "train/frac_reward_zero_std",
        "clip_fraction": "train/clip_ratio/region_mean",
        "completion_length": "train/completions/mean_length",
    },
    "TRL, PPO": {
        "kl": "objective/kl",
        "entropy": "objective/entropy",
        "reward": "objective/scores",
        "clip_fraction": "policy/clipfrac_avg",
        "ratio": "val/ratio",
        "loss[part=policy]": "loss/policy_avg",
        "loss[optimizer=value]": "loss/value_avg",
        "val.clipfrac_avg": "val/clipfrac_avg",
    },
    "verl": {
        "entropy": "actor/entropy",
        "kl": "actor/ppo_kl",
        "clip_fraction": "actor/pg_clipfrac",
        "reward": "critic/rewards/mean",
        "critic.rewards.max": "critic/rewards/max",
        "completion_length": "response_length/mean",
        "explained_variance": "critic/vf_explained_var",
        "loss[optimizer=value]": "critic/vf_loss",
        "loss[part=actor_pg]": "actor/pg_loss",
    },
    "verl, before the entropy was renamed": {"entropy": "actor/entropy_loss", "reward": "critic/score/mean"},
    "OpenRLHF": {
        "reward": "reward",
        "return": "return",
        "kl": "kl",
        "ppo_kl": "ppo_kl",
        "clip_fraction": "ppo_clip_ratio",
        "completion_length": "response_length",
    },
    "NeMo RL": {"reward": "reward", "ratio": "probs_ratio", "completion_length": "mean_gen_tokens_per_sample"},
    "cleanrl": {
        "reward": "charts/episodic_return",
        "episode_length": "charts/episodic_length",
        "throughput": "charts/SPS",
        "kl": "losses/approx_kl",
        "old_approx_kl": "losses/old_approx_kl",
        "entropy": "losses/entropy",
        "clip_fraction": "losses/clipfrac",
        "explained_variance": "losses/explained_variance",
        "loss[optimizer=value]": "losses/value_loss",
    },
    "Stable-Baselines3": {
        "reward": "rollout/ep_rew_mean",
        "episode_length": "rollout/ep_len_mean",
        "kl": "train/approx_kl",
        "clip_fraction": "train/clip_fraction",
        "entropy": "train/entropy_loss",
        "explained_variance": "train/explained_variance",
        "loss": "train/loss",
        "loss[part=value]": "train/value_loss",
        "loss[part=policy_gradient]": "train/policy_gradient_loss",
        "eval.reward": "eval/mean_reward",
    },
    "Spinning Up": {
        "reward": "AverageEpRet",
        "reward_std": "StdEpRet",
        "MaxEpRet": "MaxEpRet",
        "episode_length": "EpLen",
        "entropy": "Entropy",
        "kl": "KL",
        "clip_fraction": "ClipFrac",
        "loss[optimizer=value]": "LossV",
    },
    "Spinning Up, off-policy": {"reward": "AverageEpRet", "eval.reward": "AverageTestEpRet", "eval.reward_std": "StdTestEpRet"},
    "RLlib": {
        "reward": "env_runners/episode_return_mean",
        "episode_length": "env_runners/episode_len_mean",
        "loss": "learners/default_policy/total_loss",
        "loss[part=value]": "learners/default_policy/vf_loss",
        "entropy": "learners/default_policy/entropy",
        "explained_variance": "learners/default_policy/vf_explained_var",
        "grad_norm": "learners/default_policy/gradients_default_optimizer_global_norm",
        "eval.reward": "evaluation/env_runners/episode_return_mean",
    },
    "RLlib, older": {
        "reward": "episode_reward_mean",
        "episode_reward_max": "episode_reward_max",
        "kl": "info/learner/default_policy/learner_stats/kl",
        "explained_variance": "info/learner/default_policy/learner_stats/vf_explained_var",
    },
    "rsl_rl": {
        "reward": "Train/mean_reward",
        "episode_length": "Train/mean_episode_length",
        "entropy": "Loss/entropy",
        "loss[part=surrogate]": "Loss/surrogate",
        "loss[optimizer=value]": "Loss/value_function",
    },
    "ML-Agents": {"reward": "Environment/Cumulative Reward", "episode_length": "Environment/Episode Length", "entropy": "Policy/Entropy"},
    "home-made": {"reward": "Avg_Reward_100", "reward_std": "reward_std_100", "Score": "Score", "reward_format": "reward_format"},
    "preferences": {"rewards.chosen": "rewards/chosen", "rewards.margins": "rewards/margins", "rewards.accuracies": "rewards/accuracies"},
}  # fmt: skip


@pytest.mark.parametrize("tool", AGENTS)
def test_what_agents_log_has_one_name_for_each_metric(tool: str) -> None:
    found = read_as(["step", *AGENTS[tool].values()])
    assert {name: found.get(name) for name in AGENTS[tool]} == AGENTS[tool]


SCORES: dict[str, dict[str, str]] = {
    "Ultralytics": {
        "eval.map50": "metrics/mAP50(B)",
        "eval.map": "metrics/mAP50-95(B)",
        "eval.mAP50_M": "metrics/mAP50(M)",
        "eval.precision": "metrics/precision(B)",
        "eval.recall": "metrics/recall(B)",
    },
    "Ultralytics, poses alone": {"eval.map50": "metrics/mAP50(P)", "eval.map": "metrics/mAP50-95(P)"},
    "Ultralytics, a classifier": {
        "eval.accuracy": "metrics/accuracy_top1",
        "eval.accuracy_top5": "metrics/accuracy_top5",
    },
    "YOLOv5": {"eval.map50": "metrics/mAP_0.5", "eval.map": "metrics/mAP_0.5:0.95", "eval.recall": "metrics/recall"},
    "mmdet": {
        "eval.map": "coco/bbox_mAP",
        "eval.map50": "coco/bbox_mAP_50",
        "eval.coco_bbox_mAP_75": "coco/bbox_mAP_75",
    },
    "mmdet 2": {"eval.map": "bbox_mAP", "eval.map50": "bbox_mAP_50"},
    "detectron2": {
        "eval.map": "bbox/AP",
        "eval.map50": "bbox/AP50",
        "eval.bbox_APs": "bbox/APs",
        "eval.segm_AP": "segm/AP",
    },
    "detectron2, masks alone": {"eval.map": "segm/AP", "eval.map50": "segm/AP50"},
    "torchmetrics": {
        "eval.map": "val_map",
        "eval.map50": "val_map_50",
        "eval.map_75": "val_map_75",
        "map": "train_map",
    },
    "by hand": {"eval.map": "val/mAP@[.5:.95]", "eval.map50": "val/mAP@0.5"},
    "by hand, one": {"eval.map": "val/mAP"},
    "maps that are no score": {"map_size": "map_size", "ap": "ap", "maps": "maps"},
    "classifiers": {"eval.f1": "val_f1_score", "eval.auc": "val_auroc", "eval.accuracy": "val_acc1", "f1": "train_f1"},
    "classifiers, by class name": {"eval.f1": "val/MulticlassF1Score", "eval.auc": "val/BinaryAUROC"},
    "masks": {"eval.dice": "val_dice_score", "eval.iou": "val_mIoU", "loss": "dice_loss"},
    "masks, otherwise": {"eval.dice": "Validation Dice", "eval.iou": "valid/jaccard_index"},
}


@pytest.mark.parametrize("tool", SCORES)
def test_scores_of_an_evaluation_have_one_name_each(tool: str) -> None:
    found = read_as(["epoch", *SCORES[tool].values()])
    assert {name: found.get(name) for name in SCORES[tool]} == SCORES[tool]


@pytest.mark.parametrize(
    "order", list(itertools.permutations(["total_reward", "reward", "episode_reward"])), ids=" ".join
)
def test_of_columns_that_are_one_metric_the_plainest_is_it_in_whatever_order_they_stand(order: tuple[str, ...]) -> None:
    found = read_as(["step", *order])
    assert found == {"reward": "reward", "total_reward": "total_reward", "episode_reward": "episode_reward"}


@pytest.mark.parametrize("order", list(itertools.permutations(["task_reward", "raw_reward"])), ids=" ".join)
def test_names_that_are_equally_plain_are_told_apart_by_their_letters(order: tuple[str, ...]) -> None:
    assert read_as(["step", *order])["reward"] == "raw_reward"


def test_the_entropy_that_stable_baselines_logs_as_a_loss_is_the_entropy_again(
    read: Callable[..., RecordedRun], points: Callable[[RecordedRun, str], object]
) -> None:
    text = "time/total_timesteps,train/entropy_loss,train/policy_gradient_loss\n100,-1.5,0.1\n200,-1.25,0.1\n"
    assert points(read("progress.csv", text), "entropy") == [(100, 1.5), (200, 1.25)]


def test_an_entropy_loss_of_which_nobody_says_whose_it_is_stays_a_part_of_the_loss() -> None:
    assert read_as(["step", "loss", "entropy_loss"])["loss[part=entropy]"] == "entropy_loss"


@pytest.mark.parametrize(
    "name",
    ["reward_model_loss", "kl_coef", "entropy_coeff", "reward_max", "clip_range", "reward_margin", "ratio_clipped"],
)
def test_numbers_about_a_metric_are_not_that_metric(name: str) -> None:
    assert identify(name).metric not in ("reward", "reward_std", "kl", "entropy", "clip_fraction", "ratio")


def test_a_score_of_the_training_data_is_not_one_of_an_evaluation() -> None:
    assert identify("train/mAP50").phase == "train"
    assert identify("metrics/precision").phase == "train", "no mean average precision stands beside it"
