"""What an agent gets of scripts with a known fault: cause, place and remedy, in bytes.

    python plugins/healthcheck-mcp/benchmarks/why_of_cases.py FOLDER [--most 10] [--keep RUNS]

Each ``*_fault.py`` of the folder is run under ``healthcheck run`` (a few seconds to a minute each), then the server is started over
stdio and asked by the SDK's client: ``why`` of each run. A line of the table says the rule, the cause, the place (that of the fault, or
"the loop" where no line is to blame and the answer gives the lines of the training loop), whether there is a remedy, and the bytes. Ends with 1 unless every answer has all three in less than 4 kB; a run without any alert is
shown as silent and counts as a miss.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from mcp import Client
from mcp.client.stdio import StdioServerParameters

SERVER = "import sys; sys.path.insert(0, {home!r}); from healthcheck_mcp.server import main; main()"


async def ask(root: Path, runs: dict[str, str]) -> list[tuple[str, dict, int]]:
    home = str(Path(__file__).resolve().parents[1])
    server = StdioServerParameters(
        command=sys.executable, args=["-c", SERVER.format(home=home), "--root", str(root)], env=dict(os.environ)
    )
    found = []
    async with Client(server) as client:
        for script, run in runs.items():
            result = await client.call_tool("why", {"run": run})
            text = result.content[0].text
            found.append((script, json.loads(text)["data"], len(text.encode())))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--most", type=int, default=10)
    parser.add_argument("--keep", type=Path, help="folder for the records; without it a temporary one")
    given = parser.parse_args()
    root = given.keep or Path(tempfile.mkdtemp(prefix="healthcheck-cases-"))
    runs = {}
    for script in sorted(given.folder.glob("*_fault.py"))[: given.most]:
        env = {**os.environ, "HEALTHCHECK_RUNS": str(root), "OMP_NUM_THREADS": "1"}
        subprocess.run(
            [sys.executable, "-m", "healthcheck", "run", str(script)], env=env, capture_output=True, cwd=root.parent
        )
        newest = max((path for path in root.iterdir() if path.is_dir() and not path.is_symlink()), key=os.path.getctime)
        runs[script.name] = newest.name
    good = 0
    print("| script | rule | cause | place | remedy | bytes |\n|---|---|---|---|---|---|")
    for script, data, size in asyncio.run(ask(root, runs)):
        alert = data.get("alert") or {}
        places = data.get("places_of_the_loop") or {}
        loop = next((place for role in ("backward", "optimizer", "zero_grad") for place in places.get(role, ())), "")
        where = alert.get("where") or (f"{loop} (the loop)" if loop else "")
        complete = bool(alert.get("rule") and where and alert.get("hint") and size < 4000)
        good += complete
        shown = [
            alert.get("rule", "silent"),
            alert.get("cause", ""),
            alert.get("where", ""),
            "yes" if alert.get("hint") else "no",
        ]
        print(f"| {script} | {' | '.join(shown)} | {size} |", flush=True)
    print(f"{good} of {len(runs)} with cause, place and remedy in less than 4 kB")
    return 0 if good == len(runs) else 1


if __name__ == "__main__":
    raise SystemExit(main())
