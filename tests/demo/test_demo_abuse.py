"""What strangers, full disks and closed terminals do to the page; docs/reliability.md has the list."""

import asyncio
import errno
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tcore.cli.main import main
from tcore.demo import http
from tcore.demo.clips import Clip, read_upload
from tcore.demo.engine import Engine
from tcore.demo.exports import EXPORTS
from tcore.demo.job import Job
from tcore.demo.limits import Limits
from tcore.demo.messages import read_given
from tcore.demo.server import GUARD, Demo
from tcore.errors import InputError
from tests.demo.visitor import Visitor, serve
from tests.evaluation.clips import need_av, tiny_encoder, write_file
from tests.show.browser import wait_for

EVERYTHING = {0: np.ones((256, 256), np.uint8)}
CLIP_MB = 30 * 4 * (256 * 256 + 32 * 32 * 32) / 1e6  # of a sample with the tiny encoder


@pytest.fixture(scope="module")
def demo() -> Iterator[Demo]:
    with serve(Engine(tiny_encoder()), frames=4) as server:
        yield server


@pytest.fixture(scope="module")
def impatient() -> Iterator[Demo]:
    with serve(Engine(tiny_encoder()), frames=4, connection_s=1, connections=20) as server:
        yield server


@pytest.fixture
def visitor(demo: Demo) -> Visitor:
    return with_sample(demo)


def with_sample(demo: Demo) -> Visitor:
    visitor = Visitor(demo)
    assert visitor.post("sample", {"sample": "walker"})["state"] == "idle"
    return visitor


def talk(demo: Demo, data: bytes) -> bytes:
    """Send bytes, and read until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", demo.port), timeout=20) as connection:
        connection.sendall(data)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def head(visitor: Visitor, what: str, *headers: str) -> bytes:
    lines = (f"POST {visitor.path}/{what} HTTP/1.1", "Host: localhost", f"{GUARD}: 1", *headers, "", "")
    return "\r\n".join(lines).encode()


# Disks


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_full_disk_is_a_sentence_for_one_visitor_and_the_page_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=9m", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no mounts here")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    try:
        with serve(Engine(tiny_encoder())) as server:
            visitor = with_sample(server)
            state = visitor.run(EVERYTHING)
            assert (state["state"], 0 < state["done"] < 30) == ("failed", True)
            assert "disk" in state["error"]
            other = Visitor(server)
            assert "disk" in other.post("sample", {"sample": "walker"})["error"]
            assert other.raw("POST", f"{other.path}/upload", bytes(9_000_000), **{GUARD: "1"})[0] == 507
            # Whoever takes a shorter clip makes room for others.
            assert visitor.get("state")["done"] == state["done"]
            assert list(server.folder.glob(f"{other.path.rpartition('/')[2]}/*")) == []
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_write_that_fails_ends_the_run_and_its_frames_stay(
    visitor: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Path.write_bytes

    def refuse(path: Path, data: bytes) -> int:
        if path.name == "ids-2.npy":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", refuse)
    state = visitor.run(EVERYTHING)
    assert (state["state"], state["done"]) == ("failed", 2)
    assert "disk" in state["error"]
    assert "/" not in state["error"]
    monkeypatch.undo()
    assert visitor.run(EVERYTHING)["state"] == "done"


def test_bytes_are_limited_for_one_visitor_and_in_all() -> None:
    limits = {"visitor_mb": 1.5 * CLIP_MB, "disk_mb": 1.8 * CLIP_MB, "visitors": 2}
    with serve(Engine(tiny_encoder()), **limits) as server:
        first, second = with_sample(server), Visitor(server)
        assert "Other visitors" in second.post("sample", {"sample": "walker"})["error"]
        size = round(0.6e6 * CLIP_MB)
        assert "shorter" in first.post("upload", bytes(size))["error"]
        assert "not a video" in second.post("upload", bytes(size))["error"]
        assert first.post("sample", {"sample": "light"})["state"] == "idle"  # takes the place of the other
        third = Visitor(server)  # second leaves
        assert "Other visitors" in third.post("sample", {"sample": "walker"})["error"]
        assert server.visitors._visitors[first.path.rpartition("/")[2]].claimed == round(1e6 * CLIP_MB)
        fourth = with_sample(serve_out(server, first, third))
        assert fourth.get("state")["clip"]["frames"] == 30


def serve_out(server: Demo, leaves: Visitor, stays: Visitor) -> Demo:
    """Let one visitor be the longest idle one."""
    for one in (leaves, stays):
        one.raw("GET", f"{one.path}/state")
    return server


# Requests


def test_masks_are_counted_before_they_are_decoded(visitor: Visitor) -> None:
    many = {str(frame): [256 * 256, 1] for frame in range(8000)}
    assert "8000 frames" in visitor.post("run", {"kind": "masks", "given": many})["error"]
    far = {"0": [256 * 256, 1], "4": [256 * 256, 1]}
    assert "frame 4" in visitor.post("run", {"kind": "masks", "given": far})["error"]
    assert visitor.raw("POST", f"{visitor.path}/run", bytes(4_100_000), **{GUARD: "1"})[0] == 413
    clip = Clip("", Path(), 240, (640, 640), (640, 640), Fraction(10))
    tracemalloc.start()
    try:
        for runs in ([2**40, 1], [409600, 1] * 9000, [409599, 1]):
            with pytest.raises(InputError, match="640x640"):
                read_given({"kind": "masks", "given": {"0": runs}}, clip, Limits())
        assert tracemalloc.get_traced_memory()[1] < 2e6
    finally:
        tracemalloc.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux")
def test_answers_come_before_the_computation(demo: Demo) -> None:
    here = os.getpriority(os.PRIO_PROCESS, 0)
    there = demo.engine.submit(os.getpriority, os.PRIO_PROCESS, 0).result()
    assert there == min(19, here + 5)


def test_five_hundred_requests_at_once_are_answered(visitor: Visitor) -> None:
    async def ask() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", visitor.demo.port)
        writer.write(
            f"GET {visitor.path}/state HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
        )
        answer = await reader.read()
        writer.close()
        return answer

    async def ask_all() -> list[bytes]:
        return await asyncio.gather(*(ask() for _ in range(500)))

    assert all(answer.startswith(b"HTTP/1.1 200") for answer in asyncio.run(ask_all()))


def test_one_of_many_runs_starts_and_cancel_ends_it() -> None:
    with serve(Engine(tiny_encoder())) as server:
        visitor = with_sample(server)
        for _ in range(3):
            with ThreadPoolExecutor(16) as pool:
                answers = list(pool.map(visitor.start, [EVERYTHING] * 16))
            assert sum("state" in answer for answer in answers) == 1
            done = visitor.post("cancel")["done"]
        time.sleep(0.2)
        state = visitor.get("state")
        assert (state["state"], state["done"]) == ("canceled", done)


def test_busy_visitors_stay_and_folders_follow_their_visits() -> None:
    with serve(Engine(tiny_encoder()), visitors=2, idle_s=0) as server:
        busy = Visitor(server)
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
            connection.sendall(head(busy, "upload", "Content-Length: 1000") + b"abc")
            wait_for(lambda: server.visitors._visitors[busy.path.rpartition("/")[2]].requests, "the upload")
            others = [Visitor(server) for _ in range(5)]
            server.visitors.expire()
            connection.sendall(bytes(997))
            assert connection.recv(1000).startswith(b"HTTP/1.1 400")
        assert all(one.raw("GET", f"{one.path}/state")[0] == 410 for one in others)
        wait_for(lambda: server.visitors.expire() or not list(server.folder.glob("*/")), "the last folder")  # type: ignore[func-returns-value]
        runs = [with_sample(server) for _ in range(2)]
        for one in runs:
            one.start(EVERYTHING)
        assert "busy" in runs[0].ask("POST", "/api/visit")["error"]


def test_a_request_that_takes_too_long_is_given_up() -> None:
    with serve(Engine(tiny_encoder()), request_s=0.3) as server:
        visitor = Visitor(server)
        answer = talk(server, head(visitor, "upload", "Content-Length: 1000", "Connection: close") + b"abc")
        assert answer.startswith(b"HTTP/1.1 408")
        assert list(server.folder.glob("*/*")) == []


def test_every_cut_of_a_video_is_one_line_or_a_shorter_clip(tmp_path: Path) -> None:
    need_av()
    whole = write_file(tmp_path / "whole.mp4", np.zeros((3, 64, 64, 3), np.uint8)).read_bytes()
    file, said, counts = tmp_path / "cut", [], []
    for length in range(0, len(whole), 5):
        file.write_bytes(whole[:length])
        try:
            counts.append(read_upload(file, 9, tmp_path, lambda size: None).count)
        except InputError as error:
            said.append(str(error))
    assert set(counts) <= {1, 2, 3}
    assert len(said) > len(whole) / 10
    assert all(re.fullmatch(r"[^/\n]+\.", line) for line in said)


def test_exports_take_turns_and_end_with_their_connection(
    visitor: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, finished, begun = threading.Lock(), [], []

    def slow(job: Job, frames: Iterator[int], path: Path) -> None:
        assert lock.acquire(blocking=False)  # nobody else exports
        begun.append(path)
        try:
            for _ in frames:
                time.sleep(0.3)
            path.write_text("done")
            finished.append(path)
        finally:
            lock.release()

    monkeypatch.setitem(EXPORTS, "tracks.csv", slow)
    visitor.run(EVERYTHING)
    request = f"GET {visitor.path}/download/tracks.csv HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", visitor.demo.port)) as connection:
            connection.sendall(request)
            time.sleep(0.1)
    assert visitor.fetch("download/tracks.csv") == b"done"
    assert len(finished) == 1
    assert len(begun) <= 2  # those that waited did not even begin
    folder = visitor.demo.folder / visitor.path.rpartition("/")[2]
    wait_for(lambda: len(list(folder.iterdir())) == 1, "the export to be removed")


# The protocol


def test_slow_and_idle_connections_are_closed(impatient: Demo) -> None:
    started = time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        slow = (b"", b"GET / HTTP/1.1\r\nHo", b"GET /icon.svg HTTP/1.1\r\nHost: localhost\r\n\r\nGET")
        answers = list(pool.map(lambda data: talk(impatient, data), slow))
    assert time.monotonic() - started < 10
    assert [len(answer) > 0 for answer in answers] == [False, False, True]


def test_connections_beyond_the_limit_are_told_and_room_returns(impatient: Demo) -> None:
    idle = [socket.create_connection(("127.0.0.1", impatient.port)) for _ in range(30)]
    get = b"GET /api/info HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    assert talk(impatient, get).startswith(b"HTTP/1.1 503")
    wait_for(lambda: talk(impatient, get).startswith(b"HTTP/1.1 200"), "the idle connections to be closed")
    for connection in idle:
        connection.close()


def test_a_refused_body_is_not_read_as_a_request(impatient: Demo) -> None:
    smuggled = b"GET /api/info HTTP/1.1\r\nHost: localhost\r\n\r\n"
    stranger = b"POST /api/visit HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(smuggled)
    answer = talk(impatient, stranger + smuggled)
    assert (answer.count(b"HTTP/1.1 403"), answer.count(b"HTTP/1.1 ")) == (1, 1)


def test_odd_lengths_and_chunks_are_refused(visitor: Visitor) -> None:
    for what in ("upload", "run", "sample"):
        for length in ("-5", "abc", "1e3", "0x10", "5, 6", "9" * 40, "", "4\r\nContent-Length: 5"):
            answer = talk(visitor.demo, head(visitor, what, f"Content-Length: {length}", "Connection: close"))
            assert re.match(rb"HTTP/1.1 4(00|11|13) ", answer), (what, length, answer)
    chunks = b"3\r\nabc\r\n0\r\n\r\n"
    for headers in ((), ("Transfer-Encoding: chunked",), ("Content-Length: 3", "Transfer-Encoding: chunked")):
        answer = talk(visitor.demo, head(visitor, "upload", "Connection: close", *headers) + chunks)
        assert re.match(rb"HTTP/1.1 4(00|11) ", answer), (headers, answer)


@pytest.mark.parametrize(
    "target",
    [
        "/%00",
        "/%ff%fe",
        "/" + "a" * 20_000,
        "/" + "a/" * 5_000,
        "http://evil.example/",
        "*",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/api/visit/%00/state",
        "/api/visit//state",
        "/api/train",
        "/\xe9",
        "/ /",
    ],
)
def test_odd_addresses_are_refused_without_a_word_in_the_log(
    demo: Demo, target: str, capfd: pytest.CaptureFixture[str]
) -> None:
    request = f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode("latin-1")
    assert re.match(rb"HTTP/1.1 4\d\d ", talk(demo, request))
    assert "Traceback" not in capfd.readouterr().err


def test_labels_that_no_page_would_send_are_refused_or_run(visitor: Visitor) -> None:
    names = ["\ud800", "\x00", "é" * 99]
    state = visitor.run({0: [[1, 1], None, [2, 2]]}, "points", names=names)
    assert (state["state"], state["names"][0]) == ("done", "?")
    assert len(visitor.fetch("download/coco.json")) > 0
    places: tuple[object, ...] = (
        [[]],
        [[1]],
        [["x", 1]],
        [[1e400, 1]],
        [[None, 1]],
        {"0": [1, 1]},
        "a",
        1,
        None,
    )
    for wrong in places:
        labels = {"kind": "points", "names": ["a"], "given": {"0": wrong}}
        assert visitor.raw("POST", f"{visitor.path}/run", repr_json(labels), **{GUARD: "1"})[0] == 400, wrong


def repr_json(value: object) -> bytes:
    return repr(value).replace("'", '"').replace("None", "null").replace("inf", "1e400").encode()


# Strangers


def test_other_machines_need_the_token(capsys: pytest.CaptureFixture[str]) -> None:
    server = Demo(Engine(tiny_encoder()), Limits(), host="0.0.0.0")
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        ask = Visitor.raw
        one = Visitor.__new__(Visitor)
        one.demo = server
        for path in ("/", "/api/info", "/app.js", "/?token=", "/?token=wrong", "/?token=%ff"):
            status, body, _ = ask(one, "GET", path)
            assert status == 403
            assert server.token.encode() not in body
        assert ask(one, "POST", "/api/visit", b"{}", **{GUARD: "1"})[0] == 403
        status, _, headers = ask(one, "GET", f"/?token={server.token}")
        assert (status, headers["Location"]) == (303, "/")
        cookie = headers["Set-Cookie"].partition(";")[0]
        assert "HttpOnly" in headers["Set-Cookie"]
        assert ask(one, "GET", "/", Cookie=cookie)[0] == 200
        assert ask(one, "POST", "/api/visit", b"{}", Cookie=cookie, **{GUARD: "1"})[0] == 200
        assert server.url.endswith(f"?token={server.token}")
    finally:
        server.stop()
        thread.join()


def test_the_command_warns_of_other_machines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("uvicorn.Server.run", lambda self, sockets: None)
    for host, warned in (("0.0.0.0", True), ("127.0.0.1", False), ("localhost", False)):
        main(f"demo random:vitti16 --no-browser --detail coarse --port 0 --host {host}".split())
        said = capsys.readouterr()
        assert (f"warning: --host {host}" in said.err, "token=" in said.out) == (warned, warned)


# Signals


def serve_in(folder: Path, ports: Any) -> None:
    """A server of its own, until a signal comes."""
    tempfile.tempdir = str(folder)
    demo = Demo(Engine(tiny_encoder()), Limits(frames=8))
    ports.put(demo.port)
    with suppress(KeyboardInterrupt):
        demo.serve()


def test_a_closed_terminal_and_impatient_people_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = [[signal.SIGHUP], [signal.SIGQUIT], [signal.SIGINT] * 2, [signal.SIGKILL]]
    folders = [tmp_path / str(index) for index in range(len(ends))]
    fork = multiprocessing.get_context("fork")
    ports = fork.SimpleQueue()
    for folder, signals in zip(folders, ends, strict=True):
        folder.mkdir()
        process = fork.Process(target=serve_in, args=(folder, ports), daemon=True)
        process.start()
        server = Demo.__new__(Demo)
        server.port = ports.get()
        with_sample(server).start(EVERYTHING)
        for one in signals:
            with suppress(ProcessLookupError):  # the first one may have been enough
                os.kill(process.pid or 0, one)
            time.sleep(0.05)
        process.join(60)
        assert process.exitcode is not None
    left = [len(list(folder.glob("*"))) for folder in folders]
    assert sorted(left) == [0, 0, 0, 1]  # the one that was killed could do nothing
    monkeypatch.setattr(tempfile, "tempdir", str(next(f for f in folders if list(f.glob("*")))))
    with serve(Engine(tiny_encoder())) as server:
        assert list(server.folder.parent.iterdir()) == [server.folder]  # the next one sweeps
        other = Demo(Engine(tiny_encoder()), Limits())
        assert server.folder.is_dir()  # but not a folder in use
        other.stop()
        other.serve()


def test_a_folder_whose_removal_was_killed_is_removed_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    names = ("stale", "old", "new", "theirs")
    stale, old, new, theirs = (tmp_path / f"{http.PREFIX}{name}" for name in names)
    for folder in (stale / "a", stale / "b", old, new, theirs / "a"):
        folder.mkdir(parents=True)
    (stale / "lock").touch()
    for folder in (old, theirs):  # a process that was killed before it had its lock, and something else
        os.utime(folder, (0, 0))

    def killed(path: Path, ignore_errors: bool) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr("shutil.rmtree", killed)
        http.own_folder()
    assert (stale / "lock").exists()  # so that others know that it is nobody's
    own, lock = http.own_folder()
    assert set(tmp_path.iterdir()) == {own, new, theirs}
    lock.release()
