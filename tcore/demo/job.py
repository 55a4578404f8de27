"""Visitors and their jobs: a clip, its features, and the run that propagates labels through it."""

import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tcore.demo.clips import Clip
from tcore.demo.engine import Engine
from tcore.errors import InputError
from tcore.evaluation.propagate import Labels, propagate_features
from tcore.video.labels import Masks, Points
from tcore.video.tracked import Found, TrackedMasks, TrackedPoints, track_labels

T = TypeVar("T")
State = Literal["idle", "running", "done", "canceled", "failed"]


@dataclass
class Progress:
    """How far a run is; the page reads it meanwhile."""

    state: State = "idle"
    start: int = 0
    seconds: float = 0.0
    error: str = ""
    cancel: threading.Event = field(default_factory=threading.Event)


class Job:
    """A clip and everything computed from it, in a folder of its own."""

    def __init__(self, clip: Clip, engine: Engine, folder: Path) -> None:
        self.clip, self.engine, self.folder, self.key = clip, engine, folder, folder.name
        self.inside = engine.input_size(clip.size)
        self.grid = (self.inside[0] // engine.encoder.patch_size, self.inside[1] // engine.encoder.patch_size)
        self.protocol = engine.protocol(self.inside)
        self.given: Masks | Points | None = None
        self.found: dict[int, Found] = {}
        """Labels by frame, from 0 to `done`, without a gap."""
        self.progress = Progress()
        self._features: np.ndarray | None = None
        self._ids: np.ndarray | None = None
        self._encoded = np.zeros(len(clip.frames), dtype=bool)
        self._thread: threading.Thread | None = None

    @property
    def done(self) -> int:
        """Number of labeled frames."""
        return len(self.found)

    @property
    def running(self) -> bool:
        """Whether a run is in progress."""
        return self.progress.state == "running"

    def features(self, index: int) -> Float[Tensor, "channels rows columns"]:
        """Features of a frame, encoded once and kept on disk."""
        if self._features is None or not self._encoded[index]:
            encoded = self.engine.encode(self.clip.frames[index], self.inside).cpu().numpy()
            if self._features is None:
                shape = (len(self.clip.frames), *encoded.shape)
                path = self.folder / "features.raw"
                self._features = np.memmap(path, dtype=np.float32, mode="w+", shape=shape)
            self._features[index] = encoded
            self._encoded[index] = True
        return torch.from_numpy(np.array(self._features[index])).to(self.engine.device)

    def start(self, given: Masks | Points, changed: int) -> None:
        """Propagate, in a thread, from the last annotated frame up to the first changed one."""
        if self.running:
            raise InputError("a run is in progress: cancel it, or wait until it is done.")
        if 0 not in given.frames:
            raise InputError("frame 0 has no labels yet: paint an object or set a point on the first frame.")
        late = [frame for frame in given.frames if not 0 <= frame < len(self.clip.frames)]
        if late:
            raise InputError(f"labels for frame {late[0]}, but there are {len(self.clip.frames)} frames.")
        patch_size = self.engine.encoder.patch_size
        track = track_labels(given, self.clip.size, self.inside, patch_size, self.protocol)
        same = type(given) is type(self.given) and _names(given) == _names(self.given)
        reach = min(changed, self.done) if same else 0
        first = max(frame for frame in given.frames if frame <= max(0, reach))
        self.given = given
        self.found = {index: self.found[index] for index in range(first)}
        self.progress = Progress("running", first)
        self._thread = threading.Thread(target=self._run, args=(track, self.progress), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Cancel the run and wait for its end; frames labeled so far stay."""
        self.progress.cancel.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, track: TrackedMasks | TrackedPoints, progress: Progress) -> None:
        started, frames = time.perf_counter(), range(progress.start, len(self.clip.frames))
        soft = propagate_features(
            (self.features(index) for index in frames),
            lambda index, propagated: track.given(frames[index], propagated),
            self.protocol.propagator(),
        )
        try:
            for index in frames:
                if progress.cancel.is_set():
                    progress.state = "canceled"
                    return
                self.found[index] = self.engine.submit(self._label, track, soft, index).result()
                progress.seconds = time.perf_counter() - started
            progress.state = "done"
        except InputError as error:
            progress.error, progress.state = str(error), "failed"
        except Exception as error:
            progress.error, progress.state = f"the run failed: {error!r}.", "failed"
            raise

    def _label(self, track: TrackedMasks | TrackedPoints, soft: Iterator[Labels], index: int) -> Found:
        found = track.read(index, next(soft))
        if isinstance(track, TrackedPoints):
            return found
        # Masks of a long clip are kept on disk, as its frames are.
        if self._ids is None:
            path, shape = self.folder / "ids.raw", self.clip.frames.shape[:3]
            self._ids = np.memmap(path, dtype=np.uint8, mode="w+", shape=shape)
        self._ids[index] = found.values
        return found._replace(values=self._ids[index])


def _names(given: Masks | Points | None) -> tuple[str, ...] | None:
    return given.names if isinstance(given, Points) else None


class Visitor:
    """One visitor, with a folder and a clip of their own."""

    def __init__(self, folder: Path) -> None:
        self.id, self.folder = folder.name, folder
        self._job: Job | None = None
        self._lock = threading.Lock()

    @property
    def job(self) -> Job:
        """The clip that this visitor works on."""
        if self._job is None:
            raise InputError("there is no clip yet: choose a sample or upload a video.")
        return self._job

    @property
    def running(self) -> bool:
        """Whether a run is in progress."""
        return self._job is not None and self._job.running

    def open(self, engine: Engine, read: Callable[[Path, T, int], Clip], source: T, max_frames: int) -> Job:
        """Replace the clip, once the new one could be read into its folder."""
        with self._lock:
            folder = self.folder / secrets.token_hex(8)
            folder.mkdir(parents=True)
            try:
                job = Job(read(folder, source, max_frames), engine, folder)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            before, self._job = self._job, job
            if before is not None:
                before.stop()
                shutil.rmtree(before.folder, ignore_errors=True)
            return job

    def close(self) -> None:
        """Stop what runs and remove every file."""
        if self._job is not None:
            self._job.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


class Visitors:
    """All visitors, the longest idle ones first; when the page is full, the first without a run leaves."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit
        self._visitors: dict[str, Visitor] = {}
        self._lock = threading.Lock()

    def new(self) -> Visitor:
        """A new visitor, with an id that nobody can guess."""
        with self._lock:
            if len(self._visitors) >= self._limit:
                idle = next((key for key, visitor in self._visitors.items() if not visitor.running), None)
                if idle is None:
                    raise InputError(f"all {self._limit} visitors are running something: try again later.")
                self._visitors.pop(idle).close()
            visitor = Visitor(self._folder / secrets.token_urlsafe(16))
            visitor.folder.mkdir()
            self._visitors[visitor.id] = visitor
        return visitor

    def get(self, key: str) -> Visitor | None:
        """A visitor by id; None where the visit has ended."""
        with self._lock:
            visitor = self._visitors.pop(key, None)
            if visitor is not None:
                self._visitors[key] = visitor  # the most recent one is the last
            return visitor

    def close(self) -> None:
        """End all visits."""
        with self._lock:
            for visitor in self._visitors.values():
                visitor.close()
            self._visitors.clear()
