"""Compare the code with golden tensors: `python tests/golden/check.py DIR`.

One row per file of DIR and its subfolders, with its largest deviation (per array, relative to the array's
largest value). These files only compare: every value comes from the functions that users call.
"""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

if not __package__:  # run as a script
    sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.golden import check_contrast, check_distil, check_pixel, check_pixel_recipes, check_tcore
from tests.golden.compare import Check

# Sets of files that are made and handed on together. Files of one name are told apart by their keys.
SETS: dict[str, dict[str, Check]] = {
    "tcore": check_tcore.FILES,
    "distil": check_distil.FILES | check_contrast.FILES,
    "pixel": check_pixel.FILES | check_pixel_recipes.FILES,
}


class Row(NamedTuple):
    """One line of the report."""

    file: str
    passed: bool
    text: str


def read(path: Path) -> Any:
    """The arrays or the JSON of a golden file."""
    if path.suffix == ".json":
        return json.loads(path.read_text(encoding="utf-8"))
    with np.load(path, allow_pickle=False) as arrays:
        return dict(arrays)


def find_set(name: str, arrays: Any) -> str | None:
    """The set that a file belongs to, by its name and its keys; None where it is unknown."""
    named = {group: files[name] for group, files in SETS.items() if name in files}
    return next((group for group, check in named.items() if not check.key or check.key in arrays), None)


def check_file(path: Path) -> tuple[str | None, Row]:
    """Compare one file; the row names the array that is farthest off for its tolerance."""
    group = None
    try:
        arrays = read(path)
        group = find_set(path.name, arrays)
        if group is None:
            return None, Row(path.name, False, "unknown file")
        check = SETS[group][path.name]
        deviations = list(check.compare(arrays))
    except Exception as error:
        return group, Row(path.name, False, f"cannot be compared: {error!r}")
    if not deviations:
        return group, Row(path.name, False, "holds nothing to compare")
    worst = max(deviations, key=lambda d: d.value / d.tolerance if d.tolerance else d.value * 1e12)
    passed = all(d.value <= d.tolerance for d in deviations)
    text = f"{len(deviations):4d} arrays, largest deviation {worst.value:.1e} ({worst.name})"
    return group, Row(path.name, passed, text + (f"; left out: {check.left_out}" if check.left_out else ""))


def check_folder(folder: Path) -> list[Row]:
    """A row for every golden file, and one for every file that is missing from a set that has some here."""
    found = sorted(path for path in folder.rglob("*") if path.suffix in (".npz", ".json"))
    rows: list[Row] = []
    for where in dict.fromkeys([folder, *(path.parent for path in found)]):
        checked = [check_file(path) for path in found if path.parent == where]
        groups = {group for group, _ in checked if group} or ({"tcore"} if not found else set())
        expected = dict.fromkeys(name for group in groups for name in SETS[group])
        missing = [name for name in expected if name not in {row.file for _, row in checked}]
        inside = "" if where == folder else f"{where.relative_to(folder)}/"
        rows += [row._replace(file=inside + row.file) for _, row in checked]
        rows += [Row(inside + name, False, "missing") for name in missing]
    return rows


def main(arguments: list[str]) -> int:
    """Print the report; 0 where everything agrees."""
    if len(arguments) != 1:
        print("usage: python tests/golden/check.py DIR", file=sys.stderr)
        return 2
    rows = check_folder(Path(arguments[0]))
    for row in rows:
        print(f"{'ok  ' if row.passed else 'FAIL'}  {row.file:36}  {row.text}")
    failed = sum(not row.passed for row in rows)
    print(f"{len(rows) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
