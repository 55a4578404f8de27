"""Frames per second of label propagation, from JPEGs to saved masks: `python benchmarks/propagation.py`.

For each detail (coarse, fine, finest): frames/s, CPU seconds a frame, peak memory, and the gain over the time
before grids had names. With `--davis DIR` on real clips, otherwise on a rendered one of 480x854; with
`--repeat 10` ten times over, in the same memory. `--stages` prints the time of each stage, and compares with
the plain twin.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tcore.data.images import read_image
from tcore.data.rendered import render_video
from tcore.evaluation.benchmarks import find_benchmark
from tcore.evaluation.benchmarks.benchmark import Clip, frame_size
from tcore.evaluation.card import device_name, peak_memory
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.encoders import load_encoder
from tcore.evaluation.evaluate import predictions_saver
from tcore.evaluation.masks import Ids, as_binary, read_ids
from tcore.evaluation.propagate import propagate_features, propagate_plainly
from tcore.evaluation.protocols import TCORE, Detail, Protocol, protocol
from tcore.evaluation.resize import Size, grid_to_ids, ids_to_grid
from tcore.evaluation.run_clip import encode, run_masks, write_behind
from tcore.video.detail import fit_size

# What came before. ViT-S/16 on an H200: frames/s, at 960x1760 with five other jobs on the same GPU. The
# encoder `default` on a CPU: seconds of one thread for a frame, encoding and a step with a full context.
BEFORE = {"cuda": {"coarse": 95.0, "fine": 4.5}, "cpu": {"coarse": 1.44, "fine": 17.4}}
WANTED = {"cuda": {"coarse": 120.0, "fine": 40.0}, "cpu": {"coarse": 3.0, "fine": 0.7}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--davis", type=Path, help="folder with the layout of DAVIS")
    parser.add_argument("--clips", nargs="*", default=["blackswan"], help="its clips to run")
    parser.add_argument("--frames", type=int, default=12, help="frames of each clip")
    parser.add_argument("--repeat", type=int, default=1, help="times that the frames are run through")
    parser.add_argument("--detail", nargs="+", default=["coarse", "fine"])
    parser.add_argument("--encoder", default="random:vits16")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--search", default="exact")
    parser.add_argument("--context", type=int, default=TCORE.context)
    parser.add_argument("--radius", type=float, default=TCORE.radius)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--stages", action="store_true", help="time of each stage; the plain twin beside")
    options = parser.parse_args()
    encoder = load_encoder(options.encoder).to(options.device)
    knobs = {name: getattr(options, name) for name in ("precision", "search", "context", "radius")}
    with tempfile.TemporaryDirectory() as folder:
        root = options.davis or rendered_clip(Path(folder), options.frames)
        names = options.clips if options.davis else ["rendered"]
        found = [clip for clip in find_benchmark("davis").open(root, TCORE).clips if clip.name in names]
        clips = [shorten(clip, options) for clip in found if isinstance(clip, Clip)]
        print(f"{device_name(torch.device(options.device))}: {encoder.name}, {knobs}, masks saved")
        for detail in options.detail:
            chosen = protocol("tcore" if detail == "coarse" else f"tcore-{detail}")
            report(encoder, clips, detail, replace(chosen, **knobs), Path(folder) / "masks", options.stages)


def shorten(clip: Clip, options: argparse.Namespace) -> Clip:
    """The first frames of a clip, as often as wanted."""
    return Clip(clip.name, clip.frames[: options.frames] * options.repeat, clip.truth[:1])


def report(
    encoder: Encoder, clips: list[Clip], detail: Detail, chosen: Protocol, out: Path, with_stages: bool
) -> None:
    """Run and print."""
    device = next(encoder.parameters()).device
    size = fit_size(frame_size(clips[0].frames[0]), encoder.patch_size, detail)
    run(encoder, replace_frames(clips[0], 3), size, chosen, out)  # warm up
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    begun, spent = time.perf_counter(), time.process_time()
    results = [run(encoder, clip, size, chosen, out) for clip in clips]
    spent, seconds = time.process_time() - spent, time.perf_counter() - begun
    count = sum(len(clip.frames) for clip in clips)
    speed = count / seconds
    before, wanted = (table[device.type].get(detail) for table in (BEFORE, WANTED))
    measured = speed if device.type == "cuda" else count / spent
    times = (
        ""
        if not before
        else f", {measured / (before if device.type == 'cuda' else 1 / before):.2f}x of before"
    )
    print(
        f"{detail}: {size[0]}x{size[1]}, patches of {encoder.patch_size}, {count} frames: "
        f"{speed:.2f} frames/s{f' (wanted: {wanted:g})' if wanted else ''}, "
        f"{spent / count:.2f} CPU s a frame{times}; peak memory {peak_memory(device)}",
        flush=True,
    )
    if with_stages:
        stages(encoder, clips[0], size, chosen, results[0])


def replace_frames(clip: Clip, count: int) -> Clip:
    """The first frames of a clip."""
    return Clip(clip.name, clip.frames[:count], clip.truth)


def run(encoder: Encoder, clip: Clip, size: Size, chosen: Protocol, out: Path) -> Ids:
    """Propagate through a clip and save the masks; returns the last."""
    first = as_binary(read_ids(clip.truth[0]))
    with write_behind(predictions_saver(out)) as save:
        labeled = run_masks(encoder, clip.frames, first, size, chosen, 2)
        for number, ids in enumerate(labeled):
            save(clip.name, f"{number:05d}.png", ids)
    return ids


def stages(encoder: Encoder, clip: Clip, size: Size, chosen: Protocol, last: Ids) -> None:
    """Seconds per frame of each stage by itself, and the last labels beside those of the plain twin."""
    device, count = next(encoder.parameters()).device, len(clip.frames)
    read, images = timed(device, lambda: [read_image(path) for path in clip.frames])
    encoded, features = timed(
        device, lambda: torch.stack([encode(encoder, image, size, chosen.precision) for image in images])
    )
    first = torch.from_numpy(as_binary(read_ids(clip.truth[0])))
    grid = (size[0] // encoder.patch_size, size[1] // encoder.patch_size)
    start = ids_to_grid(first, input_size=size, grid=grid, num_classes=2).to(device)
    ours, labels = timed(device, lambda: torch.stack(list(propagate_features(features, start, chosen))))
    plain, twin = timed(device, lambda: propagate_plainly(features, start, chosen, torch.float32))
    whole = (first.shape[0], first.shape[1])
    expected = grid_to_ids(twin[-1], input_size=min(size, whole), output_size=whole).cpu().numpy()
    named = {"read": read, "encode": encoded, "propagate": ours, "propagate, plain twin": plain}
    print(", ".join(f"{name} {1000 * s / count:.1f} ms" for name, s in named.items()) + " a frame")
    print(
        f"beside the plain twin: {int((expected != last).sum())} of {first.numel()} pixels of the last frame "
        f"differ, soft labels by at most {float((labels - twin).abs().max()):.1e}"
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
