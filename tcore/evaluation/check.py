"""Check a benchmark on disk: every clip that the official list names, and every file that it needs."""

from pathlib import Path
from typing import Any, NamedTuple

from tcore.data.findings import Findings, commonest, for_each
from tcore.data.images import BAD_IMAGE, image_problem, open_image
from tcore.device import num_cores
from tcore.errors import InputError
from tcore.evaluation import benchmarks
from tcore.evaluation.benchmarks.benchmark import Benchmark, Layout
from tcore.evaluation.resize import Size


class ClipCheck(NamedTuple):
    """One clip, where its files are there, and what is wrong with it."""

    clip: Any = None
    problems: tuple[str, ...] = ()
    sizes: frozenset[Size] = frozenset()


def recognize(root: Path) -> str | None:
    """The benchmark whose layout a folder has."""
    return next((b.name for b in benchmarks.all_benchmarks() if b.recognize(root)), None)


def check_benchmark(name: str, root: Path) -> Findings:
    """Check a benchmark; every missing or broken file is an error of its own."""
    benchmark = benchmarks.find_benchmark(name)
    findings = Findings(f"the {name.upper()} benchmark, or data laid out like it", str(root))
    try:
        layout = benchmark.layout(root)
    except InputError as error:
        findings.add("error", f"{error} See docs/evaluate.md for the layout.")
        return findings
    work = [(benchmark, layout, clip) for clip in layout.names]
    checks = list(for_each(check_clip, work, "clips", num_cores()))
    _say_clips(findings, benchmark, layout, sum(not check.problems for check in checks))
    frames = sum(check.clip.length for check in checks if check.clip)
    sizes = [f"{width}x{height}" for check in checks for height, width in sorted(check.sizes)]
    findings.say("frames", f"{frames:,}; sizes of clips {commonest(sizes)}", frames=frames)
    benchmark.report(findings, root, [check.clip for check in checks if not check.problems])
    problems = [problem for check in checks for problem in check.problems]
    findings.figures["clip_problems"] = problems
    findings.add_errors(problems)
    if problems:
        findings.add(
            "error", f"get these files from the official {name.upper()} archive again, then check again."
        )
    return findings


def check_clip(work: tuple[type[Benchmark], Layout, str]) -> ClipCheck:
    """Decode every frame of a clip and read its true labels."""
    benchmark, layout, name = work
    try:
        clip = layout.find(name)
    except InputError as error:
        return ClipCheck(problems=(str(error),))
    problems, sizes = [], {}
    for path in clip.frames:
        try:
            sizes[path.stem] = _decoded_size(path)
        except InputError as error:
            problems.append(str(error))
    problems += benchmark.check_truth(clip, sizes)
    return ClipCheck(clip, tuple(problems), frozenset(sizes.values()))


def _decoded_size(path: Path) -> Size:
    """Height and width of an image that can be decoded to its end."""
    try:
        with open_image(path) as image:
            size = image.height, image.width
            image.draft("L", (64, 64))  # all of a JPEG is read, but little of it is computed
            image.load()
            return size
    except BAD_IMAGE as error:
        raise InputError(f"cannot read frame {path}: {image_problem(error)}.") from error


def _say_clips(findings: Findings, benchmark: type[Benchmark], layout: Layout, whole: int) -> None:
    count, official = len(layout.names), benchmark.official_clips
    source = "of the official list" if layout.listed else "found; there is no official list, so all are used"
    findings.say(
        "clips",
        f"{whole:,} whole of {count:,} {source}",
        clips=count,
        whole=whole,
        listed=layout.listed,
        official=official[0] if official else None,
    )
    if official and not (whole == count and whole in official):
        findings.add(
            "warning",
            f"{whole:,} of {official[0]} clips are here and whole: {benchmark.official_list}; "
            "scores on other clips are not comparable with published ones.",
        )
