"""A tiny model and batches for it, to test the method as a whole."""

import torch
from torch import Tensor, nn

from tcore.methods.batch import Batch, make_batch
from tcore.methods.matching import PatchMatchingModule
from tcore.methods.settings import Auxiliary, LossConfig, LossForm
from tcore.methods.settings_groups import Targets, TeacherConfig
from tcore.methods.tcore import TCoRe
from tcore.model.heads import ProjectionHead
from tcore.model.vit import VisionTransformer

VIDEOS, LOCALS, SIZE, SMALL, PATCH, DIM, PROTOTYPES = 3, 2, 32, 16, 8, 16, 24
MASKED = (1, 2, 4)
TEMPERATURE = 0.05
VALUES = {"teacher_temperature": TEMPERATURE}
STAY = {"momentum": 1.0}  # the teacher stays where it is


def model(
    *,
    auxiliary: Auxiliary = "both",
    form: LossForm = "paper",
    targets: Targets = "centering",
    drop_path: float = 0.0,
    auxiliary_drop_path: bool = True,
    train_gains: bool = True,
) -> TCoRe:
    """A tiny model whose weights are large enough for every branch to matter."""
    torch.manual_seed(0)
    backbone = VisionTransformer(
        dim=DIM, depth=2, num_heads=2, patch_size=PATCH, image_size=SIZE, layer_scale=0.5, drop_path=drop_path
    )
    head = ProjectionHead(
        dim=DIM, hidden=16, bottleneck=8, num_prototypes=PROTOTYPES, train_gains=train_gains
    )
    for linear in (m for m in (*backbone.modules(), *head.modules()) if isinstance(m, nn.Linear)):
        nn.init.normal_(linear.weight, std=0.3)
    match = None if auxiliary == "none" else PatchMatchingModule(dim=DIM, num_heads=4)
    teacher = TeacherConfig(targets=targets)
    loss = LossConfig(form=form)
    return TCoRe(backbone, head, match, loss=loss, teacher=teacher, auxiliary_drop_path=auxiliary_drop_path)


def batch(
    *, masked: tuple[int, ...] = MASKED, auxiliary: Auxiliary = "both", videos: int = VIDEOS, seed: int = 0
) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def crops(count: int, size: int) -> Tensor:
        return torch.randn(count, 3, size, size, generator=generator)

    global_crops, local_crops = crops(2 * videos, SIZE), crops(LOCALS * videos, SMALL)
    past, future = crops(len(masked), SIZE), crops(len(masked), SIZE)
    mask = torch.zeros(2 * videos, (SIZE // PATCH) ** 2, dtype=torch.bool)
    for number, crop in enumerate(masked):
        mask[crop, torch.randperm(mask.shape[1], generator=generator)[: 2 + 3 * number]] = True
    return make_batch(
        global_crops,
        local_crops,
        mask,
        past if auxiliary in ("past", "both") else None,
        future if auxiliary in ("future", "both") else None,
    )


def part_of(whole: Batch, videos: list[int]) -> Batch:
    """Some videos of a batch, with the counts of the whole step."""

    def rows(x: Tensor) -> Tensor:
        return x.unflatten(0, (-1, VIDEOS))[:, videos].flatten(0, 1)

    # Row of each crop among the auxiliary views, -1 where it carries no mask.
    row_of = torch.full((2 * VIDEOS,), -1)
    row_of[whole.masked] = torch.arange(len(whole.masked))
    kept = rows(row_of)
    kept = kept[kept >= 0]
    assert whole.past is not None
    assert whole.future is not None
    return make_batch(
        rows(whole.global_crops),
        rows(whole.local_crops),
        rows(whole.mask),
        whole.past[kept],
        whole.future[kept],
        counts=whole.counts,
    )


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def values(losses: dict[str, Tensor]) -> dict[str, float]:
    return {name: loss.item() for name, loss in losses.items()}


def perturb(module: nn.Module) -> None:
    """Move parameters away from where they are."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=seeded(parameter.numel())))


def teacher_outputs(tcore: TCoRe, crops: Batch) -> tuple[Tensor, Tensor]:
    """Raw outputs of the teacher's head for all global crops and for the masked tokens."""
    with torch.no_grad():
        seen = tcore.teacher.backbone(crops.teacher_crops)
        return tcore.teacher.head(seen.frame), tcore.teacher.head(seen.patches[crops.mask])
