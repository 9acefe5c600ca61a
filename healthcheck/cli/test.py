"""``healthcheck test``: runs rule tests. pytest underneath, so that -k, -x and JUnit come free."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from healthcheck.cli.options import add_plugin_option
from healthcheck.cli.usage import nearest_file
from healthcheck.core.text import plural

NAME = "test"
HELP = "run rule tests (*.hctest.yaml)"

AUTOLOAD = "PYTEST_DISABLE_PLUGIN_AUTOLOAD"

OK, FAILED, BAD_FILES, NOTHING = 0, 1, 4, 5
"""Exit codes; pytest's own mean the same for 0, 1 and 5, and 4 is ours for files that cannot be read."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "run rule tests (*.hctest.yaml): series in a short notation, played through the real engine"
    parser.add_argument(
        "paths", nargs="*", metavar="PATH", help="test files or folders (default: this folder and below)"
    )
    parser.add_argument(
        "-k", dest="keyword", metavar="EXPR", default="", help="only tests whose name matches, as in pytest"
    )
    parser.add_argument("-x", dest="first", action="store_true", help="stop after the first failure")
    parser.add_argument("-q", "--quiet", action="store_true", help="less output")
    parser.add_argument("-v", "--verbose", action="store_true", help="one line per test")
    parser.add_argument(
        "--coverage",
        nargs="?",
        const="list",
        choices=("list", "strict"),
        help="list rules without a firing or without a silent test; strict: exit 1 if there are any",
    )
    parser.add_argument("-n", dest="workers", metavar="N", help="run in N processes (needs pytest-xdist)")
    parser.add_argument("--junit", metavar="FILE", help="write JUnit XML")
    add_plugin_option(parser)


def main(args: argparse.Namespace) -> int:
    """Exit code: 0 passed, 1 failures, 2 interrupted, 3 internal, 4 bad files, 5 nothing collected."""
    for path in args.paths:
        if not Path(path).exists():
            near = nearest_file(path, Path(path).parent, "*.hctest.yaml")
            return _usage(f"there is no {path}{'; ' if near else ''}{near}")
        if Path(path).is_file() and not path.endswith(".hctest.yaml"):
            hint = f"; to check it: healthcheck check {path}" if path.endswith((".yaml", ".yml")) else ""
            return _usage(f"{path} is not a rule test (*.hctest.yaml){hint}")
    if args.workers and importlib.util.find_spec("xdist") is None:
        return _usage("-n needs pytest-xdist: pip install pytest-xdist")
    import pytest

    watcher = _Watcher()
    with _without_autoload():
        code = int(pytest.main(_options(args), plugins=[watcher]))
    if watcher.bad_files:
        return BAD_FILES
    if code == NOTHING:
        found = "no rule tests (*.hctest.yaml) found"
        if watcher.left_out:
            found = f"none of {plural(watcher.left_out, 'rule test')} has a name that matches -k {args.keyword}"
        print(f"healthcheck test: {found}", file=sys.stderr)
    if code == OK and args.coverage == "strict" and watcher.uncovered:
        return FAILED
    return code


def _options(args: argparse.Namespace) -> list[str]:
    """pytest without the project's own configuration: a rule test needs none of it."""
    options = [
        f"--rootdir={os.getcwd()}",
        f"-c{os.devnull}",
        "--noconftest",
        "--no-header",
        "-rN",  # each failure is a block of its own; a list of them below would say it again
        "--assert=plain",
        "--continue-on-collection-errors",
        "-pno:cacheprovider",
        "-pno:healthcheck",  # the entry point, if installed: the next line loads the same module
        "-phealthcheck.pytesting.plugin",
    ]
    options.append("-opython_files=")  # a folder of rules may hold test_*.py: not ours to run
    options += [f"--healthcheck-plugin={name}" for name in args.plugins]
    if args.keyword:
        options.append(f"-k{args.keyword}")
    for wanted, option in ((args.first, "-x"), (args.quiet, "-q"), (args.verbose, "-v")):
        if wanted:
            options.append(option)
    if args.workers:
        options += ["-pxdist", f"-n{args.workers}"]
    if args.coverage:
        options.append("--healthcheck-coverage")
    if args.junit:
        options.append(f"--junitxml={args.junit}")
    return options + [str(path) for path in (args.paths or ["."])]


@contextlib.contextmanager
def _without_autoload() -> Iterator[None]:
    """Rule tests need none of the pytest plugins that are installed; some take seconds to import."""
    before = os.environ.get(AUTOLOAD)
    os.environ[AUTOLOAD] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(AUTOLOAD, None)
        else:
            os.environ[AUTOLOAD] = before


class _Watcher:
    """Rides along in pytest: tells bad files from failed tests, keeps packages from being imported."""

    def __init__(self) -> None:
        self.bad_files = False
        self.uncovered = False
        self.left_out = 0

    def pytest_deselected(self, items: Any) -> None:
        self.left_out += len(items)

    def pytest_collectreport(self, report: Any) -> None:
        self.bad_files = self.bad_files or bool(report.failed)

    def pytest_exception_interact(self, call: Any) -> None:
        from healthcheck.pytesting.ruletests import BadRuleTestFile

        self.bad_files = self.bad_files or isinstance(call.excinfo.value, BadRuleTestFile)

    def pytest_collect_directory(self, path: Path, parent: Any) -> Any:
        """A folder is a folder: with its own collector pytest would import ``__init__.py``."""
        import pytest

        return pytest.Dir.from_parent(parent, path=path)

    def pytest_sessionfinish(self, session: Any) -> None:
        coverage = session.config.pluginmanager.get_plugin("healthcheck-coverage")
        self.uncovered = coverage is not None and bool(coverage.missing())


def _usage(message: str) -> int:
    print(f"healthcheck test: {message}", file=sys.stderr)
    return BAD_FILES
