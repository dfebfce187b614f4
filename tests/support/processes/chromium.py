"""A headless Chromium, driven over its DevTools protocol."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

# On a busy machine, the start of a browser or a page of thousands of spans takes seconds.
PATIENCE_S = 60.0
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--remote-debugging-port=0",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    # The browser's own requests are none of the page's.
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
)
_KEYS = {"ArrowDown": 40, "ArrowUp": 38, "Enter": 13, "Escape": 27}


class Page:
    """A tab, with its events since a page was opened.

    Args:
        socket: to the browser.
    """

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._count = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride",
            **{"width": 1400, "height": 900, "deviceScaleFactor": 1, "mobile": False},
        )

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result; events that arrive before it are kept."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._socket.send(json.dumps(message))
        while True:
            found = self._receive()
            if found.get("id") == self._count:
                assert "error" not in found, found
                result: dict[str, Any] = found["result"]
                return result

    def _receive(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._socket.recv(timeout=PATIENCE_S))
        if "method" in found:
            self.events.append(found)
        return found

    def open(self, url: str) -> None:
        """Go to an address, and wait until the page has loaded and been drawn."""
        self.events.clear()
        self.call("Page.navigate", url=url)
        while not self.of("Page.loadEventFired"):
            self._receive()
        self.drawn()

    def drawn(self) -> None:
        """Wait until the page has been drawn and its events have been handled."""
        self.js("new Promise(done => requestAnimationFrame(() => setTimeout(done)))")

    def js(self, expression: str) -> Any:
        """The awaited value of a JavaScript expression."""
        found = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def texts(self, selector: str) -> list[str]:
        """Text contents of all elements that a selector finds."""
        found: list[str] = self.js(
            f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.textContent)"
        )
        return found

    def press(self, *keys: str) -> None:
        """Press keys, one after the other, by their names or characters."""
        for key in keys:
            code = _KEYS.get(key) or ord(key.upper())
            text = {} if key in _KEYS else {"text": key}
            for kind in ("keyDown", "keyUp"):
                said = {"type": kind, "key": key, "windowsVirtualKeyCode": code}
                self.call("Input.dispatchKeyEvent", **said, **(text if kind == "keyDown" else {}))
        self.drawn()

    def media(self, **features: str) -> None:
        """Set media features, such as `prefers_color_scheme="dark"`."""
        named = [
            {"name": name.replace("_", "-"), "value": value} for name, value in features.items()
        ]
        self.call("Emulation.setEmulatedMedia", features=named)
        self.drawn()

    def of(self, method: str) -> list[Mapping[str, Any]]:
        """Events of one kind."""
        return [event["params"] for event in self.events if event["method"] == method]

    @property
    def requests(self) -> list[str]:
        """Every address that was requested since `open`, the page's first."""
        sent = [event["request"]["url"] for event in self.of("Network.requestWillBeSent")]
        sent += [event["url"] for event in self.of("Network.webSocketCreated")]
        return [url for url in sent if not url.startswith("data:")]

    @property
    def complaints(self) -> list[str]:
        """Exceptions, and errors and warnings on the console."""
        thrown = [str(event["exceptionDetails"]) for event in self.of("Runtime.exceptionThrown")]
        said = [
            str(event["args"])
            for event in self.of("Runtime.consoleAPICalled")
            if event["type"] in ("error", "warning", "assert")
        ]
        logged = [
            str(event["entry"])
            for event in self.of("Log.entryAdded")
            if event["entry"]["level"] in ("error", "warning")
        ]
        return thrown + said + logged


@contextmanager
def chromium(program: str, folder: Path) -> Iterator[Page]:
    """A tab of a separate browser.

    Args:
        program: the browser's path.
        folder: an empty folder for its profile.
    """
    command = [program, *_FLAGS, f"--user-data-dir={folder}"]
    with (folder / "stderr").open("wb") as log:
        browser = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        port, path = _listening(browser, folder)
        with connect(f"ws://127.0.0.1:{port}{path}", max_size=None, proxy=None) as socket:
            yield Page(socket)
    finally:
        browser.terminate()
        try:
            browser.wait(10)
        except subprocess.TimeoutExpired:
            browser.kill()
            browser.wait()


def _listening(browser: subprocess.Popen[bytes], folder: Path) -> list[str]:
    """Port and path of the browser's socket."""
    deadline = time.monotonic() + PATIENCE_S
    found: list[str] = []
    while len(found) != 2:
        ended = browser.poll() is not None
        assert not ended, (folder / "stderr").read_text("utf-8", "replace")
        assert time.monotonic() < deadline
        time.sleep(0.05)
        file = folder / "DevToolsActivePort"
        found = file.read_text().split("\n") if file.exists() else []
    return found
