"""Facts by name: what `--set`, checks and experiments ask a draft without knowing its family."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fixtures.checkpoints import pico

from draftkit.errors import LayoutError
from draftkit.layout.architecture import ParallelDrafting
from draftkit.layout.facts import facts_of, has, settings_of_facts, with_facts
from draftkit.layout.families.causal_lm import CausalLMSpec
from draftkit.layout.families.mtp import MtpSpec

EAGLE3 = pico.EAGLE3_SPEC
LM = CausalLMSpec(
    config={"model_type": "llama", "rope_parameters": {"rope_theta": 1e4}},
    vocab_size=320,
    parallel=ParallelDrafting(mask_token_id=7, mask_state=False),
    target_features=None,
)
HEAD = MtpSpec(
    config=LM.config,
    weights=(),
    vocab_size=320,
    target_hidden_size=64,
    num_modules=1,
    prefixes=("mtp.",),
    parts=None,
    concatenation="embedding_hidden",
    hidden_state="after_norm",
    feedback="post_norm",
    zero_first_embedding=False,
    modules="in_turn",
)


def test_a_fact_is_changed_by_name_wherever_it_lies() -> None:
    other = with_facts(EAGLE3, rope_theta=5e5, aux_layer_ids=(1, 2, 3), norm_before_residual=True)
    rope = replace(EAGLE3.decoder.rope, base=5e5)
    decoder = replace(EAGLE3.decoder, rope=rope)
    assert other == replace(EAGLE3, decoder=decoder, aux_layer_ids=(1, 2, 3), norm_before_residual=True)
    assert facts_of(other)["rope_theta"] == 5e5
    assert facts_of(other)["aux_layer_ids"] == [1, 2, 3]


def test_what_can_be_set_is_listed_by_the_names_that_set_it() -> None:
    parallel = replace(EAGLE3, parallel=ParallelDrafting(mask_token_id=7, mask_state=True))
    listed = {one.name: one for one in settings_of_facts(type(EAGLE3))}
    assert [name for name in listed if not has(parallel, name)] == []
    assert {"rope_theta", "rope_scaling", "sliding_window", "mask_token_id"} < set(listed)
    assert (listed["rope_theta"].kind, listed["sliding_window"].unit) == (float, "tokens")


def test_a_key_of_a_model_s_config_is_a_fact_too() -> None:
    other = with_facts(LM, rope_theta=5e5, mask_token_id=8)
    assert other.config == {"model_type": "llama", "rope_parameters": {"rope_theta": 5e5}}
    assert other.parallel == ParallelDrafting(mask_token_id=8, mask_state=False)
    assert LM.config["rope_parameters"] == {"rope_theta": 1e4}


def test_a_head_s_config_is_its_target_s() -> None:
    """What stands there is not the head's to be set."""
    assert not has(HEAD, "rope_theta")
    with pytest.raises(LayoutError, match="no fact rope_theta"):
        with_facts(HEAD, rope_theta=5e5)
    assert with_facts(HEAD, feedback="pre_norm") == replace(HEAD, feedback="pre_norm")


def test_only_facts_that_the_draft_has_are_changed() -> None:
    assert has(EAGLE3, "rope_theta")
    assert not has(EAGLE3, "scale_input")
    assert not has(LM, "norm_before_residual")
    with pytest.raises(LayoutError, match="no fact scale_input"):
        with_facts(EAGLE3, scale_input=True)
    with pytest.raises(LayoutError, match="norm_before_residual: 3 is not true or false"):
        with_facts(EAGLE3, norm_before_residual=3)
