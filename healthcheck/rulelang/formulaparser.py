"""Precedence climbing over the text of a formula; makes closures over a list of input values.

Every mistake is a ``FormulaError`` with its column. Length and depth are bounded, there are no
attributes, no strings, no power operator, and only the functions in the two tables.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from healthcheck.dispatch import suggest
from healthcheck.rulelang.lookups import Past
from healthcheck.rulelang.quantities import shorten

MAX_LENGTH = 200
MAX_DEPTH = 32
NAME = r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*"
_TOKEN = re.compile(rf"\s*(?:(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)|(?P<name>{NAME})|(?P<sign>[-+*/(),]))")

LOOKUPS = {"ewma": 2, "mean": 2, "last": 1}
"""Functions of a metric's past, with their number of arguments."""
FUNCTIONS: dict[str, tuple[int, int, Callable[..., float]]] = {
    "min": (2, 16, min),
    "max": (2, 16, max),
    "abs": (1, 1, abs),
    "log": (1, 1, math.log),
    "sqrt": (1, 1, math.sqrt),
}


Node = Callable[[list[float]], float]


class FormulaError(ValueError):
    """The text cannot be read; ``column`` counts characters from 0."""

    def __init__(
        self, message: str, column: int, width: int = 1, *, suggestion: str = "", slug: str = "arithmetic"
    ) -> None:
        super().__init__(message)
        self.column = column
        self.width = width
        self.suggestion = suggestion
        self.slug = slug


@dataclass(frozen=True, slots=True)
class Use:
    """One mention of a metric, for the check that it exists."""

    name: str
    column: int


class Parser:
    """Precedence climbing over tokens; builds closures over a list of input values."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_LENGTH:
            raise FormulaError(f"the formula has {len(text)} characters; at most {MAX_LENGTH}", 0)
        self.text = text
        self.tokens = list(self._tokens())
        self.at = 0
        self.depth = 0
        self.bare: list[str] = []
        self.pasts: dict[tuple[str, str], Past] = {}
        self.uses: list[Use] = []
        self.order: dict[tuple[str, str], int] = {}
        """Where the value of an input stands in the list; filled once all inputs are known."""

    def _tokens(self) -> Iterable[tuple[str, str, int]]:
        at = 0
        while self.text[at:].strip():
            found = _TOKEN.match(self.text, at)
            if found is None:
                column = at + len(self.text[at:]) - len(self.text[at:].lstrip())
                raise self._bad_character(column)
            kind = found.lastgroup or ""
            yield kind, found[kind], found.start(kind)
            at = found.end()

    def _bad_character(self, column: int) -> FormulaError:
        character = self.text[column]
        rest = self.text[column:]
        if rest.startswith("**") or character in "^%":
            return FormulaError(
                f'"{rest[:2] if rest.startswith("**") else character}" is no operator here; there are + - * /', column
            )
        if character in "<>=!&|":
            return FormulaError(
                "formulas only make numbers; decisions belong in a rule's `when:`",
                column,
                suggestion="compare with `above:` or `below:`",
            )
        if character == "[":
            return FormulaError("a formula takes plain metrics, not families", column)
        return FormulaError(f'unexpected "{shorten(character)}"', column)

    def parse(self) -> Node:
        if not self.tokens:
            raise FormulaError("an empty formula", 0)
        node = self._sum()
        if self.at < len(self.tokens):
            _, text, column = self.tokens[self.at]
            if text == "*" and self.tokens[self.at - 1][1] == "*":
                raise FormulaError('"**" is no operator here; there are + - * /', column - 1, 2)
            raise FormulaError(f'expected an operator before "{text}"', column, len(text))
        return node

    def _peek(self) -> str:
        return self.tokens[self.at][1] if self.at < len(self.tokens) else ""

    def _next(self, wanted: str) -> tuple[str, str, int]:
        if self.at >= len(self.tokens):
            raise FormulaError(f"the formula ends where {wanted} is expected", max(0, len(self.text.rstrip()) - 1))
        token = self.tokens[self.at]
        self.at += 1
        return token

    def _sum(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise FormulaError(f"nested more than {MAX_DEPTH} deep", self.tokens[min(self.at, len(self.tokens) - 1)][2])
        node = self._product()
        while self._peek() in ("+", "-"):
            sign = self._next("")[1]
            node = _add(node, self._product()) if sign == "+" else _subtract(node, self._product())
        self.depth -= 1
        return node

    def _product(self) -> Node:
        node = self._unary()
        while self._peek() in ("*", "/"):
            _, sign, column = self._next("")
            if sign == "*" and self._peek() == "*":
                raise FormulaError('"**" is no operator here; there are + - * /', column, 2)
            node = _multiply(node, self._unary()) if sign == "*" else _divide(node, self._unary())
        return node

    def _unary(self) -> Node:
        negative = False
        while self._peek() in ("-", "+"):
            negative ^= self._next("")[1] == "-"
        node = self._atom()
        return _negate(node) if negative else node

    def _atom(self) -> Node:
        kind, text, column = self._next("a number or a metric")
        if kind == "number":
            number = float(text)
            if not math.isfinite(number):
                raise FormulaError("this number is too large", column, len(text))
            return lambda values: number
        if kind == "name":
            return self._call(text, column) if self._peek() == "(" else self._input("", text, column, 0)
        if text == "(":
            node = self._sum()
            self._close(column)
            return node
        raise FormulaError(f'expected a number or a metric, found "{text}"', column)

    def _call(self, name: str, column: int) -> Node:
        if name not in LOOKUPS and name not in FUNCTIONS:
            raise FormulaError(
                f'unknown function "{shorten(name)}"',
                column,
                len(name),
                suggestion=suggest(name, [*LOOKUPS, *FUNCTIONS]) or f"there are {', '.join([*LOOKUPS, *FUNCTIONS])}",
                slug="unknown-function",
            )
        opening = self._next("")[2]
        if name in LOOKUPS:
            return self._lookup(name, column, opening)
        arguments = [self._sum()]
        while self._peek() == ",":
            self._next("")
            arguments.append(self._sum())
        self._close(opening)
        least, most, function = FUNCTIONS[name]
        if not least <= len(arguments) <= most:
            count = str(least) if least == most else f"{least} to {most}"
            raise FormulaError(f"{name}() takes {count} arguments, found {len(arguments)}", column, len(name))
        return lambda values: function(*[argument(values) for argument in arguments])

    def _lookup(self, name: str, column: int, opening: int) -> Node:
        kind, metric, where = self._next("a metric")
        if kind != "name" or self._peek() not in (",", ")"):
            raise FormulaError(
                f"{name}() looks up a plain metric, not a formula; give the formula a name of its own", where
            )
        length = 1
        if LOOKUPS[name] == 2:
            if self._peek() != ",":
                raise FormulaError(
                    f"{name}() needs the metric and a number of samples: {name}({metric}, 100)", column, len(name)
                )
            self._next("")
            kind, text, at = self._next("a number of samples")
            if kind != "number" or not text.isdigit() or not 1 <= int(text) <= 1_000_000:
                raise FormulaError(f"{name}() counts samples: a whole number from 1 to a million", at, len(text))
            length = int(text)
        self._close(opening)
        return self._input(f"{name}:{length}", metric, where, length)

    def _input(self, how: str, metric: str, column: int, length: int) -> Node:
        self.uses.append(Use(metric, column))
        key = (how, metric)
        if how:
            self.pasts.setdefault(key, Past(how.split(":")[0], metric, length))
        else:
            self.bare.append(metric)
        order = self.order
        return lambda values: values[order[key]]

    def _close(self, opening: int) -> None:
        if self._peek() != ")":
            raise FormulaError("this bracket is never closed", opening)
        self.at += 1


def _add(a: Node, b: Node) -> Node:
    return lambda values: a(values) + b(values)


def _subtract(a: Node, b: Node) -> Node:
    return lambda values: a(values) - b(values)


def _multiply(a: Node, b: Node) -> Node:
    return lambda values: a(values) * b(values)


def _divide(a: Node, b: Node) -> Node:
    return lambda values: a(values) / b(values)


def _negate(a: Node) -> Node:
    return lambda values: -a(values)
