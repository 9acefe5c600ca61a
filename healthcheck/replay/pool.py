"""Many recorded runs, in this process or in several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

Judge = Callable[[str], Any]
"""Judges one path; its result can be pickled."""

_judge: Judge | None = None


def judge_all(paths: Sequence[str], prepare: Callable[[], Judge], *, jobs: int = 1) -> Iterator[Any]:
    """Yield one result per path, in the order given.

    :param prepare: makes the judge (plugins loaded, rules compiled); called once in each process,
        so that it must be picklable itself where ``jobs`` is above 1.
    """
    if jobs <= 1 or len(paths) < 2:
        judge = prepare()
        for path in paths:
            yield judge(path)
        return
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    # spawn: a forked child of a program with threads (a progress bar) may hang
    with ProcessPoolExecutor(
        min(jobs, len(paths)), mp_context=get_context("spawn"), initializer=_start, initargs=(prepare,)
    ) as pool:
        yield from pool.map(_run, paths, chunksize=max(1, min(16, len(paths) // (4 * jobs))))


def _start(prepare: Callable[[], Judge]) -> None:
    global _judge
    _judge = prepare()


def _run(path: str) -> Any:
    assert _judge is not None
    return _judge(path)
