"""Chromium without a window, driven through its DevTools protocol over a pipe: pages as readers see them.

https://chromedevtools.github.io/devtools-protocol/; a message is JSON that ends with a zero byte.
"""

import base64
import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)


class Page:
    """A tab."""

    def __init__(self, to_browser: int, from_browser: int):
        self._to, self._from, self._rest, self._number = to_browser, from_browser, b"", 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            got = os.read(self._from, 1 << 20)
            assert got, "the browser ended"
            self._rest += got
        text, _, self._rest = self._rest.partition(b"\0")
        return json.loads(text)

    def call(self, method: str, **params: Any) -> Any:
        """Calls a method of the protocol; events that come meanwhile are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (got := self._receive()).get("id") != self._number:
            self.events.append(got)
        assert "error" not in got, f"{method}: {got['error']}"
        return got["result"]

    def open(self, path: pathlib.Path, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Opens a file in a window of a width, in a light or a dark theme, and waits until it is there."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[theme])
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive())

    def evaluate(self, expression: str) -> Any:
        """Returns the value of a JavaScript expression, as JSON."""
        got = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in got, got["exceptionDetails"]
        return got["result"].get("value")

    def requested(self) -> list[str]:
        """Returns the addresses that the page asked for since it was opened."""
        sent = [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [url for url in sent if not url.startswith("data:")]

    def complaints(self) -> list[str]:
        """Returns what the browser logged since the page was opened."""
        return [
            json.dumps(e["params"])
            for e in self.events
            if e.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown")
        ]

    def screenshot(self, path: pathlib.Path, *, whole: bool = True) -> bytes:
        """Writes a picture of the page, also of what lies below the window, as PNG; returns its bytes."""
        got = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(picture := base64.b64decode(got["data"]))
        return picture


@contextlib.contextmanager
def browser(profile: pathlib.Path) -> Iterator[Page]:
    """Starts a browser with a profile of its own; yields its page."""
    assert CHROMIUM is not None, "Chromium must be installed"
    read_by_browser, to_browser = os.pipe()
    from_browser, written_by_browser = os.pipe()

    # The browser reads from descriptor 3 and writes to 4: a shell moves the pipes there.
    command = [CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
    moved = f'exec "$@" 3<&{read_by_browser} 4>&{written_by_browser}'
    process = subprocess.Popen(
        ["bash", "-c", moved, "bash", *command],
        pass_fds=(read_by_browser, written_by_browser),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(read_by_browser)
    os.close(written_by_browser)
    try:
        yield Page(to_browser, from_browser)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(to_browser)
        os.close(from_browser)
