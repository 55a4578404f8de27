"""Who hangs, told from what the processes report."""

import json
import threading
from typing import Any

import pytest

from tcore import InputError
from tcore.training import distributed, guard
from tcore.training.guard import LEFT, Report, Since, hanging
from tcore.training.loop import resolve
from tests.tiny import tiny


def report(rank: int, points: int, **others: Any) -> Report:
    usual: dict[str, Any] = {"state": guard.WORKING, "beats": 0, "step": 7, "begun": 5, "place": "here:1"}
    return Report(
        rank, **{"host": "node", "pid": 100 + rank, "points": points, "count": 0, **usual, **others}
    )


def told(*moments: tuple[float, list[Report]], patience: float = 10.0) -> str | None:
    """What is said after the last of some moments."""
    since, line = Since(), None
    for now, reports in moments:
        line = hanging(reports, since, now, patience)
    return line


def test_the_process_that_the_others_wait_for_is_named() -> None:
    seen = [report(0, 41, count=1), report(1, 40, count=1, place="there:2"), report(2, 41, count=1)]
    later = [report(0, 41, count=9), report(1, 40, count=9, place="there:2"), report(2, 41, count=9)]
    assert told((0, seen), (9, later)) is None
    line = told((0, seen), (11, later))
    assert line is not None
    assert "no progress for 11 s (runtime.patience=10)" in line
    assert "process 1 of 3 on node (pid 101) last in step 7, at there:2" in line
    assert "(pid 100)" not in line


def test_a_process_that_has_stopped_reporting_gives_no_sign_of_life() -> None:
    line = told((0, [report(0, 41), report(1, 40)]), (11, [report(0, 41, count=5), report(1, 40)]))
    assert line is not None
    assert "process 1 of 2 on node (pid 101) does not respond, last in step 7" in line


def test_of_processes_at_one_point_the_one_without_a_sign_of_life_is_named_alone() -> None:
    seen = [report(rank, 40) for rank in range(8)]
    later = [report(rank, 40, count=0 if rank == 6 else 5) for rank in range(8)]
    line = told((0, seen), (11, later))
    assert line is not None
    assert line.startswith("a process hangs")
    assert "process 6 of 8 on node (pid 106) does not respond" in line
    assert "process 0 of 8" not in line


def test_a_first_process_that_writes_piece_by_piece_does_not_hang() -> None:
    others = [report(1, 41)]
    assert told(*((t, [report(0, 40, beats=t), *others]) for t in range(0, 100, 5))) is None
    assert told((0, [report(0, 40), *others]), (11, [report(0, 40), *others])) is not None


def test_up_to_the_second_step_there_is_more_patience() -> None:
    seen = [report(0, 3, begun=1), report(1, 2, begun=1)]
    assert told((0, seen), (59, seen)) is None
    assert told((0, seen), (61, seen)) is not None


def test_processes_that_all_stand_still_are_all_named_the_odd_one_first() -> None:
    seen = [report(rank, 40, place="odd:3" if rank == 4 else "here:1") for rank in range(6)]
    line = told((0, seen), (11, seen))
    assert line is not None
    assert line.startswith("6 processes wait for one another")
    assert line.index("process 4 of 6") < line.index("process 0 of 6")
    assert "and 2 more" in line


def test_a_process_that_has_left_keeps_nobody_waiting() -> None:
    assert told(*((t, [report(0, 10, state=LEFT), report(1, 40 + t)]) for t in range(0, 100, 5))) is None


def test_one_process_is_not_guarded() -> None:
    before = threading.active_count()
    with distributed.guarded("cpu", 0.1) as nobody:
        assert nobody is None
        assert threading.active_count() == before


def test_a_patience_of_nothing_is_refused() -> None:
    with pytest.raises(InputError, match=r"runtime.patience=0.0: need"):
        resolve(tiny(runtime__patience=0.0))


def test_an_error_of_other_kinds_is_not_taken_for_a_lost_process() -> None:
    nobody = guard.Guard(None, "name", 0, 2, 10.0)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        nobody.explain(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_the_others_hear_how_it_ended_though_another_error_comes_up_meanwhile() -> None:
    class Store:
        def __init__(self) -> None:
            self.told: list[str] = []
            self.disturbed = False

        def set(self, key: str, value: str) -> None:
            if self.disturbed:
                self.disturbed = False
                raise RuntimeError("DataLoader worker (pid 41) is killed by signal: Killed.")
            self.told.append(json.loads(value)[2])

    store = Store()
    watching = guard.Guard(store, "name", 1, 2, 1e4)  # the thread looks around after seconds
    watching.begin()
    store.disturbed = True
    watching.end(EOFError())
    assert store.told == [guard.WORKING, guard.FAILED]


def test_the_place_of_a_thread_is_a_line_of_the_package() -> None:
    there, done = threading.Event(), threading.Event()

    def stay() -> None:
        there.set()
        done.wait(60)

    thread = threading.Thread(target=lambda: distributed.on_first(stay))
    thread.start()
    assert there.wait(60)
    place = guard.place_of(thread.ident or 0)
    done.set()
    thread.join()
    assert place.startswith("tcore/training/distributed.py:")
    assert guard.place_of(thread.ident or 0) == "an unknown place"
