"""Campaigns of kills: whatever is killed, at any moment, leaves nothing damaged and nothing running."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tcore.data import loader
from tcore.files import is_alive, new_folder
from tests.training.faults import gone

# The long campaigns; those in docs/reliability.md had a thousand kills together.
KILLS, SEED = (os.environ.get(f"TCORE_KILLS{name}", usual) for name, usual in (("", "5"), ("_SEED", "1")))

linux = pytest.mark.skipif(sys.platform != "linux", reason="signals, /proc and fork of Linux")


@linux
@pytest.mark.long
@pytest.mark.parametrize("kind", ["one process", "two processes", "prepare", "propagate", "page"])
def test_what_is_killed_at_any_moment_ends_like_what_never_was(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [sys.executable, "-m", "tests.kills", kind, str(tmp_path / "kills"), KILLS, SEED]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    with capsys.disabled():
        print(f"\n{done.stdout.strip()}")


ORPHAN = """
import os, signal
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from tcore.data.loader import die_with_parent
pool = ProcessPoolExecutor(1, get_context("forkserver"), initializer=die_with_parent)
print(pool.submit(os.getpid).result(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@linux
def test_processes_of_a_fork_server_do_not_outlive_a_killed_command() -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(loader.__file__).parents[2])}
    argv = [sys.executable, "-c", ORPHAN]
    with subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as killed:
        assert killed.stdout is not None
        worker = int(killed.stdout.readline())
        assert killed.wait() == -signal.SIGKILL
        try:
            gone([worker])
        finally:
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)


def test_what_killed_processes_left_of_a_folder_is_removed_and_nothing_else(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "pass"]) as dead:
        pass
    assert not is_alive(dead.pid)
    with new_folder(tmp_path / "out") as made:
        machine = made.name.split(".")[2].split("-")[0]
    (tmp_path / "out").rmdir()
    left = f".out.{machine}-{dead.pid}-0a1b2c3d.tmp"
    others = {
        f".out.{machine}-{os.getpid()}-0a1b2c3d.tmp",  # being written
        f".out.ffffffff-{dead.pid}-0a1b2c3d.tmp",  # by another machine
        f".out.b.{machine}-{dead.pid}-0a1b2c3d.tmp",  # of another folder
    }
    for name in (left, *others):
        (tmp_path / name / "masks").mkdir(parents=True)
    with new_folder(tmp_path / "out"):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"out", *others}
