"""Frames per second of label propagation from JPEGs to saved masks: `python benchmarks/propagation.py`.

ViT-S/16 at 480x880, protocol tcore. With `--davis DIR` on real clips, otherwise on a rendered one. The labels
are compared with those of the plain twin, and the time of each stage is printed beside.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tcore.data.images import read_image
from tcore.data.rendered import render_video
from tcore.evaluation.benchmarks import find_benchmark
from tcore.evaluation.benchmarks.benchmark import Clip
from tcore.evaluation.card import device_name, peak_memory
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.encoders import load_encoder
from tcore.evaluation.evaluate import predictions_saver
from tcore.evaluation.masks import Ids, as_binary, read_ids
from tcore.evaluation.propagate import propagate_features, propagate_plainly
from tcore.evaluation.protocols import TCORE
from tcore.evaluation.resize import grid_to_ids, ids_to_grid
from tcore.evaluation.run_clip import encode, run_masks, write_behind

SIZE = (480, 880)
RELEASED = {"cpu": 0.16, "cuda": 5.5}  # frames/s of the authors' code on 2 cores, on an H200
WANTED = {"cpu": 3, "cuda": 10}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--davis", type=Path, help="folder with the layout of DAVIS")
    parser.add_argument("--clips", nargs="*", default=["blackswan"], help="its clips to run")
    parser.add_argument("--frames", type=int, default=12, help="frames of each clip")
    parser.add_argument("--encoder", default="random:vits16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    encoder = load_encoder(options.encoder).to(options.device)
    with tempfile.TemporaryDirectory() as folder:
        root = options.davis or rendered_clip(Path(folder), options.frames)
        names = options.clips if options.davis else ["rendered"]
        found = [clip for clip in find_benchmark("davis").open(root, TCORE).clips if clip.name in names]
        clips = [clip for clip in found if isinstance(clip, Clip)]
        report(encoder, clips, options.frames, Path(folder) / "masks")


def report(encoder: Encoder, clips: list[Clip], frames: int, out: Path) -> None:
    """Run, compare with the twin, print."""
    device = next(encoder.parameters()).device
    run(encoder, clips[0], min(frames, 3), out)  # warm up
    seconds, count = 0.0, 0
    results = []
    for clip in clips:
        begun = time.perf_counter()
        results.append(run(encoder, clip, frames, out))
        seconds += time.perf_counter() - begun
        count += len(results[-1])
    speed, released = count / seconds, RELEASED[device.type]
    peak = peak_memory(device)
    print(f"{device_name(device)}: {encoder.name}, {SIZE[0]}x{SIZE[1]}, {count} frames, masks saved")
    print(
        f"{speed:.2f} frames/s, {speed / released:.1f}x of the released code's {released} "
        f"(wanted: {WANTED[device.type]}x); peak memory {peak}"
    )
    stages(encoder, clips[0], min(frames, len(clips[0].frames)), results[0])


def run(encoder: Encoder, clip: Clip, frames: int, out: Path) -> list[Ids]:
    """Propagate through the first frames of a clip and save the masks."""
    paths = clip.frames[:frames]
    first = as_binary(read_ids(clip.truth[0]))
    found = []
    with write_behind(predictions_saver(out)) as save:
        for path, ids in zip(paths, run_masks(encoder, paths, first, SIZE, TCORE, 2), strict=True):
            save(clip.name, f"{path.stem}.png", ids)
            found.append(ids)
    return found


def stages(encoder: Encoder, clip: Clip, frames: int, found: list[Ids]) -> None:
    """Seconds per frame of each stage by itself, and the labels beside those of the plain twin."""
    device = next(encoder.parameters()).device
    read, images = timed(device, lambda: [read_image(path) for path in clip.frames[:frames]])
    encoded, features = timed(device, lambda: torch.stack([encode(encoder, i, SIZE) for i in images]))
    first = torch.from_numpy(as_binary(read_ids(clip.truth[0])))
    grid = (SIZE[0] // encoder.patch_size, SIZE[1] // encoder.patch_size)
    start = ids_to_grid(first, input_size=SIZE, grid=grid, num_classes=2).to(device)
    ours, labels = timed(device, lambda: torch.stack(list(propagate_features(features, start, TCORE))))
    plain, twin = timed(device, lambda: propagate_plainly(features, start, TCORE, torch.float32))
    size = (first.shape[0], first.shape[1])
    expected = [grid_to_ids(x, input_size=SIZE, output_size=size).cpu().numpy() for x in twin]
    differing = sum(int((a != b).sum()) for a, b in zip(expected, found, strict=True))
    named = {"read": read, "encode": encoded, "propagate": ours, "propagate, plain twin": plain}
    print(", ".join(f"{name} {1000 * s / frames:.1f} ms" for name, s in named.items()) + " a frame")
    print(
        f"beside the plain twin: {differing} of {frames * first.numel()} pixels differ, "
        f"soft labels by at most {float((labels - twin).abs().max()):.1e}"
    )


def timed(device: torch.device, work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds that some work takes, and what comes out of it."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    begun = now()
    result = work()
    return now() - begun, result


def rendered_clip(root: Path, frames: int) -> Path:
    """A rendered clip of 480x854 in the layout of DAVIS."""
    video = render_video(0, 0, num_frames=frames, size=480)
    for index in range(frames):
        wide = [np.pad(x, [(0, 0), (187, 187)] + [(0, 0)] * (x.ndim - 2), mode="edge") for x in
                (video.frames[index], video.objects[index])]  # fmt: skip
        for image, folder, suffix in zip(wide, ("JPEGImages", "Annotations"), ("jpg", "png"), strict=True):
            path = root / folder / "480p" / "rendered" / f"{index:05d}.{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path, quality=92)
    return root


if __name__ == "__main__":
    main()
