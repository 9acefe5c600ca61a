"""Where a line of a text log stands: the step, the epoch and the phase that are written in the line itself."""

from __future__ import annotations

import re
from typing import NamedTuple

from healthcheck.readers.aliases import EVAL_WORDS, TEST_WORDS, TRAIN_WORDS

TRAIN_OR_EVAL = {**dict.fromkeys(TRAIN_WORDS, "train"), **dict.fromkeys(EVAL_WORDS | TEST_WORDS, "eval")}

_EPOCH_ITER = (
    # Epoch [1][50/7330], Epoch(val) [1][20/20], Train Epoch: 1 [640/60000 (1%)], Train: 0 [ 50/1251 (4%)]
    re.compile(
        r"(?P<word>epoch|train|training|val|valid|validation|eval|test)\w*(?:\((?P<mode>\w+)\))?(?:\s+epoch)?\s*:?\s*\[?\s*(?P<epoch>\d+)"
        r"(?:/\d+)?\s*\]?\s*,?\s*\[\s*(?P<at>\d+)\s*/\s*(?P<of>\d+)[^\]]*\]",
        re.IGNORECASE,
    ),
    # epoch 001:  100 / 5000 loss=...; Epoch [1/3], Step [20/12942]; [Epoch 0/200] [Batch 5/938]; Epoch: [ 0/200] Iter [10/1487]
    re.compile(
        r"(?P<word>epoch)(?P<mode>)\s*:?\s*\[?\s*(?P<epoch>\d+)\s*(?:/\s*\d+)?\s*(?:\]\s*[:|,-]*|[:|,])\s*\[?"
        r"(?:(?:batch|iter|iteration|step)(?:es|s)?\s*:?\s*)?\[?\s*(?P<at>\d+)\s*/\s*(?P<of>\d+)\s*\]?",
        re.IGNORECASE,
    ),
    # [0/25][50/1583]
    re.compile(r"^(?P<word>)(?P<mode>)\W*\[(?P<epoch>\d+)/\d+\]\s*\[(?P<at>\d+)/(?P<of>\d+)\]"),
)
_EVAL_AT = (
    re.compile(r"\b(?:val|valid|validation|eval|test)\w*\s*:?\s*\[\s*\d+\s*/\s*\d+\s*\]", re.IGNORECASE),
    # val step:20 loss: 3.0 -- a batch of an evaluation
    re.compile(
        r"\b(?:val|valid|validation|eval)\s+(?:step|iter|iteration|batch)(?:es|s)?\s*[:=\[]\s*\[?\s*\d+\s*\]?",
        re.IGNORECASE,
    ),
)
_ITER = re.compile(
    r"\b(?:iter|iteration|step|batch)s?(?:\((?P<mode>\w+)\))?\s*:?\s*\[\s*(?P<at>\d+)\s*/\s*\d+\s*\]", re.IGNORECASE
)
_LEADING = (
    # 61 [D loss: 0.24, acc.: 59.28%] [G loss: 0.30]
    re.compile(r"^\s*(?P<at>\d+)\s*:?\s+(?=\[[A-Za-z])"),
    # INFO:tensorflow:[  5000] | gnorm  8.33 lr  0.000125 | loss  5.56
    re.compile(r"^(?:[A-Za-z][\w.]*:)*\s*\[\s*(?P<at>\d+)\s*\]\s*(?=[|:,]?\s*[A-Za-z])"),
)
_AT_STEP = re.compile(
    r"(?P<name>(?:\b[A-Za-z]+ ){0,2}\b(?:loss|cost|error|accuracy|acc|perplexity|ppl|reward))\s+(?:at|after|for|in|of)\s+"
    r"(?P<word>step|iter|iteration|epoch|batch|episode)\s*#?\s*(?P<at>\d+)(?:\s*/\s*\d+)?\s*(?::|=|\bis\b)\s*(?=[-+.\d]|nan|inf)",
    re.IGNORECASE,
)
_PAIR_OF_COUNTS = re.compile(r"^\s*\[\s*(?P<epoch>\d+)\s*,\s*(?P<at>\d+)\s*\]:?\s*(?=[A-Za-z])")
"""``[1,  2000] loss: 2.241``: epoch and batch, as the first PyTorch tutorial prints them."""


class Place(NamedTuple):
    """What a line says about where it stands, and the rest of it."""

    step: int | None
    phase: str | None
    epoch: tuple[int, int, int] | None
    """Epoch, iteration within it, iterations of an epoch."""
    rest: str


def place(line: str) -> Place:
    """The place of a line; what said it is cut out of ``rest``."""
    if " " in line:  # Cost after iteration 100: 0.48 -> iteration: 100 | Cost: 0.48
        line = _AT_STEP.sub(r"\g<word>: \g<at> | \g<name>: ", line)
    line = _PAIR_OF_COUNTS.sub(r"epoch: \g<epoch> | batch: \g<at> | ", line)
    step = phase = epoch = None
    head = next((m for p in _EPOCH_ITER if (m := p.search(line)) is not None), None)
    if head is not None:
        epoch = int(head["epoch"]), int(head["at"]), int(head["of"])
        phase = TRAIN_OR_EVAL.get((head["mode"] or head["word"]).lower())
    elif (head := _ITER.search(line)) is not None:
        step = int(head["at"])
        phase = TRAIN_OR_EVAL.get((head["mode"] or "").lower())
    elif (head := next((m for p in _EVAL_AT if (m := p.search(line)) is not None), None)) is not None:
        phase = "eval"
    elif (head := next((m for p in _LEADING if (m := p.match(line)) is not None), None)) is not None:
        step = int(head["at"])
    rest = line if head is None else line[: head.start()] + " | " + line[head.end() :]
    return Place(step, phase, epoch, rest)
