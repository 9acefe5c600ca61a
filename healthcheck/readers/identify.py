"""What one column name says, by the tables in :mod:`healthcheck.readers.aliases`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from healthcheck.readers.aliases import (
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
    TEST_WORDS,
    TRAIN_WORDS,
)
from healthcheck.samples import NO_LABELS, Labels

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
