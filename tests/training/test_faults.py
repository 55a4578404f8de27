"""What clusters do to jobs, done to real ones: docs/reliability.md has a row for each test."""

import errno
import fcntl
import json
import multiprocessing
import os
import platform
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tcore import InputError, train
from tcore.data.workers import LostWorkerError
from tcore.training import generations, loop
from tcore.training.bad_samples import BadSamples
from tcore.training.checkpoint import save_checkpoint
from tcore.training.lock import lock_run
from tcore.training.step import Trainer
from tests.tiny import tiny
from tests.training.faults import children_of, finish, is_alive, make_store, start, steps_of, wait_for
from tests.training.test_loop import assert_same_run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals, limits and /proc of Linux")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tiny(keep_every=3), tmp_path_factory.mktemp("runs") / "whole", quiet=True)


# SIGKILL at random moments


def kill_again_and_again(run: Path, store: Path, kills: int, steps: int, seed: int) -> tuple[int, int]:
    """Kill a training at random moments; steps lost at most, and kills that hit a file being written."""
    rng = random.Random(seed)
    settings = {
        "optim.steps": steps,
        "checkpoint_every": 2,
        "keep_every": steps,
        "runtime.workers": 2,
        "runtime.log_every": 4,
    }
    most_lost, in_writing = 0, 0
    for _ in range(kills):
        process = start(run, settings, frames=store)
        wait_for(partial(holds, run, process.pid), process)
        # Some are killed before their first step, most in the middle of one or of a checkpoint.
        reached = rng.randint(0, 12) + (steps_of(run) or [0])[-1]
        wait_for(partial(is_at, run, reached), process)
        time.sleep(rng.uniform(0, 0.1))
        assert process.poll() is None, "it was over before it could be killed"
        workers = children_of(process.pid)
        process.kill()
        process.communicate()
        before = steps_of(run)
        in_writing += bool(list(run.rglob("*.tmp")))
        notes: list[str] = []
        place = generations.newest_intact(run / "checkpoint.pt", notes.append)
        assert not any("damaged" in note for note in notes), notes
        saved = 0 if place is None else torch.load(place, weights_only=True)["step"]
        most_lost = max(most_lost, (before[-1] if before else 0) - saved)
        gone(workers)
    code, said = finish(start(run, settings, frames=store), 300)
    assert code == 0, said
    assert steps_of(run) == list(range(1, steps + 1))
    return most_lost, in_writing


def is_at(run: Path, step: int) -> bool:
    """Whether a run has noted a step."""
    return (steps_of(run) or [0])[-1] >= step


def holds(run: Path, pid: int) -> bool:
    """Whether a process says that it holds a run."""
    path = run / "lock.json"
    text = path.read_text() if path.exists() else ""
    return text.endswith("\n") and json.loads(text)["pid"] == pid


def test_a_run_killed_at_random_moments_loses_no_more_than_a_checkpoint_interval(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store")
    lost, _ = kill_again_and_again(tmp_path / "run", store, kills=2, steps=60, seed=0)
    assert lost <= 2


@pytest.mark.long
def test_a_run_killed_fifty_times_under_load_equals_one_that_never_was(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store")
    load = [
        subprocess.Popen([sys.executable, "-c", "while True: sum(range(100_000))"])
        for _ in range(max(1, (os.cpu_count() or 1) // 2))
    ]
    try:
        lost, in_writing = kill_again_and_again(tmp_path / "run", store, kills=50, steps=800, seed=1)
    finally:
        for process in load:
            process.kill()
            process.wait()
    print(f"50 kills: at most {lost} steps lost, {in_writing} while a file was being written")
    assert lost <= 2
    never = {"optim__steps": 800, "checkpoint_every": 2, "keep_every": 800, "runtime__workers": 2}
    assert_same_run(
        tmp_path / "run", train(tiny(**never, runtime__log_every=4), tmp_path / "never", store, quiet=True)
    )


# Being asked to leave


def during_step(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], None]) -> None:
    """Do something in the middle of a step of a real run."""
    step = Trainer.step

    def acting(self: Trainer, parts: Any, index: int, *rest: Any) -> Any:
        if index == number:
            act()
        return step(self, parts, index, *rest)

    monkeypatch.setattr(Trainer, "step", acting)


@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_and_leaves_with_zero_and_the_same_command_goes_on(
    asked: signal.Signals,
    tmp_path: Path,
    whole: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, config = tmp_path / "run", tiny(keep_every=3, checkpoint_every=100)
    with monkeypatch.context() as patch:
        during_step(patch, 2, lambda: os.kill(os.getpid(), asked))
        with pytest.raises(SystemExit) as left:
            train(config, run)
    assert left.value.code == 0
    assert steps_of(run) == [1, 2, 3]
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"{asked.name}: saved step 3 of 6; the same command goes on."
    train(config, run, quiet=True)
    assert_same_run(run, whole)


@pytest.mark.long
@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGUSR1])
def test_a_job_that_is_asked_to_leave_is_gone_within_thirty_seconds(
    asked: signal.Signals, tmp_path: Path, whole: Path
) -> None:
    run = tmp_path / "run"
    process = start(run, {"keep_every": 3, "checkpoint_every": 100}, pause=0.3)
    wait_for(lambda: len(steps_of(run)) >= 2, process)
    process.send_signal(asked)
    code, said = finish(process, 30)
    assert code == 0, said
    done = steps_of(run)[-1]
    assert 2 <= done < 6
    assert said.splitlines()[-1] == f"{asked.name}: saved step {done} of 6; the same command goes on."
    train(tiny(keep_every=3), run, quiet=True)
    assert_same_run(run, whole)


def test_a_signal_to_all_processes_of_a_job_does_not_lose_the_reading_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, store = tmp_path / "run", make_store(tmp_path / "store")
    strangers = children_of(os.getpid())  # what other tests of this process have left running
    workers: list[int] = []

    def signal_all() -> None:
        workers.extend(child for child in children_of(os.getpid()) if child not in strangers)
        # By another process, as a scheduler would: from their parent it would mean something else.
        subprocess.run(["kill", "-TERM", *map(str, (*workers, os.getpid()))], check=True)

    during_step(monkeypatch, 2, signal_all)
    with pytest.raises(SystemExit) as left:
        train(tiny(runtime__workers=2, optim__steps=50), run, store, quiet=True)
    assert left.value.code == 0
    assert len(workers) >= 2
    assert steps_of(run) == [1, 2, 3]
    gone(workers)


# Reading processes


def gone(processes: list[int]) -> None:
    """Wait for processes to be gone."""
    deadline = time.monotonic() + 10
    while any(map(is_alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(is_alive, processes))


def test_a_reading_process_that_is_killed_is_one_line_and_no_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, store = tmp_path / "run", make_store(tmp_path / "store")
    strangers = children_of(os.getpid())  # what other tests of this process have left running
    victims: list[int] = []

    def starve() -> None:
        victims.append(next(child for child in children_of(os.getpid()) if child not in strangers))
        os.kill(victims[0], signal.SIGKILL)

    during_step(monkeypatch, 2, starve)
    with pytest.raises(LostWorkerError) as lost:
        train(tiny(runtime__workers=2, optim__steps=200), run, store, quiet=True)
    assert str(lost.value).startswith(
        f"reading process {victims[0]} was killed, as the system does when memory runs out"
    )
    assert "\n" not in str(lost.value)
    assert lost.value.exit_code == 1


@pytest.mark.long
def test_reading_processes_die_with_their_parent(tmp_path: Path) -> None:
    run, store = tmp_path / "run", make_store(tmp_path / "store")
    process = start(run, {"runtime.workers": 2, "optim.steps": 5000}, frames=store, pause=0.05)
    wait_for(lambda: len(steps_of(run)) >= 1, process)
    workers = children_of(process.pid)
    assert len(workers) >= 2
    process.kill()
    process.communicate()
    gone(workers)


# Checkpoints that were damaged on disk


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "truncated":
        data = data[: len(data) // 2]
    elif how == "empty":
        data = bytearray()
    else:
        data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["truncated", "empty", "flipped"])
def test_a_damaged_checkpoint_is_noticed_and_the_previous_one_is_used(
    how: str, tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(tiny(keep_every=3), tmp_path / "run", quiet=True)
    damage(run / "checkpoint.pt", how)
    train(tiny(keep_every=3), run)
    said = capsys.readouterr().err
    assert f"warning: {run}/checkpoint.pt is damaged" in said
    assert "resumes at step 4 of 6" in said
    assert_same_run(run, whole)
    assert (run / "checkpoint.damaged.pt").exists()


def test_a_missing_checkpoint_is_said_and_the_previous_one_is_used(
    tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(tiny(keep_every=3), tmp_path / "run", quiet=True)
    (run / "checkpoint.pt").unlink()
    train(tiny(keep_every=3), run)
    assert f"{run}/checkpoint.pt is missing: going on from" in capsys.readouterr().err
    assert_same_run(run, whole)


def test_two_damaged_checkpoints_are_one_line_and_nothing_is_overwritten(tmp_path: Path) -> None:
    run = train(tiny(), tmp_path / "run", quiet=True)
    for name in ("checkpoint.pt", "checkpoint.previous.pt"):
        damage(run / name, "flipped")
    lines = (run / "metrics.jsonl").read_text()
    with pytest.raises(InputError, match=r"cannot read checkpoint .*previous.pt: damaged"):
        train(tiny(), run, quiet=True)
    assert (run / "metrics.jsonl").read_text() == lines


def test_a_checkpoint_without_checksums_is_used_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(tiny(), tmp_path / "run", quiet=True)
    for text in (None, "[[[", '{"sha256": 3}'):
        (run / "checkpoint.json").unlink()
        if text is not None:
            (run / "checkpoint.json").write_text(text)
        train(tiny(), run)
        assert "cannot be verified" in capsys.readouterr().err
        (run / "checkpoint.json").touch()


def test_a_kill_between_any_two_renames_leaves_a_checkpoint_that_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "checkpoint.pt"

    def save(text: str) -> Any:
        def write(temporary: Path) -> str:
            temporary.write_text(text)
            return generations.sha256(temporary)

        return write

    replace = Path.replace
    for allowed in range(4):  # renames that still happen before the end
        for text in ("first", "second"):
            generations.write_generation(path, save(text))
        left = [allowed]

        def die(self: Path, target: Path, left: list[int] = left) -> Path:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return replace(self, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", die)
            try:
                generations.write_generation(path, save("third"))
            except KeyboardInterrupt:
                assert allowed < 3
        found = generations.newest_intact(path, lambda line: None)
        assert found is not None
        assert found.read_text() == ("third" if allowed == 3 else "second")


# Disks


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO])
def test_a_disk_that_refuses_a_checkpoint_keeps_the_last_one(
    number: int, tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The errno of a full, read-only, over-quota or broken disk, raised at the system call.
    run, save = tmp_path / "run", save_checkpoint

    def refuse(handle: int) -> None:
        raise OSError(number, os.strerror(number))

    def save_on_a_bad_disk(run: Path, step: int, *rest: Any) -> None:
        if step == 4:
            monkeypatch.setattr(os, "fsync", refuse)
        save(run, step, *rest)

    monkeypatch.setattr(loop, "save_checkpoint", save_on_a_bad_disk)
    with pytest.raises(OSError, match=os.strerror(number)) as refused:
        train(tiny(keep_every=3), run, quiet=True)
    monkeypatch.undo()
    assert str(refused.value.filename).startswith(str(run))  # the command line says it in one line
    assert torch.load(run / "checkpoint.pt", weights_only=True)["step"] == 2
    assert not list(run.rglob("*.tmp"))
    train(tiny(keep_every=3), run, quiet=True)
    assert_same_run(run, whole)


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
        fill = f"""
save = loop.save_checkpoint
def save_on_a_full_disk(run, step, *rest):
    if step == 4:
        try:
            with open({str(disk / "filling")!r}, "wb", buffering=0) as file:
                while True:
                    file.write(bytes(65536))
        except OSError:
            pass
    save(run, step, *rest)
loop.save_checkpoint = save_on_a_full_disk
"""
        code, said = finish(start(run, {"keep_every": 3}, before=fill))
        assert code == 2, said
        assert "No space left on device" in said.splitlines()[-1]
        assert torch.load(run / "checkpoint.pt", weights_only=True)["step"] == 2
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        code, said = finish(start(run, {"keep_every": 3}))
        assert code == 2, said
        assert "Read-only file system" in said.splitlines()[-1]
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        (disk / "filling").unlink()
        train(tiny(keep_every=3), run, quiet=True)
        assert_same_run(run, whole)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


# Files that go bad while a run goes on


def test_an_image_that_goes_bad_in_mid_training_is_replaced_counted_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, store = tmp_path / "run", make_store(tmp_path / "store", videos=6)

    def spoil() -> None:
        for path in (store / "video-3").iterdir():
            path.write_bytes(path.read_bytes()[:100])

    during_step(monkeypatch, 3, spoil)
    with pytest.raises(InputError, match=r"more than runtime.bad_samples=0.01 allows.*video-3"):
        train(tiny(runtime__workers=0, optim__steps=40, runtime__log_every=1), run, store)
    said = capsys.readouterr().err
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    counted = [line["bad_samples"] for line in lines]
    assert counted[:3] == [0, 0, 0]
    assert sum(counted) > 10  # of 1000, in steps of 4 of which a sixth is bad
    assert "unreadable, replaced by other clips" in said
    assert f"  unreadable {counted[-1]}" in said.splitlines()[-1]


def test_a_shard_that_goes_bad_in_mid_training_is_replaced_up_to_the_set_share(tmp_path: Path) -> None:
    from tests.data.packing import pack

    store = pack(tmp_path / "store", [[("a", 10), ("b", 10)], [("c", 10), ("d", 10), ("e", 10)]])
    shard = store / "shards" / "000000.tar"
    run = tmp_path / "run"
    damage(shard, "truncated")
    train(tiny(runtime__bad_samples=1.0, runtime__workers=1), run, store, quiet=True)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert sum(line["bad_samples"] for line in lines) > 0
    with pytest.raises(InputError, match=r"runtime.bad_samples=0 allows.*000000.tar is cut off"):
        train(tiny(runtime__bad_samples=0.0, runtime__workers=0), tmp_path / "strict", store, quiet=True)


def test_the_share_of_bad_samples_is_taken_of_the_last_thousand() -> None:
    bad = BadSamples(0.01)
    said = [bad.note(step, ("broken",) if step % 200 == 0 else (), 4) for step in range(1, 2001)]
    assert sum(line is not None for line in said) == 10  # one in 800 samples
    assert bad.total == 10
    with pytest.raises(InputError, match="11 of the last 1000"):
        [bad.note(step, ("broken",), 4) for step in range(2001, 2100)]
    with pytest.raises(InputError, match="bad_samples=0 "):
        BadSamples(0.0).note(1, ("broken",), 4)


# Two jobs, one folder


def lock_elsewhere(run: str, answers: Any) -> None:
    try:
        with lock_run(Path(run)):
            answers.put("got it")
    except InputError as error:
        answers.put(str(error))


def test_a_second_process_does_not_get_the_lock_and_is_told_who_holds_it(tmp_path: Path) -> None:
    processes = multiprocessing.get_context("fork")

    def ask() -> str:
        answers = processes.Queue()
        other = processes.Process(target=lock_elsewhere, args=(str(tmp_path), answers))
        other.start()
        answer = str(answers.get(timeout=30))
        other.join()
        return answer

    with lock_run(tmp_path):
        said = ask()
        assert f"is being trained by process {os.getpid()} on {platform.node()}: wait for it" in said
    assert ask() == "got it"


@pytest.mark.long
def test_a_second_job_on_a_run_folder_is_told_who_is_there(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = start(run, {"optim.steps": 5000}, pause=0.05)
    wait_for(lambda: len(steps_of(run)) >= 1, first)
    code, said = finish(start(run, {"optim.steps": 5000}))
    assert code == 2
    assert said == (
        f"tcore: error: run {run} is being trained by process {first.pid} on {platform.node()}: "
        "wait for it or stop it, or give another --run.\n"
    )
    first.kill()
    first.communicate()
    assert steps_of(run) == list(range(1, len(steps_of(run)) + 1))
    # What the killed job left is no lock.
    assert json.loads((run / "lock.json").read_text())["pid"] == first.pid
    third = start(run, {"optim.steps": 5000})
    wait_for(partial(holds, run, third.pid), third)
    third.kill()
    third.communicate()


def test_without_locks_of_the_file_system_the_note_of_the_holder_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    over = subprocess.Popen([sys.executable, "-c", ""])
    over.wait()
    notes = {
        over.pid: (platform.node(), True),
        os.getppid(): (platform.node(), False),
        1: ("elsewhere", False),
    }
    for pid, (host, free) in notes.items():
        (tmp_path / "lock.json").write_text(json.dumps({"pid": pid, "host": host}))
        if free:
            with lock_run(tmp_path):
                pass
        else:
            with pytest.raises(InputError, match=f"process {pid} on {host}"), lock_run(tmp_path):
                pass
    for text in ("", "nonsense", "[[", '{"pid": "x"}', '{"pid": -1}'):
        (tmp_path / "lock.json").write_text(text)
        with lock_run(tmp_path):
            pass


def test_handlers_of_the_caller_are_back_after_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    step, during = Trainer.step, []

    def looking(self: Trainer, *rest: Any) -> Any:
        during.append(signal.getsignal(signal.SIGTERM))
        return step(self, *rest)

    monkeypatch.setattr(Trainer, "step", looking)
    train(tiny(optim__steps=1), tmp_path / "run", quiet=True)
    assert during[0] != before
    assert signal.getsignal(signal.SIGTERM) == before
