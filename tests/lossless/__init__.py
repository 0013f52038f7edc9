"""Is speculative decoding lossless on draftkit's own engine? A protocol of five steps that look into it.

- A `replay`: every emitted token against a teacher-forced pass of the target
- B `noise`: how far logits move with the shape of a forward, which bounds what may pass for numerics
- C `equality`: the tokens of plain decoding, several K and batches, and drawn with shared noise
- D `sampler`, `continuations`: the distribution of sampled tokens, of the verifier alone and end to end
- E `self_draft`: the target as its own draft, which must accept everything

`certify` runs them, `result` says what they come to, and the bugs of `planted` are those that they must notice.
`draftkit certify` sees any engine from outside (`draftkit/evaluate/certificate.py`).
"""
