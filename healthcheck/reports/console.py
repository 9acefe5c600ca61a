"""The console of a watched run: whole lines on stderr beside other people's progress bars, a block for each alert; HTML in a
notebook.

Only stderr (in a notebook the cell's output), only ASCII, no cursor tricks. A stream that is closed, broken or full is given up
after one try of the interpreter's original stderr: training goes on in silence.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from healthcheck.core.alerts import Alert, Kind, Severity, Transition
from healthcheck.core.text import fitting, number, plural, shorten, step, visible, width_of, wrapped
from healthcheck.core.version import VERSION
from healthcheck.record.folder import LATEST, folder_of_rank, latest_shown, runs_folder
from healthcheck.record.runs import new_rules
from healthcheck.reports.alertblock import (
    INDENT,
    LABEL,
    MOST_LINES,
    alert_block,
    evidence_path,
    names_with_steps,
    only_noted,
    score_name,
)
from healthcheck.reports.planned import cannot_fill
from healthcheck.reports.wording import closing_block, how_it_ended, with_exit
from healthcheck.rulelang.rule import named
from healthcheck.run.ending import failing_alerts

if TYPE_CHECKING:
    from healthcheck.run.session import Session

_COLOURS = {"red": "31", "yellow": "33", "cyan": "36", "green": "32", "bold": "1"}


def ascii_only(text: str) -> str:
    """The same text with an escape for each character that some code page lacks."""
    return text if text.isascii() else text.encode("ascii", "backslashreplace").decode("ascii")


class Stderr:
    """Where the console report writes. Looks at ``sys.stderr`` at each write: scripts replace it."""

    def __init__(self) -> None:
        self.given_up = False
        self._board = Board()

    def write(
        self, lines: Sequence[str], *, colour: tuple[int, int, str] | None = None, commands: bool = False
    ) -> None:
        """Write lines in one go, above any active bar; in a notebook, as a block of its own.

        What lines hold from outside is escaped here, so that nobody who makes them has to think of it.

        :param colour: ``(start, end, name)``: this part of the first line in a colour, where that is wanted.
        :param commands: the lines are commands for a CI system, made of text that was escaped for it.
        """
        if self.given_up or not lines:
            return
        lines = list(lines) if commands else [visible(line) for line in lines]
        if self._board.show(lines):
            return
        if colour is not None:
            start, end, name = colour
            lines[0] = lines[0][:start] + self.colour(lines[0][start:end], name) + lines[0][end:]
        text = ascii_only("\n".join(lines)) + "\n"
        for stream in dict.fromkeys((sys.stderr, sys.__stderr__)):
            if stream is None:
                continue
            try:
                if not _above_tqdm(stream, text):
                    _put(stream, text)
                return
            except (OSError, ValueError):  # broken pipe, full disk, closed file
                continue
        self.given_up = True

    @property
    def width(self) -> int:
        """Columns that a line may have."""
        return width_of(sys.stderr)

    def colour(self, text: str, name: str) -> str:
        """``text`` in a colour where that is wanted: FORCE_COLOR, NO_COLOR, else a terminal."""
        return f"\x1b[{_COLOURS[name]}m{text}\x1b[0m" if wants_colour(sys.stderr) else text


def wants_colour(stream: TextIO | None) -> bool:
    """``NO_COLOR`` wins over ``FORCE_COLOR``, both over what the stream is."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR", "") not in ("", "0"):
        return True
    if stream is None or os.environ.get("TERM") == "dumb":
        return False
    try:
        return stream.isatty()
    except (OSError, ValueError, AttributeError):
        return False


def _put(stream: TextIO, text: str) -> None:
    if stream is sys.__stderr__ and os.name == "posix":
        # Past the stream's own buffer: what could not be written must not fail again in the
        # interpreter's last flush, which would change the script's exit status.
        stream.flush()
        data = text.encode("ascii")
        number = stream.fileno()
        while data:
            try:
                data = data[os.write(number, data) :]
            except BlockingIOError:
                return
        return
    stream.write(text)
    stream.flush()


def _above_tqdm(stream: TextIO, text: str) -> bool:
    """Let tqdm clear its bars, write and draw them again. False if no bar of tqdm is active."""
    module: Any = sys.modules.get("tqdm.std")
    if module is None:
        return False
    try:
        bars = [bar for bar in list(module.tqdm._instances) if not getattr(bar, "disable", False)]
        if not any(getattr(bar, "fp", None) is not None for bar in bars):
            return False
        with module.tqdm.external_write_mode(file=stream):
            _put(stream, text)
        return True
    except (AttributeError, TypeError, RuntimeError):  # another version, or a bar that closes meanwhile
        return False


# --------------------------------------------------------------------------------------------------
# In a notebook the lines of the console become one compact block of HTML, with the plain text as its fallback.


_EDGE_COLOURS = (
    (re.compile(r"^(ERROR|healthcheck: (STOPPED|FAILED|SCRIPT FAILED|INTERNAL ERROR|NOT JUDGED))"), "#c0392b"),
    (re.compile(r"^(WARN|healthcheck: WARNED)"), "#b7791f"),
    (re.compile(r"^healthcheck: OK"), "#2e8b57"),
)
"""How a block begins -> the colour of its edge. The words say it too."""
_STYLE = "padding:.1em .8em;margin:.3em 0;font-family:monospace;font-size:.9em;white-space:pre-wrap"


class Block:
    """Some lines for IPython's ``display``: HTML where the front end can, else text."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines = list(lines)

    def __repr__(self) -> str:
        return "\n".join(self.lines)

    def _repr_html_(self) -> str:
        from html import escape  # brings a table of all characters that have a name

        first, *rest = map(escape, self.lines)
        edge = next((colour for begins, colour in _EDGE_COLOURS if begins.match(self.lines[0])), "#8a939c")
        text = "\n".join([f"<b>{first}</b>", *rest])
        return f'<div style="border-left:3px solid {edge};{_STYLE}">{text}</div>'


class Board:
    """All blocks of one run as one output of the notebook, which is updated as they come."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._handle: Any = None

    def __repr__(self) -> str:
        return "\n".join(map(repr, self.blocks))

    def _repr_html_(self) -> str:
        return "".join(block._repr_html_() for block in self.blocks)

    def show(self, lines: Sequence[str]) -> bool:
        """Add lines, in the notebook that this code runs in; False where there is none."""
        ipython: Any = sys.modules.get("IPython")
        if ipython is None or not lines:
            return False
        try:
            if not hasattr(ipython.get_ipython(), "kernel"):
                return False  # an IPython shell in a terminal
            self.blocks.append(Block(lines))
            if self._handle is None:
                self._handle = ipython.display.display(self, display_id=True)
            else:
                self._handle.update(self)
            return True
        except Exception:  # a front end that cannot: the text goes to stderr, as everywhere else
            return False


# --------------------------------------------------------------------------------------------------
# What a person reads while training: two lines at the start, a block per alert, a closing block.
#
# To stderr only. Rank 0 speaks; the others stay quiet and leave their alerts in the record.


BLOCKS_PER_RULE = 3
"""After so many blocks of one rule its further episodes are only counted."""
_HARMLESS = {"note", "warn", "evidence", "dump_stacks", "ask_ranks", "stop"}
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
        self._mute = False
        """Whether this rank says nothing because another one speaks for it."""
        self._usual = Path()
        self._blocks: dict[str, int] = {}
        self._shown: set[int] = set()
        """Alerts that have a block."""
        self._counted: dict[str, int] = {}
        self._noted: list[Alert] = []
        self._waiting: dict[int, Alert] = {}

    def start(self, session: Session) -> None:
        info = session.info
        self._session = session
        self._usual = runs_folder(session.settings).absolute()  # now: the script may change its directory
        self.verbosity = int(session.settings.get("verbosity", 0) or 0)
        if not info.speaks:
            self._mute, self.verbosity = self.verbosity > -2, -2
        if self.verbosity >= 1:
            # Only -v pays for changes of state: without this attribute nobody collects them.
            self.transition = self._transition
            session.engine.watch_transitions = True
        if self.verbosity < 0 or not session.rules.causes:
            return
        self.out.write(self._start_lines(session))

    def alert(self, alert: Alert) -> None:
        self._waiting[id(alert)] = alert

    def acted(self, alert: Alert) -> None:
        self._waiting.pop(id(alert), None)
        if id(alert) in self._shown:
            self._amend(alert)
        else:
            self._show(alert)

    def note(self, text: str) -> None:
        if self.verbosity >= 0:
            self.out.write([text if text.startswith("healthcheck") else f"healthcheck: {text}"])

    def finish(self, report: dict[str, Any]) -> None:
        for alert in list(self._waiting.values()):  # a stop left before their actions were shown
            self._show(alert)
        self._waiting.clear()
        if self._mute and report.get("unheard") and report["exit_code"]:
            self._speak_up(report)
        if self.verbosity <= -2 or (not report["rules"] and report["exit_reason"] == "ok"):
            return
        width = self.out.width
        if self.verbosity == -1:
            self.out.write(with_exit(f"healthcheck: {how_it_ended(report)}", int(report["exit_code"]), width))
            return
        lines = closing_block(report, self._record(), named=self._named(), details=self.verbosity >= 1, width=width)
        more = []
        session = self._session
        kept = [self._place(path) for path in map(evidence_path, session.alerts if session is not None else ()) if path]
        if kept:
            more.append(f"evidence: {shorten(kept, 3)}")
        if self._noted:
            more.append(f"noted: {shorten(names_with_steps(self._noted))}")
        if self._counted:
            counted = [f"{rule} {plural(n, 'time')}" for rule, n in self._counted.items()]
            more.append(f"further alerts, without a block: {shorten(counted)}")
        at = next((n for n, line in enumerate(lines) if n and not line.startswith("    ")), len(lines)) + 1
        lines[at:at] = [line for text in more for line in wrapped(text, width, "    ", "  ")]
        self.out.write(lines, colour=_verdict(lines[0], report))

    # -- inside -----------------------------------------------------------------------

    def _speak_up(self, report: dict[str, Any]) -> None:
        """What has failed on this rank, where the one that speaks for all cannot know of it."""
        session = self._session
        failing = failing_alerts(session.alerts, report["fail_on"]) if session is not None else []
        if session is None or not failing:
            return
        width = self.out.width
        lines = with_exit(f"healthcheck: rank {report['rank']} {how_it_ended(report)}", int(report["exit_code"]), width)
        lines += wrapped(shorten(names_with_steps(failing), 3), width, "    ", "  ")
        lines += wrapped(f"said by this rank itself: {report['unheard']}", width, "    ", "  ")
        folder = folder_of_rank(session.info)
        if folder is not None and folder.is_dir():
            lines.append(f"  why: healthcheck why {latest_shown(folder)}")
        self.out.write(lines)

    def _start_lines(self, session: Session) -> list[str]:
        info, rules = session.info, session.rules
        width = self.out.width
        name = rules.source.partition(" (")[0]
        source = f" of {name}" if name else ""
        profile = f", profile {rules.profile}" if rules.profile else ""
        again = f", from step {step(info.resumed_from)} on" if info.resumed_from else ""
        ranks = f", {info.world_size} ranks" if info.world_size > 1 else ""
        begin, rest = f"healthcheck {VERSION}: watching ", f"{again}{ranks}, {plural(len(rules.rules), 'rule')}"
        heads = [f"{begin}{info.target}{rest}{source}{profile}"]
        heads += [f"{begin}{Path(info.target).name}{rest}{where}{profile}" for where in (source, "")]
        more = [*_cannot_be_judged(session), *_new_here(session), *info.notes]
        lines = wrapped(fitting(width, *heads), width, "  ", "")
        lines += wrapped(fitting(width - 2, *self._stoppers(session)), width, "    ", "  ")
        return [*lines, *(f"  {text}" for text in more)]

    @staticmethod
    def _stoppers(session: Session) -> list[str]:
        """What may be done to the run; from the longest wording to the shortest."""
        stop = [rule.id for rule in session.rules.rules if rule.may_stop]
        if session.observing:
            held = f": {shorten(stop)} would" if stop else ""
            return [f"observe mode: nothing is stopped or changed{held}", "observe mode: nothing is stopped or changed"]
        other = dict.fromkeys(a.name for rule in session.rules.causes for a in rule.actions if a.name not in _HARMLESS)
        rest = f"other actions: {', '.join(other)}" if other else "everything else only warns"
        if not stop:
            return [f"no rule may stop the run; {rest}" if other else "no rule may stop the run: all of them only warn"]
        never = "   (--observe: never)"
        found = [f"may stop the run: {shorten(stop, most)}; {rest}" for most in (6, 2, 1)]
        return [found[0] + never, *found, f"may stop the run: {plural(len(stop), 'rule')}; {rest}"]

    def _show(self, alert: Alert) -> None:
        if alert.explained_by or self.verbosity <= -2:
            return
        if self.verbosity == -1 and (alert.severity is not Severity.ERROR or not alert.counts):
            return
        if only_noted(alert) and self.verbosity < 1:
            self._noted.append(alert)
            return
        effect = self._effect_shown(alert)
        if effect is not None:
            text = f"{LABEL[alert.severity]} {alert.name}  step {step(alert.fired_step)}: {alert.message}"
            self.out.write(wrapped(f"{text}; {effect.rule} above is the same fault", self.out.width, INDENT, ""))
            return
        shown = self._blocks.get(alert.rule, 0)
        if shown >= BLOCKS_PER_RULE:
            self._counted[alert.rule] = self._counted.get(alert.rule, 0) + 1
            return
        self._blocks[alert.rule] = shown + 1
        self._shown.add(id(alert))
        session = self._session
        assert session is not None
        explained = [
            a for a in session.alerts if a.explained_by == alert.rule and a.detected_step == alert.detected_step
        ]
        lines = alert_block(
            alert,
            explained,
            session.history,
            score=score_name(session.rules.cause(alert.name)),
            width=self.out.width,
            world_size=session.info.world_size,
        )
        if alert.severity is Severity.INFO:
            lines = lines[:1]
        if shown + 1 == BLOCKS_PER_RULE:
            lines = [*lines[: MOST_LINES - 1], f"{INDENT}third time: further ones are only counted"]
        self.out.write(lines, colour=(0, len(LABEL[alert.severity]), _COLOUR[alert.severity]))

    def _effect_shown(self, alert: Alert) -> Alert | None:
        """An alert of the same step that this one explains and that has its block already: its event came first."""
        session = self._session
        assert session is not None
        explains = session.rules[alert.rule].explains
        return next(
            (
                other
                for other in session.alerts
                if other.fired_step == alert.fired_step
                and id(other) in self._shown
                and any(named(pattern, other.name) for pattern in explains)
            ),
            None,
        )

    def _amend(self, alert: Alert) -> None:
        """Another cause of a rule that has its block: one sentence, once for each."""
        last = max(alert.findings, key=lambda finding: finding.detected_step)
        worse = max(alert.findings, key=lambda finding: finding.error_step or 0)
        if (worse.error_step or 0) > last.detected_step:
            label = LABEL[alert.severity]
            text = f"{label} {alert.rule}  step {step(worse.error_step or 0)}: it goes on since step {step(worse.fired_step)}"
            self.out.write(wrapped(text, self.out.width, INDENT, ""), colour=(0, len(label), _COLOUR[alert.severity]))
            return
        speaks = last.cause == alert.cause
        follows = (
            last.kind < alert.kind or last.kind is alert.kind is Kind.TREND
        )  # a second curve shows the same disease
        if not speaks and follows and last.severity <= alert.findings[0].severity:
            return  # no more certain than what was said, and no worse: most likely it follows from it
        label = LABEL[last.severity]
        text = (
            f"{label} {alert.rule}  step {step(last.fired_step)}: {'the cause is' if speaks else 'also'} {last.cause}"
        )
        place = f" at {last.where}" if last.where else ""
        lines = wrapped(f"{text}: {last.message}{place}", self.out.width, INDENT, "")
        if speaks and last.hint:
            lines += wrapped(f"try: {last.hint}", self.out.width, INDENT)
        lines = lines[:MOST_LINES]
        self.out.write(lines, colour=(0, len(label), _COLOUR[last.severity]))

    def _transition(self, change: Transition) -> None:
        name = f"{change.rule}.{change.cause}" if change.cause else change.rule
        score = "" if change.score is None or change.score == change.value else f", score {number(change.score)}"
        self.out.write(
            [
                f"healthcheck: step {step(change.step)}  {name}  {change.before} -> {change.after}"
                f"  {change.series} {number(change.value)}{score}"
            ]
        )

    def _record(self) -> str:
        run_dir: Path | None = self._session.info.run_dir if self._session is not None else None
        return latest_shown(run_dir) if run_dir is not None and run_dir.is_dir() else ""  # the script may remove it

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


def _verdict(line: str, report: dict[str, Any]) -> tuple[int, int, str]:
    """Where the verdict stands in the closing line, and its colour."""
    head, separator, tail = line.partition(": ")
    start = len(head) + len(separator)
    end = min((at for at in (tail.find(","), tail.find("  ")) if at >= 0), default=len(tail))
    colour = "green" if report["verdict"] == "ok" else "yellow" if report["exit_code"] == 0 else "red"
    return start, start + end, colour


def _cannot_be_judged(session: Session) -> list[str]:
    """What a run that was asked to be short will not be able to judge: said before it starts."""
    steps = session.settings.get("max_steps")
    if steps is None:
        return []
    rules = [rule for rule in session.rules.causes if cannot_fill(rule, steps)]
    required = [rule.id for rule in rules if rule.required]
    lines = [
        f"{plural(steps, 'step')} are too few for {plural(len(rules), 'rule')} (healthcheck plan --max-steps {steps})"
    ]
    return (lines if rules else []) + ([f"required, so the run will fail: {shorten(required)}"] if required else [])


def _new_here(session: Session) -> list[str]:
    """What an upgrade has added since the last run from the same rules."""
    run_dir = session.info.run_dir
    found = new_rules(session.rules, run_dir.parent, but=run_dir) if run_dir is not None else []
    are = "rule is" if len(found) == 1 else "rules are"
    return [f"{len(found)} {are} new since your last run here (healthcheck plan --new)"] if found else []
