"""All metrics of a set of probes as one table: for ``healthcheck metrics`` and its docs page."""

from __future__ import annotations

from collections.abc import Iterable

from healthcheck.protocols import Probe
from healthcheck.samples import Metric

_HEAD = ("metric", "unit", "cost", "needs", "what it is")


def metrics_table(probes: Iterable[Probe], *, markdown: bool = False) -> str:
    """List what ``probes`` provide, one group per first part of the name, sorted.

    Plain text for a terminal, or Markdown for ``docs/reference/metrics.md``. Families are written
    with their labels: ``grad_norm[parameter]``.
    """
    groups: dict[str, list[Metric]] = {}
    for probe in probes:
        for metric in probe.provides:
            groups.setdefault(metric.name.split(".")[0], []).append(metric)
    sections = []
    for group in sorted(groups):
        rows = [_row(metric) for metric in sorted(groups[group], key=lambda m: (m.name, m.labels))]
        sections.append(_as_markdown(group, rows) if markdown else _as_text(group, rows))
    return "\n\n".join(sections) + "\n"


def written(metric: Metric) -> str:
    """``loss``, or ``grad_norm[parameter]`` for a family."""
    return f"{metric.name}[{','.join(metric.labels)}]" if metric.labels else metric.name


def _row(metric: Metric) -> tuple[str, ...]:
    return (written(metric), metric.unit, metric.cost.value, ", ".join(metric.needs), metric.help)


def _as_markdown(group: str, rows: list[tuple[str, ...]]) -> str:
    lines = [f"## {group}", "", f"| {' | '.join(_HEAD)} |", "|---" * len(_HEAD) + "|"]
    lines += [f"| `{row[0]}` | {' | '.join(cell.replace('|', chr(92) + '|') for cell in row[1:])} |" for row in rows]
    return "\n".join(lines)


def _as_text(group: str, rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in (_HEAD, *rows)) for i in range(len(_HEAD) - 1)]
    lines = [group]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append("  " + "  ".join([*cells, row[-1]]).rstrip())
    return "\n".join(lines)
