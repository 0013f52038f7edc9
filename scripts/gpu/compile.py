"""Compiles every Triton kernel, as it is launched, for four kinds of GPUs and two versions of Triton; no GPU is needed.

`make compile-gpu` writes what it found to benchmarks/data/kernels.md. The digests of what it compiled go to
kernels.json beside it. By these `make test` knows whether that is still what is launched. It fails if a program takes
more memory than a processor has, spills more than a few registers, or computes in double precision. The versions of
Triton are installed into folders of their own under build/. `--stale` compiles only kernels that have changed since.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from fixtures.gpu.gpu_kernels import GPUS, Gpu, Report, compiled, digests, report, variants

from scripts._bench import ROOT

VERSIONS = {"3.6": "triton==3.6.0", "newest": "triton"}
TABLE, DIGESTS = ROOT / "benchmarks/data/kernels.md", ROOT / "benchmarks/data/kernels.json"
HEADER = """# The Triton kernels as machine code

`make compile-gpu`, without a GPU: every kernel as launched for the shapes of `tests/fixtures/gpu/gpu_kernels.py`. Of
all variants of a kernel, the most bytes of shared memory that a program takes, the most registers of a thread, and the
most bytes of its stack, onto which registers spill. None computes in double precision, but for one product in CUDA's
own cosine and sine of angles above 105,615, which torch's have too.

| kernel | GPU | Triton | variants | shared | registers | stack |
|---|---|---|---|---|---|---|
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stale", action="store_true", help="only kernels that have changed")
    parser.add_argument("--here", action="store_true", help="with the Triton that is installed; print JSON")
    parser.add_argument("--kernels", nargs="*", help="with --here: these alone")
    arguments = parser.parse_args()
    if arguments.here:
        with tempfile.TemporaryDirectory() as cache:
            reports = [compile_for(gpu, arguments.kernels, Path(cache)) for gpu in GPUS]
        print(json.dumps([line for lines in reports for line in lines]))
        return
    now, known = digests(), json.loads(DIGESTS.read_text(encoding="utf-8"))
    wanted = [name for name in now if not arguments.stale or known.get(name) != now[name]]
    kept = [line for line in written() if line.kernel in now.keys() - set(wanted)]
    made = [Report(*fields) for name, version in VERSIONS.items() for fields in compile_with(name, version, wanted)]
    if stray := {line.triton for line in kept} - {line.triton for line in made}:
        sys.exit(f"the table is of Triton {', '.join(sorted(stray))} too: run this without --stale")
    lines = sorted(kept + made)
    table = "".join(f"| {' | '.join(map(str, line[:-1]))} |\n" for line in lines)
    TABLE.write_text(HEADER + table, encoding="utf-8")
    DIGESTS.write_text(json.dumps({"triton": triton.__version__, **now}, indent=1) + "\n", encoding="utf-8")
    if faults := [fault for line in lines for fault in line.faults]:
        sys.exit("\n".join(faults))


def compile_for(gpu: Gpu, wanted: list[str], cache: Path) -> list[Report]:
    launched = [variant for variant in variants(gpu) if variant.name in wanted]
    return report(gpu, [(variant, compiled(variant, gpu, cache)) for variant in launched], triton.__version__)


def written() -> list[Report]:
    """The lines of the table."""
    rows = [line.strip("| ").split(" | ") for line in TABLE.read_text(encoding="utf-8").splitlines()]
    return [Report(*row[:3], *map(int, row[3:])) for row in rows if row[0].endswith("_kernel")]


def compile_with(name: str, version: str, wanted: list[str]) -> list[list[object]]:
    """The lines of one version of Triton, in a process of its own."""
    folder = ROOT / "build" / f"triton-{name}"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
    subprocess.run([*pip, "--target", str(folder), version], check=True)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(folder), os.environ.get("PYTHONPATH", "")))}
    command = [sys.executable, "-m", "scripts.gpu.compile", "--here", "--kernels", *wanted]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    found: list[list[object]] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    main()
