import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.golden import check

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", check.KNOWN)
def test_code_agrees_with_golden_file(name: str) -> None:
    row = check.check_file(HERE / name)
    assert row.passed, row.text


@pytest.mark.parametrize("name", check.DISTIL)
def test_other_methods_agree_with_their_golden_files(name: str) -> None:
    row = check.check_file(HERE / "distil" / name)
    assert row.passed, row.text


def test_every_golden_file_of_this_folder_is_known() -> None:
    assert all(row.passed for row in check.check_folder(HERE) if row.text in ("missing", "unknown file"))


def test_empty_folder_fails_with_a_row_for_every_known_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.main([str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert printed.count("missing") == len(check.KNOWN)


def test_unknown_file_is_a_failing_row(tmp_path: Path) -> None:
    (tmp_path / "other.npz").write_bytes(b"")
    rows = {row.file: row for row in check.check_folder(tmp_path)}
    assert rows["other.npz"].text == "unknown file"
    assert not rows["other.npz"].passed


def test_unreadable_file_is_a_failing_row(tmp_path: Path) -> None:
    (tmp_path / "sinkhorn.npz").write_bytes(b"not an archive")
    row = check.check_file(tmp_path / "sinkhorn.npz")
    assert not row.passed
    assert "cannot be compared" in row.text


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("vit_forward.npz", "tall/patches"),
        ("pmm_forward.npz", "cross_attention"),
        ("training_step.npz", "loss_paper/past_future"),
        ("training_step.npz", "grad_paper/student.backbone.mask_token"),
        ("training_step.npz", "after/teacher.backbone.cls_token"),
        ("propagation_short_context.npz", "predictions"),
        ("pck.npz", "pck@0.1"),
        ("distil/dino.npz", "after_frozen/student/head.mlp.4.bias"),
        ("distil/schedules.npz", "dino/teacher_temperature_by_epoch"),
    ],
)
def test_one_changed_number_is_found(name: str, array: str, tmp_path: Path) -> None:
    arrays = check.read(HERE / name)
    changed = arrays[array].copy()
    flat = changed.reshape(-1)
    flat[np.abs(flat).argmax()] *= 1.001
    (tmp_path / name).parent.mkdir(exist_ok=True)
    np.savez(tmp_path / name, **(arrays | {array: changed}))
    row = check.check_file(tmp_path / name)
    assert not row.passed
    assert array in row.text


def test_check_runs_from_the_command_line_on_a_copy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in check.KNOWN:
        shutil.copy(HERE / name, tmp_path / name)
    assert check.main([str(tmp_path)]) == 0
    assert f"{len(check.KNOWN)} passed, 0 failed" in capsys.readouterr().out
