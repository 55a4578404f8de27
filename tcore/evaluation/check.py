"""Check a benchmark on disk: every clip that the official list names, and every file that it needs."""

from pathlib import Path
from typing import Any

from tcore.data.findings import Findings, commonest, for_each
from tcore.data.images import BAD_IMAGE, image_problem, open_image
from tcore.device import num_cores
from tcore.errors import InputError
from tcore.evaluation import benchmarks
from tcore.evaluation.benchmarks.benchmark import Benchmark, Layout
from tcore.evaluation.resize import Size
from tcore.text import format_size


def recognize(root: Path) -> str | None:
    """The benchmark whose layout a folder has."""
    for benchmark in benchmarks.all_benchmarks():
        if any((root / name).exists() for name in benchmark.recognized_by):
            return benchmark.name
    return None


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
    whole = [clip for clip, problems, _ in checks if not problems]
    count, official = len(checks), benchmark.official_clips
    source = "of the official list" if layout.listed else "found; there is no official list, so all are used"
    findings.say(
        "clips",
        f"{len(whole):,} whole of {count:,} {source}",
        clips=count,
        whole=len(whole),
        listed=layout.listed,
        official=official[0] if official else None,
    )
    if official and not (len(whole) == count and count in official):
        findings.add(
            "warning",
            f"{len(whole):,} of {official[0]} clips are here and whole: the official "
            f"{benchmark.official_list}; scores on other clips are not comparable with published ones.",
        )
    frames = sum(clip.length for clip, _, _ in checks if clip)
    sizes = [format_size(*size) for _, _, found in checks for size in sorted(set(found.values()))]
    findings.say("frames", f"{frames:,}; sizes of clips {commonest(sizes)}", frames=frames)
    benchmark.report(findings, root, whole)
    problems = [problem for _, found, _ in checks for problem in found]
    findings.figures["clip_problems"] = problems
    findings.add_errors(problems)
    if problems:
        findings.add("error", f"get these files from the official {name.upper()} archive, then check again.")
    return findings


def check_clip(work: tuple[type[Benchmark], Layout, str]) -> tuple[Any, list[str], dict[str, Size]]:
    """A clip, where its files are there; what is wrong with it; the sizes of its frames, all decoded."""
    benchmark, layout, name = work
    problems: list[str] = []
    sizes: dict[str, Size] = {}
    try:
        clip = layout.find(name)
    except InputError as error:
        return None, [str(error)], sizes
    for path in clip.frames:
        try:
            with open_image(path) as image:
                sizes[path.stem] = image.height, image.width
                image.draft("L", (64, 64))  # all of a JPEG is read, but little of it is computed
                image.load()
        except BAD_IMAGE as error:
            problems.append(f"cannot read frame {path}: {image_problem(error)}.")
    problems += benchmark.check_truth(clip, sizes)
    return clip, problems, sizes
