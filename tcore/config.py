"""The settings of a run: frozen and typed, with their limits; saved, loaded, compared. A run is a value."""

import dataclasses
import json
import math
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from tcore.errors import InputError
from tcore.files import read_json, write_json
from tcore.methods.limits import Areas, AtLeastZero, Count, Limit, Positive, Range, Share, Weight, Weights
from tcore.methods.settings import METHODS as OTHER_METHODS
from tcore.methods.settings import MethodSettings, TCoReSettings
from tcore.methods.settings_pixel import PIXEL_METHODS, PixelMethodSettings
from tcore.text import did_you_mean

AnyMethod = MethodSettings | PixelMethodSettings
METHODS: tuple[type[AnyMethod], ...] = (*OTHER_METHODS, *PIXEL_METHODS)

BelowOne = Annotated[float, Limit(lambda x: 0 <= x < 1, "need a value from 0 to below 1")]
Betas = Annotated[Range, Limit(lambda x: all(0 <= b < 1 for b in x), "need two values from 0 to below 1")]
FrameSide = Annotated[int, Limit(lambda x: x >= 32, "need 32 or more")]
Seed = Annotated[int, Limit(lambda x: 0 <= x < 2**63, "need a whole number from 0 to 2**63 - 1")]
EncoderName = Annotated[str, Limit(lambda x: x != "", "need an encoder, as in --init runs/mine")]
AuxiliaryBox = Literal["central", "current"]
Photometry = Literal["tcore", "dino", "byol", "simclr"]
Compile = Literal["auto", "on", "off"]
Sharding = Literal["replicate", "shard"]
Log = Literal["auto", "tensorboard", "trackio", "wandb", "off"]
Resize = Literal["size", "factor", "exact"]
Reach = int | Literal["everywhere"] | None
"""How far patches attend where an encoder is used; None: as it was trained."""


@dataclass(frozen=True)
class ViewsConfig:
    """Crops of the current frame."""

    global_size: int = 224
    """Side of the two global crops and of the auxiliary views, in pixels."""
    local_size: int = 96
    """Side of the local crops, in pixels."""
    num_local: AtLeastZero = 8
    """Number of local crops."""
    global_area: Areas = (0.32, 1.0)
    """Area of a global crop, as a share of the frame."""
    local_area: Areas = (0.05, 0.32)
    """Area of a local crop, as a share of the frame."""
    photometry: Photometry = "tcore"
    """Colors, blur and solarization of views, by the method that published them; tcore is DINOv2's too."""
    flip_global: Share = 0.0
    """Probability with which a global crop is mirrored."""
    auxiliary_box: AuxiliaryBox = "central"
    """What the auxiliary views show: the middle of their frame, or the box of the global crop they serve."""
    color: Share = 1.0
    """How often colors change (jitter, gray, solarized), as a share of how often they do as published."""
    blur: Share = 1.0
    """How often views are blurred, as a share of how often they are as published."""
    fixed_space: bool = True
    """Student and teacher see the same box (table 3b turns it off; needs --auxiliary none)."""
    fixed_time: bool = True
    """Student and teacher see the same frame (table 3b turns it off; needs --auxiliary none)."""


@dataclass(frozen=True)
class VitSpec:
    """The frame encoder."""

    dim: int = 384
    """Width: 192 (Ti), 384 (S), 768 (B), 1024 (L)."""
    depth: Count = 12
    """Number of blocks: 12, or 24 for L."""
    num_heads: Count = 6
    """Attention heads: 3 (Ti), 6 (S), 12 (B), 16 (L)."""
    patch_size: Count = 16
    """Side of a patch, in pixels."""
    num_registers: AtLeastZero = 4
    """Extra tokens that belong to no patch (registers)."""
    layer_scale: float | None = 1e-5
    """Initial gain of the residuals, or None for none; 1e-5 is T-CoRe's, the short recipes have 1."""
    drop_path: BelowOne = 0.1
    """Stochastic depth of the student: share of the samples that skip a residual."""
    drop_path_rule: Literal["uniform", "linear"] = "uniform"
    """The same share in every block, or rising from 0 in the first to it in the last."""
    drop_path_form: Literal["subset", "sample"] = "subset"
    """An exact share of the batch skips a residual, or each sample independently with that probability."""
    auxiliary_drop_path: bool = True
    """Stochastic depth in the auxiliary branch too, as released."""
    position_std: Positive = 0.02
    """Spread of the position embedding at the start; patches have about 1, so that 0.02 is learned late."""
    position_resize: Resize = "size"
    """Positions on another grid: to its size with antialias, by a factor without (DINO, MAE and others), or,
    where they are fixed, by their formula."""
    class_token: bool = True
    """A token of the whole frame before the patches."""
    class_std: Weight = 1e-6
    """Spread of the frame token at the start."""
    positions: Literal["learned", "sincos", "grid"] = "learned"
    """A position embedding that is trained, or fixed sines and cosines, in the order of MoCo v3 or MAE."""
    init: Literal["trunc-normal", "xavier"] = "trunc-normal"
    """How matrices start: truncated normal of spread 0.02, or by Xavier's rule (MoCo v3)."""
    train_patch_embed: bool = True
    """Train the projection of patches, or leave it as it starts (MoCo v3)."""
    reach: Count | None = None
    """How far a patch attends, in patches up, down and to the sides, or everywhere, as published."""


@dataclass(frozen=True)
class OptimConfig:
    """Length, batch and optimizer."""

    epochs: Count = 400
    """Length of the run; an epoch is one sandwich of every usable video."""
    steps: Count | None = None
    """Length in steps; replaces epochs when given, and warm-ups become fractions of it."""
    warmup_epochs: AtLeastZero = 20
    """Linear warm-up of the learning rate (5 % of the run where it is given in steps)."""
    warmup_peak: Literal["twice", "once"] = "twice"
    """Whether the last step of the warm-up is at the peak already, or the first after it (MoCo v3)."""
    batch: Count = 256
    """Videos per step, over all processes."""
    repeat: Count = 1
    """Samples of each of them, all in the same step; the learning rate does not count them."""
    accumulate: Count = 1
    """Parts that a step is computed in, to save memory; KoLeo, Sinkhorn and drop path act per part."""
    base_lr: Weight = 2e-3
    """Peak learning rate at the batch that lr_rule names."""
    lr_rule: Literal["sqrt/1024", "linear/256"] = "sqrt/1024"
    """How the peak grows with the batch: base_lr * sqrt(batch / 1024), or base_lr * batch / 256."""
    matching_lr: Weight = 0.1
    """Peak learning rate of the patch matching module, as a factor on the other."""
    end_lr: Weight = 1e-6
    """Learning rate at the end, of both."""
    weight_decay: Weights = (0.04, 0.4)
    """Weight decay, first to last step."""
    decay_all: bool = False
    """Decay biases, norms and LayerScale too."""
    clip: Positive = 3.0
    """Largest gradient norm."""
    clip_by: Literal["part", "parameter", "all", "none"] = "part"
    """What is clipped separately: each part (backbone, head, ...), each parameter, all as one, or nothing."""
    betas: Betas = (0.9, 0.999)
    """Momenta of AdamW."""
    eps: Positive = 1e-8
    """Epsilon of AdamW."""
    layer_decay: Positive = 1.0
    """Factor on the learning rate per layer below the last."""
    patch_embed_lr: Weight = 1.0
    """Further factor on that of the patch embedding."""
    freeze_last_layer_epochs: AtLeastZero = 0
    """First epochs in which the last layer of the head (the prototypes) does not move."""
    freeze: Literal["rate", "gradient"] = "rate"
    """How it is kept still: at rate 0, while the optimizer sees its gradients, or without gradients."""
    freeze_backbone_steps: AtLeastZero = 0
    """First steps in which the student's backbone does not move, while head and matching module learn."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Arithmetic of the networks (auto: bf16 on CUDA, fp32 on CPU); weights and losses are always fp32."""

    @property
    def samples(self) -> int:
        """Samples per step, over all processes."""
        return self.batch * self.repeat

    @property
    def peak_lr(self) -> float:
        """Learning rate after the warm-up."""
        if self.lr_rule == "linear/256":
            return self.base_lr * self.batch / 256
        return self.base_lr * math.sqrt(self.batch / 1024)


@dataclass(frozen=True)
class RenderedConfig:
    """Rendered videos, the training data where no store is given."""

    videos: Count = 256
    """Number of videos."""
    frames: Count = 20
    """Frames of a video."""
    size: FrameSide = 128
    """Side of a frame, in pixels."""


@dataclass(frozen=True)
class RuntimeConfig:
    """How a run is carried out: no setting of the method, and free to change on resume."""

    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda, cuda:1 ..."""
    compile: Compile = "auto"
    """Compile blocks, losses and pixels with torch.compile (auto: on CUDA; takes about a minute at first)."""
    graphs: Literal["auto", "off"] = "auto"
    """Replay steps as CUDA graphs (auto: on one GPU, where a step is one part; docs/performance.md)."""
    workers: AtLeastZero | None = None
    """Processes that read frames (default: one per core, up to 16 for each GPU; 0 for rendered videos)."""
    hold_gib: Weight = 0.0
    """Before the first step, decode as many videos as fit into this many GiB, and keep their frames."""
    sharding: Sharding = "replicate"
    """Under torchrun: every process holds the whole model, or (for ViT-L and up) a share of it."""
    log_every: Count = 10
    """Steps between two progress lines and health figures."""
    bad_samples: Share = 0.01
    """Largest share of unreadable samples (others replace them) before training stops."""
    verify_every: Count | None = None
    """Steps between two self-checks: a step is computed twice, bit for bit the same, or the run stops."""
    patience: Positive = 600.0
    """Under torchrun: seconds without a move until a process counts as hanging (first step: 6 times that)."""


@dataclass(frozen=True)
class Config:
    """A run is a value. The settings of its method stand beside the shared ones, without a prefix.

    >>> Config().optim.peak_lr
    0.001
    >>> override(Config(), {"loss.past_future": 0.0}).method.loss.weights()["past_future"]
    0.0
    """

    method: AnyMethod = field(default_factory=TCoReSettings)
    source: Literal["videos", "images"] = "videos"
    """What samples are drawn from: videos, or single images whose neighbors replace the past frame."""
    init: EncoderName | None = None
    """Encoder to start from: a run folder, a checkpoint or the word default (unset: random weights)."""
    seed: Seed = 0
    """Everything random follows from it."""
    log: Log = "auto"
    """Where curves go besides metrics.jsonl (auto: TensorBoard if it is installed; wandb sends them away)."""
    fps: Positive = 2.0
    """Frames per second of a store that does not know its own."""
    checkpoint_every: Count = 500
    """Steps between two checkpoints."""
    keep_last: Count = 2
    """Checkpoints that are kept; an older one is used where the newest is damaged."""
    keep_every: Count | None = None
    """Steps between two encoders that are kept under encoders/ (default: 20 over the run)."""
    views: ViewsConfig = field(default_factory=ViewsConfig)
    vit: VitSpec = field(default_factory=VitSpec)
    optim: OptimConfig = field(default_factory=OptimConfig)
    rendered: RenderedConfig = field(default_factory=RenderedConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)


# How a run is carried out may change when it is resumed; what it learns may not.
OPERATIONAL = ("runtime.", "checkpoint_every", "keep_every", "keep_last", "log")
# Names of settings in run folders and commands of earlier versions.
RENAMED = {"views.colour": "views.color"}


def to_dict(config: Config) -> dict[str, Any]:
    """The settings as JSON holds them: those of the method beside the others, its name under `method`."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return {"method": config.method.name, **plain.pop("method"), **plain}


def from_dict(values: Any, where: str = "config.") -> Config:
    """Settings from JSON; an unknown name, a value of another type or beyond its limits is an error.

    `where` goes before the name, with what joins the two: `config.`, or `runs/mine/config.json: `.
    Run folders from before there were methods name none: they are T-CoRe's.
    """
    place = where.rstrip(".: ")
    if not isinstance(values, Mapping):
        raise InputError(f"{place or 'config'}={values!r} should be a group of settings.")
    name = values.get("method", TCoReSettings.name)
    kind = next((kind for kind in METHODS if kind.name == name), None)
    if kind is None:
        known = ", ".join(kind.name for kind in METHODS)
        raise InputError(f"{where}method={name!r}: need one of {known}.")
    own = {f.name for f in dataclasses.fields(kind)}
    shared = {f.name for f in dataclasses.fields(Config)} - {"method"}
    values = {key: inner for key, inner in values.items() if key != "method"}
    for key in values:
        if key not in own | shared:
            raise InputError(f"{place} holds an unknown setting {key!r}.{did_you_mean(key, own | shared)}")
    method = _read(kind, {key: values[key] for key in values if key in own}, where)
    config: Config = _read(Config, {key: values[key] for key in values if key in shared}, where)
    return dataclasses.replace(config, method=method)


def save_config(config: Config, path: Path) -> None:
    """Write the settings as JSON."""
    write_json(path, to_dict(config), indent=2)


def load_config(path: Path) -> Config:
    """Read settings that `save_config` wrote."""
    if not path.exists():
        raise InputError(f"{path.parent} is not a run folder (no {path.name}): give one of tcore train.")
    return from_dict(read_json(path, "settings from "), f"{path}: ")


def flatten(config: Config) -> dict[str, Any]:
    """Every setting by its dotted name; those of the method have no prefix.

    >>> flatten(Config())["loss.past_future"]
    20.0
    """

    def walk(values: Any, prefix: str) -> dict[str, Any]:
        flat: dict[str, Any] = {}
        for name in (f.name for f in dataclasses.fields(values)):
            value = getattr(values, name)
            if dataclasses.is_dataclass(value):
                flat |= walk(value, "" if name == "method" else f"{prefix}{name}.")
            else:
                flat[prefix + name] = value
        return flat

    return walk(config, "")


def override(config: Config, changes: Mapping[str, Any]) -> Config:
    """The same settings with some changed, by their dotted names or as whole groups."""
    known = flatten(config)
    for setting, value in changes.items():
        setting = RENAMED.get(setting, setting)
        group, _, name = setting.rpartition(".")
        outer = config.method if hasattr(config.method, group or name) else config
        if setting not in known and not dataclasses.is_dataclass(getattr(outer, setting, None)):
            raise InputError(f"no setting {setting!r}.{did_you_mean(setting, known)}")
        if group:
            value = dataclasses.replace(getattr(outer, group), **{name: value})
        changed: Any = dataclasses.replace(outer, **{group or name: value})
        config = changed if outer is config else dataclasses.replace(config, method=changed)
    return config


def differences(config: Config, other: Config) -> dict[str, tuple[Any, Any]]:
    """Settings in which two runs differ, apart from how they are carried out."""
    ours, theirs = ({"method": c.method.name, **flatten(c)} for c in (config, other))
    names = [name for name in {**ours, **theirs} if not name.startswith(OPERATIONAL)]
    both = {name: (ours.get(name), theirs.get(name)) for name in names}
    return {name: (was, now) for name, (was, now) in both.items() if was != now}


def validate(config: Config) -> Config:
    """The same settings, or an error that names the first one that cannot work."""
    config = from_dict(to_dict(config), "")  # kinds and limits, also of settings made in Python
    vit, optim, defaults = config.vit, config.optim, flatten(Config())
    for name in config.method.unused:
        value = flatten(config)[name]
        if value != defaults[name]:
            raise InputError(f"{name}={value} has no effect on {config.method.name}: leave it out.")
    for name in ("global_size", "local_size"):
        size = getattr(config.views, name)
        if size < vit.patch_size or size % vit.patch_size:
            raise InputError(f"views.{name}={size}: need a multiple of vit.patch_size={vit.patch_size}.")
    if vit.dim < 1 or vit.dim % vit.num_heads:
        raise InputError(f"vit.dim={vit.dim}: need a multiple of vit.num_heads={vit.num_heads}.")
    if optim.samples % optim.accumulate:
        what = f"optim.batch={optim.batch}" + f" * optim.repeat={optim.repeat}" * (optim.repeat > 1)
        raise InputError(f"optim.accumulate={optim.accumulate}: need a divisor of {what}.")
    if optim.steps is None and optim.warmup_epochs >= optim.epochs:
        raise InputError(f"optim.warmup_epochs={optim.warmup_epochs}: need fewer than {optim.epochs} epochs.")
    if vit.positions != "learned" and vit.dim % 4:
        raise InputError(f"vit.dim={vit.dim}: need a multiple of 4 for vit.positions={vit.positions}.")
    if vit.position_resize == "exact" and vit.positions == "learned":
        raise InputError("vit.position_resize=exact: learned positions have no formula; use size or factor.")
    if optim.accumulate > 1 and config.method.whole_step:
        raise InputError(
            f"optim.accumulate={optim.accumulate}: {config.method.name} compares all samples of a step with "
            "one another, and parts of it would be another method; use a smaller optim.batch, or more GPUs."
        )
    config.method.check(config)
    return config


def _read(kind: Any, value: Any, where: str) -> Any:
    """A value of the annotated kind from what JSON gave, within its limits."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        found, limit = _read(arguments[0], value, where), arguments[1]
        if not limit.holds(found):
            raise InputError(f"{where}={found}: {limit.need}.")
        return found
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(kind, value, where)
    if origin in (Union, types.UnionType):
        options = [option for option in arguments if option is not type(None)]
        return None if value is None else _read(options[0], value, where)
    if origin is tuple and isinstance(value, list) and len(value) == len(arguments):
        return tuple(_read(k, v, where) for k, v in zip(arguments, value, strict=True))
    if origin is Literal and value in arguments:
        return value
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise InputError(f"{where}={value}: need a finite number.")
        return float(value)
    if isinstance(kind, type) and type(value) is kind:
        return value
    wanted = " or ".join(map(str, arguments)) if origin is Literal else getattr(kind, "__name__", str(kind))
    raise InputError(f"{where}={value!r}: need {wanted}.")


def _read_dataclass(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise InputError(f"{where.rstrip('.: ')}={value!r} should be a group of settings.")
    hints = get_type_hints(kind, include_extras=True)
    fields = {f.name for f in dataclasses.fields(kind)}
    group = where.rpartition(" ")[2].removeprefix("config.")  # views., also after the name of a file
    renamed = {old.removeprefix(group): new.removeprefix(group) for old, new in RENAMED.items()}
    value = {renamed.get(name, name): inner for name, inner in value.items()}
    for name in value:
        if name not in fields:
            place = where.rstrip(".: ")
            raise InputError(f"{place} holds an unknown setting {name!r}.{did_you_mean(name, fields)}")
    # Groups end with the dot that goes before what is in them.
    ends = {name: "." if dataclasses.is_dataclass(hints[name]) else "" for name in value}
    return kind(**{name: _read(hints[name], v, f"{where}{name}{ends[name]}") for name, v in value.items()})
