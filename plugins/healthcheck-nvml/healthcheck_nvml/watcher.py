"""The thread that reads cards at its own pace, and what it has read since somebody asked last."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from healthcheck_nvml.cards import NotHere, find, used
from healthcheck_nvml.readings import BY_NAME, Reading, Source, Unavailable

SELDOM = 10
"""Rounds from one reading of what is taken seldom to the next."""
LASTING = (
    "NVML_ERROR_NOT_SUPPORTED",
    "NVML_ERROR_NO_PERMISSION",
    "NVML_ERROR_FUNCTION_NOT_FOUND",
    "NVML_ERROR_INVALID_ARGUMENT",
)
"""Errors after which a reading is not tried again: the card, the driver or the container does not have it."""


def load() -> Any:
    """NVML, ready for use. Raises ``NotHere`` where there is none."""
    try:
        import pynvml
    except ImportError:
        raise NotHere("the package nvidia-ml-py is not installed") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NotHere(f"NVML cannot be used: {error}") from None
    return pynvml


class Watcher:
    """Reads what is wanted of the cards in use, every so many seconds.

    :param names: of the metrics that are wanted.
    :param every: seconds between two rounds.
    :param torch: the module of the script: it knows which cards are used.
    :param get: gives NVML.
    """

    def __init__(self, names: Collection[str], every: float, torch: Any, get: Callable[[], Any] = load) -> None:
        self.readings: list[Reading] = [BY_NAME[name] for name in names]
        self.every = every
        self.reason = ""
        """Why nothing can be read at all; empty while that is not known."""
        self.missing: dict[str, str] = {}
        """Metric -> why this card does not give it."""
        self.rounds = 0
        """Rounds that are done: whoever takes values sees from it whether there are new ones."""
        self.last_xid = 0
        self._torch = torch
        self._get = get
        self._lock = threading.Lock()
        self._values: dict[tuple[int, str], list[float]] = {}
        self._first: dict[tuple[int, str], float] = {}
        self._lacking: dict[str, set[int]] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="healthcheck-nvml", daemon=True)

    def start(self) -> Watcher:
        self._thread.start()
        return self

    def stop(self) -> None:
        """End the thread; waits a second for a reading under way."""
        self._stopped.set()
        self._thread.join(1.0)

    def take(self) -> list[tuple[int, str, float]]:
        """``(device, metric, value)`` of all readings since the last call; the device counts from 0 in the order of use."""
        with self._lock:
            values, self._values = self._values, {}
        return [(device, name, _folded(BY_NAME[name].fold, read)) for (device, name), read in values.items()]

    def _watch(self) -> None:
        try:
            nvml = self._get()
        except NotHere as error:
            self.reason = str(error)
            return
        try:
            sources = self._sources(nvml)
            while sources and not self._stopped.is_set():
                began = time.monotonic()
                for place, source in enumerate(sources):
                    self._round(place, source, len(sources))
                self.rounds += 1
                # A round that takes long is not followed by the next at once: the driver has a lock for everybody.
                self._stopped.wait(max(self.every - (time.monotonic() - began), self.every / 2))
            for source in sources:
                if source.events is not None:
                    nvml.nvmlEventSetFree(source.events)
        except Exception as error:
            self.reason = self.reason or f"reading stopped: {type(error).__name__}: {error}"
        finally:
            try:
                nvml.nvmlShutdown()
            except Exception:
                pass

    def _sources(self, nvml: Any) -> list[Source]:
        try:
            return [Source(nvml, find(nvml, self._torch, index)) for index in used(self._torch)]
        except NotHere as error:
            self.reason = str(error)
            return []

    def _round(self, place: int, source: Source, cards: int) -> None:
        for reading in self.readings:
            name = reading.metric.name
            if place in self._lacking.get(name, ()) or (reading.seldom and self.rounds % SELDOM):
                continue
            try:
                value = reading.read(source)
            except Unavailable as error:
                self._lacks(name, place, cards, str(error))
            except source.nvml.NVMLError as error:
                lasting = {getattr(source.nvml, known, None) for known in LASTING}
                if getattr(error, "value", None) in lasting:
                    self._lacks(name, place, cards, f"the card does not give it: {error}")
            except AttributeError:
                self._lacks(name, place, cards, "this version of nvidia-ml-py does not have it")
            else:
                key = (place, name)
                if reading.since_start:
                    value -= self._first.setdefault(key, value)
                with self._lock:
                    self._values.setdefault(key, []).append(value)
        self.last_xid = source.last_xid or self.last_xid

    def _lacks(self, name: str, place: int, cards: int, why: str) -> None:
        """One card is without a reading; the metric is missing where all are."""
        lacking = self._lacking.setdefault(name, set())
        lacking.add(place)
        if len(lacking) == cards:
            self.missing[name] = why


def _folded(fold: str, values: list[float]) -> float:
    if fold == "max":
        return max(values)
    return values[-1] if fold == "last" else sum(values) / len(values)
