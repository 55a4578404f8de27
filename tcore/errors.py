"""The exceptions that a user is meant to read: one line each, no traceback on the command line."""


class InputError(ValueError):
    """Bad input: one line that names the thing, shows its value and says what to do."""

    exit_code = 2


class PeerError(InputError):
    """The error of another process, which prints it itself: this one ends silently."""

    def __init__(self, text: str, exit_code: int = 2) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class DivergedError(InputError):
    """Training met a number that is not finite; the last good checkpoint is kept."""

    exit_code = 1
