"""A report holds what differs, escapes what users wrote, and asks the network for nothing."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from tcore.cli.main import main
from tcore.config import to_dict
from tcore.files import write_json
from tcore.recipes import RECIPES, recipe
from tcore.show.clips import Clip
from tcore.show.report import draw_figures, nearest_recipe, table, write_report
from tcore.show.runs import read_run
from tests.conftest import Refused

NASTY = 'b <script>alert("x")</script> & |'


@pytest.fixture(scope="module")
def runs(run: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs that differ in two settings; the second one has a name that means something in HTML."""
    folder = tmp_path_factory.mktemp("runs")
    first, second = folder / "first", folder / NASTY.replace("/", "_")
    for copy in (first, second):
        shutil.copytree(run, copy)
    config = json.loads((second / "config.json").read_text())
    config["loss"]["past_future"], config["optim"]["batch"] = 0.5, 8
    (second / "config.json").write_text(json.dumps(config))
    return first, second


@pytest.fixture
def no_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Curves are drawn by the first test alone."""
    monkeypatch.setattr("tcore.show.report.panel_svg", lambda *_: "")


def test_a_report_of_two_runs_tells_them_apart_and_escapes_their_names(
    runs: tuple[Path, Path], tmp_path: Path
) -> None:
    page = write_report(runs, tmp_path / "report.html", draw=False).read_text(encoding="utf-8")
    differing = page[page.index("Settings that differ") : page.index("All settings")]
    rows = re.findall(r"<tr><td>(.*?)</td>", differing)
    assert rows == ["loss.past_future", "optim.batch"]
    assert "<td>20</td><td>0.5</td>" in differing
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page
    assert not re.search(r"https?:", page)
    assert page.count("<script") == 1
    assert page.count("<svg") == page.count("</svg>") >= 9
    assert page.count("<table") == page.count("</table>") > 1


def test_tables_of_a_report_name_no_folders_of_the_machine() -> None:
    texts = ("/home/somebody/runs/a/encoder.safetensors", "timm:vit_small_patch16_224.dino", "and/or")
    shown = [cell["text"] for cell in table(("", "", ""), [texts])["rows"][0]]
    assert shown == [".../a/encoder.safetensors", *texts[1:]]


@pytest.mark.usefixtures("no_panels")
def test_a_report_embeds_figures_scores_and_worst_clips(
    runs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Path] = []
    for name in ("attention_figure", "pca_figure", "propagation_figure"):  # test_figures.py looks at them

        def draw(*values: object, **options: object) -> None:
            (out,) = (value for value in values if isinstance(value, Path))
            drawn.append(out)
            Image.new("RGB", (8, 8)).save(out)

        monkeypatch.setattr(f"tcore.show.report.{name}", draw)
    (runs[0] / "figures").mkdir()
    main(["report", str(runs[0]), "--out", str(tmp_path / "report.html")])
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    figures = sorted(path.name for path in (runs[0] / "figures").iterdir())
    assert figures == ["attention.png", "failures.png", "pca.png", "propagation.png"]
    assert page.count("data:image/jpeg;base64,") == 4
    for words in ("the worst of 2 clips", "rendered-00", "peak memory", "torch", "patch rank"):
        assert words in page
    assert str(runs[0]) not in page  # it may be given to others: no whole paths
    assert re.search(r'<td class="number">[\d.]+ <small>\([\d.]+-[\d.]+\)</small>', page)
    draw_figures(read_run(runs[0]))
    assert len(drawn) == 3, "drawn again"


def test_figures_of_a_run_show_videos_of_its_own_store(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, shown = shutil.copytree(run, tmp_path / "own", ignore=shutil.ignore_patterns("eval")), []
    for clip, count in (("short", 2), ("longest", 8)):
        (tmp_path / "store" / clip).mkdir(parents=True)
        for frame in range(count):
            Image.new("RGB", (64, 48), (9, frame, 9)).save(tmp_path / "store" / clip / f"{frame}.png")
    noted = json.loads((copy / "environment.json").read_text())
    (copy / "environment.json").write_text(json.dumps(noted | {"frames": str(tmp_path / "store")}))
    for name in ("attention_figure", "pca_figure", "correspondence_figure"):

        def draw(encoder: object, clip: Clip, out: Path, **options: object) -> None:
            shown.append((out.stem, clip.source, clip.names[-1]))

        monkeypatch.setattr(f"tcore.show.report.{name}", draw)
    draw_figures(read_run(copy))
    assert shown == [
        ("attention", "longest", "frame 5"),
        ("pca", "longest", "frame 7"),
        ("correspondence", "longest", "frame 7"),
    ]


@pytest.mark.usefixtures("no_panels")
def test_a_report_names_the_recipe_and_shows_curves_before_settings(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "short", ignore=shutil.ignore_patterns("eval", "encoders"))
    (copy / "config.json").write_text(json.dumps(to_dict(recipe("vits16-short", {"optim.batch": 7}))))
    page = write_report([copy], tmp_path / "report.html", draw=False).read_text(encoding="utf-8")
    assert "<td>vits16-short, 1 setting changed</td>" in page
    assert page.index('id="training"') < page.index('id="settings"')
    differing = page[page.index("Settings that differ") : page.index("All settings")]
    assert re.findall(r"<tr><td>(.*?)</td>", differing) == ["optim.batch"]


def test_a_missing_number_stands_where_the_numbers_of_its_column_do() -> None:
    rows = table(("name", "score"), [("a", 1.0), ("b", None)])["rows"]
    assert [[cell["number"] for cell in row] for row in rows] == [[False, True]] * 2


def test_published_rows_stand_beside_scores_on_a_public_benchmark(
    runs: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "scores"
    shutil.copytree(runs[0] / "eval", folder)
    card = json.loads((folder / "results.json").read_text())
    rendered = card["benchmarks"].pop("rendered")
    scores = {name: rendered["scores"][name] for name in ("J&F", "J", "F")}
    card["benchmarks"]["davis"] = rendered | {"scores": scores, "differs": ["3 clips instead of 30"]}
    (folder / "results.json").write_text(json.dumps(card))
    page = write_report([folder], tmp_path / "report.html").read_text(encoding="utf-8")
    assert '<tr class="ours"><td>scores</td>' in page
    assert '<td>T-CoRe, K400, 400 ep</td><td class="number">64.7</td>' in page
    warning = page.index("not comparable with the published rows: 3 clips instead of 30")
    assert warning < page.index("T-CoRe, K400")


def test_encoders_are_compared_with_the_first_one_on_the_same_clips(
    runs: tuple[Path, Path], tmp_path: Path
) -> None:
    card = json.loads((runs[0] / "eval" / "results.json").read_text())
    scored = card["benchmarks"]["rendered"]
    cards = (("a", 0.0, "x", False), ("b", 0.01, "x", False), ("c", 0.05, "y", False), ("d", 0.05, "x", True))
    for name, by, truth, binary in cards:
        clips = {clip: found | {"J&F": found["J&F"] + by} for clip, found in scored["clips"].items()}
        clips["damaged"] = {"J&F": None}
        own = scored | {"clips": clips, "truth": truth, "binary": binary}
        write_json(tmp_path / name / "results.json", card | {"benchmarks": {"rendered": own}})
    report = write_report([tmp_path / name for name in "abcd"], tmp_path / "report.md", draw=False)
    lines = report.read_text(encoding="utf-8").splitlines()
    (at,) = [number for number, line in enumerate(lines) if "J&F, points" in line]
    assert lines[at + 2] == "| b | +1.0 (± 0.0) |"
    assert not lines[at + 3].startswith("|"), "other true labels, or other objects"


def test_a_markdown_report_has_the_same_tables(runs: tuple[Path, Path], tmp_path: Path) -> None:
    text = write_report(runs, tmp_path / "report.md", draw=False).read_text(encoding="utf-8")
    assert "| loss.past_future | 20 | 0.5 |" in text
    assert "\\<script>" in text
    assert "| loss: dino, first |" in text


def test_what_is_no_run_is_refused_by_name(tmp_path: Path, refused: Refused) -> None:
    assert "is not a run" in refused("report", tmp_path, "--out", "a.html")
    assert "does not exist" in refused("report", tmp_path / "x", "--out", "a.html")
    assert ".html" in refused("report", tmp_path, "--out", "a.doc")
    assert "run folder" in refused("report", "--out", "a.html")


@pytest.mark.usefixtures("no_panels")
def test_what_a_recipe_leaves_to_the_machine_is_no_changed_setting(
    runs: tuple[Path, Path], tmp_path: Path
) -> None:
    page = write_report(runs[:1], tmp_path / "report.md", draw=False).read_text(encoding="utf-8")
    assert "optim.precision" not in page[page.index("Settings that differ") : page.index("All settings")]
    assert "| optim.precision | fp32 |" in page
    config = RECIPES["quickstart"].config
    resolved = replace(config, optim=replace(config.optim, precision="fp32"))
    assert nearest_recipe(resolved) == ("quickstart", 0)
    assert nearest_recipe(replace(config, optim=replace(config.optim, batch=7))) == ("quickstart", 1)
