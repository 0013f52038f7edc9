"""The optimizers of a draft: AdamW, or Muon for its matrices and AdamW for all else, as one optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from draftkit.layout.spec import DraftSpec
from draftkit.targets.devices import DTYPES, fast_dtype
from draftkit.train.config import TrainConfig

MOMENTUM = 0.95  # of Muon, as speculators has it
NEWTON_SCHULZ = 3.4445, -4.7750, 2.0315  # of Keller Jordan's Muon: steep at 0, so that five iterations are enough
ITERATIONS = 5


class Muon(Optimizer):
    """Muon for matrices, with Nesterov's momentum (Keller Jordan, 2024), its updates scaled as AdamW's (arXiv
    2502.16982), so that it takes AdamW's `lr`.

    As `torch.optim.Muon`, which iterates in bfloat16 on every device: on a CPU without instructions for it that takes
    twenty times as long as in float32, and a step of a small draft half a minute.
    """

    def __init__(self, params: Iterable[Tensor] | Iterable[dict[str, Any]], *, lr: float, weight_decay: float):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group["lr"], group["weight_decay"])

    def _update(self, parameter: Tensor, gradient: Tensor, lr: float, weight_decay: float) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - MOMENTUM)
        dtype = DTYPES[fast_dtype(parameter.device.type)[0]]
        update = orthogonal(gradient.lerp(momentum, MOMENTUM), dtype)
        parameter.mul_(1 - lr * weight_decay)
        parameter.add_(update, alpha=-lr * 0.2 * math.sqrt(max(parameter.shape)))


def orthogonal(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """The orthogonal matrix next to one of M × N, about: singular values of 0.5 to 1.5, by Newton and Schulz's
    iteration in `dtype`."""
    a, b, c = NEWTON_SCHULZ
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if tall else matrix).to(dtype)
    x = x / x.norm().clamp(min=1e-7)  # no singular value is above 1
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class MuonAndAdamW(Optimizer):
    """`Muon` for the matrices of a draft, AdamW without weight decay for what else it has.

    `params`: parameters, or groups of them; `spec` tells which are matrices. `weight_decay` is Muon's; `lr` is that of
    both. `adamw`: the class, and its arguments. The state is one, as that of any optimizer with groups.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        spec: DraftSpec,
        lr: float,
        weight_decay: float,
        adamw: type[Optimizer] = AdamW,
        **of_adamw: Any,
    ):
        groups: list[Any] = list(params)
        if groups and not isinstance(groups[0], dict):
            groups = [{"params": groups}]
        self._parts: list[Optimizer] = []
        if matrices := _some_of(groups, spec, matrices=True):
            self._parts.append(Muon(matrices, lr=lr, weight_decay=weight_decay))
        if others := _some_of(groups, spec, matrices=False):
            self._parts.append(adamw(others, lr=lr, weight_decay=0.0, **of_adamw))  # type: ignore[call-arg]
        # transformers' polynomial schedule reads the rate from the defaults.
        super().__init__([group for part in self._parts for group in part.param_groups], {"lr": lr})
        self._share()

    def _share(self) -> None:
        """Give each part its groups, and the state of all to write into."""
        begin = 0
        for part in self._parts:
            end = begin + len(part.param_groups)
            part.state, part.param_groups = self.state, self.param_groups[begin:end]
            begin = end

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Where `load_state_dict` ends, which has replaced state and groups."""
        super().__setstate__(state)
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss


def optimizer_of(parameters: Sequence[Tensor], config: TrainConfig, spec: DraftSpec) -> Optimizer:
    """The optimizer of a run for the parameters of the draft that `spec` describes."""
    settings = config.optimization
    more: dict[str, Any] = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    more["betas"] = settings.beta1, settings.beta2
    return MuonAndAdamW(parameters, spec=spec, **more) if config.optimizer == "muon" else AdamW(parameters, **more)


def is_matrix(parameter: Tensor, spec: DraftSpec) -> bool:
    """Whether Muon trains a parameter: a matrix that is no table of tokens, as embeddings and output layers are."""
    vocabulary = spec.architecture.vocab_size
    tables = {vocabulary, getattr(spec.architecture, "draft_vocab_size", vocabulary)}
    return parameter.ndim == 2 and min(parameter.shape) > 1 and parameter.shape[0] not in tables


def _some_of(groups: Iterable[dict[str, Any]], spec: DraftSpec, *, matrices: bool) -> list[dict[str, Any]]:
    """The groups with what is, or is not, a matrix; without those that are empty, and without their weight decay."""
    found = []
    for group in groups:
        chosen = [p for p in group["params"] if is_matrix(p, spec) == matrices]
        if chosen:
            found.append({**group, "params": chosen})
            found[-1].pop("weight_decay", None)
    return found
