"""The exceptions that a user is meant to read: one line each, no traceback on the command line."""

import importlib
from typing import Any


class InputError(ValueError):
    """Bad input: one line that names the thing, shows its value and says what to do."""

    exit_code = 2


class PeerError(InputError):
    """The error of another process, which prints it itself: this one ends silently."""

    def __init__(self, text: str, exit_code: int = 2) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, without its full stop; its kind where it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def reason(error: BaseException) -> str:
    """Why something failed, without the name of the file, where the system says so."""
    return getattr(error, "strerror", None) or first_line(error)


def import_package(package: str, needed_by: str) -> Any:
    """A package that is not always there; an error says how to install it."""
    try:
        return importlib.import_module(package)
    except (ImportError, RuntimeError) as error:  # beside another torch it can fail with either
        raise InputError(
            f"{needed_by} needs the package {package} ({first_line(error)}): pip install {package}."
        ) from error


class DivergedError(InputError):
    """Training met a number that is not finite; the last good checkpoint is kept."""

    exit_code = 1
