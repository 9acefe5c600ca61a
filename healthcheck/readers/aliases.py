"""What people call things: column names of public tools, and the metric that each one is.

Tables only; :mod:`healthcheck.readers.identify` looks a name up, :mod:`healthcheck.readers.normalise`
settles which of several columns gets it. An alias that helps one source only carries its reason here.
"""

from __future__ import annotations

TRAIN_WORDS = frozenset({"train", "training", "trn", "tr", "trainer"})
EVAL_WORDS = frozenset({"val", "valid", "validation", "eval", "evaluation", "dev", "heldout", "holdout"})
TEST_WORDS = frozenset({"test", "testing"})
PHASE_COLUMNS = ("mode", "split", "phase", "subset", "stage", "job_type")
"""Text columns whose value says whether a row is of training or of evaluation (mmdet, fairseq)."""

STEP_NAMES = (
    ("step", "steps", "global_step", "iter", "iteration", "iterations", "iters", "it", "n_iter", "num_iter", "niter",
     "train_step", "training_step", "opt_step", "optimizer_step", "optim_step", "current_step", "step_num",
     "current_steps", "cur_step", "cur_iter", "batch_num", "global_iter", "global_batch", "time_batch"),
    ("update", "updates", "num_updates", "n_updates"),
    ("total_timesteps", "time_total_timesteps", "timesteps_total", "timesteps", "timestep", "num_timesteps",
     "total_num_steps", "total_steps", "total_env_steps", "env_step", "env_steps", "num_env_steps_sampled", "frames", "frame",
     "num_frames", "misc_total_timesteps", "steps_total"),
    ("training_iteration", "time_iterations"),
    ("batch", "batch_idx", "minibatch", "index", "idx", "unnamed_0"),
    ("_step",),
    ("epoch", "epochs", "ep", "epoch_num", "current_epoch", "cur_epoch", "episode", "episodes", "round", "cycle"),
)  # fmt: skip
"""Names of step columns in order of preference; ``_step`` (W&B) counts log calls, so it comes late."""

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
# "mean_100_episode_reward": OpenAI Baselines' loggers and what descends from them.
NAMES: dict[str, tuple[str, ...]] = {
    "lr": ("lr", "learning_rate", "learningrate", "cur_lr", "current_lr", "base_lr", "last_lr", "optimizer_lr", "actor_lr"),
    "grad_norm": (
        "grad_norm", "gradient_norm", "gnorm", "gradnorm", "grad_norm_total", "total_grad_norm", "total_norm",
        "global_grad_norm", "grad_global_norm", "optim_total_grad_norm", "grad_l2_norm", "l2_grad_norm", "grad_norm_avg",
        "grad_norm_mean", "l2_norm_grad_global", "grad_2_0_norm_total", "grad_norm_2", "norm", "unclipped_grad_norm",
        "gradient_norm_total", "optimizer_grad_norm", "global_gradient_norm", "grad_norm_global", "grads_norm",
    ),
    "throughput": (
        "throughput", "tokens_per_sec", "tokens_per_second", "tokens_s", "tok_s", "toks_per_sec", "tok_per_sec", "tps", "tgs",
        "samples_per_second", "samples_per_sec", "samples_s", "examples_per_second", "images_per_sec", "img_s", "images_s",
        "fps", "time_fps", "it_s", "its_s", "it_per_sec", "steps_per_second", "steps_per_sec", "throughput_tokens_per_sec",
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
    "reward": (
        "reward", "rewards", "mean_reward", "reward_mean", "ep_rew_mean", "rollout_ep_rew_mean", "episode_reward",
        "episode_reward_mean", "mean_episode_reward", "episode_return", "episode_return_mean", "mean_return", "return",
        "returns", "avg_reward", "average_reward", "ep_reward", "ep_ret", "averageepret", "eprewmean", "rewards_mean",
        "critic_rewards_mean", "critic_score_mean", "average_return", "mean_100_episode_reward", "environment", "charts_episodic_return",
        "total_reward", "cumulative_reward", "rollout_return_history", "rollout_return",
        "episodic_return", "env_runners_episode_return_mean", "objective_scores", "eplenrewmean", "env_return",
    ),
    "kl": ("kl", "approx_kl", "objective_kl", "mean_kl", "kl_mean", "actor_ppo_kl", "ppo_mean_non_score_reward_kl", "kl_div", "approxkl"),
    "entropy": ("entropy", "policy_entropy", "objective_entropy", "actor_entropy", "mean_entropy", "policy_entropy_mean"),
    "param_norm": ("param_norm", "params_norm", "weight_norm", "parameter_norm"),
}  # fmt: skip

BY_NAME = {alias: (metric, rank) for metric, names in NAMES.items() for rank, alias in enumerate(names)}

CONTAINERS = frozenset(
    {
        "metrics",
        "metric",
        "scalars",
        "scalar",
        "logs",
        "log",
        "stats",
        "history",
        "perf",
        "optim",
        "trainer",
        "charts",
        "losses",
    }
)
LOSS_WORDS = frozenset({"loss", "losses", "cost", "nll", "objective"})
QUALIFIERS = {
    "step": 1, "total": 1, "tot": 1, "overall": 1, "all": 2, "lm": 1, "batch": 2, "iter": 2, "iteration": 2, "value": 2, "current": 2,
    "cur": 2, "last": 2, "raw": 2, "avg": 3, "mean": 3, "average": 3, "running": 4, "reduced": 3, "global": 3, "final": 8, "epoch": 6,
    "smooth": 7, "smoothed": 7, "ema": 7, "debiased": 7, "train": 1, "training": 1, "interval": 3, "inner": 2, "per": 3, "the": 9, "model": 3, "main": 1,
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
        "ppl",
        "perplexity",
        "time",
    }
)
"""Words that make a number about the loss, not a loss."""
