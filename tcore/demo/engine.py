"""The encoder behind the page: one thread computes for all visitors, one frame at a time, in turn."""

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from tcore.data.images import Frame
from tcore.data.render import normalize
from tcore.device import encoder_device
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.encoders import load_encoder
from tcore.evaluation.protocols import FINER, TCORE, Detail, Edges, Protocol
from tcore.evaluation.resize import Size, resize_images
from tcore.evaluation.run_clip import encode
from tcore.show.features import Matcher, load_matcher
from tcore.text import Say, silent
from tcore.video.detail import choose_detail, estimate, fit_size, suited

SHOWN = (480, 854)  # a frame whose time decides on the detail: the page shrinks larger ones


def _step_back() -> None:
    """Let the threads that answer requests come before this one and its own; only Linux can."""
    if sys.platform == "linux":
        before = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), before + 5)  # at most 19, says the kernel


class Engine:
    """Computes for every visitor in one thread, in the order of the requests."""

    def __init__(
        self,
        encoder: Encoder,
        matcher: Matcher | None = None,
        detail: Detail = "fine",
        edges: Edges = "guided",
        long_side: int | None = None,
    ) -> None:
        self.encoder, self.matcher, self.detail, self.edges = encoder, matcher, detail, edges
        self.long_side = long_side
        self.device = next(encoder.parameters()).device
        self._thread = ThreadPoolExecutor(1, "compute", initializer=_step_back)
        self.submit = self._thread.submit  # pieces of work that take about as long as one frame

    def close(self) -> None:
        """Let the thread end; waiting work is dropped."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def input_size(self, size: Size, detail: Detail) -> Size:
        """The size at which frames go in."""
        return fit_size(size, self.encoder.patch_size, detail, self.long_side)

    def frame_bytes(self, size: Size) -> int:
        """Bytes on disk of a frame of a clip: pixels, ids, and the features of the finest grid on offer."""
        rows, columns = self.input_size(size, "finest" if self.detail == "finest" else "fine")
        patches = rows * columns // self.encoder.patch_size**2
        return 4 * size[0] * size[1] + 4 * self._channels * patches

    @cached_property
    def _channels(self) -> int:
        side = 4 * self.encoder.patch_size
        return self.encode(np.zeros((side, side, 3), np.uint8), (side, side)).shape[0]

    def protocol(self, inside: Size) -> Protocol:
        """The protocol of `tcore propagate`."""
        return suited(replace(TCORE, edges=self.edges), self.encoder, inside)

    def encode(self, frame: Frame, inside: Size) -> Float[Tensor, "channels rows columns"]:
        """Features of one frame."""
        return encode(self.encoder, frame, inside, self.protocol(inside).precision, smooth=True)

    def estimate(self, frame: Frame, inside: Size, count: int) -> dict[str, float]:
        """Seconds to encode a frame, for a step with a full context, and for a clip of `count` frames."""
        return estimate(self.encoder, frame, inside, count, self.protocol(inside))

    @torch.no_grad()
    def attention(
        self, current: Frame, others: list[Frame], inside: Size, detail: Detail, row: int, column: int
    ) -> list[Float[Tensor, "rows columns"]]:
        """Where the matching module attends to in other frames to predict this patch, which is masked.

        Every patch attends to every other: that is done on the coarse grid, and shown on the one of `inside`.
        """
        assert self.matcher is not None
        backbone, match = self.matcher
        patch, times = backbone.patch_size, FINER[detail]
        shown = (inside[0] // patch, inside[1] // patch)
        grid = (max(1, shown[0] // times), max(1, shown[1] // times))
        place = (row * grid[0] // shown[0]) * grid[1] + column * grid[1] // shown[1]
        device = next(backbone.parameters()).device
        images = [torch.from_numpy(frame.copy()).to(device) for frame in (current, *others)]
        mask = torch.zeros(1, grid[0] * grid[1], dtype=torch.bool, device=device)
        mask[0, place] = True
        coarse = (grid[0] * patch, grid[1] * patch)
        sized = normalize(torch.stack([resize_images(image, coarse) for image in images]))
        query = backbone(sized[:1], mask).patches
        sources = backbone(sized[1:]).patches
        scene = self.matcher.scene(mask, grid)
        if scene is not None:
            scene = scene._replace(masked=mask.expand(len(others), -1))
        maps = match.attention(query.expand(len(others), -1, -1), sources, scene).cross[:, place]
        finer = F.interpolate(maps.unflatten(1, grid)[None], shown, mode="nearest")[0].cpu()
        return list(finer / finer.sum(dim=(1, 2), keepdim=True))


def load_engine(
    spec: str | Path,
    detail: Detail | None = None,
    edges: Edges = "guided",
    say: Say = silent,
    device_name: str = "auto",
    long_side: int | None = None,
) -> Engine:
    """The encoder, and the matching module where it is a run that has one."""
    device = encoder_device(device_name)
    matcher = load_matcher(spec)
    if matcher is not None:
        matcher = Matcher(matcher.backbone.to(device), matcher.match.to(device))
    encoder = load_encoder(spec).to(device)
    fit_size(SHOWN, encoder.patch_size, "coarse", long_side)  # refuses one without room for a patch
    frame = np.zeros((*SHOWN, 3), np.uint8)
    detail = detail or choose_detail(encoder, frame, None, TCORE, long_side, say=say)
    return Engine(encoder, matcher, detail, edges, long_side)
