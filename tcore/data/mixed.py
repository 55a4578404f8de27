"""Several stores as one: real clips, moved photographs, rendered videos, each as often as one likes."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from tcore.data.frames import Frame, FrameStore
from tcore.data.images import open_images
from tcore.data.moved import MovedStore
from tcore.errors import InputError

Answer = TypeVar("Answer")
EXAMPLE = "CLIPS*5+photographs:PHOTOS+STORE"
PHOTOGRAPHS = "photographs:"


class Ingredient(NamedTuple):
    """One store of a mixture, and how often an epoch goes through it."""

    place: str
    moved: bool
    times: int


def ingredients(frames: str) -> list[Ingredient]:
    """What a mixture consists of.

    >>> ingredients("clips*5+photographs:photos+store")[:2]
    [Ingredient(place='clips', moved=False, times=5), Ingredient(place='photos', moved=True, times=1)]
    """
    if Path(frames).exists():  # a path may hold any character
        return [Ingredient(frames, False, 1)]
    found = []
    for piece in frames.split("+"):
        match = re.fullmatch(r"(?P<place>.+?)(\*(?P<times>[0-9]+))?", piece.strip())
        if match is None or match["times"] == "0":
            raise InputError(f"--frames {frames}: cannot make out {piece!r}; write it as in {EXAMPLE}.")
        place = match["place"]
        moved = place.startswith(PHOTOGRAPHS)
        if place == PHOTOGRAPHS:
            raise InputError(f"--frames {frames}: {piece!r} names no folder; write it as in {EXAMPLE}.")
        if place.partition(":")[0] == "rendered" and not Path(place).exists():
            raise InputError(
                f"--frames {frames}: make a store of rendered videos first (tcore prepare rendered:N STORE) "
                "and name that, or give --frames rendered alone."
            )
        found.append(Ingredient(place.removeprefix(PHOTOGRAPHS), moved, int(match["times"] or 1)))
    return found


def open_mixture(frames: str, seed: int) -> FrameStore:
    """The store that a --frames argument means: one place, moved photographs, or several of them."""
    wanted = ingredients(frames)
    opened = [
        MovedStore(open_images(one.place), seed) if one.moved else FrameStore.open(one.place)
        for one in wanted
    ]
    if len(wanted) == 1 and wanted[0].times == 1:
        return opened[0]
    return MixedStore(opened, [one.times for one in wanted])


class MixedStore(FrameStore):
    """Videos of several stores behind one another, those of a store `times` times over."""

    def __init__(self, stores: Sequence[FrameStore], times: Sequence[int]) -> None:
        self.stores = list(stores)
        rates = {store.fps for store in stores}
        self.fps = rates.pop() if len(rates) == 1 else None
        names, lengths, places = [], [], []
        for number, (store, count) in enumerate(zip(stores, times, strict=True)):
            for copy in range(count):
                names += [f"{number}.{copy}/{name}" for name in store.names]
                lengths.append(np.asarray(store.lengths))
                places.append(np.stack([np.full(len(store), number), np.arange(len(store))], axis=1))
        self.names = names
        self.lengths = np.concatenate(lengths)
        self._places = np.concatenate(places)

    def read(self, video: int, frames: Sequence[int]) -> list[Frame]:
        """Frames of one video, from the store that it is in."""
        return self._ask(video, lambda store, number: store.read(number, frames))

    def cuts(self, video: int) -> tuple[int, ...]:
        """Frames that begin a new shot, where the store knows them."""
        return self._ask(video, lambda store, number: store.cuts(number))

    def _ask(self, video: int, question: Callable[[FrameStore, int], Answer]) -> Answer:
        store, number = self._places[video].tolist()
        return question(self.stores[store], number)
