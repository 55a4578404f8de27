import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.golden import check

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", [*check.KNOWN, *(f"distil/{name}" for name in check.DISTIL)])
def test_code_agrees_with_golden_file(name: str) -> None:
    row = check.check_file(HERE / name)
    assert row.passed, row.text


def test_files_that_are_missing_unknown_or_unreadable_are_failing_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert all(row.passed for row in check.check_folder(HERE) if row.text in ("missing", "unknown file"))
    assert check.main([str(tmp_path)]) == 1
    assert capsys.readouterr().out.count("missing") == len(check.KNOWN)
    (tmp_path / "other.npz").write_bytes(b"")
    (tmp_path / "sinkhorn.npz").write_bytes(b"not an archive")
    rows = {row.file: row for row in check.check_folder(tmp_path)}
    assert not any(row.passed for row in rows.values())
    assert rows["other.npz"].text == "unknown file"
    assert "cannot be compared" in rows["sinkhorn.npz"].text


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


def test_check_runs_from_the_command_line_on_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "KNOWN", {"pck.npz": check.check_pck, "sinkhorn.npz": check.check_sinkhorn})
    for name in check.KNOWN:
        shutil.copy(HERE / name, tmp_path / name)
    assert check.main([str(tmp_path)]) == 0
    assert "2 passed, 0 failed" in capsys.readouterr().out
