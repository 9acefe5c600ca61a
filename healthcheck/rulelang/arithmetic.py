"""The arithmetic of the ``metrics:`` block: a small parser and closures. No ``eval`` anywhere.

Grammar, loosest first::

    sum      = product (("+" | "-") product)*
    product  = unary (("*" | "/") unary)*
    unary    = "-" unary | "+" unary | atom
    atom     = NUMBER | NAME | NAME "(" sum ("," sum)* ")" | "(" sum ")"

``ewma(m, n)``, ``mean(m, n)`` and ``last(m)`` look a metric up and never trigger; any other name
is a bare input, and a value exists when all bare inputs have one at the same event.

Finite inputs with an undefined result (x/0, log of a negative) give no sample. A non-finite input
propagates as NaN: a NaN is never hidden.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from healthcheck.dispatch import suggest
from healthcheck.rulelang.quantities import shorten
from healthcheck.rulelang.rule import Derived, Origin

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

Get = Callable[[str], "float | None"]
_Node = Callable[[list[float]], float]


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


class _Past:
    """The memory of one look-up. Only finite values enter means."""

    def __init__(self, kind: str, metric: str, length: int) -> None:
        self.kind = kind
        self.metric = metric
        self.length = length
        self.value: float | None = None
        self.count = 0
        self.window: deque[float] = deque(maxlen=length if kind == "mean" else 1)

    def feed(self, value: float) -> None:
        if self.kind == "last":
            self.value = value
        elif math.isfinite(value):
            self.count += 1
            if self.kind == "ewma":
                weight = max(2.0 / (self.length + 1.0), 1.0 / self.count)
                self.value = value if self.value is None else self.value + weight * (value - self.value)
            else:
                self.window.append(value)
                self.value = math.fsum(self.window) / len(self.window)

    def state(self) -> Any:
        return [_to_json(self.value), self.count, list(self.window)]

    def restore(self, state: Any) -> None:
        self.value = None if state[0] is None else float(state[0])
        self.count = int(state[1])
        self.window.clear()
        self.window.extend(float(v) for v in state[2])


class Formula(Derived):
    """A compiled derived metric."""

    def __init__(self, name: str, text: str, parser: _Parser, node: _Node, origin: Origin) -> None:
        self.name = name
        self.text = text
        self.origin = origin
        self.triggers = tuple(dict.fromkeys(parser.bare))
        self.pasts = list(parser.pasts.values())
        self.inputs = tuple(dict.fromkeys([*self.triggers, *(p.metric for p in self.pasts)]))
        self.uses = tuple(parser.uses)
        self._node = node
        self._by_metric: dict[str, list[_Past]] = {}
        for past in self.pasts:
            self._by_metric.setdefault(past.metric, []).append(past)

    def feed(self, name: str, value: float) -> None:
        for past in self._by_metric.get(name, ()):
            past.feed(value)

    def compute(self, get: Get) -> float | None:
        values: list[float] = []
        finite = True
        for name in self.triggers:
            value = get(name)
            if value is None:
                return None
            finite = finite and math.isfinite(value)
            values.append(value)
        for past in self.pasts:
            if past.value is None:
                return None
            finite = finite and math.isfinite(past.value)
            values.append(past.value)
        if not finite:
            return math.nan
        try:
            result = float(self._node(values))
        except (ZeroDivisionError, ValueError, OverflowError):
            return None
        return result if math.isfinite(result) else None

    def state(self) -> Any:
        return [past.state() for past in self.pasts]

    def restore(self, state: Any) -> None:
        for past, saved in zip(self.pasts, state):
            past.restore(saved)


def parse_formula(name: str, text: str, origin: Origin) -> Formula:
    """Compile the arithmetic of a derived metric.

    Raises ``FormulaError`` with the column of the mistake.
    """
    parser = _Parser(text)
    node = parser.parse()
    if not parser.uses:
        raise FormulaError("a derived metric needs at least one metric in it", 0, len(text))
    if not parser.bare:
        used = parser.uses[0].name
        raise FormulaError(
            f"nothing here says when a value is due; name a metric outside of ewma, mean and last, such as `{used}`",
            0,
            len(text),
        )
    bare = list(dict.fromkeys(parser.bare))
    order = {("", metric): i for i, metric in enumerate(bare)}
    for i, key in enumerate(parser.pasts):
        order[key] = len(bare) + i
    parser.order.update(order)
    return Formula(name, text, parser, node, origin)


class _Parser:
    """Precedence climbing over tokens; builds closures over a list of input values."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_LENGTH:
            raise FormulaError(f"the formula has {len(text)} characters; at most {MAX_LENGTH}", 0)
        self.text = text
        self.tokens = list(self._tokens())
        self.at = 0
        self.depth = 0
        self.bare: list[str] = []
        self.pasts: dict[tuple[str, str], _Past] = {}
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

    def parse(self) -> _Node:
        if not self.tokens:
            raise FormulaError("an empty formula", 0)
        node = self._sum()
        if self.at < len(self.tokens):
            kind, text, column = self.tokens[self.at]
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

    def _sum(self) -> _Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise FormulaError(f"nested more than {MAX_DEPTH} deep", self.tokens[min(self.at, len(self.tokens) - 1)][2])
        node = self._product()
        while self._peek() in ("+", "-"):
            sign = self._next("")[1]
            node = _add(node, self._product()) if sign == "+" else _subtract(node, self._product())
        self.depth -= 1
        return node

    def _product(self) -> _Node:
        node = self._unary()
        while self._peek() in ("*", "/"):
            _, sign, column = self._next("")
            if sign == "*" and self._peek() == "*":
                raise FormulaError('"**" is no operator here; there are + - * /', column, 2)
            node = _multiply(node, self._unary()) if sign == "*" else _divide(node, self._unary())
        return node

    def _unary(self) -> _Node:
        negative = False
        while self._peek() in ("-", "+"):
            negative ^= self._next("")[1] == "-"
        node = self._atom()
        return _negate(node) if negative else node

    def _atom(self) -> _Node:
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

    def _call(self, name: str, column: int) -> _Node:
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

    def _lookup(self, name: str, column: int, opening: int) -> _Node:
        kind, metric, where = self._next("a metric")
        if kind != "name" or self._peek() == "(":
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

    def _input(self, how: str, metric: str, column: int, length: int) -> _Node:
        self.uses.append(Use(metric, column))
        key = (how, metric)
        if how:
            self.pasts.setdefault(key, _Past(how.split(":")[0], metric, length))
        else:
            self.bare.append(metric)
        order = self.order
        return lambda values: values[order[key]]

    def _close(self, opening: int) -> None:
        if self._peek() != ")":
            raise FormulaError("this bracket is never closed", opening)
        self.at += 1


def _add(a: _Node, b: _Node) -> _Node:
    return lambda values: a(values) + b(values)


def _subtract(a: _Node, b: _Node) -> _Node:
    return lambda values: a(values) - b(values)


def _multiply(a: _Node, b: _Node) -> _Node:
    return lambda values: a(values) * b(values)


def _divide(a: _Node, b: _Node) -> _Node:
    return lambda values: a(values) / b(values)


def _negate(a: _Node) -> _Node:
    return lambda values: -a(values)


def _to_json(value: float | None) -> Any:
    return value if value is None or math.isfinite(value) else repr(value)
