"""Install wheels into a fresh environment and use them there, as an outsider would.

    python tests/plugins/clean_venv.py dist/*.whl

The environment holds nothing but the given wheels; torch and the other requirements are lent to
it by a path file from the environment that runs this script, so that nothing is downloaded. Used
by ``.ci/run`` and by ``test_example_distribution.py``.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = ROOT / "plugins" / "healthcheck-example"


def rules_of_the_readme() -> str:
    """The rule file that the plugin's README shows: its only valid proof is an installed plugin."""
    found = re.search(r"^```yaml needs-plugin\n(.*?)^```", (PLUGIN / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


class CleanEnvironment:
    """A virtual environment with the given wheels in it."""

    def __init__(self, folder: Path, wheels: list[Path]) -> None:
        self.folder = folder
        venv.create(folder / "venv", with_pip=False, symlinks=os.name != "nt")
        self.bin = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
        self.python = self.bin / "python"
        # The wheels come first: pip must not find the lent copy of us and call the work done.
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--quiet"]
        subprocess.run([*pip, "--no-deps", "--no-index", *map(str, wheels)], check=True)
        # All of them: an environment may itself be lent the packages of another one.
        lent = [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
        own = Path(self.read("import sysconfig; print(sysconfig.get_path('purelib'))"))
        (own / "lent_requirements.pth").write_text("\n".join(lent) + "\n")

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a command outside the checkout, without any variable that could lead back to it."""
        env = {k: v for k, v in os.environ.items() if not k.startswith(("HEALTHCHECK", "PYTHON", "VIRTUAL_ENV"))}
        env |= {"HEALTHCHECK_RUNS": str(self.folder / "runs"), "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [str(part) for part in command], cwd=self.folder, env=env, capture_output=True, text=True, timeout=300
        )

    def read(self, code: str) -> str:
        result = self.run(self.python, "-c", code)
        if result.returncode:
            raise AssertionError(f"python -c {code!r} exited {result.returncode}\n{result.stderr}")
        return result.stdout.strip()

    def command(self, *args: str | Path, expect: int = 0) -> str:
        """``healthcheck ARGS`` by its installed console script; both streams."""
        result = self.run(self.bin / "healthcheck", *args)
        if result.returncode != expect:
            raise AssertionError(
                f"healthcheck {' '.join(map(str, args))} exited {result.returncode}, not {expect}\n"
                f"{result.stdout}{result.stderr}"
            )
        return result.stdout + result.stderr


def prove(environment: CleanEnvironment) -> None:
    """What must hold in an environment that was built from the two wheels."""
    home = Path(environment.read("import healthcheck; print(healthcheck.__file__)")).resolve()
    assert environment.folder.resolve() in home.parents, f"healthcheck comes from {home}, not from its wheel"
    packs = environment.read(
        "from importlib.resources import files; print(*sorted(f.name for f in files('healthcheck.rulepacks').iterdir()))"
    )
    assert "recommended.yaml" in packs, f"the wheel holds no recommended pack: {packs}"
    listed = environment.command("plugins")
    assert "healthcheck_example" in listed, listed
    assert "healthcheck-example" in listed, f"the plugin's distribution is not named:\n{listed}"
    rules = environment.folder / "rules.yaml"
    rules.write_text(rules_of_the_readme())
    environment.command("check", rules)
    assert "healthcheck_example.weight_norm" in environment.command("metrics", "--all")
    tests = environment.run(environment.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", PLUGIN / "tests")
    assert tests.returncode == 0, tests.stdout + tests.stderr


def main() -> None:
    parser = argparse.ArgumentParser(description="Prove that wheels work in a fresh environment.")
    parser.add_argument("wheels", nargs="+", type=Path)
    wheels = [path.resolve() for path in parser.parse_args().wheels]
    with tempfile.TemporaryDirectory() as folder:
        prove(CleanEnvironment(Path(folder), wheels))
    print(f"clean environment: {', '.join(path.name for path in wheels)}: installed, found, tested")


if __name__ == "__main__":
    main()
