"""What a person reads while training: two lines at the start, a block per alert, a closing block.

To stderr only. Rank 0 speaks; the others stay quiet and leave their alerts in the record.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from healthcheck import __version__
from healthcheck.reports.console.blocks import LABEL, alert_block, names_with_steps, only_noted
from healthcheck.reports.console.closing import closing_block, closing_line
from healthcheck.reports.console.stderr import Stderr
from healthcheck.reports.planned import cannot_fill
from healthcheck.reports.record.newrules import new_rules
from healthcheck.reports.record.rundir import LATEST, latest_shown, runs_folder
from healthcheck.reports.text import number, plural, shorten, step
from healthcheck.verdicts import Alert, Severity, Transition

if TYPE_CHECKING:
    from healthcheck.session import Session

BLOCKS_PER_RULE = 3
"""After so many blocks of one rule its further episodes are only counted."""
_HARMLESS = {"note", "warn", "evidence", "stop"}
"""Actions that change nothing in the run, and the one that has its own words."""
_COLOUR = {Severity.INFO: "cyan", Severity.WARNING: "yellow", Severity.ERROR: "red"}


class ConsoleReport:
    """The console of one session.

    ``verbosity`` (setting, ``-q`` and ``-v``): -2 the exit code only, -1 errors and the closing
    line, 0 the usual, 1 changes of state too.
    """

    name = "console"

    def __init__(self) -> None:
        self.out = Stderr()
        self.verbosity = 0
        self._session: Session | None = None
        self._usual = Path()
        self._blocks: dict[str, int] = {}
        self._counted: dict[str, int] = {}
        self._noted: list[Alert] = []
        self._waiting: dict[int, Alert] = {}

    def start(self, session: Session) -> None:
        info = session.info
        self._session = session
        self._usual = runs_folder(session.settings).absolute()  # now: the script may change its directory
        self.verbosity = int(session.settings.get("verbosity", 0) or 0)
        if info.rank != 0:
            self.verbosity = -2
        if self.verbosity >= 1:
            # Only -v pays for changes of state: without this attribute nobody collects them.
            self.transition = self._transition
            session.engine.watch_transitions = True
        if self.verbosity < 0 or not session.rules.rules:
            return
        self.out.write(self._start_lines(session))

    def alert(self, alert: Alert) -> None:
        self._waiting[id(alert)] = alert

    def acted(self, alert: Alert) -> None:
        self._waiting.pop(id(alert), None)
        self._show(alert)

    def note(self, text: str) -> None:
        if self.verbosity >= 0:
            self.out.write([text if text.startswith("healthcheck") else f"healthcheck: {text}"])

    def finish(self, report: dict[str, Any]) -> None:
        for alert in list(self._waiting.values()):  # a stop left before their actions were told
            self._show(alert)
        self._waiting.clear()
        if self.verbosity <= -2 or (not report["rules"] and report["exit_reason"] == "ok"):
            return
        if self.verbosity == -1:
            self.out.write([closing_line(report)])
            return
        lines = closing_block(report, self._record(), named=self._named(), details=self.verbosity >= 1)
        lines[0] = self._coloured_verdict(lines[0], report)
        if self._noted:
            lines.insert(2, f"  noted: {shorten(names_with_steps(self._noted))}")
        if self._counted:
            counted = [f"{rule} {plural(n, 'time')}" for rule, n in self._counted.items()]
            lines.insert(2, f"  further alerts, without a block: {shorten(counted)}")
        self.out.write(lines)

    # -- inside -----------------------------------------------------------------------

    def _start_lines(self, session: Session) -> list[str]:
        info, rules = session.info, session.rules
        source = f" of {rules.source}" if rules.source else ""
        profile = f", profile {rules.profile}" if rules.profile else ""
        again = f", from step {step(info.resumed_from)} on" if info.resumed_from else ""
        ranks = f", {info.world_size} ranks" if info.world_size > 1 else ""
        head = f"healthcheck {__version__}: watching {info.target}{again}{ranks}, {plural(len(rules.rules), 'rule')}{source}{profile}"
        more = [*_cannot_be_judged(session), *_new_here(session), *(f"  {text}" for text in info.notes)]
        return [head, f"  {self._stoppers(session)}", *more]

    @staticmethod
    def _stoppers(session: Session) -> str:
        stop = [rule.id for rule in session.rules.rules if rule.may_stop]
        if session.observing:
            held = f": {shorten(stop)} would" if stop else ""
            return f"observe mode: nothing is stopped or changed{held}"
        other = dict.fromkeys(a.name for rule in session.rules.rules for a in rule.actions if a.name not in _HARMLESS)
        rest = f"other actions: {', '.join(other)}" if other else "everything else only warns"
        if not stop:
            return f"no rule may stop the run; {rest}" if other else "no rule may stop the run: all of them only warn"
        return f"may stop the run: {shorten(stop, 6)}; {rest}   (--observe: never)"

    def _show(self, alert: Alert) -> None:
        if alert.explained_by or self.verbosity <= -2:
            return
        if self.verbosity == -1 and (alert.severity is not Severity.ERROR or not alert.counts):
            return
        if only_noted(alert) and self.verbosity < 1:
            self._noted.append(alert)
            return
        shown = self._blocks.get(alert.rule, 0)
        if shown >= BLOCKS_PER_RULE:
            self._counted[alert.rule] = self._counted.get(alert.rule, 0) + 1
            return
        self._blocks[alert.rule] = shown + 1
        session = self._session
        assert session is not None
        explained = [
            a for a in session.alerts if a.explained_by == alert.rule and a.detected_step == alert.detected_step
        ]
        world_size, place = session.info.world_size, self._place
        named = self._named()
        again = shown == 1 and any(a.rule == alert.rule and a.cleared_step is not None for a in session.alerts)
        lines = alert_block(
            alert, explained, session.history, world_size=world_size, place=place, named=named, again=again
        )
        if alert.severity is Severity.INFO:
            lines = lines[:1]
        label = LABEL[alert.severity]
        lines[0] = self.out.colour(label, _COLOUR[alert.severity]) + lines[0][len(label) :]
        if shown + 1 == BLOCKS_PER_RULE:
            lines[-1] += "   (third time: further ones are only counted)"
        self.out.write(lines)

    def _transition(self, change: Transition) -> None:
        score = "" if change.score is None or change.score == change.value else f", score {number(change.score)}"
        self.out.write(
            [
                f"healthcheck: step {step(change.step)}  {change.rule}  {change.before} -> {change.after}"
                f"  {change.series} {number(change.value)}{score}"
            ]
        )

    def _record(self) -> str:
        run_dir: Path | None = self._session.info.run_dir if self._session is not None else None
        return latest_shown(run_dir) if run_dir is not None else ""

    def _named(self) -> str:
        """How the commands name this run: a path where they would not look, a name where ``latest`` is another."""
        run_dir = self._session.info.run_dir if self._session is not None else None
        if run_dir is None:
            return ""
        shown = latest_shown(run_dir)
        if run_dir.parent != self._usual:
            return shown
        return "" if Path(shown).name == LATEST else run_dir.name

    def _place(self, path: str) -> str:
        """A path below the run's folder as ``healthcheck-runs/latest/alerts/001``."""
        run_dir = self._session.info.run_dir if self._session is not None else None
        if run_dir is not None and Path(path).is_relative_to(run_dir):
            return f"{latest_shown(run_dir)}/{Path(path).relative_to(run_dir).as_posix()}"
        return path

    def _coloured_verdict(self, line: str, report: dict[str, Any]) -> str:
        head, _, tail = line.partition(": ")
        end = min((at for at in (tail.find(","), tail.find("  ")) if at >= 0), default=len(tail))
        colour = (
            "green"
            if report["exit_code"] == 0 and report["verdict"] == "ok"
            else "yellow"
            if report["exit_code"] == 0
            else "red"
        )
        return f"{head}: {self.out.colour(tail[:end], colour)}{tail[end:]}"


def _cannot_be_judged(session: Session) -> list[str]:
    """What a run that was asked to be short will not be able to judge: said before it starts."""
    steps = session.settings.get("max_steps")
    if steps is None:
        return []
    rules = [rule for rule in session.rules.rules if cannot_fill(rule, steps)]
    required = [rule.id for rule in rules if rule.required]
    lines = [
        f"  {plural(steps, 'step')} are too few for {plural(len(rules), 'rule')} (healthcheck plan --max-steps {steps})"
    ]
    return (lines if rules else []) + ([f"  required, so the run will fail: {shorten(required)}"] if required else [])


def _new_here(session: Session) -> list[str]:
    """What an upgrade has added since the last run from the same rules."""
    run_dir = session.info.run_dir
    found = new_rules(session.rules, run_dir.parent, but=run_dir) if run_dir is not None else []
    are = "rule is" if len(found) == 1 else "rules are"
    return [f"  {len(found)} {are} new since your last run here (healthcheck plan --new)"] if found else []
