"""FrameStore: videos as ordered frames, from folders, rendered, mixed, or as moved photographs."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tcore.data.prepare import prepare
from tcore.data.rendered_varied import render_varied
from tcore.data.stores import (
    FrameStore,
    MixedStore,
    MovedStore,
    Pose,
    list_clips,
    look,
    natural,
    open_images,
    open_mixture,
    pose,
)
from tcore.errors import InputError
from tcore.methods import build_source
from tests.data.clips import write_clip
from tests.data.painted import Painted
from tests.tiny import tiny

Color = tuple[int, int, int]


def save(path: Path, color: Color = (0, 0, 0)) -> None:
    """Write one small image of a single color."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (6, 4), color).save(path)


def save_video(folder: Path, num_frames: int, color: Color = (0, 0, 0)) -> None:
    for index in range(num_frames):
        save(folder / f"{index:05d}.png", color)


def lengths(store: FrameStore) -> dict[str, int]:
    return dict(zip(store.names, store.lengths.tolist(), strict=True))


def reds(store: FrameStore, video: int, frames: Sequence[int]) -> list[int]:
    """The reds of frames of a single color."""
    read = store.read(video, frames)
    assert all(np.ptp(frame[..., 0]) == 0 for frame in read)
    return [int(frame[0, 0, 0]) for frame in read]


def test_frame_folders_are_found_at_any_depth_by_their_paths(tmp_path: Path) -> None:
    save_video(tmp_path / "deep" / "deeper" / "clip", 3, (90, 0, 0))
    save_video(tmp_path / "clip", 2, (40, 0, 0))
    save_video(tmp_path / "deep" / "three", 1)
    store = FrameStore.open(str(tmp_path))
    assert lengths(store) == {"clip": 2, "deep/deeper/clip": 3, "deep/three": 1}
    assert store.lengths.dtype == np.int64
    assert [reds(store, video, [0]) for video in (0, 1)] == [[40], [90]]


def test_frames_and_videos_are_ordered_by_their_numbers_and_read_as_asked(tmp_path: Path) -> None:
    for number in (10, 2, 1, 33, 9):
        save(tmp_path / "video10" / f"frame{number}.png", (number, 0, 0))
    save_video(tmp_path / "video9", 1)
    store = FrameStore.open(tmp_path)
    save_video(tmp_path / "take 1²", 1)  # an unusual digit
    assert list(FrameStore.open(tmp_path).names) == ["take 1²", "video9", "video10"]
    assert lengths(FrameStore.open(tmp_path / "video9")) == {".": 1}  # a folder of images is one video
    assert natural("video1") != natural("video01")
    assert reds(store, 1, range(5)) == [1, 2, 9, 10, 33]
    assert reds(store, 1, [3, 1, 1, 0]) == [10, 2, 2, 1]


def test_hidden_and_other_files_are_not_frames(tmp_path: Path) -> None:
    save_video(tmp_path / "video", 2)
    save_video(tmp_path / ".thumbnails", 1)
    save(tmp_path / "video" / ".00009.png")
    (tmp_path / "video" / "._00000.jpg").write_bytes(b"resource fork")
    (tmp_path / "video" / "notes.txt").write_text("not a frame")
    (tmp_path / "empty").mkdir()
    assert lengths(FrameStore.open(tmp_path)) == {"video": 2}


@pytest.mark.parametrize(
    ("links", "found"),
    [
        ({"itself": ".", "a/up": ".."}, []),
        ({"a/to_b": "../b", "b/to_a": "../a"}, []),
        ({"c/outside": "../.."}, [4]),  # a folder that holds the store
        ({"x": "../other", "y": "../other", "z": "../other/linked"}, [4]),
    ],
)
def test_links_are_followed_once_and_not_in_circles(
    tmp_path: Path, links: dict[str, str], found: list[int]
) -> None:
    for name, num_frames in (("store/a", 1), ("store/b", 2), ("store/c", 3), ("other/linked", 4)):
        save_video(tmp_path / name, num_frames)
    for link, target in links.items():
        (tmp_path / "store" / link).symlink_to(target)
    assert sorted(FrameStore.open(tmp_path / "store").lengths.tolist()) == [1, 2, 3, *found]


@pytest.mark.parametrize(
    ("files", "place", "problem"),
    [
        ([], "nowhere", "nowhere does not exist"),
        (["clip.mp4"], "clip.mp4", r"clip\.mp4 is a file"),
        ([], "", "no frames under .*found 0 other files.*expected folders of images"),
        (["a.mp4", "sport/b.AVI", "readme.txt"], "", "found 3 other files.* 2 video files"),
    ],
)
def test_what_is_not_a_store_is_said_in_one_line(
    tmp_path: Path, files: list[str], place: str, problem: str
) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes(b"")
    with pytest.raises(InputError, match=problem) as caught:
        FrameStore.open(tmp_path / place)
    assert str(tmp_path / place) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_fingerprint_depends_on_names_and_lengths_and_not_on_the_place(tmp_path: Path) -> None:
    here = tmp_path / "here"
    save_video(here / "a", 2)
    save_video(here / "b", 3)
    shutil.copytree(here, tmp_path / "there" / "deep")
    prints = [FrameStore.open(here).fingerprint()]
    assert FrameStore.open(tmp_path / "there" / "deep").fingerprint() == prints[0] == "335f9f09ce66ead8"
    (here / "b" / "00002.png").rename(here / "a" / "00002.png")
    prints.append(FrameStore.open(here).fingerprint())
    save_video(here / "c", 1)
    prints.append(FrameStore.open(here).fingerprint())
    (here / "a").rename(here / "x")
    prints.append(FrameStore.open(here).fingerprint())
    assert len(set(prints)) == 4


def test_rendered_videos_follow_from_their_numbers() -> None:
    first, second = (FrameStore.rendered(videos=2, frames=3, size=32, seed=5) for _ in range(2))
    assert first.fps == 2.0
    assert first.lengths.tolist() == [3, 3]
    assert first.cuts(0) == ()
    second.read(1, [2])  # in another order, and twice: what is kept must be what is rendered
    for video in (0, 1, 0):
        frames = first.read(video, [0, 1, 2])
        assert np.array_equal(frames, second.read(video, [0, 1, 2]))
        assert not np.array_equal(frames[0], frames[2])
        assert not any(frame.flags.writeable for frame in frames)  # they are kept
    numbers = [(2, 3, 32, 5), (3, 3, 32, 5), (2, 4, 32, 5), (2, 3, 48, 5), (2, 3, 32, 1)]
    stores = [FrameStore.rendered(videos=v, frames=f, size=s, seed=n) for v, f, s, n in numbers]
    assert len({store.fingerprint() for store in stores}) == len(stores)
    assert not np.array_equal(stores[0].read(0, [0])[0], stores[4].read(0, [0])[0])


def test_cuts_split_videos_into_shots_with_their_own_lengths() -> None:
    store = Painted([10, 5, 7], cuts=(6, 0, 4, 6, 10, 12, -1))  # in any order, beyond the ends too
    clips = list_clips(store, split_at_cuts=True)
    assert [column.tolist() for column in clips] == [
        [0, 0, 0, 1, 1, 2, 2, 2],
        [0, 4, 6, 0, 4, 0, 4, 6],
        [4, 2, 4, 4, 1, 4, 2, 1],
    ]
    ignored = list_clips(store, split_at_cuts=False)
    assert [column.tolist() for column in ignored] == [[0, 1, 2], [0, 0, 0], [10, 5, 7]]
    assert ignored.select(ignored.length > 5).video.tolist() == [0, 2]


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    folder = tmp_path / "photographs"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for index in range(4):
        coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
        coarse.resize((96, 72), Image.Resampling.BICUBIC).save(folder / f"{index}.png")
    return folder


def test_a_photograph_becomes_a_video_that_moves_smoothly(photographs: Path) -> None:
    images = open_images(photographs)
    frames = np.stack(MovedStore(images, seed=1).read(2, range(20))).astype(float)
    assert frames.shape == (20, 50, 67, 3)
    near = np.abs(np.diff(frames, axis=0)).mean(axis=(1, 2, 3))
    assert (near > 0.3).all()  # it never stands still
    assert near.max() < np.abs(frames[0] - frames[-1]).mean()  # and never jumps
    first, again, other = (MovedStore(images, seed).read(0, [3, 9]) for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert MovedStore(images, 1).fingerprint() != MovedStore(images, 2).fingerprint()
    assert pose(1, 0, 0.5) != pose(1, 1, 0.5)


@pytest.mark.parametrize("corner", [(-1.0, -1.0), (1.0, -1.0), (-1.0, 1.0), (1.0, 1.0)])
def test_the_frame_never_leaves_the_photograph(corner: tuple[float, float]) -> None:
    white = Image.new("RGB", (90, 60), (255, 255, 255))
    for turn in (-0.3, 0.0, 0.3):
        for zoom in (0.6, 1.0, 1.4):
            seen = look(white, Pose(*corner, turn, zoom, 1.0))
            # A cubic filter needs a pixel beyond; nothing but that may be dark.
            assert (seen[2:-2, 2:-2] == 255).all(), (turn, zoom)


def test_the_camera_follows_its_pose() -> None:
    ramp = np.tile(np.arange(100, dtype=np.uint8)[None, :, None], (80, 1, 3))
    picture = Image.fromarray(ramp)
    left, right = (look(picture, Pose(x, 0.0, 0.0, 1.0, 1.0)).mean() for x in (-0.5, 0.5))
    assert right - left == pytest.approx(15, abs=0.5)  # half of the 30 pixels of room
    near, wide = (np.ptp(look(picture, Pose(0.0, 0.0, 0.0, zoom, 1.0))[40, 5:-5]) for zoom in (1.2, 1.0))
    assert near < wide
    assert look(picture, Pose(0, 0, 0, 1.0, 1.1)).mean() > look(picture, Pose(0, 0, 0, 1.0, 1.0)).mean()


def test_a_mixture_is_its_stores_one_after_another() -> None:
    a, b = FrameStore.rendered(videos=2, frames=8, size=32), Painted([9], cuts=(4,))
    mixed = MixedStore([a, b], [2, 3])
    assert mixed.lengths.tolist() == [8, 8, 8, 8, 9, 9, 9]
    assert len(set(mixed.names)) == 7
    assert np.array_equal(mixed.read(3, [5]), a.read(1, [5]))
    assert np.array_equal(mixed.read(6, [0, 8]), b.read(0, [0, 8]))
    assert [mixed.cuts(video) for video in (3, 4)] == [(), (4,)]
    assert mixed.fps is None
    assert MixedStore([a, a], [1, 1]).fps == 2.0


def test_a_mixture_is_read_as_it_is_written_and_like_any_store(photographs: Path, tmp_path: Path) -> None:
    clips = tmp_path / "a+b*3"  # an existing path is taken as it is
    for video in range(3):
        write_clip(clips / str(video), 20, size=48, seed=video)
    assert lengths(open_mixture(str(clips), 0)) == {"0": 20, "1": 20, "2": 20}
    clips.rename(tmp_path / "clips")
    store = open_mixture(f"{tmp_path / 'clips'}*2+photographs:{photographs}", seed=0)
    assert store.names[5:] == ["0.1/2", *(f"1.0/moved-0/{index}.png" for index in range(4))]
    assert build_source(store, tiny()).read(0, 0).bad == ()
    here = f"{tmp_path / 'clips'}+"
    for wrong, piece in (
        (f"{here}x*0", r"x\*0"),
        (f"{here}photographs:", "photographs:"),
        ("no+where", "no does"),
    ):
        with pytest.raises(InputError, match=piece):
            open_mixture(wrong, 0)


def test_rendered_videos_can_be_packed_beforehand(tmp_path: Path) -> None:
    prepare(Path("rendered:2"), tmp_path / "store", short_side=64, engine="here")
    store = FrameStore.open(tmp_path / "store")
    assert store.lengths.tolist() == [20, 20]
    assert store.fps == 2
    expected = FrameStore.rendered(videos=2, size=64).read(1, [7])[0]
    assert np.abs(store.read(1, [7])[0].astype(int) - expected).mean() < 12  # JPEG
    with pytest.raises(InputError, match="--fps 3"):
        prepare(Path("rendered:3"), tmp_path / "other", fps=3)
    prepare(Path("varied:2"), tmp_path / "varied", short_side=64, engine="here")
    varied = FrameStore.open(tmp_path / "varied")
    assert varied.lengths.tolist() == [20, 20]
    expected = render_varied(0, 1, size=64)[7]
    assert np.abs(varied.read(1, [7])[0].astype(int) - expected).mean() < 12
