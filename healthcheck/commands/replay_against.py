"""``healthcheck replay --against OLD``: what changes from another version of the rules."""

from __future__ import annotations

import argparse
import functools
import io
import json
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from healthcheck.commands.replay import _jobs, _progress, exit_code_of, say_problems
from healthcheck.commands.replaying import Given, Outcome, judge_of
from healthcheck.errors import UsageError


def against(args: argparse.Namespace, given: Given, paths: Sequence[str], problems: Sequence[Outcome]) -> int:
    """Print only what changes. The exit code is that of the new rules."""
    from healthcheck.replay.against import Change, change_lines, changes
    from healthcheck.replay.pool import judge_all

    with tempfile.TemporaryDirectory() as folder:
        rules = [old_rules(args.against, Path(folder))]
        old = replace(given, choice={"rules": rules, "profile": given.choice.get("profile")})
        old.check()
        outcomes = list(
            _progress(judge_all(paths, functools.partial(judge_of, given, old=old), jobs=_jobs(args.jobs)), len(paths))
        )
    found: list[Change] = []
    for outcome in outcomes:
        if outcome.report:
            found += [
                change
                for change in changes(outcome.path, outcome.report, outcome.extra)
                if not given.choice.get("only") or change.rule in outcome.report["rules"]  # --only narrows the question
            ]
    outcomes = [*outcomes, *problems]
    if args.format == "json":
        print(json.dumps([change.to_json() for change in found], indent=1, allow_nan=False))
    else:
        print("\n".join(change_lines(found, sum(bool(o.report) for o in outcomes))))
    say_problems(outcomes)
    return exit_code_of(outcomes)


def old_rules(text: str, folder: Path) -> str:
    """A file or pack as it is; ``GIT_REV:path`` is taken out of git, with the rule files beside it."""
    from healthcheck.rulelang.sources import is_pack_name

    if Path(text).exists() or ":" not in text:
        return text
    revision, _, path = text.partition(":")
    if not _git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}"):
        if is_pack_name(text):
            return text
        raise UsageError(
            f"healthcheck replay: --against: {revision} is no revision of git here, and {text} is no file or pack"
        )
    inside = _path_in_tree(revision, path)
    parent = str(PurePosixPath(inside).parent)
    packed = _git("archive", "--format=tar", revision, *([] if parent == "." else [parent]))
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive.getmembers():
            if member.isfile() and member.name.endswith((".yaml", ".yml")):
                target = folder / member.name
                content = archive.extractfile(member)
                if content is not None and target.resolve().is_relative_to(folder.resolve()):
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(content.read())
    return str(folder / inside)


def _path_in_tree(revision: str, path: str) -> str:
    """Git counts from the top of the repository; people also from where they stand."""
    prefix = _git("rev-parse", "--show-prefix").decode().strip()
    top = PurePosixPath(path.removeprefix("./"))
    here = PurePosixPath(prefix) / top
    for candidate in dict.fromkeys([str(here), str(top)] if path.startswith("./") else [str(top), str(here)]):
        if _git("cat-file", "-t", f"{revision}:{candidate}").strip() == b"blob":
            return candidate
    raise UsageError(f"healthcheck replay: --against: there is no {path} in {revision}")


def _git(*words: str) -> bytes:
    """Standard output of git, from the top of the repository where it matters; empty if it fails."""
    where = ["git"]
    if words[0] == "archive":
        top = _git("rev-parse", "--show-toplevel").decode().strip()
        where += ["-C", top]
    try:
        done = subprocess.run([*where, *words], capture_output=True, check=False)
    except FileNotFoundError:
        raise UsageError("healthcheck replay: --against REV:path needs git") from None
    return done.stdout if done.returncode == 0 else b""
