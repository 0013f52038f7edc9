"""The settings of a training run: whatever is wrong with one is said in one message, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml
from conftest import Command
from fixtures.checkpoints import pico

from draftkit.errors import DraftkitError
from draftkit.train.config import read_config
from draftkit.train.recipes import recipe_names
from draftkit.train.recipes.causal_lm_draft_model import DraftModelOptions, draft_model_spec, fresh_draft_model
from draftkit.train.recipes.recipe import Origin

FLAGS = {"recipe": "eagle3", "target": "no target", "data": "no data", "out": "no folder", "draft": "no draft"}


def numbers(settings: object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Where the settings have a number."""
    if isinstance(settings, dict):
        for name, value in settings.items():
            yield from numbers(value, (*path, name))
    elif isinstance(settings, int | float) and not isinstance(settings, bool):
        yield path


@pytest.mark.parametrize("recipe", recipe_names())
def test_every_number_is_checked_before_anything_is_loaded(recipe: str) -> None:
    """Below zero no setting means anything, and so large a number none at all."""
    flags = FLAGS | {"recipe": recipe}
    settings = yaml.safe_load(read_config(None, ["lora={}"], flags).to_yaml())
    found = list(numbers(settings))
    assert len(found) > 20
    for path in found:
        for wrong in ("-3", ".inf", ".nan", "many", "[1]"):
            with pytest.raises(DraftkitError, match=str(path[-1])):
                read_config(None, ["lora={}", f"{'.'.join(path)}={wrong}"], flags)


def test_a_settings_file_that_is_none(tmp_path: Path, draftkit: Command) -> None:
    repeats = (f"{name}: &{name} [{', '.join([f'*{inner}'] * 9)}]\n" for inner, name in pairwise("abcdefghi"))
    bomb = "a: &a [x, x, x, x]\n" + "".join(repeats)
    long = "#" * (2 << 20)
    file = tmp_path / "run.yaml"
    for text in (bomb, long, "recipe: [", "- 1", "recipe: \xff", "? [1]\n: 2", "1: 2", "!!python/name:os.system x"):
        file.write_bytes(text.encode("latin-1"))
        refused = draftkit("train", "--config", file, "--recipe", "eagle3", "--dry-run")
        assert refused.code == 1
        assert "configuration" in refused.err
    assert draftkit("train", "--config", tmp_path, "--dry-run").code == 1


def test_pard_says_at_once_that_it_needs_a_draft(draftkit: Command) -> None:
    refused = draftkit("train", "--recipe", "pard", "--target", "T", "--data", "D", "--out", "O")
    assert (refused.code, "as --draft" in refused.err) == (1, True)


@pytest.mark.parametrize(
    ("recipe", "draft", "expected"),
    [("eagle3", "", 2e-3), ("eagle", "", 6e-4), ("eagle3", "draft", 1e-4), ("pard", "small", 1e-4), ("mtp", "", 1e-4)],
)
def test_what_has_learned_is_trained_more_slowly(recipe: str, draft: str, expected: float) -> None:
    """A target's own MTP head, too. What was asked for holds for all, and the file of a run says it."""
    flags = FLAGS | {"recipe": recipe, "draft": draft}
    config = read_config(None, [], flags)
    assert config.learning_rate == config.by_name()["optimization.lr"] == expected
    assert yaml.safe_load(config.to_yaml())["optimization"]["lr"] == expected
    assert read_config(None, ["optimization.lr=2e-3"], flags).learning_rate == 2e-3


def test_a_draft_model_is_smaller_than_its_target() -> None:
    for hidden, heads, layers in ((64, 4, 2), (256, 4, 4), (288, 3, 5), (4096, 32, 32)):
        with torch.device("meta"):
            target = pico.llama(
                hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=1, num_hidden_layers=layers
            )
            draft = fresh_draft_model(draft_model_spec(Origin(target), DraftModelOptions()))
        assert draft.num_parameters() < target.num_parameters()
        assert draft.config.num_hidden_layers <= 4
        assert draft.config.hidden_size <= 512
    with pytest.raises(DraftkitError, match=r"a draft model of .* parameters for a target of"):
        draft_model_spec(Origin(pico.llama()), DraftModelOptions(hidden_size=512))
    with pytest.raises(DraftkitError, match="expected: an even number"):
        draft_model_spec(Origin(pico.llama()), DraftModelOptions(hidden_size=32, num_heads=5))


def test_none_is_a_word(tmp_path: Path) -> None:
    """As `draftkit train --settings` calls it, beside YAML's null; what takes none as one of its words keeps it."""
    file = tmp_path / "run.yaml"
    file.write_text("optimization: {lr: none}\noptions: {dpace: none}\n")
    for config in (
        read_config(None, ["optimization.lr=none", "options.dpace=none"], FLAGS | {"recipe": "dflash"}),
        read_config(None, ["options.dpace=null"], FLAGS | {"recipe": "dflash"}),
        read_config(file, [], FLAGS | {"recipe": "dflash"}),
    ):
        assert (config.optimization.lr, config.recipe_options().dpace) == (None, None)  # type: ignore[attr-defined]
    eagle3 = read_config(None, ["options.feature_norm=none"], FLAGS).recipe_options()
    assert eagle3.feature_norm == "none"  # type: ignore[attr-defined]
    with pytest.raises(DraftkitError, match="tokens_per_row"):
        read_config(None, ["tokens_per_row=none"], FLAGS)


def test_tokens_are_counted_in_k_too(tmp_path: Path) -> None:
    """As `--max-length` takes them; what counts something else, or nothing, is no number with a letter."""
    said = [f"{name}={size}" for name, size in (("tokens_per_row", "32k"), ("options.sliding_window", "4k"))]
    config = read_config(None, [*said, "draft_vocab_size=32768"], FLAGS | {"recipe": "dflash", "target": "8k"})
    assert (config.tokens_per_row, config.draft_vocab_size, config.target) == (32768, 32768, "8k")
    assert config.options["sliding_window"] == 4096
    file = tmp_path / "run.yaml"
    file.write_text("tokens_per_row: 16k\n")
    assert read_config(file, [], FLAGS).tokens_per_row == 16384
    for wrong in ("tokens_per_row=k", "tokens_per_row=1.5k", "tokens_per_row=-1k", "save_every=1k", "options=1k"):
        with pytest.raises(DraftkitError, match=wrong.partition("=")[0]):
            read_config(None, [wrong], FLAGS)
