"""One lock for run folders and stores."""

import errno
import fcntl
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tcore import InputError
from tcore.files import LOCKS, lock


def take(folder: Path) -> str:
    """Take and release the lock of a folder; returns the refusal, if any."""
    try:
        with lock(folder / LOCKS[0], f"folder {folder}", "give another --out"):
            return ""
    except InputError as error:
        return str(error)


def test_a_second_process_is_refused_and_told_who_holds_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tcore.files.ORPHANS", 0.1)
    with multiprocessing.get_context("fork").Pool(1) as elsewhere:
        with lock(tmp_path / LOCKS[0], "run", "give another --run"):
            assert json.loads((tmp_path / LOCKS[1]).read_text())["pid"] == os.getpid()
            said = elsewhere.apply(take, (tmp_path,))
            assert f"process {os.getpid()} on {platform.node()}" in said
            assert "--out" in said
            assert take(tmp_path) == said  # nor does the same process get it twice
        assert elsewhere.apply(take, (tmp_path,)) == ""
    assert list(tmp_path.iterdir()) == []


def test_children_of_a_killed_holder_delay_the_next_one_but_do_not_refuse_it(tmp_path: Path) -> None:
    over = subprocess.Popen([sys.executable, "-c", ""])
    over.wait()
    (tmp_path / LOCKS[1]).write_text(json.dumps({"pid": over.pid, "host": platform.node()}))
    with (tmp_path / LOCKS[0]).open("w") as inherited:
        fcntl.flock(inherited, fcntl.LOCK_EX)
        timer = threading.Timer(0.3, lambda: fcntl.flock(inherited, fcntl.LOCK_UN))
        timer.start()
        assert take(tmp_path) == ""
        timer.join()


def test_where_the_file_system_has_no_locks_the_note_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    over = subprocess.Popen([sys.executable, "-c", ""])
    over.wait()
    note = tmp_path / LOCKS[1]
    for pid, host in ((os.getppid(), platform.node()), (1, "elsewhere")):
        note.write_text(json.dumps({"pid": pid, "host": host}))
        assert f"process {pid} on {host}" in take(tmp_path)
    gone = json.dumps({"pid": over.pid, "host": platform.node()})
    for text in (gone, "", "nonsense", "[[", '{"pid": "x"}', '{"pid": -1}'):
        note.write_text(text)
        assert take(tmp_path) == ""
