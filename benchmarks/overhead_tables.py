"""Ratios of paired blocks, and the tables that are printed from the JSON of a run."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROUNDS = 2000


def bootstrap(ratios: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the median, by resampling blocks."""
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(ROUNDS))
    return medians[int(0.025 * ROUNDS)], medians[int(0.975 * ROUNDS) - 1]


def rows_of(times: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """One row per variant from its seconds per step, block by block; the first variant is the base.

    ``ms``: median step time. ``ratio``, ``low``, ``high``: median of the paired ratios and its interval.
    """
    base = next(iter(times.values()))
    rows = []
    for name, own in times.items():
        ratios = [mine / plain for mine, plain in zip(own, base, strict=True)]
        low, high = bootstrap(ratios)
        row = {"variant": name, "ms": statistics.median(own) * 1e3, "ratio": statistics.median(ratios)}
        rows.append({**row, "low": low, "high": high, "blocks": len(ratios), "ratios": [round(r, 6) for r in ratios]})
    return rows


def line(row: Mapping[str, Any]) -> str:
    return f"{row['variant']:52} {row['ms']:10.3f} ms  {row['ratio']:.4f}  [{row['low']:.4f}, {row['high']:.4f}]"


def markdown(table: Mapping[str, Any]) -> str:
    """One case as Markdown: what ran where, and a row per variant."""
    kind = [
        table["case"],
        "torch.compile" if table["compiled"] else "eager",
        "fused AdamW" if table["fused"] else "AdamW",
    ]
    lines = [
        f"### {', '.join(kind)}",
        "",
        f"{table['device']}; torch {table['torch']}, Python {table['python']}, healthcheck {table['healthcheck']}"
        f"{' at ' + table['commit'] if table.get('commit') else ''}; {table['parameters']:,} parameters in "
        f"{table['tensors']:,} tensors; {table['rows'][0]['blocks']} blocks of {table['steps']} steps"
        f"{', CPU time' if table['clock'] == 'cpu' else ''}; {table['date']}",
        "",
        f"`{table['command']}`",
        "",
        "| variant | ratio | 95 % interval |",
        "|---|---|---|",
    ]
    lines += [f"| {r['variant']} | {r['ratio']:.4f} | {r['low']:.4f} to {r['high']:.4f} |" for r in table["rows"][1:]]
    lines += [f"| {name} | did not run: {why} | |" for name, why in table.get("failed", {}).items()]
    return "\n".join(lines) + "\n"


def print_tables(files: Sequence[str]) -> None:
    """What ``--table`` prints."""
    for file in files:
        content = json.loads(Path(file).read_text())
        for table in content["tables"]:
            print(markdown(table))
