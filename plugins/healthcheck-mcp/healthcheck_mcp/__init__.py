"""What healthcheck sees of healthcheck-mcp: the command ``healthcheck mcp``."""

from __future__ import annotations

from collections.abc import Callable

from healthcheck import hookimpl


@hookimpl
def healthcheck_add_commands(register: Callable[[str, str, Callable[[list[str]], int]], None]) -> None:
    """``healthcheck mcp --root healthcheck-runs``."""
    register("mcp", "serve records to coding agents (Model Context Protocol over stdio)", _main)


def _main(argv: list[str]) -> int:
    from healthcheck_mcp.server import main  # the SDK is only needed for this command

    return main(argv)
