"""A page in a headless Chromium: what it logs, what it asks the network for, how wide it is. By DevTools' protocol.

``find`` returns None where no Chromium is installed; tests skip then.
"""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SECONDS = 40.0
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0")
_NOISY = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")


@dataclass
class Visit:
    """``said``: log entries, console calls and exceptions. ``asked``: addresses that were requested."""

    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    scroll_width: int = 0
    shown_width: int = 0
    text: str = ""


def find() -> str | None:
    return next((path for path in map(shutil.which, NAMES) if path is not None), None)


def visit(page: Path, width: int, dark: bool = False) -> Visit:
    """``width``: of the screen, in CSS pixels of a phone where it is below 600."""
    browser = find()
    assert browser is not None
    return asyncio.run(_visit(browser, page, width, dark))


async def _visit(browser: str, page: Path, width: int, dark: bool) -> Visit:
    with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [browser, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(SECONDS):
                address = await _address(Path(profile), process)
                async with aiohttp.ClientSession() as session, session.ws_connect(address, max_msg_size=0) as socket:
                    return await _Talk(socket).look(page.resolve().as_uri(), width, dark)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its helpers, too
            process.wait(SECONDS)


async def _address(profile: Path, process: subprocess.Popen) -> str:
    """Chromium writes its port and path there when it listens."""
    told = profile / "DevToolsActivePort"
    while not told.exists() or len(lines := told.read_text().split()) < 2:
        assert process.poll() is None, "Chromium ended before it listened"
        await asyncio.sleep(0.05)
    return f"ws://127.0.0.1:{lines[0]}{lines[1]}"


class _Talk:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._number, self._session = socket, 0, ""
        self._events: list[dict[str, Any]] = []

    async def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        await self._socket.send_str(json.dumps(message))
        while (answer := json.loads(await self._socket.receive_str())).get("id") != self._number:
            self._events.append(answer)
        assert "error" not in answer, answer
        return dict(answer["result"])

    async def look(self, address: str, width: int, dark: bool) -> Visit:
        target = await self._call("Target.createTarget", url="about:blank")
        attached = await self._call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Log", "Runtime", "Network"):
            await self._call(f"{domain}.enable")
        await self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=844, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self._call("Emulation.setEmulatedMedia", features=scheme)
        await self._call("Page.navigate", url=address)
        while not any(event.get("method") == "Page.loadEventFired" for event in self._events):
            self._events.append(json.loads(await self._socket.receive_str()))
        script = (
            "JSON.stringify([document.documentElement.scrollWidth, document.documentElement.clientWidth, "
            "document.body.innerText])"
        )
        told = await self._call("Runtime.evaluate", expression=script, returnByValue=True)
        found = Visit()
        found.scroll_width, found.shown_width, found.text = json.loads(told["result"]["value"])
        for event in self._events:
            if event.get("method") in _NOISY:
                found.said.append(json.dumps(event["params"]))
            if event.get("method") == "Network.requestWillBeSent":
                found.asked.append(event["params"]["request"]["url"])
        return found
