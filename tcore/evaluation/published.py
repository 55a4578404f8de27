"""Published rows: label propagation with frozen features, and the protocol that each was measured with.

In percent; ViT-S/16 unless the name says otherwise. T-CoRe's main table (CVPR 2025, arXiv:2503.15096) mixes
rows that its authors measured, by protocol tcore, with rows that they quote from other papers. RSP's are by
its own protocol; DINO's on ImageNet are DAVIS scores of its own paper. The protocol of other quoted rows is
not known, and those of SimCLR, MoCo v3 and DINO on Kinetics-400 may be the best of several each.
"""

from typing import NamedTuple

COLUMNS = ("J&F", "J", "F", "mIoU", "PCK@0.1", "PCK@0.2")
LINES = 30  # patches along the short side of DAVIS, in T-CoRe's table


class Published(NamedTuple):
    """A published row."""

    protocol: str
    """A name of ours (tcore.evaluation.protocols), or unknown."""
    scores: dict[str, float | None]
    lines: int = LINES


_TABLE: dict[str, tuple[str, tuple[float | None, ...]]] = {
    "T-CoRe, K400, 400 ep": ("tcore", (64.7, 63.5, 66.0, 37.8, 47.0, 75.2)),
    "T-CoRe ViT-B/16, K400, 200 ep": ("tcore", (66.4, 64.6, 68.2, 38.9, 47.1, 75.8)),
    "T-CoRe, ImageNet, 100 ep": ("tcore", (64.1, 62.1, 66.1, 39.7, 46.2, 75.5)),
    "DINOv2, K400, 400 ep": ("tcore", (63.0, 62.0, 64.1, 37.0, 46.6, 74.8)),
    "iBOT, K400, 400 ep": ("tcore", (63.5, 61.7, 65.4, 37.4, 44.5, 74.2)),
    "DINO, K400, 400 ep": ("unknown", (59.5, 56.5, 62.5, 33.4, 41.1, 70.3)),
    "RSP, K400, 400 ep": ("rsp", (60.1, 57.4, 62.8, 33.8, 44.6, 73.4)),
    "CropMAE, K400, 400 ep": ("unknown", (58.6, 55.8, 61.4, 33.7, 42.9, 71.1)),
    "SiamMAE, K400, 400 ep": ("unknown", (57.9, 56.0, 60.0, 33.2, 46.1, 74.0)),
    "MAE, K400, 400 ep": ("unknown", (53.5, 50.4, 56.7, 32.5, 43.0, 71.3)),
    "VideoMAE, K400, 1600 ep": ("unknown", (39.3, 39.7, 38.9, 22.3, 41.0, 67.9)),
    "SimCLR, K400, 400 ep": ("unknown", (53.9, 51.7, 56.2, 31.9, 37.9, 66.1)),
    "MoCo v3, K400, 400 ep": ("unknown", (57.7, 54.6, 60.8, 32.4, 38.4, 67.6)),
    "MAE-ST ViT-L/16, K400, 1600 ep": ("unknown", (54.6, 55.5, 53.6, 33.2, 44.4, 72.5)),
    "DropMAE ViT-B/16, K400, 1600 ep": ("unknown", (53.4, 51.8, 55.0, 31.1, 42.3, 69.2)),
    "CropMAE ViT-B/16, K400, 400 ep": ("tcore", (57.8, 56.9, 58.7, 33.0, 45.3, 73.3)),
    "RSP ViT-B/16, K400, 400 ep": ("rsp", (60.5, 57.8, 63.2, 34.0, 46.0, 74.6)),
    "DINOv2 ViT-B/16, K400, 200 ep": ("tcore", (64.9, 63.3, 66.6, 38.2, 46.8, 75.8)),
    "supervised ResNet-50, ImageNet, 100 ep": ("unknown", (66.0, 63.7, 68.4, 39.5, 59.2, 78.3)),
    "DINO, ImageNet, 800 ep": ("dino", (61.8, 60.2, 63.4, 36.2, 45.6, 75.0)),
    "ODIN2 ResNet-50, ImageNet, 1000 ep": ("unknown", (54.1, 54.3, 53.9, None, None, None)),
    "CrOC, ImageNet, 300 ep": ("unknown", (44.7, 43.5, 45.9, 26.1, None, None)),
    "MAE ViT-B/16, ImageNet, 1600 ep": ("unknown", (53.5, 52.1, 55.0, 28.1, 44.6, 73.4)),
    "RC-MAE, ImageNet, 1600 ep": ("unknown", (49.2, 48.9, 50.5, 29.7, 43.2, 72.3)),
    "CropMAE, ImageNet, 400 ep": ("unknown", (60.4, 57.6, 63.3, 33.3, 43.6, 72.0)),
    "iBOT, ImageNet, 800 ep": ("tcore", (62.8, 60.4, 65.3, 38.4, 44.5, 74.5)),
    "DINOv2, ImageNet, 100 ep": ("tcore", (63.2, 61.4, 65.1, 37.3, 46.3, 75.4)),
}
# DINOv3 (arXiv:2508.10104): frozen features as well, at three sizes of the short side.
_DINOV3 = {
    "DINOv3 ViT-7B/16, 480 pixels": (30, 71.1),
    "DINOv3 ViT-7B/16, 960 pixels": (60, 79.7),
    "DINOv3 ViT-7B/16, 1440 pixels": (90, 83.3),
}

PUBLISHED = {
    **{row: Published(how, dict(zip(COLUMNS, values, strict=True))) for row, (how, values) in _TABLE.items()},
    **{row: Published("dinov3", {"J&F": score}, lines) for row, (lines, score) in _DINOV3.items()},
}

# The rows that a printed table ends with; a report shows all.
SHOWN = (*tuple(_TABLE)[:8], *_DINOV3)


def published_on(lines: int) -> list[str]:
    """Published rows on a grid with about as many lines.

    >>> published_on(60), len(published_on(30)), published_on(45)
    (['DINOv3 ViT-7B/16, 960 pixels'], 28, [])
    """
    return [name for name, row in PUBLISHED.items() if abs(row.lines - lines) <= 0.15 * lines]
