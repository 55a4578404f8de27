"""Files written at once or not at all, and read without trust in what they are."""

import csv
import errno
import glob
import hashlib
import io
import json
import math
import os
import platform
import secrets
import shutil
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any

import filelock

from tcore.errors import InputError, reason

TEMPORARY = ".tmp"  # ending of a file that is being written
LOCKS = ("lock", "lock.json")  # names of a folder's lock and of the note that says who holds it
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # errors of file systems without locks
ORPHANS = 15.0  # seconds that the child processes of a killed holder may take to end
HELD: set[Path] = set()  # locks that this process holds
LARGEST = 2**28  # bytes of a file that is read as a whole: an image, a table, a list of settings


def _temporary(path: Path) -> Path:
    # Processes of several machines or containers may share a folder, and a process number.
    return path.with_name(f".{path.name}.{_machine()}-{os.getpid()}-{secrets.token_hex(4)}{TEMPORARY}")


def _machine() -> str:
    """A short word for this machine, which does not tell its name."""
    return f"{zlib.crc32(platform.node().encode()):08x}"


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place when the block ends well."""
    temporary = _temporary(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with temporary.open("r+b") as written:  # Windows syncs no file that is open for reading only
            os.fsync(written.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        # The user knows the file, not its temporary name.
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        with suppress(OSError):  # what went wrong before matters more
            temporary.unlink(missing_ok=True)


@contextmanager
def new_folder(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """A temporary folder beside `path` that takes its name when the block ends well; `path` may be empty.

    With `replace`, what `path` holds is removed then. What killed processes of this machine have left of the
    same folder is removed.
    """
    temporary = _temporary(path.resolve())
    try:
        for old in temporary.parent.glob(f".{glob.escape(path.name)}.{_machine()}-*{TEMPORARY}"):
            if not is_alive(int(old.name.split("-")[-2])):
                shutil.rmtree(old, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        if replace and path.is_dir():
            _swap(temporary, path.resolve())
        elif os.name == "nt" and path.is_dir():
            path.rmdir()  # Windows replaces no folder, not even an empty one
            temporary.replace(path.resolve())
        else:
            temporary.replace(path.resolve())
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _swap(new: Path, path: Path) -> None:
    """Put a folder in the place of another one, which is removed."""
    old = _temporary(path)
    path.replace(old)
    try:
        new.replace(path)
    except BaseException:  # a second Ctrl-C among them
        old.replace(path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    """Make a new name survive a power cut; some file systems do not offer it."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def check_writable(folder: Path) -> None:
    """Refuse a place where no folder can be made, before anything else is done."""
    try:
        there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {reason(error)}.") from error
    if not there.is_dir():
        raise InputError(f"cannot write to {folder}: {there} is a file.")
    try:  # permissions tell only a part: a file system may be read-only, or its folders made by the system
        probe = _temporary(there / "probe")
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        raise InputError(
            f"cannot write to {folder}: no folder can be made in {there} ({reason(error)})."
        ) from error


def write_text(path: Path, text: str) -> None:
    """Write a text file at once or not at all."""
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any, indent: int | None = 1) -> None:
    """Write a JSON file at once or not at all."""
    write_text(path, json.dumps(value, indent=indent) + "\n")


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file at once or not at all."""
    with atomic(path) as temporary:
        temporary.write_bytes(data)


def open_regular(path: Path) -> BufferedReader:
    """A regular file, open for reading; a pipe or device, which might never end, is an OSError."""
    # Without O_NONBLOCK, opening a pipe would wait for somebody to write to it.
    file = os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb")
    mode = os.fstat(file.fileno()).st_mode
    if stat.S_ISREG(mode):
        return file
    file.close()
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))


def sha256(path: Path) -> str:
    """Checksum of a file; of an unreadable one, a text that matches no checksum."""
    try:
        with open_regular(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"unreadable: {reason(error)}"


def digest(value: Any, length: int = 64, *, sort_keys: bool = True) -> str:
    """Checksum of a value that JSON can hold, or its first digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=sort_keys).encode()).hexdigest()[:length]


def read_bytes(path: Path, largest: int = LARGEST) -> bytes:
    """All of a regular file; a huge one is an OSError."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > largest:
            raise OSError(errno.EFBIG, f"{size:,} bytes, more than {largest:,}", str(path))
        return file.read()


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """All of a regular text file."""
    return read_bytes(path).decode(encoding)


Shape = type | Callable[[Any], bool] | list[Any] | dict[Any, Any]
"""What a value from a JSON file must look like: a type, a function that accepts it, [shape] for a list, or
{"name": shape, "other?": shape, str: shape} for an object; "?" marks what may be missing, str other names.
"""


def number(value: Any) -> bool:
    """Whether a value is a number that figures and sums can bear."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e30


def number_or_nan(value: Any) -> bool:
    """Whether a value is a number, or NaN where there was nothing to score."""
    return number(value) or (isinstance(value, float) and math.isnan(value))


def whole(value: Any) -> bool:
    """Whether a value is a count."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def row_of(count: int, fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Whether a value is a list of so many values that fit."""
    return lambda value: isinstance(value, list) and len(value) == count and all(map(fits, value))


def misfit(value: Any, shape: Shape, where: str = "content") -> str:
    """The first part of a value from a JSON file that does not have its shape; empty where all fit.

    >>> misfit({"step": 1, "scores": {"J": None}}, {"step": whole, "scores": {str: number}, "way?": str})
    'content.scores.J'
    """
    if isinstance(shape, dict) and isinstance(value, dict):
        named = {name.removesuffix("?"): name for name in shape if name is not str}
        missing = (name for name, full in named.items() if name == full and name not in value)
        parts = ((name, one, shape.get(named.get(name, str), object)) for name, one in value.items())
        found = (misfit(one, own, f"{where}.{str(name)[:40]}") for name, one, own in parts)
        return next((f"{where}.{name}" for name in missing), "") or next(filter(None, found), "")
    if isinstance(shape, list) and isinstance(value, list):
        return next(filter(None, (misfit(x, shape[0], f"{where}[{i}]") for i, x in enumerate(value))), "")
    if isinstance(shape, type):
        fine = isinstance(value, shape)
    else:
        fine = not isinstance(shape, dict | list) and shape(value)
    return "" if fine else where


def read_json(path: Path, what: str = "", shape: Shape = object, remedy: str = "") -> Any:
    """What a JSON file says; one that cannot be read, or has another shape, is bad input."""
    try:
        found = json.loads(read_text(path, "utf-8-sig"))
        wrong = misfit(found, shape)
        if not wrong:
            return found
        why = f"{wrong} is missing or wrong"
    except OSError as error:
        why = reason(error)
    except RecursionError:
        why = "nested too deeply"
    except ValueError as error:  # also what is no UTF-8
        why = f"not JSON ({error})"
    raise InputError(f"cannot read {what}{path}: {why}{remedy and '; '}{remedy}.")


def read_csv(path: Path, what: str = "") -> Iterator[tuple[str, dict[str, str]]]:
    """Rows of a table by the names of its columns, each with its place in the file."""
    try:
        table = csv.reader(io.StringIO(read_text(path, "utf-8-sig"), newline=""), strict=True)
        filled = (cells for cells in table if any(map(str.strip, cells)))
        header = [cell.strip().lower() for cell in next(filled, [])]
        for cells in filled:
            where = f"{what}{path}, line {table.line_num}"
            if len(cells) != len(header):
                raise InputError(f"{where}: {len(cells)} cells, the header has {len(header)}.")
            yield where, dict(zip(header, cells, strict=True))
    except OSError as error:
        raise InputError(f"cannot read {what}{path}: {reason(error)}.") from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {what}{path}: not a table ({error}).") from error


def parse_line(line: bytes, shape: Shape) -> Any:
    """The JSON value of one line; None where it is damaged, or has another shape."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return None if misfit(found, shape) else found


def check_regular(path: Path) -> None:
    """Refuse a pipe or device, before a library opens it by its name and waits."""
    open_regular(path).close()


@contextmanager
def lock(path: Path, what: str, remedy: str) -> Iterator[None]:
    """Hold a lock file that no other process gets; a second one is refused and told who holds it.

    The operating system drops the lock when the process ends, however it ends. The note beside it,
    `path`.json, names the holder; where the file system has no locks, the note alone decides.
    """
    note = path.with_name(f"{path.name}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    held, own = filelock.FileLock(path, thread_local=False), path.resolve()
    holder = _holder(note)
    # Child processes inherit the lock, and may outlive a holder that was killed by a moment.
    orphaned, who = False, "another process"
    if holder is not None:
        pid, host = holder
        # Of a process on another machine nothing is known.
        orphaned = host == platform.node() and (pid == os.getpid() or not is_alive(pid))
        who = f"process {pid} on {host}"
    refusal = InputError(f"{what} is in use by {who}: wait for it or stop it, or {remedy}.")
    if own in HELD:
        raise refusal
    try:
        held.acquire(timeout=ORPHANS if orphaned else 0)
    except filelock.Timeout:
        raise refusal from None
    except (OSError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno not in NO_LOCKS:
            raise
        if holder is not None and not orphaned:
            raise refusal from error
    HELD.add(own)
    try:
        write_json(note, {"pid": os.getpid(), "host": platform.node()}, indent=None)
        yield
    finally:
        for file in (note, path):
            with suppress(OSError):  # what ended the work matters more
                file.unlink(missing_ok=True)
        HELD.discard(own)
        held.release()


def _holder(note: Path) -> tuple[int, str] | None:
    """The process number and host of a lock's holder; None where the note is missing or unreadable."""
    with suppress(InputError):
        found = read_json(note) if note.exists() else None
        if isinstance(found, dict) and isinstance(found.get("pid"), int) and found["pid"] > 0:
            return found["pid"], str(found.get("host"))
    return None


def is_alive(pid: int) -> bool:
    """Whether a process of this machine runs; one that has ended and waits for its parent does not."""
    if os.name == "nt":
        return True  # not known: signal 0 is Ctrl-C there
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return state.rpartition(")")[2].split()[0] not in ("Z", "X")
    except ProcessLookupError:
        return False
    except OSError:  # no /proc here, or not ours to ask
        return True
