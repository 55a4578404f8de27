"""Label propagation from frame to frame by similarity of features: streaming, any length, exact."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tcore.errors import InputError
from tcore.evaluation.protocols import Protocol

Features = Float[Tensor, "channels height width"]
Labels = Float[Tensor, "height width classes"]
Lines = Float[Tensor, "pixels channels"]
GivenLabels = Callable[[int, Labels | None], Labels | None]
Watch = Callable[[int, Labels, Features], None]
"""Called with the index, soft labels and features of a frame."""

CANDIDATES = 16  # cells of the halved grid whose four cells each are compared


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


class Propagator:
    """Propagates soft labels through a video, holding the first frame and the last `context` ones.

    The algorithm of CRW (arXiv:2006.14613) and DINO (arXiv:2104.14294, section 4.2.2): a label
    is the mean of the labels of the `topk` most similar cells, weighted by a softmax of their cosines.
    Features are held in the protocol's precision and compared in fp32; no more than `score_bytes` of
    similarities exist at a time. A `halved` search finds the best cells of a grid of half the size, made of
    mean features, and compares their four cells each: far less work, and similar labels, not the same.
    """

    def __init__(self, protocol: Protocol, score_bytes: int | None = None) -> None:
        self.protocol, self.score_bytes = protocol, score_bytes
        self._time = -1
        self._half: Propagator | None = None
        if protocol.search == "halved":
            radius = protocol.radius / 2 + 1  # cells that are partly inside
            half = replace(protocol, search="exact", radius=radius, topk=CANDIDATES)
            self._half = Propagator(half, score_bytes)

    @torch.no_grad()
    def start(self, features: Features, labels: Float[Tensor, "rows columns classes"]) -> None:
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
        pixels, maps = features.shape[1] * features.shape[2], self.protocol.context + 1
        # Slot 0 holds the first frame, the others a ring of the last frames.
        held = torch.float32 if self.protocol.precision == "fp32" else torch.bfloat16
        self._features = torch.empty(maps, pixels, features.shape[0], device=features.device, dtype=held)
        self._labels = torch.empty(maps, pixels, labels.shape[2], device=features.device)
        self._time = 0
        self._features[0] = self._lines(features)
        self._labels[0] = self._turn(labels.to(self._labels)).flatten(0, 1)
        if self._half is not None:
            self._half.start(*self._means(features))

    @torch.no_grad()
    def step(self, features: Features) -> Labels:
        """Take the next frame's features and return its soft labels."""
        with torch.autocast(features.device.type, enabled=False):
            queries = self._queries(features)
            stored, labels = self._labels.flatten(0, 1), torch.empty_like(self._labels[0])
            for some, keys in self._search(queries, features):
                labels[some] = torch.bmm(self._weights(keys)[:, None, :], stored[keys.pixel])[:, 0]
        self._hold(queries, labels)
        if self._half is not None:
            self._half.skip(*self._means(features))
        _, height, width = self._shape
        lines = labels.unflatten(0, (width, height) if self._turned else (height, width))
        return self._turn(lines).contiguous()

    @torch.no_grad()
    def skip(self, features: Features, labels: Labels) -> None:
        """Take the next frame together with its labels, which are known."""
        self._hold(self._lines(features), self._turn(labels.to(self._labels)).flatten(0, 1))
        if self._half is not None:
            self._half.skip(*self._means(features))

    def pass_over(self) -> None:
        """Count a frame of the past that has left the ring: nothing later looks at it."""
        self._time += 1
        if self._half is not None:
            self._half.pass_over()

    @torch.no_grad()
    def sources(self, features: Features, row: int, column: int) -> list[LabelSource]:
        """Where the label of one cell of the next frame comes from, the largest share first.

        The state stays as it is, and `step` with the same features mixes exactly these labels.
        """
        queries = self._queries(features)
        _, height, width = self._shape
        if not (0 <= row < height and 0 <= column < width):
            raise InputError(f"patch {row} {column} is outside of the grid of {height}x{width} patches.")
        query = column * height + row if self._turned else row * width + column
        if self._half is None:
            keys = self._best_keys(queries, slice(query, query + 1))
        else:
            some, many = next((some, keys) for some, keys in self._search(queries, features) if query in some)
            keys = Keys(*(values[some == query] for values in many))
        found = []
        for similarity, pixel, weight in zip(
            keys.similarity[0].tolist(), keys.pixel[0].tolist(), self._weights(keys)[0].tolist(), strict=True
        ):
            slot, place = divmod(pixel, height * width)
            frame = slot and self._time - (self._time - slot) % self.protocol.context
            y, x = divmod(place, height)[::-1] if self._turned else divmod(place, width)
            if weight > 0:
                found.append(LabelSource(frame, y, x, similarity, weight))
        return sorted(found, key=lambda source: -source.weight)

    def _means(
        self, features: Features
    ) -> tuple[Float[Tensor, "channels lines places"], Float[Tensor, "lines places 1"]]:
        """Mean features of every four cells, lines first, and labels that are not used."""
        unit = F.normalize(features.float(), dim=0)
        mean = F.avg_pool2d(unit[None], 2, ceil_mode=True, count_include_pad=False)[0]
        mean = mean.transpose(1, 2) if self._turned else mean
        return mean, mean.new_zeros(*mean.shape[1:], 1)

    def _hold(self, queries: Lines, labels: Float[Tensor, "pixels classes"]) -> None:
        if self.protocol.context:
            slot = 1 + self._time % self.protocol.context
            self._features[slot] = queries
            self._labels[slot] = labels
        self._time += 1

    def _turn(self, grid: Labels) -> Float[Tensor, "lines places classes"]:
        return grid.transpose(0, 1) if self._turned else grid

    def _lines(self, features: Features) -> Lines:
        unit = F.normalize(features.to(torch.float32), dim=0)
        return self._turn(unit.permute(1, 2, 0)).flatten(0, 1).contiguous()

    def _queries(self, features: Features) -> Lines:
        if self._time < 0:
            raise RuntimeError("a frame before start(): the first frame's labels are missing")
        if features.shape != self._shape:
            raise InputError(f"frame has features {tuple(features.shape)}, the first {tuple(self._shape)}")
        # Rounded as they will be held, so that a frame is the same as a query and as a key.
        return self._lines(features).to(self._features.dtype).float()

    def _chunks(self, queries: Lines) -> Iterator[slice]:
        # A CPU is fastest on what its cache holds, a GPU on few large pieces.
        allowed = self.score_bytes or (1 << 28 if queries.is_cuda else 16 << 20)
        pixels = len(queries)
        # 4 bytes for each key of the frames that are held, without counting on the radius to leave some out.
        size = max(1, allowed // (4 * pixels * (min(self._time, self.protocol.context) + 1)))
        for start in range(0, pixels, size):
            yield slice(start, min(start + size, pixels))

    def _search(self, queries: Lines, features: Features) -> Iterator[tuple[Int[Tensor, " queries"], Keys]]:
        """Some queries after others, with their best keys."""
        numbers = torch.arange(len(queries), device=queries.device)
        if self._half is None:
            for chunk in self._chunks(queries):
                yield numbers[chunk], self._best_keys(queries, chunk)
            return
        means = self._half._queries(self._means(features)[0])
        for chunk in self._half._chunks(means):
            yield self._refine(queries, numbers[chunk], self._half._best_keys(means, chunk), len(means))

    def _refine(
        self, queries: Lines, cells: Int[Tensor, " cells"], best: Keys, num_cells: int
    ) -> tuple[Int[Tensor, " queries"], Keys]:
        """The queries under some cells of the halved grid, with the best keys under the best of its cells."""
        some, real = self._quarters(cells[:, None])
        key, inside = self._quarters(best.pixel % num_cells)
        slot = (best.pixel // num_cells).repeat(1, 4)
        pixel, first = slot * len(queries) + key, (slot == 0)[:, None]
        stored = self._features.flatten(0, 1)[pixel].float()
        scores = torch.bmm(queries[some], stored.transpose(1, 2))
        near = self._near_to(some[:, :, None], key[:, None])
        allowed = near if self.protocol.limit_first else near | first
        similarity, order = self._top(scores.masked_fill_(~(allowed & inside[:, None]), -math.inf))
        copies = 1 + self._padding() * (near & first).long()
        keys = Keys(similarity, pixel[:, None].expand_as(scores).gather(2, order), copies.gather(2, order))
        return some[real], Keys(*(values[real] for values in keys))

    def _quarters(
        self, cells: Int[Tensor, "n cells"]
    ) -> tuple[Int[Tensor, "n quarters"], Bool[Tensor, "n quarters"]]:
        """The four cells under each cell of the halved grid, and whether they are inside the grid."""
        places, lines = sorted(self._shape[1:])
        half = (places + 1) // 2
        line = torch.cat([2 * (cells // half) + down for down in (0, 0, 1, 1)], dim=1)
        place = torch.cat([2 * (cells % half) + right for right in (0, 1, 0, 1)], dim=1)
        inside = (line < lines) & (place < places)
        return torch.where(inside, line * places + place, 0), inside

    def _padding(self) -> int:
        """Copies of the first frame that stand for frames before it."""
        return max(0, self.protocol.context - self._time) if self.protocol.first_frame == "repeated" else 0

    def _best_keys(self, queries: Lines, chunk: slice) -> Keys:
        first = self._best_of_first(queries, chunk)
        if not min(self._time, self.protocol.context):
            return first
        past = self._best_of_context(queries, chunk)
        merged = Keys(*(torch.cat(pair, dim=1) for pair in zip(first, past, strict=True)))
        similarity, order = self._top(merged.similarity)
        return Keys(similarity, merged.pixel.gather(1, order), merged.copies.gather(1, order))

    def _top(self, scores: Float[Tensor, "*queries keys"]) -> tuple[Tensor, Tensor]:
        values, indices = scores.topk(min(self.protocol.topk, scores.shape[-1]), dim=-1)
        return values, indices

    def _best_of_first(self, queries: Lines, chunk: slice) -> Keys:
        """Search frame 0; inside the window its padding copies may be taken as well."""
        scores = similarities(queries[None, chunk], self._features[:1])[0]
        if self.protocol.limit_first:
            near = self._near(chunk, torch.arange(len(queries), device=queries.device))
            scores = scores.masked_fill_(~near, -math.inf)
        similarity, index = self._top(scores)
        return Keys(similarity, index, 1 + self._padding() * self._near(chunk, index).long())

    def _best_of_context(self, queries: Lines, chunk: slice) -> Keys:
        """Search the last frames inside the radius."""
        frames, pixels = min(self._time, self.protocol.context), len(queries)
        places = min(self._shape[1:])
        reach = math.ceil(min(self.protocol.radius, pixels))  # the radius may be infinite
        begin = max(0, chunk.start // places - reach) * places
        end = min(pixels, ((chunk.stop - 1) // places + reach + 1) * places)
        block = queries[chunk]
        scores = similarities(block.expand(frames, *block.shape), self._features[1 : frames + 1, begin:end])
        # The best k keys lie at the k places whose best frame is best: search the places, then their frames.
        near = self._near(chunk, torch.arange(begin, end, device=queries.device))
        top, place = self._top(scores.amax(dim=0).masked_fill_(~near, -math.inf))
        found = scores.gather(2, place.expand(frames, *place.shape))
        found = found.masked_fill_(top == -math.inf, -math.inf).movedim(0, 1).flatten(1)
        slots = torch.arange(1, frames + 1, device=queries.device)[:, None] * pixels + begin
        similarity, order = self._top(found)
        index = (place[:, None, :] + slots).flatten(1).gather(1, order)
        return Keys(similarity, index, torch.ones_like(index))

    def _near(self, chunk: slice, key: Int[Tensor, "... keys"]) -> Bool[Tensor, "queries keys"]:
        """Which keys lie inside the window of each query."""
        return self._near_to(torch.arange(chunk.start, chunk.stop, device=key.device)[:, None], key)

    def _near_to(self, query: Int[Tensor, "..."], key: Int[Tensor, "..."]) -> Bool[Tensor, "..."]:
        places, radius = min(self._shape[1:]), self.protocol.radius
        down, right = query // places - key // places, query % places - key % places
        if self.protocol.window == "square":
            return (down.abs() <= radius) & (right.abs() <= radius)
        return down * down + right * right < radius * radius

    def _weights(self, keys: Keys) -> Float[Tensor, "queries keys"]:
        """Softmax over the topk places, which the best keys' copies fill first."""
        taken_before = keys.copies.cumsum(dim=1) - keys.copies
        places = torch.minimum(keys.copies, (self.protocol.topk - taken_before).clamp(min=0))
        weights = places * torch.exp((keys.similarity - keys.similarity[:, :1]) / self.protocol.temperature)
        return weights / weights.sum(dim=1, keepdim=True)


def similarities(
    queries: Float[Tensor, "frames queries channels"], keys: Float[Tensor, "frames keys channels"]
) -> Float[Tensor, "frames queries keys"]:
    """Cosines in fp32; a GPU multiplies keys that are held in bf16 as they are, and adds in fp32."""
    if keys.is_cuda and keys.dtype == torch.bfloat16:
        return torch.bmm(queries.to(keys.dtype), keys.transpose(1, 2), out_dtype=torch.float32)
    return torch.bmm(queries, keys.float().transpose(1, 2))


def propagate_features(
    features: Iterable[Features],
    labels: Labels | GivenLabels,
    protocol: Protocol,
    past: Propagator | None = None,
    start: int = 0,
    watch: Watch | None = None,
) -> Iterator[Labels]:
    """Soft labels of every frame: this is the one loop that drives a `Propagator`.

    `labels` are those of the first frame, or a function of a frame's index and of the labels propagated to
    it (None for the first frame) that returns the labels given for that frame, or None. Given labels
    restart the propagation: what was propagated up to there has just been corrected, and as part of the
    context it would outvote the correction in the very next frame. `past` has taken the frames before
    `start`, and `features` are those of the frames from there on. `watch` sees every frame.
    """
    propagator = past or Propagator(protocol)
    for index, frame in enumerate(features, start):
        soft = propagator.step(frame) if index else None
        given = labels(index, soft) if callable(labels) else (None if index else labels)
        if given is not None:
            soft = given.to(frame.device, torch.float32)
            propagator.start(frame, soft)
        if soft is None:
            raise InputError("the first frame has no labels: propagation starts from them.")
        if watch is not None:
            watch(index, soft, frame)
        yield soft


def label_sources(
    features: Iterable[Features], cells: Iterable[tuple[int, int]], protocol: Protocol
) -> list[list[LabelSource]]:
    """Where the labels of some cells (row, column) of the last frame come from, in the frames before it.

    Of a long video, the first frame and the last `context` before the one in question are enough.
    """
    propagator = Propagator(protocol)
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
    protocol: Protocol,
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
    disk, square = offset.norm(dim=2) >= protocol.radius, offset.abs().amax(dim=2) > protocol.radius
    far = disk if protocol.window == "disk" else square
    found = [labels.to(unit).flatten(0, 1)]
    for time in range(1, len(features)):
        if protocol.first_frame == "repeated":
            past = [max(0, index) for index in range(time - protocol.context, time)]
        else:
            past = list(range(max(1, time - protocol.context), time))
        scores = [unit[time].T @ unit[index] for index in [0, *past]]
        for score in scores if protocol.limit_first else scores[1:]:
            score.masked_fill_(far, -torch.inf)
        together = torch.cat(scores, dim=1) / protocol.temperature
        best, index = together.topk(min(protocol.topk, together.shape[1]), dim=1)
        keys = torch.cat([found[frame] for frame in [0, *past]])
        found.append((best.softmax(dim=1)[:, :, None] * keys[index]).sum(dim=1))
    return torch.stack(found).unflatten(1, (height, width)).float()
