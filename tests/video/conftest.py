"""A small encoder and a short rendered video, which the tests of this folder share."""

from pathlib import Path

import pytest

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
