"""What the workers of a loader draw their random numbers from, told by the workers themselves.

A worker that was forked notes, at its first two batches, the state of each generator that it draws from, in memory
that it shares with the script's process. Its data, and its generators, stay as they are. Workers that are spawned tell
nothing.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import pickle
import random
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from healthcheck.probes.values import host_bytes

LOOKS = 2
"""Batches of each worker at which it is looked: the first alone may be where a worker seeds itself."""
WORKERS, ROOM = 64, 2048
"""Workers that have a place in the shared memory, and bytes of each."""
_LONG = 16
"""Members up to which a list is looked through for generators."""
_DEPTH = 4
_MOST = 200
"""Things that are looked at, on the way from a data set to its generators."""
_MARK = "_healthcheck_looks"
_HEADER = struct.Struct("<qH")

Draws = Mapping[str, Sequence[str]]
"""For each generator that a worker drew from for both batches: marks of its state before the first and the second."""


class WorkerDraws:
    """The memory that workers share with us: a record for each, by its number."""

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, WORKERS * ROOM)

    def seen_worker(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The main function of loader workers, which notes what they draw from; it runs in the worker's process."""

        def _worker_loop(*args: Any, **kwargs: Any) -> Any:
            from torch.utils.data._utils.fetch import _MapDatasetFetcher

            # Of this worker's process alone. A stream that all workers shuffle alike, to share it out, is no fault.
            _MapDatasetFetcher.fetch = self._seen_fetch(_MapDatasetFetcher.fetch)
            return original(*args, **kwargs)

        return _worker_loop

    def _seen_fetch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def fetch(fetcher: Any, index: Any) -> Any:
            looks = vars(fetcher).get(_MARK, 0)
            worker = _worker() if looks < LOOKS else None
            if worker is None or worker.id >= WORKERS:
                return original(fetcher, index)
            vars(fetcher)[_MARK] = looks + 1
            before = _states(fetcher.dataset)
            batch = original(fetcher, index)
            self._note(worker, looks, before, _states(fetcher.dataset))
            return batch

        return fetch

    def of(self, iterator: Any) -> list[Draws] | None:
        """What each worker of a loader's iterator has told, at the draw by which all have made two batches; else None."""
        count = getattr(iterator, "_num_workers", 0)
        if not count or count > WORKERS or iterator._num_yielded != LOOKS * count:
            return None
        records = [self._read(worker) for worker in range(count)]
        if any(seed != _short(iterator._base_seed + worker) for worker, (seed, _) in enumerate(records)):
            return None  # spawned, or of another loader by now
        return [draws for _, draws in records]

    def _note(self, worker: Any, looks: int, before: dict[str, str], after: dict[str, str]) -> None:
        used = {name: mark for name, mark in before.items() if after.get(name) != mark}
        if looks:
            first = self._read(worker.id)[1]
            told: dict[str, list[str]] = {name: [*first[name], mark] for name, mark in used.items() if name in first}
        else:
            told = {name: [mark] for name, mark in used.items()}
        text = json.dumps(told).encode()
        if len(text) > ROOM - _HEADER.size:
            text = b"{}"
        place = worker.id * ROOM
        self._shared[place : place + _HEADER.size + len(text)] = _HEADER.pack(_short(worker.seed), len(text)) + text

    def _read(self, worker: int) -> tuple[int, Draws]:
        place = worker * ROOM
        seed, length = _HEADER.unpack_from(self._shared, place)
        text = self._shared[place + _HEADER.size : place + _HEADER.size + length]
        return seed, json.loads(text or b"{}")


def _short(seed: int) -> int:
    return seed % 2**63


def _worker() -> Any:
    import torch.utils.data

    return torch.utils.data.get_worker_info()


def _states(dataset: Any) -> dict[str, str]:
    """A mark of the state of each generator that the worker's code may draw from, by name."""
    found: dict[str, str] = {}
    for name, state in _generators(dataset):
        try:
            found[name] = hashlib.blake2b(pickle.dumps(state()), digest_size=6).hexdigest()
        except Exception:  # a generator that does not tell its state says nothing
            continue
    return found


def _generators(dataset: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    import torch

    numpy = sys.modules.get("numpy")
    yield "random", random.getstate
    yield "torch", lambda: host_bytes(torch.get_rng_state())
    if numpy is not None:
        yield "numpy.random", numpy.random.get_state
    module = sys.modules.get(type(dataset).__module__)
    waiting = [("dataset", dataset, _DEPTH)]
    waiting += [(name, thing, 1) for name, thing in vars(module).items()] if module is not None else []
    seen: set[int] = set()
    while waiting and len(seen) < _MOST:
        name, thing, depth = waiting.pop(0)
        if id(thing) in seen:
            continue
        state = _state_of(thing, numpy)
        if state is not None:
            yield name, state
        elif depth > 1 or thing is dataset:
            seen.add(id(thing))
            waiting += [(f"{name}.{key}", part, depth - 1) for key, part in _parts(thing)]


def _state_of(thing: Any, numpy: Any) -> Callable[[], Any] | None:
    kind = type(thing)
    if kind is random.Random:
        return thing.getstate  # type: ignore[no-any-return]
    if kind.__module__.startswith("numpy.random") and kind.__name__ in ("Generator", "RandomState"):
        return lambda: thing.bit_generator.state if kind.__name__ == "Generator" else thing.get_state()
    if kind.__name__ == "Generator" and kind.__module__.startswith("torch"):
        return lambda: host_bytes(thing.get_state())
    return None


def _parts(thing: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, (list, tuple)):
        if len(thing) <= _LONG:
            yield from ((str(number), part) for number, part in enumerate(thing))
    elif not isinstance(thing, type) and hasattr(thing, "__dict__"):
        yield from list(vars(thing).items())
