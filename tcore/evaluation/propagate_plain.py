"""The plain twin of the propagation: every score of every frame, with real copies of the first one."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from tcore.evaluation.propagate import FirstFrame, Window


@torch.no_grad()
def propagate_plainly(
    features: Float[Tensor, "time channels height width"],
    first_labels: Float[Tensor, "height width classes"],
    *,
    context: int = 20,
    radius: float | int = 20,
    topk: int = 7,
    temperature: float = 0.7,
    first_frame: FirstFrame = "repeated",
    window: Window = "disk",
    limit_first: bool = False,
    dtype: torch.dtype = torch.float64,
) -> Float[Tensor, "time height width classes"]:
    """Carry the first frame's labels through a video as the protocol is written down; slow, and simple."""
    unit = F.normalize(features.to(dtype), dim=1).flatten(2)
    height, width = features.shape[2:]
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    points = torch.stack([y.flatten(), x.flatten()], dim=1).double().to(features.device)
    offset = points[:, None] - points[None]
    far = offset.norm(dim=2) >= radius if window == "disk" else offset.abs().amax(dim=2) > radius
    labels = [first_labels.to(unit).flatten(0, 1)]
    for time in range(1, len(features)):
        if first_frame == "repeated":
            frames = [max(0, past) for past in range(time - context, time)]
        else:
            frames = list(range(max(1, time - context), time))
        scores = [unit[time].T @ unit[0]]
        if limit_first:
            scores = [scores[0].masked_fill(far, -torch.inf)]
        scores += [(unit[time].T @ unit[past]).masked_fill(far, -torch.inf) for past in frames]
        together = torch.cat(scores, dim=1) / temperature
        best, index = together.topk(min(topk, together.shape[1]), dim=1)
        keys = torch.cat([labels[past] for past in [0, *frames]])
        labels.append((best.softmax(dim=1)[:, :, None] * keys[index]).sum(dim=1))
    return torch.stack(labels).unflatten(1, (height, width)).float()
