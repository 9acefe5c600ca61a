"""The right line for ``healthcheck run python train.py`` and ``healthcheck run torchrun ...``."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

_PYTHON = re.compile(r"^(pypy|python)[0-9.]*(\.exe)?$")

_NO_PYTHON = {"torchrun": "--no-python", "accelerate": "--no_python", "deepspeed": "--no_python"}
_PLAIN = ("srun", "mpirun", "mpiexec", "uv", "poetry", "conda", "nohup", "time", "env")

_FLAGS = {
    "--standalone", "--no-python", "--no_python", "-m", "--module", "--multi_gpu", "--multi-gpu", "--cpu", "--use_deepspeed",
    "--use_fsdp", "--mixed-precision", "--debug", "-q", "--quiet", "--use_env", "--run-path", "--run_path",
}  # fmt: skip
"""Launcher options without a value; all others are taken to have one."""


def answer(target: str, rest: Sequence[str]) -> str:
    """What to type instead, or an empty string if ``target`` is no program that starts scripts."""
    name = Path(target).name
    if _PYTHON.match(name):
        line = shlex.join(_without_python_options(rest)) or "SCRIPT"
        return f"healthcheck run: leave {name} out; it runs the script itself: healthcheck run {line}"
    if name in _NO_PYTHON:
        words = list(rest)
        head = [name]
        if name == "accelerate" and words[:1] == ["launch"]:
            head.append(words.pop(0))
        options, script = _split(words)
        options = [word for word in options if word not in ("--no-python", "--no_python")]
        line = shlex.join([*head, *options, _NO_PYTHON[name], "healthcheck", "run", *(script or ["SCRIPT"])])
        return f"healthcheck run: the launcher comes first, each of its processes is watched: {line}"
    if name in _PLAIN:
        options, script = _split(list(rest))
        line = shlex.join([name, *options, "healthcheck", "run", *_without_python(script or ["SCRIPT"])])
        return f"healthcheck run: {name} comes first: {line}"
    return ""


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Options of a launcher, and the script with its arguments."""
    i = 0
    while i < len(words) and not (words[i].endswith(".py") or _PYTHON.match(Path(words[i]).name)):
        if words[i] in ("-m", "--module") and i + 1 < len(words) and not words[i + 1].startswith("-"):
            return words[:i], ["-m", *words[i + 1 :]]
        if not words[i].startswith("-") and (i == 0 or "=" in words[i - 1] or not words[i - 1].startswith("-")):
            break
        if not words[i].startswith("-") and words[i - 1] in _FLAGS:
            break
        i += 1
    return words[:i], words[i:]


def _without_python(words: Sequence[str]) -> list[str]:
    if words and _PYTHON.match(Path(words[0]).name):
        return _without_python_options(words[1:])
    return list(words)


def _without_python_options(words: Sequence[str]) -> list[str]:
    """``-u -W error train.py`` -> ``train.py``; ``-m pkg`` stays."""
    i = 0
    while i < len(words) and words[i].startswith("-") and words[i] != "-m":
        i += 2 if words[i] in ("-W", "-X") else 1
    return list(words[i:])
