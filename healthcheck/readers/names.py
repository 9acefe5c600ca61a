"""What columns of recorded runs are called, tool by tool: the tables that give a name its metric.

Those of agents are in :mod:`healthcheck.core.names`: they count live as well.
"""

from __future__ import annotations

import re

from healthcheck.core.names import CONTAINERS as AGENT_CONTAINERS
from healthcheck.core.names import NAMES as AGENT_NAMES

TRAIN_WORDS = frozenset({"train", "training", "trn", "tr", "trainer"})
EVAL_WORDS = frozenset({"val", "valid", "validation", "eval", "evaluation", "dev", "heldout", "holdout"})
TEST_WORDS = frozenset({"test", "testing"})
PHASE_COLUMNS = ("mode", "split", "phase", "subset", "stage", "job_type")
"""Text columns whose value says whether a row is of training or of evaluation (mmdet, fairseq)."""

STEP_NAMES = (
    ("step", "steps", "global_step", "iter", "iteration", "iterations", "iters", "it", "n_iter", "num_iter", "niter",
     "train_step", "training_step", "opt_step", "optimizer_step", "optim_step", "current_step", "step_num",
     "current_steps", "cur_step", "cur_iter", "batch_num", "global_iter", "global_batch", "time_batch"),
    ("update", "updates", "num_updates"),
    ("total_timesteps", "time_total_timesteps", "timesteps_total", "timesteps", "timestep", "num_timesteps",
     "total_num_steps", "total_steps", "total_env_steps", "env_step", "env_steps", "num_env_steps_sampled", "frames", "frame",
     "num_frames", "misc_total_timesteps", "steps_total"),
    ("n_updates", "nupdates"),
    ("training_iteration", "time_iterations"),
    ("batch", "batch_idx", "minibatch", "index", "idx", "unnamed_0"),
    ("_step",),
    ("epoch", "epochs", "ep", "epoch_num", "current_epoch", "cur_epoch", "episode", "episodes", "round", "cycle"),
)  # fmt: skip
"""Names of step columns in order of preference; ``_step`` (W&B) counts log calls, so it comes late. ``n_updates``
(Stable-Baselines3) counts passes over a batch of experience, and is missing before the first: after the timesteps."""

EPOCH_NAMES = frozenset({"epoch", "epochs", "ep", "epoch_num", "current_epoch", "cur_epoch", "train_epoch"})

TIME_NAMES = (
    "_runtime", "runtime", "time_elapsed", "time_time_elapsed", "elapsed", "elapsed_time", "elapsed_s",
    "elapsed_sec", "elapsed_seconds", "wall_time_sec", "wall_time", "walltime", "wall_clock", "wall_clock_time",
    "time_total_s", "train_time", "train_time_ms", "training_time", "total_time", "relative_time",
    "_timestamp", "timestamp", "time_stamp", "datetime", "date", "ts", "time",
)  # fmt: skip
"""Names of clocks that run on. ``time`` alone is a clock only if it never falls (Ultralytics); else it is
the time of one step (mmdet, detectron2)."""

BOOKKEEPING = frozenset(
    {
        "seed", "eta", "eta_seconds", "max_steps", "total_flos", "num_epochs", "schema_version", "run_id", "pid",
        "job_id", "version", "v_num", "rank", "world_size", "num_gpus", "gpu", "run", "total_step_count",
        "unnamed_0", "index", "max_epochs", "max_iters", "num_iters", "total_iters", "total_epochs", "line",
    }
)  # fmt: skip
"""Numbers about the run, not of it. Never samples."""

# "environment": d3rlpy's own name for the return of an evaluation; no other tool writes it.
# "norm": what llm.c prints for the gradient norm.
NAMES: dict[str, tuple[str, ...]] = {
    "lr": ("lr", "learning_rate", "learningrate", "cur_lr", "current_lr", "base_lr", "last_lr", "optimizer_lr", "actor_lr"),
    "grad_norm": (
        "grad_norm", "gradient_norm", "gnorm", "gradnorm", "grad_norm_total", "total_grad_norm", "total_norm",
        "global_grad_norm", "grad_global_norm", "optim_total_grad_norm", "grad_l2_norm", "l2_grad_norm", "grad_norm_avg",
        "grad_norm_mean", "l2_norm_grad_global", "grad_2_0_norm_total", "grad_norm_2", "norm", "unclipped_grad_norm",
        "gradient_norm_total", "optimizer_grad_norm", "global_gradient_norm", "grad_norm_global", "grads_norm",
        "grad_gnorm", "gradients_default_optimizer_global_norm",
    ),
    "throughput": (
        "throughput", "tokens_per_sec", "tokens_per_second", "tokens_s", "tok_s", "toks_per_sec", "tok_per_sec", "tps", "tgs",
        "samples_per_second", "samples_per_sec", "samples_s", "examples_per_second", "images_per_sec", "img_s", "images_s",
        "fps", "time_fps", "sps", "charts_sps", "it_s", "its_s", "it_per_sec", "steps_per_second", "steps_per_sec", "throughput_tokens_per_sec",
        "throughput_samples_per_sec", "items_per_second", "wps", "ups", "throughput_device_tokens_per_sec", "tokens_per_sec_per_gpu",
    ),
    "time.step": (
        "step_time", "iter_time", "time_per_iter", "time_per_step", "batch_time", "iteration_time", "time_per_iteration",
        "elapsed_time_per_iteration", "dt", "sec_per_iter", "seconds_per_step", "step_time_sec", "time_iter", "timing_s_step",
        "ms_per_step", "ms_per_iter",
    ),
    "time.data": ("data_time", "data_loading_time", "dataload_time", "data_wait", "time_data", "loader_time"),
    "amp.scale": ("loss_scale", "grad_scale", "scaler_scale", "amp_scale", "loss_scaler", "scaler"),
    "amp.skipped": ("skipped", "amp_skipped", "number_of_skipped_iterations", "skipped_iterations", "is_skipped"),
    "eval.reward": ("environment",),
    "f1": (
        "f1", "f1_score", "f1score", "macro_f1", "f1_macro", "f1_macro_avg", "macro_f1_score", "weighted_f1", "f1_weighted", "micro_f1",
        "f1_micro", "mean_f1", "avg_f1", "overall_f1", "fscore", "f_score", "f1_m", "binaryf1score", "multiclassf1score",
        "multilabelf1score",
    ),
    "auc": (
        "auc", "auroc", "roc_auc", "auc_roc", "rocauc", "roc_auc_score", "auc_score", "mean_auc", "macro_auc", "auc_macro", "roc_auc_macro",
        "binaryauroc", "multiclassauroc", "multilabelauroc", "auc_1",
    ),
    "dice": (
        "dice", "dice_score", "mean_dice", "mdice", "avg_dice", "dice_mean", "dice_coef", "dice_coefficient", "dice_coeff", "dsc",
        "mean_dsc", "dice_metric", "dicescore", "generalizeddicescore",
    ),
    "iou": (
        "iou", "miou", "mean_iou", "m_iou", "meaniou", "avg_iou", "iou_score", "iou_mean", "jaccard", "jaccard_index", "jaccard_score",
        "mean_jaccard", "binaryjaccardindex", "multiclassjaccardindex", "mean_intersection_over_union", "jaccardindex",
    ),
    "precision": ("precision", "macro_precision", "precision_macro", "weighted_precision", "precision_weighted", "overall_precision"),
    "recall": ("recall", "macro_recall", "recall_macro", "weighted_recall", "recall_weighted", "overall_recall"),
    "accuracy": (
        "accuracy", "acc", "top1", "top_1", "acc1", "acc_1", "top1_acc", "acc_top1", "top1_accuracy", "accuracy_top1", "top_1_accuracy",
        "accuracy_top_1", "accuracy_score", "categorical_accuracy", "sparse_categorical_accuracy", "binary_accuracy", "overall_accuracy",
        "mean_accuracy", "avg_acc", "avg_accuracy", "prec1", "prec_1", "binaryaccuracy", "multiclassaccuracy", "balanced_accuracy",
    ),
    "perplexity": ("perplexity", "ppl"),
    "param_norm": ("param_norm", "params_norm", "weight_norm", "parameter_norm"),
}  # fmt: skip

ULTRALYTICS = frozenset({"metrics/accuracy_top1", "metrics/accuracy_top5"})
"""What Ultralytics calls the scores of a classifier's evaluation; the word alone does not say so."""
_DETECTION = re.compile(
    r"(?P<of>(?:(?:coco|pascal|voc|lvis|bbox|box|boxes|det|detection|segm|seg|mask|masks|keypoints?|pose|metrics|ema|instance)_)*)"
    r"(?P<head>m_?ap|mean_average_precision|mean_ap|ap)(?P<at>\d*[sml]?(?:_\w+)?)"
)
_AT_50 = re.compile(r"(?:iou_?)?(?:50|0_50?|5)(?:_all)?")
_AT_ALL = re.compile(r"(?:iou_?)?(?:0_)?50?(?:_0?_?05)?_(?:0_)?95(?:_all)?")
_AT_OTHER = re.compile(r"(?:0_)?\d\d|s|m|l|small|medium|large|copypaste|per_class|\d\d_?[sml]")


def of_detection(rest: list[str]) -> tuple[str, int] | None:
    """``map``, ``map50`` or ``""`` (at another threshold, of another size) and rank, of a mean average precision.

    Always of an evaluation unless the name says otherwise: nobody works it out on training batches.
    """
    match = _DETECTION.fullmatch("_".join(rest))
    if match is None:
        return None
    of, at = match["of"].split("_"), match["at"].strip("_")
    if of == [""] and (match["at"][:1].isalpha() or (match["head"] == "ap" and not at[:1].isdigit())):
        return None  # the average precision of a classifier, or an accuracy
    rank = len(of) + 10 * bool({"segm", "seg", "mask", "masks", "keypoint", "keypoints", "pose", "ema"} & set(of))
    if at[-2:] in ("_b", "_m", "_p") or at in ("b", "m", "p"):  # Ultralytics: of boxes, masks, poses
        rank += 0 if at[-1] == "b" else 10
        at = at[:-1].rstrip("_")
    if not at or _AT_ALL.fullmatch(at):
        return "map", rank + (0 if at else 1)
    if _AT_50.fullmatch(at):
        return "map50", rank
    return ("", rank) if _AT_OTHER.fullmatch(at) else None


BY_NAME = {alias: (metric, rank) for metric, names in (NAMES | AGENT_NAMES).items() for rank, alias in enumerate(names)}

CONTAINERS = AGENT_CONTAINERS | {"perf", "optim"}
VALUE_FUNCTION = frozenset({"val/ratio", "val/ratio_var", "val/clipfrac_avg", "val/num_eos_tokens"})
"""Names of TRL's PPO trainer in which ``val`` is the value function's side of a training step, not an evaluation."""
LOSS_WORDS = frozenset({"loss", "losses", "cost", "nll", "objective"})
QUALIFIERS = {
    "step": 1, "total": 1, "tot": 1, "overall": 1, "all": 2, "lm": 1, "batch": 2, "iter": 2, "iteration": 2, "value": 2, "current": 2,
    "cur": 2, "last": 2, "raw": 2, "avg": 3, "mean": 3, "average": 3, "running": 4, "reduced": 3, "global": 3, "final": 8, "epoch": 6,
    "smooth": 7, "smoothed": 7, "ema": 7, "debiased": 7, "train": 1, "training": 1, "interval": 3, "inner": 2, "function": 2, "per": 3, "the": 9, "model": 3, "main": 1,
}  # fmt: skip
"""Words beside "loss" that do not make it another loss, with what they cost in rank."""
KINDS = frozenset(
    {"ce", "xent", "crossentropy", "nll", "mlm", "clm", "dpo", "sft", "ppo", "grpo", "orpo", "kto", "ipo", "simpo", "cpo", "mse", "bce",
     "ctc", "diffusion", "denoising", "lang", "ntp", "causal", "language", "elbo", "huber"}
)  # fmt: skip
"""Kinds of loss: the loss of the run if no column is called plainly so, else a part of it."""
NET_ERRORS = {
    "errd": "discriminator", "err_d": "discriminator", "errg": "generator", "err_g": "generator",
    "d_a": "discriminator", "d_real": "discriminator", "g_a": "generator", "g_gan": "generator",
}  # fmt: skip
"""What the DCGAN example, pix2pix and CycleGAN and their many copies call their losses."""
PARTS = frozenset(
    {"d_b", "d_fake", "g_b", "g_l1", "g_gan_feat", "g_vgg", "cycle_a", "cycle_b", "idt_a", "idt_b",
     "box_om", "cls_om", "dfl_om", "box_oo", "cls_oo", "dfl_oo"}
)  # fmt: skip
"""Parts of a loss whose names do not say so: CycleGAN's, and those of the two heads of YOLOv10."""
NETS = {
    "critic": "critic", "cri": "critic", "q": "critic", "qf": "critic", "qf1": "critic1", "qf2": "critic2", "q1": "critic1",
    "q2": "critic2", "critic1": "critic1", "critic2": "critic2", "td": "critic", "qvalue": "critic", "vf": "value", "value": "value", "v": "value",
    "discriminator": "discriminator", "disc": "discriminator", "d": "discriminator", "loss_d": "discriminator", "dis": "discriminator",
    "generator": "generator", "gen": "generator", "g": "generator", "netd": "discriminator", "netg": "generator",
}  # fmt: skip
"""Networks with an optimizer of their own. The actor is missing on purpose: its loss is minus the expected
return, and up is not worse; it stays a part (``loss[part=actor]``)."""
POLICY_WORDS = frozenset({"policy", "actor", "pi", "pg", "surrogate", "surr", "reinforce", "a2c"})
"""Words of what a policy minimises: minus an expected return, often 0 by construction, and up is not worse."""
AGENT_WORDS = POLICY_WORDS | frozenset(
    {"entropy", "ent", "kl", "alpha", "temp", "temperature", "dual", "value", "vf", "critic", "qf", "td", "advantage", "coef"}
)  # fmt: skip
"""Words of the terms that stand beside it: of a policy's objective, not of another model's loss."""
NO_LOSS = frozenset(
    {
        "band",
        "scale",
        "std",
        "var",
        "weight",
        "best",
        "min",
        "max",
        "count",
        "ratio",
        "diff",
        "gap",
        "coef",
        "scaler",
        "spike",
        "delta",
        "ppl",
        "perplexity",
        "time",
    }
)
"""Words that make a number about the loss, not a loss."""
