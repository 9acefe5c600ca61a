"""All metrics of a set of probes as one table: for ``healthcheck metrics`` and its docs page."""

from __future__ import annotations

from collections.abc import Iterable

from healthcheck.core.protocols import Probe
from healthcheck.core.samples import Cost, Metric
from healthcheck.device.mailbox import READ_EVERY

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


DEVICES = ("CUDA", "ROCm", "MPS", "XPU", "CPU", "other backend")
"""What torch runs on, as the columns of the table; the last stands for backends that nobody here has tried."""

EPOCHS = tuple(f"epoch{part}" for part in ("", "_start", "_end", "_peak", "_delta", "_cleanups", "_began", "_ended"))

_WITH_MAILBOX = ("CUDA", "ROCm")
_MEMORY = {
    "CUDA": ("allocated", "reserved", "peak", "retries"),
    "ROCm": ("allocated", "reserved", "peak", "retries"),
    "MPS": ("allocated", "reserved"),
    "XPU": ("allocated", "reserved", "peak"),
    "CPU": ("allocated", "peak"),
    "other backend": (),
}
"""Allocator counters that :class:`healthcheck.probes.memory_readings.TorchDevice` can read."""
_MADE_OF = {
    "memory.fraction": "allocated",
    "memory.fragmentation": "reserved",
    "memory.epoch_floor": "allocated",
    "memory.time_left": "allocated",
    "memory.at": "allocated",
    "memory.step_growth": "allocated",
    **{f"memory.{name}": "allocated" for name in EPOCHS},
}


def availability(metric: Metric, device: str) -> str:
    """``late``: every step, one or two steps late, no wait. ``yes``: at once. ``every 10``: read in one step of ten,
    each read a wait for the device. ``approximate``: of the process instead of the device. ``no data``: not there, and rules on it
    are reported as not judged.
    """
    name = metric.name
    if name.startswith("memory.") and not name.startswith(("memory.host", "memory.live")):
        counter = _MADE_OF.get(name, name.partition(".")[2])
        if counter not in _MEMORY[device]:
            return "no data"
        return "approximate" if device == "CPU" else "yes"
    if "cuda" in metric.needs and device not in _WITH_MAILBOX:
        return "no data"
    if metric.cost is Cost.DEVICE and device != "CPU":
        return "late" if device in _WITH_MAILBOX else f"every {READ_EVERY}"
    return "yes"
