"""Python dictionaries that a script printed, somewhere in a line: ``{'loss': 0.78, 'epoch': 1.0}``.

What HuggingFace's Trainer, TRL, OpenRLHF and most scripts with ``print(metrics)`` write. Parsed, never evaluated.
"""

from __future__ import annotations

import ast
import re
from typing import Any

from healthcheck.readers.base import cell, flat
from healthcheck.readers.columns import step_rank

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
