"""FrameStore: videos as ordered frames."""

import io
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from jaxtyping import UInt8
from PIL import Image

from tcore.data import images as reading
from tcore.data.images import decode_image, decode_jpeg
from tcore.data.stores import FrameStore, list_clips, natural
from tcore.errors import InputError

Color = tuple[int, int, int]


def save(path: Path, color: Color = (0, 0, 0), size: tuple[int, int] = (6, 4)) -> None:
    """Write one image of a single color, (width, height) pixels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(path)


def save_video(folder: Path, num_frames: int, color: Color = (0, 0, 0)) -> None:
    for index in range(num_frames):
        save(folder / f"{index:05d}.png", color)


def red_of(frame: UInt8[np.ndarray, "height width 3"]) -> int:
    """The red of an image of a single color."""
    assert np.ptp(frame[..., 0]) == 0
    return int(frame[0, 0, 0])


class Shots(FrameStore):
    """Videos without pixels that know their cuts."""

    def __init__(self, lengths: list[int], cuts: list[tuple[int, ...]]) -> None:
        self.names = [f"video-{index}" for index in range(len(lengths))]
        self.lengths = np.array(lengths, dtype=np.int64)
        self._cuts = cuts

    def read(self, video: int, frames: Sequence[int]) -> list[UInt8[np.ndarray, "height width 3"]]:
        return [np.full((4, 4, 3), frame, np.uint8) for frame in frames]

    def cuts(self, video: int) -> tuple[int, ...]:
        return self._cuts[video]


def test_frame_folders_are_found_at_any_depth(tmp_path: Path) -> None:
    save_video(tmp_path / "deep" / "deeper" / "one", 3)
    save_video(tmp_path / "two", 2)
    save_video(tmp_path / "deep" / "three", 1)
    store = FrameStore.open(tmp_path)
    found = dict(zip(store.names, store.lengths.tolist(), strict=True))
    assert found == {"deep/deeper/one": 3, "deep/three": 1, "two": 2}
    assert len(store) == 3
    assert store.lengths.dtype == np.int64


def test_a_store_opens_by_text_as_by_path(tmp_path: Path) -> None:
    save_video(tmp_path / "video", 2)
    assert FrameStore.open(str(tmp_path)).names == FrameStore.open(tmp_path).names


def test_a_folder_of_images_is_one_video(tmp_path: Path) -> None:
    for index in range(3):
        save(tmp_path / f"{index}.png", (10 * index, 0, 0))
    store = FrameStore.open(tmp_path)
    assert store.lengths.tolist() == [3]
    assert [red_of(frame) for frame in store.read(0, [2, 0])] == [20, 0]


def test_frames_and_videos_are_ordered_by_their_numbers(tmp_path: Path) -> None:
    for number in (10, 2, 1, 33, 9):
        save(tmp_path / "video10" / f"frame{number}.png", (number, 0, 0))
    save_video(tmp_path / "video9", 1)
    store = FrameStore.open(tmp_path)
    assert list(store.names) == ["video9", "video10"]
    assert [red_of(frame) for frame in store.read(1, range(5))] == [1, 2, 9, 10, 33]


def test_frames_are_read_in_the_order_asked_for_with_repeats(tmp_path: Path) -> None:
    for number in range(4):
        save(tmp_path / "v" / f"{number}.png", (number, 0, 0))
    frames = FrameStore.open(tmp_path).read(0, [3, 1, 1, 0])
    assert [red_of(frame) for frame in frames] == [3, 1, 1, 0]


def test_hidden_files_and_other_files_are_no_frames(tmp_path: Path) -> None:
    save_video(tmp_path / "video", 2)
    save(tmp_path / "video" / ".00009.png")
    (tmp_path / "video" / "._00000.jpg").write_bytes(b"resource fork")
    (tmp_path / "video" / "notes.txt").write_text("not a frame")
    (tmp_path / "empty").mkdir()
    store = FrameStore.open(tmp_path)
    assert list(store.names) == ["video"]
    assert store.lengths.tolist() == [2]


def test_hidden_folders_are_no_videos(tmp_path: Path) -> None:
    save_video(tmp_path / "video", 2)
    save_video(tmp_path / ".thumbnails", 1)
    assert list(FrameStore.open(tmp_path).names) == ["video"]


def test_videos_behind_a_link_are_found(tmp_path: Path) -> None:
    save_video(tmp_path / "elsewhere" / "linked", 2)
    save_video(tmp_path / "store" / "video", 1)
    (tmp_path / "store" / "linked").symlink_to(tmp_path / "elsewhere" / "linked")
    assert list(FrameStore.open(tmp_path / "store").names) == ["linked", "video"]


@pytest.mark.parametrize(
    "links",
    [
        {"itself": "."},
        {"a/up": ".."},
        {"a/to_b": "../b", "b/to_a": "../a"},
        {"deep/c/outside": "../../.."},  # a folder that holds the store
    ],
)
def test_links_in_a_circle_end_and_find_each_video_once(tmp_path: Path, links: dict[str, str]) -> None:
    for name, num_frames in (("a", 1), ("b", 2), ("deep/c", 3)):
        save_video(tmp_path / "store" / name, num_frames)
    for link, target in links.items():
        (tmp_path / "store" / link).symlink_to(target)
    found = FrameStore.open(tmp_path / "store")
    assert dict(zip(found.names, found.lengths.tolist(), strict=True)) == {"a": 1, "b": 2, "deep/c": 3}


def test_a_video_behind_several_links_is_found_once(tmp_path: Path) -> None:
    save_video(tmp_path / "elsewhere" / "linked", 2, (70, 0, 0))
    save_video(tmp_path / "store" / "video", 1, (30, 0, 0))
    for link, target in (("x", "elsewhere"), ("y", "elsewhere"), ("z", "elsewhere/linked")):
        (tmp_path / "store" / link).symlink_to(tmp_path / target)
    found = FrameStore.open(tmp_path / "store")
    assert sorted(found.lengths.tolist()) == [1, 2]
    assert sorted(red_of(found.read(video, [0])[0]) for video in (0, 1)) == [30, 70]


@pytest.mark.parametrize("name", ["①", "take 1²"])
def test_names_with_unusual_digits_are_sorted_too(tmp_path: Path, name: str) -> None:
    save_video(tmp_path / name, 1)
    assert list(FrameStore.open(tmp_path).names) == [name]


def test_different_names_never_share_a_place_in_the_order() -> None:
    assert natural("video1") != natural("video01")


def test_videos_of_the_same_name_in_different_folders_stay_apart(tmp_path: Path) -> None:
    save_video(tmp_path / "train" / "clip", 2, (40, 0, 0))
    save_video(tmp_path / "extra" / "clip", 3, (90, 0, 0))
    store = FrameStore.open(tmp_path)
    assert list(store.names) == ["extra/clip", "train/clip"]
    assert store.lengths.tolist() == [3, 2]
    assert [red_of(store.read(video, [0])[0]) for video in (0, 1)] == [90, 40]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    with pytest.raises(InputError, match="does not exist") as caught:
        FrameStore.open(missing)
    assert str(missing) in str(caught.value)


def test_a_file_in_place_of_a_folder_is_not_called_missing(tmp_path: Path) -> None:
    (tmp_path / "clip.mp4").write_bytes(b"")
    with pytest.raises(InputError) as caught:
        FrameStore.open(tmp_path / "clip.mp4")
    assert "clip.mp4" in str(caught.value)
    assert "does not exist" not in str(caught.value)


def test_an_empty_folder_is_named_with_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"no frames.*found 0 other files.*expected folders of images"
    ) as caught:
        FrameStore.open(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_of_video_files_is_recognized(tmp_path: Path) -> None:
    (tmp_path / "sport").mkdir()
    for name in ("a.mp4", "sport/b.AVI", "readme.txt"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(InputError, match="found 3 other files, 2 of them video files") as caught:
        FrameStore.open(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_frame_that_went_away_is_named(tmp_path: Path) -> None:
    save_video(tmp_path / "video", 2)
    store = FrameStore.open(tmp_path)
    (tmp_path / "video" / "00001.png").unlink()
    with pytest.raises(InputError, match=r"00001\.png"):
        store.read(0, [1])


def test_the_fingerprint_does_not_depend_on_the_place(tmp_path: Path) -> None:
    save_video(tmp_path / "here" / "a", 2)
    save_video(tmp_path / "here" / "b", 3)
    shutil.copytree(tmp_path / "here", tmp_path / "there" / "deep")
    here, there = FrameStore.open(tmp_path / "here"), FrameStore.open(tmp_path / "there" / "deep")
    assert here.fingerprint() == there.fingerprint() == here.fingerprint()


@pytest.mark.parametrize("change", ["frame more", "frame less", "video more", "other name", "frame moved"])
def test_the_fingerprint_changes_with_what_is_there(tmp_path: Path, change: str) -> None:
    save_video(tmp_path / "a", 2)
    save_video(tmp_path / "b", 3)
    before = FrameStore.open(tmp_path).fingerprint()
    if change == "frame more":
        save(tmp_path / "a" / "00002.png")
    elif change == "frame less":
        (tmp_path / "a" / "00001.png").unlink()
    elif change == "video more":
        save_video(tmp_path / "c", 1)
    elif change == "other name":
        (tmp_path / "a").rename(tmp_path / "x")
    else:
        (tmp_path / "b" / "00002.png").rename(tmp_path / "a" / "00002.png")
    assert FrameStore.open(tmp_path).fingerprint() != before


def test_rendered_videos_are_the_same_for_the_same_numbers() -> None:
    first, second = (FrameStore.rendered(videos=2, frames=3, size=32, seed=5) for _ in range(2))
    assert first.fingerprint() == second.fingerprint()
    # In another order, and twice: what is kept must be what is rendered.
    second.read(1, [2])
    for video in (0, 1, 0):
        frames = first.read(video, [0, 1, 2])
        for ours, theirs in zip(frames, second.read(video, [0, 1, 2]), strict=True):
            assert ours.shape == (32, 32, 3)
            assert np.array_equal(ours, theirs)
        assert not np.array_equal(frames[0], frames[2])
    assert not np.array_equal(first.read(0, [0])[0], first.read(1, [0])[0])


def test_rendered_videos_of_other_numbers_have_another_fingerprint() -> None:
    stores = [
        FrameStore.rendered(videos=2, frames=3, size=32, seed=0),
        FrameStore.rendered(videos=3, frames=3, size=32, seed=0),
        FrameStore.rendered(videos=2, frames=4, size=32, seed=0),
        FrameStore.rendered(videos=2, frames=3, size=48, seed=0),
        FrameStore.rendered(videos=2, frames=3, size=32, seed=1),
    ]
    assert len({store.fingerprint() for store in stores}) == len(stores)
    assert not np.array_equal(stores[0].read(0, [0])[0], stores[4].read(0, [0])[0])


def test_rendered_videos_have_two_frames_per_second() -> None:
    store = FrameStore.rendered(videos=3, frames=5, size=32)
    assert store.fps == 2.0
    assert len(store) == 3
    assert store.lengths.tolist() == [5, 5, 5]
    assert store.cuts(0) == ()


def test_rendered_frames_are_read_only_because_they_are_kept() -> None:
    store = FrameStore.rendered(videos=1, frames=3, size=32)
    for frames in (store.read(0, [0, 2]), store.read(0, [0, 2])):  # rendered, looked up
        for frame in frames:
            assert not frame.flags.writeable
            with pytest.raises(ValueError, match="read-only"):
                frame[0, 0, 0] = 1


def test_cuts_split_videos_into_shots_with_their_own_lengths() -> None:
    store = Shots([10, 5, 7], [(4, 6), (), (3,)])
    clips = list_clips(store, split_at_cuts=True)
    assert clips.video.tolist() == [0, 0, 0, 1, 2, 2]
    assert clips.start.tolist() == [0, 4, 6, 0, 0, 3]
    assert clips.length.tolist() == [4, 2, 4, 5, 3, 4]


def test_ignored_cuts_leave_whole_videos() -> None:
    clips = list_clips(Shots([10, 5], [(4, 6), (2,)]), split_at_cuts=False)
    assert clips.video.tolist() == [0, 1]
    assert clips.start.tolist() == [0, 0]
    assert clips.length.tolist() == [10, 5]


def test_cuts_out_of_order_or_at_the_ends_make_no_empty_shots() -> None:
    clips = list_clips(Shots([10], [(6, 0, 4, 6, 10, 12, -1)]), split_at_cuts=True)
    assert clips.start.tolist() == [0, 4, 6]
    assert clips.length.tolist() == [4, 2, 4]


def test_a_store_without_cut_marks_is_not_split() -> None:
    store = FrameStore.rendered(videos=2, frames=5, size=32)
    assert [list_clips(store, flag).length.tolist() for flag in (True, False)] == [[5, 5], [5, 5]]


def test_some_clips_can_be_selected() -> None:
    clips = list_clips(Shots([10, 5, 7], [(), (), ()]), split_at_cuts=False)
    assert clips.select(clips.length > 5).video.tolist() == [0, 2]


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("size", [(64, 48), (33, 17)])
def test_simplejpeg_gives_the_pixels_of_pillow(
    size: tuple[int, int], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("simplejpeg")
    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    for subsampling in (0, 2):
        file = io.BytesIO()
        Image.fromarray(noise).convert(mode).save(file, "JPEG", quality=80, subsampling=subsampling)
        fast = decode_jpeg(file.getvalue())
        assert fast is not None
        with monkeypatch.context() as patch:
            patch.setattr(reading, "decode_jpeg", lambda data: None)
            assert np.array_equal(fast, decode_image(file.getvalue(), "noise"))


def test_what_simplejpeg_cannot_read_is_left_to_pillow() -> None:
    file = io.BytesIO()
    Image.new("CMYK", (8, 8)).save(file, "JPEG")
    assert decode_jpeg(file.getvalue()) is None
    assert decode_image(file.getvalue(), "print").shape == (8, 8, 3)
    whole = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(whole, "JPEG")
    with pytest.raises(InputError, match="cannot read frame half"):
        decode_image(whole.getvalue()[:700], "half")
    assert decode_jpeg(b"no image") is None
