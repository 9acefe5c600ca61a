"""A job in which nothing happens any more: what each rank says of itself, and what follows from all of it.

Each rank's watchdog writes down where its rank stands while it is silent; the rank that speaks reads that of all. What torch's
flight recorder holds (read in this process, as JSON; no file of anybody is opened) says which collectives a rank has entered and left,
those of DDP's backward pass included. Without it, what our own hooks have seen. Where that is not enough to name a rank, it is said.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from healthcheck.actions.diagnostics import where_main_stands
from healthcheck.core.runinfo import Collectives

BUFFER = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""Where the flight recorder's size is set: the name of today, and that of older versions of torch."""
ENTRIES = "1000"
"""Collectives that it keeps, where nobody has said anything."""

Words = Mapping[int, Mapping[str, Any]]


def record_flights(environment: Any = os.environ) -> None:
    """Have torch record collectives, unless somebody has decided about it. Before the process group is made."""
    if not any(name in environment for name in BUFFER):
        environment[BUFFER[0]] = ENTRIES


def word_of(collectives: Collectives | None, step: int, seconds: float) -> dict[str, Any]:
    """Where this rank stands: its step, its last collective, its line of code, and what the flight recorder holds."""
    word: dict[str, Any] = {"step": step, "silent": round(seconds, 1), "at": where_main_stands(), "doing": doing()}
    if collectives is not None:
        word |= {"count": collectives.count, "inside": collectives.inside}
        if collectives.name:
            shape = f" {list(collectives.shape)}" if collectives.dtype else ""
            word["last"] = f"{collectives.name}{shape} {collectives.dtype}".strip()
    flights = recorded()
    if flights:
        word["flights"] = flights
    return word


def doing() -> str:
    """``data`` while the main thread waits for a loader or its data set, ``backward`` inside of a backward pass, else empty."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    found = ""
    while frame is not None:
        path = Path(frame.f_code.co_filename).as_posix()
        if "/torch/utils/data/" in path:
            return "data"
        if path.endswith("/torch/autograd/graph.py") and frame.f_code.co_name == "_engine_run_backward":
            found = "backward"
        frame = frame.f_back
    return found


def recorded() -> dict[str, list[Any]]:
    """What the flight recorder of this process holds, as :func:`flights_of` sums it up; empty without one."""
    core = sys.modules.get("torch._C._distributed_c10d")
    found: dict[str, list[Any]] = {}
    # One is of all backends and one of NCCL alone. Which of them a backend writes to differs between versions of torch.
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(core, name, None)
        if dump is None:
            continue
        try:
            for group, flight in flights_of(json.loads(dump())).items():
                if flight[0] >= found.get(group, [0])[0]:
                    found[group] = flight
        except Exception:  # another form of it: nothing is known then
            continue
    return found


def flights_of(trace: Mapping[str, Any]) -> dict[str, list[Any]]:
    """For each process group ``[number, signature, left]`` of the last collective that was entered.

    ``left`` is whether it was completed. Point-to-point transfers are left out.
    """
    found: dict[str, list[Any]] = {}
    for entry in trace.get("entries", ()):
        number = int(entry.get("collective_seq_id", 0))
        group = "/".join(map(str, entry.get("process_group", ()))) or str(entry.get("pg_id", ""))
        if entry.get("is_p2p") or not number or number < found.get(group, [0])[0]:
            continue
        sizes = ",".join(str(size) for size in entry.get("input_sizes", ()))
        kinds = ",".join(dict.fromkeys(entry.get("input_dtypes", ())))
        name = str(entry.get("profiling_name", "")).partition(":")[2] or str(entry.get("profiling_name", ""))
        done = entry.get("state") == "completed" or bool(entry.get("retired"))
        found[group] = [number, f"{name} {sizes} {kinds}".strip()[:120], done]
    return dict(list(found.items())[:8])


# --------------------------------------------------------------------------------------------------
# What follows from it.


def matched(words: Words, world: int, ended: Sequence[int] = ()) -> dict[str, Any]:
    """What is known of a hang, as facts of its alert. ``ranks`` are those that are named, if any can be.

    :param words: of the ranks that answer, by rank.
    :param ended: ranks that have finished.
    """
    silent = [rank for rank in range(world) if rank not in words and rank not in ended]
    if silent and len(silent) < world:
        plural = len(silent) > 1
        return {
            "ranks": _named(silent),
            "cause": f"rank {_named(silent)} {'do' if plural else 'does'} not answer while others do: dead, stopped, or its node is gone",
            **_steps(words, silent),
        }
    if ended and len(ended) < world:
        gone = _named(ended)
        return {"ranks": gone, "cause": f"rank {gone} has ended, and the others wait", **_places(words)}
    return _by_flights(words) or _by_hooks(words) or _unknown(words)


def _by_flights(words: Words) -> dict[str, Any]:
    """From the flight recorder: who did not enter, whose signature is another, who did not leave."""
    groups = Counter(group for word in words.values() for group in word.get("flights", {}))
    for group, count in groups.most_common():
        flights = {rank: word["flights"][group] for rank, word in words.items() if group in word.get("flights", {})}
        if count < 2 or len(flights) < 2:
            continue
        last = max(number for number, _, _ in flights.values())
        there = {rank: flight for rank, flight in flights.items() if flight[0] == last}
        behind = sorted(rank for rank in flights if rank not in there)
        waiting = [rank for rank, flight in there.items() if not flight[2]]
        if behind and waiting:
            what = Counter(flight[1] for flight in there.values()).most_common(1)[0][0]
            return _missing(words, behind, f"{what} (number {last:,} of its group)", "flight recorder")
        if behind or not waiting:
            continue
        kinds: dict[str, list[int]] = {}
        for rank, flight in sorted(there.items()):
            kinds.setdefault(flight[1], []).append(rank)
        if len(kinds) > 1:
            return _mismatch(words, kinds, last)
        left = [rank for rank in there if rank not in waiting]
        if left:
            return {
                "ranks": _named(waiting),
                "cause": f"rank {_named(waiting)} did not leave {next(iter(kinds))}, which others have left",
                **_places(words),
            }
    return {}


def _missing(words: Words, behind: Sequence[int], what: str, source: str) -> dict[str, Any]:
    first = words[behind[0]]
    loading = [rank for rank in behind if words[rank].get("doing") == "data"]
    where = first.get("at") or "no Python code"
    if loading:
        cause = f"rank {_named(loading)} waits for its data loader; others wait in {what}"
        return {"ranks": _named(loading), "cause": cause, "there": words[loading[0]].get("at", ""), "seen by": source}
    plural = "have" if len(behind) > 1 else "has"
    cause = f"rank {_named(behind)} {plural} not entered {what}"
    return {"ranks": _named(behind), "cause": cause, "there": where, "seen by": source}


def _mismatch(words: Words, kinds: Mapping[str, Sequence[int]], number: int) -> dict[str, Any]:
    ordered = sorted(kinds.items(), key=lambda item: -len(item[1]))
    (usual, most), (other, few) = ordered[0], ordered[1]
    certain = len(most) > len(few)
    return {
        "ranks": _named(few if certain else [*most, *few]),
        "cause": f"ranks are in different collectives (number {number:,}): rank {_named(few)} in {other}, "
        f"rank {_named(most)} in {usual}",
        **({} if certain else {"which": "cannot tell which is right"}),
        "there": words[few[0]].get("at", ""),
        "seen by": "flight recorder",
    }


def _by_hooks(words: Words) -> dict[str, Any]:
    """From what our own hooks have seen: fewer collectives, and none of DDP's own."""
    waiting = sorted(r for r, word in words.items() if word.get("inside") or word.get("doing") == "backward")
    elsewhere = sorted(rank for rank in words if rank not in waiting)
    if not waiting or not elsewhere:
        return {}
    inside = [rank for rank in waiting if words[rank].get("inside")]
    if inside and any(words[rank].get("count", 0) >= words[inside[0]].get("count", 0) for rank in elsewhere):
        return {}
    what = words[inside[0]].get("last", "") if inside else "the reductions of a backward pass"
    return _missing(words, elsewhere, what, "healthcheck's own hooks (no flight recorder)")


def _unknown(words: Words) -> dict[str, Any]:
    cause = "cannot tell which rank the others wait for"
    loading = sorted(rank for rank, word in words.items() if word.get("doing") == "data")
    if len(loading) == len(words):
        cause = "all ranks wait for their data loaders"
    return {"cause": cause, **_places(words)}


def _steps(words: Words, silent: Sequence[int]) -> dict[str, Any]:
    return _places({rank: word for rank, word in words.items() if rank not in silent})


def _places(words: Words) -> dict[str, Any]:
    """Where ranks stand, those at one place together."""
    by_place: dict[str, list[int]] = {}
    for rank, word in sorted(words.items()):
        by_place.setdefault(word.get("at") or "no Python code", []).append(rank)
    texts = [f"rank {_named(ranks)} in {place}" for place, ranks in list(by_place.items())[:3]]
    return {"there": "; ".join(texts)} if texts else {}


def _named(ranks: Sequence[int]) -> str:
    names = [str(rank) for rank in sorted(ranks)]
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
