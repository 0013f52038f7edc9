#!/usr/bin/env bash
# What there is to learn from a GPU, in sections that each end within nine minutes, into a folder with one page.
#
#   scripts/gpu_day.sh [--out FOLDER] [--dry-run] [SECTION …]     all sections where none is named
#
# Python is $PYTHON, or .venv/bin/python. Sections beside vLLM want $VLLM_PYTHON, the Python of its environment, and
# measure $TARGET with $DRAFT, or the embedded models. A section that fails or takes too long is written down, and the
# next one goes on; named alone, it is run again. FOLDER/README.md says of each promise whether it is kept, by all
# sections that the folder has (scripts/gpu/promises.py). --dry-run tries every command without a GPU, as small as it
# goes: tests are collected, benchmarks run on the CPU, and where neither can be, options are read.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python} vllm=${VLLM_PYTHON:-}
models=(--target "${TARGET:-zoo:target}" --draft "${DRAFT:-zoo:eagle3}" --dataset zoo)
LIMIT=${LIMIT:-540} # seconds of a section
workers=$(($(nproc) < 8 ? $(nproc) : 8)) # of tests, which share the GPU: what takes long is compiling
names=(kernels runtime lossless counts rounds-1 rounds-8 rounds-64 launches attention long-prompts beside-vllm)

command_of() { # sets `line`, and `stated` where its output is its figures
	local tests=("$python" -m pytest -q --tb=short -rf -n "$workers" -p no:cacheprovider) bench=("$python" -m scripts.bench.gpu)
	local draftkit=("$python" -m draftkit) device=cuda dtype=bfloat16 figures=(--json "$out/$1.json")
	local both=(--engine vllm --vllm-python "$vllm" --json)
	if [ -n "$dry" ]; then
		tests+=(--collect-only) bench+=(--shape tiny) device=cpu dtype=float32
	fi
	bench+=(--device "$device")
	stated=
	case $1 in
	kernels) line=("${tests[@]}" tests/gpu/test_on_a_gpu.py -m gpu) ;;
	runtime) line=("${tests[@]}" tests/runtime -m "(gpu or interpreter) and not long") ;;
	lossless) line=("${draftkit[@]}" certify "${models[@]}" --device "$device" --dtype float32) ;;
	counts) line=("${draftkit[@]}" eval "${models[@]}" --device "$device" --dtype float32 "${both[@]}") stated=1 ;;
	rounds-*) line=("${bench[@]}" --batches "${1#rounds-}" --context 964 --latency "${figures[@]}") ;;
	launches) line=("${bench[@]}" --profile --batches 1 8 "${figures[@]}") ;;
	attention) line=("$python" -m scripts.bench.attention "${figures[@]}") ;;
	long-prompts) line=("${bench[@]}" --batches 1 --context 4000 --latency 8 64 "${figures[@]}") ;;
	beside-vllm) line=("${draftkit[@]}" eval "${models[@]}" --device "$device" --dtype "$dtype" --concurrency 1,8,32 "${both[@]}")
		stated=1 ;;
	*) return 1 ;;
	esac
	if [ -n "$dry" ]; then smaller "$1"; fi
}

smaller() { # of a dry run: what a section's command is without a GPU and without vLLM
	case $1 in
	lossless) line+=(--limit 2 --max-new-tokens 8) ;;
	counts | beside-vllm) line+=(--help) stated= ;;
	rounds-* | launches | long-prompts) line+=(--context 40) ;;
	esac
	case $1 in rounds-* | long-prompts) line+=(--batches 1 --latency 2) ;; launches) line+=(--batches 1) ;; esac
}

out= dry= chosen=()
while [ $# -gt 0 ]; do
	case $1 in
	--out) out=${2:?--out wants a folder} && shift ;;
	--dry-run) dry=1 ;;
	*) [[ " ${names[*]} " == *" $1 "* ]] || { echo "no section $1; there are: ${names[*]}" >&2; exit 2; }
		chosen+=("$1") ;;
	esac
	shift
done
[ ${#chosen[@]} -gt 0 ] || chosen=("${names[@]}")
device=dry-run
if [ -z "$dry" ]; then
	name='import torch; print(torch.cuda.is_available() and torch.cuda.get_device_name().replace(" ", "-").lower())'
	device=$("$python" -c "$name") || exit 1
	[ "$device" != False ] || { echo "torch sees no GPU; --dry-run tries the commands without one" >&2; exit 1; }
fi
out=${out:-benchmarks/$(date -u +%F)-$device}
mkdir -p "$out"
out=$(cd "$out" && pwd)

failed=0
for name in "${chosen[@]}"; do
	command_of "$name"
	rm -f "$out/$name".*
	if [ -z "$vllm$dry" ] && { [ "$name" = counts ] || [ "$name" = beside-vllm ]; }; then
		echo "$name: not run: VLLM_PYTHON is not set" >&2
		continue
	fi
	echo "$name: ${line[*]}" >&2
	printf 'draftkit at %s\n%s\n\n' "$(git describe --always --dirty=+)" "${line[*]}" >"$out/$name.txt"
	began=$SECONDS
	if [ -n "$stated" ]; then
		timeout "$LIMIT" "${line[@]}" >"$out/$name.json" 2>>"$out/$name.txt"
	else
		timeout "$LIMIT" "${line[@]}" >>"$out/$name.txt" 2>&1
	fi
	code=$?
	echo "$code" >"$out/$name.code"
	[ "$code" -eq 0 ] || failed=1
	printf '\nexit code %s after %s s\n' "$code" $((SECONDS - began)) >>"$out/$name.txt"
done
"$python" -m scripts.gpu.promises "$out" ${dry:+--dry-run} || failed=1
echo "$out/README.md"
exit $failed
