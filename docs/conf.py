"""Settings of the documentation, which `make docs` builds from these pages and the docstrings."""

import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]

project = "tcore"
author = copyright = PROJECT["authors"][0]["name"]
version = release = PROJECT["version"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
highlight_language = "text"  # of blocks that name none: commands, mostly
myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath"]
default_role = "literal"  # docstrings mark code by single backquotes
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True

html_theme = "furo"  # light and dark, by the reader's system or a button
html_title = f"tcore {version}"
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["tables.css"]
