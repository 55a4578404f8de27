"""Visitors and their jobs: a clip, its features, and the run that propagates labels through it."""

import asyncio
import errno
import logging
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tcore.demo.clips import Claim, Clip, save_array
from tcore.demo.engine import Engine
from tcore.demo.limits import Limits
from tcore.errors import InputError
from tcore.evaluation.propagate import Features, Labels, propagate_features
from tcore.evaluation.protocols import Detail
from tcore.evaluation.resize import Size
from tcore.video.both_ways import both_ways
from tcore.video.labels import Masks, Points
from tcore.video.mark import Marker
from tcore.video.tracked import LOST, LOST_POINT, Found, TrackedMasks, TrackedPoints, track_labels

State = Literal["idle", "running", "done", "canceled", "failed"]
LOG = logging.getLogger(__name__)
RUNNING = "a run is in progress: cancel it, or wait until it is done."
FULL = "the disk of the machine that runs tcore demo is full."


def is_full(error: BaseException | None) -> bool:
    """Whether a disk has no room left for what was to be written."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Job:
    """A clip and everything computed from it; the page reads its state while a run is in progress."""

    def __init__(self, clip: Clip, engine: Engine) -> None:
        self.clip, self.engine, self.key = clip, engine, clip.folder.name
        self._lock = threading.Lock()
        self._marker: tuple[int, Marker] | None = None
        self.state: State = "idle"
        self.error = ""
        self.set_detail(engine.detail)
        self.first, self.seconds = 0, 0.0  # of the last run: its first frame, and how long it has taken
        self.steps, self.total = 0, 1  # of the last run: frames of both passes, done and in all
        self._soft: Iterator[Labels | None] | None = None  # of the run in progress

    def set_detail(self, detail: Detail) -> None:
        """Work on a grid of this detail from now on; labels and features of the one before are dropped."""
        patch = self.engine.encoder.patch_size
        with self._lock:
            if self.state == "running":
                raise InputError(RUNNING)
            self.detail, self.state, self.error = detail, "idle", ""
            self.inside = self.engine.input_size(self.clip.size, detail)
            self.grid = (self.inside[0] // patch, self.inside[1] // patch)
            self.protocol = self.engine.protocol(self.inside)
            self.given: Masks | Points | None = None
            self.found: list[Found] = []
            """Labels of the first frames; the values of masks are on disk."""
            self.lost: list[tuple[int, ...]] = []
            """Of these frames: ids of the objects, or numbers of the points from 1, that are not there."""
            self._encoded: set[int] = set()

    def marker(self, frame: int) -> Marker:
        """A frame to be marked; that of the last one is kept."""
        if self._marker is None or self._marker[0] != frame:
            nearby = [self.clip.frame(near) for near in (frame - 1, frame + 1) if 0 <= near < self.clip.count]
            self._marker = (frame, Marker(self.clip.frame(frame), self.engine.encoder, nearby))
        return self._marker[1]

    @property
    def done(self) -> int:
        """Number of labeled frames."""
        return len(self.found)

    def features(self, index: int) -> Float[Tensor, "channels rows columns"]:
        """Features of a frame, encoded once and kept on disk."""
        path = self.clip.folder / f"features-{index}.npy"
        if index not in self._encoded:
            save_array(path, self.engine.encode(self.clip.frame(index), self.inside).cpu().numpy())
            self._encoded.add(index)
        return torch.from_numpy(np.load(path)).to(self.engine.device)

    def labels(self, index: int) -> np.ndarray:
        """Ids of a labeled frame, or x, y and confidence of every point."""
        if isinstance(self.given, Masks):
            return np.load(self.clip.folder / f"ids-{index}.npy")
        return self.found[index].values

    def run(self, given: Masks | Points, changed: int) -> None:
        """Start to propagate from the last annotated frame before the first changed one."""
        patch = self.engine.encoder.patch_size
        protocol = self.engine.protocol(self.inside)
        track = track_labels(given, self.clip.size, self.inside, patch, protocol)
        with self._lock:
            if self.state == "running":
                raise InputError(RUNNING)
            before = self.given
            same = type(given) is type(before) and getattr(given, "names", ()) == getattr(before, "names", ())
            reach = min(changed, self.done) if same else 0
            first = max((frame for frame in given.frames if frame < reach), default=0)
            last = max(given.frames)
            self.steps, self.total = 0, self.clip.count - first + (last - first + 1 if last > first else 0)
            self._soft = self._labels(track, first)
            self.given, self.found, self.first = given, self.found[:first], first
            self.lost = self.lost[:first]
            self.protocol = track.protocol
            self.state, self.error, self.seconds = "running", "", 0.0
            self.engine.submit(self._step, track, self._soft, time.perf_counter())

    def _labels(self, track: TrackedMasks | TrackedPoints, first: int) -> Iterator[Labels | None]:
        """Soft labels from a frame on, after None for every frame of the pass backward."""

        def run(frames: range) -> Iterator[Labels]:
            def given(index: int, propagated: Labels | None) -> Labels | None:
                return track.given(frames[index], propagated)

            def watch(index: int, soft: Labels, features: Features) -> None:
                track.watch(frames.step, frames[index], soft, features)

            return propagate_features(map(self.features, frames), given, track.protocol, watch=watch)

        start = next(frame for frame in track.frames if frame >= first)
        ahead = ((None, soft) for soft in run(range(start, self.clip.count)))
        back = run(range(track.frames[-1], first - 1, -1))
        early = repeat(None)
        for labeled in both_ways(track, back, early, ahead, first=first, folder=self.clip.folder):
            yield labeled and labeled[1]

    def cancel(self) -> None:
        """End the run; frames labeled so far stay, the one being computed is dropped."""
        with self._lock:
            if self.state == "running":
                self.state, self._soft = "canceled", None

    def _step(
        self, track: TrackedMasks | TrackedPoints, soft: Iterator[Labels | None], started: float
    ) -> None:
        """Label one frame, then wait for the next turn behind the other visitors."""
        if self._soft is not soft:
            return
        try:
            labels = next(soft)
            found = None if labels is None else track.read(self.done, labels, self.clip.frame(self.done))
            with self._lock:
                if self._soft is not soft:
                    return
                self.steps, self.seconds = self.steps + 1, time.perf_counter() - started
                if found is None:
                    self.engine.submit(self._step, track, soft, started)
                    return
                self.lost.append(lost_labels(self.given, self.done, found))
                if isinstance(track, TrackedMasks):
                    save_array(self.clip.folder / f"ids-{self.done}.npy", found.values)
                    found = found._replace(values=np.empty(0))
                self.found.append(found)
                if self.done == self.clip.count:
                    self.state, self._soft = "done", None
        except Exception as error:
            with self._lock:
                if self._soft is not soft:  # canceled, and its files are gone
                    return
                reason = FULL if is_full(error) else "the terminal of tcore demo says why."
                self.state, self.error, self._soft = "failed", f"The run failed: {reason}", None
            LOG.exception("a run failed")
        else:
            self.engine.submit(self._step, track, soft, started)


def lost_labels(given: Masks | Points | None, index: int, found: Found) -> tuple[int, ...]:
    """Ids of the objects, or numbers of the points from 1, that a frame has lost; none in a given one."""
    if given is None or index in given.frames:
        return ()
    least = LOST_POINT if isinstance(given, Points) else LOST
    return tuple(name for name, sure in zip(numbers(given), found.each, strict=True) if sure < least)


def numbers(given: Masks | Points) -> list[int]:
    """Ids of the objects, or numbers of the points from 1, in the order of their confidences."""
    if isinstance(given, Points):
        return list(range(1, 1 + len(given.names)))
    ids = {int(one) for ids in given.frames.values() for one in np.flatnonzero(np.bincount(ids.ravel()))}
    return sorted(ids - {0})


class Visitor:
    """One visitor, with a folder and a clip of their own."""

    def __init__(self, folder: Path) -> None:
        self.id, self.folder = folder.name, folder
        self.turn = asyncio.Lock()
        """Held while a request changes the clip or starts a run."""
        self.requests, self.seen = 0, time.monotonic()
        """Requests being answered, and when the last one ended."""
        self.claimed = 0
        """Bytes of the files of this visitor, also of those not written yet."""
        self._job: Job | None = None
        folder.mkdir()

    @property
    def job(self) -> Job:
        """The clip that this visitor works on."""
        if self._job is None:
            raise InputError("there is no clip yet: choose a sample or upload a video.")
        return self._job

    @property
    def busy(self) -> bool:
        """Whether a request is being answered or a run is in progress."""
        return self.requests > 0 or (self._job is not None and self._job.state == "running")

    @property
    def clip(self) -> Clip | None:
        """The clip, if there is one."""
        return self._job.clip if self._job else None

    def replace_job(self, job: Job) -> None:
        """Work on another clip from now on, and remove the one before."""
        before, self._job = self._job, job
        if before is not None:
            before.cancel()
            shutil.rmtree(before.clip.folder, ignore_errors=True)

    def close(self) -> None:
        """Stop what runs and remove every file."""
        if self._job is not None:
            self._job.cancel()
        shutil.rmtree(self.folder, ignore_errors=True)


class Visitors:
    """All visitors, the longest idle ones first, and the space that they take."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        self._folder, self._limits = folder, limits
        self._visitors: dict[str, Visitor] = {}
        self._lock = threading.Lock()

    def new(self) -> Visitor:
        """A new visitor, with an id that nobody can guess; where the page is full, an idle one leaves."""
        with self._lock:
            leaving = None
            if len(self._visitors) >= self._limits.visitors:
                leaving = next((visitor for visitor in self._visitors.values() if not visitor.busy), None)
                if leaving is None:
                    raise InputError(f"all {self._limits.visitors} visitors are busy: try again later.")
                del self._visitors[leaving.id]
            visitor = Visitor(self._folder / secrets.token_urlsafe(16))
            self._visitors[visitor.id] = visitor
        if leaving is not None:
            leaving.close()
        return visitor

    @contextmanager
    def enter(self, key: str) -> Iterator[Visitor | None]:
        """A visitor by id, who is busy inside the block; None where the visit has ended."""
        with self._lock:
            visitor = self._visitors.pop(key, None)
            if visitor is not None:
                self._visitors[key] = visitor  # the most recent one is the last
                visitor.requests += 1
        try:
            yield visitor
        finally:
            if visitor is not None:
                with self._lock:
                    visitor.requests, visitor.seen = visitor.requests - 1, time.monotonic()

    def claim(self, visitor: Visitor, count: int, freed: int = 0) -> None:
        """Claim bytes on disk for a visitor, of whose files `freed` bytes are about to be removed."""
        with self._lock:
            limits, total = self._limits, sum(one.claimed for one in self._visitors.values())
            if visitor.claimed - freed + count > limits.visitor_mb * 10**6:
                raise InputError(
                    f"this takes more than {limits.visitor_mb:g} MB of disk: use a shorter video."
                )
            if total - freed + count > limits.disk_mb * 10**6:
                raise InputError("other visitors take all the disk that this page may use: try again later.")
            visitor.claimed += count

    def release(self, visitor: Visitor, count: int) -> None:
        """Give bytes back."""
        with self._lock:
            visitor.claimed -= count

    def open(
        self, visitor: Visitor, engine: Engine, read: Callable[[Path, Claim], Clip], stop: threading.Event
    ) -> None:
        """Replace the clip of a visitor, once the new one could be read into a folder; `stop` gives up."""
        claimed, folder, before = 0, visitor.folder / secrets.token_hex(8), visitor.clip
        freed = before.count * engine.frame_bytes(before.size) if before else 0

        def claim(size: Size) -> None:
            nonlocal claimed
            if stop.is_set():
                raise InputError("the request ended before the video was read.")
            self.claim(visitor, engine.frame_bytes(size), freed)
            claimed += engine.frame_bytes(size)

        try:
            folder.mkdir()
            visitor.replace_job(Job(read(folder, claim), engine))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            self.release(visitor, claimed)
            raise
        self.release(visitor, freed)

    def expire(self) -> None:
        """End the visits that were idle for too long."""
        with self._lock:
            oldest = time.monotonic() - self._limits.idle_s
            leaving = [one for one in self._visitors.values() if not one.busy and one.seen < oldest]
            for visitor in leaving:
                del self._visitors[visitor.id]
        for visitor in leaving:
            visitor.close()

    def close(self) -> None:
        """End all visits."""
        with self._lock:
            while self._visitors:
                self._visitors.popitem()[1].close()
