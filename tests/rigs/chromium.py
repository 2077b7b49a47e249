"""Chromium without a window, over its DevTools pipe: what a page says, complains about and asks for, and how it looks."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

from .available import BROWSERS, PATH

_PATIENCE_S = 60
_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # which root cannot have
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


def binary() -> str | None:
    """Where Chromium is, under the names that distributions give it."""
    return next((found for name in BROWSERS if (found := shutil.which(name, path=PATH))), None)


@dataclass
class Seen:
    """A page as a browser shows it. ``complaints`` are errors and warnings of its console, ``requests`` the URLs that it asked for."""

    text: str
    width: int
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    picture: bytes = b""


class Browser:
    """One browser, one tab."""

    def __init__(self, to: BinaryIO, from_: BinaryIO) -> None:
        self._to, self._from = to, from_
        self._number = 0
        self._events: list[dict[str, Any]] = []
        self._rest = b""
        self._session: str | None = None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self._call(f"{domain}.enable")

    def look(self, page: Path, *, width: int = 1100, scheme: Literal["light", "dark"] = "light", script: bool = True) -> Seen:
        """``page`` in a window ``width`` pixels wide. ``script`` is false for a browser in which no script runs."""
        self._events.clear()
        phone = width < 600
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=2 if phone else 1, mobile=phone)
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._call("Emulation.setScriptExecutionDisabled", value=not script)
        self._call("Page.navigate", url=page.resolve().as_uri())
        self._wait("Page.loadEventFired")
        text = self._value("document.body.innerText")
        seen = Seen(text, self._value("document.documentElement.scrollWidth"))
        size = self._call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 6000), "scale": 1}
        seen.picture = base64.b64decode(self._call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)["data"])
        for event in self._events:
            match event["method"], event["params"]:
                case "Network.requestWillBeSent", params:
                    seen.requests.append(params["request"]["url"])
                case "Log.entryAdded", params:
                    seen.complaints.append(params["entry"]["text"])
                case "Runtime.consoleAPICalled" | "Runtime.exceptionThrown", params:
                    seen.complaints.append(json.dumps(params))
        return seen

    def value(self, expression: str) -> Any:
        """What ``expression`` is in the page that was looked at last."""
        return self._value(expression)

    def _value(self, expression: str) -> Any:
        return self._call("Runtime.evaluate", expression=expression, returnByValue=True)["result"]["value"]

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        self._to.flush()
        while (answer := self._message()).get("id") != self._number:
            self._events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _wait(self, event: str) -> None:
        while all(one["method"] != event for one in self._events):
            self._events.append(self._message())

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._from.fileno(), 1 << 20)
            if not more:
                raise RuntimeError("Chromium ended")
            self._rest += more
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message


@contextmanager
def chromium(directory: Path) -> Iterator[Browser]:
    """A browser whose profile is below ``directory``. It resolves no name, so that what is asked for by mistake goes nowhere.

    Raises ``RuntimeError`` when it is not installed or ends.
    """
    program = binary()
    if program is None:
        raise RuntimeError("chromium is not installed")
    read, to = os.pipe()
    from_, write = os.pipe()
    # The browser has the pipes as 3 and 4, whatever they are here, and ends when they are closed.
    shell = f'exec 3<&{read} 4>&{write}; exec "$0" "$@"'
    arguments = [*_FLAGS, f"--user-data-dir={directory}", "--host-resolver-rules=MAP * ~NOTFOUND", "about:blank"]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", shell, program, *arguments],
            pass_fds=(read, write),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={"PATH": PATH, "HOME": str(directory)},
            start_new_session=True,
        )
    os.close(read)
    os.close(write)
    try:
        with os.fdopen(to, "wb") as pipe_to, os.fdopen(from_, "rb") as pipe_from:
            yield Browser(pipe_to, pipe_from)
    finally:
        process.terminate()
        try:
            process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
