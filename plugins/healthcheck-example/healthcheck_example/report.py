"""A report: one line per rule, as text. `--report healthcheck_example.table=PATH` writes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class TableReport:
    """How each rule ended, one line per rule.

    A report with `render` becomes a kind of `--report`, in `run`, `replay` and pytest. What should
    happen while training runs goes into `start`, `samples`, `alert` or `finish`.
    """

    name = "healthcheck_example.table"

    def render(self, reports: Sequence[Mapping[str, Any]]) -> str:
        lines = []
        for report in reports:
            lines.append(f"{report['target']}: {report['verdict']}, {report['steps']} steps")
            lines += [f"  {rule}: {entry['verdict']}" for rule, entry in report["rules"].items()]
        return "\n".join(lines) + "\n"
