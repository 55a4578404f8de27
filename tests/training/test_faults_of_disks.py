"""What disks do to runs: damaged checkpoints, and writes that are refused."""

import errno
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tcore import InputError, train
from tcore.files import sha256
from tcore.training import checkpoint as checkpoints
from tests.runs import assert_same_run, checkpoint
from tests.tiny import tiny
from tests.training.faults import damage, finish, start

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals, limits and /proc of Linux")


# Checkpoints that were damaged on disk


@pytest.mark.parametrize("how", ["truncated", "empty", "flipped", "missing", "pipe"])
def test_a_checkpoint_that_cannot_be_read_is_said_and_the_previous_one_is_used(
    how: str, tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    if how in ("missing", "pipe"):
        (run / "checkpoint.pt").unlink()
        if how == "pipe":  # nobody waits for it
            os.mkfifo(run / "checkpoint.pt")
    else:
        damage(run / "checkpoint.pt", how)
    train(tiny(keep_every=3), run)
    said = capsys.readouterr().err
    file = run / "checkpoint.pt"
    assert (f"{file} is missing: resuming" if how == "missing" else f"warning: {file} is damaged") in said
    assert "resumes at step 4 of 6" in said
    assert_same_run(run, whole)
    assert (run / "checkpoint.damaged.pt").exists() == (how != "missing")


def test_two_damaged_checkpoints_are_one_line_and_nothing_is_overwritten(tmp_path: Path, whole: Path) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    for name in ("checkpoint.pt", "checkpoint.previous.pt"):
        damage(run / name, "flipped")
    lines = (run / "metrics.jsonl").read_text()
    with pytest.raises(InputError, match=r"cannot read checkpoint .*previous.pt .*is damaged"):
        train(tiny(keep_every=3), run, quiet=True)
    assert (run / "metrics.jsonl").read_text() == lines


@pytest.mark.parametrize("text", [None, '{"sha256": ["0", "1"]}'])
def test_where_checksums_are_lost_or_wrong_those_inside_the_files_decide(
    text: str | None, tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    for newest, resumed in ((False, "has finished all 6 steps"), (True, "resumes at step 4 of 6 steps")):
        (run / "checkpoint.json").unlink(missing_ok=True)
        if text is not None:
            (run / "checkpoint.json").write_text(text)
        if newest:
            damage(run / "checkpoint.pt", "flipped")
        train(tiny(keep_every=3), run)
        said = capsys.readouterr().err
        used = "checkpoint.previous.pt" if newest else "checkpoint.pt"
        assert f"does not list {run / used}" in said
        assert resumed in said
    assert_same_run(run, whole)


@pytest.mark.parametrize(("keep", "resumed"), [(1, "has finished all 6"), (4, "resumes at step 3 of 6")])
def test_this_many_checkpoints_are_kept_and_the_oldest_stands_in(
    keep: int, resumed: str, tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny(keep_every=3, keep_last=keep, checkpoint_every=1)
    run = train(config, tmp_path / "run", quiet=True)
    kept = checkpoints.generations(run / "checkpoint.pt")
    steps = [torch.load(path, weights_only=True)["step"] for path in kept]
    assert steps == list(range(6, 6 - keep, -1))
    for path in kept[:-1]:
        damage(path, "truncated")
    train(config, run)
    assert resumed in capsys.readouterr().err
    assert_same_run(run, whole)
    assert len(checkpoints.generations(run / "checkpoint.pt")) <= keep
    train(replace(config, keep_last=1), run, quiet=True)  # how many are kept may change


def test_a_kill_between_any_two_renames_leaves_a_checkpoint_that_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "checkpoint.pt"

    def save(text: str) -> Any:
        def write(temporary: Path) -> str:
            temporary.write_text(text)
            return sha256(temporary)

        return write

    replace = Path.replace
    for allowed in range(4):  # renames that still happen before the end
        for text in ("first", "second"):
            checkpoints.write_generation(path, save(text))
        left = [allowed]

        def die(self: Path, target: Path, left: list[int] = left) -> Path:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return replace(self, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", die)
            try:
                checkpoints.write_generation(path, save("third"))
            except KeyboardInterrupt:
                assert allowed < 3
        found = checkpoints.load_newest(path, lambda place: place, lambda line: None)
        assert found is not None
        assert found.read_text() == ("third" if allowed == 3 else "second")


# Disks


def test_a_disk_that_refuses_a_checkpoint_keeps_the_last_one(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The errno of a read-only disk, raised at the system call.
    run, number = tmp_path / "run", errno.EROFS

    def refuse(handle: int) -> None:
        raise OSError(number, os.strerror(number))

    def break_disk(step: int) -> None:
        if step == 3:
            monkeypatch.setattr(os, "fsync", refuse)

    with pytest.raises(OSError, match=os.strerror(number)) as refused:
        train(tiny(keep_every=3), run, quiet=True, on_step=break_disk)
    monkeypatch.undo()
    assert str(refused.value.filename).startswith(str(run))  # the command line says it in one line
    assert checkpoint(run)["step"] == 2
    assert not list(run.rglob("*.tmp"))
    assert_same_run(train(tiny(keep_every=3), run, quiet=True), whole)


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_disk_that_really_is_full_or_read_only_keeps_the_last_checkpoint(
    tmp_path: Path, whole: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no mounts here")
    try:
        run = disk / "run"
        code, said = finish(start(run, keep_every=3, faults=[(3, "fill")], cwd=disk))
        assert code == 2, said
        assert "No space left on device" in said.splitlines()[-1]
        assert checkpoint(run)["step"] == 2
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        code, said = finish(start(run, keep_every=3))
        assert code == 2, said
        assert "Read-only file system" in said.splitlines()[-1]
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        (disk / "filling").unlink()
        assert_same_run(train(tiny(keep_every=3), run, quiet=True), whole)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
