"""Records under one root, asked through healthcheck's own commands: each in a process with limits, without plugins.

The commands and their JSON are public; what this process holds of a record is only what they print. A run is named by its id
inside the root. Paths are not taken from anybody.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
LONGEST_RULES = 64 * 1024
LARGEST_RECORD = 64 * 2**20
"""Bytes of a record's samples, beyond which they are not judged again."""
LARGEST_ANSWER = 8 * 2**20
SECONDS = 60.0
RULE_KEYS = frozenset({"version", "rules", "metrics", "external"})
"""What inline rules may hold at the top: nothing that reads another file, and no settings."""


class Refused(ValueError):
    """A question that is not answered, with the reason."""


class Records:
    """The runs of one folder.

    :param root: the folder; nothing outside of it is read.
    """

    def __init__(self, root: Path, seconds: float = SECONDS) -> None:
        self.root = root.resolve()
        self.seconds = seconds

    def folder(self, run: str) -> Path:
        """The folder of a run by its id. Raises ``Refused`` for anything else, a link out of the root included."""
        if not ID.fullmatch(run):
            raise Refused("a run is named by its id, as list_runs gives it")
        if run == "latest":
            runs = self.runs()
            if not runs:
                raise Refused("there are no runs yet")
            run = str(runs[0]["name"])
        found = (self.root / run).resolve()
        if found.parent != self.root or not found.is_dir():
            raise Refused(f"there is no run {run}; list_runs has the ids")
        return found

    def runs(self, limit: int = 200) -> list[dict[str, Any]]:
        """Newest first."""
        if not self.root.is_dir():
            return []
        listed = self.ask("runs", str(self.root), "-n", str(limit))
        return sorted((entry for entry in listed if isinstance(entry, dict)), key=_started, reverse=True)

    def ask(self, *arguments: str, files: Mapping[str, str] | None = None) -> Any:
        """The JSON that a command prints. Raises ``Refused`` with its last words where it fails.

        :param files: name -> text of files for it, in a folder of its own where it runs.
        """
        with tempfile.TemporaryDirectory(prefix="healthcheck-mcp-") as folder:
            for name, text in (files or {}).items():
                (Path(folder) / name).write_text(text, encoding="utf-8")
            code, out, err = self._run([*arguments, "--format", "json"], folder)
        try:
            return json.loads(out)
        except ValueError:
            words = " ".join((err or out or f"it ended with {code}").split())
            raise Refused(words.replace(folder + os.sep, "").replace(folder, "")[:600]) from None

    def _run(self, arguments: Sequence[str], folder: str) -> tuple[int, str, str]:
        env = {
            name: value
            for name, value in os.environ.items()
            if name
            in (
                "PATH",
                "HOME",
                "LANG",
                "LC_ALL",
                "TMPDIR",
                "SYSTEMROOT",
                "PYTHONPATH",
                "VIRTUAL_ENV",
                "HEALTHCHECK_CACHE",
            )
        }
        env |= {"HEALTHCHECK_RUNS": str(self.root), "HEALTHCHECK_DISABLE_PLUGINS": "all", "PYTHONIOENCODING": "utf-8"}
        process = subprocess.Popen(
            [sys.executable, "-m", "healthcheck", *arguments],
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        timer = threading.Timer(self.seconds, process.kill)
        timer.start()
        errors: list[bytes] = []
        reader = threading.Thread(target=lambda: errors.append(process.stderr.read(65536)), daemon=True)  # type: ignore[union-attr]
        reader.start()
        try:
            out = process.stdout.read(LARGEST_ANSWER + 1)
            if len(out) > LARGEST_ANSWER:
                process.kill()
                raise Refused(f"the answer is larger than {LARGEST_ANSWER >> 20} MiB")
            code = process.wait()
        finally:
            expired = not timer.is_alive()
            timer.cancel()
            reader.join(1)
            process.stdout.close()
            if not reader.is_alive():
                process.stderr.close()
        if expired and code < 0:
            raise Refused(f"it took longer than {self.seconds:g} seconds")
        return code, out.decode("utf-8", "replace"), b"".join(errors).decode("utf-8", "replace")

    def small_enough(self, folder: Path) -> None:
        """Raise ``Refused`` for a record that is too large to be judged again here."""
        size = sum(path.stat().st_size for path in folder.glob("samples*") if path.is_file())
        if size > LARGEST_RECORD:
            raise Refused(f"its samples are {size >> 20} MiB; here at most {LARGEST_RECORD >> 20} MiB are judged again")


def _started(entry: Mapping[str, Any]) -> tuple[str, str]:
    return str(entry.get("started", "")), str(entry.get("name", ""))


def checked_rules(text: str) -> str:
    """Inline rules that may be judged: no ``extends``, no actions, no settings, no aliases. Raises ``Refused``."""
    if len(text.encode("utf-8", "replace")) > LONGEST_RULES:
        raise Refused(f"rules are longer than {LONGEST_RULES >> 10} KiB")
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
            raise Refused("aliases (*name) are not taken in inline rules")
        content = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        if isinstance(error, Refused):
            raise
        raise Refused(f"the rules are not YAML: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(content, dict):
        raise Refused("rules are a map: version: 1, rules: {name: {metric: loss, when: {above: 5}}}")
    wrong = sorted(str(key) for key in set(content) - RULE_KEYS)
    if wrong:
        raise Refused(f"`{wrong[0]}` is not taken in inline rules; there are {', '.join(sorted(RULE_KEYS))}")
    for name, rule in (content.get("rules") or {}).items() if isinstance(content.get("rules"), dict) else ():
        bodies = [rule, *(rule.get("causes") or {}).values()] if isinstance(rule, dict) else []
        for body in bodies:
            if isinstance(body, dict) and body.get("then"):
                raise Refused(f"rule {name}: `then` is not taken in inline rules: actions have no place in a replay")
    return text


CHANGE = re.compile(r"[A-Za-z0-9][\w.\-]*=[^\r\n]{1,200}")


def checked_changes(changes: Sequence[str]) -> list[str]:
    """``--set RULE.KEY=VALUE`` of each; actions cannot be changed. Raises ``Refused``."""
    options = []
    for change in changes[:50]:
        if not CHANGE.fullmatch(change):
            raise Refused(f"a change is RULE.KEY=VALUE, such as overfit.for=3; found {change[:60]!r}")
        if "then" in change.partition("=")[0].split("."):
            raise Refused("`then` cannot be changed here: actions have no place in a replay")
        options += ["--set", change]
    return options
