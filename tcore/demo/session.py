"""Visitors: each has a folder and a clip of its own; the one who was away longest makes room."""

import secrets
import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tcore.demo.clips import Clip
from tcore.demo.engine import Engine
from tcore.demo.work import Work, points_of
from tcore.errors import InputError
from tcore.evaluation.masks import Ids
from tcore.video.labels import Masks, Points

MOST_OBJECTS, MOST_POINTS = 20, 100
AWAY = "this visit was put away to make room for others, or the program was started anew: reload the page."


class AwayError(InputError):
    """A visitor whose folder is no longer there."""


class Session:
    """One visitor."""

    def __init__(self, folder: Path) -> None:
        self.id = folder.name
        self.folder = folder
        self._work: Work | None = None
        self._lock = threading.Lock()

    @property
    def work(self) -> Work:
        """The clip that is being worked on."""
        if self._work is None:
            raise InputError("there is no clip yet: choose a sample or upload a video.")
        return self._work

    @property
    def running(self) -> bool:
        """Whether a run goes on."""
        return self._work is not None and self._work.running

    def open(self, engine: Engine, read: Callable[[Path], Clip]) -> Work:
        """Put another clip in the place of the one before, once it could be read."""
        with self._lock:
            folder = self.folder / secrets.token_hex(8)
            folder.mkdir(parents=True)
            try:
                work = Work(read(folder), engine, folder)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            before, self._work = self._work, work
            if before is not None:
                before.stop()
                shutil.rmtree(before.folder, ignore_errors=True)
            return work

    def close(self) -> None:
        """Stop what runs and remove every file."""
        if self._work is not None:
            self._work.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


class Sessions:
    """All visitors, those who came last at the end."""

    def __init__(self, folder: Path, most: int) -> None:
        self._folder, self._most = folder, most
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._lock = threading.Lock()

    def new(self) -> Session:
        """A new visitor, with a name that nobody can guess."""
        with self._lock:
            leaving = None
            if len(self._sessions) >= self._most:
                idle = next((key for key, session in self._sessions.items() if not session.running), None)
                if idle is None:
                    raise InputError(
                        f"{self._most} visitors are at work, which is the limit: try again later."
                    )
                leaving = self._sessions.pop(idle)
            session = Session(self._folder / secrets.token_urlsafe(16))
            session.folder.mkdir()
            self._sessions[session.id] = session
        if leaving is not None:
            leaving.close()
        return session

    def get(self, key: str) -> Session:
        """A visitor who is here."""
        with self._lock:
            if key not in self._sessions:
                raise AwayError(AWAY)
            self._sessions.move_to_end(key)
            return self._sessions[key]

    def close(self) -> None:
        """Send everybody away."""
        with self._lock:
            for session in self._sessions.values():
                session.close()
            self._sessions.clear()


def read_given(data: Any, size: tuple[int, int]) -> Masks | Points:
    """Labels that the page sends: runs of ids by frame, or points by frame and name."""
    try:
        if data["kind"] == "masks":
            return Masks({int(frame): _ids(runs, size) for frame, runs in data["given"].items()})
        if data["kind"] != "points":
            raise InputError(f"labels are masks or points, not {data['kind']!r}.")
        names = tuple(str(name)[:60] for name in data["names"])
        if len(names) > MOST_POINTS or len(set(names)) < len(names):
            raise InputError(f"{len(names)} points: need {MOST_POINTS} or fewer, each with its own name.")
        frames = {int(frame): _points(names, places) for frame, places in data["given"].items()}
        return Points(names, frames)
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"these labels cannot be read: {error!r}.") from error


def _points(names: tuple[str, ...], places: list[Any]) -> dict[str, tuple[float, float]]:
    xy = [(np.nan, np.nan) if place is None else (float(place[0]), float(place[1])) for place in places]
    return dict(zip(names, xy, strict=True))


def _ids(runs: list[int], size: tuple[int, int]) -> Ids:
    """Ids of a frame from [length, id, length, id, ...]."""
    pairs = np.array(runs, dtype=np.int64).reshape(-1, 2)
    height, width = size
    if (pairs < 0).any() or (pairs[:, 0] > height * width).any() or pairs[:, 0].sum() != height * width:
        raise InputError(f"a mask of this clip must have {height}x{width} pixels.")
    if pairs[:, 1].max(initial=0) > MOST_OBJECTS:
        raise InputError(f"object {pairs[:, 1].max()}: there are at most {MOST_OBJECTS}.")
    return np.repeat(pairs[:, 1], pairs[:, 0]).reshape(height, width).astype(np.uint8)


def state_of(work: Work) -> dict[str, Any]:
    """Everything that the page shows about a clip and its run."""
    clip, progress, given = work.clip, work.progress, work.given
    state = progress.state  # before the frames: a run that is done has them all
    found = dict(work.found)
    seconds = progress.seconds / max(1, len(found) - progress.start)
    return {
        "clip": {
            "name": clip.name,
            "frames": len(clip.frames),
            "height": clip.size[0],
            "width": clip.size[1],
            "rate": float(clip.rate),
            "rows": work.grid[0],
            "columns": work.grid[1],
            "topk": work.protocol.topk,
            "remarks": list(clip.remarks),
            "sample": clip.truth is not None,
            "key": work.folder.name,
        },
        "state": state,
        "error": progress.error,
        "start": progress.start,
        "done": len(found),
        "left": round(seconds * (len(clip.frames) - len(found)), 1) if progress.seconds else None,
        "kind": None if given is None else "masks" if isinstance(given, Masks) else "points",
        "names": list(given.names) if isinstance(given, Points) else [],
        "given": sorted(given.frames) if given is not None else [],
        "confidence": [round(found[index].confidence, 4) for index in sorted(found)],
        "points": [points_of(found[index]) for index in sorted(found)] if isinstance(given, Points) else [],
    }
