"""Check the shape annotations of every tcore function while the tests run."""

import os
from pathlib import Path

import torch
from jaxtyping import install_import_hook

import tests.shapes  # noqa: F401  (the hook looks it up by name)

# Triton reads its kernels as text and finds no names behind a wrapper: these modules stay as they are.
ROOT = Path(__file__).parents[1]
FILES = [path for path in (ROOT / "tcore").rglob("*.py") if not path.stem.endswith("_triton")]
# On a GPU the tests train compiled steps, and the compiler takes a check apart instead of passing by.
if not torch.cuda.is_available():
    install_import_hook(
        [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in FILES], "tests.shapes.check"
    )

torch.set_num_threads(1)

# A process that a test starts says where it was when it crashes inside a library.
os.environ["PYTHONFAULTHANDLER"] = "1"
