"""Imports go one way: base <- data, model <- methods <- training; evaluation, video and others on top."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1] / "tcore"
# The rooms that each room may import, besides itself.
BASE = {"errors", "files", "text", "config", "recipes", "device", "methods.settings"}
BASE |= {"rendezvous", "methods.limits", "methods.settings_groups", "methods.settings_pixel", "pixel_recipes"}
LOW = {"base", "data", "model"}
ALLOWED = {
    "base": set(),
    "data": {"base"},
    "model": {"base"},
    "methods": LOW,
    "training": LOW | {"methods"},
    "evaluation": LOW,
    "video": LOW | {"evaluation"},
    "show": LOW | {"methods", "training", "evaluation", "video"},
    "demo": LOW | {"evaluation", "video", "show"},
    "pretrain": LOW | {"methods", "training", "evaluation"},
    "lab": LOW | {"methods", "training", "evaluation", "video", "show", "pretrain"},
    "quickstart": LOW | {"methods", "training", "evaluation", "video", "show", "pretrain"},
}
# Packages that may be missing, and our own modules that need them.
OPTIONAL = {
    "av",
    "cvat_sdk",
    "fcntl",
    "onnx",
    "onnxruntime",
    "ray",
    "resource",
    "simplejpeg",
    "starlette",
    "timm",
    "tyro",
    "uvicorn",
}
OPTIONAL |= {"torch.utils.tensorboard", "torchvision", "transformers", "triton"}
OPTIONAL |= {"tcore.data.photometry_triton", "tcore.data.resample_triton", "tcore.model.fused_triton"}
OPTIONAL |= {"tcore.model.attention_triton", "tcore.model.gelu_triton"}
# Parts of torch that sharding alone needs, and that take seconds to import.
OPTIONAL |= {"torch.distributed.fsdp", "torch.distributed.tensor"}
# The compiler, which takes seconds to import as well.
OPTIONAL |= {"torch._inductor.config", "tcore.training.one_pass"}


class Import(NamedTuple):
    """One module imports another."""

    importer: str
    imported: str
    inside: bool
    """Inside a function."""

    def __str__(self) -> str:
        return f"{self.importer} -> {self.imported}" + " (inside a function)" * self.inside


def room(module: str) -> str:
    """The room that a module of tcore belongs to, its name without `tcore.`."""
    base = any(module == name or module.startswith(f"{name}.") for name in BASE)
    return "base" if base else module.split(".")[0]


def name_of(path: Path) -> str:
    """The name of a module, without `tcore.`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): ast.parse(path.read_text(encoding="utf-8")) for path in ROOT.rglob("*.py")}


def walk(node: ast.AST, inside: bool = False) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Every import, and whether it is inside a function; those for type checkers alone are none."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, inside
        elif not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from walk(child, inside or function)


def imports() -> Iterator[Import]:
    """All imports of the package."""
    for importer, tree in MODULES.items():
        for node, inside in walk(tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                assert node.level == 0, f"{importer}: relative imports hide where things come from"
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                submodules = [name for name in inner if name.removeprefix("tcore.") in MODULES]
                names = submodules or [str(node.module)]
            yield from (Import(importer, name, inside) for name in names)


def is_against_the_rule(found: Import) -> bool:
    """Whether an import goes the wrong way, or stands inside a function without a reason."""
    package, _, module = found.imported.partition(".")
    importer, imported = room(found.importer), room(module)
    if importer in ("", "cli", "__main__"):
        return False
    if package == "tcore" and module and imported not in ALLOWED[importer] | {importer}:
        return True
    chooses_a_method = found.importer == "methods"  # methods.build
    return found.inside and not ({package, found.imported} & OPTIONAL or chooses_a_method)


def test_imports_go_one_way_and_stand_at_the_top() -> None:
    wrong = {str(found) for found in imports() if is_against_the_rule(found)}
    assert sorted(wrong) == []


@pytest.mark.parametrize(
    ("found", "wrong"),
    [
        (Import("data.stores", "tcore.model.vit", False), True),
        (Import("config", "tcore.methods.settings", False), False),
        (Import("config", "tcore.methods.tcore", False), True),
        (Import("video.labels", "tcore.evaluation.encoder", True), True),
        (Import("data.video", "av", True), False),
        (Import("methods", "tcore.methods.tcore", True), False),
        (Import("cli.train", "tcore.training.loop", True), False),
    ],
)
def test_the_rule_itself(found: Import, wrong: bool) -> None:
    assert is_against_the_rule(found) == wrong


def test_every_room_has_a_rule() -> None:
    rooms = {room(module) for module in MODULES} - {"", "__main__", "cli"}
    assert rooms <= set(ALLOWED)
