"""Chat templates shaped as published ones are, for a tokenizer with the tokens that they need."""

from __future__ import annotations

from functools import cache

from transformers import AutoTokenizer

from draftkit import zoo
from draftkit.data.tokenizer import TargetTokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header|>{{ m.role }}<|end_header|>\n\n"
    "{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header|>assistant<|end_header|>\n\n{% endif %}"
)
GENERATION = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Qwen3: thinking stays in the turns after the last question only.
THINKING = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if loop.index0 > ns.last %}{{ m.content }}{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)
# DeepSeek-R1: the prompt opens a thought, and no rendered turn has one.
UNPROMPTED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
VICUNA = (
    "{% for m in messages %}{% if m.role == 'assistant' %} ASSISTANT: {{ m.content }}<|eot|>"
    "{% else %} {{ m.role | upper }}: {{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %} ASSISTANT:{% endif %}"
)
# Gemma and Mistral: roles must take turns, and there is no system role.
STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Rewrites its own last question when an answer follows.
FORGETFUL = (
    "{% for m in messages %}{% if m.role == 'assistant' or loop.last %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@cache
def tokenizer(template: str | None) -> TargetTokenizer:
    """The zoo's tokenizer with ChatML's tokens and a template; `<|im_end|>` and `<|eot|>` end turns."""
    loaded = AutoTokenizer.from_pretrained(zoo.path("target"))
    loaded.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    loaded.chat_template = template
    end_ids = loaded.convert_tokens_to_ids(["<|im_end|>", "<|eot|>"])
    return TargetTokenizer("zoo:target", loaded, frozenset(end_ids))
