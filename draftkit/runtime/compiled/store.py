"""Where compiled code is kept between processes: under a digest of all that it follows from."""

from __future__ import annotations

import hashlib
import os
import platform
import secrets
import shutil
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

from draftkit.io.kept import kept_folder

MOST = 200  # files that are kept, of three to six megabytes each


def place(key: str, suffix: str) -> Path:
    """The file of what follows from `key`, this release of torch and this machine's processor; it may not exist yet."""
    digest = hashlib.sha256("\0".join([key, torch.__version__, _machine()]).encode()).hexdigest()
    return kept_folder("programs") / f"{digest}{suffix}"


@cache
def _machine() -> str:
    """What this machine's processor can do."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
    return f"{platform.machine()} {platform.processor()}"


def keep(made: Path, file: Path) -> Path:
    """The file, once what was made is copied to it; what was made, where that cannot be done."""
    scratch = file.with_suffix(f".{secrets.token_hex(8)}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(made, scratch)
        os.replace(scratch, file)
        _forget_old(file.parent)
    except OSError:
        with suppress(OSError):
            scratch.unlink()
        return made
    return file


def _forget_old(folder: Path) -> None:
    """Remove what was made longest ago, where there is more than `MOST`."""
    kept = [path for suffix in ("pt2", "so") for path in folder.glob(f"*.{suffix}")]
    for path in sorted(kept, key=lambda path: path.stat().st_mtime)[:-MOST]:
        path.unlink(missing_ok=True)  # who runs it has a copy, or has it open
