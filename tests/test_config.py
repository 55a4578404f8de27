import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tcore import Config, InputError, recipe
from tcore.config import differences, from_dict, load_config, save_config, to_dict, validate
from tcore.recipes import RECIPES
from tests.tiny import settings_of


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_is_valid_and_loads_back_equal(name: str, tmp_path: Path) -> None:
    config = validate(recipe(name))
    save_config(config, tmp_path / "config.json")
    assert load_config(tmp_path / "config.json") == config
    assert json.loads((tmp_path / "config.json").read_text())["method"] == config.method.name


@settings(max_examples=50, deadline=None)
@given(
    past_future=st.floats(0, 100),
    offset=st.tuples(st.floats(0, 0.15), st.floats(0.15, 0.3)),
    steps=st.none() | st.integers(1, 10**9),
    seconds=st.none() | st.tuples(st.floats(0.1, 3), st.floats(3, 9)),
    fixed=st.booleans(),
)
def test_any_settings_survive_json(
    past_future: float, offset: tuple[float, float], steps: int | None, seconds: Any, fixed: bool
) -> None:
    config = recipe(
        "quickstart",
        {
            "loss.past_future": past_future,
            "sandwich.offset": offset,
            "sandwich.offset_seconds": seconds,
            "optim.steps": steps,
            "views.fixed_space": fixed,
        },
    )
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


def test_published_recipes_hold_the_published_numbers() -> None:
    small, base, short = (recipe(n) for n in ("vits16-k400", "vitb16-k400", "vits16-k400-100ep"))
    assert (small.optim.epochs, small.optim.warmup_epochs, small.optim.batch) == (400, 20, 256)
    assert (base.optim.epochs, base.optim.warmup_epochs, base.optim.batch) == (200, 10, 128)
    assert (short.optim.epochs, short.optim.warmup_epochs, short.optim.batch) == (100, 10, 256)
    assert small.optim.peak_lr == pytest.approx(2e-3 * 0.25**0.5)
    assert base.optim.peak_lr == pytest.approx(1e-3 * 0.125**0.5)
    assert (small.optim.matching_lr, base.optim.matching_lr) == (0.1, 0.13)
    assert {settings_of(c).loss.form for c in (small, base, short)} == {"release"}
    assert settings_of(Config()).loss.form == "paper"
    assert settings_of(small).head.prototypes == 65536
    assert settings_of(small).loss.weights() == {
        "dino": 1.0,
        "past_teacher": 0.8,
        "future_teacher": 0.8,
        "past_future": 20.0,
        "koleo": 0.1,
        "patch_teacher": 1.0,
    }


def test_short_recipes_have_the_length_that_was_measured() -> None:
    page = Path(__file__).parents[1] / "docs" / "tutorial.md"
    tutorial = " ".join(page.read_text(encoding="utf-8").split())  # wherever its lines end
    for name in ("vits16-short", "vitti16-short"):
        optim = recipe(name).optim
        assert f"{optim.steps:,} steps of {optim.batch} samples" in tutorial
    assert recipe("vits16-short").optim.steps == 1000
    branch = differences(recipe("vits16-short"), recipe("vits16-tcore-short"))
    assert branch == {"auxiliary": ("none", "both")}


def test_unknown_setting_is_an_error_with_a_suggestion(tmp_path: Path) -> None:
    values = to_dict(Config())
    values["loss"]["past_futur"] = 1.0
    with pytest.raises(InputError, match=r"unknown setting 'past_futur'. Did you mean past_future"):
        from_dict(values)
    with pytest.raises(InputError, match=r"unknown setting 'los'\. Did you mean loss"):
        from_dict(to_dict(Config()) | {"los": {}})
    with pytest.raises(InputError, match=r"no setting 'loss.past_futur'. Did you mean loss.past_future"):
        recipe("quickstart", {"loss.past_futur": 1.0})
    with pytest.raises(InputError, match=r"no recipe 'quikstart'.* Did you mean quickstart"):
        recipe("quikstart")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("optim.batch", "eight"),
        ("optim.batch", 2.5),
        ("loss.form", "papr"),
        ("sandwich.offset", [0.1]),
        ("views.fixed_space", 1),
        ("loss", 3),
    ],
)
def test_value_of_another_kind_is_an_error_that_names_it(name: str, value: Any) -> None:
    values = to_dict(Config())
    group, _, field = name.rpartition(".")
    (values[group] if group else values)[field] = value
    with pytest.raises(InputError, match=name.replace(".", r"\.")):
        from_dict(values)


@pytest.mark.parametrize(
    "overrides",
    [
        {"sandwich.offset": (0.15, 0.4)},
        {"sandwich.offset": (0.3, 0.2)},
        {"sandwich.offset": (0.0, 0.2)},
        {"sandwich.current": (0.1, 0.7)},
        {"masking.ratio": (0.5, 1.5)},
        {"masking.probability": -0.1},
        {"views.global_size": 60},
        {"views.local_size": 4},
        {"views.fixed_space": False},
        {"vit.dim": 100},
        {"matching.num_heads": 7},
        {"optim.batch": 0},
        {"optim.accumulate": 3},
        {"optim.steps": 0},
        {"optim.steps": None, "optim.epochs": 20},
        {"optim.base_lr": float("nan")},
        {"head.prototypes": 1},
        {"teacher.temperature": (0.0, 0.07)},
        {"vit.drop_path": 1.0},
        {"vit.reach": 0},
        {"vit.position_std": 0.0},
        {"sandwich.offset_seconds": (0.0, 1.0)},
        {"sandwich.short_videos": "repeat", "sandwich.offset_seconds": (1.0, 2.0)},
        {"sandwich.frames": "past-past", "auxiliary": "past"},
        {"loss.own_patches": 1.0, "auxiliary": "none"},
        {"seed": -1},
    ],
)
def test_settings_that_cannot_work_are_refused_by_name_and_value(overrides: dict[str, Any]) -> None:
    with pytest.raises(InputError) as error:
        validate(recipe("quickstart", overrides))
    assert any(name.split(".")[-1] in str(error.value) for name in overrides)
    assert str(error.value).count("\n") == 0


def test_differences_list_what_is_learned_and_not_how_it_is_carried_out() -> None:
    other = recipe("quickstart", {"loss.koleo": 0.0, "runtime.workers": 3, "checkpoint_every": 7})
    assert differences(recipe("quickstart"), other) == {"loss.koleo": (0.1, 0.0)}
