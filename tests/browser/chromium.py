"""A real headless Chromium, driven through its debugging pipe with the standard library alone.

Pages are opened from disk in a browser without a network: what a page would fetch fails, and is noted like an error.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def found() -> str | None:
    """The browser of this machine, if there is one."""
    named = os.environ.get("HEALTHCHECK_TEST_CHROMIUM")
    return named or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One browser process; ``with Browser(folder) as browser: page = browser.open(path)``."""

    def __init__(self, profile: Path) -> None:
        command = [
            str(found()),
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--no-first-run",
            "--disable-background-networking",
            "--remote-debugging-pipe",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={profile}",
            "about:blank",
        ]
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()

        def hand_over() -> None:
            os.dup2(theirs_in, 100)
            os.dup2(theirs_out, 101)
            os.dup2(100, 3)
            os.dup2(101, 4)

        self.process = subprocess.Popen(
            command, preexec_fn=hand_over, pass_fds=(3, 4), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._in, self._out = ours_in, ours_out
        self._rest = b""
        self._last = 0
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._in)
        os.close(self._out)

    def call(self, method: str, session: str | None = None, timeout: float = 120.0, **params: Any) -> dict[str, Any]:
        """One command and its answer; what comes between goes to :attr:`events`."""
        self._last += 1
        number = self._last
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            for answer in self._read(end):
                if answer.get("id") == number:
                    if "error" in answer:
                        raise RuntimeError(f"{method}: {answer['error']}")
                    return dict(answer["result"])
                self.events.append(answer)
        raise TimeoutError(f"{method} was not answered in {timeout:g} s")

    def _read(self, end: float) -> list[dict[str, Any]]:
        if not select.select([self._in], [], [], max(0.0, end - time.monotonic()))[0]:
            return []
        piece = os.read(self._in, 2**20)
        if not piece:
            raise RuntimeError("the browser is gone")
        *whole, self._rest = (self._rest + piece).split(b"\0")
        return [json.loads(message) for message in whole]

    def open(self, path: Path, width: int = 1280, height: int = 900, *, dark: bool = False) -> Page:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        return Page(self, session, path, width, height, dark)


class Page:
    """One page; :attr:`problems` has what its console and its requests complained of."""

    def __init__(self, browser: Browser, session: str, path: Path, width: int, height: int, dark: bool) -> None:
        self._browser, self._session = browser, session
        self.problems: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._call("Emulation.setEmulatedMedia", features=features)
        began = time.monotonic()
        self._call("Page.navigate", url=path.absolute().as_uri())
        self.wait("document.readyState === 'complete'")
        self.seconds = time.monotonic() - began
        """Until the page was loaded."""
        self.collect()

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def run(self, script: str) -> Any:
        """The value of an expression; a promise is waited for."""
        found = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"].get("exception", found["exceptionDetails"])))
        return found["result"].get("value")

    def wait(self, script: str, timeout: float = 60.0) -> None:
        end = time.monotonic() + timeout
        while not self.run(script):
            if time.monotonic() > end:
                raise TimeoutError(script)
            time.sleep(0.05)

    def collect(self) -> list[str]:
        """Console errors, exceptions, refused and failed requests so far."""
        self.run("1")
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            params, method = event.get("params", {}), event["method"]
            if method == "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.problems.append(str(details.get("exception", {}).get("description", details["text"])))
            elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                self.problems.append(" ".join(str(a.get("value", a.get("description"))) for a in params["args"]))
            elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                self.problems.append(str(params["entry"]["text"]))
            elif method == "Network.requestWillBeSent" and not params["request"]["url"].startswith(
                ("file:", "data:", "about:", "blob:")
            ):
                self.problems.append(f"it asked for {params['request']['url']}")
        self._browser.events.clear()
        return self.problems

    def move(self, x: float, y: float) -> None:
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def drag(self, begin: tuple[float, float], end: tuple[float, float]) -> None:
        left = {"button": "left", "buttons": 1, "clickCount": 1}
        self.move(*begin)
        self._call("Input.dispatchMouseEvent", type="mousePressed", x=begin[0], y=begin[1], **left)
        for part in (0.3, 0.7, 1.0):
            x, y = (a + (b - a) * part for a, b in zip(begin, end, strict=True))
            self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y, button="left", buttons=1)
        self._call("Input.dispatchMouseEvent", type="mouseReleased", x=end[0], y=end[1], **left)

    def place(self, selector: str) -> dict[str, float]:
        """Where an element is in the window, after it was scrolled into view."""
        script = f"""(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block: "center", behavior: "instant"}});
            const r = e.getBoundingClientRect(); return {{x: r.x, y: r.y, width: r.width, height: r.height}}; }})()"""
        return dict(self.run(script))

    def picture(self, path: Path, *, whole: bool = False) -> Path:
        found = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))
        return path


def browsing(profile: Path, act: Callable[[Browser], Any]) -> Any:
    with Browser(profile) as browser:
        return act(browser)
