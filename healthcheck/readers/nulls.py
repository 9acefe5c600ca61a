"""What a ``null`` means in JSON: a NaN that strict JSON could not write, or a cell without a value.

A logger that leaves out what it has not got writes ``null`` only for a NaN: if rows have different
keys, every ``null`` of a column that is otherwise numeric is a NaN. Where all rows have the same keys
(a wide table turned into JSON), a ``null`` is an empty cell

- if the row has a number in a column that never has one together with this column: it is a row of
  another kind (evaluation rows between training rows);
- if the column is *sparse*: an evaluation metric with gaps, or a column with numbers in under half of
  the rows between its first and last number; unless the columns that always come with it have numbers.

A row that has no learning rate either, where rows have one, is not of a step: some trainers close their
record with such a row, all empty. Anything else is a NaN.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from healthcheck.readers.identify import identify
from healthcheck.readers.values import to_number

Row = Mapping[str, Any]


class Nulls:
    """Decides for one file, from its first rows."""

    def __init__(self, peek: Sequence[Row], special: frozenset[str], evaluation: frozenset[str] = frozenset()) -> None:
        self.special = special
        """Step, time and bookkeeping columns, which say nothing about the kind of a row."""
        self.rectangular = len({frozenset(row) for row in peek}) <= 1
        where: dict[str, list[int]] = {}
        for index, row in enumerate(peek):
            for name, value in row.items():
                if name not in special and to_number(value) is not None:
                    where.setdefault(name, []).append(index)
        self.numeric = set(where)
        self.rates = {n for n in where if identify(n).metric == "lr"}
        self.evaluation = evaluation
        self.text = {n for row in peek for n, v in row.items() if isinstance(v, str)} - self.numeric
        """Columns of words: nobody looks at their values again."""
        self.sparse = {
            n
            for n, at in where.items()
            if len(at) * 2 < at[-1] - at[0] + 1 or (n in evaluation and len(at) < 0.9 * (at[-1] + 1))
        }
        apart = {n: set(at) for n, at in where.items()}
        self.exclusive = {n: {m for m in apart if not apart[m] & apart[n]} for n in apart} if self.rectangular else {}
        self.companions = {
            n: {m for m in evaluation & set(apart) if m != n and apart[m] & apart[n]}
            if n in evaluation
            else {m for m in self.sparse if m != n and apart[m] == apart[n]}
            for n in self.sparse
        }

    def is_nan(self, name: str, row: Row) -> bool:
        """Whether the ``null`` of column ``name`` in this row is a NaN."""
        if name in self.special or name not in self.numeric:
            return False
        if self.rates and name not in self.evaluation and all(row.get(n, 0.0) is None for n in self.rates):
            return False
        if not self.rectangular:
            return True
        present = {n for n, v in row.items() if v is not None and n not in self.special}
        if present & self.exclusive[name]:
            return False
        return name not in self.sparse or bool(self.companions[name] & present)


def filled_with_nan(peek: Sequence[Row], evaluation: frozenset[str]) -> dict[str, tuple[int, int]]:
    """Evaluation columns whose empty cells were written as ``nan``: column -> (every, first row).

    Only where a number stands in every k-th row exactly, k > 1, at least four times, and NaN in all
    rows between. A NaN in a row where a number is due stays a NaN.
    """
    found = {}
    for name in evaluation:
        values = [(i, row[name]) for i, row in enumerate(peek) if isinstance(row.get(name), float)]
        at = [i for i, v in values if v == v]
        gaps = {b - a for a, b in itertools.pairwise(at)}
        if len(at) >= 4 and len(gaps) == 1 and min(gaps) > 1 and len(values) == len(peek):
            found[name] = (min(gaps), at[0])
    return found
