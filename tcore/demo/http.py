"""What our servers have in common: listening, protection, errors in a sentence, a clean end."""

import asyncio
import gc
import ipaddress
import json
import os
import re
import secrets
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import filelock
import uvicorn
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from tcore.demo.engine import Engine
from tcore.demo.job import FULL, LOG, is_full
from tcore.demo.limits import Limits
from tcore.device import on_signals
from tcore.errors import InputError

T = TypeVar("T")
PREFIX = "tcore-demo-"  # of the temporary folder
NEW_S = 60  # seconds after which a folder without a lock is nobody's
SAFE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' blob: data:; frame-ancestors 'none'; "
    "base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Server:
    """The server of one encoder; it listens from the start, and answers while `serve` runs."""

    def __init__(self, engine: Engine, limits: Limits, host: str = "127.0.0.1", port: int = 0) -> None:
        self.engine, self.limits, self.host = engine, limits, host
        self.token = "" if is_loopback(host) else secrets.token_urlsafe(16)
        """What every request must know where other machines can reach the server."""
        self._socket = listen(host, port)
        self.port = int(self._socket.getsockname()[1])
        self.folder, self._lock = own_folder()
        config = uvicorn.Config(
            self.answer,
            interface="asgi3",
            http=Protocol,
            ws="none",
            lifespan="off",
            log_level="error",
            proxy_headers=False,
            server_header=False,
            headers=list(SAFE_HEADERS.items()),
            limit_concurrency=limits.connections,
            timeout_keep_alive=limits.connection_s,
            timeout_graceful_shutdown=3,
            callback_notify=self.expire,
        )
        self._server = uvicorn.Server(config)

    @property
    def address(self) -> str:
        """Where the server answers."""
        host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/"

    def serve(self) -> None:
        """Answer until `stop`, or a signal in the main thread; then remove everything that was written."""
        self.engine.frame_bytes((64, 64))  # loads what torch loads with the first frame
        gc.freeze()  # looking for garbage among all of that would stop everybody for 0.2 s
        try:
            with on_signals(("SIGHUP", "SIGQUIT"), lambda *_: self.stop()):
                self._server.run(sockets=[self._socket])
        finally:
            # Whoever presses Ctrl-C again must not interrupt this.
            with on_signals(("SIGHUP", "SIGQUIT", "SIGINT", "SIGTERM"), signal.SIG_IGN):
                self._socket.close()
                self.close()
                self.engine.close()
                remove_folder(self.folder)
                self._lock.release()

    def stop(self) -> None:
        """Let `serve` return."""
        self._server.should_exit = True

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        raise NotImplementedError

    async def expire(self) -> None:
        """Called every second."""

    def close(self) -> None:
        """End what is in progress."""


class Protocol(H11Protocol):
    """HTTP that closes connections on which no request begins: uvicorn itself waits for slow headers."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to watch a connection."""
        super().connection_made(transport)
        self._timer = self.loop.call_later(self.timeout_keep_alive, self._look, None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Keep nothing of a connection that has ended."""
        self._timer.cancel()
        super().connection_lost(exc)

    def _look(self, before: object) -> None:
        idle = self.cycle is None or self.cycle.response_complete
        if idle and self.cycle is before:
            self.transport.close()
        else:
            self._timer = self.loop.call_later(
                self.timeout_keep_alive, self._look, self.cycle if idle else self
            )


async def finish(request: Request, work: asyncio.Future[T], stop: Callable[[], object]) -> T:
    """Wait for work; it is stopped when the connection ends, or the program."""
    try:
        while not work.done() and not await request.is_disconnected():
            await asyncio.wait([work], timeout=0.5)
    finally:
        stop()
        await asyncio.wait([work])
    if work.cancelled():
        raise HTTPException(408, "the request was given up.")
    return work.result()


def stated_length(request: Request, most_mb: float) -> int:
    """The length of a body, which must be stated; the server library holds it to that."""
    length = request.headers.get("Content-Length", "")
    if not re.fullmatch("[0-9]+", length):
        raise HTTPException(411, "the length of the request is not stated.")
    if len(length) > 15 or int(length) > most_mb * 10**6:
        raise HTTPException(413, f"this has more than {most_mb:g} MB, which is the limit.")
    return int(length)


async def read_body(request: Request, write: Callable[[bytes], object]) -> None:
    """Hand the body on, piece by piece."""
    try:
        async for piece in request.stream():
            write(piece)
    except ClientDisconnect as error:
        raise HTTPException(408, "the request stopped before its end.") from error


async def json_of(request: Request, most_mb: float) -> dict[str, Any]:
    """The object that a request holds."""
    body = bytearray()
    stated_length(request, most_mb)
    await read_body(request, body.extend)
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        raise InputError("the request is not a JSON object.")
    return data


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; the port is taken from here on."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise InputError(f"cannot listen on {host}:{port}: {error.strerror}; try another --port.") from error


@lru_cache(maxsize=64)
def is_ours(host: str, names: tuple[str, ...]) -> bool:
    """Whether a Host header is an address or one of our names; DNS rebinding needs another name."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if name not in names:
            ipaddress.ip_address(name)
    except ValueError:
        return False
    return bool(name)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def equal(one: str, other: str) -> bool:
    """Whether two secrets are the same, in a time that does not tell."""
    return secrets.compare_digest(one.encode(errors="replace"), other.encode())


def own_folder() -> tuple[Path, filelock.BaseFileLock]:
    """A temporary folder with a lock that ends with this process; folders of dead ones are removed."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError, filelock.Timeout):
            about = path.lstat()
            if (
                not path.is_dir()
                or path.is_symlink()
                or (hasattr(os, "geteuid") and about.st_uid != os.geteuid())
            ):
                continue
            if (path / "lock").is_file():
                with filelock.FileLock(path / "lock", timeout=0):
                    remove_folder(path)
            elif time.time() - about.st_mtime > NEW_S:
                path.rmdir()  # its process was killed before the lock was there, or after it was removed
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    lock = filelock.FileLock(folder / "lock", thread_local=False)
    lock.acquire()
    return folder, lock


def remove_folder(folder: Path) -> None:
    """Remove a folder, its lock last: if this is killed, the next start goes on."""
    for path in folder.iterdir():
        if path.name != "lock":
            shutil.rmtree(path, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)


async def explain(request: Request, error: Exception) -> Response:
    """A sentence for the visitor; what a stranger need not know is in the log alone."""
    if isinstance(error, HTTPException):
        return refuse(error.status_code, error.detail)
    if isinstance(error, InputError) and isinstance(error.__cause__, OSError):
        error = error.__cause__  # without the name of a file of ours
    if is_full(error):
        return refuse(507, FULL)
    if isinstance(error, FileNotFoundError):
        return refuse(410, "this clip is gone: reload the page.")
    if isinstance(error, InputError):
        return refuse(400, str(error))
    if isinstance(error, OSError):  # of others the server library writes the traceback
        LOG.error("a request failed", exc_info=error)
    return refuse(500, "the program failed: its terminal says why.")


def refuse(status: int, sentence: str) -> Response:
    """An error as the page shows it."""
    return JSONResponse({"error": sentence[:1].upper() + sentence[1:]}, status)
