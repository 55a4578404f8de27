"""Files that mean harm: bombs, pipes, loops, code, names that lead outside. Each is refused in one line."""

import io
import json
import os
import re
import struct
import sys
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from tcore.config import load_config
from tcore.data.check import read_thumb
from tcore.data.images import LARGEST, decode_image, read_image
from tcore.data.packed import shard_path
from tcore.data.prepare import prepare
from tcore.data.stores import FrameStore, PackedStore
from tcore.errors import InputError
from tcore.evaluation.benchmarks import jhmdb
from tcore.evaluation.benchmarks.benchmark import frame_size
from tcore.evaluation.benchmarks.davis import Davis
from tcore.evaluation.benchmarks.jhmdb import Jhmdb, read_mat
from tcore.evaluation.checkpoints import read_file
from tcore.evaluation.encoders import load_encoder
from tcore.evaluation.masks import read_ids
from tcore.video.labels import read_labels
from tests.data.packing import jpeg, pack
from tests.evaluation.layouts import write_mat
from tests.readers import make_readers
from tests.readers.reader import SIZES, small_encoder

ROOT = Path(__file__).parent.parent


def png_bomb(side: int) -> bytes:
    """A PNG of a few hundred bytes that declares side x side pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(bytes(99)))
        + chunk(b"IEND", b"")
    )


def jpeg_bomb(side: int) -> bytes:
    """A JPEG that declares side x side pixels."""
    data = jpeg((1, 2, 3))
    at = data.index(b"\xff\xc0")
    return data[: at + 5] + struct.pack(">HH", side, side) + data[at + 9 :]


def test_nothing_in_the_package_unpickles() -> None:
    for path in (ROOT / "tcore").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"pickle|weights_only=False|(?<![.\w])(eval|exec)\(", text), path
        assert text.count("torch.load(") == text.count("weights_only=True"), path


READERS: dict[str, Callable[[Path], object]] = {
    "frame": read_image,
    "mask of a benchmark": read_ids,
    "mask of a person": lambda path: read_labels([path], {}),
    "size of a frame": frame_size,
    "thumb": lambda path: read_thumb(path.read_bytes(), str(path)),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("side", [8193, 12_000, 60_000])
def test_an_image_that_declares_too_many_pixels_is_refused_before_it_is_decoded(
    reader: str, side: int, tmp_path: Path
) -> None:
    for name, data in (("bomb.png", png_bomb(side)), ("jpeg.png", jpeg_bomb(side))):
        path = tmp_path / name / "video" / "0.png"
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
        begun = time.process_time()
        with pytest.raises(InputError, match=rf"pixels, more than {LARGEST:,}|more than {LARGEST:,} pixels"):
            READERS[reader](path)
        assert time.process_time() - begun < 5


@pytest.mark.long
def test_preparing_skips_a_bomb_and_says_why(tmp_path: Path) -> None:
    for name, data in (("a", jpeg((9, 9, 9))), ("b", png_bomb(20_000))):
        (tmp_path / "frames" / name).mkdir(parents=True)
        (tmp_path / "frames" / name / "0.png").write_bytes(data)
    prepare(tmp_path / "frames", tmp_path / "store", workers=1)
    assert list(FrameStore.open(tmp_path / "store").names) == ["a"]
    assert f"more than {LARGEST:,} pixels" in (tmp_path / "store" / "skipped.csv").read_text()


def test_formats_that_run_other_programs_are_not_opened(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4)).save(buffer, "eps")
    with pytest.raises(InputError, match="cannot identify image file"):
        decode_image(buffer.getvalue(), "frame.jpg")


def test_pipes_and_devices_are_refused_and_nobody_waits_for_them(tmp_path: Path) -> None:
    pipe, zero = tmp_path / "0.png", tmp_path / "1.png"
    os.mkfifo(pipe)
    zero.symlink_to("/dev/zero")
    for path in (pipe, zero):
        for read in (read_image, read_ids, read_mat, load_config):
            with pytest.raises(InputError, match="a pipe or a device"):
                read(path)


def test_links_in_circles_end(tmp_path: Path) -> None:
    folder = tmp_path / "store" / "video"
    folder.mkdir(parents=True)
    for index in range(3):
        (folder / f"{index}.jpg").write_bytes(jpeg((index, 0, 0)))
    (folder / "again").symlink_to(tmp_path / "store", target_is_directory=True)
    loop = folder / "9.jpg"
    loop.symlink_to(loop)
    store = FrameStore.open(tmp_path / "store")
    assert list(store.names) == ["video"]
    with pytest.raises(InputError, match=r"cannot read frame .*9.jpg: Too many levels of symbolic links"):
        store.read(0, [3])
    for read in (load_encoder, load_config, read_mat, read_ids):
        with pytest.raises(InputError):
            read(loop)


def test_names_in_a_tar_are_never_paths(tmp_path: Path) -> None:
    store = pack(tmp_path / "inside" / "store", [[("../../../outside", 2), ("/tmp/absolute", 2)]])
    before = sorted(path for path in tmp_path.rglob("*"))
    opened = PackedStore(store)
    assert [len(opened.read(video, [0, 1])) for video in range(2)] == [2, 2]
    assert opened.verify() == []
    assert sorted(path for path in tmp_path.rglob("*")) == before


def test_a_shard_that_is_a_link_to_another_file_is_refused(tmp_path: Path) -> None:
    store = pack(tmp_path / "store", [[("a", 2)]])
    secret = tmp_path / "secret"
    secret.write_text("of some length")
    shard_path(store, 0).unlink()
    shard_path(store, 0).symlink_to(secret)
    with pytest.raises(InputError, match="is cut off"):
        PackedStore(store).read(0, [0])


@pytest.mark.parametrize("name", ["../../outside", "/etc", "a/../../b"])
def test_lists_of_clips_do_not_lead_out_of_the_dataset(name: str, tmp_path: Path) -> None:
    for folder in ("JPEGImages", "Annotations", "Rename_Images", "joint_positions", "splits", "ImageSets"):
        (tmp_path / folder).mkdir()
    (tmp_path / "ImageSets" / "val.txt").write_text(f"{name}\n")
    (tmp_path / "splits" / "jump_test_split1.txt").write_text(f"{name}.avi 2\n")
    for benchmark in (Davis, Jhmdb):
        with pytest.raises(InputError, match="leads out of the dataset"):
            benchmark.layout(tmp_path)


@pytest.mark.parametrize("size", ["dim", "depth", "image_size", "num_registers", "patch_size"])
@pytest.mark.parametrize("value", [10**6, 10**12, -1, 1.5, "9", None, True])
def test_a_card_that_asks_for_terabytes_is_refused(size: str, value: object, tmp_path: Path) -> None:
    save_file(small_encoder().backbone.state_dict(), tmp_path / "encoder.safetensors")
    sizes = SIZES | {size: value, "image_size" if size == "patch_size" else "depth": 10**6}
    (tmp_path / "encoder.json").write_text(json.dumps({"vit": sizes | {size: value}}))
    begun = time.process_time()
    with pytest.raises(InputError, match=r"no encoder can be built|do not fit"):
        load_encoder(tmp_path)
    assert time.process_time() - begun < 5


def test_weights_that_announce_more_than_they_hold_are_refused(tmp_path: Path) -> None:
    state = dict(small_encoder().backbone.state_dict())
    state["patch_embed.proj.weight"] = torch.zeros(1).expand(10**5, 3, 16, 16)
    torch.save(state, tmp_path / "hollow.pth")
    with pytest.raises(InputError, match=r"patch_embed.proj.weight of shape .* holds fewer numbers"):
        load_encoder(tmp_path / "hollow.pth")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc of Linux")
def test_weights_are_read_and_not_mapped(tmp_path: Path) -> None:
    # A mapped file that somebody cuts off would end the process without a word (SIGBUS).
    path = tmp_path / "mapped.safetensors"
    save_file(small_encoder().backbone.state_dict(), path)
    held = read_file(path)
    assert held
    assert path.name not in Path("/proc/self/maps").read_text()


def test_a_compressed_checkpoint_is_not_unpacked(tmp_path: Path) -> None:
    whole, bomb = tmp_path / "whole.pth", tmp_path / "bomb.pth"
    torch.save({"model": {"patch_embed.proj.weight": torch.zeros(10**6)}}, whole)
    with zipfile.ZipFile(whole) as archive, zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as packed:
        for part in archive.infolist():
            packed.writestr(part.filename, archive.read(part))
    with pytest.raises(InputError, match=r"bomb.pth is smaller than the \d+ bytes it would unpack to"):
        load_encoder(bomb)


@pytest.mark.parametrize(
    "header",
    [
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 2) + b"{}",
        b'{"cls_token":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,4]}}',
        b'{"cls_token":{"dtype":"F32","shape":[1],"data_offsets":[0,99999999999]}}',
        b'{"cls_token":' * 5000,
    ],
)
def test_a_hostile_safetensors_header_is_refused(header: bytes, tmp_path: Path) -> None:
    data = header if header[:1] != b"{" else struct.pack("<Q", len(header)) + header + bytes(4)
    (tmp_path / "hostile.safetensors").write_bytes(data)
    with pytest.raises(InputError):
        load_encoder(tmp_path / "hostile.safetensors")


def test_json_nested_without_end_is_refused(tmp_path: Path) -> None:
    deep = "[" * 200_000
    store = pack(tmp_path / "store", [[("a", 2)]])
    (store / "store.json").write_text(deep)
    for name in ("config.json", "points.json"):
        (tmp_path / name).write_text(deep)
    for read in (
        lambda: load_config(tmp_path / "config.json"),
        lambda: PackedStore(store),
        lambda: read_labels([tmp_path / "points.json"], {}),
    ):
        with pytest.raises(InputError, match=r"nested|not JSON"):
            read()


DAMAGED = [
    ("plan.json", b"{}", "plan.json: content.settings is missing or wrong; give a new folder"),
    ("parts/*.json", b'{"shard": {}}', "000000.json: content.notes is missing or wrong; remove it"),
    ("checkpoints.json", b'{"checkpoints": [{"step": 1}]}', "scores is missing or wrong; remove it"),
    ("score card", b'{"benchmarks": {}}', "card.encoder is missing or wrong.*evaluate again"),
    ("score card of a report", b"{", "not JSON.*evaluate again"),
    ("results of a quickstart", b'{"heldout_videos": 2}', "content.scores.*tcore quickstart"),
    ("scores of a lab", b'{"benchmarks": {"davis": {}}}', "results.json.*scores.*remove"),
    ("lab.json of a table", b'{"seconds": []}', "lab.json: content.seconds is missing or wrong; remove it"),
    ("init.json", b"[]", "init.json: content is missing or wrong; remove"),
    ("frames of a run", b'{"frames": 3}', "environment.json: content.frames.*--frames"),
]


def test_a_damaged_file_of_a_run_is_named_with_what_to_do(tmp_path: Path) -> None:
    readers = {reader.name: reader for reader in make_readers(tmp_path)}
    for name, damage, said in DAMAGED:
        whole = readers[name].file.read_bytes()
        readers[name].file.write_bytes(damage)
        with pytest.raises(InputError, match=said) as caught:
            readers[name].read()
        assert "\n" not in str(caught.value)
        readers[name].file.write_bytes(whole)


def test_a_mat_file_that_unpacks_beyond_the_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jhmdb, "LARGEST", 2**20)
    bomb = zlib.compress(bytes(2**21))
    write_mat(tmp_path / "bomb.mat", {})  # a header
    with (tmp_path / "bomb.mat").open("ab") as file:
        file.write(struct.pack("<II", 15, len(bomb)) + bomb)
    with pytest.raises(InputError, match="no MATLAB 5 file"):
        read_mat(tmp_path / "bomb.mat")
