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
from collections.abc import Callable, Sequence
from typing import Any

from healthcheck.rulelang.formulaparser import FormulaError, Node, Parser
from healthcheck.rulelang.rule import Derived, Origin

Get = Callable[[str], "float | None"]


class Formula(Derived):
    """A compiled derived metric."""

    def __init__(self, name: str, text: str, parser: Parser, node: Node, origin: Origin) -> None:
        self.name = name
        self.text = text
        self.origin = origin
        self.triggers = tuple(dict.fromkeys(parser.bare))
        self.pasts = list(parser.pasts.values())
        self.remembers = tuple(dict.fromkeys(p.metric for p in self.pasts))
        self.inputs = tuple(dict.fromkeys([*self.triggers, *self.remembers]))
        self.uses = tuple(parser.uses)
        self._node = node
        self._other_name = self.triggers[0] if text.strip() == self.triggers[0] else ""
        """The metric of which this formula is only another name."""

    def feeds(self, name: str) -> Sequence[Callable[[float], None]]:
        return [past.feed for past in self.pasts if past.metric == name]

    def compute(self, get: Get) -> float | None:
        if self._other_name:
            value = get(self._other_name)
            return None if value is None else (float(value) if value - value == 0.0 else math.nan)
        values: list[float] = []
        for name in self.triggers:
            value = get(name)
            if value is None:
                return None
            values.append(value)
        for past in self.pasts:
            value = past.value
            if value is None:
                return None
            values.append(value)
        for value in values:
            if value - value != 0.0:
                return math.nan
        try:
            result = float(self._node(values))
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
    parser = Parser(text)
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
