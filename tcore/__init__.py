"""Self-supervised video representation by temporal correspondence."""

from tcore.config import Config
from tcore.data.stores import FrameStore
from tcore.errors import InputError
from tcore.evaluation.encoders import load_encoder
from tcore.evaluation.evaluate import evaluate
from tcore.model.tcore import TCoRe
from tcore.model.vit import VisionTransformer
from tcore.recipes import recipe
from tcore.training.loop import train
from tcore.training.watch import Watch
from tcore.video.propagate_video import propagate

__all__ = [
    "Config",
    "FrameStore",
    "InputError",
    "TCoRe",
    "VisionTransformer",
    "Watch",
    "evaluate",
    "load_encoder",
    "propagate",
    "recipe",
    "train",
]
__version__ = "0.1.0"
