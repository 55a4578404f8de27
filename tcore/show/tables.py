"""The paper's four ablation tables: rows as flags, with the published J&F, J and F (100 epochs, ViT-S/16)."""

import re
from typing import NamedTuple


class Row(NamedTuple):
    """One row: its name, the flags that make it, and what the paper reports."""

    name: str
    flags: str = ""
    published: tuple[float, float, float] | None = None

    @property
    def folder(self) -> str:
        """Its name as a folder."""
        return re.sub(r"[^A-Za-z0-9._-]+", "-", self.name).strip("-.") or "row"


ALONE = "--auxiliary none"
# The setting that a row does not vary is the published one, whatever the recipe has.
PROBABILITY, RATIO = "--masking.probability 0.5", "--masking.ratio 0.1 0.5"

TABLES: dict[str, tuple[Row, ...]] = {
    "branch": (
        Row("none", ALONE, (61.9, 59.7, 64.0)),
        Row("past", "--auxiliary past", (63.4, 61.4, 65.3)),
        Row("future", "--auxiliary future", (63.0, 61.0, 65.1)),
        Row("both", "--loss.past-future 0", (63.5, 62.0, 65.0)),
        Row("all", "", (64.4, 63.0, 65.9)),
    ),
    "alignment": (
        Row("nothing", f"{ALONE} --views.no-fixed-space --views.no-fixed-time", (55.6, 53.4, 57.7)),
        Row("space", f"{ALONE} --views.no-fixed-time", (57.9, 55.4, 60.4)),
        Row("time", f"{ALONE} --views.no-fixed-space", (57.9, 55.5, 60.3)),
        Row("both", ALONE, (61.9, 59.7, 64.0)),
    ),
    "offsets": (
        Row(".05-.15", "--sandwich.offset 0.05 0.15", (64.0, 62.3, 65.7)),
        Row(".10-.20", "--sandwich.offset 0.10 0.20", (64.2, 62.4, 66.0)),
        Row(".15-.25", "--sandwich.offset 0.15 0.25", (64.4, 63.0, 65.9)),
        Row(".20-.30", "--sandwich.offset 0.20 0.30", (62.8, 61.1, 64.5)),
        Row("both past", "--sandwich.frames past-past", (63.4, 61.7, 65.1)),
        Row("both future", "--sandwich.frames future-future", (63.3, 61.3, 65.3)),
    ),
    "masks": (
        Row("probability .1", f"--masking.probability 0.1 {RATIO}", (60.1, 58.1, 62.2)),
        Row("probability .3", f"--masking.probability 0.3 {RATIO}", (63.5, 61.8, 65.3)),
        Row("probability .5", f"--masking.probability 0.5 {RATIO}", (64.4, 63.0, 65.9)),
        Row("probability .7", f"--masking.probability 0.7 {RATIO}", (62.7, 61.3, 64.2)),
        Row("ratio .2-.6", f"{PROBABILITY} --masking.ratio 0.2 0.6", (64.1, 62.3, 65.9)),
        Row("ratio .3-.7", f"{PROBABILITY} --masking.ratio 0.3 0.7", (63.7, 61.9, 65.5)),
    ),
}
