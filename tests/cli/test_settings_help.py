"""`--settings` says of every setting what it is for."""

from __future__ import annotations

import pytest

from draftkit.cli.settings import settings_of_command


@pytest.mark.parametrize("kind", ["eval", "train", "convert"])
def test_every_setting_says_what_it_is_for(kind: str) -> None:
    assert [one.name for one in settings_of_command(kind) if not one.help.endswith(".")] == []
