"""Published numbers to compare with: label propagation with frozen features, protocol tcore, in percent."""

COLUMNS = ("J&F", "J", "F", "mIoU", "PCK@0.1", "PCK@0.2")

# The T-CoRe paper's main table; ViT-S/16 unless it says otherwise.
PUBLISHED: dict[str, tuple[float | None, ...]] = {
    "T-CoRe, K400, 400 ep": (64.7, 63.5, 66.0, 37.8, 47.0, 75.2),
    "T-CoRe ViT-B/16, K400, 200 ep": (66.4, 64.6, 68.2, 38.9, 47.1, 75.8),
    "T-CoRe, ImageNet, 100 ep": (64.1, 62.1, 66.1, 39.7, 46.2, 75.5),
    "DINOv2, K400, 400 ep": (63.0, 62.0, 64.1, 37.0, 46.6, 74.8),
    "iBOT, K400, 400 ep": (63.5, 61.7, 65.4, 37.4, 44.5, 74.2),
    "DINO, K400, 400 ep": (59.5, 56.5, 62.5, 33.4, 41.1, 70.3),
    "RSP, K400, 400 ep": (60.1, 57.4, 62.8, 33.8, 44.6, 73.4),
    "CropMAE, K400, 400 ep": (58.6, 55.8, 61.4, 33.7, 42.9, 71.1),
    "SiamMAE, K400, 400 ep": (57.9, 56.0, 60.0, 33.2, 46.1, 74.0),
    "MAE, K400, 400 ep": (53.5, 50.4, 56.7, 32.5, 43.0, 71.3),
    "VideoMAE, K400, 1600 ep": (39.3, 39.7, 38.9, 22.3, 41.0, 67.9),
    "SimCLR, K400, 400 ep": (53.9, 51.7, 56.2, 31.9, 37.9, 66.1),
    "MoCo v3, K400, 400 ep": (57.7, 54.6, 60.8, 32.4, 38.4, 67.6),
    "MAE-ST ViT-L/16, K400, 1600 ep": (54.6, 55.5, 53.6, 33.2, 44.4, 72.5),
    "DropMAE ViT-B/16, K400, 1600 ep": (53.4, 51.8, 55.0, 31.1, 42.3, 69.2),
    "CropMAE ViT-B/16, K400, 400 ep": (57.8, 56.9, 58.7, 33.0, 45.3, 73.3),
    "RSP ViT-B/16, K400, 400 ep": (60.5, 57.8, 63.2, 34.0, 46.0, 74.6),
    "DINOv2 ViT-B/16, K400, 200 ep": (64.9, 63.3, 66.6, 38.2, 46.8, 75.8),
    "supervised ResNet-50, ImageNet, 100 ep": (66.0, 63.7, 68.4, 39.5, 59.2, 78.3),
    "DINO, ImageNet, 800 ep": (61.8, 60.2, 63.4, 36.2, 45.6, 75.0),
    "ODIN2 ResNet-50, ImageNet, 1000 ep": (54.1, 54.3, 53.9, None, None, None),
    "CrOC, ImageNet, 300 ep": (44.7, 43.5, 45.9, 26.1, None, None),
    "MAE ViT-B/16, ImageNet, 1600 ep": (53.5, 52.1, 55.0, 28.1, 44.6, 73.4),
    "RC-MAE, ImageNet, 1600 ep": (49.2, 48.9, 50.5, 29.7, 43.2, 72.3),
    "CropMAE, ImageNet, 400 ep": (60.4, 57.6, 63.3, 33.3, 43.6, 72.0),
    "iBOT, ImageNet, 800 ep": (62.8, 60.4, 65.3, 38.4, 44.5, 74.5),
    "DINOv2, ImageNet, 100 ep": (63.2, 61.4, 65.1, 37.3, 46.3, 75.4),
}

# The rows that a printed table ends with; a report shows all.
SHOWN = tuple(PUBLISHED)[:8]

# Clips of the official validation and test lists.
OFFICIAL_CLIPS = {"davis": 30, "vip": 50, "jhmdb": 268}
