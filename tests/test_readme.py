"""The README is executed and the docs are checked: code runs, flags are understood, links exist."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest

import tcore
from tcore.cli.main import VERBS
from tcore.cli.train import parse_train
from tcore.lab import TABLES
from tcore.recipes import RECIPES

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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_the_docs_are_understood(page: Path) -> None:
    fences = re.findall(r"```\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for line in re.findall(r"^tcore .*$", "\n".join(fences), flags=re.MULTILINE):
        verb, *arguments = shlex.split(line.split("#")[0])[1:]
        assert verb in VERBS, line
        if verb == "train" and arguments[0] != "RECIPE":
            assert parse_train(arguments).recipe in RECIPES, line


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make ([a-z-]+)", README, flags=re.MULTILINE):
        assert f"\n{target}:" in makefile


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
    assert not [page.name for page in PAGES if page.name not in README and page.name != "README.md"]


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
        r"(?<![\w/])(?:tcore|tests|benchmarks|experiments|runs)/[\w/]+\.(?:py|sh)\b", text
    ):
        assert re.search("NAME|KIND", name) or (ROOT / name).exists(), name
    for name in re.findall(r"`(test_\w+)`", text):
        assert f"def {name}(" in tests, name


def test_version_is_the_newest_of_the_changelog() -> None:
    newest = re.search(r"^## \[([\d.]+)\]", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert newest is not None
    assert newest[1] == project["version"] == tcore.__version__
