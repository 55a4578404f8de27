"""The page over HTTP: a Starlette application run by uvicorn, which refuses requests of other sites.

Answers that need a computation wait for it without blocking others: the encoder's thread and those for slow
work (decoding, exports) are apart from the threads of Starlette that serve frames and masks.
"""

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
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import filelock
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Mount, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from tcore.data.images import encode_jpeg
from tcore.data.video import h264_encoder
from tcore.demo import messages
from tcore.demo.clips import SAMPLES, Claim, Clip, read_upload, render_sample
from tcore.demo.engine import Engine
from tcore.demo.exports import write_export
from tcore.demo.job import FULL, LOG, Job, Visitor, Visitors, is_full
from tcore.demo.limits import Limits
from tcore.errors import InputError
from tcore.video.labels import Masks
from tcore.video.tracked import PALETTE

T = TypeVar("T")
PAGE = Path(__file__).with_name("page")
PREFIX = "tcore-demo-"  # of the temporary folder
NEW_S = 60  # seconds after which a folder without a lock is nobody's
GUARD = "X-Tcore-Demo"
"""A header that other sites cannot send: browsers would ask us first, and we never allow it."""
SAFE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' blob: data:; frame-ancestors 'none'; "
    "base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Demo:
    """The server of one encoder; it listens from the start, and answers while `serve` runs."""

    def __init__(self, engine: Engine, limits: Limits, host: str = "127.0.0.1", port: int = 0) -> None:
        self.engine, self.limits, self.host = engine, limits, host
        self.token = "" if _is_loopback(host) else secrets.token_urlsafe(16)
        """What every request must know where other machines can reach the page."""
        self._socket = _listen(host, port)
        self.port = int(self._socket.getsockname()[1])
        self.folder, self._lock = _own_folder()
        self.visitors = Visitors(self.folder, limits)
        self._exporting = asyncio.Lock()
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
            callback_notify=self._expire,
        )
        self._server = uvicorn.Server(config)
        self._application, self._constant = self._routes(), self._constants()
        self._names = ("localhost", host.lower(), socket.gethostname().lower())

    @property
    def url(self) -> str:
        """The address of the page, with the token where one is needed."""
        return self._address + (f"?token={self.token}" if self.token else "")

    @property
    def _address(self) -> str:
        host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/"

    def serve(self) -> None:
        """Answer until `stop`, or a signal in the main thread; then remove everything of the visitors."""
        self.engine.frame_bytes((64, 64))  # loads what torch loads with the first frame
        gc.freeze()  # looking for garbage among all of that would stop everybody for 0.2 s
        try:
            with _on_signals(("SIGHUP", "SIGQUIT"), lambda *_: self.stop()):
                self._server.run(sockets=[self._socket])
        finally:
            # Whoever presses Ctrl-C again must not interrupt this.
            with _on_signals(("SIGHUP", "SIGQUIT", "SIGINT", "SIGTERM"), signal.SIG_IGN):
                self._socket.close()
                self.visitors.close()
                self.engine.close()
                _remove(self.folder)
                self._lock.release()

    def stop(self) -> None:
        """Let `serve` return."""
        self._server.should_exit = True

    async def _expire(self) -> None:
        await asyncio.to_thread(self.visitors.expire)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request of our own page; refuse those of other sites, and those without the token."""
        request = Request(scope)
        problem = self._problem(request)
        answer: ASGIApp | None = _error(403, problem) if problem else None
        if self.token and not problem:
            answer = self._check_token(request)
        if answer is None and request.method in ("GET", "HEAD"):
            answer = self._constant.get(scope["path"])
        await (answer or self._application)(scope, receive, send)

    def _check_token(self, request: Request) -> Response | None:
        """Keep a token from the address in a cookie; refuse a request that has neither."""
        cookie = f"{PREFIX}{self.port}"
        if _equal(request.query_params.get("token", ""), self.token):
            answer = RedirectResponse("/", 303)
            answer.set_cookie(cookie, self.token, httponly=True, samesite="lax")
            return answer
        if _equal(request.cookies.get(cookie, ""), self.token):
            return None
        return _error(403, "open the address that tcore demo printed, with its token.")

    def _problem(self, request: Request) -> str:
        host, origin = request.headers.get("Host", ""), request.headers.get("Origin")
        if not _is_ours(host, self._names):
            return f"this program does not answer to the name {host!r}: open {self._address}"
        if origin is not None and origin != f"http://{host}":
            return f"requests from {origin} are refused."
        if request.method == "POST" and request.headers.get(GUARD) is None:
            return f"the header {GUARD} is missing."
        return ""

    def _routes(self) -> Starlette:
        self._visitor_routes = Router(
            [
                Route("/state", self._state),
                Route("/sample", self._sample, methods=["POST"]),
                Route("/upload", self._upload, methods=["POST"]),
                Route("/estimate", self._estimate),
                Route("/frame/{key}/{number}", self._frame),
                Route("/mask/{number}", self._mask),
                Route("/truth", self._truth),
                Route("/run", self._run, methods=["POST"]),
                Route("/cancel", self._cancel, methods=["POST"]),
                Route("/inspect", self._inspect),
                Route("/download/{name}", self._download),
            ],
            redirect_slashes=False,
        )
        return Starlette(
            routes=[
                Route("/api/visit", self._visit, methods=["POST"]),
                Mount("/api/visit/{visit}", self._enter),
            ],
            exception_handlers=dict.fromkeys((InputError, HTTPException, OSError, Exception), _explain),
        )

    def _constants(self) -> dict[str, Response]:
        """Answers that never change, by path: the files of the page, and what it should know at first."""
        kinds = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
        files = {
            f"/{path.name}": Response(path.read_bytes(), media_type=kinds[path.suffix])
            for path in PAGE.iterdir()
        }
        return {"/": files["/index.html"], "/api/info": JSONResponse(self._info()), **files}

    def _info(self) -> dict[str, Any]:
        encoder = self.engine.encoder
        return {
            "encoder": {
                "name": encoder.name,
                "patch": encoder.patch_size,
                "device": str(self.engine.device),
                "matching": self.engine.matcher is not None,
            },
            "threads": torch.get_num_threads(),
            "samples": [{"key": key} | sample._asdict() for key, sample in SAMPLES.items()],
            "limits": asdict(self.limits),
            "palette": PALETTE[1:].tolist(),
            "video": h264_encoder() is not None,
        }

    async def _enter(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request of one visitor, who does not have to make room for others meanwhile."""
        with self.visitors.enter(scope["path_params"]["visit"]) as visitor:
            if visitor is None:
                raise HTTPException(410, "this visit ended, or the program was restarted: reload the page.")
            scope["visitor"] = visitor
            try:
                async with asyncio.timeout(self.limits.request_s):
                    await self._visitor_routes(scope, receive, send)
            except TimeoutError as error:
                raise HTTPException(408, "the request took too long and was given up.") from error

    # Quick answers, at once.

    async def _state(self, request: Request) -> Response:
        return JSONResponse(messages.state(_job(request)))

    async def _truth(self, request: Request) -> Response:
        truth = _job(request).clip.truth
        if truth is None:
            raise InputError("the labels of an uploaded video are not known.")
        return JSONResponse(messages.truth(*truth))

    async def _cancel(self, request: Request) -> Response:
        _job(request).cancel()
        return await self._state(request)

    # Answers from files: Starlette calls these functions in threads of its own.

    def _visit(self, request: Request) -> Response:
        return JSONResponse({"id": self.visitors.new().id})

    def _frame(self, request: Request) -> Response:
        job = _job(request)
        number = _number(request, job.clip.count if request.path_params["key"] == job.key else 0)
        return Response(encode_jpeg(job.clip.frame(number), 92), media_type="image/jpeg")

    def _mask(self, request: Request) -> Response:
        job = _job(request)
        number = _number(request, job.done if isinstance(job.given, Masks) else 0)
        return Response(job.labels(number).tobytes(), media_type="application/octet-stream")

    # Slow answers: they wait for the encoder or for a thread of asyncio's, and block no others.

    async def _sample(self, request: Request) -> Response:
        async with _visitor(request).turn:
            key = str((await self._json(request)).get("sample"))
            await self._open(request, partial(render_sample, key, self.limits.frames))
        return await self._state(request)

    async def _upload(self, request: Request) -> Response:
        visitor = _visitor(request)
        path = visitor.folder / secrets.token_hex(8)  # whatever the visitor calls it
        async with visitor.turn:
            length = _length(request, self.limits.upload_mb)
            self.visitors.claim(visitor, length)
            try:
                with path.open("wb") as file:
                    await _receive(request, file.write)
                await self._open(request, partial(read_upload, path, self.limits.frames))
            finally:
                path.unlink(missing_ok=True)
                self.visitors.release(visitor, length)
        return await self._state(request)

    async def _open(self, request: Request, read: Callable[[Path, Claim], Clip]) -> None:
        stop = threading.Event()
        work = asyncio.to_thread(self.visitors.open, _visitor(request), self.engine, read, stop)
        await _finish(request, asyncio.ensure_future(work), stop.set)

    async def _run(self, request: Request) -> Response:
        async with _visitor(request).turn:
            job, data = _job(request), await self._json(request)
            changed = data.get("changed")
            given = await asyncio.to_thread(messages.read_given, data, job.clip, self.limits)
            job.run(given, changed if isinstance(changed, int) else 0)
        return await self._state(request)

    async def _estimate(self, request: Request) -> Response:
        job = _job(request)
        return await self._compute(request, self._estimated, job)

    def _estimated(self, job: Job) -> dict[str, float]:
        return self.engine.estimate(job.clip.frame(0), job.inside, job.clip.count)

    async def _inspect(self, request: Request) -> Response:
        job, query = _job(request), request.query_params
        try:
            frame, row, column, offset = (int(query[name]) for name in ("frame", "row", "column", "offset"))
        except (KeyError, ValueError) as error:
            raise InputError("a patch is given by frame, row, column and offset, whole numbers.") from error
        attention = query.get("kind") == "attention"
        return await self._compute(request, messages.inspect, job, frame, row, column, offset, attention)

    async def _compute(self, request: Request, work: Callable[..., Any], *args: Any) -> Response:
        waiting = asyncio.wrap_future(self.engine.submit(work, *args))
        return JSONResponse(await _finish(request, waiting, waiting.cancel))

    async def _download(self, request: Request) -> Response:
        name, stop = request.path_params["name"], threading.Event()
        async with self._exporting:  # one at a time: others wait, and give up with their connection
            if await request.is_disconnected():
                raise HTTPException(408, "the request was given up.")
            work = asyncio.to_thread(write_export, _job(request), name, stop)
            path = await _finish(request, asyncio.ensure_future(work), stop.set)
        remove = BackgroundTask(path.unlink, missing_ok=True)
        return FileResponse(path, filename=name, background=remove)

    async def _json(self, request: Request) -> dict[str, Any]:
        body = bytearray()
        _length(request, self.limits.json_mb)
        await _receive(request, body.extend)
        try:
            data = json.loads(body)
        except (ValueError, RecursionError):
            data = None
        if not isinstance(data, dict):
            raise InputError("the request is not a JSON object.")
        return data


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


async def _finish(request: Request, work: asyncio.Future[T], stop: Callable[[], object]) -> T:
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


def _visitor(request: Request) -> Visitor:
    visitor: Visitor = request.scope["visitor"]
    return visitor


def _job(request: Request) -> Job:
    return _visitor(request).job


def _length(request: Request, most_mb: float) -> int:
    """The length of a body, which must be stated; the server library holds it to that."""
    length = request.headers.get("Content-Length", "")
    if not re.fullmatch("[0-9]+", length):
        raise HTTPException(411, "the length of the request is not stated.")
    if len(length) > 15 or int(length) > most_mb * 10**6:
        raise HTTPException(413, f"this has more than {most_mb:g} MB, which is the limit.")
    return int(length)


async def _receive(request: Request, write: Callable[[bytes], object]) -> None:
    try:
        async for piece in request.stream():
            write(piece)
    except ClientDisconnect as error:
        raise HTTPException(408, "the request stopped before its end.") from error


def _number(request: Request, count: int) -> int:
    """The number of one of the `count` frames that there are."""
    number = request.path_params["number"]
    if number not in map(str, range(count)):
        raise HTTPException(404, f"there is no frame {number:.9}.")
    return int(number)


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens; the port is taken from here on."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise InputError(f"cannot listen on {host}:{port}: {error.strerror}; try another --port.") from error


@lru_cache(maxsize=64)
def _is_ours(host: str, names: tuple[str, ...]) -> bool:
    """Whether a Host header is an address or one of our names; DNS rebinding needs another name."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if name not in names:
            ipaddress.ip_address(name)
    except ValueError:
        return False
    return bool(name)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _equal(one: str, other: str) -> bool:
    return secrets.compare_digest(one.encode(errors="replace"), other.encode())


def _own_folder() -> tuple[Path, filelock.BaseFileLock]:
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
                    _remove(path)
            elif time.time() - about.st_mtime > NEW_S:
                path.rmdir()  # its process was killed before the lock was there, or after it was removed
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    lock = filelock.FileLock(folder / "lock", thread_local=False)
    lock.acquire()
    return folder, lock


def _remove(folder: Path) -> None:
    """Remove a folder, its lock last: if this is killed, the next start goes on."""
    for path in folder.iterdir():
        if path.name != "lock":
            shutil.rmtree(path, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _on_signals(names: tuple[str, ...], handler: Any) -> Iterator[None]:
    """Handle signals, where there are such; only the main thread of a program can."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
        before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


async def _explain(request: Request, error: Exception) -> Response:
    """A sentence for the visitor; what a stranger need not know is in the log alone."""
    if isinstance(error, HTTPException):
        return _error(error.status_code, error.detail)
    if isinstance(error, InputError) and isinstance(error.__cause__, OSError):
        error = error.__cause__  # without the name of a file of ours
    if is_full(error):
        return _error(507, FULL)
    if isinstance(error, FileNotFoundError):
        return _error(410, "this clip is gone: reload the page.")
    if isinstance(error, InputError):
        return _error(400, str(error))
    if isinstance(error, OSError):  # of others the server library writes the traceback
        LOG.error("a request failed", exc_info=error)
    return _error(500, "the program failed: its terminal says why.")


def _error(status: int, sentence: str) -> Response:
    return JSONResponse({"error": sentence[:1].upper() + sentence[1:]}, status)
