"""``healthcheck schema``: the JSON Schema of rule files, with what the installed plugins add."""

from __future__ import annotations

import argparse
from pathlib import Path

from healthcheck.cli.options import add_plugin_option, loaded_host
from healthcheck.core.errors import UsageError

NAME = "schema"
HELP = "print the JSON Schema of rule files, with the installed plugins' conditions and actions"

LOCAL_NAME = "healthcheck-rules.v1.schema.json"
"""The copy beside rule files that an editor's first-line pointer names."""
POINTER = f"# yaml-language-server: $schema=./{LOCAL_NAME}"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--install",
        nargs="?",
        const=".",
        metavar="FOLDER",
        help=f"write it as {LOCAL_NAME} into FOLDER (default: here), for editors; run again after adding a plugin",
    )
    add_plugin_option(parser)


def schema_text(args: argparse.Namespace | None = None) -> str:
    """The schema with the conditions and actions of the plugins here; ``init`` writes it too."""
    from healthcheck.rulelang.schema import build_schema, dump_schema

    return dump_schema(build_schema(loaded_host(args).registry))


def main(args: argparse.Namespace) -> int:
    text = schema_text(args)
    if args.install is None:
        print(text, end="")
        return 0
    target = Path(args.install) / LOCAL_NAME
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}") from None
    print(f"wrote {target}; make this the first line of your rule files:\n{POINTER}")
    return 0
