#!/usr/bin/env bash
# What there is to learn from a GPU, in sections that each end within nine minutes, into one page of Markdown.
#
#   scripts/gpu_day.sh [--out FILE] [--dry-run] [SECTION …]     all sections where none is named
#
# Python is $PYTHON, or .venv/bin/python; sections beside vLLM want $VLLM_PYTHON, the Python of its environment. A section
# that fails or takes too long is written down, and the next one goes on. At the end of the page stands what each was to
# show, and whether it did. --dry-run asks every command for its help or its tests instead; it needs no GPU.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
LIMIT=540 # seconds of a section
names=(kernels runtime lossless attention rounds-1 rounds-8 rounds-100 profile long-prompts counts beside-vllm)

say() { # what a section is to show
	case $1 in
	kernels) echo "kernels and captured rounds compute what their references do" ;;
	runtime) echo "every drafter gives plain decoding's tokens, natively compiled" ;;
	lossless) echo "the output with a draft is the target's (README: lossless)" ;;
	attention) echo "slot attention is at the speed of the memory it reads" ;;
	rounds-1 | rounds-8 | rounds-100) echo "rounds of ${1#rounds-} at the roofline of benchmarks/roofline.md" ;;
	profile) echo "a round launches what benchmarks/launches.md counts" ;;
	long-prompts) echo "prompts of many lengths wait for no plan of attention" ;;
	counts) echo "the same counts as vLLM" ;;
	beside-vllm) echo "tokens a second beside vLLM" ;;
	*) return 1 ;;
	esac
}

command_of() { # sets `line`; empty where the section cannot run
	case $1 in
	kernels) line=("$python" -m pytest -q -n0 -p no:cacheprovider tests/gpu/test_on_a_gpu.py -m gpu) ;;
	runtime) line=("$python" -m pytest -q -n0 -p no:cacheprovider tests/runtime -m "(gpu or interpreter) and not long") ;;
	lossless) line=("$python" -m draftkit certify --target zoo:target --draft zoo:eagle3 --dtype float32 --device cuda) ;;
	attention) line=("$python" -m scripts.bench.attention) ;;
	rounds-*) line=("$python" -m scripts.bench.gpu --batches "${1#rounds-}" --latency) ;;
	profile) line=("$python" -m scripts.bench.gpu --profile --batches 1 8) ;;
	long-prompts) line=("$python" -m scripts.bench.gpu --batches 1 --context 4000 --latency 8 64) ;;
	counts) line=(${VLLM_PYTHON:+"$python" -m scripts.check.vllm --vllm-python "$VLLM_PYTHON"}) ;;
	beside-vllm) line=(${VLLM_PYTHON:+"$python" -m scripts.bench.runtime --vllm-python "$VLLM_PYTHON" --batches 1 8 32}) ;;
	esac
}

tried() { # what a dry run does of a command
	if [ "$3" = pytest ]; then "$@" --collect-only; else "$1" -m "$3" $([ "$3" = draftkit ] && echo "$4") --help; fi
}

out= dry= chosen=()
while [ $# -gt 0 ]; do
	case $1 in
	--out) out=${2:?--out wants a file} && shift ;;
	--dry-run) dry=1 ;;
	*) say "$1" >/dev/null || { echo "no section $1; there are: ${names[*]}" >&2; exit 2; }
		chosen+=("$1") ;;
	esac
	shift
done
[ ${#chosen[@]} -gt 0 ] || chosen=("${names[@]}")

device=none
if [ -z "$dry" ]; then
	device=$("$python" -c 'import torch; print(torch.cuda.get_device_name().replace(" ", "-").lower())') || exit 1
fi
out=${out:-benchmarks/$(date -u +%F)-$device.md}
mkdir -p "$(dirname "$out")"
printf '# %s, %s\n\ndraftkit at %s.\n' "$device" "$(date -u +%F)" "$(git rev-parse --short HEAD)" >"$out"

rows= failed=0
for name in "${chosen[@]}"; do
	command_of "$name"
	if [ ${#line[@]} -eq 0 ]; then
		rows+="| $name | $(say "$name") | not run: VLLM_PYTHON is not set |"$'\n'
		continue
	fi
	printf '\n## %s\n\n`%s`\n\n```\n' "$name" "${line[*]}" >>"$out"
	began=$SECONDS
	if [ -n "$dry" ]; then tried "${line[@]}"; else timeout "$LIMIT" "${line[@]}"; fi 2>&1 | tail -n 160 >>"$out"
	code=${PIPESTATUS[0]}
	printf '```\n\nExit code %s after %s s.\n' "$code" $((SECONDS - began)) >>"$out"
	case $name in # what has figures for an answer does not judge them itself
	attention | rounds-* | profile | long-prompts | beside-vllm) kept="its figures tell" ;;
	*) kept=yes ;;
	esac
	if [ "$code" -ne 0 ]; then kept="no: exit code $code" && failed=1; fi
	rows+="| $name | $(say "$name") | ${dry:+dry run: }$kept |"$'\n'
done
printf '\n## What was to be shown\n\n| section | promise | kept |\n|---|---|---|\n%s' "$rows" >>"$out"
echo "$out"
exit $failed
