"""Settings of methods beside the shared ones: flat in JSON, checked together."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tcore import Config, InputError
from tcore.config import METHODS, differences, flatten, from_dict, override, to_dict, validate
from tcore.methods.settings import LossConfig, TCoReSettings
from tests.tiny import change, settings_of, shrunk

OLD = Path(__file__).parents[1] / "training" / "old_run" / "config.json"


def old_settings() -> dict[str, Any]:
    """A config.json from before there were methods."""
    values: dict[str, Any] = json.loads(OLD.read_text())
    return values


def test_an_old_file_is_tcores_with_every_value() -> None:
    values = old_settings()
    config = from_dict(values)
    assert isinstance(config.method, TCoReSettings)
    values["views"]["color"] = values["views"].pop("colour")
    found = to_dict(config)
    assert found.pop("method") == "tcore"
    for name, value in values.items():  # settings that came later have their defaults
        same = {key: found[name][key] for key in value} if isinstance(value, dict) else found[name]
        assert same == value, name


def test_settings_of_the_method_have_no_prefix() -> None:
    flat = flatten(Config())
    assert flat["loss.koleo"] == 0.1
    assert flat["auxiliary"] == "both"
    assert not any(name.startswith("method") for name in flat)
    for kind in METHODS:  # one flat list: no name may stand for two settings
        assert not {f.name for f in fields(kind)} & {f.name for f in fields(Config)}


def test_changes_reach_shared_settings_and_those_of_the_method_alike() -> None:
    config = override(Config(), {"optim.batch": 8, "loss.koleo": 0.0, "auxiliary": "past", "seed": 3})
    assert (config.optim.batch, config.seed) == (8, 3)
    assert (settings_of(config).loss.koleo, settings_of(config).auxiliary) == (0.0, "past")
    assert settings_of(change(Config(), loss=LossConfig(koleo=0.0))).loss == settings_of(config).loss
    assert differences(Config(), config)["loss.koleo"] == (0.1, 0.0)
    assert override(Config(), {"views.colour": 0.5}).views.color == 0.5  # as in commands of earlier versions


@pytest.mark.parametrize("setting", ["name", "unused", "loss.nothing", "nothing.koleo", "check"])
def test_a_change_of_no_setting_is_refused(setting: str) -> None:
    with pytest.raises(InputError, match=setting):
        override(Config(), {setting: 1})


@pytest.mark.parametrize("name", ["tcor", "", 3, None])
def test_a_method_that_there_is_none_of_is_named(name: Any) -> None:
    with pytest.raises(InputError, match=rf"method={name!r}.*tcore"):
        from_dict(to_dict(Config()) | {"method": name})


def test_shared_settings_without_effect_on_the_method_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TCoReSettings, "unused", ("optim.matching_lr",))
    validate(Config())
    with pytest.raises(InputError, match=r"optim\.matching_lr=0\.5 has no effect on tcore"):
        validate(change(Config(), optim__matching_lr=0.5))


def test_parts_of_a_step_are_refused_by_a_method_that_needs_all_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = change(Config(), optim__accumulate=2)
    validate(config)
    monkeypatch.setattr(TCoReSettings, "whole_step", True)
    validate(change(config, optim__accumulate=1))
    with pytest.raises(InputError, match=r"optim\.accumulate=2: tcore"):
        validate(config)


IMAGES = {"source": "images", "auxiliary": "past"}


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("dino", {"optim__matching_lr": 1.0}, "optim.matching_lr=1.0"),
        ("dino", {"views__fixed_time": False}, "views.fixed_time=False"),
        ("dino", {"source": "images", "frame__current": (0.0, 1.0)}, "frame"),
        ("dino", {"auxiliary": "none"}, "auxiliary"),
        ("ibot", {"masking__smallest_block": 4, "masking__largest_block": 3}, "masking.largest_block=3"),
        ("simclr", {"optim__accumulate": 2}, "optim.accumulate=2"),
        ("odin", {"optim__accumulate": 2}, "optim.accumulate=2"),
        ("mocov3", {"views__num_local": 2}, "views.num_local=2"),
        ("mocov3", {"source": "images", "frame__current": (0.0, 1.0)}, "frame"),
        ("mocov3", {"vit__dim": 30, "vit__num_heads": 2}, "vit.dim=30"),
        ("croc", {"regions__most": 6}, "regions.seeds=5"),
        ("odin", {"discovery__clusters": 17}, "discovery.clusters=17"),
        ("odin", {"discovery__init": "run"}, "discovery.momentum"),
        ("odin", {"discovery__init": "run", "discovery__momentum": (1.0, 1.0), "init": "default"}, "init"),
        ("mae", {"vit__num_registers": 4}, "vit.num_registers=4: mae needs 0"),
        ("mae", {"vit__positions": "learned"}, "vit.positions=learned: mae needs grid"),
        ("videomae", {"vit__class_token": True}, "vit.class_token=True: videomae needs False"),
        ("mae", {"views__num_local": 3}, "views.num_local=3 has no effect on mae"),
        ("siammae", {"source": "images"}, "source=images: siammae needs videos"),
        ("maest", {"clip__frames": 7}, "clip.frames=7"),
        ("maest", {"init": "runs/mine"}, "init"),
        ("siammae", {"mask_ratio": 0.99}, "mask_ratio=0.99"),
        ("mae", {"decoder__num_heads": 3}, "decoder.num_heads=3"),
        ("mae", {"vit__positions": "learned", "vit__position_resize": "exact"}, "vit.position_resize=exact"),
        ("", {"source": "images", "auxiliary": "both"}, "auxiliary=both: .*--auxiliary past"),
        ("", {"source": "images", "auxiliary": "future"}, "auxiliary=future: with source=images"),
        ("", IMAGES | {"sandwich__offset": (0.1, 0.2)}, "sandwich.* has no effect with source=images"),
        ("", IMAGES | {"auxiliary": "none", "views__fixed_time": False}, "views.fixed_time .*source=images"),
        ("", IMAGES | {"views__auxiliary_box": "current"}, "views.auxiliary_box .*source=images"),
    ],
)
def test_settings_that_cannot_work_are_refused(name: str, changes: dict[str, Any], named: str) -> None:
    recipe = f"vits16-{name}-k400" if name else "quickstart"
    small = {"mask_ratio": 0.8} if name == "siammae" else {}
    with pytest.raises(InputError, match=named):
        validate(shrunk(recipe, **small | changes))
