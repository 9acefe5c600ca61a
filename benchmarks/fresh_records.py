"""Recordings that no rule was made for: fetched from the public repositories that benchmarks/fresh.yaml names.

    python benchmarks/fresh_records.py --to ../fresh                    # clones each repository (without its files) and reads one file
    python benchmarks/fresh_records.py --to ../fresh --mirror DIR       # from git directories DIR/OWNER+NAME/repo
    python benchmarks/detection.py --corpus ../fresh/a --corpus ../fresh/b --corpus ../fresh/c --corpus ../fresh/g

The index has the labels and origins only; the recordings belong to those who published them and stay out of this repository. Each file is
compared with its SHA-256; a ``*`` in a path stands for the name of somebody's machine. Labels were written from plots and numbers before any of our
rules had read a file. Two halves, by a hash of the source: ``a`` was in view when rules were changed, ``b`` was scored before and
after and changed no number (a change that lost one of it was narrowed). ``c`` and ``g`` were gathered later, and scored once before anything was changed.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

INDEX = Path(__file__).resolve().parent / "fresh.yaml"


def git(folder: Path, *words: str) -> bytes:
    """What git says. Raises ``OSError`` with its complaint."""
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, check=False)
    if done.returncode:
        raise OSError(f"{folder}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


def repository(repo: str, mirror: Path | None, cache: Path) -> Path:
    """The git directory of a repository, cloned without its files if it is not here."""
    name = repo.replace("/", "+", 1)
    if mirror is not None:
        folder = mirror / name / "repo"
        return folder / ".git" if (folder / ".git").is_dir() else folder
    folder = cache / name
    if not folder.exists():
        address = f"https://github.com/{repo}.git"
        git(cache, "clone", "--quiet", "--bare", "--filter=blob:none", address, str(folder))
    return folder


def content(folder: Path, source: Mapping[str, str], digest: str) -> bytes:
    """The file of a recording, as it was at its commit. Raises ``OSError`` where it cannot be had."""
    commit, path = source["commit"], source["path"]
    paths = [path]
    if "*" in path:
        parent = path.rpartition("/")[0]
        listed = git(folder, "ls-tree", "--name-only", "-z", commit, *([f"{parent}/"] if parent else []))
        paths = [p for p in listed.decode(errors="replace").split("\0") if p and fnmatchcase(p, path)]
    for found in paths:
        data = git(folder, "show", f"{commit}:{found}")
        if hashlib.sha256(data).hexdigest() == digest:
            return data
    raise OSError(f"{source['repo']}: {path} is not the file that was labelled")


def half(entry: Mapping[str, Any]) -> str:
    """``a``, ``b``, or ``c`` and ``g`` for what was gathered later: all recordings of one source are in the same part."""
    return (
        str(entry["half"])
        if "half" in entry
        else "ab"[int(hashlib.sha256(entry["source"]["repo"].lower().encode()).hexdigest(), 16) % 2]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="outside this repository")
    parser.add_argument("--mirror", type=Path, metavar="FOLDER", help="git directories, instead of the network")
    args = parser.parse_args()
    entries = yaml.safe_load(INDEX.read_text(encoding="utf-8"))["runs"]
    kept: dict[str, list[Any]] = {"a": [], "b": [], "c": [], "g": []}
    missing = 0
    with tempfile.TemporaryDirectory() as cache:
        for entry in entries:
            try:
                folder = repository(entry["source"]["repo"], args.mirror, Path(cache))
                data = content(folder, entry["source"], entry["sha256"])
            except OSError as error:
                print(f"{entry['id']}: {error}", file=sys.stderr)
                missing += 1
                continue
            path = args.to / half(entry) / entry["file"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            kept[half(entry)].append(entry)
    for name, members in kept.items():
        (args.to / name).mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump({"runs": members}, sort_keys=False, allow_unicode=True)
        (args.to / name / "labels.yaml").write_text(text, encoding="utf-8")
    print(f"{sum(map(len, kept.values()))} of {len(entries)} recordings in {args.to}")
    return 1 if missing else 0


if __name__ == "__main__":
    raise SystemExit(main())
