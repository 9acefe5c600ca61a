from __future__ import annotations

import sys
from pathlib import Path

import pytest

from healthcheck.rulelang import sources

sys.path.insert(0, str(Path(__file__).parent))

from language import BASE, registry


@pytest.fixture(scope="module")
def known():
    return registry()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sources, "pack_folder", lambda: tmp_path / "packs")
    (tmp_path / "packs").mkdir()
    (tmp_path / "packs" / "base.yaml").write_text(BASE)
    return tmp_path
