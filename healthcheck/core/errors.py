"""What can go wrong, as types. Standard library only.

Every exception carries a ``slug``: the anchor of its entry in ``docs/reference/errors.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from healthcheck.core.text import visible


class HealthCheckError(Exception):
    """Base of every error that healthcheck raises on purpose.

    Catch this to catch all of healthcheck's errors and no others.
    """

    slug: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 3


class UsageError(HealthCheckError):
    """The command line, an argument or a setting cannot be used as given.

    The message says what to write instead. Nothing was run.
    """

    slug = "usage"
    exit_code = 4


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong in one place of a rule file.

    ``line`` and ``column`` count from 1; 0 means the problem concerns the file as a whole
    (or comes from a dict, where ``where`` gives the key path instead).
    """

    path: str
    line: int
    column: int
    slug: str
    message: str
    severity: str = "error"
    suggestion: str = ""
    """What to write instead, as a sentence fragment: ``did you mean "loss"?``."""
    source: str = ""
    """The line of the file, for the caret picture."""
    width: int = 1
    """How many columns the caret underlines."""
    fix: tuple[str, str] | None = None
    """For ``check --fix``: the old and the new text at this place."""

    def __str__(self) -> str:
        place = f"{self.path}:{self.line}:{self.column}" if self.line else self.path
        hint = f" ({self.suggestion})" if self.suggestion else ""
        return f"{place}: {self.severity}[{self.slug}]: {self.message}{hint}"


class RuleFileError(UsageError):
    """Rule files hold mistakes; all of them are in ``problems``. Fix them and run again."""

    slug = "rule-file"

    def __init__(self, problems: list[Problem] | tuple[Problem, ...]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(p) for p in self.problems))


class PluginError(HealthCheckError):
    """A plugin could not be loaded, or does not fit the hook specification.

    Fix the plugin, or switch it off with ``HEALTHCHECK_DISABLE_PLUGINS=name``.
    """

    slug = "plugin"


class UnknownHookError(PluginError, ValueError):
    """A function was registered for an event that does not exist; the message suggests one."""

    slug = "unknown-hook"


class StateError(HealthCheckError):
    """Saved detector state cannot be restored into these rules. Start without it."""

    slug = "state"


class StopTraining(BaseException):
    """A rule asked the run to stop. Let it pass; do not catch it.

    It derives from :class:`BaseException` so that ``except Exception`` round a training step
    does not swallow a deliberate stop. ``rule`` and ``step`` say who stopped the run and when;
    ``exit_code`` is the status the process should end with.
    """

    def __init__(self, message: str, *, rule: str = "", step: int = 0, exit_code: int = 1) -> None:
        super().__init__(message)
        self.rule = rule
        self.step = step
        self.exit_code = exit_code


class HealthCheckFailed(AssertionError):
    """A watched test failed by its rules, or could not be judged. The message is the whole story.

    Mark a test that must fail so with ``pytest.mark.xfail(raises=HealthCheckFailed)``.
    """

    def __init__(self, headline: str, details: Sequence[str] = ()) -> None:
        self.headline = visible(headline)
        # pytest prints this as it is, and quotes it in its summary.
        super().__init__("\n".join(visible(line) for line in (headline, *details)))
