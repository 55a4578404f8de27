"""Several videos in one command: which they are, and which labels belong to which."""

import os
from collections.abc import Sequence
from pathlib import Path

from tcore.data.stores import VIDEO_SUFFIXES, list_images
from tcore.errors import InputError

LABELS = (".png", ".csv", ".json")


def find_videos(paths: Sequence[Path]) -> dict[str, Path]:
    """The videos that are meant, by name; a folder without images stands for the video files in it."""
    if not paths:
        raise InputError("no video: give a video file, a folder of frames, or a folder of videos.")
    found: dict[str, Path] = {}
    for path in paths:
        films = []
        if path.is_dir() and not list_images(path):
            films = sorted(file for file in path.iterdir() if file.suffix.lower() in VIDEO_SUFFIXES)
        for video in films or [path]:
            here = Path(os.path.normpath(video.absolute()))  # a link goes by its own name
            name = here.name if here.is_dir() else here.stem
            if name in found:
                raise InputError(f"{found[name]} and {video} are both called {name}: do one after the other.")
            found[name] = video
    return found


def find_labels(folder: Path, name: str, only: bool) -> list[Path]:
    """The labels of a video: FOLDER/NAME.png, .csv or .json, or all those in FOLDER/NAME.

    Of the only video, they may lie in FOLDER itself.
    """
    single = [folder / f"{name}{suffix}" for suffix in LABELS]
    found = [path for path in single if path.is_file()]
    for inner in (folder / name, folder) if only else (folder / name,):
        if inner.is_dir() and not found:
            found = sorted(path for path in inner.iterdir() if path.suffix.lower() in LABELS)
    if not found:
        wanted = f"{name}.png, {name}.csv or {name}.json, or files in a folder {name}"
        raise InputError(f"no labels for {name} in {folder}: need {wanted}.")
    return found
