"""PackedStore: frames in tar files behind an index."""

import json
import os
import pickle
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest

from tcore.data.packed import INDEX, ShardWriter, index_path, shard_path, shard_writer, write_index
from tcore.data.stores import FrameStore, PackedStore, list_clips
from tcore.errors import InputError
from tests.data.packing import jpeg, pack

LONG = "ünï\udcff/" + "/".join(["very-long-folder-name" * 4] * 5)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three videos in two shards; frame f of video v has one color, (10 v, 9 f, 0)."""
    return pack(tmp_path / "store", [[("a/one", 3), ("a/two", 8)], [(LONG, 1)]], cuts={"a/two": [2, 5]})


def test_a_packed_store_is_recognized_and_knows_its_videos(root: Path) -> None:
    store = FrameStore.open(root)
    assert isinstance(store, PackedStore)
    assert list(store.names) == ["a/one", "a/two", LONG]
    assert (store.lengths.tolist(), store.lengths.dtype, store.fps) == ([3, 8, 1], np.int64, 2.0)
    assert [store.cuts(video) for video in range(3)] == [(), (2, 5), ()]
    assert store.verify() == []
    clips = list_clips(store, split_at_cuts=True)
    assert [column.tolist() for column in clips] == [[0, 1, 1, 1, 2], [0, 0, 2, 5, 0], [3, 2, 3, 3, 1]]


def test_any_frame_can_be_read_in_any_order(root: Path) -> None:
    store = PackedStore(root)
    for video, frames in ((1, [7, 0, 3]), (2, [0]), (0, [2, 2]), (1, [1])):
        for frame, pixels in zip(frames, store.read(video, frames), strict=True):
            assert pixels.shape == (6, 8, 3)
            assert np.abs(pixels.astype(int) - (10 * video, 9 * frame, 0)).max() <= 3


@pytest.mark.parametrize(("video", "frame"), [(0, 3), (0, -1), (2, 1), (3, 0), (-1, 0)])
def test_frames_that_are_not_there_are_not_read_from_the_neighbor(root: Path, video: int, frame: int) -> None:
    with pytest.raises(IndexError):
        PackedStore(root).read_bytes(video, [frame])


def test_the_shards_are_plain_tar_files(root: Path) -> None:
    listed = subprocess.run(
        ["tar", "tf", str(shard_path(root, 0))], capture_output=True, text=True, check=True
    ).stdout.split()
    assert listed == [f"a/one/{i:05d}.jpg" for i in range(3)] + [f"a/two/{i:05d}.jpg" for i in range(8)]
    with tarfile.open(shard_path(root, 0)) as tar:
        member = tar.extractfile("a/two/00004.jpg")
        assert member is not None
        assert member.read() == PackedStore(root).read_bytes(1, [4])[0]
    with tarfile.open(shard_path(root, 1)) as tar:
        assert tar.getnames() == [f"{LONG}/00000.jpg"]


def test_a_video_that_is_begun_again_leaves_nothing_behind(tmp_path: Path) -> None:
    for name, tries in (("plain", 0), ("x", 5)):
        file = (tmp_path / f"{name}.tar").open("wb+")
        write = ShardWriter(file)
        write.add("kept", jpeg((0, 0, 0)))
        write.finish("kept", (6, 8), [])
        for _ in range(tries):
            write.add("broken", jpeg((9, 9, 9)))
        write.begin()
        shard = write.close()
        file.close()
        assert [video.name for video in shard.videos] == ["kept"]
    assert (tmp_path / "x.tar").read_bytes() == (tmp_path / "plain.tar").read_bytes()
    with tarfile.open(tmp_path / "x.tar") as tar:
        assert tar.getnames() == ["kept/00000.jpg"]


def test_a_store_travels_to_other_processes_without_its_open_files(root: Path) -> None:
    store = PackedStore(root)
    before = store.read_bytes(1, [4])
    data = pickle.dumps(store)
    assert len(data) < 1000
    assert pickle.loads(data).read_bytes(1, [4]) == before


def test_a_forked_process_reads_beside_its_parent(root: Path) -> None:
    store = PackedStore(root)
    expected = [store.read_bytes(1, [frame])[0] for frame in range(8)]
    child = os.fork()
    if child == 0:
        fine = all(store.read_bytes(1, [f])[0] == expected[f] for _ in range(50) for f in range(8))
        os._exit(0 if fine else 1)
    assert all(store.read_bytes(1, [f])[0] == expected[f] for _ in range(50) for f in reversed(range(8)))
    assert os.waitpid(child, 0)[1] == 0


def test_only_so_many_files_are_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tcore.data.packed.OPEN_SHARDS", 3)
    store = PackedStore(pack(tmp_path, [[(f"v{i}", 1)] for i in range(8)]))
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(2):
        for video in range(8):
            store.read_bytes(video, [0])
    assert len(list(Path("/proc/self/fd").iterdir())) == before + 3


def test_truncated_and_missing_shards_are_named(root: Path) -> None:
    store = PackedStore(root)
    store.read(1, [7])
    os.truncate(shard_path(root, 0), 3000)
    shard_path(root, 1).unlink()
    for opened in (store, PackedStore(root)):  # truncated while it is open, or before
        with pytest.raises(InputError, match=r"000000\.tar is cut off: \d+ bytes instead of \d+"):
            opened.read(1, [7])
        with pytest.raises(InputError, match=r"000001\.tar: No such file"):
            opened.read(2, [0])
        assert [Path(line.partition(": ")[0]).name for line in opened.verify()] == [
            "000000.tar",
            "000001.tar",
        ]
        assert opened.verify(full=False) == opened.verify()[:2]


def test_flipped_bytes_are_found(root: Path) -> None:
    for path in (shard_path(root, 1), index_path(root, "heights")):
        data = bytearray(path.read_bytes())
        data[-9 if path.suffix == ".tar" else -1] ^= 1
        path.write_bytes(data)
    problems = PackedStore(root).verify()
    assert len(problems) == 2
    assert all("sha256" in line for line in problems)


@pytest.mark.parametrize("name", list(INDEX))
def test_a_truncated_index_is_named(root: Path, name: str) -> None:
    path = index_path(root, name)
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(InputError, match=name):
        PackedStore(root)


def change(root: Path, name: str, array: np.ndarray) -> None:
    np.save(index_path(root, name), array, allow_pickle=True)


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("shards", np.array([0, 0, 2], np.int32)),
        ("shards", np.array([0, -1, 1], np.int32)),
        ("shards", np.array([{}, {}, {}])),
        ("frame_ends", np.array([3, 11, 13])),
        ("frame_ends", np.array([3, 2, 12])),
        ("name_ends", np.array([5, 10**12, 16])),
        ("cut_ends", np.array([0, 3, 2])),
        ("sizes", np.array([1, 2, 3])),
        ("heights", np.array([6, 0, 6], np.int32)),
        ("widths", np.array([[6, 6, 6]], np.int32)),
    ],
)
def test_an_index_that_cannot_be_true_is_refused(root: Path, name: str, array: np.ndarray) -> None:
    change(root, name, array)
    with pytest.raises(InputError, match=r"index|damaged"):
        PackedStore(root)


@pytest.mark.parametrize(
    ("offset", "size"), [(-5, 100), (10**15, 100), (0, 10**15), (0, 0), (2**63 - 1, 2**63 - 1)]
)
def test_an_index_that_points_outside_reads_nothing(root: Path, offset: int, size: int) -> None:
    store = PackedStore(root)
    offsets, sizes = store._index["offsets"].copy(), store._index["sizes"].copy()
    offsets[4], sizes[4] = offset, size
    change(root, "offsets", offsets)
    change(root, "sizes", sizes)
    store = PackedStore(root)
    with pytest.raises(InputError, match=r"points outside .*000000\.tar"):
        store.read(1, [1])
    assert len(store.verify()) == 2  # both arrays of the index have changed


@pytest.mark.parametrize(
    "change_",
    [
        {"format": "other"},
        {"shards": [{"bytes": "many", "sha256": ""}]},
        {"fps": "2"},
        {"kind": 3},
        {"index": []},
        "[]",
        "{",
    ],
)
def test_a_description_that_cannot_be_true_is_refused(root: Path, change_: dict[str, object] | str) -> None:
    about = json.loads((root / "store.json").read_text())
    text = change_ if isinstance(change_, str) else json.dumps(about | change_)
    (root / "store.json").write_text(text)
    with pytest.raises(InputError, match=r"store\.json"):
        FrameStore.open(root)


def test_bytes_that_are_no_image_are_named_by_video_and_shard(tmp_path: Path) -> None:
    with shard_writer(tmp_path, 0) as write:
        write.add("video", b"\xff\xd8 no image")
        write.finish("video", (6, 8), [])
        shard = write.close()
    write_index(tmp_path, [shard], "videos", 2.0, {})
    with pytest.raises(InputError, match=r"cannot read frame 0 of video video in .*000000\.tar"):
        PackedStore(tmp_path).read(0, [0])


def test_files_that_are_cut_off_while_in_use_are_one_line_each(root: Path) -> None:
    store = PackedStore(root)
    store.read(0, [0])
    maps = Path("/proc/self/maps")
    assert not maps.exists() or str(root) not in maps.read_text()  # else reading would end in SIGBUS
    for path in (*(index_path(root, name) for name in INDEX), shard_path(root, 0), shard_path(root, 1)):
        os.truncate(path, 10)
    for video, shard in enumerate(("000000.tar", "000000.tar", "000001.tar")):
        assert store.names[video]
        with pytest.raises(InputError, match=shard):
            store.read(video, [0])
    with pytest.raises(InputError, match=r"names\.npy"):
        PackedStore(root)
