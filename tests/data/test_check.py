"""What `tcore check` finds in stores, images and video files: each fault is there once, and is named."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tcore.cli.main import main
from tcore.data.check import check_store, check_videos, choose_frames, choose_videos, look_at
from tcore.data.findings import Findings
from tcore.data.probe import VideoFiles, probe
from tcore.data.stores import FrameStore
from tcore.errors import InputError
from tcore.methods import build_sampling
from tcore.recipes import recipe
from tcore.show.check import check
from tests.conftest import Refused
from tests.data.clips import break_jpeg, write_clip
from tests.data.packing import pack
from tests.data.painted import Painted
from tests.evaluation.clips import cut, need_av, write_file

CONFIG = recipe("quickstart", {"runtime.workers": 1})


def told(findings: Findings, level: str) -> str:
    return "\n".join(problem.text for problem in findings.problems if problem.level == level)


def checked(store: FrameStore, **settings: Any) -> Findings:
    config = recipe("quickstart", {"runtime.workers": 1} | settings)
    return check_store(store, "store", config, build_sampling(config, store.fps))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    for number in range(3):
        write_clip(tmp_path / "store" / f"good{number}", 20, seed=number)
    return tmp_path / "store"


def test_a_good_store_has_no_problems_and_nothing_is_written_into_it(store: Path, tmp_path: Path) -> None:
    before = sorted(store.rglob("*"))
    findings = check(store, CONFIG, sheet=tmp_path / "sheet.png")
    assert sorted(store.rglob("*")) == before
    assert findings.problems == []
    assert findings.exit_code == 0
    assert findings.figures["videos"] == findings.figures["usable"] == 3
    assert findings.figures["frames"] == 60
    assert findings.figures["gap_seconds"] == pytest.approx([2.0, 2.0], abs=0.4)


def test_the_command_draws_the_sheet_writes_the_report_and_ends_with_1_where_something_is_wrong(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["check", str(store), *"--recipe quickstart --runtime.workers 1 --optim.batch 4".split()]
    sheet, report = tmp_path / "sheet.png", tmp_path / "report.json"
    main([*words, "--sheet", str(sheet), "--json", str(report)])
    assert f"{sheet}" in capsys.readouterr().out
    with Image.open(sheet) as picture:
        assert picture.width > 1000
    assert json.loads(report.read_text())["videos"] == 3
    with pytest.raises(SystemExit, match="1"):  # settings are the flags of training
        main([*words, "--sandwich.offset-seconds", "9", "9"])
    assert "no usable video" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", "PATH"),
        ("/no/such/folder", "does not exist"),
        ("{store}/good0/00000.jpg", "is a file"),
        ("{store} --sandwich.offset 0.1 0.4", "reaches outside the video"),
        ("{store} --recipe quickstrat", "Did you mean quickstart?"),
        ("{store} --sandwich.ofset 0.1 0.2", "--sandwich.offset "),
        ("{store} --sample 0", "--sample 0"),
        ("{store} --sheet {store}/sheet.png", "nothing is written into a dataset"),
        ("{store} --json {store}/good0/report.json", "nothing is written into a dataset"),
        ("{store} --kind davis --kind nonsense", "nonsense"),
        ("{store}/empty", "no frames under"),
    ],
)
def test_bad_input_is_named(arguments: str, expected: str, store: Path, refused: Refused) -> None:
    (store / "empty").mkdir()
    assert expected in refused("check", *arguments.format(store=store).split())


def test_short_videos_are_counted_and_named(store: Path) -> None:
    write_clip(store / "brief", 6)
    write_clip(store / "single", 1, seed=8)
    findings = check(store, CONFIG)
    assert findings.figures["too_short"] == ["brief", "single"]
    assert "2 videos of fewer than 7 frames, 1 of them with one frame" in told(findings, "warning")
    assert findings.exit_code == 0


def test_settings_decide_what_is_usable(tmp_path: Path) -> None:
    write_clip(tmp_path / "store" / "brief", 6)
    findings = check(tmp_path / "store", CONFIG, kind="frames")
    assert "no usable video: the longest has 6 frames, these settings need 7" in told(findings, "error")
    assert findings.exit_code == 1
    brief = FrameStore.open(tmp_path / "store")
    assert checked(brief, **{"sandwich.short_videos": "repeat"}).figures["usable"] == 1
    seconds = checked(Painted([20] * 3, fps=2.0), **{"sandwich.offset_seconds": (1.0, 1.0)})
    assert seconds.figures["usable"] == 3
    assert seconds.figures["gap_seconds"] == [1.0, 1.0]


def break_one(store: Path) -> None:
    break_jpeg(store / "good1" / "00004.jpg")


def unlink_one(store: Path) -> None:
    (store / "good1" / "00004.jpg").unlink()
    (store / "good1" / "00004.jpg").symlink_to(store / "gone.jpg")


@pytest.mark.parametrize("damage", [break_one, unlink_one])
def test_an_unreadable_frame_is_named_and_an_error(store: Path, damage: Callable[[Path], None]) -> None:
    damage(store)
    findings = check(store, CONFIG)
    error = told(findings, "error")
    assert "1 unreadable frame in 1 of 3" in error
    assert "good1/00004.jpg" in error
    assert list(findings.figures["unreadable"]) == ["good1"]
    assert findings.exit_code == 1
    shutil.rmtree(store / "good1")
    write_clip(store / "brief", 5, seed=7)  # left out anyway
    break_jpeg(store / "brief" / "00002.jpg")
    findings = check(store, CONFIG)
    assert "unreadable" in told(findings, "warning")
    assert findings.exit_code == 0


def test_differing_sizes_copies_and_still_clips_are_named_in_the_report_too(store: Path) -> None:
    Image.new("RGB", (40, 24)).save(store / "good2" / "00003.jpg")
    shutil.copytree(store / "good0", store / "twin")
    shutil.copytree(store / "good0", store / "other")  # the same but for one frame
    Image.new("RGB", (32, 32)).save(store / "other" / "00002.jpg")
    write_clip(store / "statue", 20, seed=9, moving=False)
    findings = check(store, CONFIG, report=store.parent / "check.json")
    report = json.loads((store.parent / "check.json").read_text())
    assert report["ok"] is True
    assert report["differing_sizes"] == ["good2"]
    assert report["duplicates"] == [["good0", "twin"]]
    assert report["still"] == ["statue"]
    assert [problem["text"] for problem in report["problems"]] == [p.text for p in findings.problems]
    for name in ("good2", "good0 = twin", "statue"):
        assert f"({name})" in told(findings, "warning")


def test_motion_is_measured_at_the_distance_of_the_samples() -> None:
    look = look_at(Painted([30]), 0, distance=6, full=False)  # green grows by 1 a frame: luma by .587
    assert np.mean(look.changes) == pytest.approx(6 * 0.587, abs=0.5)
    assert look.num_frames == 30


@pytest.mark.parametrize(
    ("frames", "fps", "remedy"),
    [
        (7200, 2.0, "--sandwich.offset-seconds 1.5 2.5"),
        (80, 2.0, "--sandwich.offset-seconds"),
        (12, 10.0, "--fps"),
    ],
)
def test_samples_that_are_too_far_apart_or_too_near_get_advice(frames: int, fps: float, remedy: str) -> None:
    assert remedy in told(checked(Painted([frames] * 3, fps=fps)), "advice")


def test_splitting_is_advised_where_samples_cross_known_cuts() -> None:
    store = Painted([20] * 4, cuts=(10,), fps=2.0)
    findings = checked(store)
    assert findings.figures["crossing_a_cut"] > 0.9
    assert "--sandwich.cuts split" in told(findings, "advice")
    assert "--sandwich.cuts split" not in told(checked(store, **{"sandwich.cuts": "split"}), "advice")


def test_a_packed_store_is_recognized_and_its_faults_are_found(tmp_path: Path) -> None:
    root = pack(tmp_path / "packed", [[("a", 20), ("b", 20)], [("c", 20)]])
    intact = check(root, CONFIG)
    assert intact.kind == "a packed frame store"
    assert intact.exit_code == 0
    shard = root / "shards" / "000001.tar"
    shard.write_bytes(shard.read_bytes()[:-600])
    findings = check(root, CONFIG)
    assert findings.exit_code == 1
    assert f"{shard}: " in told(findings, "error")


def test_photographs_and_frames_are_distinguished(tmp_path: Path, store: Path) -> None:
    for number in range(6):
        folder = tmp_path / "photos" / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20 + number, 24), (40 * number, 9, 9)).save(folder / f"{number}.jpg")
    shutil.copy(tmp_path / "photos" / "class0" / "2.jpg", tmp_path / "photos" / "class1" / "9.jpg")
    findings = check(tmp_path / "photos", CONFIG)
    assert "images" in findings.kind
    assert findings.figures["images"] == 7
    assert findings.figures["duplicates"] == [["class0/2.jpg", "class1/9.jpg"]]
    assert check(tmp_path / "photos", CONFIG, kind="frames").exit_code == 1
    assert "frame folders" in check(store, CONFIG).kind


def test_a_large_store_is_sampled_by_the_seed_and_says_so(store: Path) -> None:
    assert (
        choose_videos(50, 10, 3, False) == choose_videos(50, 10, 3, False) != choose_videos(50, 10, 4, False)
    )
    assert choose_videos(50, 10, 3, True) == list(range(50))
    findings = check(store, CONFIG, sample=2)
    assert findings.figures["looked_at"] == {"videos": 2, "frames": 40, "everything": False}
    assert "--full" in findings.text()


def test_a_long_video_is_decoded_in_pairs_over_all_of_it() -> None:
    frames = choose_frames(1000, 200, full=False)
    assert len(frames) < 70
    assert {0, 500, 999} <= set(frames)
    assert sum(frame + 200 in frames for frame in frames) >= 32
    assert choose_frames(1000, 200, full=True) == list(range(1000))


def write_video(path: Path, seconds: int, *, moving: bool = True) -> Path:
    """A video whose brightness is its time, so that a frame says where it is from."""
    need_av()
    frames = np.full((10 * seconds, 32, 48, 3), 20, np.uint8)
    frames[:] += (2 * np.arange(10 * seconds) * moving).astype(np.uint8)[:, None, None, None]
    frames[:, :, ::8] = 255  # something to be seen
    return write_file(path, frames)


@pytest.fixture
def videos(tmp_path: Path) -> Path:
    write_video(tmp_path / "videos" / "a.mkv", 10)
    write_video(tmp_path / "videos" / "deep" / "b.mkv", 8)
    return tmp_path / "videos"


@pytest.mark.parametrize("full", [False, True])
def test_video_files_are_described_and_bad_ones_named_with_reasons(videos: Path, full: bool) -> None:
    findings = check(videos, CONFIG, full=full)
    assert findings.exit_code == 0
    assert "h264 (2)" in findings.text()
    assert findings.figures["sizes"] == ["48x32"]
    assert findings.figures["hours"] == pytest.approx(18 / 3600, rel=0.02)
    assert findings.figures["length"] == {"min": 16, "median": 18.0, "max": 20}
    with pytest.raises(InputError, match="no video files under"):
        check_videos(videos / "deep" / "none", CONFIG, build_sampling(CONFIG))
    (videos / "empty.mp4").touch()
    (videos / "text.mp4").write_text("not a video")
    whole = (videos / "a.mkv").read_bytes()
    (videos / "cut.mkv").write_bytes(whole[: len(whole) // 2])
    findings = check(videos, CONFIG, full=full)
    assert set(findings.figures["bad"]) == {"empty.mp4", "text.mp4", "cut.mkv"}
    assert "empty" in findings.figures["bad"]["empty.mp4"]
    assert "cut off" in findings.figures["bad"]["cut.mkv"]
    assert findings.exit_code == 1


def test_a_file_that_ends_after_some_good_frames_is_not_said_to_have_none(videos: Path) -> None:
    cut(write_video(videos / "cut.mp4", 10), 0.5)
    (videos / "text.mp4").write_text("not a video")
    bad = check(videos, CONFIG, full=True).figures["bad"]
    assert "damaged or cut off after its first frame" in bad["cut.mp4"]
    assert "cut off before its first frame" in bad["text.mp4"]


def test_a_short_video_file_a_copy_and_a_still_one_are_named(videos: Path) -> None:
    write_video(videos / "brief.mkv", 2)
    write_video(videos / "statue.mkv", 10, moving=False)
    shutil.copy(videos / "a.mkv", videos / "twin.mkv")
    findings = check(videos, CONFIG)
    assert findings.figures["too_short"] == ["brief.mkv"]
    assert findings.figures["duplicates"] == [["a.mkv", "twin.mkv"]]
    assert findings.figures["still"] == ["statue.mkv"]


@pytest.mark.parametrize("full", [False, True])
def test_first_middle_and_last_part_are_seen_and_frames_come_from_their_time(
    videos: Path, full: bool
) -> None:
    found = probe(videos, "a.mkv", full)
    first, middle, last = (float(np.median(thumb)) for thumb in found.thumbs)
    assert middle - first == pytest.approx(100, abs=25)
    assert last - first == pytest.approx(200, abs=40)
    store = VideoFiles(videos, [found], fps=2.0)
    levels = [int(np.median(frame)) for frame in store.read(0, [0, 10, 4])]
    assert levels == pytest.approx([20, 120, 60], abs=6)
