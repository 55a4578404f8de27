"""Text for people: durations, sizes, suggestions, and the progress of long work."""

import csv
import difflib
import io
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

Say = Callable[[str], None]
CLEAR = "\r\x1b[K"  # back to the start of a terminal's line, and empty it
# Characters that command a terminal or turn its text around, and halves of characters.
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def format_seconds(seconds: float) -> str:
    """A duration as a person reads it.

    >>> [format_seconds(s) for s in (0.3, 42, 59.6, 75, 7260)]
    ['0.3 s', '0:42', '1:00', '1:15', '2:01:00']
    """
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def format_size(height: int, width: int) -> str:
    """The size of an image as people write it, width first.

    >>> format_size(480, 854)
    '854x480'
    """
    return f"{width}x{height}"


def count(number: int, noun: str) -> str:
    """A number of things.

    >>> count(1, "video"), count(1200, "video")
    ('1 video', '1,200 videos')
    """
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def short_path(path: str | Path) -> str:
    """A name or path as a shared file may hold it: an absolute one becomes relative, or its last two parts.

    >>> [short_path(path) for path in ("default", "videos/dog.mp4", "/home/somebody/videos/2026/dog.mp4")]
    ['default', 'videos/dog.mp4', '.../2026/dog.mp4']
    """
    path = Path(path)
    if path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    return str(Path("...", *path.parts[-2:])) if path.is_absolute() and len(path.parts) > 3 else str(path)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A question that suggests the nearest known word, to go after a sentence; empty where none is near.

    >>> did_you_mean("quikstart", ["quickstart", "vits16-k400"])
    ' Did you mean quickstart?'
    """
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean {near[0]}?" if near else ""


def list_some(items: Sequence[object], most: int = 5, between: str = ", ") -> str:
    """The first items of a list, and how many more there are.

    >>> list_some(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    more = f" and {len(items) - most:,} more" if len(items) > most else ""
    return between.join(map(str, items[:most])) + more


def markdown_table(columns: Sequence[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """The lines of a table in Markdown.

    >>> list(markdown_table(["row", "J"], [["all", "63.0"]]))
    ['| row | J |', '|---|---|', '| all | 63.0 |']
    """
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    yield from (f"| {' | '.join(cells)} |" for cells in rows)


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """Rows of cells as the text of a CSV file."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def printable(text: str) -> str:
    r"""Text, such as the name of a file, without characters that a terminal would obey or cannot show.

    >>> printable("a\x1b[2Jb\udcff.mp4")
    'a\\x1b[2Jb\\xff.mp4'
    """

    def escape(match: re.Match[str]) -> str:
        code = ord(match[0])
        # Python reads a byte that is not UTF-8 as half a character.
        return f"\\x{code & 255:02x}" if code < 256 or 0xDC80 <= code <= 0xDCFF else f"\\u{code:04x}"

    return UNPRINTABLE.sub(escape, text)


def to_stderr(line: str) -> None:
    """Print a line to stderr, in place of a progress line that may stand there."""
    start = CLEAR if sys.stderr.isatty() else ""
    print(start + printable(line), file=sys.stderr, flush=True)


def print_error(text: str, where: str = "") -> None:
    """Print an error to stderr, in one line."""
    print(f"tcore: error{where}: " + " ".join(printable(text).split()), file=sys.stderr, flush=True)


def to_stdout(text: str) -> None:
    """Print a result to stdout."""
    encoding = sys.stdout.encoding or "utf-8"
    print(printable(text).encode(encoding, "replace").decode(encoding))


def silent(line: str) -> None:
    """Print nothing: for callers who want no progress."""


class Progress:
    """How far some long work is, how fast it goes, and how long it will take.

    A line every few seconds, rewritten in place in a terminal (`to_stderr`); nothing of work that is quicker.
    With every=0 each update is a line of its own.
    """

    def __init__(
        self, what: str, total: int | None, done: int = 0, *, say: Say = to_stderr, every: float = 5.0
    ) -> None:
        self.what, self.total, self.done = what, total, done
        self._say, self._every = say, every
        self._in_place = every > 0 and say is to_stderr and sys.stderr.isatty()
        self._every = min(every, 0.2) if self._in_place else every
        self._before, self._started = done, time.monotonic()
        self._last = self._started

    def update(self, done: int, note: str = "") -> None:
        """Note how much is done; print a line if it is time."""
        self.done = done
        now = time.monotonic()
        due = now - self._last >= self._every
        if due or (done == self.total and self._last > self._started):
            self._last = now
            line = self._line(now - self._started, note)
            if self._in_place:
                print(
                    CLEAR + printable(line),
                    end="\n" if done == self.total else "",
                    file=sys.stderr,
                    flush=True,
                )
            else:
                self._say(line)

    def advance(self, note: str = "") -> None:
        """One more is done."""
        self.update(self.done + 1, note)

    def _line(self, seconds: float, note: str) -> str:
        speed = (self.done - self._before) / max(seconds, 1e-3)
        parts = [f"{self.what} {self.done:,}" + ("" if self.total is None else f"/{self.total:,}")]
        parts += [note] if note else []
        parts += [f"{speed:.3g}/s"] if speed > 0 else []
        if self.total is not None and speed > 0 and self.done < self.total:
            parts.append(f"ETA {format_seconds((self.total - self.done) / speed)}")
        return "  ".join(parts)
