"""An engine's server that this program starts: a process group of its own, watched, killed and stopped.

Knows processes, signals and what a server says of its readiness. Must not know what is measured. It ends processes that
it started, and nothing else.
"""

import asyncio
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from longread.measure.load.pages import trusted
from longread.spec.errors import ConfigError, LongreadError

PORT = "{port}"
POLL = 0.05  # seconds at first; 1 % of what has passed later
PROBE_SECONDS = 10.0  # of one look at a page
END_SECONDS = 30.0  # from SIGTERM to SIGKILL
ORPHAN_SECONDS = 10.0  # that the children of a killed server have to notice
TAIL_BYTES = 2000
# A model without a chat template answers the second one only.
TINY: Mapping[str, Mapping[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
    "/v1/completions": {"prompt": "Hello"},
}
REFUSALS = (400, 401, 403, 404, 405, 413, 422)  # that waiting does not change
NAMED = 120  # characters of a command in a message


class StartError(LongreadError):
    """The server did not start, or did not get ready; the message carries the end of its output."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How a server is started. ``argv``: ``{port}`` in it stands for a free port, chosen anew for each ``Started``.
    ``env``: beside the caller's own environment. ``base_url``: where it answers, where ``argv`` has no ``{port}``.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    base_url: str | None = None

    def __post_init__(self) -> None:
        if not self.argv:
            raise ConfigError("the command that starts the server is empty")
        if self.base_url is None and not any(PORT in word for word in self.argv):
            raise ConfigError(
                f"the command does not say where the server will answer: write {PORT} where its port belongs, or give "
                "--base-url"
            )

    def shown(self) -> str:
        return shlex.join(self.argv)


def launch_of(command: str, base_url: str | None = None, env: Mapping[str, str] | None = None) -> Launch:
    """``command`` as in a shell, without one: no pipes, no variables. Raises ConfigError."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"the command {command[:NAMED]!r} cannot be split into words: {error}") from None
    return Launch(tuple(words), env or {}, base_url)


def own_launch(checkpoint: str, options: Sequence[str], env: Mapping[str, str] | None = None) -> Launch:
    """``longread serve`` of this installation."""
    taken = next((word for word in options if word.split("=")[0] in ("--port", "--host")), None)
    if taken is not None:
        raise ConfigError(f"{taken}: the address of a server that is started here is chosen here; leave it out")
    argv = (sys.executable, "-m", "longread.cli.main", "serve", checkpoint, "--port", PORT, *options)
    return Launch(argv, env or {})


@dataclass(frozen=True, slots=True)
class Readiness:
    """Seconds from the process's start to each first: its port open, 200 of /health, 200 of /ready, and an answer to a
    tiny request. None: it has no such page, or it was not asked.
    """

    listening: float | None
    health: float | None
    ready: float | None
    answered: float | None


class Started:
    """One process of a ``Launch``. Its output goes to ``log``, appended."""

    def __init__(self, launch: Launch, log: Path):
        self.launch, self.log = launch, log
        port = free_port()
        self.base_url = launch.base_url or f"http://127.0.0.1:{port}"
        argv = [word.replace(PORT, str(port)) for word in launch.argv]
        self.began = time.monotonic()
        try:
            with log.open("ab") as out:
                self._process = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C at the terminal is this program's, and the group is known
                    env={**os.environ, **launch.env},
                )
        except OSError as error:
            raise StartError(f"{argv[0]}: cannot be started: {error.strerror or error}") from None
        self.pid = self._process.pid
        self._seen: dict[int, psutil.Process] = {}
        self.tree()

    def alive(self) -> bool:
        return self._process.poll() is None

    def tree(self) -> list[psutil.Process]:
        """The process and what it started, so far as it runs."""
        found = tree_of(self.pid)
        self._seen |= {each.pid: each for each in found}
        return found

    def worker(self) -> psutil.Process | None:
        """The descendant that holds most memory: where engines have their model apart from their HTTP server."""
        return heaviest_child(self.pid)

    def kill(self) -> None:
        """SIGKILL to the process that was started, alone: what a crash or the out-of-memory killer does."""
        self.tree()
        if self.alive():
            self._process.kill()
        self._process.wait()

    def orphans(self, seconds: float | None = None) -> int:
        """How many of its descendants still ran ``seconds`` (ORPHAN_SECONDS) after its end. They are ended then."""
        wait = ORPHAN_SECONDS if seconds is None else seconds
        psutil.wait_procs(list(self._seen.values()), timeout=wait)
        left = [each for each in self._seen.values() if _runs(each)]
        self._end(left)
        return len(left)

    def stop(self) -> None:
        """SIGTERM, and SIGKILL after a while. Nothing that it started is left."""
        self.tree()
        if self.alive():
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS)
            if self.alive():
                self._process.kill()
        self._process.wait()
        self.orphans(seconds=1.0)

    def _end(self, left: Sequence[psutil.Process]) -> None:
        for each in left:
            with suppress(psutil.Error):
                each.send_signal(signal.SIGKILL)
        psutil.wait_procs(left, timeout=5.0)

    def tail(self) -> str:
        """The end of its output."""
        try:
            return self.log.read_bytes()[-TAIL_BYTES:].decode(errors="replace").strip()
        except OSError:
            return ""

    async def wait_ready(self, seconds: float, headers: Mapping[str, str], stopped: asyncio.Event) -> Readiness:
        """Until it answers a tiny request. Raises StartError where it ends before, or takes longer."""

        def gone() -> str | None:
            code = self._process.poll()
            return None if code is None else f"the server ended with status {code}"

        try:
            return await wait_ready(self.base_url, self.began, seconds, headers, gone, stopped)
        except StartError as error:
            tail = self.tail()
            raise StartError(f"{error}; it said:\n{tail}" if tail else f"{error}; it said nothing") from None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def tree_of(pid: int) -> list[psutil.Process]:
    """A process and its descendants; empty where it does not run."""
    try:
        root = psutil.Process(pid)
        return [each for each in (root, *root.children(recursive=True)) if _runs(each)]
    except psutil.Error:
        return []


def heaviest_child(pid: int) -> psutil.Process | None:
    """The descendant with most resident memory; None without descendants."""
    sizes = []
    for each in tree_of(pid)[1:]:
        with suppress(psutil.Error):
            sizes.append((each.memory_info().rss, each.pid, each))
    return max(sizes)[2] if sizes else None


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


async def wait_ready(
    base_url: str,
    began: float,
    seconds: float,
    headers: Mapping[str, str],
    gone: Callable[[], str | None],
    stopped: asyncio.Event,
) -> Readiness:
    """Poll until a request of one token is answered. ``began``: by ``time.monotonic``; ``gone()`` says why it will
    never be, or None. Raises StartError, at once where the server is up and refuses that request.
    """
    found: dict[str, float | None] = {"listening": None, "health": None, "ready": None}
    local = base_url.startswith(("http://127.", "http://localhost", "http://[::1]"))
    certificates = trusted(not local)
    async with httpx.AsyncClient(
        timeout=PROBE_SECONDS, headers=dict(headers), trust_env=not local, verify=certificates
    ) as client:
        while True:
            reason = gone()
            passed = time.monotonic() - began
            if reason is not None:
                raise StartError(f"{reason} after {passed:.1f} s, before it was ready")
            if stopped.is_set():
                raise StartError("interrupted while the server started")
            if passed > seconds:
                raise StartError(f"the server was not ready within {seconds:g} s")
            answered = await _look(client, base_url, began, seconds - passed, found)
            if answered is not None:
                return Readiness(found["listening"], found["health"], found["ready"], answered)
            with suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), max(POLL, passed / 100))


async def _look(
    client: httpx.AsyncClient, base: str, began: float, left: float, found: dict[str, float | None]
) -> float | None:
    """One round: which pages say yes, and if none says no, whether a request is answered within ``left`` seconds (the
    first one may compile for minutes).
    """
    for name in ("health", "ready"):
        if found[name] is None:
            try:
                status = (await client.get(f"{base}/{name}")).status_code
            except httpx.HTTPError:
                return None
            now = time.monotonic() - began
            found["listening"] = found["listening"] or now
            if status == 200:
                found[name] = now
            elif status not in (404, 405):
                return None
    try:
        model = (await client.get(f"{base}/v1/models")).json()["data"][0]["id"]
        refused = ""
        for route, prompt in TINY.items():
            body = {"model": model, **prompt, "max_tokens": 1}
            answer = await client.post(f"{base}{route}", json=body, timeout=left)
            if answer.status_code == 200:
                return time.monotonic() - began
            if answer.status_code not in REFUSALS:
                return None
            refused = f"{answer.status_code}: {answer.text[:300]}"
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        return None
    raise StartError(f"the server is up and refuses a request of one token ({refused})")
