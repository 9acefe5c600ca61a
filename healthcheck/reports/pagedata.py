"""All that a page shows of a run beside its report: series, pictures of its alerts, evidence, environment, other ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from healthcheck.engine.columns import Moment
from healthcheck.engine.trace import TraceRow
from healthcheck.record.evidence import bundles_of, kept_beside
from healthcheck.record.lines import read_samples
from healthcheck.record.runs import Run
from healthcheck.record.segments import sample_lines
from healthcheck.record.sharing import shareable
from healthcheck.reports.alertcharts import judged_again, pictures_of
from healthcheck.reports.charts import Picture
from healthcheck.reports.recorded import Recorded, checkpoints_of, from_lines, recorded, restarts_of
from healthcheck.rulelang.rule import Cause, RuleSet

MOST_FILES = 12
"""Files of a bundle that are named."""


@dataclass(slots=True)
class PageData:
    """What the page of one run is made of, beside ``report.json``."""

    record: Recorded = field(default_factory=Recorded)
    facts: Mapping[str, Any] = field(default_factory=dict)
    """``run.json``."""
    pictures: Mapping[int, list[Picture]] = field(default_factory=dict)
    """Number of an alert -> its charts."""
    events: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Lane of the strip -> steps."""
    evidence: Sequence[Mapping[str, Any]] = ()
    """``number``, ``folder``, ``files`` (name -> bytes), ``parameters`` (the worst ones)."""
    beside: Sequence[str] = ()
    """Files that other actions have written, relative to the folder of the run."""
    ranks: Sequence[tuple[str, Sequence[Mapping[str, Any]]]] = ()
    """Other ranks with alerts."""
    other: Recorded | None = None
    """A run to draw below this one."""
    problem: str = ""
    """Why limits may be missing, or values differ from those that were judged."""


def page_data(
    run: Run,
    alerts: Sequence[Mapping[str, Any]],
    units: Mapping[str, str],
    *,
    report: Mapping[str, Any] | None = None,
    rules: RuleSet | None = None,
    problem: str = "",
    other: Run | None = None,
    hidden: dict[str, str] | None = None,
) -> PageData:
    """Read a run's record for its page.

    :param alerts: those that the page shows.
    :param rules: those that judged the run, freshly compiled: then limits are drawn as they were at each step.
    :param problem: why there are none.
    :param other: a second run, drawn below the first.
    :param hidden: names to replace, where the page is to be shared.
    """
    try:
        lines = list(sample_lines(run.folder))  # read once: closed parts are unpacked for it
    except OSError:
        lines = []
    record = from_lines(lines, units)
    record.name = run.folder.name
    if hidden is not None:
        record.name = str(shareable(record.name, hidden))
    judged: Mapping[int, tuple[Sequence[TraceRow], Cause | None]] = {}
    if rules is not None and record.series and alerts:
        moments = [Moment(batch.at, batch.samples, batch.now) for batch in read_samples(lines).batches]
        start, rank = int(run.facts.get("resumed_from") or 0), int(run.facts.get("rank") or 0)
        judged = {**judged_again(alerts, rules, moments, start_step=start, rank=rank)}
    pictures = {}
    for alert in alerts:
        rows, cause = judged.get(int(alert["number"]), ((), None))
        pictures[int(alert["number"])] = pictures_of(alert, record, rows, cause, units)
    missing = []
    if record.thinned_to:
        missing.append(f"of steps up to {record.thinned_to:,} only a part was kept")
    if record.gaps:
        missing.append(f"{record.gaps:,} evaluations are missing")
    facts = run.facts if hidden is None else shareable(run.facts, hidden)
    return PageData(
        record,
        facts,
        pictures,
        {
            "evaluations": record.evaluations,
            "checkpoints": checkpoints_of(run.folder),
            "restarts": restarts_of(run.facts, report),
        },
        [
            {
                "number": bundle.number,
                "folder": bundle.folder.relative_to(run.folder).as_posix(),
                "files": dict(list(bundle.files.items())[:MOST_FILES]),
                "more": max(0, len(bundle.files) - MOST_FILES),
                "bytes": bundle.total_bytes,
                "parameters": bundle.worst_parameters(),
            }
            for bundle in bundles_of(run)
        ],
        kept_beside(run),
        [(rank.name, rank.alerts if hidden is None else shareable(rank.alerts, hidden)) for rank in run.other_ranks],
        recorded(other.folder, units) if other is not None else None,
        "; ".join(filter(None, (problem, *missing))),
    )
