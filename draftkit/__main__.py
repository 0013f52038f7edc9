"""`python -m draftkit` is the `draftkit` command."""

from draftkit.cli import main

main()
