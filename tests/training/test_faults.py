"""What clusters do to jobs, done to real ones: killed, asked to leave, starved of a reading process."""

import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tcore import InputError, train
from tcore.data import loader
from tcore.data.loader import LostWorkerError, missing_killed_workers
from tcore.rendezvous import LostPeerError
from tcore.training.guard import SIGNALS, StopRequest
from tcore.training.optim import Optimizer
from tcore.training.step import Trainer, VerifyError
from tests.runs import assert_same_run, checkpoint
from tests.tiny import as_tcore, tiny
from tests.training.faults import (
    assert_one_line,
    busy_cores,
    finish,
    gone,
    holds,
    kill_again_and_again,
    make_store,
    start,
    steps_of,
    wait_for,
    wait_for_step,
)
from tests.training.jobs import StoppedError, children_of, stopping_at

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals, limits and /proc of Linux")


def at_step(number: int, act: Callable[[], object]) -> Callable[[int], None]:
    """Do something before a step of a real run."""

    def on_step(step: int) -> None:
        if step == number:
            act()

    return on_step


# SIGKILL at random moments


@pytest.mark.long
def test_a_run_killed_at_random_moments_loses_no_more_than_a_checkpoint_interval(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store")
    assert kill_again_and_again(tmp_path / "run", store, kills=1, steps=30, seed=0) <= 2


@pytest.mark.long
def test_a_run_killed_fifty_times_under_load_equals_one_that_never_was(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store")
    with busy_cores():
        assert kill_again_and_again(tmp_path / "run", store, kills=50, steps=800, seed=1) <= 2
    never = {"optim__steps": 800, "checkpoint_every": 2, "keep_every": 800, "runtime__workers": 2}
    assert_same_run(
        tmp_path / "run", train(tiny(**never, runtime__log_every=4), tmp_path / "never", store, quiet=True)
    )


# Being asked to leave


@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_and_leaves_with_zero_and_the_same_command_goes_on(
    asked: signal.Signals, tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, config = tmp_path / "run", tiny(keep_every=3, checkpoint_every=100)
    with pytest.raises(SystemExit) as left:
        train(config, run, on_step=at_step(2, lambda: os.kill(os.getpid(), asked)))
    assert left.value.code == 0
    assert steps_of(run) == [1, 2, 3]
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"{asked.name}: saved step 3 of 6")
    assert_same_run(train(config, run, quiet=True), whole)


@pytest.mark.long
@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGUSR1])
def test_a_job_that_is_asked_to_leave_is_gone_within_thirty_seconds(
    asked: signal.Signals, tmp_path: Path, whole: Path
) -> None:
    run = tmp_path / "run"
    process = start(run, keep_every=3, checkpoint_every=100, pause=0.3)
    wait_for_step(run, 2, process)
    process.send_signal(asked)
    code, said = finish(process, 30)
    assert code == 0, said
    done = steps_of(run)[-1]
    assert 2 <= done < 6
    assert said.splitlines()[-1].startswith(f"{asked.name}: saved step {done} of 6")
    train(tiny(keep_every=3), run, quiet=True)
    assert_same_run(run, whole)


def test_a_signal_to_all_processes_of_a_job_does_not_lose_the_reading_ones(tmp_path: Path) -> None:
    run, store = tmp_path / "run", make_store(tmp_path / "store")
    strangers = children_of(os.getpid())  # what other tests of this process have left running
    workers: list[int] = []

    def signal_all() -> None:
        workers.extend(child for child in children_of(os.getpid()) if child not in strangers)
        # By another process, as a scheduler would: from their parent it would mean something else.
        subprocess.run(["kill", "-TERM", *map(str, (*workers, os.getpid()))], check=True)

    config = tiny(runtime__workers=2, optim__steps=50)
    with pytest.raises(SystemExit) as left:
        train(config, run, store, quiet=True, on_step=at_step(2, signal_all))
    assert left.value.code == 0
    assert len(workers) >= 2
    assert steps_of(run) == [1, 2, 3]
    gone(workers)


def test_handlers_of_the_caller_are_back_after_training(tmp_path: Path) -> None:
    before, during = signal.getsignal(signal.SIGTERM), list[Any]()
    look = at_step(0, lambda: during.append(signal.getsignal(signal.SIGTERM)))
    train(tiny(optim__steps=1), tmp_path / "run", quiet=True, on_step=look)
    assert during[0] != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_the_first_ctrl_c_saves_and_leaves_and_the_second_stops_at_once(
    tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, config = tmp_path / "run", tiny(keep_every=3, checkpoint_every=100)
    with pytest.raises(SystemExit) as left:
        train(config, run, on_step=at_step(2, lambda: os.kill(os.getpid(), signal.SIGINT)))
    assert left.value.code == 130
    assert "SIGINT: saved step 3 of 6" in capsys.readouterr().err

    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(config, run, quiet=True, on_step=at_step(4, twice))
    assert checkpoint(run)["step"] == 3
    assert_same_run(train(config, run, quiet=True), whole)


# Whatever else ends a run


def test_an_error_in_mid_training_loses_no_step(
    tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, config = tmp_path / "run", tiny(keep_every=3, checkpoint_every=100)
    with pytest.raises(StoppedError):
        train(config, run, on_step=stopping_at(5))
    assert "saved step 5 of 6" in capsys.readouterr().err
    assert checkpoint(run)["step"] == 5
    assert_same_run(train(config, run, quiet=True), whole)


def test_an_error_within_the_update_saves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, values: Any) -> None:
        raise StoppedError

    monkeypatch.setattr(Optimizer, "step", fail)
    with pytest.raises(StoppedError):
        train(tiny(checkpoint_every=100), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run" / "checkpoint.pt").exists()


def test_a_run_folder_in_use_is_refused_to_the_same_process_at_once(tmp_path: Path) -> None:
    config, refused = tiny(optim__steps=2), list[str]()

    def again() -> None:
        with pytest.raises(InputError) as error:
            train(config, tmp_path / "run", quiet=True)
        refused.append(str(error.value))

    train(config, tmp_path / "run", quiet=True, on_step=at_step(1, again))
    assert f"is in use by process {os.getpid()}" in refused[0]


# Steps computed twice


def test_a_run_that_verifies_its_steps_is_the_same_run(tmp_path: Path, whole: Path) -> None:
    config = tiny(keep_every=3, runtime__verify_every=2)
    assert_same_run(train(config, tmp_path / "run", quiet=True), whole)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_bit_that_differs_the_second_time_stops_the_run_and_is_named(
    accumulate: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backward, calls = Trainer._backward, list[int]()

    def flip(self: Trainer, batch: Any, values: Any) -> Any:
        found = backward(self, batch, values)
        calls.append(len(calls))
        if len(calls) == 3 * accumulate:  # passes: one of step 1, two of step 2
            gradient = as_tcore(self.method).student.backbone.norm.weight.grad
            assert gradient is not None
            gradient.view(torch.int32)[0] ^= 1
        return found

    monkeypatch.setattr(Trainer, "_backward", flip)
    config = tiny(runtime__verify_every=2, optim__accumulate=accumulate)
    with pytest.raises(VerifyError, match=r"step 2 .* gradient of student.backbone.norm.weight differs"):
        train(config, tmp_path / "run", quiet=True)
    assert checkpoint(tmp_path / "run")["step"] == 1


def test_a_process_that_is_about_to_name_a_lost_one_is_not_ended_by_torchrun_before() -> None:
    heeded: list[int] = []
    before = {
        number: signal.signal(number, lambda number, frame: heeded.append(number)) for number in SIGNALS
    }
    try:
        with pytest.raises(LostPeerError), StopRequest() as stop:
            raise LostPeerError("process 1 of 2 is gone")
        signal.raise_signal(signal.SIGTERM)
        assert (stop.name, heeded) == ("SIGTERM", [])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# Reading processes


def test_a_reading_process_that_is_killed_is_one_line_and_no_hang(tmp_path: Path) -> None:
    run, store = tmp_path / "run", make_store(tmp_path / "store")
    strangers = children_of(os.getpid())  # what other tests of this process have left running
    victims: list[int] = []

    def starve() -> None:
        victims.append(next(child for child in children_of(os.getpid()) if child not in strangers))
        os.kill(victims[0], signal.SIGKILL)
        time.sleep(1)  # until the word of its death comes, before a batch that is cut off

    config = tiny(runtime__workers=2, optim__steps=200)
    with pytest.raises(LostWorkerError, match="reading process") as lost:
        train(config, run, store, quiet=True, on_step=at_step(2, starve))
    assert str(victims[0]) in str(lost.value)
    assert "\n" not in str(lost.value)
    assert lost.value.exit_code == 1


DEATH = "DataLoader worker (pid 41) is killed by signal: Killed."


@pytest.mark.parametrize("error", [ConnectionResetError(104, "Connection reset by peer"), EOFError()])
def test_a_reading_process_that_is_killed_while_it_hands_over_a_batch_is_one_line_too(
    error: Exception,
) -> None:
    with pytest.raises(LostWorkerError, match="reading process"), missing_killed_workers():
        raise error


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """Signals that arrived; the first one raises what PyTorch raises when a reading process has died."""
    found: list[int] = []

    def die(number: int, frame: Any) -> None:
        found.append(number)
        if len(found) == 1:
            raise RuntimeError(DEATH)

    before = signal.signal(signal.SIGALRM, die)
    yield found
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_the_late_word_of_a_killed_reading_process_does_not_come_up_later(
    heard: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "NOTICE_S", 30.0)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    with pytest.raises(LostWorkerError, match="reading process"), missing_killed_workers():
        raise EOFError
    assert heard == [signal.SIGALRM]  # within, and it cut the waiting short


def test_the_word_of_a_killed_reading_process_may_come_while_the_error_is_looked_at(heard: list[int]) -> None:
    class ResetError(ConnectionResetError):
        def __str__(self) -> str:
            signal.raise_signal(signal.SIGALRM)
            return "Connection reset by peer"

    with pytest.raises(LostWorkerError, match="reading process 41"), missing_killed_workers():
        raise ResetError


@pytest.mark.parametrize(("text", "kind"), [(DEATH, LostWorkerError), ("something else", TypeError)])
def test_a_killed_reading_process_is_known_behind_other_errors(text: str, kind: type[Exception]) -> None:
    error = TypeError("not a tensor")
    error.__cause__ = RuntimeError(text)
    with pytest.raises(kind), missing_killed_workers():
        raise error


@pytest.mark.long
def test_a_killed_job_leaves_neither_reading_processes_nor_a_lock(tmp_path: Path) -> None:
    run, store = tmp_path / "run", make_store(tmp_path / "store")
    job: dict[str, Any] = {"runtime__workers": 2, "optim__steps": 5000, "frames": str(store), "pause": 0.05}
    first = start(run, **job)
    wait_for_step(run, 1, first)
    workers = children_of(first.pid)
    assert len(workers) >= 2
    code, said = finish(start(run, **job))
    assert code == 2
    assert_one_line(said, f"run {run} is in use by process {first.pid} on {platform.node()}: ")
    first.kill()
    first.communicate()
    third = start(run, **job)  # at once: the lock of a killed job locks nothing
    gone(workers)
    wait_for(lambda: holds(run, third), third)
    third.kill()
    third.communicate()
