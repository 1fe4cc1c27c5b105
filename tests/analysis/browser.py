"""A headless Chromium, driven over the WebDriver protocol with the standard library: nothing to install but the browser.

Debian packages: chromium and chromium-driver. Where they are absent the tests that need them skip.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["Browser", "absent", "browser"]

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
_KEYS = {"right": "\ue014", "left": "\ue012", "page up": "\ue00e", "end": "\ue010", "tab": "\ue004"}


def absent() -> str:
    """Why the browser tests cannot run, or "" if they can."""
    missing = [
        p for p, found in (("chromium", _chromium()), ("chromedriver", shutil.which("chromedriver"))) if not found
    ]
    return f"{' and '.join(missing)} not found; `make browser-setup` installs them" if missing else ""


def _chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """One window; every method is a command of the WebDriver or the DevTools protocol."""

    def __init__(self, address: str, session: str):
        self._base = f"{address}/session/{session}"

    def _send(self, command: str, body: dict[str, Any] | None = None, method: str = "POST") -> Any:
        return _request(f"{self._base}/{command}", body, method)

    def devtools(self, command: str, **parameters: Any) -> Any:
        return self._send("goog/cdp/execute", {"cmd": command, "params": parameters})

    def open(self, path: Path, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Shows a file in a window of the given width, light or dark."""
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        self.media(dark=dark)
        self._send("url", {"url": path.resolve().as_uri()})

    def media(self, *, dark: bool = False, medium: str = "") -> None:
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.devtools("Emulation.setEmulatedMedia", media=medium, features=features)

    def script(self, text: str, *arguments: Any) -> Any:
        """The value that the body of a function returns."""
        return self._send("execute/sync", {"script": text, "args": list(arguments)})

    def press(self, selector: str, *keys: str) -> None:
        """Focuses an element and presses keys, as a person does."""
        self.script("document.querySelector(arguments[0]).focus()", selector)
        for key in keys:
            action = [{"type": kind, "value": _KEYS[key]} for kind in ("keyDown", "keyUp")]
            self._send("actions", {"actions": [{"type": "key", "id": "keyboard", "actions": action}]})

    def log(self) -> list[str]:
        """What the console said since the last call."""
        return [entry["message"] for entry in self._send("se/log", {"type": "browser"})]

    def screenshot(self, path: Path) -> None:
        """The whole page."""
        found = self.devtools("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        path.write_bytes(base64.b64decode(found["data"]))

    def pdf(self, path: Path) -> None:
        """The page on A4 paper."""
        found = self.devtools("Page.printToPDF", paperWidth=8.27, paperHeight=11.69, preferCSSPageSize=False)
        path.write_bytes(base64.b64decode(found["data"]))


def _request(address: str, body: dict[str, Any] | None, method: str) -> Any:
    data = None if method in ("GET", "DELETE") else json.dumps(body or {}).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"}, method=method)
    # No proxy: the driver is on this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=60) as response:
            return json.loads(response.read())["value"]
    except urllib.error.HTTPError as error:
        raise RuntimeError(error.read().decode()) from error


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Starts a browser with an empty profile folder, and ends it."""
    driver = subprocess.Popen(
        [str(shutil.which("chromedriver")), "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert driver.stdout is not None
        port = next(m[1] for line in driver.stdout if (m := re.search(r"successfully on port (\d+)", line)))
        address = f"http://127.0.0.1:{port}"
        options = {"binary": _chromium(), "args": [*_FLAGS, f"--user-data-dir={profile}"]}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        session = _request(f"{address}/session", {"capabilities": {"alwaysMatch": wanted}}, "POST")["sessionId"]
        try:
            yield Browser(address, session)
        finally:
            _request(f"{address}/session/{session}", None, "DELETE")
    finally:
        driver.terminate()
        driver.wait(timeout=20)
        if driver.stdout is not None:
            driver.stdout.close()
