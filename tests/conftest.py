"""What all tests share: shape annotations are checked, and nothing takes more than one thread."""

import importlib
import os
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

# Before torch is imported, and for processes that tests start: two workers share two cores.
os.environ["OMP_NUM_THREADS"] = "1"
# Some virtual machines name AMX among their instructions and stop at the first one; tests need no such speed.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
# Tests leave the user's cache of compiled kernels alone.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / "tcore-tests-compiled"))
# A process that a test starts says where it was when it crashes inside a library.
os.environ["PYTHONFAULTHANDLER"] = "1"

import pytest
import torch

# On a GPU the tests train compiled steps, and the compiler takes a check apart instead of passing by.
if not torch.cuda.is_available():
    from tests import shapes

    shapes.install()
torch.set_num_threads(1)

# Nobody pulls the plug: some ten thousand times the disk need not say that it is done.
os.fsync = lambda fd: None

# Many tests ask for the same rendered videos, each of which takes a tenth of a second or more.
rendered: Any = importlib.import_module("tcore.data.rendered")  # after the checks of shapes are installed
rendered.render_video = lru_cache(256)(rendered.render_video)


class Refused:
    """A command that fails, and what it says."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *words: object, code: int = 2) -> str:
        """What a command prints to stderr that ends with an exit code."""
        from tcore.cli.main import main

        self.capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main([str(word) for word in words])
        assert stop.value.code == code
        return self.capsys.readouterr().err

    def in_one_line(self, *words: object) -> str:
        """The one line of a command that fails with exit code 2."""
        line = self(*words)
        assert line.count("\n") == 1
        assert line.startswith("tcore: error: ")
        return line


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs a command that must fail."""
    return Refused(capsys)


@pytest.fixture(name="rendered", scope="module")
def rendered_store() -> Any:
    """Videos that are rendered once."""
    from tcore.data.stores import FrameStore

    return FrameStore.rendered(videos=6, frames=8, size=32)


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny run from its beginning to its end, for all tests that look at one; they change copies only."""
    from tcore import train
    from tests.tiny import tiny

    return train(tiny(keep_every=3), tmp_path_factory.mktemp("runs") / "whole", quiet=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take longest come first, so that no worker is left alone with one at the end."""
    slow = (
        "test_rank_faults test_distributed test_figures test_cli test_golden test_demo test_demo_abuse "
        "test_methods test_pixel test_ablation test_scoring test_readme test_ablations test_prepare "
        "test_report test_quickstart test_faults_of_disks test_loop test_faults"
    ).split()
    items.sort(key=lambda item: slow.index(item.path.stem) if item.path.stem in slow else len(slow))
