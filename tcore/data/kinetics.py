"""Kinetics-400: whether a store is it, and how much of it is there."""

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

TRAIN_VIDEOS = 239_789  # videos that the published runs could use
CLASSES = 400
# Classes whose names are unlikely elsewhere; three of them make a store Kinetics.
TELLING = {
    "abseiling",
    "air drumming",
    "archery",
    "arm wrestling",
    "baby waking up",
    "belly dancing",
    "bench pressing",
    "bobsledding",
    "capoeira",
    "carving pumpkin",
    "clean and jerk",
    "curling hair",
    "deadlifting",
    "dunking basketball",
    "faceplanting",
    "flying kite",
    "grooming dog",
    "hula hooping",
    "ice climbing",
    "juggling balls",
    "kitesurfing",
    "krumping",
    "massaging feet",
    "parasailing",
    "playing didgeridoo",
    "pole vault",
    "robot dancing",
    "skydiving",
    "slacklining",
    "tai chi",
    "tobogganing",
    "unboxing",
    "waxing legs",
    "windsurfing",
    "zumba",
}
OTHER_SPLITS = {"val", "validation", "validate", "test"}


class Kinetics(NamedTuple):
    """How much of the training set is there."""

    videos: int
    classes: int
    held_out: int
    """Videos under val or test."""

    @property
    def share(self) -> float:
        """Share of the training videos."""
        return self.videos / TRAIN_VIDEOS


def recognize(names: Sequence[str]) -> Kinetics | None:
    """Count the training videos where the folders look like Kinetics-400, otherwise None."""
    classes: set[str] = set()
    videos = held_out = 0
    for name in names:
        folders = PurePosixPath(name).parts[:-1]
        if not OTHER_SPLITS.isdisjoint(folder.lower() for folder in folders):
            held_out += 1
        else:
            videos += 1
            classes.update(folders[-1:])
    telling = sum(name.lower().replace("_", " ") in TELLING for name in classes)
    many = 300 <= len(classes) <= 450 and videos >= 10_000
    return Kinetics(videos, len(classes), held_out) if telling >= 3 or many else None
