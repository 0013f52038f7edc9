"""What the recipes of drafts share that are causal language models."""

from __future__ import annotations

from draftkit.errors import DraftkitError
from draftkit.layout.families.causal_lm import CausalLMSpec
from draftkit.train.recipes.recipe import Origin, Recipe


def require_causal_lm(origin: Origin, methods: tuple[str, ...]) -> CausalLMSpec:
    """The architecture of the origin's draft. Raises `DraftkitError` where it is none of `methods`, quantized, or of
    another vocabulary than the target."""
    assert origin.draft is not None
    where = origin.draft.path
    if origin.draft.spec.method not in methods:
        raise DraftkitError(
            f"the draft is of the kind {origin.draft.spec.method}", where=where, expected=" or ".join(methods)
        )
    spec = origin.draft.spec.architecture.expect(CausalLMSpec)
    if origin.draft.spec.quantization is not None:
        raise DraftkitError("the draft's weights are quantized", where=where, hint="train the original checkpoint")
    size = origin.target.config.get_text_config().vocab_size
    if spec.vocab_size != size:
        raise DraftkitError(
            f"the draft has {spec.vocab_size} tokens, the target {size}",
            where=where,
            hint="give the draft the target's vocabulary first, or train another draft",
        )
    return spec


def require_own_names(recipe: Recipe) -> None:
    """Raise `DraftkitError` for a model that stores its weights under other names than it trains them."""
    if missing := recipe.stored_names - recipe.draft.state_dict().keys():
        raise DraftkitError(
            f"{type(recipe.draft).__name__} stores its weights under other names than it trains them: {min(missing)}",
            expected="a dense model",
        )
