"""The page over HTTP: a Starlette application run by uvicorn, which refuses requests of other sites.

Answers that need a computation wait for it without blocking others: the encoder's thread and those for slow
work (decoding, exports) are apart from the threads of Starlette that serve frames, masks and states.
"""

import asyncio
import ipaddress
import json
import re
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from tcore.data.images import encode_jpeg
from tcore.data.video import h264_encoder
from tcore.demo import messages
from tcore.demo.clips import SAMPLES, read_upload, render_sample
from tcore.demo.engine import Engine
from tcore.demo.exports import write_export
from tcore.demo.job import Visitor, Visitors
from tcore.errors import InputError
from tcore.video.labels import Masks
from tcore.video.tracked import PALETTE

PAGE = Path(__file__).with_name("page")
MAX_JSON = 32 * 10**6  # bytes of a request that is not an upload
JSON_S, UPLOAD_S = 60, 600  # seconds that a request and an upload may take to arrive
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


@dataclass(frozen=True)
class Limits:
    """What one visitor may upload, and how many visitors there may be."""

    upload_mb: int = 200
    frames: int = 240
    visitors: int = 8


class Demo:
    """The server of one encoder; it listens from the start, and answers while `serve` runs."""

    def __init__(self, engine: Engine, limits: Limits, host: str = "127.0.0.1", port: int = 0) -> None:
        self.engine, self.limits, self.host = engine, limits, host
        self._socket = _listen(host, port)
        self.port = int(self._socket.getsockname()[1])
        self.folder = Path(tempfile.mkdtemp(prefix="tcore-demo-"))
        self.visitors = Visitors(self.folder, self.limits.visitors)
        config = uvicorn.Config(
            self.answer,
            interface="asgi3",
            http="h11",
            ws="none",
            lifespan="off",
            log_level="error",
            server_header=False,
            headers=list(SAFE_HEADERS.items()),
            limit_concurrency=64 + 16 * self.limits.visitors,  # a browser opens six connections
            timeout_graceful_shutdown=3,
        )
        self._server = uvicorn.Server(config)
        self._application = self._routes()

    @property
    def url(self) -> str:
        """The address of the page."""
        host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/"

    def serve(self) -> None:
        """Answer until `stop`, or a signal in the main thread; then remove everything of the visitors."""
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._socket.close()
            self.visitors.close()
            self.engine.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    def stop(self) -> None:
        """Let `serve` return."""
        self._server.should_exit = True

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request of our own page; refuse those of other sites."""
        problem = self._problem(scope["method"], Headers(scope=scope))
        await (_error(403, problem) if problem else self._application)(scope, receive, send)

    def _problem(self, method: str, headers: Headers) -> str:
        host, origin = headers.get("Host", ""), headers.get("Origin")
        if not self._is_ours(host):
            return f"this program does not answer to the name {host!r}: open {self.url}"
        if origin is not None and origin != f"http://{host}":
            return f"requests from {origin} are refused."
        if method == "POST" and headers.get(GUARD) is None:
            return f"the header {GUARD} is missing."
        return ""

    def _is_ours(self, host: str) -> bool:
        """Whether a Host header is an address or our own name; DNS rebinding needs another name."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
            if name not in ("localhost", self.host.lower(), socket.gethostname().lower()):
                ipaddress.ip_address(name)
        except ValueError:
            return False
        return bool(name)

    def _routes(self) -> Starlette:
        visit = "/api/visit/{visit}/"
        return Starlette(
            routes=[
                Route("/api/info", self._info),
                Route("/api/visit", self._visit, methods=["POST"]),
                Route(visit + "state", self._state),
                Route(visit + "sample", self._sample, methods=["POST"]),
                Route(visit + "upload", self._upload, methods=["POST"]),
                Route(visit + "estimate", self._estimate),
                Route(visit + "frame/{key}/{number}", self._frame),
                Route(visit + "mask/{number}", self._mask),
                Route(visit + "truth", self._truth),
                Route(visit + "run", self._run, methods=["POST"]),
                Route(visit + "cancel", self._cancel, methods=["POST"]),
                Route(visit + "inspect", self._inspect),
                Route(visit + "download/{name}", self._download),
                Mount("/", StaticFiles(directory=PAGE, html=True)),
            ],
            exception_handlers=dict.fromkeys((InputError, HTTPException, Exception), _explain),
        )

    # Quick answers: Starlette calls them in threads of its own.

    def _info(self, request: Request) -> Response:
        encoder = self.engine.encoder
        return JSONResponse(
            {
                "encoder": {
                    "name": encoder.name,
                    "patch": encoder.patch_size,
                    "device": str(self.engine.device),
                    "matching": self.engine.matcher is not None,
                },
                "threads": torch.get_num_threads(),
                "samples": [{"key": key} | sample._asdict() for key, sample in SAMPLES.items()],
                "limits": asdict(self.limits),
                "most": {"objects": messages.MAX_OBJECTS, "points": messages.MAX_POINTS},
                "palette": PALETTE[1:].tolist(),
                "video": h264_encoder() is not None,
            }
        )

    def _state(self, request: Request) -> Response:
        return JSONResponse(messages.state(self._visitor(request).job))

    def _frame(self, request: Request) -> Response:
        job = self._visitor(request).job
        number = _number(request, job.clip.count if request.path_params["key"] == job.key else 0)
        return Response(encode_jpeg(job.clip.frame(number), 92), media_type="image/jpeg")

    def _mask(self, request: Request) -> Response:
        job = self._visitor(request).job
        number = _number(request, job.done if isinstance(job.given, Masks) else 0)
        return Response(job.labels(number).tobytes(), media_type="application/octet-stream")

    def _truth(self, request: Request) -> Response:
        truth = self._visitor(request).job.clip.truth
        if truth is None:
            raise InputError("the labels of an uploaded video are not known.")
        return JSONResponse(messages.truth(*truth))

    def _cancel(self, request: Request) -> Response:
        self._visitor(request).job.cancel()
        return self._state(request)

    def _visit(self, request: Request) -> Response:
        return JSONResponse({"id": self.visitors.new().id})

    # Slow answers: they wait for the encoder or for a thread of asyncio's, and block no others.

    async def _sample(self, request: Request) -> Response:
        visitor = self._visitor(request)
        async with visitor.turn:
            key = str((await _json(request)).get("sample"))
            read = partial(render_sample, key, self.limits.frames)
            await asyncio.to_thread(visitor.open, self.engine, read)
        return self._state(request)

    async def _upload(self, request: Request) -> Response:
        visitor = self._visitor(request)
        path = visitor.folder / secrets.token_hex(8)  # whatever the visitor calls it
        async with visitor.turn:
            try:
                with path.open("wb") as file:
                    await _receive(request, self.limits.upload_mb * 10**6, UPLOAD_S, file.write)
                read = partial(read_upload, path, self.limits.frames)
                await asyncio.to_thread(visitor.open, self.engine, read)
            finally:
                path.unlink(missing_ok=True)
        return self._state(request)

    async def _run(self, request: Request) -> Response:
        visitor = self._visitor(request)
        async with visitor.turn:
            data = await _json(request)
            given, changed = messages.read_given(data, visitor.job.clip.size), data.get("changed")
            visitor.job.run(given, changed if isinstance(changed, int) else 0)
        return self._state(request)

    async def _estimate(self, request: Request) -> Response:
        job = self._visitor(request).job
        waiting = self.engine.submit(self.engine.estimate, job.clip.frame(0), job.inside, job.clip.count)
        return JSONResponse(await asyncio.wrap_future(waiting))

    async def _inspect(self, request: Request) -> Response:
        job, query = self._visitor(request).job, request.query_params
        try:
            frame, row, column, offset = (int(query[name]) for name in ("frame", "row", "column", "offset"))
        except (KeyError, ValueError) as error:
            raise InputError("a patch is given by frame, row, column and offset, whole numbers.") from error
        attention = query.get("kind") == "attention"
        waiting = self.engine.submit(messages.inspect, job, frame, row, column, offset, attention)
        return JSONResponse(await asyncio.wrap_future(waiting))

    async def _download(self, request: Request) -> Response:
        name = request.path_params["name"]
        path = await asyncio.to_thread(write_export, self._visitor(request).job, name)
        return FileResponse(path, filename=name)

    def _visitor(self, request: Request) -> Visitor:
        visitor = self.visitors.get(request.path_params["visit"])
        if visitor is None:
            raise HTTPException(410, "this visit ended, or the program was restarted: reload the page.")
        return visitor


async def _receive(request: Request, limit: int, seconds: float, write: Callable[[bytes], object]) -> None:
    """Read a body piece by piece; its length must be stated, and the server library holds it to that."""
    length = request.headers.get("Content-Length", "")
    if not re.fullmatch("[0-9]+", length):
        raise HTTPException(411, "the length of the request is not stated.")
    if len(length) > 15 or int(length) > limit:
        raise HTTPException(413, f"this has more than {limit / 1e6:.0f} MB, which is the limit.")
    try:
        async with asyncio.timeout(seconds):
            async for piece in request.stream():
                write(piece)
    except (TimeoutError, ClientDisconnect) as error:
        raise HTTPException(408, "the request stopped before its end.") from error


async def _json(request: Request) -> dict[str, Any]:
    body = bytearray()
    await _receive(request, MAX_JSON, JSON_S, body.extend)
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        raise InputError("the request is not a JSON object.")
    return data


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
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise InputError(f"cannot listen on {host}:{port}: {error.strerror}; try another --port.") from error


async def _explain(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return _error(error.status_code, error.detail)
    if isinstance(error, InputError):
        return _error(400, str(error))
    return _error(500, f"the program failed: {error!r}; see its terminal.")


def _error(status: int, sentence: str) -> Response:
    return JSONResponse({"error": sentence[:1].upper() + sentence[1:]}, status)
