"""A GGUF file as a folder like those of other models: what the file says of the model and its tokenizer, and the file.

Transformers reads it. The folder lasts as long as the process.
"""

from __future__ import annotations

import atexit
import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from draftkit.errors import FormatError
from draftkit.io.atomic import temporary_folder
from draftkit.io.gguf_file import Header, read_header
from draftkit.io.jsonfile import dump

ORIGINAL = "pass the folder or Hub id of the model that the file was made from"
END_TOKEN_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")  # llama.cpp ends a generation with each of them
# Those of llama.cpp's ways to split texts that set every digit apart and then split as GPT-2 does (`llama-vocab.cpp`).
DIGIT_BY_DIGIT = ("codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder")
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

_log = logging.getLogger(__name__)
_folders = ExitStack()
atexit.register(_folders.close)


def folder_of_gguf(file: Path) -> Path:
    """The folder that stands for a file.

    Raises `DraftkitError` without the package `gguf`, and for a file that is damaged, one part of several, or of a
    model that transformers does not read from GGUF, or not all of.
    """
    file = file.resolve()
    header = read_header(file)
    folder = _folders.enter_context(temporary_folder()) / file.stem
    folder.mkdir()
    (folder / file.name).symlink_to(file)
    _write_config(header, file, folder)
    _write_tokenizer(header, file, folder)
    end_ids = {end for name in END_TOKEN_KEYS if (end := header.value(f"tokenizer.ggml.{name}", int)) is not None}
    (folder / "generation_config.json").write_text(
        dump({"eos_token_id": sorted(end_ids)} if end_ids else {}), encoding="utf-8"
    )
    return folder


def _write_config(header: Header, file: Path, folder: Path) -> None:
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    architecture = header.value("general.architecture", str)
    try:
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
    except Exception as error:  # what is missing in a file shows in many types
        raise FormatError(
            f"transformers cannot read a model of type {architecture} from GGUF: {_first_line(error)}",
            where=file,
            hint=ORIGINAL,
        ) from error
    stated = header.value(f"{architecture}.rope.scaling.type", str) not in (None, "none")
    scaled = stated or any(region.name in ROPE_FACTORS for region in header.regions)
    if scaled and not _scales_rope(getattr(config.get_text_config(), "rope_parameters", None) or {}):
        raise FormatError(
            f"{file.name} scales its rope, which transformers does not read from GGUF", where=file, hint=ORIGINAL
        )
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    config.architectures = config.architectures or ([name] if name else None)
    config.save_pretrained(folder)


def _scales_rope(rope: dict[str, Any]) -> bool:
    """Whether rope parameters, or those of one kind of layers, are other than the default."""
    kinds = [value for value in rope.values() if isinstance(value, dict)] or [rope]
    return any(kind.get("rope_type", "default") != "default" for kind in kinds)


def _write_tokenizer(header: Header, file: Path, folder: Path) -> None:
    from tokenizers.pre_tokenizers import Digits, Sequence
    from transformers import AutoTokenizer

    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS as known
    except ImportError:  # of older releases, which split texts as the class of tokenizer does
        known = {}
    splits = header.value("tokenizer.ggml.pre", str)
    if splits not in (None, "default", "gpt-2", *DIGIT_BY_DIGIT, *known):
        _log.warning("%s: transformers does not know how %s splits text, and may tokenize otherwise", file.name, splits)
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
    except Exception as error:  # as that of the configuration
        raise FormatError(
            f"transformers cannot read the tokenizer of {file.name}: {_first_line(error)}", where=file, hint=ORIGINAL
        ) from error
    if splits in DIGIT_BY_DIGIT and splits not in known:
        whole = tokenizer.backend_tokenizer
        whole.pre_tokenizer = Sequence([Digits(individual_digits=True), whole.pre_tokenizer])
    tokenizer.save_pretrained(folder)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).split("\n", 1)[0]
