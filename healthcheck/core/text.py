"""Numbers, bytes and durations as people read them, text that fits, strict JSON as programs read it, and foreign text that is
safe to show.

Standard library only.
"""

from __future__ import annotations

import json
import math
import os
import re
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO


def number(value: float | None, unit: str = "") -> str:
    """A number with three to four significant digits: ``2.31``, ``14,200``, ``3e-04``, ``nan``; ``-`` for None.

    :param unit: the unit of :class:`~healthcheck.core.samples.Metric`: ``bytes``, ``s``, ``fraction``,
        ``1/s`` or empty.
    """
    if value is None:
        return "-"
    value = float(value)
    if not math.isfinite(value):
        return _not_finite(value)
    if unit == "bytes":
        return size_text(value)
    if unit == "s":
        return _seconds(value)
    if unit == "fraction":
        return f"{_plain(value * 100)} %"
    if unit in ("1/s", "/s"):
        return f"{_plain(value)}/s"
    return _plain(value)


def _plain(value: float) -> str:
    """A finite number without a unit."""
    size = abs(value)
    if size >= 1e7 or 0 < size < 1e-3:
        return f"{value:.3g}"
    if value == int(value):
        return f"{int(value):,}"
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 100:
        return f"{value:.1f}"
    if size >= 1:
        # Up to 9.995 two decimals are three digits; above it they would round to four ("10.00").
        return f"{value:.2f}" if size < 9.995 else f"{value:.1f}"
    return f"{value:.3g}"


def in_message(value: float, *, whole: bool = False) -> str:
    """A number in the message of a rule: ``1,502`` where it counts something, else four digits: ``2.043``.

    :param whole: round to a whole number, for steps and counts that arrive as floats.
    """
    if not math.isfinite(value):
        return _not_finite(value)
    # A float holds every whole number up to 2**53, about 9e15; of a larger one the last digits would be invented.
    if whole or (isinstance(value, int) and abs(value) < 10**15):
        return f"{int(value):,}"
    if value == int(value) and 1e4 <= abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.4g}"


def aligned(value: float | None) -> str:
    """Four digits, trailing zeros kept, so that a column of them can be compared: ``9.000``, ``139.6``, ``1.2e+07``."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return _not_finite(value)
    size = abs(value)
    if value and not 1e-3 <= size < 1e6:
        return f"{value:.3g}"
    return f"{value:.{max(0, 4 - len(str(int(size))))}f}"


def as_written(value: float) -> str:
    """A threshold as a rule file has it, without separators: ``8``, ``0.3``, ``1e-07``, ``16777216``."""
    if value == int(value) and abs(value) < 1e15:
        return str(int(value))
    return f"{value:.6g}"


def power(value: float) -> str:
    """The size of a number at a glance: ``65504.0`` -> ``6.55e4``."""
    digits, _, exponent = f"{value:.3g}".partition("e")
    return f"{digits}e{int(exponent)}" if exponent else digits


def _not_finite(value: float) -> str:
    return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")


def size_text(count: float) -> str:
    """Bytes: ``812 MiB``, ``21.4 GiB``. Powers of 1024, as torch and the operating system count memory."""
    value = float(count)
    if not math.isfinite(value):
        return _not_finite(value)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024.0 or unit == "TiB":
            return f"{value:.0f} {unit}" if unit == "B" or abs(value) >= 100 else f"{value:.3g} {unit}"
        value /= 1024.0
    raise AssertionError("the loop returns at TiB")


def _seconds(value: float) -> str:
    """``2.66 ms``, ``250 ms``, ``12.4 s``, ``5 m 12 s``."""
    if 0 < abs(value) < 1e-4:
        return f"{_plain(value * 1e6)} us"
    if 0 < abs(value) < 1:
        return f"{_plain(value * 1e3)} ms"
    return duration(value) if value >= 100 else f"{_plain(value)} s"


def duration(seconds: float) -> str:
    """``0.4 s``, ``41 s``, ``5 m 12 s``, ``1 h 10 min``, ``3 d 4 h``, ``10 years``; ``unknown`` if it is not finite."""
    if not math.isfinite(seconds):
        return "unknown"
    seconds = max(0.0, seconds)
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} m {whole % 60} s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    hours = round(seconds / 3600)
    if hours >= 2 * 365 * 24:
        return f"{hours / (365 * 24):.0f} years"
    return f"{hours // 24} d {hours % 24} h"


def time_left(seconds: float) -> str:
    """``2h 34m``, ``5m 12s``, ``42s``: of a steady width, for a display that is drawn over itself."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, last = divmod(rest, 60)
    if hours:
        return f"{hours}h {minutes:02d}m"
    return f"{minutes}m {last:02d}s" if minutes else f"{last}s"


def moment(seconds: float) -> str:
    """``2026-11-28 01:27``, local time: what people compare with their clock. Files hold UTC.

    :param seconds: since the epoch.
    """
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def step(n: int) -> str:
    """``1,502``."""
    return f"{n:,}"


def plural(n: int, word: str, many: str = "") -> str:
    """``1 alert``, ``3 alerts``, ``1,560 steps``."""
    return f"{n:,} {word if n == 1 else many or word + 's'}"


def shorten(names: Sequence[str], most: int = 4) -> str:
    """``a, b, c`` or ``a, b, c and 9 more``."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most:,} more"


def one_line(text: str, limit: int = 60) -> str:
    """Text for a message: one line, no control characters, not longer than ``limit``."""
    clean = "".join(c if c.isprintable() else " " for c in text)
    return clean if len(clean) <= limit else clean[: limit - 3] + "..."


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The known word that is most like another one; empty if none is like it.

    :param cutoff: how much alike they must be: 0 to 1, the ratio of ``difflib``.
    """
    import difflib  # 0.4 MiB, for words that are not known

    close = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return close[0] if close else ""


def suggest(word: str, known: Iterable[str]) -> str:
    """``did you mean "loss"?`` or an empty string."""
    near = nearest(word, known)
    return f'did you mean "{near}"?' if near else ""


# --------------------------------------------------------------------------------------------------
# Text that fits a terminal.


UNKNOWN_WIDTH = 80
NARROWEST, WIDEST = 40, 200


def width_of(stream: TextIO | None) -> int:
    """Columns of what a stream writes to: ``COLUMNS``, else its terminal's, else 80."""
    wanted = os.environ.get("COLUMNS", "")
    width = int(wanted) if wanted.isdigit() else 0
    if width <= 0:
        try:
            width = os.get_terminal_size(stream.fileno()).columns if stream is not None and stream.isatty() else 0
        except (OSError, ValueError, AttributeError):
            width = 0
    return min(WIDEST, max(NARROWEST, width or UNKNOWN_WIDTH))


def fitting(width: int, *candidates: str) -> str:
    """The first of these texts that fits, else the last."""
    return next((text for text in candidates if len(text) <= width), candidates[-1])


def wrapped(text: str, width: int, indent: str = "", first: str | None = None) -> list[str]:
    """A text in lines of at most ``width`` characters; a word that is longer has a line of its own.

    :param indent: before every line.
    :param first: before the first line instead.
    """
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent if first is None else first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


# --------------------------------------------------------------------------------------------------
# Any value as strict JSON: no NaN literals, no objects that JSON lacks.


def encode_number(value: float | None) -> float | str | None:
    """Strict JSON for any number: non-finite values become ``"nan"``, ``"inf"``, ``"-inf"``."""
    return value if value is None or math.isfinite(value) else _not_finite(value)


def decode_number(value: Any) -> float:
    """The inverse of :func:`encode_number`."""
    return float(value)


def strict(value: Any) -> Any:
    """The same value in plain JSON types; what is unknown becomes its text.

    A plugin may add a NaN or a tensor to the report; that must not cost the user the report.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return encode_number(value)
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [strict(item) for item in value]
    return str(value)


def dump_line(value: Any) -> bytes:
    """One line of a JSON-lines file."""
    return json.dumps(strict(value), separators=(",", ":"), allow_nan=False).encode() + b"\n"


_LONG = re.compile(r"\d{300}")


def has_huge_number(text: str) -> bool:
    """Whether JSON may hold a whole number beyond the range of a float: then it is for :func:`load_json`."""
    return len(text) >= 300 and _LONG.search(text) is not None


def load_json(text: str | bytes) -> Any:
    """JSON from anywhere. A whole number beyond the range of a float is infinite, as the same number with a point is.

    Raises ``ValueError`` for what is no JSON, a number of thousands of digits and nesting without end included.
    """
    try:
        huge = has_huge_number(text if isinstance(text, str) else text.decode("utf-8", "replace"))
        return json.loads(text, parse_int=_whole) if huge else json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _whole(digits: str) -> int | float:
    return int(digits) if len(digits) < 300 else float(digits)


# --------------------------------------------------------------------------------------------------
# Text from outside: messages, names of metrics, parameters, files and runs, what exceptions say.
#
# It passes here on its way to a terminal, a log, a CI summary or a page. JSON has escapes of its own and stays raw.

_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # control characters, those of C1 too: a terminal obeys them
    "\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"  # unseen, or turning
    "\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]"  # no characters at all: bytes of a file name that are no UTF-8
)
_COMMAND = re.compile(r"^\s*::|##(?=\w*\[)")
"""What a CI system takes for a command in the output of a job: ``::error::`` of GitHub at the beginning of a line,
``##[error]`` and ``##vso[...]`` of Azure, ``##teamcity[...]``."""


def visible(text: str) -> str:
    """Text from anywhere as one line that shows all it holds and does nothing.

    Control characters, line breaks, characters that turn the direction of writing or are not seen become escapes as in
    Python (``\\x1b``, ``\\u202e``), and so do the first signs of what a CI system would take for a command.
    """
    if text.isascii() and text.isprintable() and "::" not in text and "##" not in text:
        return text
    return _COMMAND.sub(_disarmed, _UNSAFE.sub(_escape, text))


def visible_lines(text: str) -> str:
    """The same for text of several lines, such as a traceback: line breaks and tabs stay what they are."""
    return "\n".join("\t".join(map(visible, line.split("\t"))) for line in text.split("\n"))


def _escape(match: re.Match[str]) -> str:
    return ascii(match[0])[1:-1]


def _disarmed(match: re.Match[str]) -> str:
    head = match[0]
    return f"{head[:-1]}\\x{ord(head[-1]):02x}"
