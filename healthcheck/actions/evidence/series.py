"""The values before an alert as one table: a row per step, a column per series."""

from __future__ import annotations

import csv
import io

from healthcheck.protocols import ActionContext
from healthcheck.verdicts import Alert

MAX_COLUMNS = 512


def series_rows(alert: Alert, context: ActionContext, steps: int) -> str | None:
    """CSV text with the last ``steps`` values of each series, or None if there are no values."""
    columns: dict[str, dict[int, float]] = {}
    for name in _names(alert, context):
        values = context.history(name, steps)
        if values:
            columns[name] = dict(values)
        if len(columns) == MAX_COLUMNS:
            break
    if not columns:
        return None
    wanted = sorted({step for values in columns.values() for step in values})
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(["step", *columns])
    for step in wanted:
        table.writerow([step, *(_cell(values.get(step)) for values in columns.values())])
    return out.getvalue()


def _names(alert: Alert, context: ActionContext) -> list[str]:
    """The alert's own series first, so that the column limit never cuts them off."""
    return list(dict.fromkeys([*(fact.name for fact in alert.series), *context.series()]))


def _cell(value: float | None) -> str:
    return "" if value is None else repr(value)
