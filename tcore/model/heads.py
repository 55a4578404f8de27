"""The projection head: tokens to similarities with learned prototypes."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


class Prototypes(nn.Module):
    """A linear layer without bias whose rows have a learned direction and a learned or fixed gain."""

    def __init__(self, dim: int, num_prototypes: int, train_gains: bool) -> None:
        super().__init__()
        # PyTorch's default for a linear layer; only the directions matter.
        self.directions = nn.Parameter(nn.Linear(dim, num_prototypes, bias=False).weight.detach().clone())
        self.gains = nn.Parameter(torch.ones(num_prototypes, 1), requires_grad=train_gains)

    def weights(self) -> Float[Tensor, "k d"]:
        """The prototypes: unit directions times their gains."""
        norms = self.directions.norm(dim=1, keepdim=True)
        return self.gains * self.directions / norms

    def forward(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n k"]:
        """Similarity of each row with each prototype."""
        return F.linear(x, self.weights())


class ProjectionHead(nn.Module):
    """Three linear layers, a normalized bottleneck, prototypes; one head for frame and patch tokens.

    Patches may have prototypes of their own; `forward` is for those of frames.
    """

    def __init__(
        self,
        *,
        dim: int = 384,
        hidden: int = 2048,
        bottleneck: int = 256,
        num_prototypes: int = 65536,
        train_gains: bool = True,
        num_patch_prototypes: int | None = None,
    ) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(dim, hidden),
            nn.GELU(),
            nn.Linear(hidden, hidden),
            nn.GELU(),
            nn.Linear(hidden, bottleneck),
        )
        for layer in self.mlp:
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)
        self.prototypes = Prototypes(bottleneck, num_prototypes, train_gains)
        own = num_patch_prototypes
        self.patch_prototypes = None if own is None else Prototypes(bottleneck, own, train_gains)

    def weights(self) -> tuple[Float[Tensor, "k z"], Float[Tensor, "own z"]]:
        """The prototypes of frames and those of patches, which may be the same."""
        frames = self.prototypes.weights()
        return frames, frames if self.patch_prototypes is None else self.patch_prototypes.weights()

    def project(self, tokens: Float[Tensor, "n d"]) -> Float[Tensor, "n z"]:
        """The normalized bottleneck."""
        return F.normalize(self.mlp(tokens), dim=-1, eps=1e-12)

    def forward(self, tokens: Float[Tensor, "n d"]) -> Float[Tensor, "n k"]:
        """Raw outputs: cosines with the prototypes, times their gains."""
        return self.prototypes(self.project(tokens))
