"""Every plugin of this folder from its wheel, in an environment of its own, with the packages that it needs: `make outward`.

    python plugins/outward.py DIST [--into FOLDER] [--only nvml webhook ...] [-- PYTEST ARGUMENTS]

For each distribution, in this order: a fresh environment that holds its wheel, ours, and what its wheel says it needs (from the index);
torch and the other requirements of ours are lent by a path file from the environment that runs this script. Then `healthcheck plugins` must
list it with its distribution, the rule file of its README must be accepted, and its tests must pass, with the plugin loaded through its
entry point. One environment for each, so that no plugin lives on what another one brought.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
EXAMPLE = "example"  # tests/plugins/clean_venv.py has it
README_RULES = re.compile(r"^```yaml needs-plugin\n(.*?)^```", re.MULTILINE | re.DOTALL)


def plugins() -> list[str]:
    found = sorted(path.parent.name.removeprefix("healthcheck-") for path in HERE.glob("healthcheck-*/pyproject.toml"))
    return [name for name in found if name != EXAMPLE]


def wheel(dist: Path, name: str) -> Path:
    found = sorted(dist.glob(f"{name}-*.whl"))
    if not found:
        raise SystemExit(f"{dist} holds no wheel of {name}: make wheels")
    return found[-1]


class Environment:
    """A fresh virtual environment of one plugin."""

    def __init__(self, folder: Path, dist: Path, name: str) -> None:
        self.folder, self.name = folder, name
        venv.create(folder / "venv", with_pip=False, symlinks=os.name != "nt", clear=True)
        self.bin = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
        self.python = self.bin / "python"
        ours, mine = wheel(dist, "torch_healthcheck"), wheel(dist, f"healthcheck_{name}")
        pip = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(self.python),
            "install",
            "--quiet",
            "--disable-pip-version-check",
        ]
        subprocess.run([*pip, "--no-deps", "--no-index", str(ours), str(mine)], check=True)
        lent = [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
        where = self.run(self.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip()
        (Path(where) / "lent_requirements.pth").write_text("\n".join(lent) + "\n")
        # Only now, so that pip finds torch and the like there and fetches nothing but what is lacking.
        subprocess.run([*pip, str(mine)], check=True)

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("HEALTHCHECK", "PYTHON", "VIRTUAL_ENV"))}
        env |= {
            "HEALTHCHECK_RUNS": str(self.folder / "runs"),
            "OMP_NUM_THREADS": "1",
            "TRACKIO_DIR": str(self.folder / "trackio"),
        }
        return subprocess.run([str(part) for part in command], cwd=self.folder, env=env, capture_output=True, text=True)

    def must(self, *command: str | Path) -> str:
        result = self.run(*command)
        if result.returncode:
            raise AssertionError(
                f"{' '.join(map(str, command))} exited {result.returncode}\n{result.stdout}{result.stderr}"
            )
        return result.stdout


def prove(environment: Environment, arguments: Sequence[str]) -> str:
    """What must hold; returns the last line of the tests."""
    name, source = environment.name, HERE / f"healthcheck-{environment.name}"
    command = environment.bin / "healthcheck"
    home = environment.must(environment.python, "-c", f"import healthcheck_{name} as m; print(m.__file__)").strip()
    assert environment.folder.resolve() in Path(home).resolve().parents, f"{name} comes from {home}, not from its wheel"
    listed = environment.must(command, "plugins")
    assert f"healthcheck-{name}" in listed, listed
    found = README_RULES.search((source / "README.md").read_text(encoding="utf-8"))
    if found is not None:
        (environment.folder / "rules.yaml").write_text(found[1], encoding="utf-8")
        environment.must(command, "check", "rules.yaml")
    tests = environment.run(
        environment.python, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-p", "no:anyio", "--import-mode=importlib",
        f"--rootdir={source}", "-c", source / "pyproject.toml", *arguments, source / "tests",
    )  # fmt: skip
    if tests.returncode:
        raise AssertionError(tests.stdout + tests.stderr)
    skipped = [line for line in tests.stdout.splitlines() if line.startswith("SKIPPED")]
    return "\n    ".join([tests.stdout.strip().splitlines()[-1], *skipped])


def main() -> int:
    argv = sys.argv[1:]
    own, after = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = argparse.ArgumentParser(description="Install and test every plugin from its wheel.")
    parser.add_argument("dist", type=Path)
    parser.add_argument("--only", nargs="*", default=plugins())
    parser.add_argument("--into", type=Path, help="keep the environments there")
    given = parser.parse_args(own)
    failed = []
    with tempfile.TemporaryDirectory(prefix="healthcheck-outward-") as scratch:
        for name in given.only:
            folder = (given.into or Path(scratch)).resolve() / name
            folder.mkdir(parents=True, exist_ok=True)
            try:
                print(f"{name}: {prove(Environment(folder, given.dist.resolve(), name), after)}", flush=True)
            except (AssertionError, subprocess.CalledProcessError) as error:
                failed.append(name)
                print(f"{name}: FAILED\n{error}", flush=True)
    print(f"failed: {', '.join(failed)}" if failed else f"{len(given.only)} plugins: installed, found, used, tested")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
