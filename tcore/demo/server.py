"""The page over HTTP: a Starlette application run by uvicorn, which refuses requests of other sites.

Answers that need a computation wait for it without blocking others: the encoder's thread and those for slow
work (decoding, exports) are apart from the threads of Starlette that serve frames and masks.
"""

import asyncio
import secrets
import socket
import threading
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Mount, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from tcore.data.images import encode_jpeg
from tcore.data.video import h264_encoder
from tcore.demo import messages
from tcore.demo.clips import SAMPLES, Claim, Clip, open_sample, read_upload
from tcore.demo.engine import Engine
from tcore.demo.exports import write_export
from tcore.demo.http import (
    PREFIX,
    Server,
    equal,
    explain,
    finish,
    is_ours,
    json_of,
    read_body,
    refuse,
    stated_length,
)
from tcore.demo.job import Job, Visitor, Visitors
from tcore.demo.limits import Limits
from tcore.errors import InputError
from tcore.evaluation.protocols import Detail
from tcore.video.labels import Masks
from tcore.video.tracked import PALETTE

PAGE = Path(__file__).with_name("page")
GUARD = "X-Tcore-Demo"
"""A header that other sites cannot send: browsers would ask us first, and we never allow it."""


class Demo(Server):
    """The page and its API."""

    def __init__(self, engine: Engine, limits: Limits, host: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__(engine, limits, host, port)
        self.visitors = Visitors(self.folder, limits)
        self._exporting = asyncio.Lock()
        self._application, self._constant = self._routes(), self._constants()
        self._names = ("localhost", host.lower(), socket.gethostname().lower())

    @property
    def url(self) -> str:
        """The address of the page, with the token where one is needed."""
        return self.address + (f"?token={self.token}" if self.token else "")

    async def expire(self) -> None:
        """End the visits that were idle for too long."""
        await asyncio.to_thread(self.visitors.expire)

    def close(self) -> None:
        """End all visits."""
        self.visitors.close()

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request of our own page; refuse those of other sites, and those without the token."""
        request = Request(scope)
        problem = self._problem(request)
        answer: ASGIApp | None = refuse(403, problem) if problem else None
        if self.token and not problem:
            answer = self._check_token(request)
        if answer is None and request.method in ("GET", "HEAD"):
            answer = self._constant.get(scope["path"])
        await (answer or self._application)(scope, receive, send)

    def _check_token(self, request: Request) -> Response | None:
        """Keep a token from the address in a cookie; refuse a request that has neither."""
        cookie = f"{PREFIX}{self.port}"
        if equal(request.query_params.get("token", ""), self.token):
            answer = RedirectResponse("/", 303)
            answer.set_cookie(cookie, self.token, httponly=True, samesite="lax")
            return answer
        if equal(request.cookies.get(cookie, ""), self.token):
            return None
        return refuse(403, "open the address that tcore demo printed, with its token.")

    def _problem(self, request: Request) -> str:
        host, origin = request.headers.get("Host", ""), request.headers.get("Origin")
        if not is_ours(host, self._names):
            return f"this program does not answer to the name {host!r}: open {self.address}"
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
                Route("/mask/{number}", self._labels),
                Route("/truth", self._truth),
                Route("/run", self._run, methods=["POST"]),
                Route("/mark", self._mark, methods=["POST"]),
                Route("/detail", self._detail, methods=["POST"]),
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
            exception_handlers=dict.fromkeys((InputError, HTTPException, OSError, Exception), explain),
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
            "details": self._details,
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

    def _labels(self, request: Request) -> Response:
        job = _job(request)
        number = _number(request, job.done if isinstance(job.given, Masks) else 0)
        return Response(job.labels(number).tobytes(), media_type="application/octet-stream")

    # Slow answers: they wait for the encoder or for a thread of asyncio's, and block no others.

    async def _sample(self, request: Request) -> Response:
        async with _visitor(request).turn:
            key = str((await json_of(request, self.limits.json_mb)).get("sample"))
            await self._open(request, partial(open_sample, key, self.limits.frames))
        return await self._state(request)

    async def _upload(self, request: Request) -> Response:
        visitor = _visitor(request)
        path = visitor.folder / secrets.token_hex(8)  # whatever the visitor calls it
        async with visitor.turn:
            length = stated_length(request, self.limits.upload_mb)
            self.visitors.claim(visitor, length)
            try:
                with path.open("wb") as file:
                    await read_body(request, file.write)
                await self._open(request, partial(read_upload, path, self.limits.frames))
            finally:
                path.unlink(missing_ok=True)
                self.visitors.release(visitor, length)
        return await self._state(request)

    async def _open(self, request: Request, read: Callable[[Path, Claim], Clip]) -> None:
        stop = threading.Event()
        work = asyncio.to_thread(self.visitors.open, _visitor(request), self.engine, read, stop)
        await finish(request, asyncio.ensure_future(work), stop.set)

    async def _run(self, request: Request) -> Response:
        async with _visitor(request).turn:
            job, data = _job(request), await json_of(request, self.limits.json_mb)
            changed = data.get("changed")
            given = await asyncio.to_thread(messages.read_given, data, job.clip, self.limits)
            job.run(given, changed if isinstance(changed, int) else 0)
        return await self._state(request)

    async def _mark(self, request: Request) -> Response:
        job, data = _job(request), await json_of(request, self.limits.json_mb)
        frame, said = await asyncio.to_thread(messages.read_hints, data, job.clip, self.limits)
        return await self._compute(request, messages.mark, job, frame, said)

    async def _detail(self, request: Request) -> Response:
        detail = (await json_of(request, self.limits.json_mb)).get("detail")
        if detail not in self._details:
            raise InputError(f"no detail {detail!r}: there are {', '.join(self._details)}.")
        _job(request).set_detail(detail)
        return await self._state(request)

    @property
    def _details(self) -> list[Detail]:
        """Grids that a visitor may choose; the finest one only where the program was started with it."""
        return [one for one in get_args(Detail) if one != "finest" or self.engine.detail == one]

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
        return JSONResponse(await finish(request, waiting, waiting.cancel))

    async def _download(self, request: Request) -> Response:
        name, stop = request.path_params["name"], threading.Event()
        async with self._exporting:  # one at a time: others wait, and give up with their connection
            if await request.is_disconnected():
                raise HTTPException(408, "the request was given up.")
            work = asyncio.to_thread(write_export, _job(request), name, stop, self.limits.download_mb)
            path = await finish(request, asyncio.ensure_future(work), stop.set)
        remove = BackgroundTask(path.unlink, missing_ok=True)
        return FileResponse(path, filename=name, background=remove)


def _visitor(request: Request) -> Visitor:
    visitor: Visitor = request.scope["visitor"]
    return visitor


def _job(request: Request) -> Job:
    return _visitor(request).job


def _number(request: Request, count: int) -> int:
    """The number of one of the `count` frames that there are."""
    number = request.path_params["number"]
    if number not in map(str, range(count)):
        raise HTTPException(404, f"there is no frame {number:.9}.")
    return int(number)
