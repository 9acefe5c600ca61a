"""Text logs: numbers in lines, boxes and printed dictionaries, with the step, the epoch and the phase that are written among them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from healthcheck.core.errors import UsageError
from healthcheck.core.protocols import Position
from healthcheck.readers.base import GZIP, HEAD_BYTES, cell, flat, head_text, is_binary, open_text
from healthcheck.readers.columns import (
    identify,
    joined,
    step_rank,
    words,
)
from healthcheck.readers.names import (
    EPOCH_NAMES,
    EVAL_WORDS,
    STEP_NAMES,
    TEST_WORDS,
    TIME_NAMES,
    TRAIN_WORDS,
)

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


# --------------------------------------------------------------------------------------------------
# Text logs: lines with ``key: value``, ``key=value`` or ``key value`` pairs, or a pattern of the user's.
#
# Covers what nanoGPT, Megatron-LM, DeepSpeed, mmdet, Keras, PaddlePaddle, timm, fairseq, litgpt,
# torchtitan and most home-made scripts print. A line counts if it says a step or epoch and a number, or
# a metric that we know. Prose does not.


_MARKUP = re.compile(rb"\s*(?:<(?:!doctype|html|\?xml|svg)|%(?:PDF|!PS))", re.IGNORECASE)
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_STAMP = re.compile(r"^\W{0,2}(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?)")
_PREFIX = re.compile(r"^.{15,160}?\b(?:INFO|WARNING|WARN|DEBUG|ERROR|CRITICAL)\b\W*")
"""Time, host, process and level in front of what is said."""
_GLOG = re.compile(r"^(?:[IWEF]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ [^\s:]+:\d+\] |(?:INFO|WARNING):[\w.]+: ?)")
"""The same of absl and glog, and of Python's logging as it is at first (``INFO:tensorflow:``)."""
_RAY = re.compile(r"^\([\w.:\- ]*\bpid=\d+[^)]*\)\s*")
"""Which of Ray's processes says it: ``(TaskRunner pid=12, ip=10.0.0.1)``."""
_RULED = re.compile(r"^\s*(?:[=*#]{4,}|-{4,}(?=[^|]*-{4,}\s*$)).*[=*#-]{4,}\s*$")
"""``======== Training Loss (Thu Jun 10 10:26:25 2021) ========``: a heading."""
_PAIR = re.compile(
    r"(?P<key>[A-Za-z_][\w./@\-]*(?:[ ]{1,2}(?!nan\b|inf\b)[A-Za-z(][\w./()@\-]*){0,5})['\"]?"
    r"(?P<sep>\s*[:=]\s*|\s*->\s*|\s+)['\"]?(?:tensor\()?\[?\s*"
    r"(?P<val>[-+]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|[-+]?(?:nan|inf(?:inity)?))"
    r"(?:\s*/\s*(?P<of>\d+))?(?P<unit>\s?(?:ms|msec|sec|s|%|k)\b)?(?![\w]|[:.\-]\d)",
    re.IGNORECASE,
)
_BAR = re.compile(r"(?<![\w/.])(\d+)/(\d+)\s*(?:\[|[━╸╺=>.█#-]*[━=█])")
_EPOCH_LINE = re.compile(r"\bepoch\s*[:#]?\s*\[?(\d+)\s*(?:/\s*\d+)?\]?", re.IGNORECASE)
_STEPS = (
    frozenset(n for group in STEP_NAMES for n in group)
    - EPOCH_NAMES
    - {"it", "index", "idx", "round", "frames", "frame"}
)
_TIMES = frozenset(TIME_NAMES) - {"date", "ts"}
_CORE = frozenset({"loss", "eval.loss", "grad_norm", "reward", "lr", "eval.accuracy", "accuracy"})


class TextLogReader:
    """Lines of a text log that hold metrics."""

    name = "text"
    help = "text logs: key: value, key=value and key value pairs, or --pattern REGEX with named groups"
    surest = 0.4
    """It is never surer, and looking costs much: not asked where another reader is at least as sure."""

    def recognises(self, path: Path, head: bytes) -> float:
        if is_binary(head) or _MARKUP.match(head):
            return 0.0
        sure = self._sure(head)
        if not sure and len(head) >= HEAD_BYTES and path.is_file():
            sure = self._sure(_middle(path))  # much is said before training begins
        return sure

    def _sure(self, head: bytes) -> float:
        parse = _LineParser()
        text = re.split(r"[\r\n]+", head_text(head))
        rows = [found for line in text[:2000] if (found := parse(line)) is not None]
        named = sum(any(identify(k).metric in _CORE and k not in _STEPS for k in row) for _, row in rows)
        if named < 2:
            return 0.0
        placed = any((at is not None and at.step is not None) or set(row) & (_STEPS | EPOCH_NAMES) for at, row in rows)
        return self.surest if placed else 0.3

    def read(self, path: Path, notes: list[str]) -> Iterator[tuple[Position | None, dict[str, Any]]]:
        parse = _LineParser()
        waiting: list[tuple[Position | None, dict[str, Any]]] | None = []
        with open_text(path) as file:
            for line in file:
                found = parse(line)
                if found is None:
                    continue
                if waiting is None:
                    yield found
                elif set(found[1]) & _STEPS or (found[0] is not None and found[0].step is not None):
                    # Lines before the first step are settings or program text.
                    waiting = None
                    yield found
                else:
                    waiting.append(found)
                    if len(waiting) >= 2000:
                        yield from waiting
                        waiting = None
        yield from waiting or ()


def _middle(path: Path) -> bytes:
    """Some lines from the middle of a file; nothing of one that is packed."""
    with path.open("rb") as file:
        if file.read(2) == GZIP:
            return b""
        file.seek(path.stat().st_size // 2)
        return file.read(HEAD_BYTES // 2).partition(b"\n")[2]


class PatternReader:
    """Lines that match the user's pattern; named groups are the columns."""

    name = "pattern"
    help = "text logs by --pattern"

    def __init__(self, pattern: str | Sequence[str]) -> None:
        given = [pattern] if isinstance(pattern, str) else list(pattern)
        self.patterns = [_compiled(p) for p in given]

    def recognises(self, path: Path, head: bytes) -> float:
        return 1.0

    def read(self, path: Path, notes: list[str]) -> Iterator[tuple[Position | None, dict[str, Any]]]:
        total = matched = 0
        with open_text(path) as file:
            for line in file:
                total += 1
                for pattern in self.patterns:
                    match = pattern.search(line)
                    if match is None:
                        continue
                    matched += 1
                    row = {k: v for k, t in match.groupdict().items() if t is not None and (v := cell(t)) is not None}
                    if row:
                        yield None, row
                    break
        notes.append(f"{matched} of {total} lines match the pattern")


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise UsageError(f"--pattern {pattern!r}: {error}") from error
    if not compiled.groupindex:
        raise UsageError(
            f"--pattern {pattern!r} has no named group; write for example "
            r"'step (?P<step>\d+).*loss (?P<loss>\S+)'"
        )
    return compiled


class _LineParser:
    """One line as (position, columns); remembers the epoch that earlier lines announced."""

    def __init__(self) -> None:
        self.epoch: int | None = None
        self.first_epoch: int | None = None
        self.above: dict[str, Any] = {}

    def __call__(self, line: str) -> tuple[Position | None, dict[str, Any]] | None:
        if line.startswith("\x00"):  # a hole: the file was cut while a program wrote on
            line = line.lstrip("\x00")
        if len(line) > 4000 or line.startswith("wandb: ") or _RULED.match(line):
            return None
        line = line.rstrip("\r\n \x08")
        if "\r" in line:
            line = line[line.rindex("\r") + 1 :]
        if "\x1b" in line:
            line = _ANSI.sub("", line)
        if line.startswith("("):
            line = _RAY.sub("", line)
        stamp = _STAMP.match(line)
        if "{" in line and (said := find_dict(line)) is not None:
            return self._dictionary(*said, stamp)
        if stamp is not None and (prefix := _PREFIX.match(line)) is not None:
            line = line[prefix.end() :]
        else:
            line = _GLOG.sub("", line)
        step, phase, within, rest = place(line)
        if within is not None:
            epoch, at, of = within
            if self.first_epoch is None:
                self.first_epoch = min(epoch, 1)
            step = (epoch - self.first_epoch) * of + at if phase != "eval" else None
            self.epoch = epoch
        bar = _BAR.search(rest)
        if bar is not None:
            if int(bar[1]) < int(bar[2]) and step is None:
                return None  # a progress bar on its way; the finished one carries the epoch's numbers
            rest = rest[: bar.start()] + rest[bar.end() :]
        row = self._pairs(rest)
        if not row:
            return None
        if phase is None:
            phase = _phase_of(rest)
        if not (set(row) & EPOCH_NAMES) and self.epoch is not None and not (set(row) & _STEPS) and step is None:
            row["epoch"] = self.epoch
        kept = [k for k in row if k not in EPOCH_NAMES and k not in _STEPS]
        if not kept:
            # A line with nothing but a step stands above the lines that belong to it (Composer).
            self.above = {k: v for k, v in row.items() if k in _STEPS} if step is None and phase != "eval" else {}
            return None
        if step is None and not set(row) & _STEPS:
            row.update(self.above)
        elif self.above:
            self.above = {}
        if (
            step is None
            and not set(row) & (_STEPS | EPOCH_NAMES)
            and not any(identify(k).metric in _CORE for k in kept)
        ):
            return None
        if stamp is not None:
            row["timestamp"] = stamp[1].replace(",", ".")
        return (None if step is None and phase is None else Position(step, None, phase)), row

    def _dictionary(
        self, row: dict[str, Any], before: str, stamp: re.Match[str] | None
    ) -> tuple[Position | None, dict[str, Any]] | None:
        """A line whose numbers stand in a dictionary; in front of it a step, an epoch or a phase may be said."""
        if "train_runtime" in row:
            return None  # the Trainer's summary: its train_loss is the mean of the run
        if stamp is not None and (prefix := _PREFIX.match(before)) is not None:
            before = before[prefix.end() :]
        if not set(row) & (_STEPS | EPOCH_NAMES):
            bar = _BAR.search(before)
            said = self._pairs(before if bar is None else before[: bar.start()])
            row = {**{k: v for k, v in said.items() if k in _STEPS or k in EPOCH_NAMES}, **row}
        phase = _phase_of(before) if before else None
        if not any(identify(k).known or k in _STEPS or k in EPOCH_NAMES for k in row):
            return None
        if stamp is not None:
            row["timestamp"] = stamp[1].replace(",", ".")
        return (None if phase is None else Position(None, None, phase)), row

    def _pairs(self, text: str) -> dict[str, Any]:
        row: dict[str, Any] = {}
        said = ""
        epoch = _EPOCH_LINE.search(text)
        if epoch is not None:
            self.epoch = int(epoch[1])
        for match in _PAIR.finditer(text):
            key = _clean(match["key"], match["sep"].strip() != "", match["val"].isdigit())
            if not key:
                continue
            value = float(match["val"].replace(",", ""))
            if match["of"] and key not in _STEPS and key not in EPOCH_NAMES and float(match["of"]):
                value /= float(match["of"])  # Accuracy: 9843/10000
            unit = (match["unit"] or "").strip().lower()
            if unit in ("ms", "msec"):
                key += "_ms"
            elif unit == "k":
                value *= 1000.0
            said = next((TRAIN_OR_EVAL[w] for w in words(key) if w in TRAIN_OR_EVAL), said)
            if key in row and said == "eval":
                key = f"val_{key}"
            if key in ("train", "val"):  # litgpt: "loss train: 10.9, val: 10.8"
                key = f"{key}_loss"
            row.setdefault(key, value)
        return row


@lru_cache(maxsize=2048)
def _clean(key: str, explicit: bool, whole: bool) -> str:
    """The name within ``INFO root: Train loss``: the longest ending that is known; "" for prose."""
    parts = key.replace("(", " ").replace(")", " ").split()
    if not parts:
        return ""
    if whole and (not explicit or len(parts) == 1) and joined(parts[-1]) in _STEPS:
        return joined(parts[-1])  # validation loss at iteration 200
    for start in range(len(parts)):
        name = " ".join(parts[start:])
        plain = joined(name)
        if plain in _STEPS or plain in EPOCH_NAMES:
            return plain
        if plain in _TIMES or identify(name).known:
            return name
    if explicit and key in ("D", "G"):  # the two nets of BicycleGAN and its like
        return f"{key}_loss"
    if explicit and len(parts) <= 3 and not any(c in key for c in "/\\") and len(key) > 1:
        return key.strip("-. ")
    return parts[-1].lower() if parts and parts[-1].lower() in ("train", "val") and explicit else ""


_EVAL_START = re.compile(
    r"^\W*(?:(?:info|root)\W+)*(?:eval\w*|val|valid|validation|test|testing|dev)\b|"
    r"\b(?:eval\w*|val|valid|validation|test|dev)(?:\s+set)?\s*[:|\]>)-]",
    re.IGNORECASE,
)


def _phase_of(line: str) -> str | None:
    """The phase that a line announces before its first number: ``Validation: loss 0.4``."""
    start = re.split(r"\d", line[24:] if _STAMP.match(line) else line, maxsplit=1)[0][:60]
    found = {TRAIN_OR_EVAL[w] for w in words(start) if w in TRAIN_OR_EVAL}
    return "eval" if found == {"eval"} and _EVAL_START.search(start) else None


# --------------------------------------------------------------------------------------------------
# Boxes: what Stable-Baselines, OpenAI Baselines, Spinning Up and Garage print to the console.
#
# ::
#
#     ----------------------------------
#     | rollout/            |          |
#     |    ep_rew_mean      | 21.3     |
#     | time/               |          |
#     |    total_timesteps  | 4096     |
#     ----------------------------------
#
# One box is one row; a name that ends in ``/`` stands in front of the indented names below it.


_RULE = re.compile(r"^\s*[-=+_]{10,}\s*$")
_LINE = re.compile(r"^\s*\|(?P<space>\s*)(?P<name>[^|]*[^|\s])\s*\|\s*(?P<value>[^|]*?)\s*\|\s*$")


class BoxReader:
    """Console logs in which each row is a box with one line per metric."""

    name = "boxes"
    help = "console boxes of Stable-Baselines, OpenAI Baselines and Spinning Up"

    def recognises(self, path: Path, head: bytes) -> float:
        if is_binary(head):
            return 0.0
        named = [row for row in _boxes(head_text(head).split("\n")) if any(identify(name).known for name in row)]
        return 0.75 if len(named) >= 2 else 0.0

    def read(self, path: Path, notes: list[str]) -> Iterator[tuple[Position | None, dict[str, Any]]]:
        with open_text(path) as file:
            for row in _boxes(file):
                yield None, row


def _boxes(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    row: dict[str, Any] = {}
    section = ""
    for line in lines:
        match = _LINE.match(line)
        if match is None:
            if _RULE.match(line):
                if row:
                    yield row
                row, section = {}, ""
            continue
        name = match["name"]
        value = cell(match["value"])
        if value is None and name.endswith("/"):
            section = name
        elif isinstance(value, float):
            row[f"{section}{name}" if len(match["space"]) > 1 else name] = value


# --------------------------------------------------------------------------------------------------
# Python dictionaries that a script printed, somewhere in a line: ``{'loss': 0.78, 'epoch': 1.0}``.
#
# What HuggingFace's Trainer, TRL, OpenRLHF and most scripts with ``print(metrics)`` write. Parsed, never evaluated.


_BEGIN = re.compile(r"\{\s*['\"]")
_OF = re.compile(r"\s*(\d+)\s*/\s*(\d+)\s*$")
_NUMBERS = {"nan": float("nan"), "inf": float("inf"), "Infinity": float("inf"), "NaN": float("nan")}


def find_dict(line: str) -> tuple[dict[str, Any], str] | None:
    """The numbers of the first dictionary in a line, and the text before it; ``None`` without a whole one.

    Nested dictionaries become ``outer/inner``; texts that hold a number are that number, ``nan``, ``inf``,
    ``tensor(0.5)`` and ``np.float64(0.5)`` are understood, and ``'global_step/max_steps': '10/100'`` is the step 10.
    """
    begin = _BEGIN.search(line)
    while begin is not None:
        end = _end(line, begin.start())
        if end:
            try:
                tree = ast.parse(line[begin.start() : end], mode="eval").body
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                tree = None
            if isinstance(tree, ast.Dict):
                row = _row(tree)
                if row:
                    return row, line[: begin.start()]
        begin = _BEGIN.search(line, begin.end())
    return None


def _end(line: str, start: int) -> int:
    """Where the brace that opens at ``start`` is closed; 0 if it is not. Braces in quotes do not count."""
    depth = 0
    quote = ""
    escaped = False
    for i in range(start, len(line)):
        char = line[i]
        if quote:
            if escaped:
                escaped = False
            elif char == "\\":
                escaped = True
            elif char == quote:
                quote = ""
        elif char in "'\"":
            quote = char
        elif char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
            if not depth:
                return i + 1
    return 0


def _row(tree: ast.Dict) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, value in flat(_dict(tree)).items():
        if isinstance(value, str):
            of = _OF.match(value)
            if of and (first := name.split("/")[0]) != name and step_rank(first) is not None:
                row[first] = float(of[1])
                continue
            value = cell(value)
        if isinstance(value, float):
            row[name] = value
    return row


def _dict(tree: ast.Dict) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, node in zip(tree.keys, tree.values, strict=True):
        if isinstance(key, ast.Constant) and isinstance(key.value, (str, int)):
            found[str(key.value)] = _value(node)
    return found


def _value(node: ast.expr) -> Any:
    """A number as float, a text, a dictionary; ``None`` for anything else."""
    sign = 1.0
    while isinstance(node, (ast.UnaryOp, ast.Call, ast.List, ast.Tuple)):
        if isinstance(node, ast.UnaryOp):
            sign = -sign if isinstance(node.op, ast.USub) else sign
            node = node.operand
            continue
        inside = node.args if isinstance(node, ast.Call) else node.elts
        if len(inside) != 1:
            return None
        node = inside[0]
    if isinstance(node, ast.Dict):
        return _dict(node)
    if isinstance(node, ast.Name):
        number = _NUMBERS.get(node.id)
        return None if number is None else sign * number
    if isinstance(node, ast.Constant):
        value = node.value
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            try:
                return sign * float(value)
            except OverflowError:
                return sign * float("inf")
        return value if isinstance(value, str) else None
    return None
