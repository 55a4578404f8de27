"""The README is executed: its Python runs, its files exist, its flags are understood."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tcore.cli.main import VERBS
from tcore.cli.train import parse_train
from tcore.recipes import RECIPES

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_python_of_the_readme_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert blocks
    for block in blocks:
        code = "import torch; torch.set_num_threads(1)\n" + block
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert "torch.Size([3, 96, 8, 12])" in done.stdout
        assert "torch.Size([3, 192, 4, 6])" in done.stdout


@pytest.mark.parametrize("line", re.findall(r"^tcore .*$", README, flags=re.MULTILINE))
def test_commands_of_the_readme_are_understood(line: str) -> None:
    verb, *arguments = shlex.split(line.split("#")[0])[1:]
    assert verb in VERBS
    if verb == "train":
        assert parse_train(arguments).recipe in RECIPES


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make ([a-z-]+)", README, flags=re.MULTILINE):
        assert f"\n{target}:" in makefile


def test_links_and_pictures_of_the_readme_exist() -> None:
    for link in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / link).stat().st_size > 0, link
    assert not re.findall(r"^[A-Z]+_[A-Z_]+$", README, flags=re.MULTILINE), "a placeholder was left"


def test_ablation_flags_of_the_docs_are_understood(flags: str) -> None:
    parse_train(["vits16-k400-100ep", *flags.split()])
