"""The documentation's site: `make docs`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from draftkit.version import __version__

project = "draftkit"
author = "the draftkit authors"
release = __version__
extensions = ["generate", "myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"draftkit {__version__}"
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
default_role = "code"
smartquotes = False  # they make `–set` of the `--set` in a remedy, and quotes that no shell knows
autodoc_typehints = "description"
autodoc_member_order = "bysource"
add_module_names = False
