"""Is speculative decoding lossless on this very pair, dtype and device? A protocol of five steps, one file each.

- A `replay`: every emitted token against a teacher-forced pass of the target
- B `noise`: how far logits move with the shape of a forward, which bounds what may pass for numerics
- C `equality`: the tokens of plain decoding, several K and batches, and drawn with shared noise
- D `sampler`, `continuations`: the distribution of sampled tokens, of the verifier alone and end to end
- E `self_draft`: the target as its own draft, which must accept everything

`certify` runs them on draftkit's engine, `result` says what they come to; bugs that they must notice are planted in the
test suite. Of engines that are seen from outside, as servers are, `served` compares the answers with those without a
draft.
"""
