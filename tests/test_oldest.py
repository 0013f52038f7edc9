"""What the oldest releases that pyproject.toml promises have, where they cannot be installed here."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures.torch_names import listed_names, used_names

PROMISED = "torch>=2.11"


@pytest.mark.slow
def test_the_oldest_torch_has_every_name_that_is_taken_of_it() -> None:
    """`fixtures/torch_names.py` says how a name comes into the list: it is read in a wheel of that release."""
    assert PROMISED in (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    used = used_names()
    assert used - listed_names() == set(), "python -m fixtures.torch_names reads them in a wheel of torch 2.11"
    assert used >= {"torch.nn.functional.pad", "torch.cuda.empty_cache", "torch.Tensor"}  # however they are taken
