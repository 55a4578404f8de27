"""One visitor's clip: its features, the labels that were carried through it, and where they came from."""

import math
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tcore.demo.clips import Clip
from tcore.demo.engine import Engine, Estimate
from tcore.errors import InputError
from tcore.evaluation.propagate import Propagator
from tcore.video.labels import Masks, Points
from tcore.video.propagate_video import label_frame
from tcore.video.tracked import Found, TrackedMasks, TrackedPoints

Kind = Literal["similarity", "attention"]
State = Literal["idle", "running", "done", "cancelled", "failed"]


@dataclass
class Progress:
    """How far a run is; read by the page while it goes on."""

    state: State = "idle"
    start: int = 0
    seconds: float = 0.0
    error: str = ""
    cancel: threading.Event = field(default_factory=threading.Event)


class Work:
    """A clip and everything that is computed of it, in a folder of its own."""

    def __init__(self, clip: Clip, engine: Engine, folder: Path) -> None:
        self.clip, self.engine, self.folder = clip, engine, folder
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
        """Frames that have labels."""
        return len(self.found)

    @property
    def running(self) -> bool:
        """Whether a run goes on."""
        return self.progress.state == "running"

    def estimate(self) -> Estimate:
        """Seconds that a run over all frames takes."""
        clip = self.clip
        return self.engine.call(self.engine.estimate, clip.frames[0], self.inside, len(clip.frames))

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
        """Carry labels on from the last annotated frame before what has changed, in a thread."""
        if self.running:
            raise InputError("a run is under way: cancel it, or wait until it is done.")
        if 0 not in given.frames:
            raise InputError("frame 0 has no labels yet: paint an object or set a point on the first frame.")
        late = [frame for frame in given.frames if not 0 <= frame < len(self.clip.frames)]
        if late:
            raise InputError(f"labels for frame {late[0]}, but there are {len(self.clip.frames)} frames.")
        track: TrackedMasks | TrackedPoints
        patch_size = self.engine.encoder.patch_size
        if isinstance(given, Masks):
            track = TrackedMasks(given, self.clip.size, self.inside, patch_size, self.protocol)
        else:
            track = TrackedPoints(given, self.clip.size, self.inside, patch_size)
        same = type(given) is type(self.given) and _names(given) == _names(self.given)
        reach = min(changed, self.done) if same else 0
        first = max(frame for frame in given.frames if frame <= max(0, reach))
        self.given = given
        self.found = {index: self.found[index] for index in range(first)}
        self.progress = Progress("running", first)
        self._thread = threading.Thread(target=self._run, args=(track, self.progress), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ask a run to end, and wait until it has; what was carried stays."""
        self.progress.cancel.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, track: TrackedMasks | TrackedPoints, progress: Progress) -> None:
        propagator, started = self.protocol.propagator(), time.perf_counter()
        try:
            for index in range(progress.start, len(self.clip.frames)):
                if progress.cancel.is_set():
                    progress.state = "cancelled"
                    return
                self.found[index] = self.engine.call(self._label, propagator, track, index, progress.start)
                progress.seconds = time.perf_counter() - started
            progress.state = "done"
        except InputError as error:
            progress.error, progress.state = str(error), "failed"
        except Exception as error:
            progress.error, progress.state = f"the run failed: {error!r}.", "failed"
            raise

    def _label(
        self, propagator: Propagator, track: TrackedMasks | TrackedPoints, index: int, start: int
    ) -> Found:
        soft = label_frame(propagator, track, index, self.features(index), first=index == start)
        found = track.read(index, soft)
        if isinstance(track, TrackedPoints):
            return found
        # Masks of a long clip are held on disk, as its frames are.
        if self._ids is None:
            path, shape = self.folder / "ids.raw", self.clip.frames.shape[:3]
            self._ids = np.memmap(path, dtype=np.uint8, mode="w+", shape=shape)
        self._ids[index] = found.values
        return found._replace(values=self._ids[index])

    def look(self, frame: int, row: int, column: int, offset: int, kind: Kind) -> dict[str, Any]:
        """Where the label of a cell came from, and its matches in a past and a future frame."""
        if kind == "attention" and self.engine.matcher is None:
            raise InputError("this encoder has no matching module: ask for the similarity of features.")
        if not (
            0 <= frame < len(self.clip.frames) and 0 <= row < self.grid[0] and 0 <= column < self.grid[1]
        ):
            raise InputError(f"no patch at frame {frame}, row {row}, column {column} of this clip.")
        return self.engine.call(self._look, frame, row, column, offset, kind)

    def _look(self, frame: int, row: int, column: int, offset: int, kind: Kind) -> dict[str, Any]:
        given = self.given is not None and frame in self.given.frames
        sources = [] if given or frame >= self.done else self._sources(frame, row, column)
        wanted = {"past": max(0, frame - offset), "future": min(len(self.clip.frames) - 1, frame + offset)}
        others = {name: index for name, index in wanted.items() if index != frame}
        return {
            "frame": frame,
            "row": row,
            "column": column,
            "label": self._label_at(frame, row, column),
            "given": given,
            "labeled": frame < self.done,
            "sources": sources,
            "kind": kind,
            "matches": self._matches(frame, row, column, others, kind) if others else [],
        }

    def _sources(self, frame: int, row: int, column: int) -> list[dict[str, Any]]:
        """The cells that a label was mixed from, by the propagator itself with the same context."""
        assert self.given is not None
        first = max(index for index in self.given.frames if index < frame)
        held = range(max(first + 1, frame - self.protocol.context), frame)
        propagator, nothing = self.protocol.propagator(), torch.zeros(*self.grid, 1)
        propagator.start(self.features(first), nothing)
        for index in held:
            propagator.skip(self.features(index), nothing)
        numbers = [first, *held]
        found = propagator.sources(self.features(frame), row, column)
        return [
            source._asdict()
            | {"frame": (at := numbers[source.frame]), "label": self._label_at(at, source.row, source.column)}
            for source in found
        ]

    def _label_at(self, frame: int, row: int, column: int) -> int | None:
        """The id in the middle of a cell; None for points, and where there is none yet."""
        if not isinstance(self.given, Masks) or frame not in self.found:
            return None
        (height, width), (rows, columns) = self.clip.size, self.grid
        return int(
            self.found[frame].values[
                (2 * row + 1) * height // (2 * rows), (2 * column + 1) * width // (2 * columns)
            ]
        )

    def _matches(
        self, frame: int, row: int, column: int, others: dict[str, int], kind: Kind
    ) -> list[dict[str, Any]]:
        if kind == "attention":
            frames = [self.clip.frames[index] for index in others.values()]
            maps = self.engine.attention(self.clip.frames[frame], frames, self.inside, row, column)
        else:
            query = self.features(frame)[:, row, column]
            maps = [
                torch.cosine_similarity(self.features(index), query[:, None, None], dim=0)
                for index in others.values()
            ]
        matches = []
        for (side, index), values in zip(others.items(), maps, strict=True):
            best = int(values.argmax())
            place = {"row": best // self.grid[1], "column": best % self.grid[1], "value": float(values.max())}
            low, high = float(values.min()), float(values.max())
            heat = ((values - low) / max(high - low, 1e-9)).flatten().tolist()
            matches.append(
                {"side": side, "frame": index, "best": place, "map": [round(value, 3) for value in heat]}
            )
        return matches


def points_of(found: Found) -> list[list[float] | None]:
    """Points of a frame: x, y and confidence, or None where one is lost."""
    return [
        None if math.isnan(x) else [round(x, 2), round(y, 2), round(c, 4)]
        for x, y, c in found.values.tolist()
    ]


def _names(given: Masks | Points | None) -> tuple[str, ...] | None:
    return given.names if isinstance(given, Points) else None
