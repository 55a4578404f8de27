"""Commands that are killed again and again, at any moment of their work, and what they must leave behind.

`python -m tests.kills KIND FOLDER KILLS SEED` imports torch and tcore once, and forks a process for every
start, so that a start takes no longer than the command's own work. Half of the kills come at a random time,
the others just before a random change of a file: the process sends SIGKILL to itself.
"""

import http.client
import importlib
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image

from tcore.cli.main import main
from tcore.data.rendered import render_video
from tcore.demo.http import PREFIX
from tcore.demo.server import GUARD
from tcore.files import is_alive
from tcore.training import checkpoint as checkpoints
from tests.evaluation.clips import write_file, write_folder
from tests.runs import assert_same_run, contents
from tests.tiny import TINY, flags_of
from tests.training.faults import make_store, steps_of

# What the commands import when they need it, imported once for all of them.
LATE = (
    *(f"tcore.cli.{name}" for name in ("data", "encoders", "show", "train")),
    *("tcore.data.prepare", "tcore.demo.engine", "tcore.training.loop", "tcore.video.propagate_video"),
    *("av", "torch._dynamo", "torch.distributed.fsdp", "torch.utils.tensorboard"),
)
FORK = get_context("fork")
CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link"}
END_S = 600.0  # seconds within which what was started has ended, on a crowded machine too
Work = Callable[[], object]


class Start(NamedTuple):
    """Processes of one command, and what each of them has printed."""

    processes: list[ForkProcess]
    logs: list[Path]

    def said(self) -> str:
        return "\n".join(log.read_text(errors="replace") for log in self.logs if log.exists())

    def wait(self, seconds: float) -> bool:
        """Whether all have ended in time."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return not any(process.is_alive() for process in self.processes)

    def codes(self) -> list[int]:
        """Exit codes, once all have ended and nothing that they started is left."""
        assert self.wait(END_S), f"it hangs: {self.said()}"
        deadline = time.monotonic() + END_S
        while left := [pid for process in self.processes for pid in session_of(process.pid)]:
            assert time.monotonic() < deadline, f"processes {left} outlive a killed one"
            time.sleep(0.01)
        return [process.exitcode or 0 for process in self.processes]


def session_of(leader: int | None) -> list[int]:
    """Processes of a session, but for those that have ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader and state not in "ZX":
                found.append(int(stat.parent.name))
    return found


def begin(works: Sequence[Work], root: Path, due: int = 0, count: Any = None) -> Start:
    """Fork a process for each piece of work; the first one dies before its change of files number `due`."""
    logs = [root / f"log-{index}.txt" for index in range(len(works))]

    def run(index: int) -> None:
        os.setsid()
        handle = os.open(logs[index], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        if index == 0:
            watch_changes(root / "work", due, count)
        works[index]()

    processes = [FORK.Process(target=run, args=(index,)) for index in range(len(works))]
    for process in processes:
        process.start()
    return Start(processes, logs)


def watch_changes(root: Path, due: int, count: Any) -> None:
    """Count the changes of files under a folder; this process is killed just before number `due`."""
    own, seen, inside = os.getpid(), 0, str(root)

    def note(event: str, args: tuple[Any, ...]) -> None:
        nonlocal seen
        written = event in CHANGES or (event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR))
        if not written or os.getpid() != own or not isinstance(args[0], str | os.PathLike):
            return
        if os.fspath(args[0]).startswith(inside):
            seen += 1
            if count is not None:
                count.value = seen
            if seen == due:
                os.kill(own, signal.SIGKILL)

    sys.addaudithook(note)


class Command:
    """A command in a folder of its own: how it starts, and what must hold after a kill and at its end."""

    processes = 1

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "work").mkdir(parents=True)

    def works(self, place: Path) -> list[Work]:
        raise NotImplementedError

    def check_killed(self, place: Path, codes: list[int], said: str) -> None:
        """What must hold after a kill, before the next start."""

    def check_end(self, place: Path, whole: Path) -> None:
        """What must hold after the end: it is the same as without a kill."""
        found, wanted = contents(place), contents(whole)
        other = sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))
        assert not other, f"not as in a run that was never killed: {other}"
        left = {path.name for path in place.parent.iterdir()} - {place.name, whole.name}
        assert not left, f"left behind: {left}"

    def visit(self, place: Path, start: Start) -> None:
        """What others do with the command while it runs."""


class Train(Command):
    """A training that reads frames by two processes, and keeps its encoders."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        store = make_store(root / "store", videos=4)
        settings = TINY | {"optim.steps": 10, "keep_every": 4, "runtime.workers": 2}
        own = {name: value for name, value in settings.items() if not name.startswith("rendered.")}
        self.flags = ["--frames", str(store), *flags_of(own)]

    def works(self, place: Path) -> list[Work]:
        return [lambda: main(["train", "quickstart", "--run", str(place), *self.flags])]

    def check_killed(self, place: Path, codes: list[int], said: str) -> None:
        notes: list[str] = []
        if place.exists():
            newest = checkpoints.load_newest(place / "checkpoint.pt", lambda path: path, notes.append)
            saved = 0 if newest is None else torch.load(newest, weights_only=True)["step"]
            assert (steps_of(place) or [0])[-1] - saved <= TINY["checkpoint_every"]
        assert not any("damaged" in note for note in notes), notes

    def check_end(self, place: Path, whole: Path) -> None:
        assert_same_run(place, whole)
        assert steps_of(place) == list(range(1, 11))
        names = {path.name for path in place.rglob("*") if not path.name.startswith("events.")}
        assert names == {path.name for path in whole.rglob("*") if not path.name.startswith("events.")}


class TrainTogether(Train):
    """The same by two processes, as torchrun would start them."""

    processes = 2

    def works(self, place: Path) -> list[Work]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])

        def work(rank: int) -> None:
            about = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
            os.environ |= {name: str(value) for name, value in about.items()}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            main(["train", "quickstart", "--run", str(place), *self.flags, "--runtime.patience", "20"])

        return [lambda: work(0), lambda: work(1)]

    def check_killed(self, place: Path, codes: list[int], said: str) -> None:
        super().check_killed(place, codes, said)
        assert set(codes) <= {0, 1, -signal.SIGKILL}, (codes, said)
        assert "Traceback" not in said, said


class Prepare(Command):
    """Videos that are packed by two processes, and by none."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        for video in range(8):
            frames = render_video(7, video, num_frames=12, size=48).frames
            write_file(root / "videos" / f"{video}.mp4", frames, rate=4)
        (root / "videos" / "text.avi").write_text("hello")
        self.random = random.Random(0)

    def works(self, place: Path) -> list[Work]:
        how = self.random.choice([["--engine", "here"], ["--workers", "2"]])
        return [lambda: main(["prepare", str(self.root / "videos"), str(place), *how])]


class Propagate(Command):
    """Masks through a video."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        video = render_video(0, 1, split="heldout", num_frames=12, size=64)
        self.clip = write_folder(root / "frames", video.frames)
        self.labels = root / "first.png"
        Image.fromarray(video.objects[0]).save(self.labels)

    def works(self, place: Path) -> list[Work]:
        words = [str(self.clip), "--labels", str(self.labels), "--out", str(place)]
        words += ["--detail", "fine"]  # otherwise the load of the machine decides
        return [lambda: main(["propagate", "random:vitti16", *words])]

    def check_killed(self, place: Path, codes: list[int], said: str) -> None:
        if (place / "propagation.json").exists():  # all of it, or nothing but what is needed to go on
            shutil.rmtree(place)
        names = {path.name for path in place.iterdir()} if place.is_dir() else set()
        assert {name for name in names if name[0] != "."} <= {"unfinished.bin", "lock", "lock.json"}


class Page(Command):
    """The page, while a visitor uses it; it ends by SIGTERM, and has removed everything."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        video = render_video(0, 1, num_frames=6, size=64)
        self.video = write_file(root / "video.mp4", video.frames).read_bytes()

    def works(self, place: Path) -> list[Work]:
        def serve() -> None:
            tempfile.tempdir = str(self.root / "work")
            main(["demo", "random:vitti16", "--no-browser", "--port", "0", "--max-frames", "6"])

        return [serve]

    def visit(self, place: Path, start: Start) -> None:
        """Open a sample, run, look, download, upload; then ask the page to stop."""
        port = self.port(start)
        ask(port, "GET", "/")
        [folder] = (self.root / "work").glob(f"{PREFIX}*")  # what was left by others is gone
        visit = f"/api/visit/{ask(port, 'POST', '/api/visit')['id']}"
        ask(port, "POST", f"{visit}/sample", {"sample": "walker"})
        ask(port, "POST", f"{visit}/run", {"kind": "masks", "given": {"0": [256 * 256, 1]}})
        while ask(port, "GET", f"{visit}/state")["state"] == "running":
            time.sleep(0.02)
        ask(port, "GET", f"{visit}/download/masks.zip")
        ask(port, "POST", f"{visit}/upload", self.video)
        assert folder.is_dir()
        os.kill(start.processes[0].pid or 0, signal.SIGTERM)

    def port(self, start: Start) -> int:
        while "page: " not in start.said():
            if not is_alive(start.processes[0].pid or 0):
                raise ConnectionError("it has ended")
            time.sleep(0.01)
        return int(start.said().partition("page: http://127.0.0.1:")[2].partition("/")[0])

    def check_killed(self, place: Path, codes: list[int], said: str) -> None:
        for folder in (self.root / "work").glob(f"{PREFIX}*"):
            if not (folder / "lock").exists():  # of no use to anybody, and gone with the next start but one
                assert not list(folder.iterdir())
                os.utime(folder, (0, 0))

    def check_end(self, place: Path, whole: Path) -> None:
        left = [path for path in (self.root / "work").iterdir() if path != place]
        assert not left, f"left behind: {left}"


def ask(port: int, method: str, path: str, data: Any = None) -> Any:
    """A request that must succeed; where the page is gone, an OSError."""
    body = data if isinstance(data, bytes) else json.dumps(data or {}).encode()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        with closing(connection):
            connection.request(method, path, body if method == "POST" else None, {GUARD: "1"})
            answer = connection.getresponse()
            text = answer.read()
    except http.client.HTTPException as error:
        raise ConnectionError("cut off") from error
    assert answer.status == 200, (path, answer.status, text)
    return json.loads(text) if answer.headers["Content-Type"] == "application/json" else text


KINDS: dict[str, type[Command]] = {
    "one process": Train,
    "two processes": TrainTogether,
    "prepare": Prepare,
    "propagate": Propagate,
    "page": Page,
}


def once(command: Command, place: Path, due: int, count: Any, seconds: float) -> tuple[list[int], str]:
    """Start, let others use it, and kill what still runs after some seconds, or one process of several."""
    start = begin(command.works(place), command.root, due, count)
    visitor = FORK.Process(target=visiting, args=(command, place, start))
    visitor.start()
    if not start.wait(seconds):
        rng = random.Random(seconds)
        victims = start.processes if rng.random() < 0.5 else [rng.choice(start.processes)]
        for process in victims:
            process.kill()
    codes = start.codes()
    visitor.join(END_S)
    assert visitor.exitcode == 0, f"what the visitor met is above; {start.said()}"
    return codes, start.said()


def visiting(command: Command, place: Path, start: Start) -> None:
    """What others do; that the page is gone is no surprise to them."""
    with suppress(ConnectionError):
        command.visit(place, start)


def campaign(kind: str, root: Path, kills: int, seed: int) -> Counter[str]:
    """Kill a command this often; one that comes to its end is compared with one that never was killed."""
    command, rng, counts = KINDS[kind](root), random.Random(seed), Counter[str]()
    whole, count = root / "whole", FORK.RawValue("L", 0)
    begun = time.monotonic()
    codes, said = once(command, root / "work" / "whole", 0, count, END_S)
    assert not any(codes), said
    usual, changes = time.monotonic() - begun, count.value
    with suppress(FileNotFoundError):
        (root / "work" / "whole").rename(whole)
    print(f"{kind}: undisturbed {usual:.1f} s, {changes} changes of files", flush=True)
    place = root / "work" / "run"
    while True:
        clock, last = rng.random() < 0.5, counts["kills"] >= kills
        moment = rng.random() ** (2 if place.exists() else 1)  # what resumes has less to do
        due = 0 if clock or last else 1 + int(moment * changes)
        codes, said = once(command, place, due, None, moment * usual if clock and not last else END_S)
        if -signal.SIGKILL in codes:
            counts.update(["kills", "by the clock" if clock else "before a change of a file"])
            command.check_killed(place, codes, said)
            continue
        assert not any(codes), (codes, said)
        command.check_end(place, whole)
        shutil.rmtree(place, ignore_errors=True)
        counts["ends"] += 1
        if last:
            return counts


if __name__ == "__main__":
    for name in LATE:
        importlib.import_module(name)
    torch.set_num_threads(1)
    started = time.monotonic()
    found = campaign(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    print(f"{sys.argv[1]}: {dict(found)} in {time.monotonic() - started:.0f} s", flush=True)
