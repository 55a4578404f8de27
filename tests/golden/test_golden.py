import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.golden import check

HERE = Path(__file__).parent


FILES = sorted(path for path in HERE.rglob("*") if path.suffix in (".npz", ".json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(HERE)))
def test_code_agrees_with_golden_file(path: Path) -> None:
    _, row = check.check_file(path)
    assert row.passed, row.text


def test_files_that_are_missing_unknown_or_unreadable_are_failing_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {str(path.relative_to(HERE)) for path in FILES}
    folders = {group: "" if group == "tcore" else f"{group}/" for group in check.SETS}
    assert names == {folders[group] + name for group, files in check.SETS.items() for name in files}
    assert check.main([str(tmp_path)]) == 1
    assert capsys.readouterr().out.count("missing") == len(check.SETS["tcore"])
    (tmp_path / "other.npz").write_bytes(b"")
    (tmp_path / "sinkhorn.npz").write_bytes(b"not an archive")
    np.savez(tmp_path / "schedules.npz", something=np.zeros(3))  # a name that is known, of no known set
    shutil.copy(HERE / "pck.npz", tmp_path / "pck.npz")
    rows = {row.file: row for row in check.check_folder(tmp_path)}
    assert [name for name, row in rows.items() if row.passed] == ["pck.npz"]
    assert rows["schedules.npz"].text == "unknown file"
    assert "cannot be compared" in rows["other.npz"].text
    assert "cannot be compared" in rows["sinkhorn.npz"].text
    assert rows["vip_miou.npz"].text == "missing"


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("vit_forward.npz", "tall/patches"),
        ("pmm_forward.npz", "cross_attention"),
        (
            "training_step.npz",
            "loss_paper/past_future grad_paper/student.backbone.mask_token after/teacher.backbone.cls_token",
        ),
        ("propagation_short_context.npz", "predictions"),
        ("pck.npz", "pck@0.1"),
        ("distil/dino.npz", "after_frozen/student/head.mlp.4.bias"),
        ("distil/schedules.npz", "dino/teacher_temperature_by_epoch"),
        ("distil/ibot.npz", "after/patch_center"),
        ("distil/ibot_separate.npz", "grad/head.patch_prototypes.directions"),
        ("distil/dinov2.npz", "sinkhorn/targets/patches"),
        ("distil/views.npz", "blur_23_taps_zero/1.4"),
        ("distil/simclr.npz", "grad/projector.1.bias"),
        ("distil/mocov3.npz", "after/running/predictor.4.running_var after/student/projector.1.weight"),
        ("distil/mocov3_parts.npz", "positions_224_dim16"),
        ("distil/croc.npz", "clusters_3/plan grad/head.region_prototypes.gains"),
        ("distil/odin.npz", "odin/key_second"),
    ],
)
def test_changed_numbers_are_found(name: str, changed: str) -> None:
    arrays, file = check.read(HERE / name), Path(name).name
    for array in changed.split():
        arrays[array] = arrays[array].copy()
        flat = arrays[array].reshape(-1)
        flat[np.abs(flat).argmax()] *= 1.001
    found = check.SETS[str(check.find_set(file, arrays))][file].compare(arrays)
    far = [one.name for one in found if not one.value <= one.tolerance]
    assert [array for array in changed.split() if not any(array in name for name in far)] == []


def test_check_runs_from_the_command_line_on_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("pck.npz", "sinkhorn.npz")
    monkeypatch.setattr(check, "SETS", {"tcore": {name: check.SETS["tcore"][name] for name in names}})
    for name in names:
        shutil.copy(HERE / name, tmp_path / name)
    assert check.main([str(tmp_path)]) == 0
    assert "2 passed, 0 failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "array", "wrong"),
    [
        ("distil/dinov2_masks.npz", "masked", -1),  # blocks that fall short twice as often
        ("distil/ibot_masks.npz", "block/masked", 2),
    ],
)
def test_masks_of_another_distribution_are_found(name: str, array: str, wrong: int, tmp_path: Path) -> None:
    arrays = check.read(HERE / name)
    changed = arrays[array].copy()
    changed[::10] += wrong * (changed[::10] > 0)
    changed[changed > 0] += wrong
    (tmp_path / name).parent.mkdir(exist_ok=True)
    np.savez(tmp_path / name, **(arrays | {array: changed}))
    _, row = check.check_file(tmp_path / name)
    assert not row.passed
