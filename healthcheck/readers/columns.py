"""Which column of a recorded run is which metric: by its name, by its numbers, by what stands beside it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from healthcheck.core.samples import NO_LABELS, Labels, series_name

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

# --------------------------------------------------------------------------------------------------
# What one column name says, by the tables in :mod:`healthcheck.readers.columns`.


CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z][a-z])|(?<=[a-z])(?=[A-Z])")
SPLIT = re.compile(r"[^A-Za-z0-9]+")


@dataclass(frozen=True, slots=True)
class Identity:
    """What one column name says: metric, labels, phase; ``rank`` 0 is the surest name."""

    metric: str
    labels: Labels = NO_LABELS
    phase: str = "train"
    rank: int = 50
    scale: float = 1.0
    known: bool = False
    """False: no alias matched, the metric is the name itself."""
    test: bool = False
    """True for a name that says "test": the evaluation set if there is no other."""
    own: str = ""
    """The name without its phase, for a column that does not become the metric."""
    part: str = ""
    """Of a loss: which part."""


def safe(name: str) -> str:
    """A name that rules can write: ``rewards/margins`` -> ``rewards.margins``, blanks -> ``_``."""
    name = re.sub(r"\s*[/:|]+\s*", ".", name.strip())
    return re.sub(r"[^A-Za-z0-9_.@]+", "_", name).strip("._") or "value"


def words(name: str) -> tuple[str, ...]:
    """``Loss/trainStep`` -> ``("loss", "train", "step")``."""
    return tuple(w.lower() for w in SPLIT.split(CAMEL.sub("_", name)) if w)


def joined(name: str) -> str:
    """The form in which step, time and bookkeeping names are compared; a leading ``_`` stays."""
    return ("_" if name.startswith("_") else "") + "_".join(words(name))


@lru_cache(maxsize=4096)
def identify(name: str, datasets: frozenset[str] = frozenset()) -> Identity:
    """What a column is, by its name. ``datasets``: names of evaluation sets seen in this file."""
    plain = [w for w in SPLIT.split(name) if w] or [name]
    found = _identify(name, plain, datasets)
    path = name.split("/")
    if len(path) > 2 and (not found.known or found.part) and found.phase == "train":
        last = _identify(path[-1], [w for w in SPLIT.split(path[-1]) if w] or [name], datasets)
        if last.known and last.phase == "train":  # RLlib: info/learner/default_policy/learner_stats/total_loss
            return last
    camel = [w for w in SPLIT.split(CAMEL.sub("_", name)) if w]
    if not found.known and len(camel) > len(plain):
        other = _identify(name, camel, datasets)
        if other.known or other.phase != found.phase:
            return other
    return found


def _identify(name: str, given: list[str], datasets: frozenset[str]) -> Identity:
    rest = [w.lower() for w in given]
    labels: dict[str, str] = {}
    if "dataloader" in rest and "idx" in rest:  # Lightning with several validation loaders
        labels["dataset"] = rest[-1]
        rest = rest[: rest.index("dataloader")] or ["value"]
    _drop_containers(rest)
    phase, test, said = _take_phase(rest)
    _drop_containers(rest)
    if phase == "eval":
        for count in range(1, len(rest)):
            if "_".join(rest[:count]) in datasets:
                labels["dataset"] = "_".join(rest[:count])
                rest = rest[count:]
                break
    own = _own(given, rest)
    bare, scale = _without_unit(rest)
    metric, rank, known, more = _meaning(bare)
    if not known:
        metric, scale = (own if phase == "eval" or len(rest) < len(given) else safe(name)), 1.0
    part = _part(bare) if metric == "loss" else ""
    labels.update(more)
    if phase == "eval":
        metric = f"eval.{metric}"
        rank += 5 if test else 0
    rank += 1 if said and metric == "loss" else 0
    return Identity(metric, tuple(sorted(labels.items())), phase, rank, scale, known, test, own, part)


def _drop_containers(rest: list[str]) -> None:
    while len(rest) > 1 and rest[0] in CONTAINERS:
        rest.pop(0)


def _own(given: list[str], rest: list[str]) -> str:
    """The words that are left, spelled as in the file."""
    spelled = {w.lower(): w for w in given}
    return "_".join(spelled.get(w, w) for w in rest)


def _without_unit(rest: list[str]) -> tuple[list[str], float]:
    """``step_time_ms`` -> ``step_time`` and 0.001: times are seconds."""
    if "_".join(rest) in BY_NAME:
        return rest, 1e-3 if "ms" in rest else 1.0
    if len(rest) > 1 and rest[-1] in ("ms", "msec", "millis"):
        return rest[:-1], 1e-3
    if len(rest) > 1 and rest[-1] in ("sec", "secs", "seconds", "s"):
        return rest[:-1], 1.0
    return rest, 1.0


def _part(rest: list[str]) -> str:
    return "_".join(_telling(rest))


def _telling(rest: list[str]) -> list[str]:
    """The words of a loss that say which one: ``total``, ``avg`` and their like are dropped.

    ``loss/value`` at the end only says that this is a value; elsewhere it is the value network.
    """
    value_is_idle = rest[-2:] == ["loss", "value"]
    return [w for w in rest if w not in LOSS_WORDS and (w not in QUALIFIERS or (w == "value" and not value_is_idle))]


_BEFORE_PHASE = frozenset({"loss", "avg", "mean", "best", "lm", "total", "epoch", "smoothed", "smooth", "running"})
"""Words that may stand in front of the phase: ``smoothed validation loss``."""


def _take_phase(rest: list[str]) -> tuple[str, bool, bool]:
    """Remove the words of the phase at either end; returns phase, "it said test", "it said anything"."""
    for position in (0, -1, 1):
        if len(rest) < 2 or (position == 1 and len(rest) < 3):
            break
        word = rest[position]
        if word in TRAIN_WORDS and position != 1:
            rest.pop(position)
            return "train", False, True
        if word in EVAL_WORDS or word in TEST_WORDS:
            if position == 1 and rest[0] not in CONTAINERS | _BEFORE_PHASE:
                continue
            rest.pop(position)
            return "eval", word in TEST_WORDS, True
    return "train", False, False


def _meaning(rest: list[str]) -> tuple[str, int, bool, dict[str, str]]:
    """Metric, rank, known, labels of the words that are left when phase and containers are gone."""
    whole = "_".join(rest)
    found = BY_NAME.get(whole)
    if found is not None:
        return found[0], found[1], True, {}
    if whole in NET_ERRORS:
        return "loss", 12, True, {"optimizer": NET_ERRORS[whole]}
    if whole in PARTS:
        return "loss", 45, True, {"part": whole}
    inner = BY_NAME.get("_".join(rest[1:]))
    if inner is not None and inner[0] == "grad_norm" and (rest[0] in NETS or rest[0] in ("actor", "policy")):
        return "grad_norm", inner[1], True, {"optimizer": NETS.get(rest[0], rest[0])}
    if "vs" in rest:  # Megatron: the same numbers against samples seen
        return "", 99, False, {}
    if rest[0] == "lr" or rest[:2] == ["learning", "rate"]:
        group = "_".join(rest[1:] if rest[0] == "lr" else rest[2:])
        return "lr", 20, True, {"group": group}
    if rest[-2:] == ["learning", "rate"] or rest[-1] == "lr":
        return "lr", 30, True, {"group": whole}
    loss = next((w for w in ("loss", "losses", "cost", "nll", "objective") if w in rest), None)
    if loss is not None and not NO_LOSS & set(rest):
        metric, rank, known, labels = _loss(rest)
        if labels and loss in ("cost", "objective"):
            return "", 50, False, {}  # reader_cost, objective/entropy
        return metric, rank + (0 if loss == "loss" else 15), known, labels
    if len(rest) > 1 and rest[-1] in ("step", "epoch"):  # Lightning logs both on request
        metric, rank, known, labels = _meaning(rest[:-1])
        return metric, rank + (6 if rest[-1] == "epoch" else 1), known, labels
    if len(rest) > 1 and rest[0] == "epoch":  # Keras writes epoch_accuracy to its event files
        metric, rank, known, labels = _meaning(rest[1:])
        if known:
            return metric, rank + 6, known, labels
    metric = {"acc": "accuracy", "accuracy": "accuracy", "ppl": "perplexity", "perplexity": "perplexity"}.get(whole, "")
    return (metric, 5, True, {}) if metric else ("", 50, False, {})


def _loss(rest: list[str]) -> tuple[str, int, bool, dict[str, str]]:
    left = _telling(rest)
    cost = sum(QUALIFIERS.get(w, 0) for w in rest if w not in left)
    if not left:
        return "loss", cost, True, {}
    if all(
        w in KINDS or w in ("cross", "entropy", "modeling", "likelihood", "log", "negative") for w in left
    ) and left != ["entropy"]:
        return "loss", 20 + cost, True, {"part": "_".join(left)}
    if all(w in NETS for w in left):
        return "loss", 10 + cost, True, {"optimizer": NETS[left[0]]}
    return "loss", 40 + cost, True, {"part": "_".join(left)}


# --------------------------------------------------------------------------------------------------
# The reading of one file's columns: what each one becomes.


Row = Mapping[str, Any]
Series = tuple[str, Labels]

_STEP_RANK = {name: (group, i) for group, names in enumerate(STEP_NAMES) for i, name in enumerate(names)}
TIME_RANK = {name: i for i, name in enumerate(TIME_NAMES)}


@dataclass(frozen=True, slots=True)
class Target:
    """What a column becomes."""

    metric: str
    labels: Labels
    phase: str
    scale: float = 1.0

    @property
    def series(self) -> Series:
        return self.metric, self.labels


@dataclass(slots=True)
class Columns:
    """The reading of one file's columns. ``steps`` empty: rows are counted from 1."""

    steps: tuple[str, ...] = ()
    epoch: str = ""
    time: str = ""
    time_scale: float = 1.0
    phase_column: str = ""
    within_epoch: bool = False
    """The step column starts again in every epoch."""
    targets: dict[str, Target | None] = field(default_factory=dict)
    """Column -> target; ``None`` for bookkeeping."""
    sums: dict[Series, tuple[str, ...]] = field(default_factory=dict)
    """Series that no column gives: the sum of these columns."""
    owners: dict[Series, str] = field(default_factory=dict)
    datasets: frozenset[str] = frozenset()
    notes: list[str] = field(default_factory=list)
    declared: frozenset[str] = frozenset()
    """Names that the file says before its rows (a header), also of columns that fill later."""
    positioned: bool = False
    """The format itself says the step."""

    def target(self, name: str, phase: str = "train") -> Target | None:
        """The target of a column, also of one that was not among the first rows."""
        if phase == "eval" and identify(name, self.datasets).phase != "eval":
            key = f"eval/{name}"
            if key not in self.targets:
                self.targets[key] = None if self.special(name) else self._fit(key, identify(key, self.datasets))
            return self.targets[key]
        if name not in self.targets:
            self.targets[name] = None if self.special(name) else self._fit(name, identify(name, self.datasets))
        return self.targets[name]

    def special(self, name: str) -> bool:
        plain = joined(name)
        settings = name.startswith(("config/", "hparams/", "args/"))
        return settings or plain in TIME_RANK or plain in BOOKKEEPING or step_rank(name) is not None

    def _fit(self, name: str, identity: Identity) -> Target:
        target = Target(identity.metric, identity.labels, identity.phase, identity.scale)
        if target.series in self.owners or self.is_batch_of(name, identity):
            target = own_name(name, identity)
            if target.series in self.owners:  # its own name is the metric's
                target = Target(f"{target.metric}_", target.labels, target.phase)
        self.owners[target.series] = name
        return target

    def is_batch_of(self, name: str, identity: Identity) -> bool:
        """Whether a column has a value for each batch of an evaluation, of which another has the result.

        Lightning writes ``val_loss_step`` and ``val_loss_epoch`` together, or ``val_loss`` alone.
        """
        if identity.phase != "eval" or not of_batch(name):
            return False
        if not self.declared:
            return words(name)[-1] == "step"
        others = (identify(n, self.datasets) for n in self.declared if not of_batch(n))
        return any((o.metric, o.labels) == (identity.metric, identity.labels) for o in others)


_BATCH_WORDS = frozenset({"step", "batch", "iter", "iteration"})


def of_batch(name: str) -> bool:
    """Whether a name says that its values are of single steps or batches."""
    return not _BATCH_WORDS.isdisjoint(words(name))


def own_name(name: str, identity: Identity) -> Target:
    """A column under its own name, because another one is the metric."""
    metric = f"eval.{safe(identity.own)}" if identity.phase == "eval" else safe(name)
    return Target(metric, tuple(label for label in identity.labels if label[0] == "dataset"), identity.phase)


def step_rank(name: str) -> tuple[int, int] | None:
    """How good a step column this name is; ``None`` if it is none."""
    plain = joined(name)
    found = _STEP_RANK.get(plain)
    if found is None:
        parts = plain.split("_")
        while len(parts) > 1 and parts[0] in TRAIN_WORDS | {"", "progress", "counters", "metrics"}:
            parts = parts[1:]
            found = found or _STEP_RANK.get("_".join(parts))
    return found


def show(columns: Columns) -> str:
    """The reading as text, one line per column: for ``--show-columns``."""
    lines = []
    if columns.positioned:
        lines.append("step <- (given by the format)")
    else:
        lines.append(f"step <- {', '.join(columns.steps) or '(rows counted from 1)'}")
    if columns.within_epoch:
        lines.append(f"        counted on over epochs ({columns.epoch})")
    if columns.time:
        lines.append(f"time <- {columns.time}")
    for series, names in columns.sums.items():
        lines.append(f"{series_name(*series)} <- {' + '.join(names)}")
    named = [(series_name(t.metric, t.labels), n) for n, t in columns.targets.items() if t is not None]
    width = max((len(a) for a, _ in named), default=0)
    lines += [f"{metric:<{width}} <- {name}" for metric, name in named]
    ignored = [n for n, t in columns.targets.items() if t is None and n not in (*columns.steps, columns.time)]
    if ignored:
        lines.append(f"not used: {', '.join(ignored)}")
    return "\n".join(lines)
