"""Controls that have learned nothing."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tcore.errors import InputError
from tcore.evaluation.benchmarks.rendered import Rendered, copy_first_frame
from tcore.evaluation.encoder import Adapted, Encoder
from tcore.evaluation.encoders import load_encoder
from tcore.evaluation.evaluate import evaluate
from tcore.evaluation.protocols import RENDERED
from tcore.evaluation.run_clip import encode
from tests.conftest import Refused
from tests.evaluation.layouts import heldout_videos, write_davis, write_jhmdb, write_vip


def test_the_color_of_a_patch_is_its_mean_and_brightness_counts() -> None:
    frame = np.zeros((1, 32, 48, 3), np.uint8)
    frame[0, :16, :16] = np.random.default_rng(0).integers(0, 256, (16, 16, 3))
    frame[0, 16:, 32:] = 128
    features = load_encoder("control:color")(torch.from_numpy(frame))[0]
    assert features.shape == (4, 2, 3)
    mean = torch.from_numpy(frame[0, :16, :16].reshape(-1, 3).mean(axis=0)) / 255
    usual = (mean - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.229, 0.224, 0.225])
    torch.testing.assert_close(features[:3, 0, 0], usual.float())
    assert (features[3] == 1).all()
    black, gray = (torch.nn.functional.normalize(features[:, *at], dim=0) for at in ((0, 1), (1, 2)))
    assert float(black @ gray) < 0.5


def test_copied_labels_have_the_scores_of_the_first_frame(tmp_path: Path) -> None:
    """At 8 times the size of its frames, a video's labels pass the grid of patches nearly unharmed."""
    videos = heldout_videos(1, num_frames=5, size=64)
    benchmark = Rendered([], RENDERED, "")
    expected = benchmark.summarize([benchmark.compare(video, copy_first_frame(video)) for video in videos])
    card = evaluate(
        load_encoder("control:copy"),
        davis=write_davis(tmp_path / "davis", videos),
        vip=write_vip(tmp_path / "vip", videos),
        jhmdb=write_jhmdb(tmp_path / "jhmdb", videos),
        size=(512, 512),
    )
    found = {name: result["scores"] for name, result in card["benchmarks"].items()}
    assert found["davis"]["J"] == pytest.approx(expected["J"], abs=0.03)
    assert found["davis"]["F"] == pytest.approx(expected["F"], abs=0.05)
    assert found["vip"]["mIoU"] == pytest.approx(expected["mIoU"], abs=0.05)
    assert found["jhmdb"]["PCK@0.2"] == pytest.approx(expected["PCK@0.2"], abs=0.03)


def test_convolutions_of_foreign_models_are_exact_without_a_flag_of_the_process() -> None:
    model, flags = nn.Conv2d(3, 5, 8, stride=8, padding=2), list[bool]()
    images = torch.randn(1, 3, 32, 32)
    plain = model(images)

    def read(images: Tensor) -> Tensor:
        flags.append(torch.backends.cudnn.allow_tf32)
        return model(images).flatten(2).transpose(1, 2)

    adapted = Adapted(model, read, patch_size=8, num_prefix=0)
    assert isinstance(model.forward, partial)
    assert torch.equal(model(images), plain)
    encoder, before = Encoder(adapted, "foreign"), torch.backends.cudnn.allow_tf32
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: encode(encoder, np.zeros((32, 32, 3), np.uint8), (32, 32)), range(20)))
    assert set(flags) == {before}


def test_results_of_one_control_are_not_taken_for_those_of_the_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_davis(tmp_path / "davis", heldout_videos(1, num_frames=4, size=64))
    scores = [
        evaluate(load_encoder(name), davis=root, size=(256, 256), out=tmp_path / "out")["benchmarks"]["davis"]
        for name in ("control:copy", "control:colour", "control:copy", "control:pixels")
    ]
    copy, color, again, pixels = (score["scores"] for score in scores)
    assert copy == again != color != pixels != copy
    assert "control:colour is now called control:color." in capsys.readouterr().err


def test_copying_is_no_encoder(tmp_path: Path, refused: Refused) -> None:
    with pytest.raises(InputError, match="control:copy has no features"):
        load_encoder("control:copy")(torch.zeros(1, 32, 32, 3, dtype=torch.uint8))
    root = write_davis(tmp_path / "davis", heldout_videos(1, num_frames=2, size=64))
    frames, first = (root / kind / "480p" / "clip0" for kind in ("JPEGImages", "Annotations"))
    out = ["--out", str(tmp_path / "out")]
    for words in (
        ["propagate", "control:copy", frames, "--labels", first / "00000.png"],
        ["neighbors", frames, "--k", "1", "--encoder", "control:copy"],  # which asks the network itself
    ):
        assert "control:copy has no features" in refused(*words, *out)
    assert not (tmp_path / "out").exists()
    said = refused("evaluate", "control:paste", "--davis", tmp_path)
    assert "there are control:copy, control:color and control:pixels" in said
