"""What the page can ask for, without HTTP: a table of routes over the encoder and the visitors."""

import io
import json
import re
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tcore.data.video import h264_encoder
from tcore.demo.clips import SAMPLES, read_upload, render_sample
from tcore.demo.engine import Engine, load_engine
from tcore.demo.exports import write_export
from tcore.demo.session import MOST_OBJECTS, MOST_POINTS, Session, Sessions, read_given, state_of
from tcore.demo.trainer import Trainer
from tcore.demo.work import Kind
from tcore.errors import InputError
from tcore.show.figures import PALETTE
from tcore.video.labels import Masks

PAGE = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
KINDS = {".zip": "application/zip", ".csv": "text/csv", ".json": "application/json", ".mp4": "video/mp4"}
MOST_OFFSET = 60  # frames between a patch and its matches


@dataclass(frozen=True)
class Limits:
    """What one visitor may ask for, and how many there may be."""

    upload_mb: int = 200
    frames: int = 240
    visitors: int = 8


@dataclass(frozen=True)
class Request:
    """What was asked; the body is read when it is wanted."""

    method: str
    path: str
    query: dict[str, str]
    json: Callable[[], dict[str, Any]]
    save: Callable[[Path, int], None]
    """Writes the body to a file, unless it has more bytes than this."""


@dataclass(frozen=True)
class Answer:
    """What is sent back."""

    body: bytes | Path
    kind: str
    name: str = ""
    """File name of a download."""
    lasts: bool = False
    """Whether the browser may keep it."""


class Site:
    """The encoder, the visitors, and a temporary folder for everything that they bring."""

    def __init__(self, engine: Engine | None, trainer: Trainer, limits: Limits) -> None:
        self.trainer, self.limits = trainer, limits
        self.folder = Path(tempfile.mkdtemp(prefix="tcore-demo-"))
        self.sessions = Sessions(self.folder, limits.visitors)
        self.page = {
            file.name: file.read_bytes()
            for file in resources.files("tcore.demo").joinpath("page").iterdir()
            if Path(file.name).suffix in PAGE
        }
        self._engine = engine
        self._lock = threading.Lock()

    @property
    def engine(self) -> Engine:
        """The encoder; one that was trained from the page is loaded as soon as it is there."""
        with self._lock:
            if self._engine is None and self.trainer.state()["state"] == "done":
                self._engine = load_engine(self.trainer.run)
            if self._engine is None:
                raise InputError(f"there is no encoder yet: train one here, or with {self.trainer.command}.")
            return self._engine

    def close(self) -> None:
        """Stop everything and remove the temporary folder."""
        self.sessions.close()
        self.trainer.stop()
        if self._engine is not None:
            self._engine.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def respond(site: Site, request: Request) -> Answer | None:
    """The answer to a request; None where there is no such page."""
    for method, pattern, function in ROUTES:
        match = re.fullmatch(pattern, request.path)
        if match and method == request.method:
            return function(site, request, *match.groups())
    for method, pattern, visit in VISITS:
        match = re.fullmatch(f"/api/visit/([A-Za-z0-9_-]{{1,64}})/{pattern}", request.path)
        if match and method == request.method:
            return visit(site, request, site.sessions.get(match[1]), *match.groups()[1:])
    return None


def _as_json(data: Any) -> Answer:
    return Answer(json.dumps(data).encode(), "application/json")


def _page(site: Site, request: Request, name: str) -> Answer | None:
    name = name or "index.html"
    # Names are looked up among the files of the page, never on disk.
    return Answer(site.page[name], PAGE[Path(name).suffix]) if name in site.page else None


def _info(site: Site, request: Request) -> Answer:
    training = site.trainer.state()
    try:
        engine = site.engine
    except InputError:
        engine = None
    return _as_json(
        {
            "encoder": None
            if engine is None
            else {
                "name": engine.encoder.name,
                "patch": engine.encoder.patch_size,
                "device": str(engine.device),
                "matching": engine.matcher is not None,
            },
            "threads": torch.get_num_threads(),
            "training": training,
            "samples": [{"key": key, "name": s.name, "says": s.says} for key, s in SAMPLES.items()],
            "limits": {"upload_mb": site.limits.upload_mb, "frames": site.limits.frames},
            "most": {"objects": MOST_OBJECTS, "points": MOST_POINTS},
            "palette": PALETTE[1:].tolist(),
            "video": h264_encoder() is not None,
        }
    )


def _train(site: Site, request: Request) -> Answer:
    request.json()
    site.trainer.start()
    return _as_json(site.trainer.state())


def _visit(site: Site, request: Request) -> Answer:
    request.json()
    return _as_json({"id": site.sessions.new().id})


def _state(site: Site, request: Request, session: Session) -> Answer:
    return _as_json(state_of(session.work))


def _sample(site: Site, request: Request, session: Session) -> Answer:
    key = request.json().get("sample")
    frames = min(30, site.limits.frames)
    return _as_json(
        state_of(session.open(site.engine, lambda folder: render_sample(str(key), folder, frames)))
    )


def _upload(site: Site, request: Request, session: Session) -> Answer:
    path = session.folder / secrets.token_hex(8)  # whatever the visitor calls it
    try:
        request.save(path, site.limits.upload_mb * 10**6)
        work = session.open(site.engine, lambda folder: read_upload(path, folder, site.limits.frames))
    finally:
        path.unlink(missing_ok=True)
    return _as_json(state_of(work))


def _estimate(site: Site, request: Request, session: Session) -> Answer:
    return _as_json({name: round(value, 4) for name, value in session.work.estimate()._asdict().items()})


def _frame(site: Site, request: Request, session: Session, key: str, number: str) -> Answer:
    work = session.work
    if key != work.folder.name or int(number) >= len(work.clip.frames):
        raise InputError(f"there is no frame {number} in this clip.")
    jpeg = io.BytesIO()
    Image.fromarray(np.asarray(work.clip.frames[int(number)])).save(jpeg, format="JPEG", quality=92)
    return Answer(jpeg.getvalue(), "image/jpeg", lasts=True)


def _mask(site: Site, request: Request, session: Session, number: str) -> Answer:
    work = session.work
    if int(number) not in work.found or not isinstance(work.given, Masks):
        raise InputError(f"frame {number} has no mask yet.")
    return Answer(np.ascontiguousarray(work.found[int(number)].values).tobytes(), "application/octet-stream")


def _truth(site: Site, request: Request, session: Session) -> Answer:
    truth = session.work.clip.truth
    if truth is None:
        raise InputError("the labels of an uploaded video are not known.")
    ids = truth.ids.ravel()
    changes = [0, *(np.flatnonzero(np.diff(ids.astype(np.int16))) + 1).tolist(), ids.size]
    runs = [value for a, b in pairwise(changes) for value in (b - a, int(ids[a]))]
    points = [
        [name, round(x, 2), round(y, 2)]
        for name, (x, y) in zip(truth.names, truth.points.tolist(), strict=True)
        if x == x  # hidden joints are NaN
    ]
    return _as_json({"runs": runs, "points": points})


def _run(site: Site, request: Request, session: Session) -> Answer:
    data, work = request.json(), session.work
    changed = data.get("changed")
    work.start(read_given(data, work.clip.size), changed if isinstance(changed, int) else 0)
    return _as_json(state_of(work))


def _cancel(site: Site, request: Request, session: Session) -> Answer:
    request.json()
    session.work.stop()
    return _as_json(state_of(session.work))


def _look(site: Site, request: Request, session: Session) -> Answer:
    try:
        frame, row, column, offset = (
            int(request.query[name]) for name in ("frame", "row", "column", "offset")
        )
    except (KeyError, ValueError) as error:
        raise InputError("a patch is given by frame, row, column and offset, whole numbers.") from error
    kind: Kind = "attention" if request.query.get("kind") == "attention" else "similarity"
    return _as_json(session.work.look(frame, row, column, min(max(1, offset), MOST_OFFSET), kind))


def _download(site: Site, request: Request, session: Session, name: str) -> Answer:
    return Answer(write_export(session.work, name), KINDS[Path(name).suffix], name)


ROUTES: tuple[tuple[str, str, Callable[..., Answer | None]], ...] = (
    ("GET", r"/([a-z-]*(?:\.[a-z]+)?)", _page),
    ("GET", r"/api/info", _info),
    ("POST", r"/api/train", _train),
    ("POST", r"/api/visit", _visit),
)
VISITS: tuple[tuple[str, str, Callable[..., Answer]], ...] = (
    ("GET", r"state", _state),
    ("POST", r"sample", _sample),
    ("POST", r"upload", _upload),
    ("GET", r"estimate", _estimate),
    ("GET", r"frame/([0-9a-f]{1,32})/([0-9]{1,6})", _frame),
    ("GET", r"mask/([0-9]{1,6})", _mask),
    ("GET", r"truth", _truth),
    ("POST", r"run", _run),
    ("POST", r"cancel", _cancel),
    ("GET", r"look", _look),
    ("GET", r"download/([a-z]+\.(?:zip|csv|json|mp4))", _download),
)
