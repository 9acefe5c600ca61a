"""``healthcheck check``: every mistake of every rule file, before a run has to find them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from healthcheck.cli.options import add_format, add_plugin_option, add_profile, loaded_host, print_json
from healthcheck.cli.outlet import print_commands
from healthcheck.cli.usage import may_be_brought, misplaced, plugin_options
from healthcheck.core.errors import Problem, UsageError
from healthcheck.core.text import plural, step
from healthcheck.record.lines import read_samples
from healthcheck.record.runs import Run, latest_run
from healthcheck.record.segments import newest_lines
from healthcheck.rulelang.rule import Cause

if TYPE_CHECKING:
    from healthcheck.extend.registry import Registry
    from healthcheck.rulelang.compile import Loaded

PASSES = 3
"""How often ``--fix`` looks again: one mistake may hide another, in the same file or in one that extends it."""

NAME = "check"
HELP = "check rule files: all mistakes at once, with line and column"

ACCEPTED = "healthcheck-accepted.yaml"
SKIPPED_FOLDERS = {"node_modules", "healthcheck-runs", "__pycache__"}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        help="rule files, packs or folders (default: the rules that `run` would use here)",
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="one line for each problem")
    add_profile(parser, "check with this profile only (default: without one, then with each)")
    parser.add_argument(
        "--print-config", action="store_true", help="print the effective rules and where each key came from"
    )
    parser.add_argument(
        "--fix", action="store_true", help="rewrite renamed rule ids, names that other tools use, and clear typos"
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="a name that a configured, not loaded plugin may bring is an error (exit 4)",
    )
    add_format(parser, "github", help="json: for scripts; github: annotations")
    add_plugin_option(parser)


def main(args: argparse.Namespace) -> int:
    from healthcheck.assembly import not_loaded_for_reading
    from healthcheck.rulelang.problems import ordered

    host, waiting = loaded_host(args), not_loaded_for_reading(args.plugins)
    groups, notes = _sources(args.paths)
    for note in notes:
        print(f"healthcheck: {note}", file=sys.stderr)
    results = [_check(sources, host.registry, args.profile) for sources in groups]
    mended: list[Problem] = []
    for _ in range(PASSES if args.fix else 0):
        done = _fix([p for _, problems in results for p in problems], results)
        if not done:
            break
        mended += done
        results = [_check(sources, host.registry, args.profile) for sources in groups]
    problems = ordered(_unique(p for _, found in results for p in found))
    problems = [_not_checked(problem, waiting, strict=args.strict) for problem in problems]
    _say(problems, mended, results, args)
    if args.print_config and args.format != "json":
        from healthcheck.rulelang.origins import config_text

        for loaded, _ in results:
            print(config_text(loaded))
    return 4 if any(p.severity == "error" for p in problems) else 0


def _check(sources: Sequence[Any], registry: Registry, profile: str | None) -> tuple[Loaded, list[Problem]]:
    """Load without a profile and once with each, so that a mistake in a profile is found here."""
    from healthcheck.rulelang.compile import load_all

    loaded = load_all(sources, registry=registry, profile=profile)
    problems = [*loaded.problems, *_reports(loaded, registry), *_without_basis(loaded, sources)]
    if not profile:
        for name in loaded.merged.profiles:
            found = load_all(sources, registry=registry, profile=name).problems
            problems += [p for p in found if p.slug != "rule-is-off"]  # a profile may switch off what the file changes
    # Advice about a pack that is only extended is for its author; here nobody can take it.
    own = {document.path for document in loaded.documents if document.own} | {str(source) for source in sources}
    return loaded, _unique(p for p in problems if p.severity == "error" or p.path in own)


def _not_checked(problem: Problem, waiting: Sequence[str], *, strict: bool) -> Problem:
    """A name that nobody knows, where plugins are configured that a reading command does not load: nobody can say."""
    if not waiting or not may_be_brought(problem):
        return problem
    return replace(
        problem,
        severity="error" if strict else "warning",
        slug="not-checked",
        message=f"not checked: {problem.message}",
        suggestion=f"a plugin that is configured here may bring it; it loads with {plugin_options(waiting)}",
        fix=None,
    )


def _reports(loaded: Loaded, registry: Registry) -> Iterator[Problem]:
    """Mistakes in ``settings: {report: ...}``: which kinds exist is known to the reports, not to the rule language."""
    from healthcheck.reports.files import kinds_of, read_reports

    entry = loaded.merged.settings.get("report")
    if entry is None:
        return
    names = list(entry.value) if isinstance(entry.value, Mapping) else None
    for index, text in read_reports(entry.value, kinds_of(registry.reports))[1]:
        inner: tuple[str | int, ...] = (names[index],) if names else () if isinstance(entry.value, str) else (index,)
        yield entry.document.problem((*entry.where, *inner), "bad-report", text, key=names is not None)


def _without_basis(loaded: Loaded, sources: Sequence[Any]) -> Iterator[Problem]:
    """Causes of a shipped pack that do not say what they rest on. Nobody asks that of anybody's own rules."""
    from healthcheck.rulelang.sources import is_pack_name, is_shipped

    def place(source: str) -> str:
        return source if is_pack_name(source) else str(Path(source).resolve())

    shipped = {place(str(source)) for source in sources if is_shipped(str(source))}
    if not shipped:
        return
    for cause in loaded.ruleset.causes:
        draft = loaded.merged.draft_of(cause)
        if not cause.basis and place(draft.document.path) in shipped:
            text = f"{cause.id} does not say what it rests on"
            hint = 'add `basis: ["a paper, an issue or a page of documentation"]`'
            yield draft.document.problem(draft.where, "no-basis", text, key=True, suggestion=hint)


def _unique(problems: Any) -> list[Problem]:
    seen: dict[tuple[Any, ...], Problem] = {}
    for problem in problems:
        seen.setdefault((problem.path, problem.line, problem.column, problem.slug, problem.message), problem)
    return list(seen.values())


# --------------------------------------------------------------------------- what to check


def _sources(paths: Sequence[str]) -> tuple[list[list[Any]], list[str]]:
    """Each group is checked on its own: files beside each other need not belong together."""
    from healthcheck.rulelang.discover import discover
    from healthcheck.rulelang.sources import is_pack_name

    if not paths:
        found = discover()
        return [found.sources], [*found.notes, f"checking {found.label}"]
    groups: list[list[Any]] = []
    for text in paths:
        path = Path(text)
        answer = misplaced(NAME, [text])
        if answer:
            raise UsageError(answer)
        if is_pack_name(text) and not path.exists():
            groups.append([text])
        elif path.is_dir():
            files = list(_rule_files(path))
            if not files:
                raise UsageError(
                    f"{text}: no rule files in this folder (files named healthcheck*.yaml, or YAML with `version: 1`)"
                )
            groups.extend([str(file)] for file in files)
        else:
            groups.append([text])
    return groups, []


def _rule_files(folder: Path) -> Iterator[Path]:
    """Rule files below a folder: named so, or YAML that says ``version`` and has rules."""
    for path in sorted([*folder.rglob("*.yaml"), *folder.rglob("*.yml")]):
        inner = path.relative_to(folder).parts[:-1]
        if (
            any(part in SKIPPED_FOLDERS or part.startswith(".") for part in inner)
            or ".hctest." in path.name
            or path.name == ACCEPTED
        ):
            continue
        if not path.is_file():  # a pipe would be waited for
            continue
        if path.name.startswith("healthcheck"):
            yield path
            continue
        try:
            with path.open(encoding="utf-8", errors="replace") as stream:
                head = stream.read(65536)
        except OSError:
            continue
        lines = head.splitlines()
        if any(line.startswith("version:") for line in lines) and any(
            line.startswith(("rules:", "extends:")) for line in lines
        ):
            yield path


# --------------------------------------------------------------------------- what to say


def _fix(problems: list[Problem], results: list[tuple[Loaded, list[Problem]]]) -> list[Problem]:
    from healthcheck.rulelang.problems import fix_file, fixable

    own = {d.path for loaded, _ in results for d in loaded.documents if d.own and d.lines}
    done: list[Problem] = []
    for path in dict.fromkeys(p.path for p in problems if p.path in own and fixable(p)):
        try:
            done += fix_file(Path(path), [p for p in problems if p.path == path])
        except OSError as error:
            raise UsageError(f"{path} cannot be rewritten: {error.strerror}") from None
    return done


def _say(
    problems: list[Problem],
    mended: list[Problem],
    results: list[tuple[Loaded, list[Problem]]],
    args: argparse.Namespace,
) -> None:
    from healthcheck.rulelang import problems as rendering

    errors = sum(p.severity == "error" for p in problems)
    warnings = len(problems) - errors
    rules = sum(len(loaded.ruleset.rules) for loaded, _ in results)
    if args.format == "json":
        shaped: dict[str, Any] = {
            "errors": errors,
            "warnings": warnings,
            "rules": rules,
            "problems": [rendering.to_json(p) for p in problems],
        }
        if args.fix:
            shaped["fixed"] = [rendering.to_json(p) for p in mended]
        if args.print_config:
            from healthcheck.rulelang.origins import config_json

            shaped["config"] = [config_json(loaded) for loaded, _ in results]
        print_json(shaped)
        return
    if args.format == "github":
        if problems:
            print_commands(rendering.render_github(problems))
    else:
        for problem in mended:
            assert problem.fix is not None
            print(f"fixed {problem.path}:{problem.line}: {problem.fix[0]} -> {problem.fix[1]}")
        if problems:
            print(rendering.render_text(problems, quiet=args.quiet))
    if args.quiet:
        return
    if args.format == "text" and not errors:
        own = {d.path for loaded, _ in results for d in loaded.documents if d.own}
        for line in rate_lines(
            rule for loaded, _ in results for rule in loaded.ruleset.causes if rule.origin.path in own
        ):
            print(line)
    print(_closing(errors, warnings, rules))


def _closing(errors: int, warnings: int, rules: int) -> str:
    count = ", ".join(plural(n, word) for n, word in ((errors, "error"), (warnings, "warning")) if n)
    if errors:
        return f"{count}; nothing was run"
    return f"ok: {plural(rules, 'rule')}" + (f", {count}" if count else "")


# --------------------------------------------------------------------------- how many steps a count of samples is

# `for: 3` counts samples. Where a metric is logged every 500 steps that is 1,500 steps, which surprises people.

TAIL = 2**20
"""Bytes of a record that are read: its end says how often a metric comes, and `check` stays quick."""
SPARSE = 2.0
"""Steps between two samples from which a count of samples is worth a line."""


def rate_lines(rules: Iterable[Cause]) -> list[str]:
    """One line for each rule whose counts of samples are many steps in the latest run; empty without a run.

    ``eval-loss-up: 3 samples are about 1,500 steps at your logging rate``, and the run that says so.
    """
    run = latest_run()
    if run is None:
        return []
    rates = steps_per_sample(run)
    lines = []
    for rule in rules:
        rate = rates.get(rule.selector.metric, 1.0)
        counts = {
            "for": rule.hold.of if not rule.hold.seconds else 1,
            "window": rule.condition.window,
            "min_samples": rule.min_samples,
            "error_after": rule.error_after,
            "warmup": int(rule.warmup.amount) if rule.warmup.unit == "samples" else 0,
        }
        counted = [
            f"`{key}` of {plural(count, 'sample')} is about {step(round(count * rate))} steps"
            for key, count in counts.items()
            if count > 1
        ]
        if counted and rate >= SPARSE:
            lines.append(f"  {rule.id}: {rule.selector.metric} comes every {rate:,.0f} steps; {', '.join(counted)}")
    return [f"at the logging rate of {run.shown}", *lines] if lines else []


def steps_per_sample(run: Run) -> dict[str, float]:
    """Metric -> median number of steps between two samples, from the end of the record."""
    try:
        lines = newest_lines(run.folder, TAIL)
    except OSError:
        return {}
    steps: dict[str, set[int]] = {}
    for batch in read_samples(lines).batches:
        for sample in batch.samples:
            steps.setdefault(sample.metric, set()).add(sample.step)
    return {
        name: median(after - before for before, after in pairwise(sorted(seen)))
        for name, seen in steps.items()
        if len(seen) > 1
    }
