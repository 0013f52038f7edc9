"""The engines that measure drafts, one file for each, found by being here: draftkit's own, those that it starts, and
servers that run."""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING

from draftkit.errors import SettingError
from draftkit.layout.families import class_in

OWN = "own"  # the file of draftkit's own engine, of which nothing is set beside the measurement itself

if TYPE_CHECKING:
    from draftkit.evaluate.engine import BaseEngine


def engine_class(name: str) -> type[BaseEngine]:
    """The engine that has this name, as `vllm` or `llama.cpp`. Raises `SettingError` where there is none.

    Its file is called like it (`llama_cpp.py`): where it is, no other file is imported.
    """
    files = _files()
    likely = _file_of(name)
    names = []
    for file in [likely] if likely in files else files:
        cls = _class_of(file)
        if cls.name == name:
            return cls
        names.append(cls.name)
    raise SettingError(f"there is no engine {name}", "engine", expected=", ".join(sorted(names)))


def further_settings() -> list[type]:
    """The dataclasses of what can be set of engines beside those that `options` knows; these are not imported for it,
    as most need torch."""
    from draftkit.evaluate.options import ENGINE_SETTINGS

    known = {OWN, *(_file_of(settings.engine) for settings in ENGINE_SETTINGS)}
    kinds = [_class_of(file).settings_type for file in _files() if file not in known]
    return [kind for kind in kinds if kind is not None]


def _files() -> list[str]:
    return [module.name for module in pkgutil.iter_modules(__path__)]


def _file_of(name: str) -> str:
    return name.replace(".", "_").replace("-", "_")


def _class_of(file: str) -> type[BaseEngine]:
    from draftkit.evaluate.engine import BaseEngine

    return class_in(f"{__name__}.{file}", BaseEngine)
