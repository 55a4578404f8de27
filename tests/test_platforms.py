"""Machines without POSIX, and Apple's GPU: stand-ins for both, as neither is at hand."""

import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tcore
from tcore.data.rendered import render_video
from tcore.device import choose_device, encoder_device
from tcore.evaluation import pose, resize
from tcore.evaluation.protocols import RENDERED
from tcore.video.propagate import propagate
from tests.evaluation.clips import tiny_encoder
from tests.evaluation.layouts import heldout_videos, write_davis
from tests.tiny import tiny

# Hides what Windows lacks, then imports every module and runs the verbs that need no training.
WITHOUT_POSIX = """
import importlib, os, pkgutil, shutil, signal, sys, threading, urllib.request

POSIX = ("fcntl", "grp", "pwd", "resource", "termios")
sys.modules |= dict.fromkeys(POSIX)
import tcore
assert "torch" not in sys.modules
import multiprocessing, torch, filelock, uvicorn  # their own business, which differs by system
multiprocessing.get_all_start_methods = lambda: ["spawn"]
for name in ("fork", "forkpty", "getuid", "sched_getaffinity", "statvfs", "sysconf", "killpg", "O_NONBLOCK"):
    delattr(os, name)
os.process_cpu_count = os.cpu_count  # Python 3.13 itself asks for what is gone, but not on Windows
shutil._use_fd_functions = False
gone = "SIGKILL SIGUSR1 SIGHUP SIGQUIT SIGALRM setitimer ITIMER_REAL pthread_sigmask sigwaitinfo"
for name in gone.split():
    delattr(signal, name)
signal.Signals = [signal.SIGINT, signal.SIGTERM]

for module in pkgutil.walk_packages(tcore.__path__, "tcore."):
    if not module.name.endswith(("_triton", "__main__")):
        importlib.import_module(module.name)
from tcore.cli.main import main
davis, clip, first, out = sys.argv[1:]
main(["propagate", "default", clip, "--labels", first, "--out", out, "--detail", "coarse"])
main(["evaluate", "control:color", "--davis", davis, "--size", "64", "64"])

from tcore.demo.engine import load_engine
from tcore.demo.limits import Limits
from tcore.demo.server import Demo
demo = Demo(load_engine("control:color", "coarse"), Limits())
threading.Thread(target=lambda: (print(urllib.request.urlopen(demo.url).status), demo.stop())).start()
demo.serve()
assert not any(sys.modules[name] for name in POSIX)
"""


def test_all_but_training_runs_without_what_windows_lacks(tmp_path: Path) -> None:
    davis = write_davis(tmp_path / "davis", heldout_videos(1, num_frames=3, size=64))
    clip, labels = (davis / folder / "480p" / "clip0" for folder in ("JPEGImages", "Annotations"))
    places = [davis, clip, labels / "00000.png", tmp_path / "out"]
    command = [sys.executable, "-W", "ignore:.*fcntl", "-c", WITHOUT_POSIX, *map(str, places)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "200"
    assert "J&F" in done.stdout
    assert sorted(path.name for path in (tmp_path / "out" / "masks").iterdir()) == sorted(
        path.name for path in clip.iterdir()
    )


def test_training_on_windows_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Windows")
    with pytest.raises(tcore.InputError, match="WSL or Linux"):
        tcore.train(tiny(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_apple_gpu_is_taken_where_it_is_named_but_not_for_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(tcore.InputError, match="--device mps: torch finds no Apple GPU"):
        encoder_device("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert encoder_device("mps") == torch.device("mps")
    assert encoder_device("cpu") == encoder_device() == choose_device()
    with pytest.raises(tcore.InputError, match=r"runtime.device=mps: .*training does not run on mps"):
        choose_device("mps")
    with pytest.raises(tcore.InputError, match="--device gpu: use auto"):
        encoder_device("gpu")


class Singles(TorchDispatchMode):
    """Refuses double precision, which Apple's GPU lacks."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        assert not (isinstance(made, torch.Tensor) and made.dtype == torch.float64), func
        return made


@pytest.mark.parametrize("edges", [True, False])
def test_propagation_computes_in_double_precision_only_where_apple_can(
    edges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (pose, resize):  # on Apple's GPU this function moves what it is given to the host
        monkeypatch.setattr(module, "doubled", lambda values: values.float())
    video = render_video(0, 1, split="heldout", num_frames=8, size=64)
    encoder = tiny_encoder()
    with Singles():  # type: ignore[no-untyped-call]
        for labels in (video.objects[0], np.array([[20.0, 30.0]])):  # a mask, and a point
            assert (
                len(list(propagate(encoder, video.frames[:2], labels, protocol=RENDERED, edges=edges))) == 2
            )
