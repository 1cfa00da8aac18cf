"""Headless Chromium from the system's packages, driven by the DevTools protocol over a pipe.

No driver, no port and no package of Python: Chromium reads commands from its file descriptor 3 and
answers on 4, JSON objects that end with a zero byte.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def chromium_path() -> str | None:
    """The program, of CKPT_CHROMIUM or of the search path; None if there is none."""
    own = os.environ.get("CKPT_CHROMIUM")
    return own or next((path for name in NAMES if (path := shutil.which(name))), None)


@dataclass
class Tab:
    """A page of the browser, with what it printed and asked for."""

    commands: int
    answers: int
    session: str = ""
    n: int = 0
    rest: bytes = b""
    console: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self.n += 1
        message: dict[str, object] = {"id": self.n, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self.commands, data) :]
        while True:
            answer = self._read()
            if answer.get("id") == self.n:
                assert "error" not in answer, (method, answer["error"])
                return dict(answer["result"])
            self._note(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            data = os.read(self.answers, 1 << 20)
            assert data, "Chromium has ended"
            self.rest += data
        message, self.rest = self.rest.split(b"\0", 1)
        return dict(json.loads(message))

    def _note(self, event: dict[str, Any]) -> None:
        """Keep what a page must not do: errors, messages, requests and dialogs."""
        method, values = event.get("method", ""), event.get("params", {})
        self.events.append(method)
        if method == "Runtime.exceptionThrown":
            self.console.append(json.dumps(values["exceptionDetails"])[:500])
        elif method == "Runtime.consoleAPICalled":
            self.console.append(json.dumps(values["args"])[:500])
        elif method == "Log.entryAdded":
            self.console.append(values["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])
        elif method == "Page.javascriptDialogOpening":
            self.console.append(f"dialog: {values['message']}")

    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load a file and wait until it is complete."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while "Page.loadEventFired" not in self.events:
            self._note(self._read())

    def run(self, script: str) -> Any:
        """The value of an expression, or of a promise, in the page."""
        answer = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def key(self, name: str, code: int) -> None:
        """Press a key such as Tab (9), Enter (13) or ArrowRight (39)."""
        text = "\r" if name == "Enter" else ""
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=name,
                code=name,
                windowsVirtualKeyCode=code,
                text=text if kind == "keyDown" else "",
            )

    def screenshot(self, path: Path, *, is_full: bool = True) -> None:
        """Write a picture of the complete page."""
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=is_full)
        path.write_bytes(base64.b64decode(answer["data"]))


@contextmanager
def chromium(profile_dir: Path) -> Iterator[Tab]:
    """Start a browser with an empty profile, and end it."""
    program = chromium_path()
    assert program is not None
    commands_in, commands = os.pipe()
    answers, answers_out = os.pipe()
    arguments = [
        "--headless=new",
        "--remote-debugging-pipe",
        f"--user-data-dir={profile_dir}",
        "--no-first-run",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--disable-background-networking",
        "--no-default-browser-check",
        # Containers rarely allow the sandbox; the pages are our own.
        "--no-sandbox",
        "about:blank",
    ]
    shell = 'commands=$1 answers=$2; shift 2; exec "$@" 3<&$commands 4>&$answers'
    process = subprocess.Popen(
        ["bash", "-c", shell, "-", str(commands_in), str(answers_out), program, *arguments],
        pass_fds=(commands_in, answers_out),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(commands_in)
    os.close(answers_out)
    tab = Tab(commands, answers)
    try:
        target = tab.call("Target.createTarget", url="about:blank")["targetId"]
        attached = tab.call("Target.attachToTarget", targetId=target, flatten=True)
        tab.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.call(f"{domain}.enable")
        yield tab
    finally:
        process.terminate()
        process.wait()
        os.close(commands)
        os.close(answers)
