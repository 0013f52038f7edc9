"""The optimizers of a draft: AdamW, or Muon for its matrices and AdamW for all else, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from draftkit.layout.spec import DraftSpec
from draftkit.train.config import TrainConfig

MOMENTUM = 0.95  # of Muon, as speculators has it


class MuonAndAdamW(Optimizer):
    """`torch.optim.Muon` for the matrices of a draft, AdamW without weight decay for what else it has.

    `params`: parameters, or groups of them; `spec` tells which are matrices. `weight_decay` is Muon's; its updates are
    scaled as AdamW's (arXiv 2502.16982), so that `lr` is that of both. `adamw`: the class, and its arguments. The state
    is one, as that of any optimizer with groups.
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
            muon = {"momentum": MOMENTUM, "weight_decay": weight_decay, "adjust_lr_fn": "match_rms_adamw"}
            self._parts.append(torch.optim.Muon(matrices, lr=lr, **muon))  # type: ignore[arg-type]
        if others := _some_of(groups, spec, matrices=False):
            self._parts.append(adamw(others, lr=lr, weight_decay=0.0, **of_adamw))  # type: ignore[call-arg]
        super().__init__([group for part in self._parts for group in part.param_groups], {})
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


def kept_numbers(parameters: Iterable[Tensor], config: TrainConfig, spec: DraftSpec) -> int:
    """The numbers that the optimizer of a run keeps: AdamW two for each weight, Muon one."""
    muon = config.optimizer == "muon"
    return sum(p.numel() * (1 if muon and is_matrix(p, spec) else 2) for p in parameters if p.requires_grad)


def _some_of(groups: Iterable[dict[str, Any]], spec: DraftSpec, *, matrices: bool) -> list[dict[str, Any]]:
    """The groups with what is, or is not, a matrix; without those that are empty, and without their weight decay."""
    found = []
    for group in groups:
        chosen = [p for p in group["params"] if is_matrix(p, spec) == matrices]
        if chosen:
            found.append({**group, "params": chosen})
            found[-1].pop("weight_decay", None)
    return found
