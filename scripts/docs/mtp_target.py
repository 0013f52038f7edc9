"""A tiny random target with a multi-token prediction head, for the tutorial that checks one.

python -m scripts.docs.mtp_target TARGET
"""

from __future__ import annotations

import sys
from pathlib import Path

from fixtures.checkpoints import mtp_targets, pico

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def save_target(folder: Path) -> None:
    """A target of GLM-4.5's kind, with its head, a tokenizer and a chat template."""
    pico.save_tokenizer(mtp_targets.save_with_head("glm4_moe", folder).folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)


if __name__ == "__main__":
    save_target(Path(sys.argv[1]))
