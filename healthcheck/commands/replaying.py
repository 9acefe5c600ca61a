"""What ``replay`` was given, and the judge made of it. Picklable, for ``--jobs``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from healthcheck.errors import HealthCheckError

if TYPE_CHECKING:
    from healthcheck.assembly import RuleChoice
    from healthcheck.plugins import PluginHost
    from healthcheck.readers.find import RunFile
    from healthcheck.readers.series import RecordedRun
    from healthcheck.rulelang.rule import RuleSet


@dataclass(slots=True)
class Outcome:
    """How one path ended: a report, or the problem that kept it from being read."""

    path: str
    report: dict[str, Any] = field(default_factory=dict)
    problem: str = ""
    named: bool = False
    """The user named this very file."""
    extra: Any = None

    def to_json(self) -> dict[str, Any]:
        return self.report or {"path": self.path, "problem": self.problem}


@dataclass
class Given:
    """The command line, in words that every process understands."""

    choice: RuleChoice = field(default_factory=dict)  # type: ignore[assignment]
    fail_on: str | None = None
    plugins: Sequence[str] = ()
    mapping: dict[str, str] = field(default_factory=dict)
    pattern: Sequence[str] = ()
    readers: dict[str, str] = field(default_factory=dict)
    """Path -> name of its reader, once :meth:`find` has looked."""
    _host: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_host": None}

    @property
    def host(self) -> PluginHost:
        if self._host is None:
            from healthcheck.assembly import plugin_host

            self._host = plugin_host(self.plugins)
        host: PluginHost = self._host
        return host

    def load(self, *, more: Sequence[str] = (), notes: list[str] | None = None) -> RuleSet:
        """Compile the rules.

        :param more: as ``--set``, after those of the command line.
        :param notes: sentences worth saying once are appended here.
        """
        from healthcheck.assembly import load_rules_for

        chosen: RuleChoice = {**self.choice, "set": [*self.choice.get("set", ()), *more]}
        settings = {"fail_on": self.fail_on} if self.fail_on else {}
        loaded = load_rules_for(host=self.host, settings=settings, notes=notes, **chosen)
        self.host.manager.hook.healthcheck_modify_rules(rules=loaded.rules)
        return loaded

    def check(self) -> list[str]:
        """Raise ``UsageError`` for bad rules or patterns before anything is read; returns notes worth saying."""
        notes = [str(failure) for failure in self.host.failures]
        self.load(notes=notes)
        if self.pattern:
            from healthcheck.readers.textlog import PatternReader

            PatternReader(list(self.pattern))
        return notes

    def find(self, paths: Sequence[str]) -> list[RunFile]:
        from healthcheck.readers.find import find_runs

        found = find_runs(paths, self.host.registry.readers)
        self.readers |= {str(run.path): run.reader.name for run in found if run.reader is not None}
        return found

    def read(self, path: str) -> RecordedRun:
        from healthcheck.readers.find import RunFile, read_run

        registry = self.host.registry
        reader = registry.readers.get(self.readers.get(path, ""))
        found = RunFile(Path(path), reader) if reader is not None else path
        return read_run(found, mapping=self.mapping, pattern=list(self.pattern) or None, registry=registry)


def judge_of(given: Given, old: Given | None = None) -> Callable[[str], Outcome]:
    """Compile once; the judge then takes one path after the other.

    :param old: other rules for the same runs; their report is the outcome's ``extra``.
    """
    from healthcheck.replay.play import RuleCopies, play, replay_report
    from healthcheck.replay.record import record_facts

    versions = [RuleCopies(each.load()) for each in (given, old) if each is not None]

    def judge(path: str) -> Outcome:
        try:
            run = given.read(path)
        except (HealthCheckError, OSError) as error:
            return Outcome(path, problem=str(error))
        facts = record_facts(run, given.host.registry)
        plays, seen = play(run, [copies.fresh() for copies in versions], start_step=facts.start_step, known=facts.known)
        if seen.problem and not seen.batches:
            return Outcome(path, problem=seen.problem)
        run.notes.extend(facts.notes)
        reports = [replay_report(p, run, seen, path=path, resumed_from=facts.resumed_from) for p in plays]
        return Outcome(path, reports[0], extra=None if old is None else reports[1])

    return judge
