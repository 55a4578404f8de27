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
PIXELS, OTHER_PIXELS = ("mae", "siammae", "rsp"), ("rcmae", "cropmae", "dropmae", "videomae", "maest")
CLIPS: dict[str, Any] = {"rendered__frames": 12, "rendered__size": 48, "keep_every": 2}
# What methods need of tiny crops: of 16 patches, the published shares would leave none.
OWN: dict[str, dict[str, Any]] = {"siammae": {"mask_ratio": 0.8}, "cropmae": {"mask_ratio": 0.9}}


def small_settings(name: str, **changes: Any) -> dict[str, Any]:
    """The recipe of a method and the settings that make it small, for jobs and for `shrunk`."""
    pixels = name in PIXELS + OTHER_PIXELS
    usual = CLIPS | OWN.get(name, {}) if pixels else {}
    return {"recipe": f"vits16-{name}-{'short' if pixels else 'k400'}", **usual, **changes}


@pytest.mark.parametrize("name", [*FAST, *LONG])
def test_it_trains_and_exports_its_encoder(name: str, tmp_path: Path) -> None:
    methods.build(validate(shrunk(f"vits16-{name}-short")))
    config = validate(shrunk(f"vits16-{name}-k400", optim__steps=2))
    found = metrics(train(config, tmp_path / "run", quiet=True))
    assert len(found) == 2
    assert all(torch.tensor(row["total"]).isfinite() for row in found)
    assert found[-1]["health"]["state"] in ("learning", "plateau", "collapse")
    assert not (tmp_path / "run" / "matching.safetensors").exists()
    encoder = load_encoder(tmp_path / "run")
    assert encoder(torch.zeros(1, 32, 48, 3, dtype=torch.uint8)).shape == (1, 32, 4, 6)


@pytest.mark.parametrize(
    "name", [*FAST, *PIXELS, *(pytest.param(name, marks=pytest.mark.long) for name in LONG + OTHER_PIXELS)]
)
def test_resumed_run_equals_uninterrupted_run_bit_for_bit(name: str, tmp_path: Path) -> None:
    settings = small_settings(name, optim__steps=4)
    assert_resumes_exactly(shrunk(settings.pop("recipe"), **settings), tmp_path)


# What is the same on any number of processes: no dropout, and RSP away from the floor of its divergence.
SAME: dict[str, dict[str, Any]] = {
    "croc": {"regions__cost_range": "image", "regions__mean_over": "all"},
    # With the published LayerScale all frames are alike at the start, and their distances are rounding.
    "dinov2": {"loss__koleo_global": True, "vit__layer_scale": 0.5},
    "siammae": {"decoder__dropout": 0.0},
    "cropmae": {"decoder__dropout": 0.0},
    "rsp": {"latent__floor": 0.0, "optim__batch": 4, "optim__repeat": 2},
    "dropmae": {"attention_dropout": 0.0},
}
LARGE: dict[str, Any] = {"optim__batch": 8, "optim__steps": 2, "rendered__videos": 9, "vit__drop_path": 0.0}
TERMS = set("total dino koleo patch_teacher region contrast masked future kl consistency".split())


@pytest.mark.parametrize("names", [FAST + PIXELS, pytest.param(LONG + OTHER_PIXELS, marks=pytest.mark.long)])
def test_two_processes_have_the_losses_and_gradients_of_one(names: tuple[str, ...], tmp_path: Path) -> None:
    jobs = []
    for name in names:
        own = small_settings(name, **LARGE | SAME.get(name, {}))
        work(tmp_path / f"1-{name}", gradients=True, **own)
        jobs.append({"run": str(tmp_path / f"2-{name}"), "gradients": True, **own})
    work_together(2, jobs)
    for name in names:
        for one, two in zip(*(metrics(tmp_path / f"{count}-{name}") for count in (1, 2)), strict=True):
            for term in TERMS & one.keys():
                assert two[term] == pytest.approx(one[term], rel=1e-5), (name, term, one["step"])
        whole, shared = (torch.load(tmp_path / f"{count}-{name}.pt", weights_only=True) for count in (1, 2))
        for parameter, gradient in whole.items():
            # The gradient of a bias before a batch norm is 0; what is left of it is rounding. Adding n
            # numbers in another order changes their sum by up to n x 2^-24 times the sum of their sizes:
            # of 16 views, about 4 (the scale beside that bias of SimCLR: 2.7 with torch 2.13, 3.7 with 2.11).
            floor = 16 * 2**-24 * 4 + 1e-4 * float(gradient.abs().max()) if gradient.numel() else 0.0
            torch.testing.assert_close(shared[parameter], gradient, rtol=1e-4, atol=floor)
