"""Check the shape annotations of every tcore function while the tests run."""

import os

from jaxtyping import install_import_hook

import tests.shapes  # noqa: F401  (the hook looks it up by name)

install_import_hook("tcore", "tests.shapes.check")

import torch  # noqa: E402  (the hook must be in place before tcore is imported)

torch.set_num_threads(1)

# A process that a test starts says where it was when it crashes inside a library.
os.environ["PYTHONFAULTHANDLER"] = "1"
