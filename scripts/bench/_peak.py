"""The peak memory of a process; a module of its own because workers run in environments without draftkit."""

from pathlib import Path

import torch


def peak_bytes() -> int:
    """The most memory that this process has held since it began its program: a GPU's, by torch's count, where it has
    used one, else the machine's, by the kernel's."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
