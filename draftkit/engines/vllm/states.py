"""How vLLM 0.32 is asked for hidden states: `extract_hidden_states` writes a file for each prompt.

It has `token_ids` [T] and `hidden_states` [T, ids, H], where id i is the state after i layers, and the number of layers
stands for the state before the final norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from draftkit.engines.vllm.process import VllmProcess

# Only a step through the whole prompt is wanted, of which vLLM draws one token at least.
SAMPLING = {"temperature": 0, "max_tokens": 1, "ignore_eos": True}


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


def write_states(process: VllmProcess, prompts: Sequence[list[int]]) -> list[Path]:
    """The files of the prompts' states, complete. Raises `DraftkitError` as `VllmProcess.ask`."""
    outputs = process.ask([{"tokens": tokens, "sampling": SAMPLING} for tokens in prompts])["outputs"]
    return [Path(str(output["states"])) for output in outputs]
