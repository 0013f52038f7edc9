"""Drafts judged by the same answers: simulated acceptance length, and its difference to the first draft's, in pairs.

`python -m scripts.bench.judged --target TARGET --samples SAMPLES [--skip 1996] [--limit 800] [--k 4] [--out FILE]
DRAFT [DRAFT …]`

`--skip` leaves out the first samples, which drafts were trained on. Drafts that FILE has are not judged again.
"""

from __future__ import annotations

import json
from pathlib import Path

from draftkit.data.sample_files import read_training_samples
from draftkit.data.states.online import load_training_target
from draftkit.results.metrics import length
from draftkit.results.statistics import gain, length_over_prompts
from draftkit.targets.devices import device_named, dtype_named
from draftkit.train.tuner import simulate_acceptance
from scripts._bench import arguments, kept, show, stamp


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("drafts", nargs="+", metavar="DRAFT")
    parser.add_argument("--target", required=True)
    parser.add_argument("--samples", type=Path, required=True, help="that `draftkit data prepare` has written")
    parser.add_argument("--skip", type=int, default=0, help="of them, from the first one on")
    parser.add_argument("--limit", type=int, default=800, help="of the rest")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--out", type=Path, help="a JSON file of each draft's sums, read if it is there")
    options = parser.parse_args()
    samples = read_training_samples(options.samples)[options.skip : options.skip + options.limit]
    device = device_named(None)
    target = load_training_target(options.target, device=device, dtype=dtype_named(None, device))
    found = kept(options.out, dict)
    for draft in options.drafts:
        if draft not in found:
            simulated = simulate_acceptance(draft, target, samples, k=options.k)
            found[draft] = {str(number): sums for number, sums in simulated.sums.items()}
            if options.out is not None:
                options.out.write_text(json.dumps(found))
    first, rows = found[options.drafts[0]], []
    for draft in options.drafts:
        sums = found[draft]
        numbers = sorted(first.keys() & sums.keys(), key=int)
        before, after = ([of[number] for number in numbers] for of in (first, sums))
        own = length_over_prompts(list(sums.values()))
        rows.append([draft, length(own, 3), length(gain(before, after), 3, signed=True)])
    title = f"{stamp()}\n{len(first)} answers, K={options.k}"
    show(title, ("draft", "acceptance length", "beside the first"), rows)


if __name__ == "__main__":
    main()
