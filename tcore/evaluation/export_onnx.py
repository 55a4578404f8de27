"""An encoder as an ONNX graph for images of any size, compared with torch while it is written."""

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tcore.data.render import MEAN, STD
from tcore.errors import InputError
from tcore.evaluation.encoders import import_package
from tcore.model.attention import tokens_seen
from tcore.model.vit import VisionTransformer

INPUT, OUTPUTS = "images", ("features", "frame")
TOLERANCE = 1e-4  # rounding errors by which two runtimes may differ, relative to the largest feature
LARGEST = 2**31 - 2**20  # bytes of weights: a protocol buffer holds less than 2 GiB, graph included


def resize_matrix(before: int, after: int | torch.SymInt) -> Float[Tensor, "after before"]:
    """The weights with which a bicubic resize with antialias makes `after` samples of `before`.

    >>> resize_matrix(3, 3)
    tensor([[1., 0., 0.],
            [0., 1., 0.],
            [0., 0., 1.]])
    """
    # The stubs of torch do not know that its functions take the sizes of a graph.
    count: Any = after
    # A tensor, not a Python number: in a graph the size is known only when it runs.
    scale = before / torch.full((1, 1), count, dtype=torch.float32)
    center = (torch.arange(count, dtype=torch.float32)[:, None] + 0.5) * scale
    place = torch.arange(before, dtype=torch.float32)[None] + 0.5
    # Shrinking widens the kernel, which is what antialias means.
    x = ((place - center) / scale.clamp(min=1.0)).abs()
    # Keys' cubic kernel with a = -0.5, as torch has it with antialias (without, a is -0.75).
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    weights = torch.where(x < 1, near, torch.where(x < 2, far, torch.zeros_like(x)))
    return weights / weights.sum(dim=1, keepdim=True)


class GridTokens(NamedTuple):
    """Outputs of the graph."""

    features: Float[Tensor, "b d rows columns"]
    frame: Float[Tensor, "b d"]


class GridEncoder(nn.Module):
    """The encoder with its positions resized by two matrix products, which every runtime supports."""

    def __init__(self, vit: VisionTransformer) -> None:
        super().__init__()
        self.vit = vit

    def forward(self, images: Float[Tensor, "b 3 height width"]) -> GridTokens:
        """Features of the patches and of the frame, after the final norm."""
        vit = self.vit
        rows, columns = (side // vit.patch_size for side in images.shape[-2:])
        native, dim = vit.native_grid, vit.dim
        grid = resize_matrix(native, rows) @ vit.pos_embed[0, 1:].reshape(native, native * dim)
        grid = resize_matrix(native, columns) @ grid.reshape(rows, native, dim)
        x = vit.patch_embed(images) + grid.reshape(1, rows * columns, dim)
        frame = (vit.cls_token + vit.pos_embed[:, :1]).expand(x.shape[0], -1, -1)
        x = torch.cat([frame, vit.register_tokens.expand(x.shape[0], -1, -1), x], dim=1)
        prefix, reach = vit.num_prefix, vit.reach
        seen = None if reach is None else tokens_seen(reach, rows, columns, prefix, images.device)
        for block in vit.blocks:
            x = block(x, seen=seen)
        x = vit.norm(x)
        patches = x[:, prefix:]
        return GridTokens(patches.transpose(1, 2).reshape(x.shape[0], dim, rows, columns), x[:, 0])


def write_onnx(vit: VisionTransformer, path: Path, sizes: dict[str, Any]) -> str:
    """Write the graph to a temporary path and compare it with torch; returns a line about the result."""
    for package in ("onnx", "onnxscript"):
        import_package(package, "--format onnx")
    bytes_needed = 4 * sum(p.numel() for p in vit.parameters())
    if bytes_needed > LARGEST:
        size = f"{bytes_needed / 2**30:.1f} GiB"
        raise InputError(f"an encoder of {size} exceeds the 2 GiB of an ONNX file: use another --format.")
    model = GridEncoder(vit).eval()
    batch, rows, columns = (torch.export.Dim(name, min=1) for name in ("batch", "rows", "columns"))
    patch, native = vit.patch_size, vit.native_grid
    example = torch.zeros(2, 3, patch * (native + 2), patch * (native + 3))
    with _quiet():
        program = torch.onnx.export(
            model,
            (example,),
            dynamo=True,
            dynamic_shapes={"images": {0: batch, 2: patch * rows, 3: patch * columns}},
            input_names=[INPUT],
            output_names=list(OUTPUTS),
            verbose=False,
        )
    assert program is not None
    about = {
        "vit": json.dumps(sizes),
        "input": "images: RGB from 0 to 1, minus mean, over std; sides are multiples of the patch",
        "mean": json.dumps(MEAN),
        "std": json.dumps(STD),
    }
    program.model.metadata_props.update(about)
    program.save(str(path), external_data=False)
    return compare(model, path)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's warnings and messages about itself."""
    before = logging.root.manager.disable
    with warnings.catch_warnings(), redirect_stdout(StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)


def compare(model: GridEncoder, path: Path) -> str:
    """Compare the file's features with torch's at two sizes; more than a rounding error is refused."""
    try:
        runtime = import_package("onnxruntime", "the check of an ONNX file")
    except InputError as missing:
        return f"not checked: {missing}"
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = torch.get_num_threads()
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    patch, native = model.vit.patch_size, model.vit.native_grid
    checked, worst = [], 0.0
    # The native grid, and one that is smaller one way and larger the other; one image, then two.
    for number, (rows, columns) in enumerate(((native, native), (max(1, native // 2), native + 3)), start=1):
        size = (number, 3, patch * rows, patch * columns)
        images = torch.randn(size, generator=torch.Generator().manual_seed(number))
        with torch.no_grad():
            tokens = model.vit(images)
        expected = (tokens.patches.transpose(1, 2).unflatten(2, (rows, columns)), tokens.frame)
        found = session.run(list(OUTPUTS), {INPUT: images.numpy()})
        for name, ours, theirs in zip(OUTPUTS, expected, found, strict=True):
            error = float((torch.from_numpy(theirs) - ours).abs().max() / ours.abs().max().clamp(min=1))
            if not error <= TOLERANCE:
                raise InputError(
                    f"onnxruntime {runtime.__version__} differs from torch by {error:.1e} in the {name} of "
                    f"images of {size[2]}x{size[3]}, more than {TOLERANCE:.0e}: nothing was written."
                )
            worst = max(worst, error)
        checked.append(f"{size[2]}x{size[3]}")
    return f"checked with onnxruntime {runtime.__version__} at {' and '.join(checked)}: within {worst:.1e}"
