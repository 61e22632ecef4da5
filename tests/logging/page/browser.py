"""A headless Chromium over its debugging pipe: nothing listens on any port."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))),
    None,
)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here: apt-get install chromium"
)


class Browser:
    """One page of a fresh browser; what it logs or fails at is in `complaints`."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        to_page, from_page = os.pipe(), os.pipe()
        flags = (
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"),
            *("--disable-extensions", "--hide-scrollbars"),
        )
        # Chromium reads commands from file 3 and writes answers to file 4.
        command = f'exec "$0" "$@" 3<&{to_page[0]} 4>&{from_page[1]}'
        arguments = [
            CHROMIUM,
            *flags,
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
            "about:blank",
        ]
        self._process = subprocess.Popen(
            ["bash", "-c", command, *arguments],
            pass_fds=(to_page[0], from_page[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_page[0]), os.close(from_page[1])
        self._write, self._read = to_page[1], from_page[0]
        self._buffer, self._count, self._session = b"", 0, ""
        self.complaints: list[str] = []
        self._events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(timeout=20)
        os.close(self._write), os.close(self._read)

    def view(
        self, width: int, height: int, dark: bool = False, scale: float = 1, touch: bool = False
    ) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=touch,
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)

    def open(self, page: Path, fragment: str = "") -> None:
        url = page.resolve().as_uri()
        self._events.clear()
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=url + fragment)
        self._wait(
            lambda event: (
                event.get("method") == "Page.loadEventFired"
                and self.eval("location.protocol") != "about:"
            )
        )

    def eval(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page, after the next two frames."""
        frames = (
            "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => "
            f"done({expression}))))"
        )
        answer = self.call(
            "Runtime.evaluate", expression=frames, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        text = key if len(key) == 1 else ""
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def hover(self, selector: str) -> None:
        """Move the mouse into the middle of the first element that matches."""
        box = self.eval(
            f"document.querySelector({json.dumps(selector)}).getBoundingClientRect().toJSON()"
        )
        self.call(
            "Input.dispatchMouseEvent",
            type="mouseMoved",
            x=box["x"] + box["width"] / 2,
            y=box["y"] + box["height"] / 2,
        )

    def screenshot(self, path: Path, whole: bool = False) -> None:
        self.eval("0")
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)[
            "data"
        ]
        path.write_bytes(base64.b64decode(data))

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._count += 1
        number = self._count
        message = {
            "id": number,
            "method": method,
            "params": parameters,
            **({"sessionId": self._session} if self._session else {}),
        }
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        answer = self._wait(lambda event: event.get("id") == number)
        assert "error" not in answer, (method, answer)
        return dict(answer["result"])

    def _wait(self, is_it: Any, timeout_s: float = 60.0) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        for event in list(self._events):
            self._events.remove(event)
            if is_it(event):
                return event
        while True:
            while b"\0" not in self._buffer:
                ready, _, _ = select.select(
                    [self._read], [], [], max(deadline - time.monotonic(), 0)
                )
                chunk = os.read(self._read, 1 << 20) if ready else b""
                assert chunk, "the browser has ended or does not answer"
                self._buffer += chunk
            line, self._buffer = self._buffer.split(b"\0", 1)
            event = json.loads(line)
            self._hear(event)
            if is_it(event):
                return dict(event)
            if event.get("method") == "Page.loadEventFired":
                self._events.append(event)

    def _hear(self, event: dict[str, Any]) -> None:
        method, parameters = event.get("method"), event.get("params", {})
        if method in ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"):
            self.complaints.append(json.dumps(parameters)[:600])
        if method == "Network.requestWillBeSent" and not parameters["request"]["url"].startswith(
            ("file:", "about:")
        ):
            self.complaints.append(f"request: {parameters['request']['url'][:200]}")
