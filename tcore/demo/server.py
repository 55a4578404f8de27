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
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Message, Receive, Scope, Send

from tcore.data.images import encode_jpeg
from tcore.data.video import h264_encoder
from tcore.demo.clips import SAMPLES, read_upload, render_sample
from tcore.demo.engine import Engine
from tcore.demo.exports import write_export
from tcore.demo.inspect_patch import Kind, inspect_patch
from tcore.demo.job import Job, Visitor, Visitors
from tcore.demo.messages import MAX_OBJECTS, MAX_POINTS, read_given, state_message, truth_message
from tcore.errors import InputError
from tcore.video.labels import Masks
from tcore.video.tracked import PALETTE

PAGE = Path(__file__).with_name("page")
MAX_JSON = 32 * 10**6  # bytes of a request that is not an upload
STALL_S = 60  # a request whose body pauses for longer is given up
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

    def __init__(
        self, engine: Engine, *, host: str = "127.0.0.1", port: int = 0, limits: Limits | None = None
    ) -> None:
        self.engine, self.host, self.limits = engine, host, limits or Limits()
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
            access_log=False,
            server_header=False,
            limit_concurrency=64 + 16 * self.limits.visitors,  # a browser opens six connections
            timeout_graceful_shutdown=3,
        )
        self._server = uvicorn.Server(config)
        self._application = self._routes()

    @property
    def url(self) -> str:
        """The address of the page."""
        anywhere = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
        host = anywhere.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/"

    def serve(self) -> None:
        """Answer until `stop`, or a signal in the main thread; then remove everything of the visitors."""
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self.close()

    def stop(self) -> None:
        """Let `serve` return."""
        self._server.should_exit = True

    def close(self) -> None:
        """Stop listening and computing, and remove the temporary folder."""
        self._socket.close()
        self.visitors.close()
        self.engine.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def allows(self, host: str) -> bool:
        """Whether a Host header is ours: an address or our own name; DNS rebinding needs another name."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
            if name and name in ("localhost", self.host.lower(), socket.gethostname().lower()):
                return True
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request of our own page, with the headers that keep other sites out; refuse others."""

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SAFE_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        problem = self._problem(scope["method"], Headers(scope=scope))
        answer = _error(403, problem) if problem else self._application
        await answer(scope, receive, send_safely)

    def _problem(self, method: str, headers: Headers) -> str:
        host, origin = headers.get("Host", ""), headers.get("Origin")
        if not self.allows(host):
            return f"this program does not answer to the name {host!r}: open {self.url}"
        if origin is not None and origin != f"http://{host}":
            return f"requests from {origin} are refused."
        if method == "POST" and headers.get(GUARD) is None:
            return f"the header {GUARD} is missing."
        return ""

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
            exception_handlers={InputError: _refuse, HTTPException: _refuse, Exception: _fail},
        )

    # Quick answers: Starlette calls them in threads of its own.

    def _info(self, request: Request) -> Response:
        engine = self.engine
        encoder = {
            "name": engine.encoder.name,
            "patch": engine.encoder.patch_size,
            "device": str(engine.device),
            "matching": engine.matcher is not None,
        }
        return JSONResponse(
            {
                "encoder": encoder,
                "threads": torch.get_num_threads(),
                "samples": [{"key": key} | sample._asdict() for key, sample in SAMPLES.items()],
                "limits": asdict(self.limits),
                "most": {"objects": MAX_OBJECTS, "points": MAX_POINTS},
                "palette": PALETTE[1:].tolist(),
                "video": h264_encoder() is not None,
            }
        )

    def _state(self, request: Request) -> Response:
        return JSONResponse(state_message(self._visitor(request).job))

    def _frame(self, request: Request) -> Response:
        job = self._visitor(request).job
        number = _number(request, len(job.clip.frames) if request.path_params["key"] == job.key else 0)
        keep = {"Cache-Control": "private, max-age=3600"}
        jpeg = encode_jpeg(np.asarray(job.clip.frames[number]), 92)
        return Response(jpeg, media_type="image/jpeg", headers=keep)

    def _mask(self, request: Request) -> Response:
        job = self._visitor(request).job
        number = _number(request, job.done if isinstance(job.given, Masks) else 0)
        return Response(job.found[number].values.tobytes(), media_type="application/octet-stream")

    def _truth(self, request: Request) -> Response:
        truth = self._visitor(request).job.clip.truth
        if truth is None:
            raise InputError("the labels of an uploaded video are not known.")
        return JSONResponse(truth_message(truth))

    # Slow answers: they wait for the encoder or for a thread of asyncio's, and block no others.

    async def _visit(self, request: Request) -> Response:
        return JSONResponse({"id": (await asyncio.to_thread(self.visitors.new)).id})

    async def _sample(self, request: Request) -> Response:
        visitor, key = self._visitor(request), str((await _json(request)).get("sample"))
        await asyncio.to_thread(visitor.open, self.engine, render_sample, key, self.limits.frames)
        return self._state(request)

    async def _upload(self, request: Request) -> Response:
        visitor = self._visitor(request)
        path = visitor.folder / secrets.token_hex(8)  # whatever the visitor calls it
        try:
            with path.open("wb") as file:
                await _receive(request, self.limits.upload_mb * 10**6, file.write)
            await asyncio.to_thread(visitor.open, self.engine, read_upload, path, self.limits.frames)
        finally:
            path.unlink(missing_ok=True)
        return self._state(request)

    async def _estimate(self, request: Request) -> Response:
        job = self._visitor(request).job
        frames = job.clip.frames
        waiting = self.engine.submit(self.engine.estimate, frames[0], job.inside, len(frames))
        return JSONResponse(await asyncio.wrap_future(waiting))

    async def _run(self, request: Request) -> Response:
        job, data = self._visitor(request).job, await _json(request)
        await asyncio.to_thread(_start, job, data)
        return self._state(request)

    async def _cancel(self, request: Request) -> Response:
        await asyncio.to_thread(self._visitor(request).job.stop)
        return self._state(request)

    async def _inspect(self, request: Request) -> Response:
        job, query = self._visitor(request).job, request.query_params
        try:
            frame, row, column, offset = (int(query[name]) for name in ("frame", "row", "column", "offset"))
        except (KeyError, ValueError) as error:
            raise InputError("a patch is given by frame, row, column and offset, whole numbers.") from error
        kind: Kind = "attention" if query.get("kind") == "attention" else "similarity"
        waiting = self.engine.submit(inspect_patch, job, frame, row, column, offset, kind)
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


async def _receive(request: Request, limit: int, write: Callable[[bytes], object]) -> None:
    """Read the body of a request piece by piece; more bytes than the limit are refused."""
    length, received = request.headers.get("Content-Length", ""), 0
    stated = int(length) if re.fullmatch("[0-9]{1,15}", length) else 0
    pieces = request.stream()
    while True:
        if max(stated, received) > limit:
            raise HTTPException(413, f"this has more than {limit / 1e6:.0f} MB, which is the limit.")
        try:
            piece = await asyncio.wait_for(anext(pieces, None), STALL_S)
        except (TimeoutError, ClientDisconnect) as error:
            raise HTTPException(408, "the request stopped before its end.") from error
        if piece is None:
            return
        received += len(piece)
        write(piece)


async def _json(request: Request) -> dict[str, Any]:
    body = bytearray()
    await _receive(request, MAX_JSON, body.extend)
    try:
        data = json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise InputError("the request is not JSON.") from error
    if not isinstance(data, dict):
        raise InputError("the request is not a JSON object.")
    return data


def _start(job: Job, data: dict[str, Any]) -> None:
    changed = data.get("changed")
    job.start(read_given(data, job.clip.size), changed if isinstance(changed, int) else 0)


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
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot listen on {host}:{port}: {reason}; try another --port.") from error


def _refuse(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return _error(error.status_code, error.detail)
    return _error(400, str(error))


def _fail(request: Request, error: Exception) -> Response:
    return _error(500, f"the program failed: {error!r}; see its terminal.")


def _error(status: int, sentence: str) -> Response:
    return JSONResponse({"error": sentence[:1].upper() + sentence[1:]}, status_code=status)
