"""The series notation of rule tests: ``2.0~0.05 x300, 9.0 x5, nan, _ x3, gap 400s``.

================  ==========================================================
``9.0 x5``        exactly five samples of 9.0 (no ``x``: one)
``3.0..2.0 x100`` a ramp: the first sample is 3.0, the last 2.0
``2.0~0.05 x300`` normal noise with standard deviation 0.05 around 2.0
``nan inf -inf``  what a broken run logs
``_ x3``          three steps without a sample
``gap 400s``      the clock moves on and nothing happens
================  ==========================================================

Numbers may carry units (``16MiB``, ``30%``, ``300ms``). Noise is seeded with text, so the same
test sees the same numbers on every machine and Python version.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from healthcheck.core.text import one_line
from healthcheck.rulelang.quantities import QuantityError, duration_or_none, parse_quantity

LONGEST_SERIES = 1_000_000
"""Samples of one series at most: a typo such as ``x3000000`` should not eat the machine."""

_NUMBER = r"[-+]?(?:\d[\d_]*(?:\.\d[\d_]*)?|\.\d[\d_]*)(?:[eE][-+]?\d+)?(?:[A-WYZa-wyz%][A-Za-z%]*)?"
_PIECE = re.compile(
    rf"""(?P<value> _ | [-+]?\.?(?:nan|inf|infinity)\b | {_NUMBER} )
         (?: \s*\.\.\s* (?P<end> {_NUMBER} ) )?
         (?: \s*~\s* (?P<noise> {_NUMBER} ) )?
         (?: \s*[x*]\s* (?P<count> \d[\d_]* ) )?""",
    re.VERBOSE | re.IGNORECASE,
)
_GAP = re.compile(r"gap\b\s*(?P<length>.*)", re.IGNORECASE | re.DOTALL)
_NAMES = {"nan": math.nan, "inf": math.inf, "infinity": math.inf}


class NotationError(ValueError):
    """A series cannot be read. ``start`` and ``width`` mark the offending part of the text, from 0."""

    def __init__(self, message: str, start: int, width: int, suggestion: str = "") -> None:
        super().__init__(message)
        self.start = start
        self.width = max(1, width)
        self.suggestion = suggestion


@dataclass(frozen=True, slots=True)
class Piece:
    """One entry of a series: a run of samples, or a gap."""

    count: int = 1
    value: float | None = None
    """None: missing."""
    end: float | None = None
    """Last value of a ramp."""
    noise: float = 0.0
    """Standard deviation."""
    gap: float = 0.0
    """Seconds; such a piece has no samples."""


@dataclass(slots=True)
class Values:
    """A series written out: one entry per step, None where no sample comes."""

    values: list[float | None] = field(default_factory=list)
    gaps: dict[int, float] = field(default_factory=dict)
    """Index of a value (or the length, at the end) -> seconds that pass before it."""


def parse_series(text: str) -> list[Piece]:
    """Read the notation.

    Raises ``NotationError``, which marks the part that cannot be read.
    """
    pieces: list[Piece] = []
    total = 0
    for start, part in _parts(text):
        piece = _gap(part, start) or _run(part, start)
        total += 0 if piece.gap else piece.count
        if total > LONGEST_SERIES:
            raise NotationError(f"a series of more than {LONGEST_SERIES:,} samples", start, len(part))
        pieces.append(piece)
    return pieces


def expand(pieces: list[Piece], seed: str) -> Values:
    """Write a series out.

    :param seed: text from which the noise grows, such as ``"name of the test/loss"``.
    """
    made = Values()
    noise = Noise(seed)
    for piece in pieces:
        if piece.gap:
            at = len(made.values)
            made.gaps[at] = made.gaps.get(at, 0.0) + piece.gap
            continue
        for index in range(piece.count):
            value = piece.value
            if value is not None and piece.end is not None:
                value += (piece.end - value) * index / (piece.count - 1)
            if value is not None and piece.noise:
                value += piece.noise * noise.normal()
            made.values.append(value)
    return made


class Noise:
    """Normal noise that is the same everywhere and touches no global generator.

    A 64-bit linear congruential generator (Knuth's MMIX constants, upper 53 bits) through the
    Box-Muller transform; the seed is the FNV-1a hash of the text. ``random.gauss`` would do today,
    but its sequence is not promised to stay the same across Python versions.
    """

    def __init__(self, seed: str) -> None:
        state = 0xCBF29CE484222325
        for byte in seed.encode():
            state = ((state ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
        self._state = state
        self._spare: float | None = None
        self._uniform()  # the first output still shows the seed

    def _uniform(self) -> float:
        self._state = (self._state * 6364136223846793005 + 1442695040888963407) & 0xFFFFFFFFFFFFFFFF
        return ((self._state >> 11) + 0.5) / (1 << 53)

    def normal(self) -> float:
        """One number with mean 0 and standard deviation 1."""
        if self._spare is not None:
            spare, self._spare = self._spare, None
            return spare
        radius = math.sqrt(-2.0 * math.log(self._uniform()))
        angle = 2.0 * math.pi * self._uniform()
        self._spare = radius * math.sin(angle)
        return radius * math.cos(angle)


def _parts(text: str) -> Iterator[tuple[int, str]]:
    """The entries between commas, without blanks around them, and where they start."""
    start = 0
    for raw in text.split(","):
        part = raw.strip()
        at = start + len(raw) - len(raw.lstrip())
        if not part:
            what = "an empty entry; write `_` for a step without a sample" if text.strip() else "an empty series"
            raise NotationError(what, min(start, max(0, len(text) - 1)), 1)
        yield at, part
        start += len(raw) + 1


def _gap(part: str, start: int) -> Piece | None:
    found = _GAP.fullmatch(part)
    if found is None:
        return None
    length = found["length"].strip()
    seconds = duration_or_none(length)
    if seconds is None or seconds <= 0:
        hint = f"write `gap {length}s`" if length.replace(".", "", 1).isdigit() else "write for instance `gap 400s`"
        raise NotationError("a gap needs a duration with its unit", start, len(part), hint)
    return Piece(gap=seconds)


def _run(part: str, start: int) -> Piece:
    found = _PIECE.match(part)
    if found is None:
        raise _unreadable(part, start)
    if found.end() != len(part):
        raise _trailing(part, start, found.end())
    value = None if found["value"] == "_" else _number(found, "value", start)
    end = _number(found, "end", start) if found["end"] else None
    noise = _number(found, "noise", start) if found["noise"] else 0.0
    count = int(found["count"].replace("_", "")) if found["count"] else 1
    if (end is not None or noise) and (value is None or not math.isfinite(value)):
        raise NotationError(f"`{found['value']}` cannot have a ramp or noise", start, len(part))
    if noise < 0:
        raise NotationError("noise is a standard deviation and cannot be negative", *_span(found, "noise", start))
    if count < 1:
        raise NotationError("`x0` makes no sample", *_span(found, "count", start), "leave the entry out")
    if end is not None and count < 2:
        raise NotationError("a ramp needs 2 samples or more", start, len(part), f"write `{part} x100`")
    return Piece(count, value, end, noise)


def _number(found: re.Match[str], name: str, start: int) -> float:
    text = found[name]
    plain = text.lstrip("+-.").lower()
    if plain in _NAMES:
        value = _NAMES[plain]
        return -value if text.startswith("-") else value
    try:
        return parse_quantity(text)
    except QuantityError as error:
        raise NotationError(error.problem, *_span(found, name, start)) from None


def _span(found: re.Match[str], name: str, start: int) -> tuple[int, int]:
    return start + found.start(name), found.end(name) - found.start(name)


def _unreadable(part: str, start: int) -> NotationError:
    lowered = part.lower()
    if lowered.split()[0].split("x")[0] in ("missing", "none", "null", "stale"):
        return NotationError(
            f'"{one_line(part)}" is not a value', start, len(part), "write `_` for a step without a sample"
        )
    return NotationError(
        f'"{one_line(part)}" is not a value',
        start,
        len(part),
        "write for instance `2.0`, `2.0~0.05 x300`, `nan`, `_` or `gap 400s`",
    )


def _trailing(part: str, start: int, end: int) -> NotationError:
    rest = part[end:]
    text = rest.strip()
    at = start + end + len(rest) - len(rest.lstrip())
    if re.match(r"[-+]?[\d.]+\s*x\s*\d+", text, re.IGNORECASE) and text[0] in "+-" and not rest[0].isspace():
        # promtool's a+bxn: n + 1 samples there, which is why we do not take it over
        return NotationError(
            f'cannot read "{one_line(text)}" here', at, len(text), "write a ramp as `first..last x100`"
        )
    if not rest[0].isspace() and not re.match(r"[-+]?\d", text):
        return _unreadable(part, start)
    if re.match(r"[-+]?[\d._]", text) and rest[0].isspace():
        return NotationError(f'cannot read "{one_line(text)}" here', at, len(text), "separate entries with a comma")
    return NotationError(f'cannot read "{one_line(text)}" here', at, len(text), "write the number of samples as `x5`")
