"""What tests of propagation through a video on disk share: a tiny encoder, a video, its frames."""

from pathlib import Path

import pytest
from PIL import Image

from tcore.data.rendered import RenderedVideo, render_video
from tcore.evaluation.encoder import Encoder
from tests.evaluation.clips import tiny_encoder, write_folder


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return tiny_encoder()


@pytest.fixture(scope="module")
def video() -> RenderedVideo:
    return render_video(0, 1, split="heldout", num_frames=8, size=64)


@pytest.fixture(scope="module")
def clip(video: RenderedVideo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("clip") / "frames", video.frames)


@pytest.fixture
def first(video: RenderedVideo, tmp_path: Path) -> Path:
    """The mask of the first frame."""
    Image.fromarray(video.objects[0]).save(tmp_path / "first.png")
    return tmp_path / "first.png"
