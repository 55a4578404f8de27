"""Every reader of files from outside, with a small valid file for each, and ways to spoil such a file."""

import contextlib
import io
import json
import os
import shutil
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from tcore import files
from tcore.config import load_config, save_config, to_dict
from tcore.data.check import same_bytes
from tcore.data.images import read_image
from tcore.data.neighbors import Neighbors, check_neighbors, load_neighbors
from tcore.data.packed import INDEX, index_path, shard_path
from tcore.data.packing import Item, Settings, Task, record_path, write_shard
from tcore.data.prepare import merge, prepare, summarize
from tcore.data.probe import probe
from tcore.data.stores import FolderStore, PackedStore, read_rate
from tcore.data.video import FileVideo, SampledVideo
from tcore.errors import InputError
from tcore.evaluation.benchmarks.benchmark import Clip, fingerprint, read_joints, read_list
from tcore.evaluation.benchmarks.jhmdb import read_mat
from tcore.evaluation.benchmarks.points import read_keypoints
from tcore.evaluation.benchmarks.rendered import Rendered
from tcore.evaluation.card import read_card, worst_clips
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.encoders import load_encoder, read_normalization
from tcore.evaluation.evaluate import read_result
from tcore.evaluation.export import export, ship
from tcore.evaluation.masks import read_ids
from tcore.evaluation.neighbors import encode_all
from tcore.evaluation.protocols import RENDERED
from tcore.evaluation.trajectory import add_row, read_checkpoints, trajectory_table
from tcore.lab import ablation
from tcore.lab.results import collect_row
from tcore.lab.runs import DONE, STARTED, Job, Row
from tcore.methods.regions import load_discovery
from tcore.model.vit import VisionTransformer
from tcore.pretrain import BEST, Best, read_best, write_best
from tcore.show.comparison import markdown
from tcore.show.features import load_matcher
from tcore.show.report import SECTIONS, picture_data
from tcore.show.runs import read_runs
from tcore.show.samples import frames_of
from tcore.training.checkpoint import Init, load_newest, read_state, record_init
from tcore.training.journal import forget_after, note_environment
from tcore.video.both_ways import AHEAD
from tcore.video.labels import load_mask, read_points
from tcore.video.resume import CARD, DIGITS, UNFINISHED, DoneError, find_unfinished, keep_unfinished
from tests.data.clips import write_clip
from tests.data.packing import pack
from tests.evaluation.layouts import write_mat
from tests.tiny import tiny

EXTREMES = (0, 1, 127, 128, 255, 256, 32767, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)
WORDS = (*b'null NaN 1e999 -1 99999999999999999999 " [ { } , ../'.split(), b"\n", b"\0")
IMAGES = (("jpeg", "RGB"), ("png", "P"), ("png", "RGBA"), ("webp", "RGB"), ("gif", "P"), ("bmp", "L"))
SIZES: dict[str, Any] = {
    "dim": 64,
    "depth": 1,
    "num_heads": 1,
    "patch_size": 4,
    "image_size": 8,
    "num_registers": 1,
}


# A container, and a codec for it.
VIDEOS = {
    "mp4": "libx264",
    "mov": "mpeg4",
    "mkv": "libx264",
    "webm": "libvpx-vp9",
    "avi": "mjpeg",
    "ts": "mpeg2video",
    "ogg": "libvpx",
    "flv": "flv",
    "gif": "gif",
    "y4m": "wrapped_avframe",
    "wmv": "wmv2",
    "h264": "libx264",
}
FORMATS = {"y4m": "yuv4mpegpipe"}
PIXELS = {"gif": "rgb8", "mjpeg": "yuvj420p"}


class Reader(NamedTuple):
    """A file that is spoilt, and the function that reads it (or the folder that it lies in)."""

    name: str
    file: Path
    read: Callable[[], object]
    share: float = 1.0
    """Of the inputs; less where reading is slow."""


def spoil(data: bytes, rng: np.random.Generator) -> bytes:
    """Some other bytes: mostly a few changes, now and then nothing but noise."""
    if rng.random() < 0.1:
        return rng.bytes(int(rng.integers(0, 200)))
    spoilt = bytearray(data)
    for _ in range(int(rng.integers(1, 5))):
        at, some = int(rng.integers(0, len(spoilt) + 1)), int(rng.integers(1, 64))
        number, size = int(rng.choice(len(EXTREMES))), int(rng.choice([1, 2, 4, 8]))
        order = "little" if rng.random() < 0.5 else "big"
        stop, other = [
            (at + 1, rng.bytes(1)),
            (len(spoilt), b""),
            (at + some, b""),
            (at, spoilt[at : at + some]),
            (at, rng.bytes(some)),
            (at + size, (EXTREMES[number] % 256**size).to_bytes(size, order)),
            (at + some % 8, WORDS[int(rng.integers(0, len(WORDS)))]),
        ][int(rng.integers(0, 7))]
        spoilt[at:stop] = other
    return bytes(spoilt)


def image_bytes(format: str, mode: str) -> bytes:
    """A small image of noise."""
    noise = np.random.default_rng(0).integers(0, 4, (12, 16, 3), dtype=np.uint8) * 60
    buffer = io.BytesIO()
    Image.fromarray(noise).convert(mode).save(buffer, format)
    return buffer.getvalue()


def small_encoder() -> Encoder:
    """An encoder of a few thousand weights."""
    return Encoder(VisionTransformer(**SIZES), "small")


def make_readers(root: Path) -> list[Reader]:
    """Valid files under a folder, and their readers."""
    folders = (root / name for name in ("store", "labels", "weights", "videos", "unfinished", "run", "lab"))
    labels, weights, videos = label_readers, weight_readers, video_readers
    makers = (store_readers, labels, weights, videos, prepare_readers, run_readers, lab_readers)
    return [reader for make, folder in zip(makers, folders, strict=True) for reader in make(folder)]


def store_readers(root: Path) -> list[Reader]:
    """Readers of packed stores, frames and neighbors."""
    store = pack(root / "packed", [[("a", 3), ("b", 2)], [("c", 4)]], {"a": [1]})

    def read_store() -> None:
        opened = PackedStore(store)
        opened.verify()
        list(opened.names)
        opened.all_cuts()
        for video in range(len(opened)):
            opened.read(video, [0, int(opened.lengths[video]) - 1])

    readers = [Reader(f"index {name}", index_path(store, name), read_store, share=0.3) for name in INDEX]
    readers += [Reader("store.json", store / "store.json", read_store, share=0.5)]
    readers += [Reader("shard", shard_path(store, 0), read_store, share=0.5)]
    for format, mode in IMAGES:
        file = root / f"{mode}.{format}"
        file.write_bytes(image_bytes(format, mode))
        readers.append(Reader(f"frame {format} {mode}", file, partial(read_image, file)))
    neighbors = root / "neighbors.safetensors"
    indices = np.arange(8, dtype=np.int32).reshape(4, 2) % 4
    Neighbors(indices, np.zeros((4, 2), np.float32), "encoder", "a", "b").save(neighbors)

    def read_neighbors() -> None:
        found = load_neighbors(neighbors)
        check_neighbors(found, neighbors, 4, "b")

    clips = [write_clip(root / "clips" / name, 2, size=16) for name in "ab"]
    features = root / "features"
    images = FolderStore(root / "clips")
    encoder = small_encoder()

    def read_features() -> None:
        encode_all(encoder, images, features)

    read_features()
    return [
        *readers,
        Reader("neighbors", neighbors, read_neighbors),
        Reader(
            "bytes of a frame",
            clips[0] / "00000.jpg",
            lambda: same_bytes(FolderStore(root / "clips"), 1),
            share=0.3,
        ),
        Reader("kept features", features, read_features, share=0.2),
    ]


def label_readers(root: Path) -> list[Reader]:
    """Readers of masks, points, joints and lists of clips."""
    root.mkdir(parents=True)
    mask, points, rows = root / "mask.png", root / "points.csv", root / "points.json"
    mat, packed, joints, names = (root / n for n in ("a.mat", "b.mat", "joints.npz", "val.txt"))
    mask.write_bytes(image_bytes("png", "P"))
    points.write_text("frame,name,x,y\n0,nose,1.5,2\n0,hand,,\n3,nose,4,5\n")
    rows.write_text(json.dumps([{"frame": frame, "name": "nose", "x": 1.5, "y": 2} for frame in (0, 3)]))
    for path, compressed in ((mat, False), (packed, True)):
        write_mat(path, {"pos_img": np.zeros((2, 15, 3))}, compressed)
    np.savez(joints, joints=np.zeros((2, 15, 3)))
    names.write_text("bear\ncamel\n")
    clip = Clip("clip", 4 * (mask,), (root / "keypoints.csv",))
    clip.truth[0].write_text("frame,name,x,y,visible\n0,nose,1.5,2,1\n0,hand,,,0\n3,nose,4,5,1\n")
    stopped, done = root / "stopped" / UNFINISHED, root / "done" / CARD
    settings = {"encoder": "default", "edges": True}
    with keep_unfinished(stopped.parent, settings, "fine") as kept:
        kept.put(AHEAD, 0, torch.rand(2, 3, 4))
    done.parent.mkdir()
    done.write_text(json.dumps({"command": files.digest(settings, DIGITS)}))

    def resume() -> None:
        find_unfinished(stopped.parent, settings)
        with keep_unfinished(stopped.parent, settings, "fine") as kept:
            kept.get(AHEAD, 0)

    def repeat() -> None:
        with contextlib.suppress(DoneError):
            find_unfinished(done.parent, settings)

    return [
        Reader("unfinished propagation", stopped, resume),
        Reader("finished propagation", done, repeat, share=0.3),
        Reader("mask ids", mask, lambda: read_ids(mask)),
        Reader("mask colors", mask, lambda: load_mask(mask)),
        Reader("points CSV", points, lambda: read_points([points])),
        Reader("points JSON", rows, lambda: read_points([rows])),
        Reader("mat file", mat, lambda: read_mat(mat)),
        Reader("mat file, compressed", packed, lambda: read_mat(packed)),
        Reader("joints.npz", joints, lambda: read_joints(joints, (2, 15, 3))),
        Reader("keypoints.csv", clip.truth[0], lambda: read_keypoints(clip)),
        Reader("list of clips", names, lambda: read_list(names)),
        Reader("truth", names, lambda: fingerprint([names])),
    ]


def weight_readers(root: Path) -> list[Reader]:
    """Readers of settings, checkpoints and encoders, and of what a run folder holds."""
    root.mkdir(parents=True)
    encoder = small_encoder()
    run, folder, torch_file, config = root / "run", root / "timm", root / "small.pth", root / "config.json"
    run.mkdir()
    card = {"vit": SIZES | {"layer_scale": 1.0}}
    (run / "encoder.json").write_text(json.dumps(card))
    save_file(encoder.backbone.state_dict(), run / "encoder.safetensors")
    torch.save({"model": encoder.backbone.state_dict(), "epoch": 3}, torch_file)
    alone = export(encoder, root / "alone.safetensors", "safetensors").path
    export(encoder, folder, "timm")
    hub = export(encoder, root / "hub", "hub", "other").path
    save_config(tiny(), config)
    old = shutil.copytree(Path(__file__).parent / "training" / "old_run", root / "old")
    unlisted = shutil.copytree(old, root / "unlisted") / "checkpoint.pt"
    unlisted.with_suffix(".json").unlink()
    checkpoint, metrics, normal = old / "checkpoint.pt", root / "metrics.jsonl", root / "preprocessor.json"
    metrics.write_text('{"step": 1, "total": 2.0}\n{"step": 2, "total": 1.5}\n')
    normal.write_text(json.dumps({"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.2, 0.2]}))
    init = Init("default", "abc", {}, [])
    record_init(init, root)
    row = {"weights": "abc", "scores": {"rendered": {"J&F": 0.5}}, "cycle": 0.5}
    write_best(root, encoder.backbone.state_dict(), Best(2, 0.5, "way"), row, tiny())
    note_environment(root, None, torch.device("cpu"), None, resumes=False)  # type: ignore[arg-type]
    environment, note = root / "environment.json", root / "lock.json"
    rate = root / "fps.txt"
    rate.write_text("29.97\n")
    note.write_text(json.dumps({"pid": 1, "host": "here"}))

    def read_checkpoint(path: Path = checkpoint) -> None:
        load_newest(path, lambda path: read_state(path, "cpu"), lambda line: None)

    def discover() -> None:
        assert isinstance(encoder.backbone, VisionTransformer)
        load_discovery(encoder.backbone, str(run))

    def read_card_of_run() -> None:
        ship(load_encoder(run), root / "shipped")
        shutil.rmtree(root / "shipped")

    def read_init() -> None:
        record_init(init, root)

    def read_environment() -> None:
        note_environment(root, None, torch.device("cpu"), None, resumes=True)  # type: ignore[arg-type]

    return [
        Reader("config.json", config, lambda: load_config(config)),
        Reader("encoder.json", run / "encoder.json", lambda: load_encoder(run), share=0.2),
        Reader("encoder.safetensors", run / "encoder.safetensors", lambda: load_encoder(run), share=0.2),
        Reader("encoder of a discovery", run / "encoder.safetensors", discover, share=0.2),
        Reader("exported safetensors", alone, lambda: load_encoder(alone), share=0.2),
        Reader("exported config.json", folder / "config.json", lambda: load_encoder(folder), share=0.2),
        Reader("hub config.json", hub / "config.json", lambda: load_encoder(f"hf:{hub}"), share=0.2),
        Reader("card of a twin", run / "encoder.json", lambda: load_encoder(f"untrained:{run}"), share=0.1),
        Reader("torch checkpoint", torch_file, lambda: load_encoder(torch_file), share=0.2),
        Reader("exported card", run / "encoder.json", read_card_of_run, share=0.05),
        Reader("checkpoint.json", checkpoint.with_suffix(".json"), read_checkpoint, share=0.1),
        Reader("checkpoint.pt", checkpoint, read_checkpoint, share=0.1),
        Reader("checkpoint.pt, not listed", unlisted, partial(read_checkpoint, unlisted), share=0.1),
        Reader("matching.safetensors", old / "matching.safetensors", lambda: load_matcher(old), share=0.2),
        Reader("encoder.json of a matcher", old / "encoder.json", lambda: load_matcher(old), share=0.2),
        Reader("metrics.jsonl", metrics, lambda: forget_after(metrics, 1), share=0.5),
        Reader("preprocessor_config.json", normal, lambda: read_normalization(normal)),
        Reader("init.json", root / "init.json", read_init, share=0.5),
        Reader("best encoder", root / BEST, lambda: read_best(root)),
        Reader("fps.txt", rate, lambda: read_rate(rate)),
        Reader("environment.json", environment, read_environment, share=0.5),
        Reader("frames of a run", environment, lambda: frames_of(environment)),
        Reader("lock.json", note, lambda: files._holder(note)),
    ]


def write_video(
    path: Path, codec: str, size: tuple[int, int] = (48, 64), frames: int = 8, pixels: str | None = None
) -> Path:
    """A small video of a square that moves over gray."""
    import av

    chosen = pixels or PIXELS.get(codec, "yuv420p")
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(os.fspath(path), "w", format=FORMATS.get(path.suffix[1:])) as container:
        stream: Any = container.add_stream(codec, rate=8)
        stream.height, stream.width, stream.pix_fmt = *size, chosen
        for index in range(frames):
            image = np.full((*size, 3), 20 * index, dtype=np.uint8)
            image[index : index + 9, index : index + 9] = 255
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            container.mux(stream.encode(frame.reformat(format=chosen)))
        container.mux(stream.encode())
    return path


def read_video(path: Path) -> None:
    """Read a video as `propagate`, `prepare` and `check` do; only the last never refuses one."""
    probe(path.parent, path.name, full=False)
    with contextlib.suppress(InputError):
        list(SampledVideo(path, Fraction(2), 32))
    list(FileVideo(path))


def video_readers(root: Path) -> list[Reader]:
    """Readers of videos in many containers."""
    paths = [write_video(root / f"{codec}.{suffix}", codec) for suffix, codec in VIDEOS.items()]
    return [Reader(f"video {path.suffix[1:]}", path, partial(read_video, path), share=0.15) for path in paths]


def prepare_readers(root: Path) -> list[Reader]:
    """Readers of a store that is being prepared, and of what is said of a finished one."""
    for name in "ab":
        write_clip(root / "frames" / name, 2, size=16)
    store, whole, copy = root / "store", root / "whole", root / "copy"
    for number in (1, 2):
        prepare(root / "frames", store, part=(number, 2), engine="here")
    prepare(root / "frames", whole, engine="here")

    def finish() -> None:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(store, copy, copy_function=link)
        prepare(root / "frames", copy, part=(1, 2), engine="here")
        summarize(merge(copy))

    task = Task(
        root / "frames",
        root / "alone",
        Settings("frames", None, None, 90),
        0,
        (Item("a", "a", ("00000.jpg",), 9),),
    )
    task.trying.parent.mkdir(parents=True)
    task.trying.write_text("0 0")

    def pack_again() -> None:
        shutil.rmtree(root / "again", ignore_errors=True)
        prepare(root / "frames" / "b", root / "again", images=True, engine="here")

    return [
        Reader("videos that killed a process", task.trying, lambda: write_shard(task), share=0.2),
        Reader("image that is packed", root / "frames" / "b" / "00001.jpg", pack_again, share=0.05),
        Reader("plan.json", store / "plan.json", finish, share=0.1),
        Reader("parts/*.json", record_path(store, 0), finish, share=0.1),
        Reader("skipped.csv", whole / "skipped.csv", lambda: summarize(PackedStore(whole)), share=0.5),
    ]


def link(source: str, target: str) -> None:
    """Make one file appear in two places, also a pipe."""
    os.link(source, target)


def run_readers(root: Path) -> list[Reader]:
    """Readers of a run and its scores, for reports and figures."""
    save_config(tiny(), root / "config.json")
    line = {"total": 2.0, "dino": 1.0, "gradient_norm_backbone": 3.0, "samples_per_second": 9.5}
    cost = {"data_wait": 0.1, "memory_gib": 0.5, "health": {"state": "learning", "patch_rank": 3.0}}
    lines = [json.dumps({"step": step} | line | cost) + "\n" for step in (1, 2, 3)]
    (root / "metrics.jsonl").write_text("".join(lines))
    (root / "environment.json").write_text(json.dumps({"frames": "rendered", "torch": "2"}))
    scores = dict.fromkeys(Rendered.score_names, 0.5)
    result = {
        "scores": scores,
        "interval": {name: [0.4, 0.6] for name in scores},
        "clips_from": "rendered",
        "protocol": {"name": "tcore", "context": 3},
        "binary": False,
        "truth": "abc",
        "clips": {name: scores | {"input": [64, 64], "seconds": 1.0} for name in ("one", "two")},
        "differs": [],
    }
    card = {
        "encoder": {"name": "small", "weights": "abc"},
        "benchmarks": {"rendered": result},
        "versions": {"torch": "2"},
        "device": "cpu",
        "seconds": 2.0,
    }
    (root / "eval").mkdir()
    (root / "eval" / "results.json").write_text(json.dumps(card))
    quick = dict.fromkeys(("region", "boundary", "part_iou", "pck"), 0.5)
    (root / "results.json").write_text(json.dumps({"heldout_videos": 2, "scores": {"trained": quick}}))
    Image.new("RGB", (16, 16)).save(root / "picture.png")
    row = {"weights": "abc", "way": "way", "scores": {"rendered": scores}, "interval": {}, "cycle": 0.5}
    for step in (1, 2):
        add_row(root / "checkpoints", root, step, row)
    table = root / "checkpoints" / "checkpoints.json"
    benchmark, kept = Rendered.open(1, RENDERED), root / "clips" / "rendered" / "one.json"
    kept.parent.mkdir(parents=True)
    clip: dict[str, Any] = {"seconds": 1.0, "frames": 5, "input": [64, 64]}
    kept.write_text(
        json.dumps(
            {"key": "key", "saved": False, "sha256": files.digest(clip, sort_keys=False), "result": clip}
        )
    )

    other = root.parent / "another"
    files.write_text(other / "eval" / "results.json", json.dumps(card))

    def report() -> None:
        runs = read_runs([root, other])
        for describe in SECTIONS.values():
            list(describe(runs))

    def read_table() -> None:
        trajectory_table(read_checkpoints(table))

    def read_kept() -> None:
        read_result(root / "clips", benchmark, "one", "key", False)

    return [
        Reader("metrics.jsonl of a report", root / "metrics.jsonl", report, share=0.5),
        Reader("environment.json of a report", root / "environment.json", report, share=0.5),
        Reader("score card of a report", root / "eval" / "results.json", report, share=0.5),
        Reader("results of a quickstart", root / "results.json", report, share=0.5),
        Reader("checkpoints.json of a report", table, report, share=0.5),
        Reader("checkpoints.json", table, read_table),
        Reader(
            "score card", root / "eval" / "results.json", lambda: worst_clips(read_card(root / "eval"), 3)
        ),
        Reader("picture", root / "picture.png", lambda: picture_data(root / "picture.png")),
        Reader("kept clip", kept, read_kept),
    ]


def lab_readers(root: Path) -> list[Reader]:
    """Readers of tables of rows, and of what a lab wrote."""
    rows, plan = root / "rows.json", ablation.Plan("quickstart")
    job = Job(Row("fast"), 0, root / "out" / "fast" / "seed-0")
    scores = {"J&F": 0.5, "J": 0.5, "F": 0.5}
    card = {"benchmarks": {"davis": {"scores": scores, "clips": {"a": scores, "b": scores}}}}
    started, done = job.folder / STARTED, job.folder / DONE
    results = job.folder / "scores" / "results.json"
    results.parent.mkdir(parents=True)
    rows.write_text(json.dumps([{"name": "fast", "flags": "--optim.base-lr 0.004"}]))
    started.write_text(json.dumps(ablation.commands_of(job, plan)))
    done.write_text(json.dumps({"commands": ablation.commands_of(job, plan), "seconds": [60.0, 5.0]}))
    results.write_text(json.dumps(card))

    def read_started() -> None:
        done.rename(done.with_suffix(".aside"))
        try:
            ablation.is_done(job, plan)
        finally:
            done.with_suffix(".aside").rename(done)

    return [
        *comparison_readers(root / "methods" / "quick"),
        Reader("rows of a lab", rows, lambda: ablation.read_table(str(rows))),
        Reader("commands.json", started, read_started),
        Reader("lab.json", done, lambda: ablation.is_done(job, plan)),
        Reader("lab.json of a table", done, lambda: ablation.collect(root / "out", [job.row])),
        Reader("scores of a lab", results, lambda: ablation.collect(root / "out", [job.row])),
    ]


def comparison_readers(row: Path) -> list[Reader]:
    """Readers of a row of `tcore lab methods`."""
    run, about = row / "seed-0", {"config": to_dict(tiny())}
    result = {"main": "J", "scores": {"J": 0.5, "F": 0.4}, "interval": {"J": [0.4, 0.6]}}
    known = {
        run / "job.json": about | {"recipe": "quickstart", "datasets": [["davis", "d", True]]},
        run / "cost.json": {"at_a_time": 1, "device": "cpu"},
        run / "scores.json": {"d": {"tcore": result, "tcore-fine": result}},
        row / "speed.json": about | {"samples_per_second": 3.0, "gib": 0.5},
    }
    for path, content in (known | {run / DONE: {}, run / "run" / "config.json": about["config"]}).items():
        files.write_text(path, json.dumps(content))

    def read() -> None:
        list(markdown([collect_row(row)]))

    return [Reader(f"{path.name} of a comparison", path, read) for path in known]
