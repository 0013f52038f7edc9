"""The version of draftkit, in one place, and what the package index calls it."""

__version__ = "0.1.0"
DISTRIBUTION = "draftkit-spec"  # "draftkit" there is another project


def with_extra(extra: str) -> str:
    """The command that installs what an optional part of draftkit needs; for hints."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"
