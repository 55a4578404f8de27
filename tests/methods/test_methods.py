"""Every method behind the trainer: trained, resumed, on several processes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tcore import load_encoder, methods, train
from tcore.config import validate
from tests.runs import assert_resumes_exactly, metrics
from tests.tiny import shrunk
from tests.training.jobs import work, work_together

# One of each file here, the others in the long run.
FAST, LONG = ("ibot", "simclr", "croc"), ("dino", "dinov2", "mocov3", "odin")
SOME = [*FAST, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)]


@pytest.mark.parametrize("name", [*FAST, *LONG])
def test_it_trains_and_exports_its_encoder(name: str, tmp_path: Path) -> None:
    methods.build(validate(shrunk(f"vits16-{name}-short")))
    config = validate(shrunk(f"vits16-{name}-k400", optim__steps=2))
    found = metrics(train(config, tmp_path / "run", quiet=True))
    assert len(found) == 2
    assert all(torch.tensor(row["total"]).isfinite() for row in found)
    assert found[-1]["health"]["state"] in ("learning", "plateau", "collapse")
    encoder = load_encoder(tmp_path / "run")
    assert encoder(torch.zeros(1, 32, 48, 3, dtype=torch.uint8)).shape == (1, 32, 4, 6)


@pytest.mark.parametrize("name", SOME)
def test_resumed_run_equals_uninterrupted_run_bit_for_bit(name: str, tmp_path: Path) -> None:
    assert_resumes_exactly(shrunk(f"vits16-{name}-k400", optim__steps=4), tmp_path)


SAME: dict[str, Any] = {"vit__drop_path": 0.0, "optim__batch": 8, "optim__steps": 2, "rendered__videos": 9}
OWN: dict[str, dict[str, Any]] = {
    "croc": {"regions__cost_range": "image", "regions__mean_over": "all"},
    # With the published LayerScale all frames are alike at the start, and their distances are rounding.
    "dinov2": {"loss__koleo_global": True, "vit__layer_scale": 0.5},
}
TERMS = ("total", "dino", "koleo", "patch_teacher", "region", "contrast")


@pytest.mark.parametrize("names", [FAST, pytest.param(LONG, marks=pytest.mark.long)])
def test_two_processes_have_the_losses_and_gradients_of_one(names: tuple[str, ...], tmp_path: Path) -> None:
    jobs = []
    for name in names:
        own = SAME | OWN.get(name, {}) | {"recipe": f"vits16-{name}-k400"}
        work(tmp_path / f"1-{name}", gradients=True, **own)
        jobs.append({"run": str(tmp_path / f"2-{name}"), "gradients": True, **own})
    work_together(2, jobs)
    for name in names:
        one, two = (metrics(tmp_path / f"{count}-{name}") for count in (1, 2))
        losses = [key for key in TERMS if key in one[0]]
        for a, b in zip(one, two, strict=True):
            for loss in losses:
                assert b[loss] == pytest.approx(a[loss], rel=1e-5), (name, loss, a["step"])
        gradients = [torch.load(tmp_path / f"{count}-{name}.pt", weights_only=True) for count in (1, 2)]
        for parameter, gradient in gradients[0].items():
            # Some gradients vanish behind a batch norm: what is left of them is rounding.
            floor = 2e-6 + 1e-4 * float(gradient.abs().max()) if gradient.numel() else 0.0
            torch.testing.assert_close(gradients[1][parameter], gradient, rtol=1e-4, atol=floor)
