"""The package as strangers get it: a wheel in an empty environment, and a source distribution."""

import json
import os
import resource
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tcore import __version__
from tcore.data.rendered import render_video
from tests.evaluation.clips import write_folder

ROOT = Path(__file__).parents[1]
SDIST = "from setuptools import build_meta; build_meta.build_sdist('dist')"
HIDDEN = "import sys; sys.modules |= dict.fromkeys(('fcntl', 'resource')); import tcore; tcore.load_encoder"

pytestmark = pytest.mark.long


def run(*command: str | Path, cwd: Path) -> str:
    """What a command prints; the environment of the tests stays out of it."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=cwd, env=clean, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def tracked() -> list[str]:
    """Files of this repository, as they are now."""
    names = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines()
    return [name for name in names if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution and the wheel that is made of it."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone: its list of files is unknown")
    source = tmp_path_factory.mktemp("source")
    names = tracked()
    for name in names:  # a copy, because building leaves files behind
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    run(sys.executable, "-c", SDIST, cwd=source)
    dist = source / "dist"
    (dist / "files").write_text("\n".join(names))
    sdist = next(dist.glob("*.tar.gz"))
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", dist, sdist, cwd=dist)
    return dist


@pytest.fixture(scope="module")
def home(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty environment with the wheel in it."""
    folder = tmp_path_factory.mktemp("home")
    run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    # torch first, so that the range of the package takes the version that is tested here.
    version = torch.__version__.partition("+")[0]
    wheel = next(built.glob("*.whl"))
    run(folder / "venv/bin/python", "-m", "pip", "install", f"torch=={version}", wheel, cwd=folder)
    return folder


def test_source_distribution_has_every_file_of_the_repository(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    assert sdist.name == f"tcore_video-{__version__}.tar.gz"
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert sorted(set((built / "files").read_text().splitlines()) - held) == []


def test_wheel_has_complete_metadata_and_no_tests(built: Path, home: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    show = (
        "import importlib.metadata, json; print(json.dumps(importlib.metadata.metadata('tcore-video').json))"
    )
    found = json.loads(run(home / "venv/bin/python", "-c", show, cwd=home))
    assert (found["name"], found["version"]) == ("tcore-video", __version__)
    assert found["license_expression"] == "Apache-2.0"
    assert set(project["classifiers"]) == set(found["classifier"])
    assert set(project["optional-dependencies"]) == set(found["provides_extra"])
    assert found["author"]
    assert found["project_url"]
    site = next((home / "venv").glob("lib/python*/site-packages"))
    assert {path.name for path in (ROOT / "tcore" / "encoders").iterdir()} == {
        path.name for path in (site / "tcore" / "encoders").iterdir()
    }
    assert (site / "tcore" / "demo" / "page").is_dir()
    assert not [name for name in ("tests", "benchmarks", "docs", "runs") if (site / name).exists()]


def test_installed_command_starts_at_once(home: Path) -> None:
    spent = []
    for _ in range(4):  # the first one may read files that are not in memory yet
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert run(home / "venv/bin/tcore", "--version", cwd=home) == f"tcore {__version__}\n"
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(spent) < 0.4  # seconds of a core, whatever else the machine does


def test_installed_package_is_imported_without_posix(home: Path) -> None:
    run(home / "venv/bin/python", "-c", HIDDEN, cwd=home)


def test_installed_command_propagates_labels(home: Path) -> None:
    clip, first = small_clip(home)
    run(home / "venv/bin/tcore", "propagate", "default", clip, "--labels", first, "--out", "out", cwd=home)
    masks = sorted((home / "out" / "masks").iterdir())
    given, last = (np.asarray(Image.open(path)) for path in (first, masks[-1]))
    assert len(masks) == 4
    assert last.shape == given.shape
    kept = ((given > 0) & (last > 0)).sum() / ((given > 0) | (last > 0)).sum()
    assert 0.2 < kept < 1  # the object has moved, and is still there


def small_clip(home: Path) -> tuple[Path, Path]:
    """Four frames of a rendered video and a mask of the first."""
    video = render_video(0, 1, split="heldout", num_frames=8, size=128)
    Image.fromarray(video.objects[0]).save(home / "first.png")
    return write_folder(home / "clip", video.frames[:4]), home / "first.png"
