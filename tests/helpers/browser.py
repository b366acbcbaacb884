"""A headless Chromium, driven by the WebDriver protocol (https://www.w3.org/TR/webdriver2)."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Self
from urllib.error import HTTPError
from urllib.request import Request, urlopen

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars",
]  # fmt: skip
START_S, ANSWER_S = 60.0, 60.0


def browser_fault() -> str:
    """Why there is no browser; empty if there is one."""
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"{' and '.join(missing)} not found; scripts/browser installs them as root" if missing else ""


class Browser:
    """A browser with one page. Use as a context manager."""

    def __init__(self, folder: Path, *, width: int = 1280, height: int = 900) -> None:
        """`folder` is new, and gets the browser's profile. Fails if there is no browser."""
        assert not browser_fault(), browser_fault()
        self._output = folder / "chromedriver.out"
        folder.mkdir(parents=True)
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(["chromedriver", "--port=0"], stdout=output, stderr=subprocess.STDOUT)
        self._session = ""
        try:
            self._address = f"http://127.0.0.1:{self._port()}"
            arguments = [*FLAGS, f"--user-data-dir={folder / 'profile'}", f"--window-size={width},{height}"]
            wanted = {"goog:chromeOptions": {"binary": shutil.which("chromium"), "args": arguments}}
            answer = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
            self._session = f"/session/{answer['sessionId']}"
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self, address: str) -> None:
        """Opens a page and waits until it is loaded."""
        self._ask("POST", f"{self._session}/url", {"url": address})

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that a script returns."""
        return self._ask("POST", f"{self._session}/execute/sync", {"script": script, "args": list(arguments)})

    def wait_for(self, script: str, *arguments: Any, timeout_s: float = 30.0) -> Any:
        """The first true value of an expression."""
        deadline_s = time.monotonic() + timeout_s
        while not (value := self.run(f"return {script}", *arguments)):
            assert time.monotonic() < deadline_s, f"not within {timeout_s} s: {script}\n{self.text()}"
            time.sleep(0.05)
        return value

    def text(self) -> str:
        """The text of the page."""
        return self.run("return document.body.innerText")

    def click(self, selector: str) -> None:
        """Clicks the first element, as a user does."""
        element = self._ask("POST", f"{self._session}/element", {"using": "css selector", "value": selector})
        (name,) = element.values()
        self._ask("POST", f"{self._session}/element/{name}/click", {})

    def errors(self) -> list[str]:
        """The errors in the browser's log since the last call."""
        entries = self._ask("POST", f"{self._session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        """Sets the size of the page and its color scheme, as of a device."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 640}
        scheme = {"features": [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]}
        for command, values in (("setDeviceMetricsOverride", metrics), ("setEmulatedMedia", scheme)):
            body = {"cmd": f"Emulation.{command}", "params": values}
            self._ask("POST", f"{self._session}/goog/cdp/execute", body)

    def screenshot(self, file: Path) -> None:
        """Writes the visible page to a PNG file."""
        file.write_bytes(base64.b64decode(self._ask("GET", f"{self._session}/screenshot")))

    def close(self) -> None:
        try:
            if self._session:
                self._ask("DELETE", self._session)
        finally:
            self._process.terminate()
            self._process.wait(20)

    def _port(self) -> int:
        deadline_s = time.monotonic() + START_S
        while not (found := re.search(r"started successfully on port (\d+)", self._output.read_text())):
            assert self._process.poll() is None and time.monotonic() < deadline_s, self._output.read_text()
            time.sleep(0.05)
        return int(found[1])

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = Request(self._address + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urlopen(request, timeout=ANSWER_S) as answer:
                return json.load(answer)["value"]
        except HTTPError as error:
            raise AssertionError(f"{method} {path}: {error.read().decode(errors='replace')[:2000]}") from None
