"""Scripts of studies that ended still run."""

import json
import runpy
from pathlib import Path

import pytest
from safetensors.torch import load_file

from experiments.box_scenes import Dice, draw_batch, draw_tiles, main
from experiments.branch_study import ROWS, line
from experiments.health_scores import ranks, spearman
from tcore import recipe
from tcore.files import write_text
from tcore.video.box_network import EDGE, SIDE, BoxNetwork

SCRIPT = Path(__file__).parent.parent / "experiments" / "health_scores.py"


def write_run(folder: Path, rank: float, cosine: float, score: float | None, truth: str = "these") -> None:
    """What training and scoring leave of a run, as far as the script reads it."""
    health = {"patch_rank": rank, "frame_cosine": cosine, "state": "learning"}
    lines = [{"step": step, "total": 9.0 - step * cosine, "health": health} for step in (1, 2)]
    write_text(folder / "run" / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    write_text(folder / "run" / "config.json", "{}")
    if score is not None:
        result = {"scores": {"J&F": score}, "protocol": {}, "binary": False, "truth": truth, "clips": {}}
        card = {"benchmarks": {"davis": result}}
        write_text(folder / "scores" / "results.json", json.dumps(card))


def test_spearman_is_that_of_ranks_with_ties_shared() -> None:
    assert ranks([5, 1, 5, 0]).tolist() == [3.5, 2, 3.5, 1]
    # By hand: ranks (1, 2.5, 2.5, 4) and (1, 3, 2, 4): 4.5 / sqrt(4.5 * 5).
    assert spearman([1, 2, 2, 3], [10, 30, 20, 40]) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)
    assert spearman([1, 2, 3], [9, 4, 2]) == -1
    assert spearman([1, 2], [1, 2]) is None
    assert spearman([1, 1, 1], [1, 2, 3]) is None


def test_the_script_finds_the_runs_of_a_lab_and_names_the_figure_to_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for index in range(6):
        write_run(tmp_path / f"row-{index}" / "seed-0", 10.0 + index, (index * 5) % 7, 0.3 + 0.02 * index)
    write_run(tmp_path / "row-8" / "seed-0", 1.0, 1.0, 0.9, truth="other clips")
    write_run(tmp_path / "row-9" / "seed-0", 1.0, 1.0, None)
    (tmp_path / "row-9" / "results.json").write_text("{")
    monkeypatch.setattr("sys.argv", [str(SCRIPT), str(tmp_path)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    printed = capsys.readouterr().out
    assert "6 runs (2 more have no such score), J&F on davis" in printed
    assert "| patch_rank | +1.00 | 6 |" in printed
    assert "Watch patch_rank" in printed
    assert "state" not in printed


def test_objects_of_drawn_scenes_reach_all_sides_of_their_box() -> None:
    pictures, masks = draw_batch(Dice(0), 12, draw_tiles(1, 0))
    assert pictures.shape[1:] == (3, SIDE, SIDE)
    for mask in masks > 127:
        for seen in (mask.any(dim=0).nonzero(), mask.any(dim=1).nonzero()):
            assert abs(int(seen.min()) - EDGE) <= 4
            assert abs(int(seen.max()) + 1 - (SIDE - EDGE)) <= 4


def test_scenes_train_a_network_that_can_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "weights.safetensors"
    options = f"--scenes 8 --steps 2 --batch 4 --tiles 2 {out}".split()
    monkeypatch.setattr("sys.argv", ["box_scenes.py", *options])
    main()
    BoxNetwork().load_state_dict(load_file(out))


def test_rows_of_the_branch_study_are_settings_of_the_recipe_and_read_as_times_chance() -> None:
    known = [recipe("vits16-tcore-short", row) for row in ROWS.values()]
    assert len({str(config) for config in known}) == len(ROWS)
    looked = {"times_chance": {"place": 9.84, "moved": 1.1}, "object": 0.256}
    ways = dict.fromkeys(("cross-attention", "feature similarity", "same position"), looked)
    assert line("match", {"rendered": ways, "davis2016": ways}) == [
        "match",
        *["9.8, 1.1"] * 3,
        *["25.6%"] * 3,
    ]
    assert line("match", {"rendered": ways})[4:] == ["-"] * 3
