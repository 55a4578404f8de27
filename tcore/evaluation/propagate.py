"""Label propagation from frame to frame by similarity of features: streaming, any length, exact."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tcore.errors import InputError

FirstFrame = Literal["repeated", "once"]
Precision = Literal["fp32", "bf16"]
Window = Literal["disk", "square"]
Labels = Float[Tensor, "rows columns classes"]
GivenLabels = Callable[[int, Labels | None], Labels | None]


class Keys(NamedTuple):
    """The best keys of each query: cosine, which of all stored pixels, how many copies may be taken."""

    similarity: Float[Tensor, "queries keys"]
    pixel: Int[Tensor, "queries keys"]
    copies: Int[Tensor, "queries keys"]


class LabelSource(NamedTuple):
    """A cell that a label is mixed from: its frame (counted from the first), place, cosine and weight."""

    frame: int
    row: int
    column: int
    similarity: float
    weight: float


@dataclass
class Propagator:
    """Propagates soft labels through a video, holding the first frame and the last `context` ones.

    The algorithm of CRW (arXiv:2006.14613) and DINO (arXiv:2104.14294, section 4.2.2): a label
    is the mean of the labels of the `topk` most similar cells, weighted by a softmax of their cosines.
    """

    context: int = 20
    radius: float | int = 20
    topk: int = 7
    temperature: float = 0.7
    first_frame: FirstFrame = "repeated"
    """Pad a short past with copies of frame 0, as the published numbers do, or not (once)."""
    window: Window = "disk"
    """Cells of the context that count: distance < radius, or (square) <= radius along both axes."""
    limit_first: bool = False
    """Apply the window to frame 0 as well."""
    precision: Precision = "fp32"
    """Form in which features are held; they are always compared in fp32."""
    score_bytes: int | None = None
    """Limit of the similarities that exist at a time."""

    def __post_init__(self) -> None:
        if self.context < 0:
            raise InputError(f"context is {self.context}; it counts past frames, so 0 or more")
        if not self.radius >= 0:
            raise InputError(f"radius is {self.radius}; it is a distance in grid cells, so 0 or more")
        if self.topk < 1:
            raise InputError(f"topk is {self.topk}; it counts keys, so 1 or more")
        if self.temperature <= 0:
            raise InputError(f"temperature is {self.temperature}; it must be above 0")
        if self.first_frame not in ("repeated", "once"):
            raise InputError(f"first_frame is {self.first_frame!r}; it must be 'repeated' or 'once'")
        self._time = -1

    @torch.no_grad()
    def start(
        self, features: Float[Tensor, "channels height width"], labels: Float[Tensor, "rows columns classes"]
    ) -> None:
        """Begin at a frame with its soft labels; everything before is forgotten."""
        if features.shape[1:] != labels.shape[:2]:
            raise InputError(
                f"first labels have grid {tuple(labels.shape[:2])}, features {tuple(features.shape[1:])}; "
                "both must be the same"
            )
        self._shape = features.shape
        # Pixels are stored line by line along the longer axis: then the disk of a few consecutive queries
        # touches few lines, and whole lines of keys can be skipped.
        self._turned = features.shape[2] > features.shape[1]
        pixels, maps = features.shape[1] * features.shape[2], self.context + 1
        # Slot 0 holds the first frame, the others a ring of the last frames.
        held = torch.float32 if self.precision == "fp32" else torch.bfloat16
        self._features = torch.empty(maps, pixels, features.shape[0], device=features.device, dtype=held)
        self._labels = torch.empty(maps, pixels, labels.shape[2], device=features.device)
        self._time = 0
        self._features[0] = self._lines(features)
        self._labels[0] = self._turn(labels.to(self._labels)).flatten(0, 1)

    @torch.no_grad()
    def step(self, features: Float[Tensor, "channels height width"]) -> Float[Tensor, "height width classes"]:
        """Take the next frame's features and return its soft labels."""
        if self._time < 0:
            raise RuntimeError("step() before start(): the first frame's labels are missing")
        if features.shape != self._shape:
            raise InputError(f"frame has features {tuple(features.shape)}, the first {tuple(self._shape)}")
        self._time += 1
        stored = self._labels.flatten(0, 1)
        with torch.autocast(features.device.type, enabled=False):
            # Rounded as they will be held, so that a frame is the same as a query and as a key.
            queries = self._lines(features).to(self._features.dtype).float()
            labels = torch.empty_like(self._labels[0])
            for chunk in self._chunks(queries):
                keys = self._best_keys(queries, chunk)
                labels[chunk] = mix_labels(keys, stored, topk=self.topk, temperature=self.temperature)
        self._hold(queries, labels)
        _, height, width = self._shape
        lines = labels.unflatten(0, (width, height) if self._turned else (height, width))
        return self._turn(lines).contiguous()

    @torch.no_grad()
    def skip(
        self, features: Float[Tensor, "channels height width"], labels: Float[Tensor, "height width classes"]
    ) -> None:
        """Take the next frame together with its labels, which are known."""
        self._time += 1
        self._hold(self._lines(features), self._turn(labels.to(self._labels)).flatten(0, 1))

    @torch.no_grad()
    def sources(
        self, features: Float[Tensor, "channels height width"], row: int, column: int
    ) -> list[LabelSource]:
        """Where the label of one cell of the next frame comes from, the largest share first.

        The state stays as it is, and `step` with the same features mixes exactly these labels.
        """
        if self._time < 0:
            raise RuntimeError("sources() before start(): the first frame is missing")
        _, height, width = self._shape
        if not (0 <= row < height and 0 <= column < width):
            raise InputError(f"patch {row} {column} is outside of the grid of {height}x{width} patches.")
        query = column * height + row if self._turned else row * width + column
        queries = self._lines(features).to(self._features.dtype).float()
        self._time += 1
        try:
            keys = self._best_keys(queries, slice(query, query + 1))
        finally:
            self._time -= 1
        weights = key_weights(keys, topk=self.topk, temperature=self.temperature)[0]
        found = []
        for similarity, pixel, weight in zip(
            keys.similarity[0].tolist(), keys.pixel[0].tolist(), weights.tolist(), strict=True
        ):
            slot, place = divmod(pixel, height * width)
            y, x = divmod(place, height)[::-1] if self._turned else divmod(place, width)
            if weight > 0:
                found.append(LabelSource(self._frame_in(slot), y, x, similarity, weight))
        return sorted(found, key=lambda source: -source.weight)

    def _frame_in(self, slot: int) -> int:
        """The frame that a slot holds, counted from the first."""
        return slot and self._time - (self._time - slot) % self.context

    def _hold(
        self, queries: Float[Tensor, "pixels channels"], labels: Float[Tensor, "pixels classes"]
    ) -> None:
        if self.context:
            slot = 1 + (self._time - 1) % self.context
            self._features[slot] = queries
            self._labels[slot] = labels

    def _turn(self, grid: Float[Tensor, "rows columns classes"]) -> Float[Tensor, "lines places classes"]:
        return grid.transpose(0, 1) if self._turned else grid

    def _lines(self, features: Float[Tensor, "channels height width"]) -> Float[Tensor, "pixels channels"]:
        unit = F.normalize(features.to(torch.float32), dim=0)
        return self._turn(unit.permute(1, 2, 0)).flatten(0, 1).contiguous()

    def _chunks(self, queries: Float[Tensor, "pixels channels"]) -> Iterator[slice]:
        # A CPU is fastest on what its cache holds, a GPU on few large pieces.
        allowed = self.score_bytes or (1 << 30 if queries.is_cuda else 32 << 20)
        pixels = len(queries)
        # 4 bytes for each key of the frames that are held, without counting on the radius to leave some out.
        size = max(1, allowed // (4 * pixels * (min(self._time - 1, self.context) + 1)))
        for start in range(0, pixels, size):
            yield slice(start, min(start + size, pixels))

    def _best_keys(self, queries: Float[Tensor, "pixels channels"], chunk: slice) -> Keys:
        first = self._best_of_first(queries, chunk)
        past = self._best_of_context(queries, chunk)
        if past is None:
            return first
        merged = Keys(*(torch.cat(pair, dim=1) for pair in zip(first, past, strict=True)))
        similarity, order = merged.similarity.topk(min(self.topk, merged.similarity.shape[1]), dim=1)
        return Keys(similarity, merged.pixel.gather(1, order), merged.copies.gather(1, order))

    def _best_of_first(self, queries: Float[Tensor, "pixels channels"], chunk: slice) -> Keys:
        """Search frame 0; inside the window its padding copies may be taken as well."""
        scores = queries[chunk] @ self._features[0].float().T
        query = torch.arange(chunk.start, chunk.stop, device=queries.device)[:, None]
        if self.limit_first:
            near = self._near(query, torch.arange(len(queries), device=queries.device))
            scores = scores.masked_fill_(~near, -math.inf)
        similarity, index = scores.topk(min(self.topk, scores.shape[1]), dim=1)
        padding = max(0, self.context + 1 - self._time) if self.first_frame == "repeated" else 0
        return Keys(similarity, index, 1 + padding * self._near(query, index).long())

    def _best_of_context(self, queries: Float[Tensor, "pixels channels"], chunk: slice) -> Keys | None:
        """Search the last frames inside the radius."""
        frames = min(self._time - 1, self.context)
        if frames == 0:
            return None
        pixels = len(queries)
        places = min(self._shape[1:])
        reach = math.ceil(min(self.radius, pixels))  # the radius may be infinite
        begin = max(0, chunk.start // places - reach) * places
        end = min(pixels, ((chunk.stop - 1) // places + reach + 1) * places)
        keys = self._features[1 : frames + 1, begin:end].float()
        block = queries[chunk]
        scores = torch.bmm(block.expand(frames, *block.shape), keys.transpose(1, 2))
        # The best k keys lie at the k places whose best frame is best: search the places, then their frames.
        query = torch.arange(chunk.start, chunk.stop, device=queries.device)[:, None]
        near = self._near(query, torch.arange(begin, end, device=queries.device))
        highest = scores.amax(dim=0).masked_fill_(~near, -math.inf)
        top, place = highest.topk(min(self.topk, end - begin), dim=1)
        found = scores.gather(2, place.expand(frames, *place.shape))
        found = found.masked_fill_(top == -math.inf, -math.inf).movedim(0, 1).flatten(1)
        slots = torch.arange(1, frames + 1, device=queries.device)[:, None] * pixels + begin
        index = (place[:, None, :] + slots).flatten(1)
        similarity, order = found.topk(min(self.topk, found.shape[1]), dim=1)
        index = index.gather(1, order)
        return Keys(similarity, index, torch.ones_like(index))

    def _near(
        self, query: Int[Tensor, "queries 1"], key: Int[Tensor, "... keys"]
    ) -> Bool[Tensor, "queries keys"]:
        places = min(self._shape[1:])
        down, right = query // places - key // places, query % places - key % places
        return in_window(down, right, self.radius, self.window)


def in_window(
    down: Int[Tensor, "*shape"], right: Int[Tensor, "*shape"], radius: float | int, window: Window
) -> Bool[Tensor, "*shape"]:
    """Tell which grid offsets lie inside the window."""
    if window == "square":
        return (down.abs() <= radius) & (right.abs() <= radius)
    return down * down + right * right < radius * radius


def mix_labels(
    keys: Keys, labels: Float[Tensor, "stored classes"], *, topk: int, temperature: float
) -> Float[Tensor, "queries classes"]:
    """Average the keys' labels by their weights."""
    weights = key_weights(keys, topk=topk, temperature=temperature)
    return torch.bmm(weights[:, None, :], labels[keys.pixel])[:, 0]


def key_weights(keys: Keys, *, topk: int, temperature: float) -> Float[Tensor, "queries keys"]:
    """Softmax over the topk places, which the best keys' copies fill first."""
    taken_before = keys.copies.cumsum(dim=1) - keys.copies
    places = torch.minimum(keys.copies, (topk - taken_before).clamp(min=0))
    weights = places * torch.exp((keys.similarity - keys.similarity[:, :1]) / temperature)
    return weights / weights.sum(dim=1, keepdim=True)


def propagate_features(
    features: Iterable[Float[Tensor, "channels height width"]],
    labels: Labels | GivenLabels,
    propagator: Propagator,
) -> Iterator[Labels]:
    """Soft labels of every frame: this is the one loop that drives a `Propagator`.

    `labels` are those of the first frame, or a function of a frame's index and of the labels propagated to
    it (None for the first frame) that returns the labels given for that frame, or None. Given labels
    restart the propagation: what was propagated up to there has just been corrected, and as part of the
    context it would outvote the correction in the very next frame.
    """
    for index, frame in enumerate(features):
        soft = propagator.step(frame) if index else None
        given = labels(index, soft) if callable(labels) else (None if index else labels)
        if given is not None:
            soft = given.to(frame.device, torch.float32)
            propagator.start(frame, soft)
        if soft is None:
            raise InputError("the first frame has no labels: propagation starts from them.")
        yield soft


def label_sources(
    features: Iterable[Float[Tensor, "channels height width"]],
    cells: Iterable[tuple[int, int]],
    propagator: Propagator,
) -> list[list[LabelSource]]:
    """Where the labels of some cells (row, column) of the last frame come from, in the frames before it.

    Of a long video, the first frame and the last `context` before the one in question are enough.
    """
    first, *past, last = features
    unlabeled = first.new_zeros(*first.shape[1:], 1)
    propagator.start(first, unlabeled)
    for frame in past:
        propagator.skip(frame, unlabeled)
    return [propagator.sources(last, row, column) for row, column in cells]


@torch.no_grad()
def propagate_plainly(
    features: Float[Tensor, "time channels height width"],
    labels: Labels,
    settings: Propagator,
    dtype: torch.dtype = torch.float64,
) -> Float[Tensor, "time height width classes"]:
    """The plain twin of the propagation: all similarities at once, with real copies of the first frame.

    Slow and simple, as the protocol is written down; the tests hold the `Propagator` against it.
    """
    unit = F.normalize(features.to(dtype), dim=1).flatten(2)
    height, width = features.shape[2:]
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    points = torch.stack([y.flatten(), x.flatten()], dim=1).double().to(features.device)
    offset = points[:, None] - points[None]
    disk, square = offset.norm(dim=2) >= settings.radius, offset.abs().amax(dim=2) > settings.radius
    far = disk if settings.window == "disk" else square
    found = [labels.to(unit).flatten(0, 1)]
    for time in range(1, len(features)):
        if settings.first_frame == "repeated":
            past = [max(0, index) for index in range(time - settings.context, time)]
        else:
            past = list(range(max(1, time - settings.context), time))
        scores = [unit[time].T @ unit[index] for index in [0, *past]]
        for score in scores if settings.limit_first else scores[1:]:
            score.masked_fill_(far, -torch.inf)
        together = torch.cat(scores, dim=1) / settings.temperature
        best, index = together.topk(min(settings.topk, together.shape[1]), dim=1)
        keys = torch.cat([found[frame] for frame in [0, *past]])
        found.append((best.softmax(dim=1)[:, :, None] * keys[index]).sum(dim=1))
    return torch.stack(found).unflatten(1, (height, width)).float()
