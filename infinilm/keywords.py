"""Names of other libraries: the name here, the thing to do in their place, or the feature that is missing here.

For messages about unknown keywords and attributes. The names are those of vLLM, transformers, llama-cpp-python and
CTranslate2.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from types import MappingProxyType

from infinilm.errors import did_you_mean

__all__ = ["unknown_attribute", "unknown_parameter"]

_OTHER_NAMES = MappingProxyType(
    {
        # sampling
        "max_new_tokens": "max_tokens",
        "max_length": "max_tokens",
        "max_completion_tokens": "max_tokens",
        "min_new_tokens": "min_tokens",
        "num_return_sequences": "n",
        "num_beams": "beam_width",
        "use_beam_search": "beam_width",
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
        "n_gpu_layers": "gpu_layers",
        "num_gpu_layers": "gpu_layers",
        "num_gpu": "gpu_layers",
        "n_cpu_moe": "cpu_moe",
        "chat_format": "chat_template",
        "model_path": "model",
        "speculative_config": "speculation",
    }
)

_FEATURES = (
    ("diverse beam search", "num_beam_groups diversity_penalty"),
    ("a limit of adapters", "max_lora_rank max_loras"),
    ("an adapter made for another base", "lora_base"),
    ("the priority of a request", "priority scheduling_policy"),
    ("cutting prompts to a length", "truncate_prompt_tokens truncation"),
    ("a list of forbidden words", "bad_words bad_words_ids"),
    ("forbidding repeated n-grams", "no_repeat_ngram_size"),
    ("this way to truncate the distribution", "typical_p top_a tfs_z mirostat mirostat_mode epsilon_cutoff eta_cutoff"),
    ("swapping to host memory", "swap_space cpu_offload_gb"),
    ("data or expert parallelism", "data_parallel_size enable_expert_parallel"),
    ("code that comes with a model", "trust_remote_code"),
    ("changing config.json by keyword", "hf_overrides rope_scaling rope_theta"),
)
_ABSENT = MappingProxyType({name: feature for feature, names in _FEATURES for name in names.split()})

# What is said when a model is loaded, as it is written there.
_LOADED_BY = (
    *(
        "dtype",
        "device",
        "quantization",
        "activations",
        "kv_cache",
        "kv_cache_dtype",
        "tokenizer",
        "num_threads",
        "max_model_len",
    ),
    *("max_num_seqs", "max_num_batched_tokens", "tensor_parallel_size", "pipeline_parallel_size"),
)
_AT_LOADING = MappingProxyType(
    {
        **{name: f"{name}=..." for name in _LOADED_BY},
        "load_in_8bit": "quantization='int8'",
        "load_in_4bit": "quantization='int4'",
    }
)

_NEVER_NEEDED = "leave it out: "
_ONE_LLM = _NEVER_NEEDED + "one LLM has generate(), chat(), embed() and score()"
# Where there is the first parameter, what to do in place of the others.
_ADVICE = (
    (
        "temperature",
        {
            "best_of": "n gives all of its texts; the best has the largest cumulative_logprob (with logprobs=0)",
            **dict.fromkeys(
                ("continue_final_message", "add_generation_prompt", "tools", "chat_template_kwargs"),
                "chat() takes it; the prompts of generate() are texts as they are",
            ),
            "detokenize": _NEVER_NEEDED + "text that is not read costs next to nothing",
            "output_kind": _NEVER_NEEDED + "generate() gives whole results, stream() gives events",
            "stream": "use stream() or stream_chat(), which give events",
        },
    ),
    (
        "chat_template_kwargs",
        {
            **{
                name: f"pass chat_template_kwargs={{{name!r}: ...}}"
                for name in ("enable_thinking", "thinking", "documents")
            },
            "chat_template": "it belongs to the model: LLM(model, chat_template=...)",
            "chat_template_content_format": _NEVER_NEEDED + "the template tells",
            "tool_choice": "the model chooses; constraint=Constraint.json_schema(...) forces the arguments of one tool",
            "functions": "pass tools, with each function as {'type': 'function', 'function': {...}}",
            "add_special_tokens": _NEVER_NEEDED + "the chat template writes them",
        },
    ),
    (
        "kv_cache",
        {
            "gpu_memory_utilization": (
                "kv_cache is the memory of the KV cache alone, such as '8GiB', or '80%' of what weights leave free; "
                "by default it is half of that on a CPU and 88% on a GPU"
            ),
            "load_in_8bit": "pass quantization='int8'",
            "load_in_4bit": "pass quantization='int4'",
            "compute_type": "dtype is what is computed in, quantization='int8' or 'int4' how weights are stored",
            "task": _ONE_LLM,
            "runner": _ONE_LLM,
            "embedding": _ONE_LLM,
            "logits_all": _NEVER_NEEDED + "score() and forward() give all positions",
            "enforce_eager": _NEVER_NEEDED + "nothing is compiled; INFINILM_CUDA_SYNC=1 runs CUDA without graphs",
            "disable_log_stats": _NEVER_NEEDED + "LLM.metrics() gives statistics, and nothing logs them",
            "num_speculative_tokens": "pass speculation={'num_tokens': ...}",
            **dict.fromkeys(
                ("speculative_model", "draft_model", "assistant_model"),
                "pass speculation={'method': 'draft_model', 'model': ...}, or 'mtp' for a drafter of Gemma 4",
            ),
            "block_size": "pass kv_cache=PagedKVCacheConfig(max_kv_memory_bytes, block_size)",
            "num_gpu_blocks_override": "pass kv_cache=PagedKVCacheConfig(num_blocks=...)",
            "enable_chunked_prefill": _NEVER_NEEDED + "prompts are computed in chunks of max_num_batched_tokens",
            "skip_tokenizer_init": _NEVER_NEEDED + "prompts of token ids need no tokenizer",
            "tokenizer_mode": _NEVER_NEEDED + "there is one kind of tokenizer",
            "distributed_executor_backend": _NEVER_NEEDED + "ranks are threads of this process",
        },
    ),
    (
        "dtype",
        {
            "quantization": "LLM(model, quantization=...) quantises while it loads",
            "load_in_8bit": "LLM(model, quantization='int8') quantises while it loads",
            "load_in_4bit": "LLM(model, quantization='int4') quantises while it loads",
            "quantization_config": _NEVER_NEEDED + "quantised files are recognised",
            "verbose": _NEVER_NEEDED + "logging.getLogger('infinilm').setLevel(...) says how much is logged",
            "use_mmap": _NEVER_NEEDED + "files are mapped while they are read",
            "use_mlock": _NEVER_NEEDED + "weights are in memory of the process",
            "low_cpu_mem_usage": _NEVER_NEEDED + "no tensor is in memory twice",
            "attn_implementation": _NEVER_NEEDED + "there is one implementation",
            "attention_backend": _NEVER_NEEDED + "there is one implementation",
            **dict.fromkeys(("download_dir", "cache_dir"), "set the environment variable HF_HOME"),
            **dict.fromkeys(("token", "hf_token", "use_auth_token"), "set the environment variable HF_TOKEN"),
        },
    ),
)

_NO_TRAINING = "there is nothing to train here"
_AT_OPENING = "it is said when the model is opened: AutoModelForCausalLM.from_pretrained(path, device=..., dtype=...)"
_ATTRIBUTES = MappingProxyType(
    {
        "LLM": {
            "encode": "tokenize() gives token ids, embed() gives vectors",
            "beam_search": "generate(prompts, beam_width=4, n=4, max_tokens=...) searches",
            "sleep": "close() frees everything, and another LLM loads it again",
            "wake_up": "close() frees everything, and another LLM loads it again",
            "get_metrics": "metrics() gives them",
            "llm_engine": "submit() and asubmit() take single requests",
            "set_tokenizer": "LLM(model, tokenizer=...) takes another one",
            "create_completion": "use generate(), or stream()",
            "create_chat_completion": "use chat(), or stream_chat()",
            "create_embedding": "use embed()",
            "apply_chat_template": "render_chat() gives token ids, chat_template.render() the text",
            "eval": _NO_TRAINING,
            "to": "it is said when the model is opened: LLM(model, device=..., dtype=...)",
            "save_state": "save_prefix() keeps what a prompt has computed in a file",
            "load_state": "load_prefix() brings back what save_prefix() kept",
            "generate_batch": "generate() takes any number of prompts",
        },
        "CausalLM": {
            **dict.fromkeys(("half", "float", "bfloat16", "double", "cuda"), _AT_OPENING),
            **dict.fromkeys(("train", "parameters", "requires_grad_", "gradient_checkpointing_enable"), _NO_TRAINING),
            "state_dict": "model.engine.state_dict() gives the weights, one dict for each rank",
            "named_parameters": "model.engine.state_dict() gives the weights, one dict for each rank",
            "get_input_embeddings": "model.engine.state_dict() has the weights of the embedding",
            "forward": "LLM(path).forward(ids) gives logits of every position",
            "compile": "nothing is compiled",
            "save_pretrained": "the folder that was opened is the model",
        },
        "Tokenizer": {
            "apply_chat_template": "LLM.render_chat() gives token ids, LLM.chat_template.render() the text",
            "chat_template": "LLM.chat_template has it",
            "batch_decode": "decode() takes one sequence: [tokenizer.decode(ids) for ids in rows]",
            "encode_plus": "encode() gives token ids",
            "batch_encode_plus": "encode() takes one text: [tokenizer.encode(text) for text in texts]",
            "convert_ids_to_tokens": "id_to_token() takes one id",
            "convert_tokens_to_ids": "token_to_id() takes one token",
            "pad_token_id": "no padding is needed: prompts have any lengths",
            "pad_token": "no padding is needed: prompts have any lengths",
            "padding_side": "no padding is needed: prompts have any lengths",
            "eos_token": "special_tokens['eos_token'] has its text, eos_token_id its id",
            "bos_token": "special_tokens['bos_token'] has its text, bos_token_id its id",
            "all_special_ids": "is_special(id) tells",
            "all_special_tokens": "special_tokens has their texts",
            "save_pretrained": "to_json() gives the text of the tokenizer.json",
        },
    }
)


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
    advice = next((table[name] for anchor, table in _ADVICE if anchor in known and name in table), None)
    if advice is not None:
        hint = f": {advice}"
    elif name in _ABSENT:
        hint = f": {_ABSENT[name]} is not available in this version"
    elif other in known:
        hint = f"; it is called {other!r} here" + (" (0 is greedy)" if name == "do_sample" else "")
    elif (loaded := name if name in _AT_LOADING else other or "") in _AT_LOADING:
        hint = f": it is said when the model is loaded: LLM(model, {_AT_LOADING[loaded]})"
    else:
        hint = did_you_mean(name, known) or otherwise
    return TypeError(f"{owner} has no parameter {name!r}{hint}")


def unknown_attribute(owner: str, name: str, known: Iterable[str]) -> AttributeError:
    """Return the error for an attribute that objects of a class do not have.

    Parameters
    ----------
    owner
        The name of the class: "LLM".
    name
        The attribute.
    known
        Attributes that there are; the nearest one that is public is named where nothing is known of `name`.
    """
    hint = ""
    if not name.startswith("_"):  # others are asked for by programs, and often
        advice = _ATTRIBUTES.get(owner, {}).get(name)
        public = (other for other in known if not other.startswith("_"))
        hint = f": {advice}" if advice is not None else did_you_mean(name, public)
    return AttributeError(f"{owner} has no attribute {name!r}{hint}")
