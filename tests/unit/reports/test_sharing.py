"""What ``report --share`` takes out, and what it leaves."""

from __future__ import annotations

import pytest

from healthcheck.record.sharing import names_to_hide, shareable

FACTS = {"host": "gpu-12", "folder": "/home/alice/work/llm"}


@pytest.mark.parametrize(
    ("text", "shared"),
    [
        ("evidence: /home/alice/runs/1127/alerts/001", "evidence: <path>/001"),
        ("C:\\Users\\alice\\train.py failed", "<path>/train.py failed"),
        ("on gpu-12 only", "on <host> only"),
        ("by alice", "by <user>"),
        ("gpu-123 and malice stay", "gpu-123 and malice stay"),
        ("loss is nan, 3/4 of values", "loss is nan, 3/4 of values"),
        ("first bad gradient: blocks.3.attn/out.weight", "first bad gradient: blocks.3.attn/out.weight"),
        ("healthcheck-runs/latest/alerts/001", "healthcheck-runs/latest/alerts/001"),
    ],
)
def test_names_and_absolute_paths_go_and_the_rest_stays(text: str, shared: str) -> None:
    assert shareable({"message": text}, names_to_hide(FACTS))["message"] == shared


def test_host_folder_and_command_line_are_dropped() -> None:
    given = {"run": {**FACTS, "argv": ["x"], "pid": 3, "job": {}, "target": "train.py"}, "numbers": [1, 2.5, None]}
    assert shareable(given, names_to_hide(FACTS)) == {"run": {"target": "train.py"}, "numbers": [1, 2.5, None]}
