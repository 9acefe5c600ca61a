"""The ``metrics:`` block: metrics computed from others. No ``eval`` anywhere.

The language has numbers, metrics (``time.data``), ``+ - * /``, brackets, ``min max abs log sqrt``, and three functions
that look a metric's past up: ``ewma(m, n)``, ``mean(m, n)``, ``last(m)``. A metric outside of those three is a
bare input, and a value exists when all bare inputs have one at the same event.

Finite inputs with an undefined result (x/0, log of a negative) give no sample. A non-finite input
propagates as NaN: a NaN is never hidden.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from healthcheck.core.errors import Problem
from healthcheck.core.text import one_line, suggest
from healthcheck.extend.registry import Registry
from healthcheck.rulelang.known import KnownMetrics
from healthcheck.rulelang.merge import Entry, Merged
from healthcheck.rulelang.rule import Derived, Origin

MAX_LENGTH = 200
MAX_DEPTH = 32
MAX_FORMULAS = 500

LOOKUPS = {"ewma": 2, "mean": 2, "last": 1}
"""Functions of a metric's past, with their number of arguments."""
FUNCTIONS: dict[str, tuple[int, int, Callable[..., float]]] = {
    "min": (2, 16, min),
    "max": (2, 16, max),
    "abs": (1, 1, abs),
    "log": (1, 1, math.log),
    "sqrt": (1, 1, math.sqrt),
}
_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
    r"|(?P<name>[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*)"
    r"|(?P<sign>[-+*/(),]))"
)

Get = Callable[[str], "float | None"]
Values = Sequence[float]
Node = Callable[[Sequence[Values]], Values]
"""A part of a formula: from the values of all inputs, several of each, to its own."""


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


class Past:
    """The memory of one look-up. Only finite values enter means."""

    def __init__(self, kind: str, metric: str, length: int) -> None:
        self.kind = kind
        self.metric = metric
        self.length = length
        self.count = 0
        self.window: deque[float] = deque(maxlen=length if kind == "mean" else 1)
        self._value: float | None = None

    def take(self, values: Values) -> None:
        """Learn what came of the metric, oldest first."""
        if self.kind == "last":
            self._value = values[-1]
            return
        for value in values:
            if value - value != 0.0:
                continue
            self.count += 1
            if self.kind == "mean":
                self.window.append(value)
                continue
            # The first values weigh as in a plain mean, so that the start does not linger for `length` samples.
            weight = max(2.0 / (self.length + 1.0), 1.0 / self.count)
            self._value = value if self._value is None else self._value + weight * (value - self._value)

    def run(self, values: Values) -> Sequence[float | None]:
        """The same; what the formula sees after each."""
        if self.kind == "last":
            self._value = values[-1]
            return values
        seen: list[float | None] = []
        if self.kind == "mean":
            window = self.window
            for given in values:
                if given - given == 0.0:
                    self.count += 1
                    window.append(given)
                    seen.append(math.fsum(window) / len(window))
                else:
                    seen.append(seen[-1] if seen else self.value)
            return seen
        for given in values:
            self.take((given,))
            seen.append(self._value)
        return seen

    @property
    def value(self) -> float | None:
        """What the formula sees; None before the first value."""
        if self.kind == "mean":
            return math.fsum(self.window) / len(self.window) if self.window else None
        return self._value

    def state(self) -> Any:
        """Plain JSON values; NaN and infinity as text."""
        value = self.value
        return [value if value is None or math.isfinite(value) else repr(value), self.count, list(self.window)]

    def restore(self, state: Any) -> None:
        """Go on from what :meth:`state` gave."""
        self._value = None if state[0] is None else float(state[0])
        self.count = int(state[1])
        self.window.clear()
        self.window.extend(float(v) for v in state[2])


class Formula(Derived):
    """A compiled derived metric."""

    def __init__(self, name: str, text: str, reader: _Reader, node: Node, origin: Origin) -> None:
        self.name = name
        self.text = text
        self.origin = origin
        self._inputs = list(reader.inputs.values())
        self.triggers = tuple(i for i in self._inputs if isinstance(i, str))
        self.pasts = [i for i in self._inputs if isinstance(i, Past)]
        self.remembers = tuple(dict.fromkeys(p.metric for p in self.pasts))
        self.inputs = tuple(dict.fromkeys([*self.triggers, *self.remembers]))
        self.uses = tuple(reader.uses)
        self._node = node
        self._other_name = self.triggers[0] if text.strip() == self.triggers[0] else ""
        """The metric of which this formula is only another name."""

    def feeds(self, name: str) -> Sequence[Callable[[Values], None]]:
        return [past.take for past in self.pasts if past.metric == name]

    def compute(self, get: Get) -> float | None:
        given = [get(one) if type(one) is str else one.value for one in self._inputs]  # type: ignore[union-attr]
        return None if None in given else self._one([(value,) for value in given])  # type: ignore[misc]

    def run(self, given: Mapping[str, Values], count: int, late: Collection[str]) -> Sequence[float | None]:
        columns: list[Any] = []
        unknown = False
        total = 0.0
        for one in self._inputs:
            if type(one) is str:
                column: Any = given[one]
            else:
                assert isinstance(one, Past)
                came = given.get(one.metric)
                if came is None:
                    column = (one.value,) * count
                elif one.metric in late:
                    before = one.value
                    column = [before, *one.run(came)[:-1]]
                else:
                    column = one.run(came)
                if None in column:
                    unknown = True
                    columns.append(column)
                    continue
            total += sum(column)
            columns.append(column)
        if not unknown and total - total == 0.0:
            if self._other_name:  # nothing to calculate: a metric under another name
                return list(map(float, columns[0]))
            try:
                values = list(map(float, self._node(columns)))
                total = sum(values)
                if total - total == 0.0:
                    return values
            except (ZeroDivisionError, ValueError, OverflowError):
                pass  # one of them has no value: each by itself
        rows = [[(column[i],) for column in columns] for i in range(count)]
        return [None if (None,) in row else self._one(row) for row in rows]

    def _one(self, columns: Sequence[Values]) -> float | None:
        """The value from one value of each input."""
        for column in columns:
            value = column[0]
            if value - value != 0.0:
                return math.nan
        if self._other_name:
            return float(columns[0][0])
        try:
            result = float(self._node(columns)[0])
        except (ZeroDivisionError, ValueError, OverflowError):
            return None
        return result if result - result == 0.0 else None

    def state(self) -> Any:
        return [past.state() for past in self.pasts]

    def restore(self, state: Any) -> None:
        for past, saved in zip(self.pasts, state, strict=True):
            past.restore(saved)


def parse_formula(name: str, text: str, origin: Origin) -> Formula:
    """Compile the arithmetic of a derived metric.

    Raises ``FormulaError`` with the column of the mistake.
    """
    reader = _Reader(text)
    node = reader.node(reader.tree)
    if not reader.uses:
        raise FormulaError("a derived metric needs at least one metric in it", 0, len(text))
    if not any(isinstance(i, str) for i in reader.inputs.values()):
        raise FormulaError(
            "nothing here says when a value is due; name a metric outside of ewma, mean and last, "
            f"such as `{reader.uses[0].name}`",
            0,
            len(text),
        )
    return Formula(name, text, reader, node, origin)


# --------------------------------------------------------------------------- reading


class _Token(NamedTuple):
    kind: str
    """``number``, ``name`` or ``sign``."""
    text: str
    column: int


class _Reader:
    """One formula on its way from text to closures.

    Python's own parser knows what binds tighter and what belongs into which bracket. But metrics have names that
    it would not take (``eval.loss.0``, ``lambda``), and of its language we want nothing else. So it gets the text
    with an ``x`` for each character of a name or number: what is left are names, operators and calls, and the
    column of a name says which one it is.
    """

    def __init__(self, text: str) -> None:
        tokens = _tokens(text)
        _check_order(tokens, text)
        masked = [" "] * len(text)
        for kind, token, column in tokens:
            masked[column : column + len(token)] = token if kind == "sign" else "x" * len(token)
        start = tokens[0].column  # blanks before it would be an indentation
        self.tree = ast.parse("".join(masked[start:]), mode="eval").body
        self.at = {token.column - start: token for token in tokens}
        self.inputs: dict[tuple[str, str], str | Past] = {}
        """Bare inputs and look-ups, each once, in the order of their values."""
        self.uses: list[Use] = []

    def node(self, tree: ast.expr) -> Node:
        """Closures for what the language has; anything else is refused."""
        match tree:
            case ast.BinOp(op=sign) if type(sign) in _OPERATORS:
                left, right, apply = self.node(tree.left), self.node(tree.right), _OPERATORS[type(sign)]
                return lambda values: list(map(apply, left(values), right(values)))
            case ast.UnaryOp(op=ast.UAdd()):
                return self.node(tree.operand)
            case ast.UnaryOp(op=ast.USub()):
                operand = self.node(tree.operand)
                return lambda values: list(map(operator.neg, operand(values)))
            case ast.Call(func=ast.Name() as name, args=arguments, keywords=[]):
                return self._call(self.at[name.col_offset], arguments)
            case ast.Name():
                return self._atom(self.at[tree.col_offset])
        raise FormulaError("this is not a formula", 0, 1)

    def _atom(self, token: _Token) -> Node:
        if token.kind == "name":
            return self._input(token, ("", token.text), token.text)
        number = float(token.text)
        return lambda values: (number,) * len(values[0])

    def _call(self, name: _Token, arguments: Sequence[ast.expr]) -> Node:
        if name.text in LOOKUPS:
            return self._lookup(name, arguments)
        least, most, function = FUNCTIONS[name.text]
        if not least <= len(arguments) <= most:
            count = str(least) if least == most else f"{least} to {most}"
            text = f"{name.text}() takes {count} arguments, found {len(arguments)}"
            raise FormulaError(text, name.column, len(name.text))
        nodes = [self.node(argument) for argument in arguments]
        return lambda values: list(map(function, *[node(values) for node in nodes]))

    def _lookup(self, name: _Token, arguments: Sequence[ast.expr]) -> Node:
        metric, *further = (self.at[argument.col_offset] for argument in arguments)
        if metric.kind != "name" or not isinstance(arguments[0], ast.Name):
            text = f"{name.text}() looks up a plain metric, not a formula; give the formula a name of its own"
            raise FormulaError(text, metric.column)
        length = 1
        if len(arguments) != LOOKUPS[name.text]:
            needs, form = "the metric and a number of samples", f"{name.text}({metric.text}, 100)"
            if LOOKUPS[name.text] == 1:
                needs, form = "the metric alone", f"{name.text}({metric.text})"
            raise FormulaError(f"{name.text}() needs {needs}: {form}", name.column, len(name.text))
        for count in further:
            if not count.text.isdigit() or not 1 <= int(count.text) <= 1_000_000:
                text = f"{name.text}() counts samples: a whole number from 1 to a million"
                raise FormulaError(text, count.column, len(count.text))
            length = int(count.text)
        return self._input(metric, (f"{name.text}:{length}", metric.text), Past(name.text, metric.text, length))

    def _input(self, token: _Token, key: tuple[str, str], given: str | Past) -> Node:
        self.uses.append(Use(token.text, token.column))
        self.inputs.setdefault(key, given)
        return operator.itemgetter(list(self.inputs).index(key))


def _tokens(text: str) -> list[_Token]:
    if len(text) > MAX_LENGTH:
        raise FormulaError(f"the formula has {len(text)} characters; at most {MAX_LENGTH}", 0)
    tokens: list[_Token] = []
    at = 0
    while text[at:].strip():
        found = _TOKEN.match(text, at)
        if found is None:
            raise _bad_character(text, at + len(text[at:]) - len(text[at:].lstrip()))
        kind = found.lastgroup or ""
        tokens.append(_Token(kind, found[kind], found.start(kind)))
        at = found.end()
    if not tokens:
        raise FormulaError("an empty formula", 0)
    return tokens


def _bad_character(text: str, column: int) -> FormulaError:
    character = text[column]
    if character in "^%":
        return FormulaError(f'"{character}" is not an operator here; there are + - * /', column)
    if character in "<>=!&|":
        return FormulaError(
            "formulas only make numbers; decisions belong in a rule's `when:`",
            column,
            suggestion="compare with `above:` or `below:`",
        )
    if character == "[":
        return FormulaError("a formula takes plain metrics, not families", column)
    return FormulaError(f'unexpected "{one_line(character)}"', column)


def _check_order(tokens: Sequence[_Token], text: str) -> None:
    """Raise ``FormulaError`` for the first token that cannot stand where it stands.

    Python would find it too, but its words and columns change from version to version, and it would take
    more than our language has: ``**``, ``//``, tuples, starred arguments, a comma at the end.
    """
    brackets: list[tuple[_Token, bool]] = []
    """Those that are open, and whether they hold arguments."""
    before: _Token | None = None
    value_due = True
    for token in tokens:
        if len(brackets) == MAX_DEPTH:
            raise FormulaError(f"nested more than {MAX_DEPTH} deep", token.column)
        if value_due and token.text == "(":
            brackets.append((token, False))
        elif value_due and token.kind == "sign" and token.text not in "+-":
            if token.text == "*" and before is not None and before.text == "*":
                raise FormulaError('"**" is not an operator here; there are + - * /', before.column, 2)
            raise FormulaError(f'expected a number or a metric, found "{token.text}"', token.column)
        elif value_due:
            value_due = token.kind == "sign"
            if token.kind == "number" and not math.isfinite(float(token.text)):
                raise FormulaError("this number is too large", token.column, len(token.text))
        elif token.text in ("+", "-", "*", "/") or (token.text == "," and brackets and brackets[-1][1]):
            value_due = True
        elif token.text == "(" and before is not None and before.kind == "name":
            if before.text not in LOOKUPS and before.text not in FUNCTIONS:
                raise _unknown_function(before)
            brackets.append((token, True))
            value_due = True
        elif token.text == ")" and brackets:
            brackets.pop()
        elif brackets:
            raise FormulaError("this bracket is never closed", brackets[-1][0].column)
        else:
            raise FormulaError(f'expected an operator before "{token.text}"', token.column, len(token.text))
        before = token
    if value_due:
        raise FormulaError("the formula ends where a number or a metric is expected", len(text.rstrip()) - 1)
    if brackets:
        raise FormulaError("this bracket is never closed", brackets[-1][0].column)


def _unknown_function(name: _Token) -> FormulaError:
    known = [*LOOKUPS, *FUNCTIONS]
    return FormulaError(
        f'unknown function "{one_line(name.text)}"',
        name.column,
        len(name.text),
        suggestion=suggest(name.text, known) or f"there are {', '.join(known)}",
        slug="unknown-function",
    )


# --------------------------------------------------------------------------- the block


def compile_formulas(merged: Merged, problems: list[Problem], registry: Registry) -> tuple[list[Derived], list[str]]:
    """Compiled formulas in an order in which each comes after those it uses; external names."""
    external = [str(entry.value) for entry in merged.external]
    formulas: dict[str, Formula] = {}
    for name, entry in merged.metrics.items():
        if name in registry.metrics:
            text = f'a probe provides "{name}" already; choose another name'
            problems.append(entry.document.problem(entry.where, "metric-exists", text, key=True))
            continue
        try:
            formulas[name] = parse_formula(name, str(entry.value), entry.origin)
        except FormulaError as error:
            problems.append(
                entry.document.problem(
                    entry.where,
                    error.slug,
                    str(error),
                    offset=error.column,
                    width=error.width,
                    suggestion=error.suggestion,
                )
            )
    return _sorted(formulas, merged.metrics, problems), external


def _sorted(formulas: dict[str, Formula], entries: Mapping[str, Entry], problems: list[Problem]) -> list[Derived]:
    if len(formulas) > MAX_FORMULAS:
        entry = next(iter(entries.values()))
        text = f"{len(formulas)} formulas; at most {MAX_FORMULAS}"
        problems.append(entry.document.problem(("metrics",), "too-many-metrics", text, key=True))
        return []
    done: dict[str, Formula] = {}
    entered: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        """Depth first; ``path`` are the formulas that need this one."""
        if name in done or name not in formulas:
            return
        if name in entered:
            ring = " -> ".join([*path[path.index(name) :], name])
            text = f"this formula needs itself: {ring}"
            entry = entries[name]
            problems.append(entry.document.problem(entry.where, "metric-cycle", text, key=True))
            return
        entered.add(name)
        for used in formulas[name].inputs:
            visit(used, (*path, name))
        done[name] = formulas[name]

    for name in formulas:
        visit(name, ())
    return list(done.values())


def check_formulas(derived: Sequence[Derived], merged: Merged, known: KnownMetrics, problems: list[Problem]) -> None:
    """Report every metric in a formula that nobody provides."""
    for formula in derived:
        entry = merged.metrics[formula.name]
        for use in getattr(formula, "uses", ()):
            if not known.has(use.name):
                text, hint = known.unknown(use.name)
                problems.append(
                    entry.document.problem(
                        entry.where, "unknown-metric", text, offset=use.column, width=len(use.name), suggestion=hint
                    )
                )
