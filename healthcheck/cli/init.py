"""``healthcheck init``: a short rule file to start from, and the schema for editors."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from healthcheck.cli.schema import LOCAL_NAME, POINTER, schema_text
from healthcheck.core.errors import UsageError

NAME = "init"
HELP = "write a healthcheck.yaml to start from, and the schema for editors"

RULE_FILE = "healthcheck.yaml"

_OBSERVE = """\
  mode: observe        # watch and report, never act; delete this line to let rules stop a run
"""

_TEMPLATE = """\
# Rules of healthcheck. After an edit: healthcheck check. What is watched now: healthcheck plan
version: 1
extends: [healthcheck:recommended]

settings:
{mode}  fail_on: error       # `healthcheck run` exits with 1 from this severity on: info, warning, error, never

rules:
  # An inherited rule by its id: a severity, or off, or a map with the keys to replace.
  spike: warning

  # A rule of your own. In the script: healthcheck.log(kl=kl)
  # kl-too-high:
  #   metric: kl
  #   when: {{above: 0.2}}
  #   for: 3 of 5        # samples

# external: [kl]         # declares the metrics that your script logs
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--observe", action="store_true", help="the file says `mode: observe`: report, never act")
    parser.add_argument("--force", action="store_true", help="overwrite files that exist")


def main(args: argparse.Namespace) -> int:
    rule_file, schema_file = Path(RULE_FILE), Path(LOCAL_NAME)
    if not args.force and rule_file.exists():
        raise UsageError(
            f"{RULE_FILE} exists here already and was not touched; to overwrite it: healthcheck init --force"
        )
    schema = None if schema_file.exists() and not args.force else schema_text()
    text = _TEMPLATE.format(mode=_OBSERVE if args.observe else "")
    if schema is not None or schema_file.exists():
        text = f"{POINTER}\n{text}"
    try:
        rule_file.write_text(text, encoding="utf-8")
        if schema is not None:
            schema_file.write_text(schema, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write here: {error.strerror or error} ({Path.cwd()})") from error
    mode = (
        "observe mode: it reports and never acts"
        if args.observe
        else "only non-finite losses and gradients may stop a run"
    )
    print(f"wrote {RULE_FILE} ({mode})")
    if schema is not None:
        print(f"wrote {LOCAL_NAME} for completion in editors")
    # A rule file beats the table in pyproject.toml, settings included: whoever has one should hear of it now.
    shadowed = pyproject_with_settings(Path.cwd())
    if shadowed is not None:
        print(
            f"note: {RULE_FILE} is used from now on and [tool.healthcheck] of {shadowed} is not; move its settings here"
        )
    print("next: healthcheck check, then healthcheck run your_script.py")
    return 0


def pyproject_with_settings(start: Path) -> Path | None:
    """The nearest ``pyproject.toml`` that has a table ``[tool.healthcheck]``, up to the repository's root."""
    for folder in (start, *start.parents):
        path = folder / "pyproject.toml"
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            text = ""
        if re.search(r"^\s*\[tool\.healthcheck[\].]", text, re.MULTILINE):
            return path if folder != start else Path("pyproject.toml")
        if (folder / ".git").exists():
            return None
    return None
