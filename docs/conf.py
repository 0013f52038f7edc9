"""The documentation's site: `make docs`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from draftkit.version import __version__

project = "draftkit"
author = "the draftkit authors"
release = __version__
extensions = ["generate", "myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton", "sphinx_design"]
exclude_patterns = ["_build", "developer/rebuild"]
html_theme = "furo"
html_title = f"draftkit {__version__}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
copybutton_selector = "div:not(.highlight-text) > div.highlight > pre"  # what a command prints is not pasted
myst_heading_anchors = 3
myst_enable_extensions = ["attrs_inline", "colon_fence"]
default_role = "code"
smartquotes = False  # they make `–set` of the `--set` in a remedy, and quotes that no shell knows
autodoc_typehints = "description"
autodoc_member_order = "bysource"
add_module_names = False
