"""Batches as loaders hand them out: what is in them, where a loader stands in its pass over the data, and what its
workers draw their random numbers from.

A worker that was forked notes, at its first two batches, the state of each generator that it draws from, in memory
that it shares with the script's process. Its data, and its generators, stay as they are. Workers that are spawned note
nothing.
"""

from __future__ import annotations

import functools
import inspect
import json
import mmap
import opcode
import pickle
import random
import struct
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from healthcheck.core.digest import sha256
from healthcheck.device.tensors import host_bytes
from healthcheck.instrument.guarding import contain

# -- what is in a batch -------------------------------------------------------------------

_TOKEN_KEYS = ("input_ids", "tokens", "token_ids", "decoder_input_ids")
_WHOLE = frozenset(("torch.int64", "torch.int32", "torch.int16", "torch.uint8"))


def batch_counts(batch: Any) -> tuple[int | None, int | None]:
    """``(samples, tokens)`` of one batch; None for what its shapes do not show.

    Samples are the first dimension of the first tensor. Tokens are counted for dictionaries with
    ``input_ids`` (padding included, since finding it would read the device) and for batches
    whose tensors are all two-dimensional integers.
    """
    tokens = None
    if isinstance(batch, Mapping):
        for key in _TOKEN_KEYS:
            shape = getattr(batch.get(key), "shape", None)
            if shape is not None and len(shape) == 2:
                tokens = int(shape[0]) * int(shape[1])
                break
    tensors = tensors_of(batch)
    if not tensors:
        return None, None
    first = tensors[0].shape
    samples = int(first[0]) if len(first) else None
    if tokens is None and len(first) == 2:
        for tensor in tensors:
            if len(tensor.shape) != 2 or str(tensor.dtype) not in _WHOLE:
                return samples, None
        tokens = int(first[0]) * int(first[1])
    return samples, tokens


def length_of(dataset: Any) -> int | None:
    """Rows of a data set; None where it does not know."""
    try:
        return len(dataset)
    except Exception:  # a stream, or a class of the script's own whose length fails
        return None


MOST_ROWS = 1_000_000
"""Longer lists of row numbers are not compared."""


def shared_rows(evaluated: Any, trained: Any) -> float:
    """Which part of the rows of one data set are rows of another one: subsets of the same data, slices of the same tensor.

    0 for what nothing is known of.
    """
    if evaluated is trained:
        return 1.0
    (base, rows), (other, others) = _base_of(evaluated), _base_of(trained)
    if base is other:
        if others is None:
            return 1.0
        if rows is None:
            return len(others) / max(1, length_of(evaluated) or 0)
        return len(rows & others) / max(1, len(rows))
    tensors = [next(iter(getattr(thing, "tensors", None) or ()), None) for thing in (base, other)]
    if rows is not None or others is not None or any(tensor is None for tensor in tensors):
        return 0.0
    return _shared_memory(*tensors)


def _base_of(dataset: Any) -> tuple[Any, set[int] | None]:
    """What a subset (of a subset) is taken from, and its rows there; None for all of them."""
    from torch.utils.data import Subset

    rows: list[int] | None = None
    for _ in range(4):
        if not isinstance(dataset, Subset) or len(dataset.indices) > MOST_ROWS:
            break
        own = [int(row) for row in dataset.indices]
        rows = own if rows is None else [own[row] for row in rows]
        dataset = dataset.dataset
    return dataset, None if rows is None else set(rows)


def _shared_memory(one: Any, other: Any) -> float:
    """Which part of a tensor's rows are rows of another one that is a view of the same memory."""
    if not (hasattr(one, "untyped_storage") and hasattr(other, "untyped_storage")) or not one.numel():
        return 0.0
    if one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return 0.0
    if not one.is_contiguous() or not other.is_contiguous():
        return 0.0
    begins = max(one.storage_offset(), other.storage_offset())
    ends = min(one.storage_offset() + one.numel(), other.storage_offset() + other.numel())
    return float(max(0, ends - begins) / one.numel())


def tensors_of(batch: Any, depth: int = 0) -> list[Any]:
    """The tensors in a batch: itself, or those in its lists and dictionaries, three deep."""
    if hasattr(batch, "shape") and hasattr(batch, "dtype"):
        return [batch]
    found: list[Any] = []
    if depth > 2:
        return found
    values: Any = ()
    if isinstance(batch, Mapping):
        values = batch.values()
    elif isinstance(batch, (list, tuple)):
        values = batch
    for value in values:
        if hasattr(value, "shape") and hasattr(value, "dtype"):  # at once: each call costs, and most batches are flat
            found.append(value)
        else:
            found += tensors_of(value, depth + 1)
    return found


# -- where a loader stands ----------------------------------------------------------------

_AT_RANDOM = frozenset(("RandomSampler", "SubsetRandomSampler", "WeightedRandomSampler"))


class DrawnTo(Protocol):
    """Whom a loader's batches are shown to."""

    @property
    def session(self) -> Any: ...
    @property
    def unwatched(self) -> Any: ...

    def batch_drawn(self, batch: Any, waited: float, dataset: Any, *, gradients: bool, **more: Any) -> None: ...


def seen_draws(
    original: Callable[..., Any], watching: Callable[[], DrawnTo | None], workers: WorkerDraws
) -> Callable[..., Any]:
    """``__next__`` of a loader's iterator that shows each batch.

    :param watching: to whom; None while nobody watches.
    """

    settings, passes = WorkerSettings(), Passes()

    def drawn(to: DrawnTo, iterator: Any, batch: Any, waited: float) -> None:
        import torch

        try:
            if getattr(iterator, "_persistent_workers", False) and iterator._num_yielded == 1:
                to.session.facts.habits.unheard.update(settings.changed(iterator))
            dataset, gradients = getattr(iterator, "_dataset", None), torch.is_grad_enabled()
            if to.unwatched.left:
                to.unwatched.draws(dataset, gradients=gradients)
                return
            habits, position = to.session.facts.habits, getattr(iterator, "_num_yielded", 0)
            if position > habits.longest_pass and gradients:
                habits.longest_pass = position
            if gradients and position < 3:
                passes.note(habits.cut_passes, iterator, position)
            facts: dict[str, Any] = {}
            if position == 1:
                facts["begins_pass"] = begins_pass(iterator)
            if getattr(iterator, "_num_workers", 0):
                facts["worker_draws"] = workers.of(iterator)
            to.batch_drawn(batch, waited, dataset, gradients=gradients, **facts)
        except Exception as error:
            contain(to.session, error, "batch_drawn")

    def gave_nothing(to: DrawnTo, iterator: Any) -> None:
        """A pass that is over before its first batch is shown as a batch without samples."""
        import torch

        drawn(to, iterator, torch.empty(0), 0.0)

    def __next__(iterator: Any) -> Any:
        to = watching()
        if to is None:
            return original(iterator)
        began = time.perf_counter()
        try:
            batch = original(iterator)
        except StopIteration:
            if getattr(iterator, "_num_yielded", 1) == 0:
                gave_nothing(to, iterator)
            raise
        drawn(to, iterator, batch, time.perf_counter() - began)
        return batch

    return __next__


_LOOP = opcode.opmap["FOR_ITER"]
DATA_SETS = 8
"""Data sets whose passes are counted at most."""


class Passes:
    """Counts loops over loaders that are left after their first batch."""

    def __init__(self) -> None:
        self._drawn: dict[int, tuple[int, bool]] = {}
        """By the id of the data set: batches of the pass at hand, and whether a ``for`` loop draws them."""

    def note(self, cut: dict[int, tuple[int, int]], iterator: Any, position: int) -> None:
        """A first or second batch was drawn.

        :param cut: as in the facts of the run.
        """
        key = id(getattr(iterator, "_dataset", None))
        if key not in self._drawn and len(self._drawn) >= DATA_SETS:
            return
        if position > 1:
            cut.pop(key, None)
            self._drawn[key] = (position, False)
            return
        if self._drawn.get(key) == (1, True):
            cut[key] = (cut.get(key, (0, 0))[0] + 1, length_of(iterator) or 0)
        self._drawn[key] = (1, in_a_loop(sys._getframe()))


def in_a_loop(frame: Any) -> bool:
    """Whether the first frame outside of this file is at the head of a ``for`` loop, and not at a call of ``next()``."""
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame is not None and frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] == _LOOP


def begins_pass(iterator: Any) -> bool:
    """Whether the batch that was just drawn is the first of a pass in random order.

    :param iterator: torch's own, of a ``DataLoader``.
    """
    if getattr(iterator, "_num_yielded", 0) != 1:
        return False
    batches = getattr(iterator, "_index_sampler", None)
    sampler = getattr(batches, "sampler", batches)
    # By name: DistributedSampler is a class of its own, and looking for it would import torch.distributed.
    kinds = {cls.__name__ for cls in type(sampler).__mro__}
    if "DistributedSampler" in kinds:
        return bool(getattr(sampler, "shuffle", False))
    return not kinds.isdisjoint(_AT_RANDOM)


# -- what workers live with ---------------------------------------------------------------

TWICE = 2
"""Passes before which a value was changed, at the least: what is counted or filled in once is none that workers wait for."""


class WorkerSettings:
    """Values of data sets as the workers of a loader got them, which live through all passes (``persistent_workers``).

    ``dataset.epoch = 3`` reaches the copy of the script's process alone.
    """

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Any, tuple[dict[str, Any], dict[str, int]]] = weakref.WeakKeyDictionary()
        """Of each iterator: the values at the pass before, and how often each one was changed."""
        self._first: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()

    def changed(self, iterator: Any) -> dict[str, str]:
        """To be asked at the first batch of each pass: values changed before two passes, and what they were."""
        now = dict(_plain_values(iterator._dataset))
        first = self._first.setdefault(iterator, now)
        before, times = self._known.get(iterator, (now, {}))
        for name, value in now.items():
            if name in before and before[name] != value:
                times[name] = times.get(name, 0) + 1
        self._known[iterator] = now, times
        return {name: f"{first[name]} to {now[name]}" for name, n in times.items() if n >= TWICE and name in first}


def _plain_values(dataset: Any) -> Iterator[tuple[str, Any]]:
    """Numbers, flags and words that a data set holds, and what it is a part of, and its transform, as far as what workers call
    reads them."""
    for prefix, thing in (
        ("", dataset),
        ("dataset.", getattr(dataset, "dataset", None)),
        ("transform.", getattr(dataset, "transform", None)),
    ):
        values = [(n, v) for n, v in getattr(thing, "__dict__", {}).items() if type(v) in (int, float, bool, str)]
        kind: Any = type(thing)
        read = read_by_workers(kind) if values else frozenset[str]()
        for name, value in values:
            if name in read:
                yield f"{prefix}{name}", value


_CALLED_BY_WORKERS = ("__getitem__", "__getitems__", "__iter__", "__next__", "__call__", "forward")


@functools.cache
def read_by_workers(kind: type) -> frozenset[str]:
    """Names that the methods of a class which loader workers call have in their code, and those methods of it that these call.

    A counter that the script's own process alone keeps has nothing to do with them.
    """
    waiting, names, seen = list(_CALLED_BY_WORKERS), set[str](), set[str]()
    while waiting:
        name = waiting.pop()
        method = getattr(kind, name, None)
        if isinstance(method, property):
            method = method.fget
        code = getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
        if code is None or name in seen:
            continue
        seen.add(name)
        parts = [code]
        while parts:  # functions inside of it, comprehensions too
            part = parts.pop()
            names.update(part.co_names)
            names.update(text for text in part.co_consts if isinstance(text, str))  # getattr(self, "epoch")
            parts += [const for const in part.co_consts if hasattr(const, "co_names")]
        waiting += [other for other in names if other not in seen and hasattr(kind, other)]
    return frozenset(names)


# -- what workers draw from ---------------------------------------------------------------

LOOKS = 2
"""Batches of each worker at which it is looked: the first alone may be where a worker seeds itself."""
WORKERS, PLACE = 64, 2048
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
        self._shared = mmap.mmap(-1, WORKERS * PLACE)

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
        """What each worker of a loader's iterator has noted, at the draw by which all have made two batches; else None."""
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
            marks: dict[str, list[str]] = {name: [*first[name], mark] for name, mark in used.items() if name in first}
        else:
            marks = {name: [mark] for name, mark in used.items()}
        text = json.dumps(marks).encode()
        if len(text) > PLACE - _HEADER.size:
            text = b"{}"
        place = worker.id * PLACE
        self._shared[place : place + _HEADER.size + len(text)] = _HEADER.pack(_short(worker.seed), len(text)) + text

    def _read(self, worker: int) -> tuple[int, Draws]:
        place = worker * PLACE
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
            found[name] = sha256(pickle.dumps(state())).hexdigest()[:12]
        except Exception:  # a generator that does not give its state
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
