"""The states of targets that are too big for one process, from a vLLM installation of its own.

Source: vLLM 0.32, whose `extract_hidden_states` writes a file for each prompt. It has `token_ids` [T] and
`hidden_states` [T, ids, H], where id i is the state after i layers, and the number of layers stands for the state
before the final norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from draftkit.data.sample_media import SampleMedia
from draftkit.data.samples import Sample
from draftkit.data.states.online import load_final_norm
from draftkit.engines.vllm.accepts import check_target
from draftkit.engines.vllm.images import image_arguments, image_prompt
from draftkit.engines.vllm.process import VllmProcess, vllm_process
from draftkit.engines.vllm.worker import PromptTokens
from draftkit.errors import FormatError
from draftkit.io.atomic import scratch_folder
from draftkit.targets.pretrained import trusts_remote_code

# Only a step through the whole prompt is wanted, of which vLLM draws one token at least.
SAMPLING = {"temperature": 0, "max_tokens": 1, "ignore_eos": True}
Ask = Callable[[Sequence[PromptTokens]], list[Path]]  # prompts → the files that vLLM has written, as `write_states`


class VllmExtractor:
    """States from a running vLLM: `layers` in convention S, then the last after `norm`. `media` opens the images of
    samples."""

    def __init__(
        self, ask: Ask, layers: Sequence[int], num_layers: int, norm: nn.Module, media: SampleMedia | None = None
    ):
        self._ask = ask
        self._media = media
        self._norm = norm
        ids = layer_ids(layers, num_layers)
        self._columns = [ids.index(layer) for layer in layers]
        self._last = ids.index(num_layers)

    def __call__(self, samples: Sequence[Sample]) -> Iterator[tuple[int, Tensor]]:
        paths = self._ask([self._prompt(sample) for sample in samples])
        for place, (sample, path) in enumerate(zip(samples, paths, strict=True)):
            states = self._read(path, sample)
            last = self._norm(states[:, self._last])
            yield place, torch.cat((states[:, self._columns], last[:, None]), dim=1)

    def _prompt(self, sample: Sample) -> PromptTokens:
        images = [] if self._media is None else self._media.images(sample)
        return image_prompt(sample.tokens.tolist(), sample.media, images, SAMPLING)

    def _read(self, path: Path, sample: Sample) -> Tensor:
        """The states [T, ids, H] of a file, which is then removed. Raises `FormatError` unless it is the sample's."""
        try:
            with safe_open(path, "pt") as file:
                tokens, states = file.get_tensor("token_ids"), file.get_tensor("hidden_states")
        except (OSError, SafetensorError) as error:
            raise FormatError(f"vLLM's states of sample {sample.id} cannot be read: {error}", where=path) from error
        if tokens.tolist() != sample.tokens.tolist() or states.shape[0] != len(sample):
            raise FormatError(
                f"vLLM's states of sample {sample.id} are of {len(tokens)} tokens, not of its {len(sample)}",
                where=path,
            )
        path.unlink()
        path.with_name(f"{path.name}.lock").unlink(missing_ok=True)
        return states


@contextmanager
def vllm_extractor(
    python: str,
    target: Path,
    layers: Sequence[int],
    *,
    num_layers: int,
    dtype: torch.dtype,
    longest: int,
    tensor_parallel: int,
    device: str | None,
    beside: Path,
    media: SampleMedia | None = None,
    most_images: int = 0,
) -> Iterator[VllmExtractor]:
    """Run vLLM with the Python interpreter `python` until the body ends.

    `longest`: tokens of a sample, at most. `device`: `cuda:N` for the first GPU to use. vLLM's files of a shard lie in
    a hidden folder beside `beside` until they are read. `media` opens the images of samples with up to `most_images`.
    Raises `DraftkitError` when there is no such interpreter, and when vLLM fails.
    """
    check_target(target)
    norm = load_final_norm(target, dtype)
    with scratch_folder(beside) as scratch:
        arguments = extracting_arguments(
            target,
            layer_ids(layers, num_layers),
            scratch,
            dtype=str(dtype).removeprefix("torch."),
            longest=longest,
            tensor_parallel=tensor_parallel,
            trust_remote_code=trusts_remote_code(),
        ) | image_arguments(most_images)
        with vllm_process(python, arguments, device) as process:
            yield VllmExtractor(partial(write_states, process), layers, num_layers, norm, media)


def extracting_arguments(
    target: Path,
    layer_ids: Sequence[int],
    folder: Path,
    *,
    dtype: str,
    longest: int,
    tensor_parallel: int,
    trust_remote_code: bool,
) -> dict[str, object]:
    """The arguments of `vllm.LLM` to write states to `folder`; `longest`: tokens of a prompt, at most."""
    max_model_len = longest + 1
    return {
        "model": str(target),
        "skip_tokenizer_init": True,
        "dtype": dtype,
        "enforce_eager": True,
        "max_model_len": max_model_len,
        "max_num_batched_tokens": max(max_model_len, 8192),
        "tensor_parallel_size": tensor_parallel,
        "trust_remote_code": trust_remote_code,
        # A cached prefix or a prompt in chunks would leave states out.
        "enable_prefix_caching": False,
        "enable_chunked_prefill": False,
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layer_ids)}},
        },
        "kv_transfer_config": {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(folder)},
        },
    }


def layer_ids(layers: Sequence[int], num_layers: int) -> list[int]:
    """The ids that vLLM is asked for: it gives each once, in the order of the layers."""
    return sorted({*layers, num_layers})


def write_states(process: VllmProcess, prompts: Sequence[PromptTokens]) -> list[Path]:
    """The files of the prompts' states, complete. Raises `DraftkitError` as `VllmProcess.ask`."""
    return [Path(str(output["states"])) for output in process.ask(prompts)["outputs"]]
