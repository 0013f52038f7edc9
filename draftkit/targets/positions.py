"""How long the sequences of a target may be, from its configuration."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PretrainedConfig

from draftkit.errors import DraftkitError
from draftkit.layout.positions import ropes_of
from draftkit.targets.rope import TURN

UNLIMITED = 1 << 62


@dataclass(frozen=True)
class Positions:
    """`most`: tokens of a sequence, prompt and output. `turn`: the length beyond which rope has other frequencies.

    No sequence may grow from one side of `turn` to the other: some models then compute all their keys anew, others keep
    those that they have, and engines choose by the longest sequence that they serve.
    """

    most: int
    turn: int

    @classmethod
    def of(cls, config: PretrainedConfig) -> Positions:
        """Linear rope stretches a model's positions, as engines count them; other kinds state the stretched number."""
        text = config.get_text_config()
        ropes = ropes_of({"rope_parameters": getattr(text, "rope_parameters", None)})
        stated = getattr(text, "max_position_embeddings", None)
        stretch = max((rope["factor"] for rope in ropes if rope.get("rope_type") == "linear"), default=1.0)
        most = int(stated * stretch) if isinstance(stated, int) and stated > 0 else UNLIMITED
        turn = min((rope[TURN] for rope in ropes if rope.get("rope_type") == "longrope"), default=UNLIMITED)
        return cls(most, turn)

    @property
    def longest(self) -> int:
        """The length up to which texts of any lengths may share a forward."""
        return min(self.most, self.turn)

    def room(self, prompt: int) -> int:
        """How many tokens may follow a prompt of so many; none or less where it is too long itself."""
        most = self.most - prompt
        return min(most, self.turn + 1 - prompt) if prompt <= self.turn else most  # the last token is not run

    def check(self, name: str, prompt: int, new: int) -> None:
        """Raise `DraftkitError` where `new` tokens after a prompt of so many are more than there is room for."""
        room = self.room(prompt)
        if new <= room:
            return
        shorter = f"ask for at most {room} new tokens, or leave it out" if room > 0 else "leave it out"
        if prompt + new > self.most:
            problem = f"the target has {self.most} positions"
        else:
            problem = f"the target's rope changes beyond {self.turn} tokens (longrope), and no text may cross that"
        raise DraftkitError(f"prompt {name}: {prompt} tokens and up to {new} new ones; {problem}", hint=shorter)
