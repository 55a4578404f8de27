"""The README is executed and the docs are checked: code runs, flags are understood, links exist."""

import ast
import importlib
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest

import tcore
from tcore.cli.data import Check
from tcore.cli.main import VERBS
from tcore.cli.parsing import parse, parse_settings
from tcore.cli.train import Lab, Train, parse_train
from tcore.config import flatten
from tcore.evaluation import benchmarks
from tcore.lab.ablation import TABLES
from tcore.recipes import RECIPES, recipe

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
CODE = (ROOT / "docs" / "code.md").read_text(encoding="utf-8")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def anchors(page: Path) -> set[str]:
    """The fragments that a link into a page may have: one for each of its headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_python_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    exec(block, {})
    said = capsys.readouterr().out
    assert "torch.Size([3, 96, 8, 12])" in said
    assert "torch.Size([3, 192, 4, 6])" in said


# One word of an alternative (`a|b`) or a placeholder (`N`, `RECIPE`) stands for all.
PLACEHOLDERS = {"N": "1", "RECIPE": "vits16-k400", "KIND": "pca", "STEPS": "600", "FILE.png": "f.png"}


def commands(page: Path) -> Iterator[tuple[str, bool]]:
    """Commands of `tcore` that a page names, as they are typed, and whether each is complete."""
    parts = re.split(r"^```\w*\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    fenced = [line for part in parts[1::2] for line in part.replace("\\\n", " ").splitlines()]
    inline = [" ".join(found.split()) for part in parts[::2] for found in re.findall(r"`([^`]+)`", part)]
    for text, complete in [*((line, True) for line in fenced), *((code, False) for code in inline)]:
        text = re.sub(r"^(?:[A-Z_]+=\S+ )*(?:sbatch .*)?runs/\w+\.sh ", "tcore train ", text)
        found = re.match(
            r"(?:[A-Z_]+=\S+ )*(?:torchrun .*-m |python -m )?tcore (?:-- )?([a-z].*?)(?:\s+#.*|\s*;.*|$)",
            text,
        )
        if found:
            yield found[1], complete and "..." not in text


def words_of(command: str) -> list[str]:
    """The words that a shell makes of a command, placeholders and alternatives filled in."""
    words = [word.strip("[]").split("|")[0] for word in shlex.split(command)]
    return [PLACEHOLDERS.get(word, word) for word in words]


def parse_command(verb: str, words: list[str]) -> None:
    """Parse a command as the command line does; what it does not understand ends in SystemExit."""
    module, name = VERBS[verb]
    kind = getattr(importlib.import_module(f"tcore.cli.{module}"), name)
    if verb == "train":
        # The parser of a recipe takes a while: it is asked only where settings of the recipe are given.
        bare = re.sub(r" --(frames|run|davis|evaluate-every) \S+| --plan", "", " ".join(words))
        assert bare in RECIPES or parse_train(words).recipe in RECIPES
    elif verb == "check":
        early = dict(pairwise(words)).get("--recipe", Check.recipe)
        parse_settings(Check, words, "tcore check", recipe(early))
    else:
        # A page of figures leaves out the file, and says so.
        words += ["--out", "f.png"] if verb == "figure" and "--out" not in words else []
        parse(Lab if verb == "lab" else kind, words, f"tcore {verb}")


@cache
def flags_of(verb: str) -> set[str]:
    """Every flag that a verb has, whatever the recipe."""
    module, name = VERBS[verb]
    kind = getattr(importlib.import_module(f"tcore.cli.{module}"), name)
    kinds = {"train": (Train,), "check": (Check,), "lab": (Lab,)}.get(verb) or get_args(kind) or (kind,)
    names = {field.name for one in kinds for field in fields(one)} | set(benchmarks.BENCHMARKS) | {"help"}
    names |= (
        {name for each in RECIPES for name in flatten(recipe(each))} if verb in ("train", "check") else set()
    )
    return {f"--{name.replace('_', '-')}" for name in names}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_the_docs_are_understood(page: Path) -> None:
    for command, complete in sorted(set(commands(page))):
        verb, *words = words_of(command)
        assert verb in VERBS, command
        if page.name != "CHANGELOG.md":  # which names flags that are gone
            flags = {word for word in words if word.startswith("--") and " " not in word}
            assert not flags - flags_of(verb), command
        if complete and "--help" not in words:
            try:
                parse_command(verb, words)
            except SystemExit:
                pytest.fail(f"tcore {command}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_scripts_that_the_docs_run_exist_and_know_their_flags(page: Path) -> None:
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for script, words in re.findall(r"python ((?:\w+/)+\w+\.py)([^`#|;]*?)(?=`|#|;|\||\n\n|\n```|$)", text):
        source = (ROOT / script).read_text(encoding="utf-8")
        for flag in re.findall(r"(?<!\S)\[?(--[a-z-]+)", words):
            assert f'"{flag.replace("--no-", "--")}"' in source, f"python {script}{words}"
    for name, words in re.findall(r"pytest ([\w/]+\.py)(?:::(\w+))?", text):
        assert not words or f"def {words}(" in (ROOT / name).read_text(encoding="utf-8")
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_of_the_docs_compiles_and_imports_what_exists(page: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL):
        tree = ast.parse(block, page.name)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tcore"):
                module = importlib.import_module(node.module or "")
                assert not [each.name for each in node.names if not hasattr(module, each.name)], page.name
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "tcore"
            ):
                assert hasattr(tcore, node.attr), f"tcore.{node.attr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_and_extras_of_the_docs_exist(page: Path) -> None:
    text, makefile = page.read_text(encoding="utf-8"), (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"(?:^|`)(?:\w+=\S+ )?make ([a-z-]+)", text, flags=re.MULTILINE):
        assert f"\n{target}:" in makefile, target
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extra in re.findall(r"'(?:\.|tcore-video)\[(\w+)\]'", text):
        assert extra in extras["optional-dependencies"], extra
    assert "tcore[" not in text, "the distribution is called tcore-video"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_pictures_of_the_docs_exist(page: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        if link.startswith("https://"):
            continue
        name, _, fragment = link.partition("#")
        target = page.parent / name if name else page
        assert target.stat().st_size > 0, link
        assert not fragment or fragment in anchors(target), link


def test_readme_is_short_and_every_page_is_linked_from_it() -> None:
    lines = README.splitlines()
    assert 120 <= len(lines) <= 150
    assert not [line for line in lines if len(line) > 120]
    own = ("README.md", "index.md", "api.md")  # the last two are the frame of the site that make docs builds
    assert not [page.name for page in PAGES if page.name not in README and page.name not in own]


def test_every_page_has_a_place_in_the_site_that_make_docs_builds() -> None:
    places = (ROOT / "docs" / "index.md").read_text(encoding="utf-8").splitlines()
    assert {page.stem for page in PAGES if page.parent.name == "docs"} - {"index"} <= set(places)


def test_changelog_names_every_old_word_beside_the_new_one() -> None:
    rows = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    for old, new in (
        ("views.colour", "views.color"),
        ("control:colour", "control:color"),
        ("--synthetic", "--rendered"),
        ("evaluate(synthetic=", "evaluate(rendered="),
        ("Watch", "Scoring"),
    ):
        assert [row for row in rows if old in row and new in row], old


def test_ablation_flags_of_the_docs_are_those_of_the_tables() -> None:
    text = (ROOT / "docs" / "reproduce.md").read_text(encoding="utf-8")
    rows = {row.flags for table in TABLES.values() for row in table}  # tests/test_ablations.py parses them
    assert set(re.findall(r"\| `(--[^`]+)` \|", text)) == rows & set(re.findall(r"`(--[^`]+)`", text))


def test_map_of_the_code_names_every_module_and_nothing_else() -> None:
    modules = {
        path.relative_to(ROOT / "tcore").as_posix()
        for path in (ROOT / "tcore").rglob("*.py")
        if path.name not in ("__init__.py", "__main__.py")
    }
    assert set(re.findall(r"^\| `([\w/]+\.py)` \|", CODE, flags=re.MULTILINE)) == modules


@pytest.mark.parametrize(("walk", "limit"), [("A sample", 18), ("A video", 10)])
def test_walks_through_the_code_are_short_and_follow_the_imports(walk: str, limit: int) -> None:
    section = next(part for part in CODE.split("\n## ") if part.startswith(walk))
    modules = re.findall(r"^\d+\. `(tcore/[\w/]+\.py)`", section, flags=re.MULTILINE)
    assert 1 < len(modules) <= limit
    met = (ROOT / "tcore" / "methods" / "__init__.py").read_text(encoding="utf-8")
    for module in modules:
        name = module.removesuffix(".py").replace("/", ".")
        assert module == modules[0] or f"from {name} import" in met, f"{module} is imported by none before it"
        met += (ROOT / module).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_tests_that_the_docs_name_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    for name in re.findall(
        r"(?<![\w/])(?:tcore|tests|benchmarks|experiments|runs|docs|\.github)/[\w/.-]*\.(?:py|sh|md|txt|yml)\b",
        text,
    ):
        assert re.search("NAME|KIND", name) or (ROOT / name).exists(), name
    for name in re.findall(r"`(test_\w+)`", text):
        assert f"def {name}(" in tests, name


def test_version_is_the_newest_of_the_changelog() -> None:
    newest = re.search(r"^## \[([\d.]+)\]", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert newest is not None
    assert newest[1] == project["version"] == tcore.__version__
    assert f"\nversion: {newest[1]}\n" in (ROOT / "CITATION.cff").read_text()
