"""What a finer grid is worth, row by row: `python benchmarks/detail.py --davis DIR --rows coarse fine`.

A row is a detail, the way to its grid, and settings, in quotes: `"fine stride reach=6 context=7"`. Ways are
`size` (a larger input; the default) and `stride` (patches overlap: they are half or a third of their side
apart). Settings are those of a protocol (`search=halved`, `edges=guided`, ...), and `reach`. Prints J&F, J, F
and frames/s of reading, encoding and propagating, without scoring. Folders have the layout of DAVIS; those of
`--points` have clips with a keypoints.csv, and are scored by PCK@.1 and PCK@.2.
"""

import argparse
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tcore.evaluation.benchmarks.benchmark import Clip, Result, frame_size
from tcore.evaluation.benchmarks.davis import Davis
from tcore.evaluation.benchmarks.points import Points
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.encoders import load_encoder
from tcore.evaluation.masks import VOID, Ids, read_ids
from tcore.evaluation.protocols import FINER, Protocol, protocol
from tcore.evaluation.run_clip import run_masks
from tcore.model.vit import VisionTransformer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--encoder", default="default")
    parser.add_argument("--davis", type=Path, nargs="*", default=[], help="folders with the layout of DAVIS")
    parser.add_argument("--points", type=Path, nargs="*", default=[], help="folders of clips with points")
    parser.add_argument("--rows", nargs="+", default=["coarse", "fine", "fine stride", "fine stride reach=6"])
    parser.add_argument("--clips", nargs="*", help="names of the clips to run (unset: all)")
    parser.add_argument("--frames", type=int, help="frames of each clip (unset: all)")
    parser.add_argument("--workers", type=int, default=4, help="processes that score")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    print(f"{options.encoder} on {options.device}\n{'data':16}{'row':44}{'grid':>8}", end="")
    print(f"{'J&F':>7}{'J':>7}{'F':>7}{'frames/s':>10}{'GPU GB':>8}", flush=True)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.workers, mp_context=spawn) as pool:
        waiting = []
        for row in options.rows:
            encoder, chosen = build(options.encoder, row)
            encoder.to(options.device)
            for root in options.davis:
                waiting.append(run(encoder, chosen, root, row, options, pool))
            for root in options.points:
                print(score_points(encoder, chosen, root, row, options), flush=True)
        for davis, line, found in waiting:
            total = davis.summarize(one.result() for one in found)
            scores = "".join(f"{100 * total[name]:7.1f}" for name in ("J&F", "J", "F"))
            print(line.format(scores), flush=True)


def build(name: str, row: str) -> tuple[Encoder, Protocol]:
    """The encoder and the protocol of a row."""
    detail, *words = row.split()
    base = "dinov3" if "dinov3" in words else "tcore"
    chosen = protocol(base if detail == "coarse" else f"{base}-{detail}")
    encoder = load_encoder(name)
    knobs = dict(word.split("=") for word in words if "=" in word)
    if "reach" in knobs:
        reach = knobs.pop("reach")
        assert isinstance(encoder.backbone, VisionTransformer)
        encoder.backbone.reach = None if reach == "everywhere" else int(reach)
    if "stride" in words:
        overlap(encoder, FINER[detail])  # type: ignore[index]
    kinds = {field.name: type(field.default) for field in fields(Protocol)}
    return encoder, replace(chosen, **{name: parse(kinds[name], text) for name, text in knobs.items()})


def parse(kind: type, text: str) -> Any:
    """A setting from its text."""
    return text == "True" if kind is bool else kind(text)


class Overlapping(nn.Module):
    """Patches as large as before, but `stride` apart, centered on the cells of the finer grid."""

    def __init__(self, proj: nn.Conv2d, stride: int) -> None:
        super().__init__()
        self.proj, self.stride = proj, stride

    def forward(self, images: Tensor) -> Tensor:
        """Patches in row-major order."""
        side = self.proj.kernel_size[0]
        before = (side - self.stride) // 2
        after = side - self.stride - before
        padded = F.pad(images, (before, after, before, after), mode="replicate")
        pixels = F.unfold(padded, side, stride=self.stride).transpose(1, 2)
        return F.linear(pixels, self.proj.weight.flatten(1), self.proj.bias)


def overlap(encoder: Encoder, times: int) -> None:
    """Make the encoder's grid finer by moving patches less than their side."""
    vit = encoder.backbone
    assert isinstance(vit, VisionTransformer)
    stride = round(vit.patch_size / times)
    vit.patch_embed = Overlapping(vit.patch_embed.proj, stride)  # type: ignore[assignment]
    vit.patch_size = encoder.patch_size = stride


def run(
    encoder: Encoder, chosen: Protocol, root: Path, row: str, options: argparse.Namespace, pool: Any
) -> tuple[Davis, str, list["Future[Result]"]]:
    """Propagate through all clips; their scores are computed meanwhile."""
    first = next(iter(Davis.open(root, chosen).clips))
    davis = Davis.open(root, chosen, binary=set(np.unique(read_ids(first.truth[0]))) <= {0, VOID})
    assert isinstance(davis, Davis)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    found, seconds, count = [], 0.0, 0
    for clip in pick(davis, options):
        begun = time.perf_counter()
        ids = predict(encoder, davis, clip)
        seconds, count = seconds + time.perf_counter() - begun, count + len(ids)
        found.append(pool.submit(score, root, davis.binary, clip, ids))
    size = davis.input_size(encoder, frame_size(first.frames[0]))
    grid = f"{size[0] // encoder.patch_size}x{size[1] // encoder.patch_size}"
    peak = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0
    line = f"{root.name[:15]:16}{row:44}{grid:>8}{{}}{count / seconds:10.2f}{peak:8.2f}"
    print(line.format(" " * 21) + "  propagated", flush=True)
    return davis, line, found


def score_points(
    encoder: Encoder, chosen: Protocol, root: Path, row: str, options: argparse.Namespace
) -> str:
    """A line of PCK over the points of a folder, then that of every clip."""
    points = Points.open(root, chosen)
    found = {
        clip.name: points.run(encoder, clip)
        for clip in points.clips
        if options.clips is None or clip.name in options.clips
    }
    total = points.summarize(found.values())
    each = " ".join(f"{name} {100 * points.summarize([one])['PCK@0.1']:.1f}" for name, one in found.items())
    return (
        f"{root.name[:15]:16}{row:52}"
        + "".join(f"{100 * value:7.1f}" for value in total.values())
        + f"  {each}"
    )


def pick(davis: Davis, options: argparse.Namespace) -> Iterator[Clip]:
    """The clips that are wanted, with their first frames."""
    for clip in davis.clips:
        if options.clips is None or clip.name in options.clips:
            yield Clip(clip.name, clip.frames[: options.frames], clip.truth[: options.frames])


def predict(encoder: Encoder, davis: Davis, clip: Clip) -> list[Ids]:
    """The ids of every frame."""
    first, classes = davis.first_labels(clip)
    size = davis.input_size(encoder, frame_size(clip.frames[0]))
    return list(run_masks(encoder, clip.frames, first, size, davis.protocol, classes))


def score(root: Path, binary: bool, clip: Clip, ids: list[Ids]) -> Result:
    """J and F of one clip, in a process of its own."""
    torch.set_num_threads(1)
    davis = Davis.open(root, protocol("tcore"), binary=binary)
    assert isinstance(davis, Davis)
    return davis.score_clip(clip, ids)


if __name__ == "__main__":
    main()
