"""A headless Chromium spoken to over pipes: opens a file, runs JavaScript, takes screenshots, keeps a log."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE = 120.0


def chromium() -> str | None:
    """The path of an installed Chromium."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One tab. `requests`: every address it asked for; `complaints`: errors and warnings of its console."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive = send, receive
        self._buffer = b""
        self._sent = 0
        self._session: dict[str, str] = {}
        self._loaded = False
        self.requests: list[str] = []
        self.complaints: list[str] = []
        target = self("Target.createTarget", url="about:blank")["targetId"]
        attached = self("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(f"{domain}.enable")
        self("Performance.enable", timeDomain="threadTicks")

    def __call__(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": parameters, **self._session}
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._sent:
            pass
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def open(self, path: Path, *, width: int, height: int, mobile: bool = False) -> float:
        """Show a file; seconds until its load event."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        self("Emulation.setDeviceMetricsOverride", **size)
        self._loaded, started = False, time.perf_counter()
        self("Page.navigate", url=path.as_uri())
        while not self._loaded:
            self._next()
        return time.perf_counter() - started

    def run(self, expression: str) -> Any:
        """The value of an expression, awaited if it is a promise."""
        result = self("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, condition: str) -> float:
        """Seconds until an expression becomes true."""
        started = time.perf_counter()
        while not self.run(condition):
            assert time.perf_counter() - started < PATIENCE, f"never true: {condition}"
            time.sleep(0.02)
        return time.perf_counter() - started

    def busy(self) -> float:
        """Seconds of processor time that the page has taken since it was opened."""
        metrics = self("Performance.getMetrics")["metrics"]
        return next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration")

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self("Page.captureScreenshot", format="png")["data"]))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            piece = os.read(self._receive, 1 << 20)
            assert piece, "the browser is gone"
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        parameters = message.get("params", {})
        match message.get("method"):
            case "Page.loadEventFired":
                self._loaded = True
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(str(parameters["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning", "assert"):
                self.complaints.append(str(parameters["args"]))
            case "Log.entryAdded":
                self.complaints.append(parameters["entry"]["text"])
        return message


@contextmanager
def browser() -> Iterator[Browser]:
    """A fresh headless Chromium, ended afterwards."""
    executable = chromium()
    assert executable is not None
    inward, send = os.pipe()
    receive, outward = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--remote-debugging-pipe",
        ]
        flags += [
            "--disable-background-networking",
            "--disable-component-update",
            f"--user-data-dir={profile}",
        ]
        # The browser reads commands from its file descriptor 3 and writes answers to 4.
        shell = f'exec "$@" 3<&{inward} 4>&{outward}'
        process = subprocess.Popen(
            ["bash", "-c", shell, "bash", executable, *flags],
            pass_fds=(inward, outward),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(inward)
        os.close(outward)
        try:
            tab = Browser(send, receive)
            yield tab
            with suppress(AssertionError, OSError):
                tab._session = {}
                tab("Browser.close")
        finally:
            os.close(send)
            os.close(receive)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
