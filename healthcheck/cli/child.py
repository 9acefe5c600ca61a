"""Watching this process because one that ``healthcheck run`` started has started it: called by ``healthcheck/site``."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from healthcheck.cli.options import given_reports, given_settings, rule_choice
from healthcheck.core.errors import HealthCheckError
from healthcheck.record.job import Job
from healthcheck.run import current
from healthcheck.run.opening import SessionOptions, program_name, switched_off


def watch_this_process(loaded: Sequence[str] = ()) -> None:
    """Begin, unless somebody watches here already, or this is pytest, whose own plugin does that. Never raises.

    :param loaded: files that this process has loaded by torch so far: one of them may be the checkpoint from which it goes on.
    """
    job = Job.of_environment()
    if job is None or switched_off() or current.current() is not None or "pytest" in sys.modules:
        return
    try:
        _begin(job, loaded)
    except HealthCheckError as error:  # the rules have mistakes: whoever typed the command hears of it, once a process
        job.unreached(f"{program_name()} ({error})")
        sys.stderr.write(f"healthcheck: {program_name()} is not watched: {error}\n")
    except Exception as error:
        job.unreached(f"{program_name()} ({type(error).__name__}: {error})")


def _begin(job: Job, loaded: Sequence[str]) -> None:
    from healthcheck.assembly import open_session
    from healthcheck.instrument.script import ScriptTrainer
    from healthcheck.record.restarts import KeptStates

    args = argparse.Namespace(**job.options)
    with _rank_of_launcher():
        record, first = job.place()
        session = open_session(
            SessionOptions(
                name=program_name(),
                **rule_choice(args),
                settings=given_settings(args),
                plugins=args.plugins,
                strict_plugins=args.strict_plugins,
                reports=given_reports(args.report) if first else None,
                argv=sys.argv,
                record=record,
                rank_zero_comes=job.rank_zero_comes(),
            )
        )
    job.opened(session.info.run_dir, first)
    run_dir = session.info.run_dir
    store = KeptStates(session, run_dir) if run_dir is not None else None
    ScriptTrainer(session, store=store, job=job).watch_from_here(loaded)


@contextlib.contextmanager
def _rank_of_launcher() -> Any:
    """Lightning and others start their ranks with LOCAL_RANK alone."""
    local = os.environ.get("LOCAL_RANK", "")
    if not local.isdigit() or "RANK" in os.environ or os.environ.get("NODE_RANK", "0") != "0":
        yield
        return
    os.environ["RANK"] = local
    try:
        yield
    finally:
        del os.environ["RANK"]
