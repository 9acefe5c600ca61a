"""Alerts arrive at a real server on this machine, which may be slow, fail, refuse or redirect."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from healthcheck.testing import FakeTrainer, check_plugin, open_test_session, play

from healthcheck_webhook import Plugin
from healthcheck_webhook.address import Address, BadAddress, refuse
from healthcheck_webhook.messages import slack_body

RULES: dict[str, Any] = {
    "version": 1,
    "rules": {
        "nan": {"metric": "loss", "when": "nonfinite", "severity": "error", "message": "loss is {value} & <b>bad</b>"},
        "high": {"metric": "loss", "when": {"above": 5}, "severity": "warning", "hint": "lower it"},
        "seen": {"metric": "loss", "when": {"above": 4}, "severity": "info"},
    },
}


class Server:
    """Answers as its list of answers says, the last one again and again: a status, or seconds to hang."""

    def __init__(self) -> None:
        self.answers: list[Any] = [200]
        self.bodies: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.headers: dict[str, str] = {}
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.times.append(time.monotonic())
                answer = server.answers.pop(0) if len(server.answers) > 1 else server.answers[0]
                if isinstance(answer, float):
                    server.released.wait(answer)
                    return
                if answer == 200:
                    server.bodies.append(body)
                self.send_response(answer)
                for name, value in server.headers.items():
                    self.send_header(name, value)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.released = threading.Event()
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/services/T0KEN-secret-path"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()


@pytest.fixture
def server() -> Iterator[Server]:
    started = Server()
    yield started
    started.released.set()
    started.http.shutdown()
    started.http.server_close()


@pytest.fixture
def plugin_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The plugin as a local file: the same whether its distribution is installed or not."""
    monkeypatch.setenv("HEALTHCHECK_DISABLE_PLUGINS", "webhook")
    path = tmp_path / "webhook.py"
    path.write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).resolve().parents[1])!r})\n"
        "from healthcheck_webhook import Plugin\n_plugin = Plugin()\n"
        + "".join(f"{name} = _plugin.{name}\n" for name in dir(Plugin) if name.startswith("healthcheck_"))
    )
    return str(path)


@pytest.fixture
def sent(server: Server, plugin_file: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Plays losses under :data:`RULES` with the webhook on; returns the report's section."""
    monkeypatch.setenv("MY_HOOK", server.url)

    def run(losses: str, rules: dict[str, Any] = RULES, **settings: Any) -> dict[str, Any]:
        written = {"webhook.url_env": "MY_HOOK", **{f"webhook.{key}": value for key, value in settings.items()}}
        played = play({**rules, "settings": written}, {"loss": losses}, plugins=[plugin_file])
        section: dict[str, Any] = played.report["webhook"]
        assert server.url not in json.dumps(played.report)
        return section

    return run


def test_the_plugin_fits_the_specification() -> None:
    assert check_plugin(Plugin, "webhook") == []


# --- what arrives


def test_an_alert_is_one_message_in_slacks_form_and_markup_in_it_is_text(
    server: Server, sent: Callable[..., dict[str, Any]]
) -> None:
    assert sent("1 x3, nan, nan, nan") == {"sent": 1, "undelivered": []}
    [body] = server.bodies
    assert body["text"].startswith(":red_circle: *nan* in test, step 4\n")
    assert "loss is nan &amp; &lt;b&gt;bad&lt;/b&gt;" in body["text"]


def test_as_json_it_has_every_value(server: Server, sent: Callable[..., dict[str, Any]]) -> None:
    sent("1 x3, 9", format="json")
    [body] = server.bodies
    [alert] = body["alerts"]
    assert (body["format"], body["version"]) == ("healthcheck.webhook", 1)
    assert {key: alert[key] for key in ("rule", "severity", "step", "value", "hint", "run")} == {
        "rule": "high", "severity": "warning", "step": 4, "value": 9.0, "hint": "lower it", "run": "test",
    }  # fmt: skip


def test_what_is_less_severe_than_asked_for_stays_here(server: Server, sent: Callable[..., dict[str, Any]]) -> None:
    assert sent("1, 4.5, 9", severity="error")["sent"] == 0
    assert sent("1, 4.5, 9", severity="info")["sent"] == 2


def test_without_the_setting_nothing_is_sent_and_nothing_reported(plugin_file: str, server: Server) -> None:
    played = play(RULES, {"loss": "1, nan"}, plugins=[plugin_file])
    assert "webhook" not in played.report
    assert server.times == []


def test_alerts_that_come_faster_than_the_limit_share_a_message(
    server: Server, sent: Callable[..., dict[str, Any]]
) -> None:
    """Twelve at once: the first goes alone or with those beside it, the rest together."""
    server.answers = [200]
    levels = {f"above-{level}": {"metric": "loss", "when": {"above": level}} for level in range(2, 14)}
    assert sent("1, 99", {"version": 1, "rules": levels}, per_minute=6)["sent"] == 12
    assert len(server.bodies) <= 3


# --- what does not


def test_a_server_that_fails_for_a_while_gets_it_later(server: Server, sent: Callable[..., dict[str, Any]]) -> None:
    server.answers = [503, 429, 200]
    assert sent("1, nan") == {"sent": 1, "undelivered": []}
    assert len(server.times) == 3


@pytest.mark.parametrize(
    ("answer", "reason"),
    [(403, "it answered 403"), (404, "it answered 404"), (302, "it redirects (302), which is not followed")],
)
def test_a_refusal_or_a_redirect_is_not_repeated_and_the_alert_is_named(
    server: Server, sent: Callable[..., dict[str, Any]], answer: int, reason: str
) -> None:
    server.answers, server.headers = [answer], {"Location": "https://example.com/elsewhere"}
    [lost] = sent("1, nan")["undelivered"]
    assert (lost["rule"], lost["step"]) == ("nan", 2)
    assert lost["reason"].startswith(reason)
    assert len(server.times) == 1


def test_a_server_that_hangs_for_a_minute_costs_no_step_and_four_seconds_at_the_end(
    server: Server, plugin_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answers = [60.0]
    monkeypatch.setenv("MY_HOOK", server.url)
    settings = {"webhook.url_env": "MY_HOOK", "webhook.timeout": 60}
    trainer = FakeTrainer(open_test_session({**RULES, "settings": settings}, plugins=[plugin_file]))
    for loss in (1.0, float("nan"), 1.0):
        trainer.train_step(loss)
    began = time.monotonic()
    [lost] = trainer.finish()["webhook"]["undelivered"]
    assert 3.9 < time.monotonic() - began < 5
    assert (lost["rule"], lost["reason"]) == ("nan", "not sent before the end of the run")


def test_where_nobody_listens_the_alert_is_named(
    sent: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("healthcheck_webhook.LAST_SECONDS", 1.0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MY_HOOK", f"http://127.0.0.1:{taken.getsockname()[1]}/x")
        [lost] = sent("1, nan")["undelivered"]
    assert lost["reason"] == "no connection (ConnectionRefusedError); not sent before the end of the run"


# --- addresses


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("", "not set"),
        ("http://hooks.example.com/x", "only https"),
        ("ftp://hooks.example.com/x", "does not begin with https"),
        ("https://user:pw@hooks.example.com/x", "user or a password"),
        ("https://", "does not begin with https"),
        ("https://hooks.example.com:99999999/x", "cannot be read"),
        ("https://hooks.example.com/a b\r\nHost: other", "spaces"),
    ],
)
def test_an_address_that_cannot_be_right_is_refused_without_being_repeated(address: str, why: str) -> None:
    with pytest.raises(BadAddress, match=why) as raised:
        Address.of(address)
    assert "hooks.example" not in str(raised.value)


@pytest.mark.parametrize(
    "numeric",
    ["169.254.169.254", "169.254.7.7", "fe80::1", "::ffff:169.254.169.254", "fd00:ec2::254", "100.100.100.200",
     "168.63.129.16", "0.0.0.0", "::", "224.0.0.1", "255.255.255.255", "127.0.0.1", "::1", "::ffff:127.0.0.1"],
)  # fmt: skip
def test_a_name_that_means_metadata_link_local_or_this_machine_is_refused(numeric: str) -> None:
    with pytest.raises(BadAddress):
        refuse(numeric, loopback=False)


@pytest.mark.parametrize(("numeric", "loopback"), [("10.1.2.3", False), ("140.82.1.1", False), ("127.0.0.1", True)])
def test_private_and_public_addresses_are_used(numeric: str, loopback: bool) -> None:
    refuse(numeric, loopback)


def test_a_name_is_looked_at_after_it_was_resolved(
    sent: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("169.254.169.254", 443))]
    )
    monkeypatch.setenv("MY_HOOK", "https://rebound.example.com/x")
    [lost] = sent("1, nan")["undelivered"]
    assert lost["reason"] == "its host resolves to a metadata service"


def test_the_address_in_place_of_its_name_is_refused_without_being_shown(plugin_file: str) -> None:
    from healthcheck import RuleFileError

    rules = {**RULES, "settings": {"webhook.url_env": "https://hooks.slack.com/services/T/B/SECRET"}}
    with pytest.raises(RuleFileError, match="expected the name of an environment variable") as raised:
        play(rules, {"loss": "1"}, plugins=[plugin_file])
    assert "SECRET" not in str(raised.value)


def test_texts_are_cut_and_nobody_is_called_by_them() -> None:
    one = {"rule": "r", "cause": "", "run": "<!channel>", "step": 1, "rank": 0, "ranks": 1, "severity": "error",
           "message": "<https://evil|click>", "where": "", "done": [], "hint": ""}  # fmt: skip
    text = json.loads(slack_body([one]))["text"]
    assert "<" not in text


# --- under `healthcheck run`, in a process of its own

SCRIPT = """
import time, torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
times = []
for step in range(60):
    began = time.perf_counter()
    optimizer.zero_grad()
    loss = model(torch.ones(8, 4)).mean() * (float("nan") if step == 30 else 1.0)
    loss.backward()
    optimizer.step()
    times.append(time.perf_counter() - began)
print("slowest", max(times[5:]))
"""


@pytest.mark.slow
def test_a_script_whose_webhook_hangs_ends_in_time_and_no_token_is_left_anywhere(
    server: Server, plugin_file: str, tmp_path: Path
) -> None:
    server.answers = [60.0]
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "rules.yaml").write_text(
        "version: 1\nextends: [healthcheck:recommended]\nsettings: {webhook.url_env: MY_HOOK, webhook.timeout: 60}\n"
        "rules: {loss-not-finite: {then: [warn]}, grads-not-finite: {then: [warn]}}\n"
    )
    tokens = {
        "MY_HOOK": server.url,
        "WANDB_API_KEY": "f00dfacef00dfacef00dfacef00dfacef00dface",
        "HF_TOKEN": "hf_Abcdefghijkl",
    }
    env = {k: v for k, v in os.environ.items() if not k.startswith("HEALTHCHECK")} | tokens
    env |= {
        "HEALTHCHECK_RUNS": str(tmp_path / "runs"),
        "HEALTHCHECK_DISABLE_PLUGINS": "webhook",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "healthcheck", "run", "-p", plugin_file, "--rules", "rules.yaml", "--report",
               "html=page.html", "train.py", "--api-key", "sk-argvargvargv1234"]  # fmt: skip
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    ended = time.monotonic()
    assert server.times, result.stderr
    assert ended - server.times[0] < 40  # the server holds each request for a minute
    assert float(result.stdout.split("slowest")[1]) < 20  # no step waited for it, however loaded this machine is
    assert "webhook: not delivered: loss-not-finite at step 31" in result.stderr
    report = json.loads(next((tmp_path / "runs").glob("*/report.json")).read_text())
    assert "loss-not-finite" in {one["rule"] for one in report["webhook"]["undelivered"]}
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".py"]
    everything = b"\n".join([*written, result.stdout.encode(), result.stderr.encode()])
    for secret in (*tokens.values(), "T0KEN-secret-path", "sk-argvargvargv1234"):
        assert secret.encode() not in everything
