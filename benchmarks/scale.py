"""What ranks tell each other, at numbers of ranks that this machine does not have: bytes, requests to the store, host time, memory.

    python benchmarks/scale.py                    # the table of docs/explanation/scale.md
    python benchmarks/scale.py --ranks 8 64 512   # fewer

All ranks of a comparison are played one after the other, by the same code as in a run, over one real TCP store on this machine. What
is measured: requests and bytes, which do not depend on the machine; the processor time of them (of all ranks and the store together) and
of what the rank that hears does with them, which do.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from healthcheck.instrument.exchange import FANOUT, StoreExchange
from healthcheck.probes.parity import SLOTS, ParityJudge, group_text


class Counted:
    """A store that counts what passes through it."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.requests = self.sent = self.received = 0
        self.seconds = 0.0

    def _timed(self, function: Any, *given: Any) -> Any:
        self.requests += 1
        began = time.perf_counter()
        try:
            return function(*given)
        finally:
            self.seconds += time.perf_counter() - began

    def set(self, key: str, value: str) -> None:
        self.sent += len(key) + len(value)
        self._timed(self.store.set, key, value)

    def get(self, key: str) -> bytes:
        value: bytes = self._timed(self.store.get, key)
        self.received += len(value)
        return value

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        values: list[bytes] = self._timed(self.store.multi_get, keys)
        self.received += sum(map(len, values))
        return values

    def check(self, keys: Sequence[str]) -> bool:
        self.sent += sum(map(len, keys))
        return bool(self._timed(self.store.check, keys))

    def has_extended_api(self) -> bool:
        return bool(self.store.has_extended_api())


def word(rank: int, group: str) -> dict[str, Any]:
    """What a rank of a data-parallel job says in one comparison: as long as a real one."""
    return {
        "y": 1, "u": 2861503411, "g": group, "d": group, "l": 3035418276, "c": 148, "m": 1, "r": [0.0006],
        "w": [n * 134217689 % 2**32 for n in range(1, SLOTS + 1)], "t": [3912384123], "n": [123456789, 987654321],
        "b": [4000000000 - rank, 3000000000 - rank], "o": [(2.5 + rank / 7e5).hex(), (2.4 + rank / 7e5).hex()],
    }  # fmt: skip


def played(world: int, store: Any, fanout: int) -> dict[str, Any]:
    counted = Counted(store)
    ranks = [
        StoreExchange(counted, rank, world, hears=rank == 0, broadcast=lambda message: None, fanout=fanout)
        for rank in range(world)
    ]
    place = f"{world}/{fanout}"
    group = group_text(range(world))
    cpu = time.process_time()
    for rank in ranks:
        rank.say("parity", 50, word(rank.rank, group))
        rank.turn(place, lambda: 0)
    for rank in ranks[fanout::fanout]:  # leaders have not seen all of their group before
        rank.turn(place, lambda: 0)
    others, before = time.process_time() - cpu, counted.received
    heard: Any = []
    cpu = time.process_time()
    while not heard:
        ranks[0].turn(place, lambda: 0)
        heard = ranks[0].heard("parity")
    read = time.process_time() - cpu
    cpu = time.process_time()
    found = ParityJudge().check(50, heard[0][1])
    judged = time.process_time() - cpu
    assert len(heard[0][1]) == world
    assert all(one.value == 0 for one in found)
    tracemalloc.start()
    kept = json.loads(json.dumps({rank: dict(said) for rank, said in heard[0][1].items()}))
    memory = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(kept) == world
    return {
        "word": len(json.dumps([50, word(0, group)], separators=(",", ":"))),
        "requests": counted.requests,
        "stored": counted.sent,
        "rank 0 reads": counted.received - before,
        "store": others,
        "read": read,
        "judged": judged,
        "memory": memory,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 4096, 16384])
    given = parser.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    ).stdout.strip()
    print(f"commit {commit}, torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}\n")
    print(
        "| ranks | groups of | a word | requests | into the store | processor time of all | rank 0 reads | in | judges in | memory |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for world in given.ranks:
        for fanout in (FANOUT, world) if world > FANOUT else (FANOUT,):
            row = played(world, store, fanout)
            print(
                f"| {world:,} | {'all' if world <= fanout else fanout} | {row['word']:,} B | {row['requests']:,} "
                f"| {row['stored'] / 1e6:.2f} MB | {row['store']:.2f} s | {row['rank 0 reads'] / 1e6:.2f} MB "
                f"| {row['read'] * 1e3:,.0f} ms | {row['judged'] * 1e3:,.0f} ms | {row['memory'] / 1e6:.1f} MB |",
                flush=True,
            )


if __name__ == "__main__":
    sys.exit(main())
