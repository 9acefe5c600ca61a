"""Secrets do not reach files: command lines, texts, environment."""

from __future__ import annotations

import pytest

from healthcheck.core.redact import REDACTED, allowed_environment, redact_argv, redact_text


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--api-key", "S", "--lr", "3e-4"], ["--api-key", REDACTED, "--lr", "3e-4"]),
        (["--api_key=S"], [f"--api_key={REDACTED}"]),
        (["--hub-token", "S", "T", "-v"], ["--hub-token", REDACTED, REDACTED, "-v"]),
        (["--CLIENT_SECRET", "S"], ["--CLIENT_SECRET", REDACTED]),
        (["--db.password", "S"], ["--db.password", REDACTED]),
        (["wandb.api_key=S", "seed=1"], [f"wandb.api_key={REDACTED}", "seed=1"]),
        (["--use-token", "--lr", "0.1"], ["--use-token", "--lr", "0.1"]),
        (["--bias", "-1.5"], ["--bias", "-1.5"]),
        (["https://me:S@host/x?a=1"], [f"https://{REDACTED}@host/x?a=1"]),
        (["https://host/x?access_token=S&b=2"], [f"https://host/x?access_token={REDACTED}&b=2"]),
        (["--header", "Authorization: Bearer S.S-S"], ["--header", f"Authorization: {REDACTED}"]),
        (['{"api_key": "S", "lr": 1}'], [f'{{"api_key": "{REDACTED}", "lr": 1}}']),
        (["hf_abcdefghijklmnop"], [REDACTED]),
        (["train.py", "--data", "/data/monkeys"], ["train.py", "--data", "/data/monkeys"]),
    ],
)
def test_command_lines_lose_their_secrets_and_nothing_else(argv: list[str], expected: list[str]) -> None:
    assert redact_argv(argv) == expected


@pytest.mark.parametrize(
    "text",
    [
        "Bearer abcdef123456",
        "sk-abcdefghijklmnop",
        "ghp_abcdefghijklmnopqrst",
        "AKIAABCDEFGHIJKLMNOP",
        "eyJhbGciOiJI.eyJzdWIiOiIx.sig",
    ],
)
def test_well_known_token_shapes_go_without_a_name(text: str) -> None:
    assert redact_text(f"x {text} y") in (f"x {REDACTED} y", f"x Bearer {REDACTED} y")


def test_plain_text_stays_as_it_is() -> None:
    text = "loss is nan at step 131; lr 3e-4; see s3://bucket/path@v2"
    assert redact_text(text) == text


def test_the_environment_is_an_allow_list() -> None:
    given = {
        "RANK": "3",
        "NCCL_DEBUG": "INFO",
        "NCCL_SECRET": "S",
        "HOME": "/root",
        "AWS_SECRET_ACCESS_KEY": "S",
        "SLURM_JOB_ID": "7",
    }
    assert allowed_environment(given) == {"RANK": "3", "NCCL_DEBUG": "INFO", "SLURM_JOB_ID": "7"}
