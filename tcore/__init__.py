"""Self-supervised video representation by temporal correspondence."""

import importlib
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tcore.config import Config
    from tcore.data.stores import FrameStore
    from tcore.errors import InputError
    from tcore.evaluation.encoders import from_pretrained, load_encoder
    from tcore.evaluation.evaluate import evaluate
    from tcore.methods.tcore import TCoRe
    from tcore.model.vit import VisionTransformer
    from tcore.pretrain import Scoring, train
    from tcore.recipes import recipe
    from tcore.video.mark import mark
    from tcore.video.propagate_video import propagate

__version__ = "0.2.0"
__all__ = [
    "Config",
    "FrameStore",
    "InputError",
    "Scoring",
    "TCoRe",
    "VisionTransformer",
    "evaluate",
    "from_pretrained",
    "load_encoder",
    "mark",
    "propagate",
    "recipe",
    "train",
]

# Where each public name lives; it is imported on first use, so that `import tcore` alone does not load torch.
_HOMES = {
    "Config": "tcore.config",
    "FrameStore": "tcore.data.stores",
    "InputError": "tcore.errors",
    "TCoRe": "tcore.methods.tcore",
    "VisionTransformer": "tcore.model.vit",
    "Scoring": "tcore.pretrain",
    "evaluate": "tcore.evaluation.evaluate",
    "from_pretrained": "tcore.evaluation.encoders",
    "load_encoder": "tcore.evaluation.encoders",
    "mark": "tcore.video.mark",
    "propagate": "tcore.video.propagate_video",
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
    return sorted({*globals(), *__all__})
