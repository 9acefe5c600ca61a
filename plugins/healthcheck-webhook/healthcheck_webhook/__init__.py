"""What healthcheck sees of healthcheck-webhook: settings, and three hooks that hear of alerts."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from healthcheck import Alert, BackgroundSender, Event, Session, Setting, Severity, hookimpl

from healthcheck_webhook.address import Address, BadAddress
from healthcheck_webhook.messages import ending_content, json_body, message, slack_body
from healthcheck_webhook.post import post

LAST_SECONDS = 4.0
"""What the end of a run waits at most."""

NAME = "^[A-Za-z_][A-Za-z0-9_]*$"
SETTINGS = (
    Setting(
        "webhook.url_env",
        "",
        "Name of the environment variable that holds the address. Never the address itself.",
        {
            "type": "string",
            "pattern": NAME,
            "errorMessage": "expected the name of an environment variable, such as SLACK_WEBHOOK; never the address itself",
        },
    ),
    Setting("webhook.format", "slack", "Form of a message: slack or json.", {"enum": ["slack", "json"]}),
    Setting(
        "webhook.severity",
        "warning",
        "Least severity of an alert that is sent.",
        {"enum": ["info", "warning", "error"]},
    ),
    Setting(
        "webhook.per_minute",
        20,
        "Most messages in a minute; alerts that come faster share a message.",
        {"type": "number", "minimum": 0.1, "maximum": 600},
        float,
    ),
    Setting(
        "webhook.timeout",
        10,
        "Seconds to wait for a connection, and for an answer.",
        {"type": "number", "minimum": 0.1, "maximum": 120},
        float,
    ),
)


class Plugin:
    """One for each session: sends its alerts from a thread of its own, on the rank that speaks for the job."""

    def __init__(self) -> None:
        self.sender: BackgroundSender[dict[str, Any]] | None = None
        self.why_not = ""
        self._least = Severity.WARNING
        self._put: list[Severity] = []

    @hookimpl
    def healthcheck_register_settings(self, register: Callable[[Setting], None]) -> None:
        """``settings: {webhook.url_env: SLACK_WEBHOOK}``."""
        for setting in SETTINGS:
            register(setting)

    @hookimpl
    def healthcheck_configure(self, session: Session) -> None:
        settings = session.settings
        variable = str(settings.get("webhook.url_env") or "")
        if not variable or not session.info.speaks:
            return
        self._least = Severity.parse(str(settings["webhook.severity"]))
        try:
            address = Address.of(os.environ.get(variable, ""))
        except BadAddress as error:
            self.why_not = f"the address in ${variable} is not used: {error}"
            session.info.notes.append(f"webhook: {self.why_not}")
            return
        body = slack_body if settings["webhook.format"] == "slack" else json_body
        timeout = float(settings["webhook.timeout"])

        def send(messages: Sequence[dict[str, Any]]) -> None:
            post(address, body(messages), timeout)

        self.sender = BackgroundSender(
            send, name="healthcheck-webhook", capacity=200, batch=20, gap=60.0 / float(settings["webhook.per_minute"])
        )

    @hookimpl
    def healthcheck_alert(self, session: Session, alert: Alert) -> None:
        """One message per alert and run: repetitions, and what is muted, known or explained by another alert, are left out."""
        held = alert.repeat or alert.muted or alert.accepted or alert.explained_by
        if self.sender is not None and not held and alert.severity >= self._least:
            self._put.append(alert.severity)
            self.sender.put(message(session, alert), important=True)

    @hookimpl
    def healthcheck_train_end(self, session: Session, event: Event) -> None:
        if self.sender is not None:
            self.sender.begin_closing(LAST_SECONDS)

    @hookimpl
    def healthcheck_report_section(self, session: Session, report: dict[str, Any]) -> None:
        """``webhook``: how many were sent, and every alert that was not delivered."""
        if self.why_not:
            report["webhook"] = {"sent": 0, "undelivered": [], "problem": self.why_not}
        if self.sender is None:
            return
        if report.get("verdict") == "failed" and Severity.ERROR not in self._put:
            self.sender.put(ending_content(session, report), important=True)  # another rank's alert, or a crash
        lost = self.sender.close(LAST_SECONDS)
        undelivered = [
            {"rule": one.item["rule"], "cause": one.item["cause"], "step": one.item["step"], "reason": one.reason}
            for one in lost
        ]
        report["webhook"] = {"sent": self.sender.sent, "undelivered": undelivered}
        if undelivered:
            named = ", ".join(f"{one['rule']} at step {one['step']}" for one in undelivered[:5])
            more = f" and {len(undelivered) - 5} more" if len(undelivered) > 5 else ""
            session.note(f"webhook: not delivered: {named}{more} ({undelivered[-1]['reason']})")
