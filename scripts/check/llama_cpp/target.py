"""A target's folder to GGUF by llama.cpp's own converter, whatever its tokenizer.

`python -m scripts.check.llama_cpp.target --llama-cpp SOURCE FOLDER OUT.gguf [--no-mtp]`

The converter refuses tokenizers that it does not know by the hash of a text; the tokenizer's keys are draftkit's here,
and everything else is the converter's. `SOURCE` is llama.cpp's source; sentencepiece must be installed.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

from draftkit.convert.formats.gguf.tokenizer import tokenizer_in
from scripts._bench import arguments


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--llama-cpp", type=Path, required=True)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--no-mtp", action="store_true", help="all but the heads")
    options = parser.parse_args()
    sys.path[:0] = [str(options.llama_cpp), str(options.llama_cpp / "gguf-py")]
    conversion, converter = map(importlib.import_module, ("conversion", "convert_hf_to_gguf"))
    config = json.loads((options.folder / "config.json").read_text())
    keys = tokenizer_in(options.folder, config.get("text_config", config)["vocab_size"])
    conversion.get_model_class(config["architectures"][0]).set_vocab = lambda self: add(self.gguf_writer, keys)
    chosen = ["--no-mtp"] if options.no_mtp else []
    sys.argv[1:] = [str(options.folder), "--outfile", str(options.out), "--outtype", "f32", *chosen]
    converter.main()


def add(writer: Any, keys: dict[str, object]) -> None:
    adders = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
    for key, value in keys.items():
        adders[type(value)](key, value)


if __name__ == "__main__":
    main()
