"""Commands for those who build draftkit, run in the repository's root: `python -m scripts.check.vllm --help`.

`check` compares draftkit with others, `bench` measures speed, `attack` gives bad input, `zoo` makes the embedded
models, `gpu` counts and compiles kernels, `docs` draws pictures. Files that begin with an underscore are no commands.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # for their `fixtures`
