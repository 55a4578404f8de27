"""Self-supervised video representation by temporal correspondence.

    import tcore

    mask = tcore.mark("first.png", box=(40, 60, 200, 120))        # an object of a frame, from a box or clicks
    for labeled in tcore.propagate("default", "clip.mp4", mask):  # the object in every frame of a video
        print(labeled.frame, labeled.confidence, labeled.labels.shape)

Videos: read_video, mark, propagate. Encoders: load_encoder and what it returns, Encoder; evaluate.
Training: recipe, Config, train, Scoring; FrameStore; TCoRe and VisionTransformer, the networks.
Bad input raises InputError, one line that says what to do. help(tcore.Encoder) shows more.
"""

import importlib
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tcore.config import Config as Config
    from tcore.data.part import read_video
    from tcore.data.stores import FrameStore as FrameStore
    from tcore.errors import InputError
    from tcore.evaluation.encoder import Encoder as Encoder
    from tcore.evaluation.encoders import from_pretrained, load_encoder
    from tcore.evaluation.evaluate import evaluate
    from tcore.methods.tcore import TCoRe as TCoRe
    from tcore.model.vit import VisionTransformer as VisionTransformer
    from tcore.pretrain import Scoring as Scoring
    from tcore.pretrain import train
    from tcore.recipes import recipe
    from tcore.video.mark import mark
    from tcore.video.propagate import propagate

__version__ = "0.2.0"
# What help(tcore) shows and `from tcore import *` brings; the classes in _HOMES are public, too, but long.
__all__ = [
    "InputError",
    "evaluate",
    "from_pretrained",
    "load_encoder",
    "mark",
    "propagate",
    "read_video",
    "recipe",
    "train",
]

# Where each public name lives; it is imported on first use, so that `import tcore` alone does not load torch.
_HOMES = {
    "Config": "tcore.config",
    "Encoder": "tcore.evaluation.encoder",
    "FrameStore": "tcore.data.stores",
    "InputError": "tcore.errors",
    "TCoRe": "tcore.methods.tcore",
    "VisionTransformer": "tcore.model.vit",
    "Scoring": "tcore.pretrain",
    "evaluate": "tcore.evaluation.evaluate",
    "from_pretrained": "tcore.evaluation.encoders",
    "load_encoder": "tcore.evaluation.encoders",
    "mark": "tcore.video.mark",
    "read_video": "tcore.data.part",
    "propagate": "tcore.video.propagate",
    "recipe": "tcore.recipes",
    "train": "tcore.pretrain",
}


def __getattr__(name: str) -> Any:
    if name == "Watch":
        warnings.warn("tcore.Watch is now called tcore.Scoring.", DeprecationWarning, stacklevel=2)
        name = "Scoring"
    if name not in _HOMES:
        raise AttributeError(f"module 'tcore' has no attribute {name!r}")
    globals()[name] = value = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
