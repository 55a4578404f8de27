"""JHMDB (Jhuang et al., ICCV 2013): 15 joints of a person, scored by PCK on the test clips of split 1."""

import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from tcore.data.findings import Findings
from tcore.data.images import ahead, read_image
from tcore.data.stores import list_images
from tcore.errors import InputError, reason
from tcore.evaluation import scores
from tcore.evaluation.benchmarks.benchmark import (
    Clip,
    JointBenchmark,
    Layout,
    Result,
    Source,
    frame_size,
    need_folder,
    read_list,
)
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.pose import annotated_pixels, joints_from_grid, joints_to_grid
from tcore.evaluation.protocols import Protocol
from tcore.evaluation.resize import Size
from tcore.evaluation.run_clip import run_clip
from tcore.files import read_bytes

NUM_JOINTS = 15
NUM_ACTIONS = 21
Joints = Float[np.ndarray, "2 joints time"]  # x, y in pixels from 0, NaN where a joint is lost
# Codes of MATLAB 5 files: type of a data element -> numpy's name for it.
NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
MATRIX, COMPRESSED = 14, 15
LARGEST = 1 << 28  # no annotation is larger; a header that says so is broken or hostile


class Jhmdb(JointBenchmark):
    """Joints of the first frame, scored by the share that stays in place (PCK)."""

    name = "jhmdb"
    options = ("size", "count_lost", "round_border")
    official_clips = (268,)
    official_list = "splits/ACTION_test_split1.txt name 268"
    recognized_by = ("Rename_Images", "joint_positions")

    @classmethod
    def adapt(cls, chosen: Protocol) -> Protocol:
        """Joints have no edges."""
        return replace(super().adapt(chosen), edges="off")

    @classmethod
    def layout(cls, source: Source) -> Layout:
        """Test clips of split 1, or all clips where there are no splits."""
        root = Path(str(source))
        images, joints = (need_folder(root, (name,)) for name in cls.recognized_by)
        splits = sorted((root / "splits").glob("*_test_split1.txt"))
        names = [name for path in splits for name in _test_clips(path)]
        if not splits:
            folders = sorted(p for p in images.glob("*/*") if p.is_dir() and p.name[0] != ".")
            names = [f"{p.parent.name}/{p.name}" for p in folders]
        if not names:
            raise InputError(f"no clips under {images}: need folders ACTION/CLIP of frames.")
        return Layout(names, bool(splits), lambda name: _find_clip(name, images, joints))

    def own_size(self, frame: Size, patch_size: int) -> Size:
        """320x320 for frames of any size."""
        return self.protocol.finer((320, 320), patch_size)

    @classmethod
    def read_truth(cls, clip: Clip) -> Joints:
        """True joints of a clip."""
        positions = read_mat(clip.truth[0]).get("pos_img")
        if positions is None or positions.ndim != 3 or positions.shape[:2] != (2, NUM_JOINTS):
            shape = None if positions is None else positions.shape
            raise InputError(f"{clip.truth[0]}: pos_img is {shape}, need (2, {NUM_JOINTS}, frames).")
        if positions.shape[2] != len(clip.frames):
            raise InputError(
                f"clip {clip.name} has {len(clip.frames)} frames, but joints of {positions.shape[2]}."
            )
        return annotated_pixels(positions)

    def predict(self, encoder: Encoder, clip: Clip) -> tuple[Joints, Joints, Size]:
        """Predicted and true joints of a clip, and the input size."""
        truth = self.read_truth(clip)
        image = frame_size(clip.frames[0])
        size = self.input_size(encoder, image)
        grid = (size[0] // encoder.patch_size, size[1] // encoder.patch_size)
        first = joints_to_grid(truth[:, :, 0], image, grid, self.protocol.round_border)
        labels = run_clip(encoder, ahead(read_image, clip.frames), first, size, self.protocol)
        return joints_from_grid((maps for _, maps in labels), image, grid), truth, size

    def total(self, results: Iterable[Result]) -> Result:
        """PCK at each threshold, and how many joints could not be scored."""
        clips = [[np.array(one[name], dtype=np.float64) for name in ("truth", "joints")] for one in results]
        truth, joints = ([clip[side] for clip in clips] for side in (0, 1))
        found = scores.pck(truth, joints, count_lost=self.protocol.count_lost)
        return {f"PCK@{t:g}": float(value) for t, value in zip(scores.THRESHOLDS, found.pck, strict=True)} | {
            "scored": found.scored,
            "lost_in_truth": found.lost_in_truth,
            "lost_in_prediction": found.lost_in_prediction,
        }

    def compare(self, clip: Any, found: Joints) -> Result:
        """All joints, because they are pooled over clips."""
        return describe_joints(self.read_truth(clip), found)

    @classmethod
    def report(cls, findings: Findings, root: Path, clips: Sequence[Any]) -> None:
        """Count the official lists."""
        found = len(list((root / "splits").glob("*_test_split1.txt")))
        findings.say("splits", f"{found} of {NUM_ACTIONS} actions have a list of split 1", split_files=found)
        if found < NUM_ACTIONS:
            findings.add(
                "warning",
                f"{NUM_ACTIONS - found} of {NUM_ACTIONS} files splits/ACTION_test_split1.txt are missing "
                f"under {root}: put them there, or clips of other splits are scored too.",
            )


def _test_clips(path: Path) -> Iterator[str]:
    """Lines `<clip>.avi 2` of an action's list are the test clips."""
    action = path.name.removesuffix("_test_split1.txt")
    for line in read_list(path):
        name, _, part = line.rpartition(" ")
        if part == "2":
            yield f"{action}/{name.strip().removesuffix('.avi')}"


def _find_clip(name: str, images: Path, joints: Path) -> Clip:
    annotation = joints / name / "joint_positions.mat"
    for path in (images / name, annotation):
        if not path.exists():
            raise InputError(f"clip {name} is not complete: {path} does not exist.")
    return Clip(name, list_images(images / name), (annotation,))


def describe_joints(truth: Joints, joints: Joints) -> Result:
    """Joints as nested lists with None for what is lost, as JSON has no NaN."""

    def plain(values: Joints) -> Any:
        return np.where(np.isnan(values), np.array(None), values.astype(object)).tolist()

    return {"truth": plain(truth), "joints": plain(joints)}


def read_mat(path: Path) -> dict[str, np.ndarray]:
    """The real numeric arrays of a MATLAB 5 file, by name; other contents are skipped."""
    try:
        data = read_bytes(path)
        arrays, position = {}, 128
        if data[126:128] != b"IM":  # of machines with the other byte order, too
            raise ValueError("no MATLAB 5 file")
        while position + 8 <= len(data):
            kind, body, position = _element(data, position)
            if kind == COMPRESSED:
                kind, body, _ = _element(_inflate(body), 0)
            if kind == MATRIX and (named := _matrix(body)) is not None:
                arrays[named[0]] = named[1]
        return arrays
    except OSError as error:
        raise InputError(f"cannot read {path}: {reason(error)}.") from error
    except (KeyError, ValueError, IndexError, struct.error, zlib.error, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: no MATLAB 5 file, or a broken one.") from error


def _inflate(body: bytes) -> bytes:
    inflater = zlib.decompressobj()
    data = inflater.decompress(body, LARGEST)
    if inflater.unconsumed_tail:
        raise ValueError("too large")
    return data


def _element(data: bytes, position: int) -> tuple[int, bytes, int]:
    """Kind and bytes of the data element at a position, and where the next one begins."""
    kind, size = struct.unpack_from("<II", data, position)
    if kind >> 16:  # a small element holds its bytes beside its kind
        if kind >> 16 > 4:
            raise ValueError("a small element holds 4 bytes at most")
        return kind & 0xFFFF, data[position + 4 : position + 4 + (kind >> 16)], position + 8
    start, end = position + 8, position + 8 + size
    if end > len(data):
        raise ValueError("cut off")
    # Elements are padded to 8 bytes, compressed ones are not.
    return kind, data[start:end], end if kind == COMPRESSED else (end + 7) // 8 * 8


def _matrix(body: bytes) -> tuple[str, np.ndarray] | None:
    """Name and values of a real numeric matrix."""
    _, flags, position = _element(body, 0)
    if not 6 <= flags[0] <= 15 or flags[1] & 8:  # its class, and whether it is complex
        return None
    _, shape, position = _element(body, position)
    _, name, position = _element(body, position)
    kind, values, _ = _element(body, position)
    dimensions = np.frombuffer(shape, "<i4")
    array = np.frombuffer(values, "<" + NUMBERS[kind]).reshape(dimensions, order="F")
    return name.decode("ascii"), array.astype(np.float64)
