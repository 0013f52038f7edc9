"""The engines that measure drafts, one file for each, found by being here: draftkit's own, those that it starts, and
servers that run."""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING

from draftkit.errors import SettingError
from draftkit.layout.families import class_in

if TYPE_CHECKING:
    from draftkit.evaluate.engine import BaseEngine


def engine_class(name: str) -> type[BaseEngine]:
    """The engine that has this name, as `vllm` or `llama.cpp`. Raises `SettingError` where there is none.

    Its file is called like it (`llama_cpp.py`): where it is, no other file is imported.
    """
    from draftkit.evaluate.engine import BaseEngine

    files = [module.name for module in pkgutil.iter_modules(__path__)]
    likely = name.replace(".", "_").replace("-", "_")
    names = []
    for file in [likely] if likely in files else files:
        cls: type[BaseEngine] = class_in(f"{__name__}.{file}", BaseEngine)
        if cls.name == name:
            return cls
        names.append(cls.name)
    raise SettingError(f"there is no engine {name}", "engine", expected=", ".join(sorted(names)))
