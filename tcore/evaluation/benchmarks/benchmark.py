"""What a benchmark is: its clips, the result of one, the scores of several, and the files that it needs."""

import hashlib
import io
import math
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from tcore.data.findings import Findings
from tcore.data.images import BAD_IMAGE, Frame, open_image, read_image
from tcore.data.stores import list_images
from tcore.errors import InputError, reason
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.masks import VOID, Ids, as_binary, read_ids
from tcore.evaluation.protocols import TCORE, Protocol, corrected
from tcore.evaluation.resize import Size, input_size
from tcore.evaluation.run_clip import run_masks
from tcore.files import read_bytes, read_text
from tcore.text import format_size

Kind = Literal["objects", "parts", "joints"]
Result = dict[str, Any]  # of one clip: plain numbers, as they are written to disk
Source = str | Path | int  # the folder of a dataset, or a number of rendered videos
Save = Callable[[str, str, Any], None]  # clip, file name, ids or joints


@dataclass(frozen=True)
class Clip:
    """One video on disk: its frames, and the files with their true labels."""

    name: str
    frames: tuple[Path, ...]
    truth: tuple[Path, ...]

    @property
    def length(self) -> int:
        """Number of frames."""
        return len(self.frames)


class Layout(NamedTuple):
    """The clips of a dataset on disk."""

    names: list[str]
    listed: bool
    """Whether an official list names them; otherwise they are all that were found."""
    find: Callable[[str], Any]
    """A clip by its name; an error says which file is missing."""


class LabeledClip(NamedTuple):
    """Labels of a clip: ids of every frame, or joints (x/y, joint, frame); and how to read a frame."""

    read: Callable[[int], Frame]
    found: Any
    truth: Any


@dataclass(frozen=True)
class Benchmark(ABC):
    """Clips to score an encoder on; a subclass says how, and everything else asks it."""

    clips: list[Any]
    """Each has a `name`, a `length` in frames, and whatever `run` needs."""
    protocol: Protocol
    clips_from: str
    """Who chose the clips."""
    binary: bool = False
    fixed_size: Size | None = None
    """An input size other than the protocol's, to save time; such scores are not comparable."""

    name: ClassVar[str]
    score_names: ClassVar[tuple[str, ...]]
    """The scores that count, the main one first."""
    kind: ClassVar[Kind] = "objects"
    """What is propagated, or what figures show of it."""
    options: ClassVar[tuple[str, ...]] = ()
    """Settings that go with this benchmark: size, binary, skip_first, count_lost, round_border."""
    official_clips: ClassVar[tuple[int, ...]] = ()
    """Clips of the official list, and of its older version; published scores are measured on the first."""
    official_list: ClassVar[str] = ""
    """The files that name these clips."""
    on_disk: ClassVar[bool] = True
    """Whether the clips are read from a folder; `tcore evaluate` then has a flag for it."""
    recognized_by: ClassVar[tuple[str, ...]] = ()
    """A folder that holds one of these files or folders is laid out like this benchmark."""
    unlisted: ClassVar[str] = "all clips found"
    """Who chose the clips where no official list does."""
    old_name: ClassVar[str] = ""
    """What results of earlier versions call this benchmark."""

    @classmethod
    @abstractmethod
    def layout(cls, source: Source) -> Layout:
        """The clips of a source; an error names the file or folder that is missing."""

    @classmethod
    def adapt(cls, chosen: Protocol) -> Protocol:
        """The protocol that this benchmark runs with: the published one, with the chosen corrections."""
        return chosen if chosen.name.split("-")[0] == TCORE.name else corrected(TCORE, chosen)

    @classmethod
    def open(
        cls,
        source: Source,
        protocol: Protocol,
        *,
        binary: bool = False,
        size: Size | None = None,
        most: int | None = None,
    ) -> "Benchmark":
        """The benchmark with all clips of a folder, or with `most` of them, evenly spread."""
        names, listed, find = cls.layout(source)
        clips = [find(name) for name in names]
        chosen = spread(clips, most)
        clips_from = "the official list" if listed else cls.unlisted
        if len(chosen) < len(clips):
            clips_from = f"some of {clips_from}"
        return cls(chosen, cls.adapt(protocol), clips_from, binary, size)

    @abstractmethod
    def run(self, encoder: Encoder, clip: Any, save: Save | None = None) -> Result:
        """The result of one clip."""

    @abstractmethod
    def total(self, results: Iterable[Result]) -> Result:
        """The scores of several clips together, as fractions, and what else is known of them."""

    def summarize(self, results: Iterable[Result]) -> dict[str, float]:
        """The scores of several clips together, as fractions."""
        total = self.total(results)
        return {name: total[name] for name in self.score_names}

    def score(self, predictions: Path) -> tuple[dict[str, float], Result]:
        """The scores of predictions that are on disk, and their details."""
        results = {clip.name: self.score_saved(clip, predictions) for clip in self.clips}
        return self.summarize(results.values()), self.describe(results)

    def score_saved(self, clip: Any, predictions: Path) -> Result:
        """The result of one clip, given a folder of predictions."""
        raise InputError(f"predictions of {self.name} are scored as they are made: use tcore evaluate.")

    def describe(self, results: dict[str, Result]) -> Result:
        """All details of the results by clip."""
        return self.total(results.values())

    @abstractmethod
    def label(self, encoder: Encoder, clip: Any) -> LabeledClip:
        """A clip with its predicted and its true labels, for figures."""

    def fingerprints(self, clip: Any, patch_size: int) -> tuple[str, str]:
        """Short names for the true labels of a clip and for its frames: other bytes have other names."""
        return fingerprint(clip.truth), fingerprint(clip.frames)

    @classmethod
    def check_truth(cls, clip: Any, sizes: dict[str, Size]) -> Iterator[str]:
        """What is wrong with the true labels of a clip, given the sizes of its frames by their stem."""
        yield from ()

    @classmethod  # noqa: B027
    def report(cls, findings: Findings, root: Path, clips: Sequence[Any]) -> None:
        """Add what a user of this dataset should know to the findings of `tcore check`."""

    def check(self) -> None:  # noqa: B027
        """Refuse clips that cannot be scored, as far as a quick look shows it."""

    def input_size(self, encoder: Encoder, frame: Size) -> Size:
        """The size at which frames of a clip go in."""
        if self.fixed_size is not None:
            return input_size(self.fixed_size, encoder.patch_size)
        return self.own_size(frame, encoder.patch_size)

    def sizes(self, encoder: Encoder, size: Size) -> Result:
        """What a result says of the size of its frames."""
        return {"input": list(size), "grid": [side // encoder.patch_size for side in size]}

    def own_size(self, frame: Size, patch_size: int) -> Size:
        """The size of this benchmark's published protocol, or of a finer grid."""
        return self.protocol.input_size(frame, patch_size)


class MaskBenchmark(Benchmark):
    """Masks of ids on disk: those of the first frame are propagated, and all are compared."""

    images: ClassVar[tuple[str, ...]]
    masks: ClassVar[tuple[str, ...]]
    """Folders of frames and of masks: the first one that is there is taken."""
    lists: ClassVar[tuple[str, ...]]
    """Files that may name the official clips."""
    first_mask_is_enough: ClassVar[bool] = False
    """Whether a clip may have the mask of its first frame alone; it cannot be scored then."""

    @classmethod
    def layout(cls, source: Source) -> Layout:
        """Clips that the official list names, or all."""
        root = Path(str(source))
        images, masks = need_folder(root, cls.images), need_folder(root, cls.masks)
        official = next((root / name for name in cls.lists if (root / name).is_file()), None)
        folders = sorted(path.name for path in images.iterdir() if path.is_dir() and path.name[0] != ".")
        names = folders if official is None else read_list(official)
        if not names:
            raise InputError(f"no clips under {images}: need a folder of frames for each.")
        return Layout(names, official is not None, lambda name: cls.find_clip(name, images, masks))

    @classmethod
    def find_clip(cls, name: str, images: Path, masks: Path) -> Clip:
        """One clip, with a mask for every frame."""
        folders = (images / name, masks / name)
        frames, labels = (list_images(folder) if folder.is_dir() else () for folder in folders)
        if not frames or not labels:
            raise InputError(
                f"clip {name} has {len(frames)} frames in {folders[0]} and {len(labels)} masks in "
                f"{folders[1]}: need both."
            )
        first_only = cls.first_mask_is_enough and [p.stem for p in labels] == [frames[0].stem]
        missing = {p.stem for p in frames} ^ {p.stem for p in labels}
        if missing and not first_only:
            raise InputError(
                f"clip {name}: {min(missing)} has a frame or a mask, but not both ({len(missing)} such)."
            )
        return Clip(name, frames, labels)

    @abstractmethod
    def first_labels(self, clip: Clip) -> tuple[Ids, int]:
        """The first mask of a clip, and the number of classes."""

    @abstractmethod
    def is_scored(self, clip: Clip, index: int) -> bool:
        """Whether a frame counts."""

    @abstractmethod
    def score_clip(self, clip: Clip, found: Iterable[Ids]) -> Result:
        """The result of one clip, given the ids of its frames."""

    def read(self, path: Path) -> Ids:
        """The ids of a frame, or where there is an object."""
        return as_binary(read_ids(path)) if self.binary else read_ids(path)

    def read_truth(self, clip: Clip, index: int) -> Ids:
        """The true ids of a frame."""
        return self.read(clip.truth[index])

    def run(self, encoder: Encoder, clip: Any, save: Save | None = None) -> Result:
        """Propagate the first mask of a clip and compare."""
        size, predicted = self._predict(encoder, clip)

        def saved() -> Iterator[Ids]:
            for path, ids in zip(clip.frames, predicted, strict=True):
                if save:
                    save(clip.name, f"{path.stem}.png", ids)
                yield ids

        return self.score_clip(clip, saved()) | self.sizes(encoder, size)

    def _predict(self, encoder: Encoder, clip: Clip) -> tuple[Size, Iterator[Ids]]:
        first, num_classes = self.first_labels(clip)
        size = self.input_size(encoder, frame_size(clip.frames[0]))
        return size, run_masks(encoder, clip.frames, first, size, self.protocol, num_classes)

    def label(self, encoder: Encoder, clip: Any) -> LabeledClip:
        """Predicted and true ids of every frame; void is background."""
        truth = [self.read_truth(clip, index) for index in range(len(clip.truth))]
        truth = [np.where(ids == VOID, 0, ids).astype(np.uint8) for ids in truth]
        found = list(self._predict(encoder, clip)[1])
        return LabeledClip(lambda index: read_image(clip.frames[index]), found, truth)

    def pairs(self, clip: Clip, found: Iterable[Ids]) -> Iterator[tuple[Ids, Ids]]:
        """True and predicted ids of the frames that count."""
        for index, ids in enumerate(found):
            if self.is_scored(clip, index):
                truth = self.read_truth(clip, index)
                if truth.shape != ids.shape:
                    raise InputError(
                        f"mask {clip.truth[index]} is {format_size(*truth.shape)}, its prediction "
                        f"{format_size(*ids.shape)}: need the same size."
                    )
                yield truth, ids

    def score_saved(self, clip: Any, predictions: Path) -> Result:
        """Compare masks named like the frames; those that do not count may be missing."""
        folder = predictions / clip.name
        files = {path.stem: path for path in list_images(folder)} if folder.is_dir() else {}

        def found() -> Iterator[Ids]:
            for index, mask in enumerate(clip.truth):
                if not self.is_scored(clip, index):
                    yield np.zeros((1, 1), np.uint8)
                elif mask.stem in files:
                    yield self.read(files[mask.stem])
                else:
                    raise InputError(f"no prediction for frame {mask.stem} of {clip.name} in {folder}.")

        return self.score_clip(clip, found())

    @classmethod
    def check_truth(cls, clip: Any, sizes: dict[str, Size]) -> Iterator[str]:
        """Masks that cannot be read or have another size than their frame."""
        for path in clip.truth:
            try:
                shape = read_ids(path).shape
            except InputError as error:
                yield str(error)
                continue
            expected = sizes.get(path.stem, shape)
            if shape != expected:
                yield f"mask {path} is {format_size(*shape)}, its frame {format_size(*expected)}."


class JointBenchmark(Benchmark):
    """Points of a clip (x/y, point, frame): propagated from where they are given, and scored by PCK."""

    score_names = ("PCK@0.1", "PCK@0.2")
    kind = "joints"

    @classmethod
    @abstractmethod
    def read_truth(cls, clip: Clip) -> np.ndarray:
        """The true points; NaN where one is lost or not visible."""

    @abstractmethod
    def predict(self, encoder: Encoder, clip: Clip) -> tuple[np.ndarray, np.ndarray, Size]:
        """Predicted and true points of a clip, and the input size."""

    @abstractmethod
    def compare(self, clip: Any, found: np.ndarray) -> Result:
        """The result of one clip, given its predicted points."""

    def run(self, encoder: Encoder, clip: Any, save: Save | None = None) -> Result:
        """Propagate the points of a clip and compare."""
        found, _, size = self.predict(encoder, clip)
        if save:
            save(clip.name, "joints.npz", found)
        return self.compare(clip, found) | {"frames": len(clip.frames)} | self.sizes(encoder, size)

    def score_saved(self, clip: Any, predictions: Path) -> Result:
        """Read the joints.npz that an evaluation saves."""
        saved = predictions / clip.name / "joints.npz"
        return self.compare(clip, read_joints(saved, self.read_truth(clip).shape))

    def label(self, encoder: Encoder, clip: Any) -> LabeledClip:
        """Predicted and true points."""
        found, truth, _ = self.predict(encoder, clip)
        return LabeledClip(lambda index: read_image(clip.frames[index]), found, truth)

    @classmethod
    def check_truth(cls, clip: Any, sizes: dict[str, Size]) -> Iterator[str]:
        """An annotation that cannot be read."""
        try:
            cls.read_truth(clip)
        except InputError as error:
            yield str(error)


def read_joints(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Predicted points of a clip (x/y, point, frame)."""
    try:
        data = io.BytesIO(read_bytes(path))
        with zipfile.ZipFile(data) as archive:
            if archive.getinfo("joints.npy").file_size > 16 * math.prod(shape) + 4096:
                raise ValueError("more numbers than there are joints")
        with np.load(data) as arrays:
            joints = np.asarray(arrays["joints"], dtype=np.float64)
    except FileNotFoundError as error:
        raise InputError(f"no predictions: {path} does not exist.") from error
    except Exception as error:  # a file of another kind can raise anything
        raise InputError(f"cannot read {path}: need an npz file with the array 'joints'.") from error
    if joints.shape != shape:
        raise InputError(f"{path}: joints is {joints.shape}, need {shape} (x/y, joint, frame).")
    return joints


def spread(clips: list[Any], most: int | None) -> list[Any]:
    """At most this many, evenly spread over all.

    >>> spread(["a", "b", "c", "d", "e"], 3)
    ['a', 'c', 'e']
    """
    if most is None or most >= len(clips):
        return clips
    if most < 1:
        raise InputError(f"clips={most}: need 1 or more.")
    last = len(clips) - 1
    return [clips[round(index * last / max(1, most - 1))] for index in range(most)]


def frame_size(path: Path) -> Size:
    """Height and width of an image, from its header where that can be read."""
    try:
        with open_image(path) as image:
            return image.height, image.width
    except BAD_IMAGE:
        return read_image(path).shape[:2]  # raises the readable error


def fingerprint(files: Iterable[Path]) -> str:
    """A short name for the bytes of some files."""
    digest = hashlib.sha256()
    for path in files:
        try:
            digest.update(hashlib.sha256(read_bytes(path)).digest())
        except OSError as error:
            raise InputError(f"cannot read {path}: {reason(error)}.") from error
    return digest.hexdigest()[:16]


def need_folder(root: Path, candidates: Sequence[str]) -> Path:
    """The first of some folders that is there; an error says what was found instead."""
    if not root.is_dir():
        raise InputError(f"dataset {root} does not exist, or is a file: need a folder with {candidates[0]}.")
    for candidate in candidates:
        if (root / candidate).is_dir():
            return root / candidate
    found = ", ".join(sorted(path.name for path in root.iterdir())[:8]) or "nothing"
    raise InputError(f"{root / candidates[0]} does not exist: {root} holds {found}.")


def read_list(path: Path) -> list[str]:
    """Lines of an official list; a name that leads out of the dataset is refused."""
    try:
        lines = [line.strip() for line in read_text(path).splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {reason(error)}.") from error
    for line in lines:
        if ".." in Path(line).parts or Path(line).is_absolute() or "\0" in line:
            raise InputError(f"{path} names {line!r}, which leads out of the dataset.")
    return [line for line in lines if line]
