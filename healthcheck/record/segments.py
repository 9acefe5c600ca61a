"""Where the lines of samples are kept: a plain tail that grows, and behind it what is closed, compressed, in one file.

``samples.jsonl`` is the tail. Once it is large enough it is renamed to ``samples.closing.jsonl``, appended to
``samples.jsonl.gz`` as a stream of its own (``zcat`` reads any number of them), and deleted. A process that is killed on
the way leaves at most a torn stream, which is passed over because its lines are still in the file that was being closed, or
that file beside a whole stream, which is passed over because they are the same.

Deflate and not bzip2, which takes seven times as long for two thirds of the size: training pays for it.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from healthcheck.record.folder import append
from healthcheck.record.lines import Thinner

TAIL = "samples.jsonl"
CLOSING = "samples.closing.jsonl"
PACKED = "samples.jsonl.gz"
SEGMENT = 2**19
"""Bytes of the tail from which on it is closed: half a megabyte, a few hundred to a few thousand steps."""
EXACT_STEPS = 10_000
"""Newest steps that are never thinned, as long as the record has as many older ones."""
LOST = b'{"gap":1}'
"""Stands for lines that cannot be read back, so that nobody takes the record for whole."""
_PIECE = 2**20
_GZIP = 16 + zlib.MAX_WBITS
"""Tells zlib that streams have the header and the checksum of gzip."""


def sample_lines(record: Path) -> Iterator[bytes]:
    """All lines of samples in the folder of a run, oldest first; none where nothing was recorded.

    Raises ``OSError`` where a file cannot be read.
    """
    closing = _content(record / CLOSING)
    last = b""
    for stream in _streams(record / PACKED):
        if stream is None:
            if closing is None:
                yield LOST
            continue
        last = stream
        yield from stream.splitlines()
    if closing is not None and closing != last:
        yield from closing.splitlines()
    with contextlib.suppress(FileNotFoundError), open(record / TAIL, "rb") as file:
        yield from file


def has_samples(record: Path) -> bool:
    return any((record / name).is_file() for name in (TAIL, CLOSING, PACKED))


def newest_lines(record: Path, size: int, *, tail: bool = True) -> list[bytes]:
    """The last lines, about ``size`` bytes of them where the tail has as many; of what is closed only the last part is read.

    :param tail: False leaves the tail out.
    """
    lines: list[bytes] = []
    with contextlib.suppress(FileNotFoundError), open(record / TAIL, "rb") as file:
        start = max(0, file.seek(0, 2) - size)
        file.seek(start)
        lines = file.read().splitlines()[1 if start else 0 :] if tail else []
        if start and tail:
            return lines
    before = _content(record / CLOSING)
    if before is None:
        before = next(iter(_last_stream(record / PACKED)), b"")
    return before[-size:].splitlines()[1 if len(before) > size else 0 :] + lines


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _streams(path: Path) -> Iterator[bytes | None]:
    """The content of each stream; None for one that is torn or damaged, behind which nothing can be read."""
    if not path.is_file():
        return
    with open(path, "rb") as file:
        rest = b""
        while True:
            rest = rest or file.read(_PIECE)
            if not rest:
                return
            unpacker, parts = zlib.decompressobj(_GZIP), []
            try:
                while not unpacker.eof:
                    parts.append(unpacker.decompress(rest))
                    rest = b""
                    if not unpacker.eof and not (rest := file.read(_PIECE)):
                        yield None
                        return
            except zlib.error:
                yield None
                return
            rest = unpacker.unused_data
            yield b"".join(parts)


def _pack(content: bytes) -> bytes:
    """A stream of its own, as gzip makes them."""
    packer = zlib.compressobj(wbits=_GZIP)
    return packer.compress(content) + packer.flush()


def _last_stream(path: Path) -> Iterator[bytes]:
    last = b""
    for stream in _streams(path):
        last = stream or b""
    if last:
        yield last


class Segments:
    """The files of samples of one record, written by one thread.

    :param limit: bytes of all files together from which on older steps are thinned.
    :param segment: bytes of the tail from which on it is closed.
    """

    def __init__(self, folder: Path, limit: int, segment: int = SEGMENT) -> None:
        self._folder = folder
        self._limit = limit
        self._segment = min(segment, max(1, limit // 4))
        self._tail = self._packed = 0
        self._thinned = 0

    def append(self, data: bytes, around: Sequence[int]) -> None:
        """Whole lines behind all others. Raises ``OSError`` where the disk does not take them.

        :param around: steps of alerts, near which nothing is left out.
        """
        append(self._folder / TAIL, data)
        self._tail += len(data)
        if self._tail > self._segment:
            self._close()
        if self._tail + self._packed > self._limit:
            self._thin(around)

    def _close(self) -> None:
        tail, closing, packed = (self._folder / name for name in (TAIL, CLOSING, PACKED))
        if not tail.is_file():  # somebody has moved the record away
            self._tail = 0
            return
        os.replace(tail, closing)
        stream = _pack(closing.read_bytes())
        append(packed, stream)
        closing.unlink()
        self._tail, self._packed = 0, self._packed + len(stream)

    def _thin(self, around: Sequence[int]) -> None:
        """Every second evaluation of older steps is dropped, and the first line of the record says so."""
        path = self._folder / PACKED
        steps = [step for step in map(Thinner.step_of, sample_lines(self._folder)) if step is not None]
        if not steps:
            return
        first, last = min(steps), max(steps)
        until = max(last - EXACT_STEPS, first + (last - first) // 2)
        self._thinned += 1
        thinner = Thinner(until, around)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with open(temporary, "wb", opener=lambda p, flags: os.open(p, flags, 0o600)) as file:
                file.write(_pack(thinner.marker(self._thinned)))
                for stream in _streams(path):
                    if stream is not None and (kept := thinner.take(stream)):
                        file.write(_pack(kept))
            os.replace(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        self._packed = path.stat().st_size
