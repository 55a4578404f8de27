"""Load and abuse of the page: `python benchmarks/demo_load.py --calls 60000`.

Starts `tcore demo` on this machine, in a temporary folder of its own, and asks it over the loopback device:

- light requests (the page, its state), 1, 8, 50 and 500 at once: idle, during a run, and during uploads;
- random calls of the API, right and wrong, by a few visitors at a time.

Prints failures, the 50th and 99th percentile of the time from connecting to the end of the answer, and
memory, descriptors and folders of the server before and after. Exit code 1 if a light request failed, or if
a random call was answered with anything but 2xx and 4xx.
"""

import argparse
import asyncio
import gc
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from fractions import Fraction
from http.client import HTTPConnection
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple

import numpy as np

from tcore.data.video import video_writer
from tcore.demo.http import PREFIX
from tcore.demo.server import GUARD

AT_ONCE = (1, 8, 50, 500)
LEAST = 1500  # light requests of a measurement
PIECE = 1 << 17  # bytes of an upload that are sent at a time
TIMEOUT = 120  # seconds for an answer
EVERYTHING = {"kind": "masks", "given": {"0": [256 * 256, 1]}}


class Answer(NamedTuple):
    """The status (0: none), the body, and how long they took."""

    status: int
    body: bytes
    seconds: float


async def ask(port: int, path: str, body: bytes | None = None, pause: float = 0.0) -> Answer:
    """One request on a connection of its own: POST if there is a body, whose end is sent after a pause."""
    started, status, answer = time.perf_counter(), 0, b""
    method, guard = (
        ("GET", "") if body is None else ("POST", f"{GUARD}: 1\r\nContent-Length: {len(body)}\r\n")
    )
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{guard}\r\n".encode()
    with suppress(OSError, EOFError):  # also a timeout
        async with asyncio.timeout(TIMEOUT):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(head + (body or b"")[:1000])
                await asyncio.sleep(pause)
                for start in range(1000, len(body or b""), PIECE):
                    writer.write((body or b"")[start : start + PIECE])
                    await writer.drain()
                headers = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = re.search(r"content-length: (\d+)", headers)
                answer = await reader.readexactly(int(length[1]) if length else 0)
                status = int(headers.split()[1])
            finally:
                writer.close()
    return Answer(status, answer, time.perf_counter() - started)


async def post(port: int, path: str, data: object) -> dict[str, Any]:
    """A request of the page that must succeed."""
    answer = await ask(port, path, json.dumps(data).encode())
    assert answer.status == 200, answer
    content: dict[str, Any] = json.loads(answer.body)
    return content


async def new_visit(port: int, sample: str = "walker") -> str:
    """The path of a visitor who has opened a sample."""
    visit = f"/api/visit/{(await post(port, '/api/visit', {}))['id']}"
    await post(port, f"{visit}/sample", {"sample": sample})
    return visit


def burst(port: int, paths: Sequence[str], at_once: int) -> list[Answer]:
    """Light requests, this many at once: a thread and a connection for each."""
    found: list[Answer] = []

    def one(path: str) -> None:
        started, status = time.perf_counter(), 0
        with suppress(OSError), closing(HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)) as connection:
            connection.request("GET", path)
            answer = connection.getresponse()
            answer.read()
            status = answer.status
        found.append(Answer(status, b"", time.perf_counter() - started))

    threads = [Thread(target=one, args=(paths[index % len(paths)],)) for index in range(at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@contextmanager
def repeatedly(work: Callable[[], Awaitable[object]] | None) -> Iterator[None]:
    """Something that happens over and over meanwhile."""
    stop = Event()

    async def loop(work: Callable[[], Awaitable[object]]) -> None:
        while not stop.is_set():
            await work()

    threads = [Thread(target=lambda: asyncio.run(loop(work)))] if work else []
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def measure_load(port: int) -> int:
    """Print a table of light requests; the number that failed."""
    visit, other = asyncio.run(new_visit(port)), asyncio.run(new_visit(port))
    paths = ["/", "/app.js", "/api/info", f"{visit}/state"]
    movie = bytes(50_000_000)

    async def run() -> None:
        await ask(port, f"{other}/run", json.dumps(EVERYTHING).encode())
        await asyncio.sleep(0.2)

    async def upload() -> None:
        await asyncio.gather(*(ask(port, f"{one}/upload", movie) for one in (visit, other)))

    failures = 0
    print("| meanwhile | at once | requests | failed | p50 ms | p99 ms |\n|---|---|---|---|---|---|")
    for name, work in (("nothing", None), ("a run", run), ("two uploads", upload)):
        for at_once in AT_ONCE:
            with repeatedly(work):
                answers = [one for _ in range(LEAST // at_once) for one in burst(port, paths, at_once)]
            failed = sum(answer.status != 200 for answer in answers)
            p50, p99 = np.percentile([1000 * answer.seconds for answer in answers], [50, 99])
            print(f"| {name} | {at_once} | {len(answers)} | {failed} | {p50:.1f} | {p99:.1f} |", flush=True)
            failures += failed
        asyncio.run(ask(port, f"{other}/cancel", b"{}"))
    return failures


class Chaos:
    """Random calls of random visitors."""

    def __init__(self, port: int, seed: int, video: bytes) -> None:
        self.port, self.random, self.video = port, random.Random(seed), video
        self.visits, self.clip = ["/api/visit/nobody"], "0"
        self.statuses: Counter[int] = Counter()
        self.wrong: Counter[str] = Counter()

    async def call(self) -> None:
        """One call; its status is counted."""
        path, body, pause = self.draw()
        answer = await ask(self.port, path, body, pause)
        self.statuses[answer.status] += 1
        if not (200 <= answer.status < 300 or 400 <= answer.status < 500):
            self.wrong[f"{answer.status} {re.sub('visit/[^/]*', 'visit/ID', path)[:80]}"] += 1
        if answer.status == 200 and path == "/api/visit":
            self.visits = [*self.visits[-11:], f"/api/visit/{json.loads(answer.body)['id']}"]
        if answer.status == 200 and path.endswith("/state"):
            self.clip = json.loads(answer.body)["clip"]["key"]

    def draw(self) -> tuple[str, bytes | None, float]:
        """Path, body and pause of a call."""
        choose, number = self.random.choice, choose_number(self.random)
        visit = choose(self.visits)
        what = self.random.random()
        if what < 0.02:
            return "/api/visit", choose([b"{}", b"", b"["]), 0.0
        if what < 0.03:
            return f"{visit}/sample", json.dumps({"sample": choose(["walker", "light", "", 7])}).encode(), 0.0
        if what < 0.04:
            cut = self.random.randrange(len(self.video))
            return (
                f"{visit}/upload",
                choose([self.video, self.video[:cut], os.urandom(3000)]),
                choose([0.0, 0.1]),
            )
        if what < 0.10:
            return f"{visit}/run", self.labels(), 0.0
        if what < 0.13:
            return f"{visit}/mark", self.hints(), 0.0
        if what < 0.135:
            detail: Any = choose(["coarse", "fine", "finest", "", 7, [], None])
            return f"{visit}/detail", json.dumps({"detail": detail}).encode(), 0.0
        if what < 0.14:
            return f"{visit}/cancel", b"{}", 0.0
        if what < 0.16:
            query = f"frame={number()}&row={number()}&column={number()}&offset={number()}"
            return f"{visit}/inspect?{query}&kind={choose(['attention', 'similarity', ''])}", None, 0.0
        if what < 0.17:
            return f"{visit}/estimate", None, 0.0
        if what < 0.19:
            name = choose(["masks.zip", "tracks.csv", "coco.json", "overlay.mp4", "x", "..%2f..%2fx"])
            return f"{visit}/download/{name}", None, 0.0
        rest = [
            f"{visit}/state",
            f"{visit}/truth",
            f"{visit}/frame/{self.clip}/{number()}",
            f"{visit}/mask/{number()}",
            f"{visit}/{number()}",
            "/api/info",
            "/api/train",
            "/",
            f"/{choose(['app.js', 'style.css', '%00', '..%2f', 'a' * 5000])}",
        ]
        return choose(rest), choose([None] * 9 + [b"{}"]), 0.0

    def hints(self) -> bytes:
        """What a visitor says about an object, some of it right."""
        number, choose = choose_number(self.random), self.random.choice
        odd: list[Any] = [None, "x", [], [[]], [number()], math.nan, {"a": 1}]
        pairs = [[[100, 90]], [[number(), -number()]], [[math.nan, 5.0]], [[1, 2]] * 101, *odd]
        data = {
            "frame": choose([0, 0, number(), "0", *odd]),
            "clicks": choose(pairs),
            "clicks_not": choose([[], *pairs]),
            "box": choose([None, [20, 30, 90, 80], [-5, 0, 10**9, 3], [math.inf] * 4, [1, 2, 0, 0], *odd]),
            "scribble": choose([None, [30000, 0, 300, 1, 35236, 0], [256 * 256, 0], *odd]),
        }
        kept = {name: value for name, value in data.items() if name == "frame" or self.random.random() < 0.4}
        return json.dumps(kept).encode()

    def labels(self) -> bytes:
        """Labels of a run, some of them right."""
        number = choose_number(self.random)
        masks: list[Any] = [[256 * 256, 1], [30000, 1, 35536, 2], [number(), number()], [], "x", None]
        points: list[Any] = [[[number(), number()], None], [[1, 2], [3, 4]], [[]], 5]
        kind = self.random.choice(["masks", "points", "boxes"])
        given = {"0": self.random.choice(masks if kind == "masks" else points)}
        for _ in range(self.random.randrange(3)):
            given[str(number())] = self.random.choice(masks if kind == "masks" else points)
        names = self.random.choice([["a", "b"], ["a", "a"], ["\ud800", ""], 3])
        data = {"kind": kind, "given": given, "names": names, "changed": number()}
        return self.random.choice([json.dumps(data).encode()] * 9 + [b"[" * 5000, b"\xff", b"7"])


def choose_number(source: random.Random) -> Callable[[], int]:
    """Numbers that are often right, and sometimes far from it."""
    return lambda: source.choice([*range(8), *range(8), -1, 99, 2**31, 2**63, 10**25])


async def measure_chaos(port: int, calls: int, at_once: int, seed: int, video: bytes) -> int:
    """Make random calls; the number of answers that are neither 2xx nor 4xx."""
    chaos, started = Chaos(port, seed, video), time.perf_counter()
    left = iter(range(calls))

    async def worker() -> None:
        for _ in left:
            await chaos.call()

    await asyncio.gather(*(worker() for _ in range(at_once)))
    seconds = time.perf_counter() - started
    statuses = ", ".join(f"{count:,} x {status}" for status, count in sorted(chaos.statuses.items()))
    print(f"{calls:,} random calls, {at_once} at once, seed {seed}, in {seconds:.0f} s: {statuses}")
    for what, count in chaos.wrong.most_common(10):
        print(f"  wrong: {count} x {what}")
    return chaos.wrong.total()


def resources(pid: int, folder: Path) -> str:
    """Memory, descriptors, threads, folders and bytes on disk of the server."""
    status = Path(f"/proc/{pid}/status").read_text()
    memory, threads = (int(re.search(rf"{key}:\s+(\d+)", status)[1]) for key in ("VmRSS", "Threads"))  # type: ignore[index]
    descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    visits = list(folder.glob(f"{PREFIX}*/*/"))
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return (
        f"{memory / 1000:.0f} MB, {descriptors} descriptors, {threads} threads, {len(visits)} folders of "
        f"visitors, {size / 1e6:.0f} MB on disk"
    )


def small_video(folder: Path) -> bytes:
    """A video of 6 frames, as a visitor would upload it."""
    frames = np.random.default_rng(0).integers(0, 255, (6, 64, 96, 3), dtype=np.uint8)
    with video_writer(folder / "small.mp4", Fraction(10), (64, 96)) as write:
        for frame in frames:
            write(frame)
    return (folder / "small.mp4").read_bytes()


def main() -> None:
    """Start the server, load it, print what it did."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--encoder", default="random:vitti16")
    parser.add_argument("--calls", type=int, default=3000, help="random calls, at most 60,000")
    parser.add_argument("--at-once", type=int, default=16, help="random calls at a time")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    gc.freeze()  # what is measured is the server
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        argv = [sys.executable, "-m", "tcore", "demo", args.encoder, "--no-browser", "--port", "0"]
        argv += ["--max-frames", "30"]
        with subprocess.Popen(
            argv, stdout=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": name}
        ) as server:
            try:
                assert server.stdout is not None
                server.stdout.readline()
                port = int(server.stdout.readline().split()[1].rpartition(":")[2].strip("/"))
                asyncio.run(ask_once(port))
                load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
                print(f"{os.cpu_count()} cores, load of the machine in the last 1, 5 and 15 minutes: {load}")
                print("before:", resources(server.pid, folder))
                failed = measure_load(port)
                print("after the load:", resources(server.pid, folder))
                calls = min(args.calls, 60_000)
                wrong = asyncio.run(measure_chaos(port, calls, args.at_once, args.seed, small_video(folder)))
                (folder / "small.mp4").unlink()
                time.sleep(3)
                print("after the random calls:", resources(server.pid, folder))
            finally:
                server.terminate()
        print(f"stopped with code {server.returncode}, left behind: {[p.name for p in folder.iterdir()]}")
    sys.exit(1 if failed or wrong else 0)


async def ask_once(port: int) -> None:
    """Open the page and a sample, so that everything is loaded."""
    await ask(port, f"{await new_visit(port)}/estimate")


if __name__ == "__main__":
    main()
