"""Programs that inductor makes ahead of time, kept between processes.

A program has no weights: it is given those of the model that is loaded, packed ones as they are, so that nothing is
there twice. What is kept is a shared library of the machine's own instructions, under a digest of all that it follows
from.
"""

from __future__ import annotations

import logging
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch
import transformers
from torch import Tensor

from draftkit.errors import DraftkitError, in_one_line
from draftkit.io.kept import code_digest
from draftkit.runtime.compiled.attention import load_kernel
from draftkit.runtime.compiled.store import keep, place

if TYPE_CHECKING:
    from torch.export import ExportedProgram

ROOMS = ("models", "runtime", "targets")  # draftkit's code that is traced
OPTIONS = {
    "size_asserts": False,  # inputs are of one origin
    "aot_inductor.package_constants_in_so": False,
}

# What torch and transformers raise where something cannot be traced or compiled.
FAILURES = (RuntimeError, TypeError, ValueError, AssertionError, AttributeError, KeyError, NotImplementedError)

_log = logging.getLogger(__name__)


class Program:
    """A compiled function of a list of tensors, with `weights` called w0, w1, …"""

    def __init__(self, file: Path, weights: Sequence[Tensor]):
        from torch._inductor import aoti_load_package  # imports much

        model = aoti_load_package(str(file), run_single_threaded=True)
        own = {f"w{number}": weight for number, weight in enumerate(weights)}
        names = model.get_constant_fqns()
        if unknown := [name for name in names if name not in own]:
            raise RuntimeError(f"the program has constants of its own ({', '.join(unknown[:3])})")
        model.load_constants({name: own[name] for name in names}, check_full_update=True, user_managed=True)
        self._model, self._run = model, model.loader.boxed_run

    def __call__(self, inputs: list[Tensor]) -> list[Tensor]:
        out: list[Tensor] = self._run(inputs)
        return out


def check_compiler() -> None:
    """Raise `DraftkitError` without a C++ compiler that inductor can call."""
    from torch._inductor.cpp_builder import get_cpp_compiler  # imports much
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        found = get_cpp_compiler()
    except InvalidCxxCompiler:
        found = None
    if found is None or shutil.which(found) is None:
        raise DraftkitError(
            f"rounds cannot be compiled: there is no C++ compiler{f' {found}' if found else ''}",
            expected="g++ or clang++",
            hint="install one (apt install g++), name yours by CXX=…, or leave out --compile",
        )


def program(key: str, trace: Callable[[], ExportedProgram], weights: Sequence[Tensor], *, what: str) -> Program:
    """The program that is kept under `key`, and the machine it is for; else `trace` is compiled, and kept where that
    can be done. `what` is named while that lasts. Raises what torch raises where it cannot be compiled."""
    decides = [key, code_digest(*ROOMS), transformers.__version__, str(torch.get_num_threads())]
    file = place("\0".join(decides), ".pt2")
    load_kernel()
    if file.is_file():
        with suppress(RuntimeError):  # it is damaged
            return Program(file, weights)
    from torch._inductor import aoti_compile_and_package  # imports much

    _log.warning("compiling %s: a minute or so, then kept in %s", what, file.parent)
    began = time.perf_counter()
    with TemporaryDirectory() as folder, _quiet():
        made = aoti_compile_and_package(trace(), package_path=f"{folder}/program.pt2", inductor_configs=OPTIONS)
        _log.warning("compiled in %.0f s", time.perf_counter() - began)
        return Program(keep(Path(made), file), weights)


def or_warning(make: Callable[[], Program], what: str) -> Program | None:
    """The program; None, and a warning that says `what` and why, where it cannot be made."""
    try:
        return make()
    except FAILURES as error:
        _warn_once(f"{what}: {in_one_line(error)}")
        return None


@cache
def _warn_once(message: str) -> None:
    _log.warning(message)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings of torch's compiler about its own parts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
