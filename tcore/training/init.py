"""Starting a run from the weights of an encoder instead of random ones (`--init`)."""

import json
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from tcore.errors import InputError
from tcore.files import read_json, write_text
from tcore.methods.method import Method
from tcore.training import distributed
from tcore.training.wrapping import load_weights

RECORD = "init.json"


class Init(NamedTuple):
    """Weights to start from, sized for the run, and what they are."""

    spec: str
    fingerprint: str
    state: dict[str, Tensor]
    lines: list[str]


def apply_init(init: Init, method: Method) -> None:
    """Copy the weights into every backbone of the method."""
    state = distributed.from_first(lambda: init.state)
    for backbone in method.backbones():
        load_weights(backbone, state)


def record_init(init: Init, run: Path) -> None:
    """Note in the run folder what it starts from; a run that was stopped at once begins with the same."""
    path = run / RECORD
    if path.is_file():
        try:
            was = read_json(path)["fingerprint"]
        except (InputError, KeyError, TypeError) as error:
            raise InputError(f"cannot read {path}: {error!r}; remove {run} to begin anew.") from error
        if was != init.fingerprint:
            raise InputError(
                f"run {run} began with other weights of {init.spec} (fingerprint {was}, now "
                f"{init.fingerprint}): restore them, or give another --run."
            )
    write_text(path, json.dumps({"encoder": init.spec, "fingerprint": init.fingerprint}, indent=2) + "\n")
