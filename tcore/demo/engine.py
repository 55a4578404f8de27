"""The encoder behind the page: one thread computes for all visitors, one frame at a time, in turn."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tcore.data.images import Frame
from tcore.device import choose_device
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.encoders import load_encoder
from tcore.evaluation.propagate import Propagator
from tcore.evaluation.protocols import TCORE, Protocol
from tcore.evaluation.resize import Size, normalize_images, resize_images
from tcore.evaluation.run_clip import encode
from tcore.show.features import Matcher, load_matcher
from tcore.video.propagate_video import fit_size

CELLS = 56  # along the long side of a grid: that of the published protocol has 55 columns


class Engine:
    """Computes for every visitor in one thread, in the order of the requests."""

    def __init__(self, encoder: Encoder, matcher: Matcher | None = None) -> None:
        self.encoder, self.matcher = encoder, matcher
        self.device = next(encoder.parameters()).device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self.submit = self._thread.submit  # pieces of work that take about as long as one frame

    def close(self) -> None:
        """Let the thread end; waiting work is dropped."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def input_size(self, size: Size) -> Size:
        """The size at which frames go in: their own, or smaller, floored to the patch."""
        patch = self.encoder.patch_size
        return fit_size(size, patch, CELLS * patch)

    def frame_bytes(self, size: Size) -> int:
        """Bytes on disk of a frame of a clip: pixels, ids and features."""
        rows, columns = self.input_size(size)
        patches = rows * columns // self.encoder.patch_size**2
        return 4 * size[0] * size[1] + 4 * self._channels * patches

    @cached_property
    def _channels(self) -> int:
        side = 4 * self.encoder.patch_size
        return self.encode(np.zeros((side, side, 3), np.uint8), (side, side)).shape[0]

    def protocol(self, inside: Size) -> Protocol:
        """The published protocol, its radius scaled from a grid of 55 columns to this one."""
        cells = max(inside) // self.encoder.patch_size
        return replace(TCORE, name="demo", radius=max(4.0, round(20 * cells / 55, 1)), resize="native")

    def encode(self, frame: Frame, inside: Size) -> Float[Tensor, "channels rows columns"]:
        """Features of one frame."""
        return encode(self.encoder, frame, inside, smooth=True)

    def estimate(self, frame: Frame, inside: Size, count: int) -> dict[str, float]:
        """Seconds to encode a frame, for a step with a full context, and for a clip of `count` frames."""
        features = self.encode(frame, inside)  # the first call is slower
        protocol = self.protocol(inside)
        held, propagator = min(protocol.context, max(0, count - 2)), Propagator(protocol)
        labels = torch.zeros(*features.shape[1:], 2)
        propagator.start(features, labels)
        for _ in range(held):
            propagator.skip(features, labels)
        started = time.perf_counter()
        features = self.encode(frame, inside)
        features.cpu()  # a GPU has computed it only now
        encoded = time.perf_counter()
        propagator.step(features).cpu()
        encode_s, step_s = encoded - started, time.perf_counter() - encoded
        # The cost of a step grows with the number of frames that it searches.
        searched = sum(1 + min(index - 1, protocol.context) for index in range(1, count)) / (1 + held)
        return {"encode": encode_s, "step": step_s, "total": count * encode_s + searched * step_s}

    @torch.no_grad()
    def attention(
        self, current: Frame, others: list[Frame], inside: Size, row: int, column: int
    ) -> list[Float[Tensor, "rows columns"]]:
        """Where the matching module attends to in other frames to predict this patch, which is masked."""
        assert self.matcher is not None
        backbone, match = self.matcher
        grid = (inside[0] // backbone.patch_size, inside[1] // backbone.patch_size)
        device = next(backbone.parameters()).device
        images = [torch.from_numpy(frame.copy()).to(device) for frame in (current, *others)]
        mask = torch.zeros(1, grid[0] * grid[1], dtype=torch.bool, device=device)
        mask[0, row * grid[1] + column] = True
        sized = normalize_images(torch.stack([resize_images(image, inside) for image in images]))
        query = backbone(sized[:1], mask).patches
        sources = backbone(sized[1:]).patches
        maps = match.attention(query.expand(len(others), -1, -1), sources).cross
        return [values.unflatten(0, grid).cpu() for values in maps[:, row * grid[1] + column]]


def load_engine(spec: str | Path) -> Engine:
    """The encoder, and the matching module where it is a run that has one."""
    device = choose_device("auto")
    matcher = load_matcher(spec)
    if matcher is not None:
        matcher = Matcher(matcher.backbone.to(device), matcher.match.to(device))
    return Engine(load_encoder(spec).to(device), matcher)
