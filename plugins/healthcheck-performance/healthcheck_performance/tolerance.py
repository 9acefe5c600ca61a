"""Replica groups that survive each other: torchft's manager, its metrics, and who was lost.

Each group is a training of its own (a process, or several with FSDP); groups average their gradients, and one that dies
costs the others a step at most. https://github.com/pytorch/torchft
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import socket
import time
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from healthcheck import Cost, Demand, Event, EventKind, Metric, Sample, UsageError

TOLERANCE_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "checkpoint_interval": {
            "type": "integer",
            "minimum": 1,
            "description": "Committed steps between two checkpoints (default: none).",
        },
        "max_failures": {
            "type": "integer",
            "minimum": 1,
            "description": "Updates in a row that may fail to be committed (default 3).",
        },
        "heartbeat_interval": {
            "type": "number",
            "exclusiveMinimum": 0,
            "description": "Seconds between two heartbeats (default 1).",
        },
        "lighthouse_address": {
            "type": "string",
            "description": "http://HOST:PORT of torchft's Lighthouse (default: TORCHFT_LIGHTHOUSE).",
        },
        "replica_prefix": {"type": "string", "description": "Name of this replica group (default: of the host)."},
        "min_replica_size": {
            "type": "integer",
            "minimum": 1,
            "description": "Groups that must be there to train on (default 1).",
        },
        "timeout": {
            "type": "number",
            "exclusiveMinimum": 0,
            "description": "Seconds that a collective or a quorum may take (default 60).",
        },
    },
}
BEATS = 3
"""Heartbeats that may fail to arrive before the Lighthouse calls a group dead."""

_running: weakref.WeakSet[FaultTolerance] = weakref.WeakSet()


@dataclass(slots=True)
class FaultToleranceParameters:
    """The parameters of Dream Trainer's document and of its version 0.3.0, with torchft's names beside them."""

    checkpoint_interval: int | None = None
    """Committed steps between two checkpoints of this group. torchft makes none: we write them."""
    max_failures: int = 3
    """Updates in a row that may fail to be committed: ``Manager(max_retries)``."""
    heartbeat_interval: float = 1.0
    """Seconds: ``Manager(heartbeat_interval)``; a Lighthouse that we start waits :data:`BEATS` times as long."""
    enable: bool = True
    lighthouse_address: str | None = None
    replica_prefix: str | None = None
    min_replica_size: int = 1
    """``Manager(min_replica_size)``."""
    max_consecutive_failures: int | None = None
    """The name of ``max_failures`` in version 0.3.0; beats it."""
    timeout: float = 60.0
    """Seconds: ``Manager(timeout, quorum_timeout)``."""

    @property
    def retries(self) -> int:
        return self.max_failures if self.max_consecutive_failures is None else self.max_consecutive_failures

    @property
    def heartbeat_timeout(self) -> float:
        """Seconds without a heartbeat after which the Lighthouse must call a group dead: above the interval."""
        return max(BEATS * self.heartbeat_interval, 1.0)


def need_torchft() -> Any:
    """The package. Raises ``UsageError`` where it is not installed or does not start here."""
    if importlib.util.find_spec("torchft") is None:
        raise UsageError("fault tolerance needs torchft: pip install 'healthcheck-performance[fault-tolerance]'")
    try:
        return importlib.import_module("torchft")
    except ImportError as error:
        raise UsageError(f"torchft does not import here: {error}") from None


def start_lighthouse(parameters: FaultToleranceParameters, bind: str = "[::]:0", join_timeout: float = 1.0) -> Any:
    """Start the server at which groups meet; its ``address()`` is their ``lighthouse_address``, ``shutdown()`` ends it.

    Its timeout is above ``heartbeat_interval``: torchft's own of 5 s would call groups dead that beat every 60 s.
    """
    need_torchft()
    return importlib.import_module("torchft._torchft").LighthouseServer(
        bind=bind,
        min_replicas=parameters.min_replica_size,
        join_timeout_ms=int(join_timeout * 1e3),
        heartbeat_timeout_ms=int(parameters.heartbeat_timeout * 1e3),
    )


class FaultTolerance:
    """One replica group: wires torchft's manager to a model and its optimizer.

    ::

        tolerance = FaultTolerance(FaultToleranceParameters(heartbeat_interval=1, max_failures=3))
        model, optimizer = tolerance.wrap(model, optimizer)

    ``zero_grad()`` begins a step (it asks who is there), ``step()`` ends it, if all that are there agree.
    """

    name = "performance-fault-tolerance"

    def __init__(
        self, parameters: FaultToleranceParameters | None = None, *, checkpoints: str | Path = "checkpoints"
    ) -> None:
        self.parameters = parameters or FaultToleranceParameters()
        self.checkpoints = Path(checkpoints)
        self.manager: Any = None
        self.failures = 0
        """Updates that were not committed."""
        self.lost: list[str] = []
        """Names of groups that were there and are no longer."""
        self.members: list[str] = []
        """Names of the groups of the last quorum."""
        self.quorum_id = -1
        self.answered = time.monotonic()
        """When the Lighthouse last answered."""
        self._since_saved = 0
        self._model: Any = None
        self._optimizer: Any = None
        self._store: Any = None

    def start(self, model: Any, optimizer: Any) -> Any:
        """Make the manager; returns it. ``wrap`` does it."""
        torchft = need_torchft()
        self._model, self._optimizer = model, optimizer
        given = self.parameters
        address = given.lighthouse_address or os.environ.get("TORCHFT_LIGHTHOUSE")
        if not address:
            raise UsageError(
                "fault tolerance: no Lighthouse; start one with `healthcheck lighthouse`, and give its address as lighthouse_address or "
                "TORCHFT_LIGHTHOUSE"
            )
        cuda = any(p.device.type == "cuda" for p in model.parameters())
        group = (
            torchft.ProcessGroupNCCL() if cuda else torchft.ProcessGroupGloo(timeout=timedelta(seconds=given.timeout))
        )
        host, port = self._meeting_point()
        self.manager = torchft.Manager(
            pg=group,
            load_state_dict=self._load,
            state_dict=self._state,
            min_replica_size=given.min_replica_size,
            use_async_quorum=False,  # a recovering group gets its weights before its forward pass, not behind it
            timeout=timedelta(seconds=given.timeout),
            quorum_timeout=timedelta(seconds=given.timeout),
            rank=int(os.environ.get("RANK", 0)),
            world_size=int(os.environ.get("WORLD_SIZE", 1)),
            store_addr=host,
            store_port=port,
            lighthouse_addr=address,
            replica_id=given.replica_prefix or socket.gethostname(),
            heartbeat_interval=timedelta(seconds=given.heartbeat_interval),
            max_retries=given.retries,
        )
        self._hear_members()
        _running.add(self)
        return self.manager

    def wrap(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        """The model, whose gradients are averaged over the groups, and the optimizer, which steps if all agree."""
        if not self.parameters.enable:
            return model, optimizer
        torchft = need_torchft()
        manager = self.start(model, optimizer)
        outer = self
        base: Any = torchft.Optimizer

        class Optimizer(base):  # type: ignore[misc]
            """Counts what is not committed, and saves."""

            def step(self, closure: Any = None) -> None:
                if manager.should_commit():
                    self.optim.step()
                    outer.committed()
                else:
                    outer.failures += 1

        return torchft.DistributedDataParallel(manager, model), Optimizer(manager, optimizer)

    # -- for loops of others -------------------------------------------------------------

    def step_begins(self) -> None:
        """Ask who is there."""
        self.manager.start_quorum()

    def average(self, parameters: Iterable[Any]) -> None:
        """Average the gradients over the groups."""
        work = [self.manager.allreduce(p.grad) for p in parameters if p.grad is not None]
        for one in work:
            one.wait()

    def commits(self) -> bool:
        """Whether all groups that are there have come this far: then the update may be made."""
        if self.manager.should_commit():
            self.committed()
            return True
        self.failures += 1
        return False

    def committed(self) -> None:
        """An update was made."""
        self._since_saved += 1
        if self.parameters.checkpoint_interval and self._since_saved >= self.parameters.checkpoint_interval:
            self._since_saved = 0
            self.save()

    def save(self) -> Path:
        """Write model, optimizer and manager of this group; returns the path."""
        import torch

        name = self.parameters.replica_prefix or socket.gethostname()
        path = self.checkpoints / f"{name}-step-{self.manager.current_step()}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({**self._state(), "torchft": self.manager.state_dict()}, path)
        return path

    def shutdown(self) -> None:
        """Leave the groups; the others train on."""
        _running.discard(self)
        if self.manager is not None:
            self.manager.shutdown(wait=False)

    # -- inside ------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        return {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}

    def _load(self, state: Mapping[str, Any]) -> None:
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])

    def _meeting_point(self) -> tuple[str, int]:
        """The store of this group's ranks: torchrun's, else one of our own."""
        if os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT"):
            from torch.distributed import is_initialized

            if is_initialized() or "TORCHELASTIC_RUN_ID" in os.environ:
                return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        from torch.distributed import TCPStore

        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return "127.0.0.1", int(self._store.port)

    def _hear_members(self) -> None:
        """torchft knows the names of a quorum's members and shows only their number: look at the answer as it comes."""
        client = getattr(self.manager, "_client", None)
        if client is None or not hasattr(client, "_quorum"):
            logging.getLogger(__name__).warning("torchft has changed: lost replica groups are counted, not named")
            return
        self.manager._client = _Client(client, self._quorum_came)

    def _quorum_came(self, quorum: Any) -> None:
        self.answered = time.monotonic()
        self.quorum_id = int(quorum.quorum_id)
        members = [str(name) for name in getattr(quorum, "replica_ids", ())]
        if not members:
            return
        self.lost += [_short(name) for name in self.members if name not in members]
        self.members = members


class _Client:
    """torchft's client, whose quorums are heard."""

    def __init__(self, client: Any, heard: Any) -> None:
        self._inner, self._heard = client, heard

    def _quorum(self, *args: Any, **given: Any) -> Any:
        quorum = self._inner._quorum(*args, **given)
        self._heard(quorum)
        return quorum

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _short(name: str) -> str:
    """torchft puts a number behind the name that it was given, new at each start."""
    return name.partition(":")[0]


# --------------------------------------------------------------------------- metrics

REPLICAS = Metric("performance.replicas", "Replica groups that train together.", cost=Cost.HOST)
LOST = Metric(
    "performance.replicas_lost", "Replica groups that were there and are no longer, since the start.", cost=Cost.HOST
)
FAILURES = Metric(
    "performance.commit_failures", "Updates that were left out because groups did not agree on them.", cost=Cost.HOST
)
QUORUM = Metric("performance.quorum", "Number of the quorum: it grows when groups come or go.", cost=Cost.HOST)
HEARTBEAT = Metric(
    "performance.heartbeat_age", "Seconds since the Lighthouse last answered this group.", "s", Cost.HOST
)


class ReplicaProbe:
    """What the manager knows, at the end of each step. Silent where nothing is tolerant of faults."""

    name = "performance-replicas"
    listens_to: tuple[EventKind, ...] = (EventKind.STEP_END,)
    only_when_due = (EventKind.STEP_END,)
    provides: tuple[Metric, ...] = (REPLICAS, LOST, FAILURES, QUORUM, HEARTBEAT)

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        found = next((one for one in _running if one.manager is not None), None)
        if found is None:
            return ()
        numbers = {
            REPLICAS: float(len(found.members) or found.manager.num_participants()),
            LOST: float(len(found.lost)),
            FAILURES: float(found.failures),
            QUORUM: float(found.quorum_id),
            HEARTBEAT: time.monotonic() - found.answered,
        }
        facts = {"lost": ", ".join(found.lost), "left": ", ".join(map(_short, found.members))}
        details = {LOST: lambda: facts}
        return [Sample(metric.name, event.step, value, detail=details.get(metric)) for metric, value in numbers.items()]
