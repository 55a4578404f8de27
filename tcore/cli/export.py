"""The verb that takes an encoder elsewhere: export."""

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from tcore.cli.parsing import check_flags, parse
from tcore.config import Reach
from tcore.errors import InputError


@dataclass(frozen=True)
class ExportCommand:
    """Write an encoder for torch, timm, transformers or an ONNX runtime."""

    encoder: Positional[str] = ""
    """A run folder, a checkpoint, default or random:vits16 (untrained)."""
    out: Positional[str] = ""
    """New file (.safetensors, .pth, .onnx), new folder for timm and hf, or folder for default."""
    format: str | None = None
    """safetensors, torch, timm, hf, onnx, or default (half precision, as it comes with the package)."""
    layer: int = -1
    """Block whose output makes the features, after the final norm; later blocks are left out."""
    reach: Reach = None
    """How far a patch looks, in patches, or everywhere (default: as the encoder was trained)."""


def export_verb(argv: list[str]) -> None:
    """`tcore export`: an encoder in the format of other software."""
    check_flags(argv, "tcore export", ExportCommand())
    command = parse(ExportCommand, argv, "tcore export", ExportCommand())
    if not command.encoder or not command.out:
        raise InputError(
            "tcore export needs an encoder and a place: tcore export ENCODER OUT --format FORMAT."
        )
    from tcore.evaluation.encoders import load_encoder
    from tcore.evaluation.export import check_out, export

    out = Path(command.out)
    if command.format == "default":
        _ship(command, out)
        return
    chosen = check_out(out, command.format)  # before a large encoder is read
    encoder = load_encoder(command.encoder, command.layer, command.reach)
    done = export(encoder, out, chosen)
    for line in (*encoder.report.splitlines(), *done.notes):
        print(line)
    print(f"{done.path}: {done.size / 2**20:.1f} MiB, {chosen}")
    print(f"load it: {done.load}")


def _ship(command: ExportCommand, folder: Path) -> None:
    from tcore.evaluation.encoders import load_encoder
    from tcore.evaluation.export import ship

    for path in ship(load_encoder(command.encoder, command.layer, command.reach), folder):
        print(f"{path}: {path.stat().st_size / 2**20:.1f} MiB")
    print('in the folder tcore/encoders of a checkout it is load_encoder("default")')
