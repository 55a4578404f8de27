"""Published protocols of label propagation: settings of the propagation, and the size of input frames.

T-CoRe (CVPR 2025), DINO (arXiv:2104.14294), RSP (arXiv:2406.07398) and CRW (arXiv:2006.14613), as their
evaluation code has them; DINOv3 (arXiv:2508.10104, section 6.1.5). Scores on different grids do not compare:
a finer one alone is worth some ten points.
"""

from dataclasses import dataclass, replace
from typing import Literal

from tcore.errors import InputError
from tcore.evaluation.resize import Size, input_size

FirstFrame = Literal["repeated", "once"]
Precision = Literal["fp32", "bf16"]
Window = Literal["disk", "square"]
Edges = Literal["off", "guided"]
Search = Literal["exact", "halved"]
Detail = Literal["coarse", "fine", "finest"]
# Patches over 16 pixels of a frame, each way.
FINER: dict[Detail, int] = {"coarse": 1, "fine": 2, "finest": 3}
CELL = 16  # pixels of a frame of 480 lines under a patch of the coarse grid


@dataclass(frozen=True)
class Protocol:
    """Every setting of label propagation; a score card prints them all."""

    name: str = "tcore"
    context: int = 20
    """Past frames beside the first."""
    radius: float = 20.0
    """Reach of the window, in grid cells."""
    window: Window = "disk"
    """Disk (distance < radius) or square (<= radius along both axes)."""
    limit_first: bool = False
    """The window applies to the first frame too."""
    topk: int = 7
    """Keys that a label is mixed from."""
    temperature: float = 0.7
    """Temperature of their softmax."""
    first_frame: FirstFrame = "repeated"
    """Pad a short past with copies of the first frame, as the published numbers do, or not."""
    resize: Literal["480x880", "60x110", "90x165", "short480", "native", "up480", "up960", "up1440"] = (
        "480x880"
    )
    """Input size: fixed; that of a grid of patches; short side 480 and long side floored to 64; native,
    floored to the patch; or a short side of 480, 960 or 1440, both sides rounded up to the patch."""
    labels: Literal["bilinear", "nearest"] = "bilinear"
    """How the first mask is brought to the grid."""
    stretch: bool = False
    """Stretch every channel to [0, 1] before the argmax."""
    edges: Edges = "off"
    """How labels get from the grid to pixels: bilinear, or along the edges of the frame (guided filter)."""
    precision: Precision = "fp32"
    """Arithmetic of the encoder, and the form in which features are held."""
    search: Search = "exact"
    """Compare all cells of the window; or means of four of them, and then the cells of the best means."""
    skip_first: bool = False
    """VIP: leave the first frame, whose labels are given, out of the score."""
    count_lost: bool = False
    """JHMDB: a joint that only the prediction lost is wrong; published scores leave it out."""
    round_border: bool = False
    """JHMDB: joints near the top and left border are stamped where they are, not one cell beside."""

    def __post_init__(self) -> None:
        for name, least in (("context", 0), ("radius", 0), ("topk", 1)):
            if not getattr(self, name) >= least:
                raise InputError(f"{name} is {getattr(self, name)}: need {least} or more.")
        if self.temperature <= 0:
            raise InputError(f"temperature is {self.temperature}: need more than 0.")

    def input_size(self, frame: Size, patch_size: int) -> Size:
        """The size at which a frame goes in: the protocol's, floored to a multiple of the patch."""
        if self.resize == "native":
            return input_size(frame, patch_size)
        if self.resize == "short480":
            return input_size(frame, patch_size, short=480, multiple=64)
        if self.resize.startswith("up"):
            return input_size(frame, patch_size, short=int(self.resize[2:]), up=True)
        return self.finer((480, 880), patch_size)

    def finer(self, size: Size, patch_size: int) -> Size:
        """A published input size, floored to the patch, or the one at which any patch makes the finer grid.

        >>> protocol("tcore-fine").finer((480, 880), 16), protocol("tcore-fine").finer((480, 880), 14)
        ((960, 1760), (840, 1540))
        """
        times = {"60x110": 2, "90x165": 3}.get(self.resize, 1)
        height, width = input_size(size, patch_size, cell=None if times == 1 else CELL)
        return times * height, times * width


TCORE = Protocol()
# DINOv3's disk includes its rim, where ours (distance < radius) ends before it.
DINOV3 = Protocol(
    "dinov3",
    context=7,
    radius=12.01,
    limit_first=True,
    topk=5,
    temperature=0.2,
    first_frame="once",
    resize="up480",
    labels="nearest",
    stretch=True,
)

PROTOCOLS = (
    TCORE,
    Protocol(
        "dino",
        context=7,
        radius=12,
        window="square",
        limit_first=True,
        topk=5,
        temperature=0.1,
        first_frame="once",
        resize="short480",
        labels="nearest",
        stretch=True,
    ),
    Protocol(
        "rsp", context=30, radius=30, window="square", limit_first=True, temperature=0.1, first_frame="once"
    ),
    Protocol("crw", radius=12, topk=10, temperature=0.05, resize="native"),
    replace(TCORE, name="tcore-fine", resize="60x110"),
    replace(TCORE, name="tcore-finest", resize="90x165"),
    DINOV3,
    replace(DINOV3, name="dinov3-fine", resize="up960"),
    replace(DINOV3, name="dinov3-finest", resize="up1440"),
)

# The published protocol with its radius scaled from a grid of 55 columns to one of 16.
RENDERED = replace(TCORE, name="rendered", radius=6.0, resize="native")


def corrected(protocol: Protocol, chosen: Protocol) -> Protocol:
    """A protocol with the precision and the corrections of another."""
    shared = ("edges", "precision", "search", "skip_first", "count_lost", "round_border")
    return replace(protocol, **{name: getattr(chosen, name) for name in shared})


def protocol(name: str) -> Protocol:
    """A protocol by its name.

    >>> protocol("dino").topk
    5
    """
    names = [known.name for known in PROTOCOLS]
    if name not in names:
        raise InputError(f"no protocol {name!r}: there are {', '.join(names)}.")
    return PROTOCOLS[names.index(name)]
