"""`tcore check`: recognize what a folder holds, check it, draw what training would see of it."""

import itertools
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Literal

from tcore.config import Config
from tcore.data.check import check_images, check_store
from tcore.data.check_videos import check_videos
from tcore.data.findings import Findings
from tcore.data.images import BAD_IMAGE, IMAGE_SUFFIXES, open_image
from tcore.data.packed import STORE
from tcore.data.stores import VIDEO_SUFFIXES, FolderStore, FrameStore, ImageStore, PackedStore
from tcore.errors import InputError
from tcore.evaluation import check as benchmark
from tcore.files import write_text
from tcore.show.sheet import draw_sheet
from tcore.validation import validate

Kind = Literal["auto", "frames", "images", "videos", "davis", "vip", "jhmdb"]
FOLDERS, IMAGES = 40, 6  # folders, and images of each, that are opened to tell frames from photographs


def check(
    path: Path,
    config: Config,
    *,
    kind: Kind = "auto",
    sample: int = 2000,
    full: bool = False,
    sheet: Path | None = None,
    report: Path | None = None,
) -> Findings:
    """Check a store, a folder of videos or images, or a benchmark; sheet and report go outside of it."""
    if not path.is_dir():
        raise InputError(f"{path} {'is a file' if path.exists() else 'does not exist'}: give a folder.")
    if sample < 1:
        raise InputError(f"--sample {sample}: need 1 or more.")
    config = validate(config)
    for file in (sheet, report):
        refuse_inside(path, file)
    found = recognize(path) if kind == "auto" else kind
    store: FrameStore | None = None
    if found == "davis" or found == "vip" or found == "jhmdb":
        findings = benchmark.check_benchmark(found, path)
    elif found == "videos":
        findings, store = check_videos(path, config, sample=sample, full=full)
    elif found == "images":
        opened = FrameStore.open(path)
        store = ImageStore(opened) if isinstance(opened, FolderStore) else opened
        findings = check_images(str(path), store, config, sample=sample, full=full)
        # Neighbors are found later; the crops of the images themselves can be seen now.
        config = replace(
            config,
            auxiliary="none",
            sandwich=replace(config.sandwich, short_videos="repeat", offset_seconds=None),
        )
    else:
        store = FrameStore.open(path)
        findings = check_store(store, str(path), config, sample=sample, full=full)
    if sheet is not None:
        say_sheet(findings, store, config, sheet)
    if report is not None:
        write_text(report, json.dumps(findings.to_json(), indent=1) + "\n")
    return findings


def say_sheet(findings: Findings, store: FrameStore | None, config: Config, sheet: Path) -> None:
    """Draw the contact sheet where there are samples to be drawn."""
    if store is None:
        findings.say("sheet", "not drawn: it shows training samples, of frames, videos or images")
        return
    try:
        count = draw_sheet(store, config, sheet, findings.path)
    except InputError as error:
        findings.say("sheet", f"not drawn: {error}")
        return
    findings.say("sheet", f"{sheet} shows {count} samples as training sees them", sheet=str(sheet))


def refuse_inside(dataset: Path, file: Path | None) -> None:
    """Refuse to write into somebody's data."""
    if file is not None and file.resolve().is_relative_to(dataset.resolve()):
        raise InputError(
            f"{file} lies inside {dataset}: nothing is written into a dataset; choose another folder."
        )


def recognize(path: Path) -> Kind:
    """What a folder holds."""
    layout = benchmark.recognize(path)
    if layout is not None:
        return layout
    if not (path / STORE).exists():
        images, videos = count_files(path)
        if videos > images:
            return "videos"
    store = FrameStore.open(path)  # where nothing is found, this says what was expected
    if isinstance(store, PackedStore):
        return "images" if store.kind == "images" else "frames"
    return "images" if isinstance(store, FolderStore) and holds_photographs(store) else "frames"


def count_files(path: Path) -> tuple[int, int]:
    """Images and video files under a folder."""
    suffixes = [
        Path(name).suffix.lower() for _, _, files in os.walk(path, followlinks=True) for name in files
    ]
    return sum(s in IMAGE_SUFFIXES for s in suffixes), sum(s in VIDEO_SUFFIXES for s in suffixes)


def holds_photographs(store: FolderStore) -> bool:
    """Whether most folders hold images of differing sizes, or one image each: no frames of a video."""
    several = [video for video, length in enumerate(store.lengths.tolist()) if length > 1]
    if not several:
        return True
    step = max(1, len(several) // FOLDERS)
    looked = several[::step][:FOLDERS]
    return sum(_differ(store, video) for video in looked) > len(looked) / 2


def _differ(store: FolderStore, video: int) -> bool:
    """Whether the first images of a folder have differing sizes, by their headers."""
    sizes = set()
    for frame in itertools.islice(range(int(store.lengths[video])), IMAGES):
        try:
            with open_image(store.path(video, frame)) as image:
                sizes.add(image.size)
        except BAD_IMAGE:
            continue
    return len(sizes) > 1
