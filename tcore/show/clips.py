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
from tcore.data.rendered import RenderedVideo
from tcore.data.video import open_video
from tcore.errors import InputError
from tcore.evaluation.benchmarks.rendered import heldout_video
from tcore.evaluation.encoder import Encoder
from tcore.video.propagate_video import fit_size

RENDERED = "rendered"
LONG_SIDE = 448


@dataclass(frozen=True)
class Clip:
    """Frames of one size that suits the encoder, with a name for each."""

    frames: UInt8[np.ndarray, "time height width 3"]
    names: tuple[str, ...]
    source: str

    def tensor(self) -> UInt8[Tensor, "time height width 3"]:
        """The frames for an encoder."""
        return torch.from_numpy(self.frames)


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


def is_rendered(source: str) -> bool:
    """Whether a source is `rendered` or `rendered:N`, not a file whose name starts with that."""
    return source.partition(":")[0] == RENDERED


def open_clip(sources: Sequence[str], times: Times, patch_size: int, *, long_side: int = LONG_SIDE) -> Clip:
    """Frames of a video, of a folder, of `rendered` or `rendered:N`; or several images in their order."""
    first = sources[0] if sources else RENDERED
    if len(sources) <= 1 and is_rendered(first):
        video = rendered_clip(first, patch_size)
        chosen = times.of(len(video.frames), 2.0, first)
        return Clip(video.frames[chosen], tuple(f"frame {n}" for n in chosen), rendered_name(first))
    if len(sources) > 1:
        files = [Path(source) for source in sources]
        return _fit([read_image(file) for file in files], [f.stem for f in files], "", patch_size, long_side)
    path = Path(first)
    chosen, frames = pick_frames(path, times)
    return _fit(frames, [f"frame {number}" for number in chosen], path.name, patch_size, long_side)


def pick_frames(path: Path, times: Times) -> tuple[list[int], list[Frame]]:
    """Some frames of a video file or folder, with their numbers; only these are kept in memory."""
    video = open_video(path)
    count = video.count
    if count is None or not (times.numbers or times.seconds):
        # Containers may state a wrong length: count what can be decoded.
        count = len(video.files) if hasattr(video, "files") else sum(1 for _ in video)
    chosen = times.of(count, float(video.rate), str(path))
    wanted, found = set(chosen), dict[int, Frame]()
    for number, frame in enumerate(video):
        if number in wanted:
            found[number] = frame
        if len(found) == len(wanted):
            break
    if len(found) < len(wanted):
        missing = min(wanted - set(found))
        raise InputError(f"frame {missing} of {path} could not be decoded. {video.problem}".strip())
    return chosen, [found[number] for number in chosen]


def rendered_clip(source: str, patch_size: int) -> RenderedVideo:
    """A held-out rendered video by its number."""
    _, colon, number = source.partition(":")
    if colon and not number.isdecimal():
        raise InputError(f"{source}: give rendered:N with a number, as in rendered:3.")
    return heldout_video(int(number or 0), patch_size)


def rendered_name(source: str) -> str:
    """The name of a rendered video, as in score cards."""
    return f"rendered-{int(source.partition(':')[2] or 0):03d}"


def encode_clip(encoder: Encoder, frames: Iterable[Frame]) -> Float[Tensor, "time channels rows columns"]:
    """Features of all frames, one at a time."""
    device = next(encoder.parameters()).device
    tensors = (torch.from_numpy(np.ascontiguousarray(frame))[None].to(device) for frame in frames)
    return torch.cat([encoder(frame).float().cpu() for frame in tensors])


def _fit(frames: list[np.ndarray], names: list[str], source: str, patch: int, long_side: int) -> Clip:
    """Frames at one size: that of the middle one, floored to the patch, with a bounded long side."""
    middle = frames[len(frames) // 2]
    height, width = fit_size((middle.shape[0], middle.shape[1]), patch, long_side)
    fitted = [
        np.asarray(Image.fromarray(frame).resize((width, height), Image.Resampling.LANCZOS))
        for frame in frames
    ]
    return Clip(np.stack(fitted), tuple(names), source)
