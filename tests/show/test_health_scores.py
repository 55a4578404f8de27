"""Which health figure goes along with the score."""

import json
from pathlib import Path

import pytest

from tcore.cli.main import main
from tcore.errors import InputError
from tcore.files import write_text
from tcore.show.health_scores import (
    Observation,
    by_chance,
    find_runs,
    health_against_score,
    health_lines,
    ranks,
    spearman,
)


def write_run(
    folder: Path, rank: float, cosine: float, score: float | None, *, truth: str = "these clips"
) -> Path:
    """What training and scoring leave of a run, as far as it is read here."""
    lines = [{"step": 1, "total": 9.0}, {"step": 2, "total": 8.0 + cosine}]
    health = {"patch_rank": rank, "frame_cosine": cosine, "state": "learning"}
    run = folder / "run"
    write_text(run / "metrics.jsonl", "".join(json.dumps(x | {"health": health}) + "\n" for x in lines))
    write_text(run / "config.json", "{}")
    if score is not None:
        result = {"scores": {"J&F": score}, "protocol": {}, "binary": False, "truth": truth, "clips": {}}
        card = {"benchmarks": {"davis": result}}
        write_text(folder / "scores" / "results.json", json.dumps(card))
    return run


def test_spearman_is_that_of_ranks_with_ties_shared() -> None:
    assert ranks([5, 1, 5, 0]).tolist() == [3.5, 2, 3.5, 1]
    assert spearman([1, 2, 3], [2, 4, 9]) == 1
    assert spearman([1, 2, 3], [9, 4, 2]) == -1
    # By hand: ranks (1, 2.5, 2.5, 4) and (1, 3, 2, 4): 4.5 / sqrt(4.5 * 5).
    assert spearman([1, 2, 2, 3], [10, 30, 20, 40]) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)
    assert spearman([1, 2], [1, 2]) is None
    assert spearman([1, 1, 1], [1, 2, 3]) is None


def test_figures_are_sorted_by_how_well_they_go_along_and_missing_ones_counted() -> None:
    runs = []
    for i in map(float, range(5)):
        figures = {"up": i, "down": -i, "so so": (i * 3) % 5} | ({"rare": i} if i < 2 else {})
        runs.append(Observation(str(i), figures, i, "d"))
    links = health_against_score(runs)
    assert [link.figure for link in links] == ["down", "up", "so so"]
    assert [link.correlation for link in links[:2]] == [-1, 1]
    assert {link.runs for link in links} == {5}


def test_few_runs_are_in_order_by_chance_and_many_are_not() -> None:
    few, many = ([Observation(str(i), {"a": i}, i, "d") for i in range(n)] for n in (3, 9))
    assert by_chance(few, 1.0) > 0.2
    assert by_chance(many, 1.0) < 0.01


def test_the_runs_of_a_lab_are_found_and_the_figure_to_watch_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for index in range(6):
        write_run(tmp_path / f"row-{index}" / "seed-0", 10.0 + index, (index * 5) % 7, 0.3 + 0.02 * index)
    write_run(tmp_path / "row-8" / "seed-0", 1.0, 1.0, 0.9, truth="other clips")
    write_run(tmp_path / "row-9" / "seed-0", 1.0, 1.0, None)
    assert len(find_runs([tmp_path])) == 8
    main(["lab", "--health", str(tmp_path)])
    said = capsys.readouterr().out
    assert "6 runs (2 more have no such score), J&F on davis" in said
    assert "| patch_rank | +1.00 | 6 |" in said
    assert "Watch patch_rank (higher goes with a better score)" in said
    assert "state" not in said


def test_too_few_scored_runs_are_refused_with_what_to_do(tmp_path: Path) -> None:
    write_run(tmp_path / "a", 1, 1, 0.5)
    with pytest.raises(InputError, match="1 of 1 runs have metrics and a J&F"):
        health_lines([tmp_path])
    with pytest.raises(InputError, match="is no folder"):
        health_lines([tmp_path / "nowhere"])


@pytest.mark.parametrize(("card", "said"), [("{", "not JSON"), ("{}", "no score card")])
def test_a_broken_card_is_one_line(tmp_path: Path, card: str, said: str) -> None:
    write_run(tmp_path / "a", 1, 1, 0.5)
    (tmp_path / "a" / "scores" / "results.json").write_text(card)
    with pytest.raises(InputError, match=said):
        health_lines([tmp_path])


def test_a_run_that_cannot_be_read_is_left_out_by_name(tmp_path: Path) -> None:
    for number in range(4):
        write_run(tmp_path / str(number), number, 0.5, 0.1 * number)
    write_text(tmp_path / "1" / "run" / "config.json", '{"runtime": {"compile": 3}}')
    lines = health_lines([tmp_path])
    assert lines[0].startswith("# Health against score: 3 runs (1 more")
    assert (
        lines[-1] == f"Left out: {tmp_path / '1/run/config.json'}: runtime.compile=3: need auto or on or off."
    )


def test_the_score_of_one_run_is_not_that_of_its_neighbors(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (write_run(tmp_path / name, 1, 1, None)).rename(tmp_path / f"run-{name}")
    write_run(tmp_path / "d", 1, 1, 0.5)
    (tmp_path / "d" / "scores").rename(tmp_path / "scores")
    with pytest.raises(InputError, match="0 of 4 runs"):
        health_lines([tmp_path])
