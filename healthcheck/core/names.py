"""Canonical names for metrics that scripts and frameworks log under their own. Standard library only.

``train/loss`` and ``loss`` are the same thing, ``val_loss`` is ``eval.loss``. Names that are not
known keep their words; separators become dots.
"""

from __future__ import annotations

import re

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
