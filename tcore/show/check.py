"""`tcore check`: recognize what a folder holds, check it, draw what training would see of it."""

from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from tcore import methods
from tcore.config import Config, validate
from tcore.data.check import check_store, check_videos
from tcore.data.findings import Findings
from tcore.data.images import BAD_IMAGE, IMAGE_SUFFIXES, open_image
from tcore.data.packed import STORE
from tcore.data.stores import VIDEO_SUFFIXES, FolderStore, FrameStore, ImageStore, PackedStore, walk_files
from tcore.errors import InputError
from tcore.evaluation import check as benchmark
from tcore.evaluation.benchmarks import datasets
from tcore.files import write_json
from tcore.show.sheet import draw_sheet

Kind = str  # one of these, or the name of a benchmark
KINDS = ("auto", "frames", "images", "videos")
FOLDERS, IMAGES = 40, 6  # folders, and images of each, that are opened to distinguish frames and photographs


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
    config = validate(config)
    for file in (sheet, report):
        if file is not None and file.resolve().is_relative_to(path.resolve()):
            raise InputError(f"{file} is inside {path}: nothing is written into a dataset.")
    if kind not in (*KINDS, *datasets()):
        raise InputError(f"--kind {kind}: need {', '.join((*KINDS, *datasets()))}.")
    found = recognize(path) if kind == "auto" else kind
    store: FrameStore | None = None
    if found in datasets():
        findings = benchmark.check_benchmark(found, path)
    elif found == "videos":
        sampling = methods.build_sampling(config, config.fps)
        findings, store = check_videos(path, config, sampling, sample=sample, full=full)
    elif found == "images":
        store = FrameStore.open(path)
        store = ImageStore(store) if isinstance(store, FolderStore) else store
        findings = check_store(store, str(path), config, None, sample=sample, full=full)
        # Neighbors are found later; the crops of the images themselves can be seen now.
        config = replace(config, source="images", method=config.method.without_neighbors())
    else:
        store = FrameStore.open(path)
        sampling = methods.build_sampling(config, store.fps)
        findings = check_store(store, str(path), config, sampling, sample=sample, full=full)
    if sheet is not None:
        _say_sheet(findings, store, config, sheet)
    if report is not None:
        write_json(report, findings.to_json())
    return findings


def _say_sheet(findings: Findings, store: FrameStore | None, config: Config, sheet: Path) -> None:
    """Draw the contact sheet where there are samples to draw."""
    if store is None:
        findings.say("sheet", "not drawn: it shows training samples, of frames, videos or images")
        return
    try:
        count = draw_sheet(store, config, sheet, findings.path)
    except InputError as error:
        findings.say("sheet", f"not drawn: {error}")
        return
    findings.say("sheet", f"{sheet} shows {count} samples as training sees them", sheet=str(sheet))


def recognize(path: Path) -> Kind:
    """What a folder holds."""
    layout = benchmark.recognize(path)
    if layout is not None:
        return layout
    if not (path / STORE).exists():
        suffixes = Counter(Path(file).suffix.lower() for file in walk_files(path))
        images, videos = (sum(suffixes[s] for s in some) for some in (IMAGE_SUFFIXES, VIDEO_SUFFIXES))
        if videos > images:
            return "videos"
    store = FrameStore.open(path)  # where nothing is found, this says what was expected
    if isinstance(store, PackedStore):
        return "images" if store.kind == "images" else "frames"
    return "images" if isinstance(store, FolderStore) and holds_photographs(store) else "frames"


def holds_photographs(store: FolderStore) -> bool:
    """Whether most folders hold images of differing sizes, or one image each: not frames of a video."""
    several = [video for video, length in enumerate(store.lengths.tolist()) if length > 1]
    opened = several[:: max(1, len(several) // FOLDERS)][:FOLDERS]
    differing = 0
    for video in opened:
        sizes = set()
        for frame in range(min(IMAGES, int(store.lengths[video]))):
            with suppress(*BAD_IMAGE), open_image(store.path(video, frame)) as image:
                sizes.add(image.size)
        differing += len(sizes) > 1
    return differing > len(opened) / 2 or not several
