"""Which column of a recorded run is which metric: by its name, by its numbers, by what stands beside it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from healthcheck.core.names import of_agent
from healthcheck.core.samples import NO_LABELS, Labels, series_name
from healthcheck.readers.names import (
    BOOKKEEPING,
    BY_NAME,
    CONTAINERS,
    EVAL_WORDS,
    KINDS,
    LOSS_WORDS,
    NET_ERRORS,
    NETS,
    NO_LOSS,
    PARTS,
    QUALIFIERS,
    STEP_NAMES,
    TEST_WORDS,
    TIME_NAMES,
    TRAIN_WORDS,
    ULTRALYTICS,
    VALUE_FUNCTION,
    of_detection,
)

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


_OF_FILES = re.compile(
    r"^(?:all|the)[_ -]|[_ -]?(?:history|logs?|list|data|values|curves?|records?|file|\d+)$", re.IGNORECASE
)


def said_by_file(path: Path) -> str:
    """The metric that a file of bare numbers is named after (``rewards.csv``, ``loss_history.json``); empty if it is after none."""
    name, before = path.name.removesuffix(".gz").rsplit(".", 1)[0], ""
    while name != before:
        name, before = _OF_FILES.sub("", name), name
    while name and not identify(name).known:
        name = name.partition("_")[2]  # long_term_rewards
    return name


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
    if name.lower() in VALUE_FUNCTION:
        known = name.lower() == "val/ratio"
        return Identity("ratio" if known else safe(name), rank=10, known=known)
    if "dataloader" in rest and "idx" in rest:  # Lightning with several validation loaders
        labels["dataset"] = rest[-1]
        rest = rest[: rest.index("dataloader")] or ["value"]
    _drop_containers(rest)
    phase, test, said = _take_phase(rest)
    if name in ULTRALYTICS:
        phase = "eval"
    _drop_containers(rest)
    if phase == "eval":
        for count in range(1, len(rest)):
            if "_".join(rest[:count]) in datasets:
                labels["dataset"] = "_".join(rest[:count])
                rest = rest[count:]
                break
    own = _own(given, rest)
    bare, scale = _without_unit(rest)
    score = of_detection(bare)
    if score is not None:
        phase = "train" if said and phase == "train" else "eval"
        metric, rank, known, more = score[0], score[1], bool(score[0]), dict[str, str]()
    else:
        metric, rank, known, more = _meaning(bare)
    if metric.startswith("eval."):  # a name that only evaluations have
        phase, metric = "eval", metric.removeprefix("eval.")
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


_BEFORE_PHASE = frozenset(
    {"loss", "avg", "mean", "average", "std", "best", "lm", "total", "epoch", "smoothed", "smooth", "running"}
)
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
    agent = of_agent(rest)
    if agent is not None:
        return agent[0], agent[1], True, {}
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
    return "", 50, False, {}


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
        return "loss", 10 + cost, True, {"optimizer": NETS[left[-1]]}
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
