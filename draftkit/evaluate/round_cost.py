"""What a round takes by arithmetic: the bytes that it reads, what it computes, the kernels that it launches.

A forward takes the longer of reading its weights, keys and values once and of computing its products; each kernel adds
a gap in which nothing is read. What that leaves out: how far an engine stays from a data sheet's figures, sampling from
large vocabularies, prompts, and the host.
"""

from __future__ import annotations

from dataclasses import dataclass

# Kernels of a captured round at temperature 0, as benchmarks/launches.md counts them for Llama and Qwen3: of a decoder
# layer; of the target beside its layers, with the verdict; of a pass of a draft beside its layers; of drafting at all.
PER_LAYER, PER_ROUND, PER_PASS, DRAFTING = 11, 47, 8, 25


@dataclass(frozen=True)
class Device:
    """`bandwidth` in bytes a second, `speed` in bfloat16 operations a second, and the seconds that a kernel takes
    beside its work: `gap`, within a CUDA graph."""

    name: str
    bandwidth: float
    speed: float
    gap: float = 1.5e-6


# Bandwidth and speed (without sparsity) are those of NVIDIA's data sheets; the gap is assumed.
A100_40 = Device("A100 40 GB", 1.555e12, 312e12)
A100 = Device("A100 80 GB", 2.039e12, 312e12)
L40S = Device("L40S", 0.864e12, 362e12)
H100 = Device("H100", 3.35e12, 989e12)
H200 = Device("H200", 4.8e12, 989e12)
B200 = Device("B200", 8.0e12, 2250e12)
DEVICES = (A100, L40S, H100, H200, B200)


@dataclass(frozen=True)
class Forward:
    """A pass of a model over new rows of B sequences.

    `numbers`: of the weights that a row is multiplied with. `weights`: bytes that are read whatever the rows are; of
    `experts` bytes more, a row reads the share `chosen`. `cached`: bytes of a position's keys and values. `kernels`: of
    a pass.
    """

    numbers: float
    weights: float
    cached: float
    kernels: int
    experts: float = 0.0
    chosen: float = 1.0

    def bytes_read(self, sequences: int, rows: int, positions: int) -> float:
        """By `rows` in each sequence, which look back on `positions`. Rows are sent to experts by chance."""
        experts = self.experts * (1 - (1 - self.chosen) ** (sequences * rows))
        return self.weights + experts + self.cached * positions * sequences

    def seconds(self, device: Device, sequences: int, rows: int, positions: int) -> float:
        """Without the gaps between kernels."""
        operations = 2 * sequences * rows * self.numbers
        return max(self.bytes_read(sequences, rows, positions) / device.bandwidth, operations / device.speed)


@dataclass(frozen=True)
class RoundCost:
    """A round of `k` drafts that takes `passes` of `draft`, the first over the rows that the target has accepted; in a
    single one there are those of all drafts besides. `passes` below 1 read so much of a draft alone. K = 0 and no draft
    is plain decoding."""

    target: Forward
    draft: Forward | None = None
    k: int = 0
    passes: float = 0.0

    @property
    def kernels(self) -> int:
        drafting = 0 if self.draft is None else DRAFTING + round(self.passes * self.draft.kernels)
        return self.target.kernels + drafting

    def bytes_read(self, sequences: int, positions: int) -> float:
        forwards = self._forwards
        return sum(share * forward.bytes_read(sequences, rows, positions) for forward, rows, share in forwards)

    def floor(self, device: Device, sequences: int, positions: int) -> float:
        """Seconds of its forwards alone, as if nothing were between kernels."""
        forwards = self._forwards
        return sum(share * forward.seconds(device, sequences, rows, positions) for forward, rows, share in forwards)

    def seconds(self, device: Device, sequences: int, positions: int) -> float:
        return self.floor(device, sequences, positions) + self.kernels * device.gap

    @property
    def _forwards(self) -> list[tuple[Forward, int, float]]:
        """Each forward with its rows in a sequence, and how often it is run."""
        scoring = [(self.target, self.k + 1, 1.0)]
        if self.draft is None:
            return scoring
        if self.passes <= 1:
            return [*scoring, (self.draft, 2 * self.k, self.passes)]
        return [*scoring, (self.draft, self.k + 1, 1.0), (self.draft, 1, self.passes - 1)]
