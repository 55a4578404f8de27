"""What `tcore check` finds in stores: each fault is there once, and is named."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tcore.config import Config
from tcore.data import kinetics
from tcore.data.check import choose_videos
from tcore.data.findings import Findings, bars
from tcore.data.look import choose_frames, look_at
from tcore.data.stores import FrameStore
from tcore.recipes import recipe
from tcore.show.check import check
from tests.data.clips import break_jpeg, write_clip
from tests.data.packing import pack
from tests.data.painted import Painted

CONFIG = recipe("quickstart", {"runtime.workers": 1})


def told(findings: Findings, level: str) -> str:
    return "\n".join(problem.text for problem in findings.problems if problem.level == level)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    for number in range(3):
        write_clip(tmp_path / "store" / f"good{number}", 20, seed=number)
    return tmp_path / "store"


def test_a_good_store_has_no_problems(store: Path) -> None:
    findings = check(store, CONFIG)
    assert findings.problems == []
    assert findings.exit_code == 0
    assert findings.figures["videos"] == findings.figures["usable"] == 3
    assert findings.figures["frames"] == 60
    assert "offset 0.15-0.25 of 10.0 s (the median video) = 1.5-2.5 s" in findings.text()


def test_short_videos_are_counted_and_named(store: Path) -> None:
    write_clip(store / "brief", 6)
    write_clip(store / "single", 1, seed=8)
    findings = check(store, CONFIG)
    assert findings.figures["too_short"] == ["brief", "single"]
    assert "2 videos of fewer than 7 frames, 1 of them with one frame" in told(findings, "warning")
    assert findings.exit_code == 0


def test_a_store_without_a_usable_video_is_an_error(tmp_path: Path) -> None:
    write_clip(tmp_path / "store" / "brief", 6)
    findings = check(tmp_path / "store", CONFIG, kind="frames")
    assert "no usable video: the longest has 6 frames, these settings need 7" in told(findings, "error")
    assert findings.exit_code == 1


def test_settings_change_what_is_usable(store: Path) -> None:
    write_clip(store / "brief", 6)
    config = recipe("quickstart", {"sandwich.short_videos": "repeat"})
    assert check(store, config).figures["usable"] == 4
    seconds = recipe("quickstart", {"sandwich.offset_seconds": (1.5, 2.5)})
    findings = check(store, seconds)
    assert findings.figures["usable"] == 3
    assert "offset 1.5-2.5 s = 3-5 frames" in findings.text()


def test_a_broken_jpeg_is_named_and_an_error(store: Path) -> None:
    break_jpeg(store / "good1" / "00004.jpg")
    findings = check(store, CONFIG)
    error = told(findings, "error")
    assert "1 unreadable frame in 1 of 3 videos" in error
    assert "good1/00004.jpg" in error
    assert list(findings.figures["unreadable"]) == ["good1"]
    assert findings.exit_code == 1


def test_a_broken_frame_of_a_video_that_is_left_out_stops_nothing(store: Path) -> None:
    write_clip(store / "brief", 5, seed=7)
    break_jpeg(store / "brief" / "00002.jpg")
    findings = check(store, CONFIG)
    assert "unreadable" in told(findings, "warning")
    assert findings.exit_code == 0


def test_frames_of_differing_sizes_are_named(store: Path) -> None:
    Image.new("RGB", (40, 24)).save(store / "good2" / "00003.jpg")
    findings = check(store, CONFIG)
    assert findings.figures["differing_sizes"] == ["good2"]
    assert "frames of differing sizes (good2)" in told(findings, "warning")


def test_a_copy_is_found_by_its_bytes_and_a_recompressed_one_by_its_looks(store: Path) -> None:
    shutil.copytree(store / "good0", store / "twin")
    (store / "lookalike").mkdir()
    for path in (store / "good1").iterdir():
        with Image.open(path) as image:
            image.resize((48, 48)).save(store / "lookalike" / path.name, quality=70)
    findings = check(store, CONFIG)
    assert findings.figures["duplicates"] == [["good0", "twin"]]
    assert findings.figures["near_duplicates"] == [["good1", "lookalike"]]
    assert "good0 = twin" in told(findings, "warning")
    assert "good1 = lookalike" in told(findings, "advice")


def test_videos_that_share_some_frames_only_are_not_duplicates(store: Path) -> None:
    shutil.copytree(store / "good0", store / "other")
    Image.new("RGB", (32, 32)).save(store / "other" / "00002.jpg")
    assert check(store, CONFIG).figures["duplicates"] == []


def test_a_still_clip_is_named_and_a_moving_one_is_not(store: Path) -> None:
    write_clip(store / "statue", 20, seed=9, moving=False)
    findings = check(store, CONFIG)
    assert findings.figures["still"] == ["statue"]
    assert "statue" in told(findings, "warning")


def test_motion_is_measured_at_the_distance_of_the_sandwich() -> None:
    look = look_at(Painted([30]), 0, distance=6, full=False)  # green grows by 1 a frame: luma by .587
    assert look.motion == pytest.approx(6 * 0.587, abs=0.5)
    assert look.num_frames == 30


@pytest.mark.parametrize(
    ("frames", "said"), [(7200, "9-15 min in one of 60.0 min"), (80, "6-10 s in one of")]
)
def test_long_videos_get_offsets_in_seconds_proposed(frames: int, said: str) -> None:
    from tcore.data.check import check_store

    findings = check_store(Painted([frames] * 3, fps=2.0), "long", CONFIG)
    advice = told(findings, "advice")
    assert "--sandwich.offset-seconds 1.5 2.5, with which 3 videos are usable (now 3)" in advice
    assert said in advice


def test_very_short_videos_are_not_told_to_use_seconds_that_they_do_not_have() -> None:
    from tcore.data.check import check_store

    findings = check_store(Painted([12] * 3, fps=10.0), "brief", CONFIG)
    assert "would leave 0 usable (now 3)" in told(findings, "advice")


def test_splitting_is_advised_where_sandwiches_cross_known_cuts() -> None:
    from tcore.data.check import check_store

    store = Painted([20] * 4, cuts=(10,), fps=2.0)
    findings = check_store(store, "cut", CONFIG)
    assert findings.figures["crossing_a_cut"] > 0.9
    assert "--sandwich.cuts split" in told(findings, "advice")
    split = check_store(store, "cut", recipe("quickstart", {"sandwich.cuts": "split"}))
    assert "--sandwich.cuts split" not in told(split, "advice")


def test_a_packed_store_is_recognized_and_a_truncated_shard_is_an_error(tmp_path: Path) -> None:
    root = pack(tmp_path / "packed", [[("a", 20), ("b", 20)], [("c", 20)]])
    whole = check(root, CONFIG)
    assert whole.kind == "a packed frame store"
    assert whole.exit_code == 0
    shard = root / "shards" / "000001.tar"
    shard.write_bytes(shard.read_bytes()[:-600])
    findings = check(root, CONFIG)
    assert findings.exit_code == 1
    assert f"{shard}: " in told(findings, "error")
    assert "Copy this file again" in told(findings, "error")


def test_photographs_are_told_from_frames(tmp_path: Path, store: Path) -> None:
    for number in range(6):
        folder = tmp_path / "photos" / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20 + number, 24), (40 * number, 9, 9)).save(folder / f"{number}.jpg")
    assert "images" in check(tmp_path / "photos", CONFIG).kind
    assert check(tmp_path / "photos", CONFIG).figures["images"] == 6
    assert check(tmp_path / "photos", CONFIG, kind="frames").exit_code == 1
    assert "frame folders" in check(store, CONFIG).kind


@pytest.mark.parametrize("style", ["abseiling", "train/air_drumming"])
def test_a_part_of_kinetics_is_recognized_by_its_classes(style: str) -> None:
    classes = [style, style.replace("abseiling", "zumba").replace("air_drumming", "tai_chi"), "archery"]
    names = [f"{name}/{number:06d}" for name in classes for number in range(10)]
    found = kinetics.recognize([*names, "val/archery/x"])
    assert found == kinetics.Kinetics(videos=30, classes=3, held_out=1)
    assert kinetics.recognize(["indoor/a", "outdoor/b"]) is None


def test_kinetics_is_recognized_by_its_numbers_and_its_share_is_said() -> None:
    from tcore.data.check import check_kinetics

    names = [f"class{number % 398}/{number}" for number in range(30_412)]
    findings = Findings("", "")
    check_kinetics(findings, names)
    assert "30,412 of 239,789 training videos (12.7%)" in findings.text()
    assert "30,412 of 239,789" in told(findings, "warning")


def test_a_large_store_is_sampled_by_the_seed_and_says_so(store: Path) -> None:
    assert (
        choose_videos(50, 10, 3, False) == choose_videos(50, 10, 3, False) != choose_videos(50, 10, 4, False)
    )
    assert choose_videos(50, 10, 3, True) == list(range(50))
    findings = check(store, CONFIG, sample=2)
    assert "2 of 3, 40 frames (--full looks at everything)" in findings.text()
    assert findings.figures["looked_at"] == {"videos": 2, "frames": 40, "everything": False}


def test_a_long_video_is_looked_at_in_pairs_over_all_of_it() -> None:
    frames = choose_frames(1000, 200, full=False)
    assert len(frames) < 70
    assert {0, 500, 999} <= set(frames)
    assert sum(frame + 200 in frames for frame in frames) >= 32
    assert choose_frames(1000, 200, full=True) == list(range(1000))


def test_a_histogram_shows_every_bin_between_the_first_and_the_last() -> None:
    lines = bars(np.array([1, 1, 5]), (0, 2, 4), ["few", "some", "many"])
    assert [line.split()[0] for line in lines] == ["few", "some", "many"]
    assert [int(line.split()[-1]) for line in lines] == [2, 0, 1]


def test_the_report_for_machines_holds_everything(store: Path, tmp_path: Path) -> None:
    write_clip(store / "brief", 3)
    findings = check(store, CONFIG, report=tmp_path / "check.json")
    report = json.loads((tmp_path / "check.json").read_text())
    assert report["ok"] is True
    assert report["too_short"] == ["brief"]
    assert [problem["text"] for problem in report["problems"]] == [p.text for p in findings.problems]


def test_every_problem_says_what_to_do(store: Path) -> None:
    write_clip(store / "brief", 3)
    write_clip(store / "statue", 20, moving=False, seed=5)
    break_jpeg(store / "good0" / "00001.jpg")
    shutil.copytree(store / "good1", store / "twin")
    problems = check(store, Config()).problems
    assert len(problems) >= 4
    for problem in problems:
        assert re.search(r"extract|leave|keep|remove|use|get|--", problem.text), problem.text


def test_nothing_is_written_into_the_store(store: Path, tmp_path: Path) -> None:
    before = sorted(store.rglob("*"))
    check(store, CONFIG, sheet=tmp_path / "sheet.png")
    assert sorted(store.rglob("*")) == before
    assert FrameStore.open(store).fingerprint()


def test_a_link_to_nowhere_is_an_unreadable_frame(store: Path) -> None:
    (store / "good1" / "00019.jpg").unlink()
    (store / "good1" / "00019.jpg").symlink_to(store / "gone.jpg")
    findings = check(store, CONFIG)
    assert "good1/00019.jpg: No such file" in told(findings, "error")
