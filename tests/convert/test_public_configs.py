"""Every public config of a draft is read, or refused by its name; no released engine loads what is unknown here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fixtures.checkpoints import pico
from fixtures.checkpoints.public_drafts import public_configs

from draftkit.convert.api import inspect_checkpoint
from draftkit.engines.known import known
from draftkit.errors import DraftkitError
from scripts.check.public_configs import outcome_of

CLASSES = sorted({name for releases in known().values() for one in releases for name in one.architectures})


@pytest.mark.parametrize("name", public_configs())
def test_public_configs_are_read_or_refused_by_name(name: str) -> None:
    stored = public_configs()[name]
    assert stored["from"]
    assert outcome_of(stored["config"]) == stored["outcome"]
    assert not stored["outcome"].startswith("unknown")


@pytest.mark.parametrize("name", CLASSES)
def test_no_class_of_a_released_engine_is_unknown(name: str, tmp_path: Path) -> None:
    """Whatever its tensors are: it is read, incomplete, or called by a name, with what loads it."""
    pico.write_checkpoint(tmp_path, {"architectures": [name], "model_type": "rnnt"}, {"part.weight": torch.ones(2, 2)})
    with pytest.raises(DraftkitError) as refused:
        inspect_checkpoint(str(tmp_path))
    assert "no known draft format" not in str(refused.value)
    if "hidden_size is missing" not in str(refused.value):  # one that a format reads
        assert "load" in str(refused.value)
