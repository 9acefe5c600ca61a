"""A run in a notebook: its page in a frame of its own, so that the styles of both leave each other alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from healthcheck.core.alerts import alert_json
from healthcheck.core.samples import NO_LABELS
from healthcheck.record.lines import parse_series
from healthcheck.record.runs import load_run
from healthcheck.reports.wording import closing_line

if TYPE_CHECKING:
    from healthcheck.reports.pagedata import PageData
    from healthcheck.run.session import Session

TALL, SMALL = 900, 560
"""Heights of the frame in pixels: with alerts and without."""


class NotebookReport:
    """Shows nothing by itself: ``Loop._repr_html_`` asks it. What draws is imported then: every run registers this."""

    name = "notebook"

    def line(self, session: Session) -> str:
        """The run in one line."""
        return closing_line(session.report) if session.report is not None else ""

    def html(self, session: Session) -> str:
        """The page of the run so far."""
        from html import escape

        from healthcheck.reports.page import page_html

        report = session.report if session.report is not None else self._so_far(session)
        page = page_html([report], self._data(session, report), interactive=False)
        height = TALL if report["alerts"] else SMALL
        # Scripts of the frame sort its tables; it may do nothing else.
        return (
            f'<iframe srcdoc="{escape(page)}" sandbox="allow-scripts" title="healthcheck" '
            f'style="width:100%;height:{height}px;border:1px solid #8884;border-radius:6px"></iframe>'
        )

    def _so_far(self, session: Session) -> dict[str, Any]:
        return {
            "target": session.info.target or "notebook",
            "verdict": "not judged",
            "exit_code": session.exit_code(),
            "exit_words": "in progress",
            "steps": session.step,
            "unit": session.unit,
            "seconds": round(session.clock.monotonic() - session.active.started, 3),
            "mode": "observe" if session.observing else "act",
            "rules_source": session.rules.source,
            "rules": {},
            "alerts": [alert_json(alert) for alert in session.alerts],
            "unfinished": "running",
        }

    def _data(self, session: Session, report: dict[str, Any]) -> PageData:
        from healthcheck.reports.pagedata import PageData, page_data
        from healthcheck.reports.recorded import Recorded, Series

        units = session.host.registry.units()
        folder = session.info.run_dir
        if folder is not None and folder.is_dir():
            return page_data(load_run(folder), report["alerts"], units, report=report)
        # Without a record: the last values that the session itself remembers.
        record = Recorded()
        for name in session.history.series():
            metric, labels = parse_series(name)
            series = Series(name, metric, labels or NO_LABELS, units.get(metric, ""))
            for at, value in session.history(name):
                series.steps.append(at)
                series.values.append(value)
            record.series[name] = series
        return PageData(record)
