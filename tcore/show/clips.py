"""Frames for a figure: from a video or folder at some times, from images, or from a rendered video."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from tcore.data.images import Frame, read_image
from tcore.data.stores import open_mixture
from tcore.data.video import FolderVideo, open_video
from tcore.errors import InputError
from tcore.evaluation.benchmarks.rendered import heldout_video
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.resize import input_size

LONG_SIDE = 448


@dataclass(frozen=True)
class Clip:
    """Frames of one size that suits the encoder, with a name for each."""

    frames: UInt8[np.ndarray, "time height width 3"]
    names: tuple[str, ...]
    source: str


@dataclass(frozen=True)
class Times:
    """Which frames of a video: by number, by seconds, or as shares of its length."""

    numbers: tuple[int, ...] = ()
    seconds: tuple[float, ...] = ()
    shares: tuple[float, ...] = (0.25, 0.5, 0.75)

    def of(self, count: int, rate: float, source: str) -> list[int]:
        """Frame numbers in a video with this many frames."""
        if self.numbers and self.seconds:
            raise InputError("--frames and --times are mutually exclusive.")
        found = list(self.numbers) or [round(second * rate) for second in self.seconds]
        found = found or [round(share * (count - 1)) for share in self.shares]
        for number in found:
            if not 0 <= number < count:
                raise InputError(f"frame {number} of {source}: it has {count} frames, 0 to {count - 1}.")
        return found


def evenly(count: int) -> Times:
    """Frames spread evenly over the whole video, `count` of them."""
    return Times(shares=tuple(np.linspace(0, 1, max(1, count)).tolist()))


def rendered_number(source: str) -> int | None:
    """The number of a held-out rendered video, `rendered` or `rendered:N`; None for any other source.

    >>> rendered_number("rendered"), rendered_number("rendered:3"), rendered_number("rendered_cat.mp4")
    (0, 3, None)
    """
    kind, colon, number = source.partition(":")
    if kind != "rendered":
        return None
    if colon and not number.isdecimal():
        raise InputError(f"{source}: give rendered:N with a number, as in rendered:3.")
    return int(number or 0)


def open_clip(sources: Sequence[str], times: Times, patch_size: int) -> Clip:
    """Frames of a video, of a folder, of `rendered` or `rendered:N`; or several images in their order."""
    if len(sources) > 1:
        files = [Path(source) for source in sources]
        names = tuple(file.stem for file in files)
        return Clip(_fit([read_image(file) for file in files], patch_size), names, "")
    source = sources[0] if sources else "rendered"
    number = rendered_number(source)
    if number is not None:
        frames = heldout_video(number, patch_size).frames
        chosen = times.of(len(frames), 2.0, source)
        frames, name = frames[chosen], f"rendered-{number:03d}"
    else:
        chosen, picked = pick_frames(Path(source), times)
        frames, name = _fit(picked, patch_size), Path(source).name
    return Clip(frames, tuple(f"frame {n}" for n in chosen), name)


def open_stored(frames: str, seed: int, times: Times, patch_size: int) -> Clip:
    """Frames of the longest video of the store that a run was trained on."""
    store = open_mixture(frames, seed)
    video = int(store.lengths.argmax())
    chosen = times.of(int(store.lengths[video]), store.fps or 1.0, store.names[video])
    picked = _fit(store.read(video, chosen), patch_size)
    return Clip(picked, tuple(f"frame {n}" for n in chosen), Path(store.names[video]).name)


def pick_frames(path: Path, times: Times) -> tuple[list[int], list[Frame]]:
    """Some frames of a video file or folder, with their numbers; only these are kept in memory."""
    video = open_video(path)
    # Containers may state a wrong length: count what can be decoded, unless it does not matter.
    stated = isinstance(video, FolderVideo) or times.numbers or times.seconds
    count = (video.count if stated else None) or sum(1 for _ in video)
    chosen = times.of(count, float(video.rate), str(path))
    found = dict[int, Frame]()
    for number, frame in zip(range(max(chosen) + 1), video, strict=False):
        if number in chosen:
            found[number] = frame
    for number in chosen:
        if number not in found:
            raise InputError(f"frame {number} of {path} could not be decoded. {video.problem}".strip())
    return chosen, [found[number] for number in chosen]


def encode_clip(encoder: Encoder, frames: Iterable[Frame]) -> Float[Tensor, "time channels rows columns"]:
    """Features of all frames, one at a time."""
    device = next(encoder.parameters()).device
    tensors = (torch.from_numpy(np.ascontiguousarray(frame))[None].to(device) for frame in frames)
    return torch.cat([encoder(frame).float().cpu() for frame in tensors])


def _fit(frames: list[np.ndarray], patch_size: int) -> UInt8[np.ndarray, "time height width 3"]:
    """Frames at one size: that of the middle one, floored to the patch, with a bounded long side."""
    middle = frames[len(frames) // 2]
    size = (middle.shape[0], middle.shape[1])
    height, width = input_size(size, patch_size, long=min(LONG_SIDE, max(size)))
    images = (Image.fromarray(frame) for frame in frames)
    return np.stack([np.asarray(i.resize((width, height), Image.Resampling.LANCZOS)) for i in images])
