"""Check a benchmark on disk: every clip that the official list names, and every file that it needs."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from tcore.data.findings import Findings, commonest, for_each
from tcore.data.images import BAD_IMAGE, image_problem, open_image
from tcore.device import num_cores
from tcore.errors import InputError
from tcore.evaluation import davis, jhmdb, vip
from tcore.evaluation.masks import VOID, MaskClip, chosen_names, need_folder, read_ids

Benchmark = Literal["davis", "vip", "jhmdb"]
OFFICIAL = {"davis": 30, "vip": 50, "jhmdb": 268}  # clips that published numbers are measured on
DAVIS_2016, DAVIS_OBJECTS = 20, 61
JHMDB_ACTIONS = 21
TOLD = 20  # problems that are printed; all of them are in the JSON


class ClipCheck(NamedTuple):
    """What one clip holds, and what is wrong with it."""

    problems: tuple[str, ...] = ()
    frames: int = 0
    sizes: tuple[tuple[int, int], ...] = ()
    ids: frozenset[int] = frozenset()
    """Ids of the first mask."""
    masks: int = 0


def recognize(root: Path) -> Benchmark | None:
    """The benchmark whose layout a folder has."""
    if (root / "JPEGImages").is_dir() or (root / "ImageSets").is_dir():
        return "davis"
    if (root / "Rename_Images").is_dir() or (root / "joint_positions").is_dir():
        return "jhmdb"
    if (root / "Annotations" / "Category_ids").is_dir() or (root / "lists" / "val_videos.txt").is_file():
        return "vip"
    return None


def check_benchmark(name: Benchmark, root: Path) -> Findings:
    """Check a benchmark; every missing or broken file is an error of its own."""
    title = {"davis": "DAVIS", "vip": "VIP", "jhmdb": "JHMDB"}[name]
    findings = Findings(f"the {title} benchmark, or data laid out like it", str(root))
    try:
        work, names, listed = _work(name, root)
    except InputError as error:
        findings.add("error", f"{error} See docs/evaluate.md for the layout.")
        return findings
    checks = list(for_each(work, names, "clips", num_cores()))
    frames, whole = sum(check.frames for check in checks), sum(not check.problems for check in checks)
    _say_clips(findings, name, len(names), whole, listed)
    sizes = [f"{width}x{height}" for check in checks for height, width in check.sizes]
    findings.say("frames", f"{frames:,}; sizes of clips {commonest(sizes)}", frames=frames)
    if name == "davis":
        _say_objects(findings, checks, len(names))
    if name == "jhmdb":
        _say_splits(findings, root)
    problems = [problem for check in checks for problem in check.problems]
    findings.figures["clip_problems"] = problems
    for problem in problems[:TOLD]:
        findings.add("error", problem)
    if len(problems) > TOLD:
        findings.add("error", f"{len(problems) - TOLD:,} more such problems; --json FILE lists them all.")
    if problems:
        findings.add(
            "error", f"get these files from the official {title} archive once more, then check again."
        )
    return findings


def _work(name: Benchmark, root: Path) -> tuple[Callable[[str], ClipCheck], list[str], bool]:
    """How to check a clip, the names of the clips, and whether an official list chose them."""
    if name == "jhmdb":
        images = need_folder(root, ("Rename_Images",), "frames")
        joints = need_folder(root, ("joint_positions",), "joints")
        chosen, listed = jhmdb.chosen_clips(root, images)
        names = [f"{action}/{clip}" for action, clip in chosen]
        return lambda clip: check_joints(clip, images, joints), _need(names, images), listed
    reader, lists = (davis, davis.LISTS) if name == "davis" else (vip, vip.LISTS)
    folders = ("JPEGImages/480p", "JPEGImages") if name == "davis" else ("Images",)
    images = need_folder(root, folders, "frames")
    labels = ("Annotations/480p", "Annotations") if name == "davis" else ("Annotations/Category_ids",)
    masks = need_folder(root, labels, "masks")
    names, listed = chosen_names(root, lists, images)
    return lambda clip: check_masks(clip, reader.find_clip, images, masks), _need(names, images), listed


def _need(names: list[str], images: Path) -> list[str]:
    if not names:
        raise InputError(f"no clips under {images}: need a folder of frames for each.")
    return names


def check_masks(
    name: str, find_clip: Callable[[str, Path, Path], MaskClip], images: Path, masks: Path
) -> ClipCheck:
    """Open every frame and decode every mask of a clip."""
    try:
        clip = find_clip(name, images, masks)
    except InputError as error:
        return ClipCheck((str(error),))
    problems, sizes = [], {}
    for path in clip.frames:
        try:
            sizes[path.stem] = _decoded_size(path)
        except InputError as error:
            problems.append(str(error))
    ids: frozenset[int] = frozenset()
    for path in clip.masks:
        try:
            mask = read_ids(path)
        except InputError as error:
            problems.append(str(error))
            continue
        if path == clip.masks[0]:
            ids = frozenset(np.unique(mask).tolist())
        if mask.shape != sizes.get(path.stem, mask.shape):
            problems.append(f"mask {path} is {_size(mask.shape)}, its frame {_size(sizes[path.stem])}.")
    return ClipCheck(
        tuple(problems), len(clip.frames), tuple(sorted(set(sizes.values()))), ids, len(clip.masks)
    )


def check_joints(name: str, images: Path, joints: Path) -> ClipCheck:
    """Open every frame of a clip and read its joints."""
    try:
        action, _, short = name.partition("/")
        clip = jhmdb.find_clip(action, short, images, joints)
        jhmdb.read_truth(clip)
        sizes = {_decoded_size(path) for path in clip.frames}
    except InputError as error:
        return ClipCheck((str(error),))
    return ClipCheck((), len(clip.frames), tuple(sorted(sizes)))


def _decoded_size(path: Path) -> tuple[int, int]:
    """Height and width of an image that can be decoded to its end."""
    try:
        with open_image(path) as image:
            size = image.height, image.width
            image.draft("L", (64, 64))  # all of a JPEG is read, but little of it is computed
            image.load()
            return size
    except BAD_IMAGE as error:
        raise InputError(f"cannot read frame {path}: {image_problem(error, path)}.") from error


def _size(shape: Sequence[int]) -> str:
    return f"{shape[1]}x{shape[0]}"


def _say_clips(findings: Findings, name: Benchmark, count: int, whole: int, listed: bool) -> None:
    official = OFFICIAL[name]
    source = "of the official list" if listed else "found; there is no official list, so all are used"
    findings.say(
        "clips",
        f"{whole:,} whole of {count:,} {source}",
        clips=count,
        whole=whole,
        listed=listed,
        official=official,
    )
    if whole in (official, DAVIS_2016 if name == "davis" else official) and whole == count:
        return
    needed = {
        "davis": "ImageSets/2017/val.txt names 30 (DAVIS-2017 val; 20 in DAVIS-2016)",
        "vip": "lists/val_videos.txt names 50",
        "jhmdb": "splits/ACTION_test_split1.txt name 268",
    }[name]
    findings.add(
        "warning",
        f"{whole:,} of {official} clips are here and whole: {needed}; "
        "scores on other clips compare with nothing published.",
    )


def _say_objects(findings: Findings, checks: Sequence[ClipCheck], count: int) -> None:
    """Objects of the first masks; ids of 0 and 255 alone are a truth of one object."""
    binary = [check for check in checks if check.ids and check.ids <= {0, VOID} and VOID in check.ids]
    objects = sum(max(check.ids - {VOID}, default=0) for check in checks if check not in binary) + len(binary)
    findings.say("objects", f"{objects:,} in the first masks", objects=objects, binary=len(binary))
    if binary:
        findings.add(
            "advice",
            f"masks of {len(binary):,} of {count:,} clips hold only 0 and 255, as in DAVIS-2016: "
            "evaluate with --binary.",
        )
    first_only = sum(check.masks == 1 and not check.problems for check in checks)
    if first_only:
        findings.add(
            "warning",
            f"{first_only:,} of {count:,} clips have no masks beyond the first frame, as in the test sets: "
            "labels can be carried through them, but not scored; use val.",
        )
    elif not binary and count == OFFICIAL["davis"] and objects != DAVIS_OBJECTS:
        findings.add("warning", f"{objects} objects, where DAVIS-2017 val has {DAVIS_OBJECTS}: other masks?")


def _say_splits(findings: Findings, root: Path) -> None:
    found = len(list((root / "splits").glob("*_test_split1.txt")))
    findings.say("splits", f"{found} of {JHMDB_ACTIONS} actions have a list of split 1", split_files=found)
    if found < JHMDB_ACTIONS:
        findings.add(
            "warning",
            f"{JHMDB_ACTIONS - found} of {JHMDB_ACTIONS} files splits/ACTION_test_split1.txt are missing "
            f"under {root}: put them there, or clips of other splits are scored too.",
        )
