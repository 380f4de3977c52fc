"""Keywords of other libraries: what they are called here, or what it is that is not there.

Called by whoever refuses an unknown keyword. The names are those of vLLM, transformers and llama-cpp-python.
"""

from __future__ import annotations

from collections.abc import Collection
from types import MappingProxyType

from infinilm.errors import did_you_mean

__all__ = ["unknown_parameter"]

_OTHER_NAMES = MappingProxyType(
    {
        # sampling
        "max_new_tokens": "max_tokens",
        "max_length": "max_tokens",
        "max_completion_tokens": "max_tokens",
        "min_new_tokens": "min_tokens",
        "num_return_sequences": "n",
        "best_of": "n",
        "stop_strings": "stop",
        "stop_sequences": "stop",
        "stop_words": "stop",
        "eos_token_id": "stop_token_ids",
        "random_seed": "seed",
        "do_sample": "temperature",
        "temp": "temperature",
        "repeat_penalty": "repetition_penalty",
        "logits_processors": "logits_processor",
        "lora_request": "lora",
        "enable_lora": "lora",
        "adapter": "lora",
        "lora_path": "lora",
        "guided_json": "constraint",
        "guided_regex": "constraint",
        "guided_choice": "constraint",
        "guided_grammar": "constraint",
        "guided_decoding": "constraint",
        "structured_outputs": "constraint",
        "response_format": "constraint",
        "grammar": "constraint",
        # models
        "gpu_memory_utilization": "kv_cache",
        "kv_cache_memory_bytes": "kv_cache",
        "n_ctx": "max_model_len",
        "max_seq_len": "max_model_len",
        "max_context_len": "max_model_len",
        "context_length": "max_model_len",
        "max_batch_size": "max_num_seqs",
        "n_batch": "max_num_batched_tokens",
        "n_threads": "num_threads",
        "tp": "tensor_parallel_size",
        "tp_size": "tensor_parallel_size",
        "pp": "pipeline_parallel_size",
        "pp_size": "pipeline_parallel_size",
        "torch_dtype": "dtype",
        "cache_dtype": "kv_cache_dtype",
        "device_map": "device",
        "chat_format": "chat_template",
        "model_path": "model",
    }
)

_FEATURES = (
    ("beam search", "num_beams num_beam_groups use_beam_search beam_width length_penalty early_stopping"),
    ("a limit of adapters", "max_lora_rank max_loras"),
    ("an adapter made for another base", "lora_base"),
    ("speculative decoding", "speculative_config speculative_model num_speculative_tokens draft_model assistant_model"),
    ("the priority of a request", "priority scheduling_policy"),
    ("continuing the last message of a chat", "continue_final_message"),
    ("cutting prompts to a length", "truncate_prompt_tokens truncation"),
    ("a list of forbidden words", "bad_words bad_words_ids"),
    ("forbidding repeated n-grams", "no_repeat_ngram_size"),
    ("this way to truncate the distribution", "typical_p top_a tfs_z mirostat mirostat_mode epsilon_cutoff eta_cutoff"),
    ("generating without text", "detokenize output_kind"),
    ("swapping to host memory", "swap_space cpu_offload_gb"),
    ("dividing layers between a CPU and GPUs", "n_gpu_layers num_gpu_layers"),
    ("data or expert parallelism", "data_parallel_size enable_expert_parallel"),
    ("code that comes with a model", "trust_remote_code"),
    ("changing config.json by keyword", "hf_overrides rope_scaling rope_theta"),
    ("a quantised model", "load_in_8bit load_in_4bit quantization_config"),
)
_ABSENT = MappingProxyType({name: feature for feature, names in _FEATURES for name in names.split()})


def unknown_parameter(owner: str, name: str, known: Collection[str], otherwise: str = "") -> TypeError:
    """Return the error for a keyword that `owner` does not have.

    Parameters
    ----------
    owner
        Begins the message: "LLM".
    name
        The keyword.
    known
        The keywords there are.
    otherwise
        The end of the message where nothing comes near.
    """
    other = _OTHER_NAMES.get(name)
    if name in _ABSENT and name not in known:
        hint = f": {_ABSENT[name]} is not available in this version"
    elif other in known:
        hint = f"; it is called {other!r} here" + (" (0 is greedy)" if name == "do_sample" else "")
    else:
        hint = did_you_mean(name, known) or otherwise
    return TypeError(f"{owner} has no parameter {name!r}{hint}")
