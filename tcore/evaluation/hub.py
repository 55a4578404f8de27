"""A folder for the Hugging Face Hub: weights, sizes, and a model card with numbers and their commands."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tcore import __version__
from tcore.errors import InputError
from tcore.evaluation.card import Card, conditions, read_card
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.encoders import DEFAULT
from tcore.files import new_folder, write_json, write_text
from tcore.model.vit import VisionTransformer, save_safetensors
from tcore.text import markdown_table

LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*")  # identifiers of the hub, such as apache-2.0
PAPER = "2503.15096"
CARD = """\
---
license: {license}
library_name: tcore
pipeline_tag: image-feature-extraction
tags:
- video
- self-supervised-learning
- label-propagation
- vision-transformer
- arxiv:{paper}
---

# {title}

A Vision Transformer whose patch features follow objects, body parts and points through videos, without
fine-tuning. Written by version {version} of the package `tcore-video`, the home of
[T-CoRe](https://arxiv.org/abs/{paper}).

| patch | width | blocks | heads | registers | attention | weights |
|---|---|---|---|---|---|---|
| {patch_size} | {dim} | {depth} | {num_heads} | {num_registers} | {attention} | {weights:,} |
{notes}
## Use

```python
import tcore

encoder = tcore.from_pretrained("REPOSITORY")  # or the folder of this file
# uint8 frames (time, height, width, RGB) in; features (time, {dim}, rows, columns) of patches out
features = encoder(frames)
```

```
tcore propagate hf:REPOSITORY clip.mp4 --labels first.png --out result
```

## Scores

{scores}
## Limits

Scores are those of label propagation with frozen features; other tasks were not measured. Nothing is known
about videos that are unlike those it was trained and scored on. License of these files: {license}.
"""

NO_SCORES = (
    "None were given when this folder was written. To measure some:",
    *("", "```", "tcore evaluate hf:REPOSITORY --davis DAVIS --out results", "```", ""),
)


def write_hub(
    encoder: Encoder, vit: VisionTransformer, out: Path, license: str, results: Path | None
) -> None:
    """Write the folder at once or not at all; scores of other weights are refused."""
    card = None if results is None else read_card(results)
    if card is not None and card["encoder"]["weights"] != encoder.identity()["weights"]:
        raise InputError(f"--results {results} has scores of other weights, of {card['encoder']['name']}.")
    sizes = vit.sizes()
    state = {name: value.cpu() for name, value in vit.state_dict().items()}
    config = {
        "library_name": "tcore",
        "tcore": {"vit": sizes, "version": __version__, "notes": encoder.notes},
    }
    with new_folder(out) as folder:
        save_safetensors(state, folder / "model.safetensors", {"format": "pt"})
        write_json(folder / "config.json", config, indent=2)
        write_text(folder / "README.md", model_card(encoder, sizes, out.name, license, card))


def check_license(name: str | None, encoder: str) -> str:
    """The license that a model card must name; that of the default encoder is known."""
    if name is None and encoder == DEFAULT:
        return "apache-2.0"
    if name is None or not LICENSE.fullmatch(name):
        given = "is missing" if name is None else repr(name)
        raise InputError(f"--license {given}: --format hub needs an identifier, such as apache-2.0 or other.")
    return name


def model_card(encoder: Encoder, sizes: dict[str, Any], title: str, license: str, card: Card | None) -> str:
    """The README.md of the folder: YAML for the hub, then what people read."""
    reach = sizes.get("reach")
    return CARD.format(
        title=title,
        license=license,
        paper=PAPER,
        version=__version__,
        **sizes,
        attention="everywhere" if reach is None else f"patches up to {reach} away",
        weights=sum(value.numel() for value in encoder.backbone.parameters()),
        notes="".join(f"\n{note}\n" for note in encoder.notes),
        scores="\n".join(_scores(card) if card else NO_SCORES),
    )


def _scores(card: Card) -> Iterator[str]:
    """For each benchmark the command, its numbers, and all that they depend on."""
    for name, result in card["benchmarks"].items():
        yield from ("```", _command(name, result), "```", "")
        values = [f"{100 * value:.1f}" for value in result["scores"].values()]
        yield from (*markdown_table(list(result["scores"]), [values]), "")
        yield from (*(f"{line}." for line in conditions(name, result)), "")
    made = card.get("versions", {})
    device = card.get("device", "an unknown device")
    yield from (f"Measured on {device} with torch {made.get('torch', 'unknown')}.", "")


def _command(name: str, result: Card) -> str:
    """The command that prints the numbers of a benchmark."""
    protocol, clips = result["protocol"], len(result["clips"])
    words = ["tcore evaluate hf:REPOSITORY"]
    words += [f"--rendered --videos {clips}"] if name == "rendered" else [f"--{name} {name.upper()}"]
    words += ["--binary"] * result["binary"]
    if protocol.get("name") not in (None, "tcore", "rendered"):
        words.append(f"--protocol {protocol['name']}")
    if protocol.get("precision", "fp32") != "fp32":
        words.append(f"--precision {protocol['precision']}")
    if protocol.get("edges", "off") != "off":
        words.append("--edges on")
    for changed in result.get("differs", []):
        if size := re.fullmatch(r"input (\d+)x(\d+)", changed):
            words.append(f"--size {size[1]} {size[2]}")
    return " ".join(words)
