"""Secrets do not reach files: command lines, texts, environment."""

from __future__ import annotations

import time

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


@pytest.mark.parametrize(
    "unit", ["a", "key", "key=(", "https://", "http://hook/", "--", "--pass ", "aB1", "cookie: ", "\\'key", "keyerror"]
)
def test_a_long_text_is_searched_in_time_that_grows_with_its_length(unit: str) -> None:
    def seconds(length: int) -> float:
        text = (unit * length)[:length]
        started = time.process_time()
        redact_text(text)
        return time.process_time() - started

    assert min(seconds(8_000) for _ in range(3)) < 0.2


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


FAMILIES = {
    "options": [["--pass", "S3cr3t"], ["--pwd", "S3cr3t"], ["--passphrase", "S3cr3t"], ["--cookie", "S3cr3t"], ["--pin", "S3cr3t"], ["--db-pass", "S3cr3t"],
        ["--otp", "S3cr3t"], ["--jwt", "S3cr3t"], ["--signature", "S3cr3t"], ["--dsn", "S3cr3t"], ["--creds", "S3cr3t"], ["--private-pem", "S3cr3t"]],
    "assignments": [["--pass=S3cr3t"], ["db.pwd=S3cr3t"], ["pin=S3cr3t"], ["session_cookie=S3cr3t"], ["hydra.job.env.PGPASS=x", "db_pass='S3cr3t'"]],
    "addresses": [["https://h/x?sig=S3cr3t&y=1"], ["https://h/x?X-Amz-Signature=S3cr3t"], ["https://h/x?X-Goog-Signature=S3cr3t&a=1"],
        ["https://h/x?sv=1&se=2&sig=S3cr3t"], ["s3://S3cr3t:S3cr3t@h/b"], ["https://h/x?X-Amz-Credential=S3cr3t"], ["postgres://u:S3cr3t@h/db"],
        ["https://hooks.slack.com/services/T0/B0/S3cr3t"], ["https://discord.com/api/webhooks/1/S3cr3t"]],
    "headers": [["-H", "Cookie: a=S3cr3t; b=S3cr3t"], ["-H", "Authorization: Basic S3cr3t"], ["-H", "X-Api-Key: S3cr3t"]],
    "configuration": [['{"pwd": "S3cr3t"}'], ["{'pin': 'S3cr3t'}"], ["db:\n  pass: S3cr3t\n"], ['{"pass":"S3cr3t"}']],
    "shapes": [["sk_live_S3cr3tS3cr3t"], ["npm_S3cr3tS3cr3tS3cr3t"], ["pypi-S3cr3tS3cr3tS3cr3t"], ["ya29.S3cr3tS3cr3t"], ["SG.S3cr3tS3cr.S3cr3tS3cr"],
        ["nvapi-S3cr3tS3cr3t"], ["123456789:S3cr3tS3cr3tS3cr3tS3cr3tS3cr3tS3cr3"], ["-----BEGIN RSA PRIVATE KEY-----\nS3cr3t\n-----END RSA PRIVATE KEY-----"],
        ["-----BEGIN PGP PRIVATE KEY BLOCK-----\nS3cr3t"], ["dckr_pat_S3cr3tS3cr3tS3cr3t"], ["hvs.S3cr3tS3cr3tS3cr3t"], ["xapp-1-S3cr3tS3cr3t"]],
    "logins": [["-u", "me:S3cr3t"], ["--proxy-user", "me:S3cr3t"], ["machine h login me password S3cr3t"], ["--mysql-pw", "S3cr3t"], ["--totp", "S3cr3t"]],
    "webhooks": [["https://x.webhook.office.com/webhookb2/S3cr3t"], ["https://hooks.zapier.com/hooks/catch/1/S3cr3t"], ["--webhook-url", "https://h/S3cr3t"],
        ["https://api.telegram.org/bot123456789:S3cr3tS3cr3tS3cr3tS3cr3tS3cr3tS3cr3/send"], ["https://maker.ifttt.com/trigger/x/with/key/S3cr3t"]],
    "nested": [[r'{\"password\": \"S3cr3t\"}'], ["{'token': b'S3cr3t'}"], ['{"tokens": ["S3cr3t", "S3cr3t"]}'], ["x?next=a%3Fpassword%3DS3cr3t"],
        ["bash", "-c", "train --api-key S3cr3t --lr 1"], ["curl -u me:S3cr3t https://h"], ["--user=me:S3cr3t"], ["https://h/callback?code=S3cr3t"]],
}  # fmt: skip


@pytest.mark.parametrize("argv", [argv for family in FAMILIES.values() for argv in family], ids=" ".join)
def test_every_family_of_secrets_is_taken_out(argv: list[str]) -> None:
    shown = " ".join(redact_argv(["train.py", *argv, "--lr", "0.1"]))
    assert "S3cr3t" not in shown
    assert shown.startswith("train.py ")
    assert shown.endswith(" --lr 0.1")


def test_keys_of_services_that_no_list_knows_go_by_their_randomness() -> None:
    assert redact_text("--x q7RtZ2mKp9LwV4sXc8Nd1YbG6hJ3fQ0a") == f"--x {REDACTED}"
    assert redact_text("id svc_q7RtZ2mKp9LwV4sXc8Nd1YbG6h.x") == f"id svc_{REDACTED}.x"
    assert redact_text("a1b2c3d4e5f60718293a4b5c6d7e8f9012345678") == REDACTED


@pytest.mark.parametrize(
    "text",
    [
        "KeyError: 'loss'",
        "TokenizerError: no file",
        "Wav2Vec2ForSequenceClassification, Qwen3OmniMoeTalkerTextMLP",
        "--revision=a1b2c3d4e5f60718293a4b5c6d7e8f9012345678",
        "commit: a1b2c3d4e5f60718293a4b5c6d7e8f9012345678",
        "/hub/snapshots/a1b2c3d4e5f60718293a4b5c6d7e8f9012345678/model.safetensors",
        "http://localhost:6006/a?code_version=3",
        "--user me",
    ],
)
def test_names_of_classes_errors_and_hashes_stay(text: str) -> None:
    assert redact_text(text) == text


@pytest.mark.parametrize(
    "argv",
    [
        ["--pin-memory", "True"],
        ["--passes", "3"],
        ["--sigma", "0.5"],
        ["--pattern", "x"],
        ["--one-pass-eval", "1"],
        ["in the forward pass: 3 modules"],
        ["--data=/spin/x"],
        ["compass=3"],
    ],
    ids=" ".join,
)
def test_names_that_only_resemble_them_stay(argv: list[str]) -> None:
    assert redact_argv(argv) == argv
