#!/usr/bin/env bash
# What there is to learn from a GPU in half an hour: the tests that need one, and the benches, into benchmarks/DATE-DEVICE.md.
# Python is .venv/bin/python, or $PYTHON. What fails or takes too long is written down, and the rest goes on.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
device=$("$python" -c 'import torch; print(torch.cuda.get_device_name().replace(" ", "-").lower())') || exit 1
out=benchmarks/$(date -u +%F)-$device.md

section() { # title, seconds, command
	local title=$1 seconds=$2
	shift 2
	printf '\n## %s\n\n`%s`\n\n```\n' "$title" "$*" >>"$out"
	timeout "$seconds" "$@" 2>&1 | tail -n 160 >>"$out"
	printf '```\n\nExit code %s after at most %s s.\n' "${PIPESTATUS[0]}" "$seconds" >>"$out"
}

printf '# %s, %s\n\ndraftkit at %s.\n' "$device" "$(date -u +%F)" "$(git rev-parse --short HEAD)" >"$out"
section "Tests on a GPU" 720 "$python" -m pytest -q -p no:cacheprovider tests/gpu/test_on_a_gpu.py tests/runtime -m "gpu or interpreter"
section "Attention" 180 "$python" -m scripts.bench.attention
section "Rounds against the roofline" 660 "$python" -m scripts.bench.gpu
section "Where the time of rounds goes" 180 "$python" -m scripts.bench.gpu --profile --batches 1 8
echo "$out"
