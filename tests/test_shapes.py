"""The shapes that functions announce are looked at while the tests run."""

import numpy as np
import pytest
import torch
from jaxtyping import TypeCheckError

from tcore.data.render import normalize
from tcore.evaluation.cycle import random_regions
from tcore.model.losses import koleo_loss


def test_a_tensor_of_another_shape_than_announced_is_refused() -> None:
    with pytest.raises(TypeCheckError, match="images"):
        normalize(torch.zeros(3, 8))
    with pytest.raises(TypeCheckError):
        koleo_loss(torch.zeros(4, dtype=torch.int64), 4)
    with pytest.raises(TypeCheckError):
        random_regions(np.zeros(2), 4)  # type: ignore[arg-type]
