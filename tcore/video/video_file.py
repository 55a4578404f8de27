"""Frames of a video file or of a folder of images, one at a time; and video files written the same way."""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from tcore.data.decode import import_av, open_container, upright
from tcore.data.images import Frame, read_image
from tcore.data.stores import VIDEO_SUFFIXES
from tcore.errors import InputError
from tcore.evaluation.masks import list_images
from tcore.files import atomic

DEFAULT_RATE = Fraction(24)
H264 = ("libx264", "libopenh264")


class Video:
    """Frames that are read while they are iterated over, never before, and none of them is kept."""

    path: Path
    rate: Fraction = DEFAULT_RATE
    """Frames per second."""
    count: int | None = None
    """Frames that there should be, where that is known beforehand."""
    stems: dict[str, int]
    """Frame numbers by file name without its ending; empty for a video file."""
    problem: str = ""
    """What went wrong, where the last iteration ended early."""

    def __iter__(self) -> Iterator[Frame]:
        raise NotImplementedError

    def name(self, index: int) -> str:
        """The name of a frame, without an ending."""
        raise NotImplementedError


class FolderVideo(Video):
    """Images of a folder in natural order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = list_images(path)
        if not self.files:
            inside = sorted(p.name for p in path.iterdir())
            videos = [name for name in inside if Path(name).suffix.lower() in VIDEO_SUFFIXES]
            hint = f"; give the video file itself, {path / videos[0]}" if videos else ""
            raise InputError(
                f"no frames in {path}: need .jpg or .png images, found {len(inside)} others{hint}."
            )
        self.count = len(self.files)
        self.stems = {file.stem: index for index, file in enumerate(self.files)}
        if len(self.stems) < len(self.files):
            twice = next(file for index, file in enumerate(self.files) if self.stems[file.stem] != index)
            raise InputError(
                f"folder {path} holds two images named {twice.stem}: keep masks in another folder."
            )

    def __iter__(self) -> Iterator[Frame]:
        return map(read_image, self.files)

    def name(self, index: int) -> str:
        """The name of the image."""
        return self.files[index].stem


class FileVideo(Video):
    """A video file, decoded through PyAV and turned upright where its metadata say how."""

    size: tuple[int, int]
    """Height and width as stored, before the frames are turned."""

    def __init__(self, path: Path, container_name: str | None = None) -> None:
        self.path = path
        self.stems = {}
        self._container = container_name
        with self._open() as container:
            stream = container.streams.video[0]
            rate = stream.average_rate or stream.guessed_rate
            if rate is not None and 0 < rate <= 1000:
                self.rate = Fraction(rate).limit_denominator(65535)
            self.count = stream.frames or None
            self.size = (stream.height, stream.width)
            length = container.duration
        # Some containers do not say how many frames they hold, only how long they last.
        self._about = None if length is None else math.floor(self.rate * Fraction(length, 10**6))

    def __iter__(self) -> Iterator[Frame]:
        self.problem = ""
        decoded, broken = 0, False
        with self._open() as container:
            stream = container.streams.video[0]
            for frame in self._decode(container, stream):
                if frame is None or frame.is_corrupt:
                    broken = True
                if frame is not None:
                    decoded += 1
                    yield upright(frame.to_ndarray(format="rgb24"), frame.rotation)
        if decoded == 0:
            raise InputError(f"no frame of {self.path} could be decoded: the file is empty or cut off.")
        exact, about = self.count, self._about
        if broken or (exact is not None and decoded < exact):
            of = f" of {exact}" if exact is not None else ""
            self.problem = f"video {self.path} is cut off or broken: {decoded}{of} frames could be decoded."
        elif exact is None and about is not None and decoded < 0.9 * about - 1:
            self.problem = f"video {self.path} seems cut off: {decoded} of about {about} frames were decoded."

    def name(self, index: int) -> str:
        """The number of the frame."""
        return f"{index:05d}"

    @contextmanager
    def _open(self) -> Iterator[Any]:
        av = import_av(f"video file {self.path}")
        try:
            container = open_container(self.path, self._container)
        except (av.FFmpegError, OSError) as error:
            reason = error.strerror or str(error)
            raise InputError(
                f"cannot read video {self.path}: {reason} (not a video, empty, or cut off)."
            ) from error
        with container:
            if not container.streams.video:
                raise InputError(f"{self.path} holds no video stream.")
            yield container

    @staticmethod
    def _decode(container: Any, stream: Any) -> Iterator[Any]:
        """Frames of a stream; after a packet that cannot be read, what is left in the decoder and None."""
        av = import_av("video file")
        try:
            for packet in container.demux(stream):
                yield from packet.decode()
        except av.FFmpegError:
            with suppress(av.FFmpegError):
                yield from stream.codec_context.decode(None)
            yield None


def open_video(path: Path) -> Video:
    """A video file, or a folder of images; the first frame is not read yet."""
    if not path.exists():
        raise InputError(f"video {path} does not exist: give a video file or a folder of images.")
    return FolderVideo(path) if path.is_dir() else FileVideo(path)


def h264_encoder() -> str | None:
    """The name of an H.264 encoder, where there is one."""
    try:
        av = import_av("H.264")
    except InputError:
        return None
    return next((name for name in H264 if name in av.codecs_available), None)


@contextmanager
def video_writer(path: Path, rate: Fraction, size: tuple[int, int]) -> Iterator[Callable[[Frame], None]]:
    """An H.264 mp4 that grows frame by frame and appears when it is complete.

    Odd sides get one more line, a copy of the last: the format needs even ones.
    """
    av = import_av(f"video file {path}")
    height, width = size
    pad = ((0, height % 2), (0, width % 2), (0, 0))
    try:
        with (
            atomic(path) as temporary,
            av.open(os.fspath(temporary), "w", format="mp4", options={"movflags": "faststart"}) as container,
        ):
            # A short look-ahead keeps few frames in memory.
            stream = container.add_stream(h264_encoder(), rate=rate, options={"preset": "veryfast"})
            stream.width, stream.height, stream.pix_fmt = width + width % 2, height + height % 2, "yuv420p"

            def write(frame: Frame) -> None:
                picture = av.VideoFrame.from_ndarray(np.pad(frame, pad, mode="edge"), format="rgb24")
                container.mux(stream.encode(picture))

            yield write
            container.mux(stream.encode())
    except (av.FFmpegError, OSError) as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}.") from error
