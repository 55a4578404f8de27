"""tcore prepare: a folder of videos becomes a store."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tcore.cli.main import main
from tcore.data import packing
from tcore.data.packed import ShardWriter, shard_path
from tcore.data.packing import Item, Settings, Task, read_record, write_guarded, write_shard
from tcore.data.prepare import list_source, merge, plan_shards, prepare
from tcore.data.rendered import render_video
from tcore.data.source import RawBatch
from tcore.data.stores import FrameStore, PackedStore
from tcore.errors import InputError
from tcore.methods import build_source
from tests.conftest import Refused
from tests.evaluation.clips import cut, need_av, write_file
from tests.runs import contents
from tests.tiny import tiny


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four good files in two folders, two of them with one name, and four bad ones."""
    need_av()
    root = tmp_path_factory.mktemp("videos")
    frames = [render_video(7, video, num_frames=16, size=64).frames for video in range(5)]
    write_file(root / "a" / "x.mp4", frames[0], rate=4)
    write_file(root / "b" / "x.mp4", frames[1], rate=4)
    write_file(root / "b" / "x.mkv", frames[2], rate=4)
    write_file(root / "b" / "shots.mp4", np.concatenate(frames[3:5]), rate=2)
    cut(write_file(root / "cut-late.mp4", np.concatenate(frames[:2]), rate=2), 0.7)
    cut(write_file(root / "cut-soon.mp4", frames[0], rate=4), 0.4)
    (root / "empty.mp4").write_bytes(b"")
    (root / "text.avi").write_text("hello")
    (root / "notes.txt").write_text("no video")
    return root


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five videos as folders of frames, one of them PNG."""
    root = tmp_path_factory.mktemp("folders")
    for video in range(5):
        suffix = "png" if video == 3 else "jpg"
        (root / f"v{video}").mkdir()
        for index, frame in enumerate(render_video(8, video, num_frames=9, size=48).frames):
            Image.fromarray(frame).save(root / f"v{video}" / f"{index:05d}.{suffix}")
    return root


def prepare_here(source: Path, store: Path, **changes: Any) -> PackedStore:
    made = prepare(source, store, engine="here", **changes)
    assert made is not None
    return made


@pytest.fixture(scope="module")
def whole(videos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("whole") / "store"
    prepare_here(videos, store)
    return store


def test_good_videos_are_taken_in_and_bad_ones_listed(whole: Path) -> None:
    store = PackedStore(whole)
    assert list(store.names) == ["a/x", "b/shots", "b/x.mkv", "b/x.mp4", "cut-late"]
    assert store.lengths.tolist()[:4] == [8, 32, 8, 8]
    assert store.fps == 2.0
    assert store.cuts(1) == (16,)
    assert store.verify() == []
    original = render_video(7, 0, num_frames=16, size=64).frames[::2]
    assert np.abs(np.stack(store.read(0, range(8))).astype(int) - original).mean() < 8
    rows = (whole / "skipped.csv").read_text().splitlines()
    assert rows[0] == "file,outcome,frames,reason"
    assert rows[1].startswith("cut-late.mp4,partial,")
    assert f"the {store.lengths[4]} frames before that were kept" in rows[1]
    assert rows[2].startswith("cut-soon.mp4,skipped,0,")
    assert "fewer than 7" in rows[2]
    assert rows[3] == "empty.mp4,skipped,0,the file is empty"
    assert rows[4].startswith("text.avi,skipped,0,")
    assert "not a video" in rows[4]
    assert sorted(path.name for path in whole.iterdir()) == ["index", "shards", "skipped.csv", "store.json"]


def test_parts_make_the_same_bytes(videos: Path, whole: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    for part in (3, 1):
        assert prepare(videos, store, engine="here", part=(part, 3)) is None
    with pytest.raises(InputError, match=r"3 of 8 shards are missing \(1, 4, 7;"):
        merge(store)
    with pytest.raises(InputError, match="unfinished"):
        FrameStore.open(store)
    with pytest.raises(InputError, match=r"another store \(fps 2.0 there, 3 here\)"):
        prepare(videos, store, engine="here", part=(2, 3), fps=3)
    prepare(videos, store, engine="here", part=(2, 3))
    merge(store)
    assert contents(store) == contents(whole)
    assert len(merge(store)) == 5


def test_a_full_disk_is_one_line_and_the_rest_resumes_without_doing_work_twice(
    videos: Path, whole: Path, tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, add = tmp_path / "store", ShardWriter.add

    def full(self: ShardWriter, name: str, data: bytes) -> None:
        if name == "b/x.mkv":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        add(self, name, data)

    monkeypatch.setattr(ShardWriter, "add", full)
    assert "000002.tar: No space left on device" in refused("prepare", videos, store, "--engine", "here")
    monkeypatch.setattr(ShardWriter, "add", add)
    assert not list(store.rglob("*.tmp"))
    done = shard_path(store, 0)
    before = done.stat().st_mtime_ns
    prepare_here(videos, store)
    assert done.stat().st_mtime_ns == before
    assert contents(store) == contents(whole)


def test_a_finished_store_is_described_not_made_again_and_another_one_is_refused(
    videos: Path, folders: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(whole)
    main(["prepare", str(videos), str(whole)])
    said = capsys.readouterr().out
    found = ("5 videos, ", " at 2 frames per second, ", "skipped: 3 (", "kept in part: 1 (")
    for words in (*found, "empty.mp4: the file is empty"):
        assert words in said
    assert f"next: tcore train quickstart --frames {whole} --run RUN" in said
    for source, changes, difference in (
        (videos, {"fps": 3.0}, "fps 2.0 there, 3.0 here"),
        (videos, {"part": (2, 8), "short_side": 32}, "short_side 256 there, 32 here"),
        (folders, {"fps": 2.0, "short_side": 256}, "kind videos there, frames here"),
        (videos / "b", {}, "videos 8 there, 3 here"),
    ):
        with pytest.raises(InputError, match=rf"another store \({difference}"):
            prepare_here(source, whole, **changes)
    assert contents(whole) == before


def test_a_source_that_changes_between_two_parts_is_noticed(videos: Path, tmp_path: Path) -> None:
    source, store = tmp_path / "source", tmp_path / "store"
    shutil.copytree(videos, source)
    prepare(source, store, engine="here", part=(1, 2))
    data = (source / "a" / "x.mp4").read_bytes()
    (source / "a" / "x.mp4").write_bytes(data[:-1] + b"!")
    with pytest.raises(InputError, match="sizes or dates"):
        prepare(source, store, engine="here", part=(2, 2))
    plan = json.loads((store / "plan.json").read_text())
    plan.pop("dates")  # as earlier versions wrote it
    (store / "plan.json").write_text(json.dumps(plan))
    prepare(source, store, engine="here", part=(2, 2))
    merge(store)
    os.utime(source / "a" / "x.mp4")
    prepare_here(source, store)  # a finished store is not tied to dates


def test_pipes_links_and_names_with_escape_codes_are_listed(
    videos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    shutil.copy(videos / "a" / "x.mp4", source / "good.mp4")
    os.mkfifo(source / "pipe.mp4")
    (source / "link.mp4").symlink_to("nowhere.mp4")
    (source / "\x1b[2J\r.mp4").write_text("no video")
    main(["prepare", str(source), str(tmp_path / "store"), "--engine", "here"])
    out, err = capsys.readouterr()
    listed = (tmp_path / "store" / "skipped.csv").read_text()
    assert 'pipe.mp4,skipped,0,"it is a pipe or a device' in listed
    assert re.search(r"link\.mp4,skipped,0,No such file", listed)
    assert r"\x1b[2J\x0d.mp4" in listed
    assert r"\x1b[2J\x0d.mp4" in out
    assert "\x1b" not in listed + out + err


def test_nothing_is_written_into_other_folders_or_the_source(folders: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    before = contents(folders)
    for place, said in ((tmp_path, "holds no store"), *((folders / x, "inside") for x in (".", "a/store"))):
        with pytest.raises(InputError, match=said):
            prepare_here(folders, place)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    assert contents(folders) == before


def batches(frames: Path) -> list[RawBatch]:
    source = build_source(FrameStore.open(frames), tiny(optim__batch=4))
    return [source.read(step, 0) for step in range(3)]


def test_folder_form_and_packed_form_give_the_same_samples(folders: Path, tmp_path: Path) -> None:
    store = prepare_here(folders, tmp_path / "store")
    assert (store.kind, store.fps) == ("frames", None)
    assert store.fingerprint() == FrameStore.open(folders).fingerprint()
    for one, other in zip(batches(folders), batches(tmp_path / "store"), strict=True):
        assert np.array_equal(one.frames, other.frames)
        assert np.array_equal(one.mask, other.mask)
        assert repr(one.plans["global"]) == repr(other.plans["global"])
    small = prepare_here(folders, tmp_path / "small", short_side=24, fps=4)
    assert {small.read(video, [0])[0].shape for video in range(5)} == {(24, 24, 3)}
    assert small.fps == 4


def test_a_folder_with_a_broken_frame_is_skipped_by_name_however_strange(
    folders: Path, tmp_path: Path
) -> None:
    shutil.copytree(folders, tmp_path / "source")
    broken = tmp_path / "source" / "v1" / "00003.jpg"
    broken.write_bytes(broken.read_bytes()[:500])
    (tmp_path / "source" / "v2" / "00003.jpg").write_text("no image")
    (tmp_path / "source" / "v2").rename(tmp_path / "source" / "x\udcfe")
    (tmp_path / "source" / "v3").rename(tmp_path / "source" / "ünï, \udcff")
    store = prepare_here(tmp_path / "source", tmp_path / "store")
    assert list(store.names) == ["v0", "v4", "ünï, \udcff"]
    rows = (tmp_path / "store" / "skipped.csv").read_text().splitlines()
    assert rows[1].startswith("v1,skipped,0,00003.jpg: ")
    assert "truncated" in rows[1].lower()
    assert rows[2] == "x\\xfe,skipped,0,00003.jpg: cannot identify image file"


def test_every_image_can_be_a_video_of_one_frame(folders: Path, tmp_path: Path) -> None:
    store = prepare_here(folders, tmp_path / "store", images=True)
    assert (store.kind, store.lengths.tolist(), store.names[0]) == ("images", [1] * 45, "v0/00000")
    assert store.read_bytes(0, [0])[0] == (folders / "v0" / "00000.jpg").read_bytes()


def test_two_processes_make_the_same_bytes_without_running_the_script_again(
    videos: Path, whole: Path, tmp_path: Path
) -> None:
    script, store = tmp_path / "script.py", tmp_path / "store"
    script.write_text(
        "from pathlib import Path\nfrom tcore.data.prepare import prepare\nprint('begins')\n"
        f"prepare(Path({str(videos)!r}), Path({str(store)!r}), workers=2)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("begins") == 1
    assert contents(store) == contents(whole)


def test_shards_depend_on_the_listing_alone() -> None:
    items = [Item(str(i), str(i), (), 10) for i in range(20_000)]
    sizes = [len(shard) for shard in plan_shards(items)]
    assert set(sizes[:-1]) == {256}
    assert sum(sizes) == 20_000
    assert [len(shard) for shard in plan_shards(items[:17])] == [1] * 17
    large = [Item(str(i), str(i), (), 2**29) for i in range(1000)]
    assert {len(shard) for shard in plan_shards(large)} == {2}


def one_task(videos: Path, store: Path) -> Task:
    items = tuple(item for item in list_source(videos, images=False)[2] if item.name.startswith("b/x"))
    return Task(videos, store, Settings("videos", 2.0, 256, 90), 0, items)


def test_a_video_at_which_two_processes_died_is_skipped(videos: Path, tmp_path: Path) -> None:
    written = {}
    for deaths in ("", "0", "0 0"):
        task = one_task(videos, tmp_path / f"died {deaths}")
        task.trying.parent.mkdir(parents=True)
        task.trying.write_text(deaths)
        write_shard(task)
        written[deaths] = contents(task.store)
        shard, notes = read_record(task.record)
        assert [video.name for video in shard.videos] == ["b/x.mkv", "b/x.mp4"][deaths == "0 0" :]
        assert [note.file for note in notes] == ["b/x.mkv"] * (deaths == "0 0")
    assert written[""] == written["0"]


def test_a_process_without_a_new_frame_is_killed(
    videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = one_task(videos, tmp_path / "store")

    def stall(task: Task, item: Item, writer: ShardWriter, beat: Callable[[], None]) -> None:
        monkeypatch.setattr(packing, "STALL_S", 0.1)  # what came before may take long on a busy machine
        beat()
        time.sleep(60)

    child = os.fork()
    if child == 0:
        monkeypatch.setattr(packing, "pack_item", stall)
        write_guarded(task)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGALRM
    assert task.trying.read_text() == "0"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--fps nan", "--fps nan: need"),
        ("--quality -1", "--quality -1: need"),
        ("--workers 0", "--workers 0: need"),
        ("--part 3/2", "--part 3/2: need"),
        ("--part x", "--part 'x': need i/n"),
        ("--engine spark", "--engine spark: need"),
    ],
)
def test_settings_that_cannot_work_are_one_line(
    videos: Path, tmp_path: Path, refused: Refused, flags: str, said: str
) -> None:
    assert said in refused.in_one_line("prepare", videos, tmp_path / "store", *flags.split())
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("files", "store", "said"),
    [
        (None, "store", "does not exist"),
        ([], "store", "no video files"),
        (["readme.txt"], "store", "found 1 other files"),
        (["bad.mp4"], "store", "none of 1 videos"),
        (["bad.mp4"], "source/bad.mp4", "bad.mp4"),
        (["bad.mp4"], "/proc/nowhere/store", "/proc/nowhere"),
    ],
)
def test_places_that_cannot_work_are_one_line(
    tmp_path: Path, refused: Refused, files: list[str] | None, store: str, said: str
) -> None:
    if files is not None:
        (tmp_path / "source").mkdir()
    for name in files or ():
        (tmp_path / "source" / name).write_text("hello")
    *_, last = refused("prepare", tmp_path / "source", tmp_path / store, "--engine", "here").splitlines()
    assert last.startswith("tcore: error: ")
    assert said in last


def run_tcore(arguments: list[str], **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tcore", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )


def test_a_finished_store_keeps_nothing_of_what_killed_processes_were_writing(
    folders: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    whole = contents(prepare_here(folders, store).root)
    for name in (".plan.json.1-2.tmp", "shards/.000001.tar.1-2.tmp"):
        (store / name).touch()
    assert contents(prepare_here(folders, store).root) == whole


CRASH = """
import os
import tcore.data.video as video
before = video.SampledVideo.__iter__
def crash(self):
    if self.path.name == "shots.mp4":
        os.abort()
    return before(self)
video.SampledVideo.__iter__ = crash
"""


@pytest.mark.long
def test_a_video_that_crashes_the_decoder_is_skipped_and_the_rest_is_done(
    videos: Path, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(CRASH)
    path = os.pathsep.join([str(tmp_path), str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    with run_tcore(
        ["prepare", str(videos), str(tmp_path / "store"), "--workers", "2"], PYTHONPATH=path
    ) as child:
        said, errors = child.communicate()
    assert child.returncode == 0, errors
    assert "b/shots.mp4: reading it ended the process twice" in said
    assert list(PackedStore(tmp_path / "store").names) == ["a/x", "b/x.mkv", "b/x.mp4", "cut-late"]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_ray_makes_the_same_bytes(videos: Path, whole: Path, tmp_path: Path) -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        prepare(videos, tmp_path / "store", engine="ray")
    finally:
        ray.shutdown()
    assert contents(tmp_path / "store") == contents(whole)
