"""Faults that are planted on purpose, each with the tests that must notice it: they show that a test can fail.

`tools/plant_faults.py` plants them in a copy of the sources. Faults of the kind "the engine does not know this fact
of a model" are not in this list: `tests/test_facts.py` plants them for every fact (`facts.wrong_facts`).
"""

from __future__ import annotations

from dataclasses import dataclass

OPEN, CLOSE = "⟦", "⟧"


@dataclass(frozen=True)
class Fault:
    """One planted fault.

    Attributes
    ----------
    name : str
        What is wrong then.
    file : str
        Below the repository's root.
    code : str
        Text that the file has once, in which ⟦ and ⟧ mark the part that is replaced. In C++ this is an expression.
    wrong : str
        What replaces the part; in C++ an expression of the same type.
    tests : tuple of str
        Ids of tests for pytest, of which at least one must fail.
    """

    name: str
    file: str
    code: str
    wrong: str
    tests: tuple[str, ...]

    @property
    def is_cpp(self) -> bool:
        return not self.file.endswith(".py")

    @property
    def text(self) -> str:
        """What the file has."""
        return self.code.replace(OPEN, "").replace(CLOSE, "")

    @property
    def parts(self) -> tuple[str, str, str]:
        """The text before the part that is replaced, that part, and the text behind it."""
        before, _, rest = self.code.partition(OPEN)
        part, _, behind = rest.partition(CLOSE)
        return before, part, behind


def _logits(*names: str) -> tuple[str, ...]:
    """The numpy model against transformers."""
    test = "tests/models/test_reference_model.py::test_logits_and_greedy_tokens_are_those_of_transformers"
    return tuple(f"{test}[float64-{name}]" for name in names)


def _sites(*names: str) -> tuple[str, ...]:
    """The engine against the numpy model, and against itself in other batches, chunks and threads."""
    return tuple(f"tests/llm/test_every_family.py::test_sites_and_bits[{name}]" for name in names)


def _ranks(*names: str) -> tuple[str, ...]:
    """Ranks of tensor parallelism against one."""
    return tuple(f"tests/dist/test_tensor_parallel.py::test_golden[{name}]" for name in names)


CONFIG = "infinilm/config"
_ROPE = (f"{CONFIG}/sublayers/rope.py", ("tests/config/test_rope.py",))
_FAMILIES = ("tests/config/test_families.py",)

_CONFIG = (
    Fault(
        "linear RoPE does not divide",
        _ROPE[0],
        "/ ⟦np.float32(rope.factor())⟧, 1.0",
        "np.float32(1)",
        _ROPE[1],
    ),
    Fault("YaRN always rounds its bounds", _ROPE[0], "    if ⟦truncate⟧:", "True", _ROPE[1]),
    Fault(
        "Llama 3's RoPE does not blend",
        _ROPE[0],
        "* inv_freq / factor + ⟦blend * inv_freq⟧",
        "inv_freq",
        _ROPE[1],
    ),
    Fault(
        "LongRoPE is long at the original length",
        _ROPE[0],
        "is_long = rope.max_model_len ⟦>⟧ positions",
        ">=",
        _ROPE[1],
    ),
    Fault(
        "a pattern of windows is one longer",
        f"{CONFIG}/sublayers/windows.py",
        "(layer + 1) % ⟦pattern⟧ != 0 if pattern else",
        "(pattern + 1)",
        _FAMILIES,
    ),
    Fault(
        "the last layer keeps its window",
        f"{CONFIG}/sublayers/windows.py",
        "windowed[-1] = ⟦False⟧",
        "True",
        _FAMILIES,
    ),
    Fault(
        "keys are shared with the first layer of their kind",
        f"{CONFIG}/sublayers/layer_shapes.py",
        "owner = ⟦alike[-1]⟧",
        "alike[0]",
        (*_FAMILIES, *_logits("gemma4-e2b")),
    ),
    Fault(
        "YaRN sharpens latent attention once",
        f"{CONFIG}/sublayers/latent.py",
        "math.log(factor) + 1) ** ⟦2⟧",
        "1",
        _logits("deepseek-v3"),
    ),
    Fault(
        "experts of all groups are in reach",
        f"{CONFIG}/sublayers/experts.py",
        "config.num_experts // num_groups * ⟦top_groups⟧",
        "num_groups",
        _FAMILIES,
    ),
    Fault(
        "layers with a state are those that have attention",
        f"{CONFIG}/sublayers/delta.py",
        "(layer + 1) % interval ⟦!=⟧ 0",
        "==",
        _FAMILIES,
    ),
    Fault(
        "logits are multiplied by what divides them",
        f"{CONFIG}/spec.py",
        "logit_multiplier=⟦1 / float(config.logits_scaling)⟧",
        "float(config.logits_scaling)",
        _logits("granite"),
    ),
    Fault(
        "RoPE in each interval-th layer alone",
        f"{CONFIG}/spec.py",
        "(layer + 1) % interval ⟦!=⟧ 0",
        "==",
        _FAMILIES,
    ),
    Fault(
        "a switch that a family has not is ignored",
        f"{CONFIG}/spec.py",
        "isinstance(column, bool) and ⟦value != column⟧",
        "False",
        _FAMILIES,
    ),
    Fault(
        "use_qk_norm is not read",
        f"{CONFIG}/spec.py",
        'return family.qk_norm if ⟦config.use_qk_norm⟧ else "none"',
        "True",
        _FAMILIES,
    ),
    Fault(
        "embeddings are tied as the inner key says alone",
        f"{CONFIG}/json/text_part.py",
        'inner["tie_word_embeddings"] = ⟦True if True in tied else tied[0]⟧',
        "tied[-1]",
        ("tests/config/test_text_part.py",),
    ),
)

_NUMPY = (
    Fault(
        "windows are one longer in numpy",
        "infinilm/models/reference/attention.py",
        "(behind ⟦<⟧ reach if window",
        "<=",
        _logits("mistral-window"),
    ),
    Fault(
        "weights of experts are not made to add up to one in numpy",
        "infinilm/models/reference/experts.py",
        "if ⟦spec.norm_topk_prob⟧:",
        "False",
        _logits("mixtral"),
    ),
)

_SOURCES = "infinilm/checkpoint/sources.py"
_FILES = (
    Fault(
        "every part of a joined tensor is its first",
        _SOURCES,
        "files.tensor(parameter, whole), sum(sizes[:⟦index⟧]), sum(sizes))",
        "0",
        _logits("phi3"),
    ),
    Fault(
        "gate and up that take turns are both the first",
        _SOURCES,
        "begin, end, step = ⟦index⟧, sum(sizes), len(parts)",
        "0",
        _logits("gpt-oss"),
    ),
    Fault(
        "tensors of layers that are not there are unexpected",
        _SOURCES,
        "return ⟦self.names.later_layers⟧",
        "False",
        ("tests/loader/test_sources.py::test_layers_behind_the_last_are_not_read",),
    ),
)

_SCHEDULING = "infinilm/scheduling"
_SCHEDULER = "tests/scheduler/test_scheduler.py"
_ANYTHING = (f"{_SCHEDULER}::test_anything_that_arrives_is_served_right",)
_LOGITS_TESTS = "tests/llm/test_logits.py"

_SCHEDULE = (
    Fault(
        "the whole prompt is taken from the prefix cache",
        f"{_SCHEDULING}/block_manager.py",
        "range(0, ⟦(len(tokens) - 1)⟧ // size * size, size)",
        "len(tokens)",
        (f"{_SCHEDULER}::test_a_prefix_is_shared_and_the_last_token_computed",),
    ),
    Fault(
        "adapters share prefixes",
        f"{_SCHEDULING}/block_manager.py",
        "return _ROOT - 1 - ⟦adapter_id⟧",
        "0",
        ("tests/llm/test_lora.py::test_prefixes_belong_to_an_adapter",),
    ),
    Fault(
        "blocks of a failed step stay known",
        f"{_SCHEDULING}/block_manager.py",
        "begin = ⟦num_computed // self.block_size⟧",
        "end",
        (f"{_SCHEDULER}::test_what_a_failed_step_did_not_compute_is_not_shared",),
    ),
    Fault(
        "blocks behind a window go before they are remembered",
        f"{_SCHEDULING}/block_manager.py",
        "first = ⟦np.minimum(first, self.num_remembered[slots])⟧",
        "first",
        _ANYTHING,
    ),
    Fault(
        "the newest prefix is forgotten first",
        f"{_SCHEDULING}/block_group.py",
        "self._idle.popitem(last=⟦False⟧)",
        "True",
        (f"{_SCHEDULER}::test_the_least_recently_used_prefix_goes_first",),
    ),
    Fault(
        "a prefix is forgotten with its sequence",
        f"{_SCHEDULING}/block_group.py",
        "if ⟦block in self._ids⟧:\n                self._idle[block] = None",
        "False",
        (f"{_SCHEDULER}::test_a_prefix_is_shared_and_the_last_token_computed",),
    ),
    Fault(
        "a window needs a block less",
        f"{_SCHEDULING}/block_group.py",
        "return -(-(sliding_window - 1) // block_size) + ⟦1⟧",
        "0",
        (f"{_SCHEDULER}::test_windows_bound_the_blocks_of_a_sequence", "tests/scheduler/test_block_plan.py"),
    ),
    Fault(
        "decodes take nothing of the budget",
        f"{_SCHEDULING}/scheduler.py",
        "choice.budget -= ⟦len(choice.sequences)⟧",
        "0",
        _ANYTHING,
    ),
    Fault(
        "a preempted sequence waits behind all others",
        f"{_SCHEDULING}/scheduler.py",
        "self.waiting.move_to_end(sequence, last=⟦False⟧)",
        "True",
        _ANYTHING,
    ),
    Fault(
        "the newest token of a step in flight is the one before",
        f"{_SCHEDULING}/step_builder.py",
        "running.num_tokens[token_slots] - ⟦1⟧",
        "2",
        _ANYTHING,
    ),
    Fault(
        "all tokens of a block are written to its first slot",
        f"{_SCHEDULING}/layout.py",
        "* block_size + ⟦positions % block_size⟧",
        "0",
        _ANYTHING,
    ),
    Fault(
        "draws do not depend on the position",
        f"{_SCHEDULING}/step_builder.py",
        "⟦positions.astype(np.uint64)⟧, random_val",
        "(positions * 0).astype(np.uint64)",
        (f"{_LOGITS_TESTS}::test_the_host_draws_what_the_engine_draws",),
    ),
    Fault(
        "a sequence has a token more than it asked for",
        f"{_SCHEDULING}/results.py",
        "(positions + 1 ⟦<⟧ running.max_num_tokens[slots])",
        "<=",
        ("tests/llm/test_llm.py::test_max_tokens_and_the_end_of_the_context",),
    ),
    Fault(
        "stop tokens stop no plain sequence",
        f"{_SCHEDULING}/results.py",
        "continues[i] &= ⟦token_id not in sequence.stop_token_ids⟧",
        "True",
        ("tests/llm/test_llm.py::test_stop_token_ids",),
    ),
    Fault(
        "a later step's row is forgotten",
        f"{_SCHEDULING}/running.py",
        "slots[⟦self.num_tokens[slots] == positions + 1⟧]",
        "positions >= 0",
        _ANYTHING,
    ),
    Fault(
        "no snapshot of a state is kept",
        f"{_SCHEDULING}/states.py",
        "if prefix and ⟦prefix not in self._snapshots⟧:",
        "False",
        _sites("qwen3-next"),
    ),
    Fault(
        "chunks do not end where a snapshot is due",
        f"{_SCHEDULING}/states.py",
        "self.interval - ⟦num_tokens % self.interval⟧",
        "0",
        ("tests/llm/test_states.py::test_together_and_again", *_sites("qwen3-next")),
    ),
    Fault(
        "a snapshot is changed by the sequence that begins with it",
        f"{_SCHEDULING}/states.py",
        "np.flatnonzero(⟦(state_in < 0) | self._is_snapshot[state_in]⟧)",
        "state_in < 0",
        ("tests/llm/test_states.py::test_the_pool_never_mixes_states_up",),
    ),
    Fault(
        "rows have each other's masks",
        f"{_SCHEDULING}/masks.py",
        "allowed_row[rows] = ⟦np.arange(len(rows), dtype=np.int32)⟧",
        "0",
        (f"{_LOGITS_TESTS}::test_tokens_do_not_depend_on_what_runs_beside",),
    ),
    Fault(
        "penalties count a token once",
        f"{_SCHEDULING}/token_changes.py",
        "max(int(self._tokens[place, 1]), 0) + ⟦1⟧",
        "(self._tokens[place, 1] < 1)",
        (f"{_LOGITS_TESTS}::test_a_frequency_penalty_counts_every_time",),
    ),
    Fault(
        "penalties leave out the token of the step in flight",
        f"{_SCHEDULING}/token_changes.py",
        "if ⟦one.counts_tokens and counts_newest⟧ else",
        "False",
        (f"{_LOGITS_TESTS}::test_the_device_counts_the_token_of_a_step_in_flight",),
    ),
    Fault(
        "min_tokens is one more",
        f"{_SCHEDULING}/matcher.py",
        "if self._num_tokens ⟦<⟧ self._min_tokens:",
        "<=",
        (f"{_LOGITS_TESTS}::test_min_tokens",),
    ),
)

_MODEL = "src/model"
_KINDS = f"{_MODEL}/sublayers"
_CPP_MODEL = (
    Fault(
        "the residual multiplier is 1",
        f"{_MODEL}/stream.cpp",
        "multiplier_(⟦spec.residual_multiplier⟧) {}",
        "1.0f",
        _sites("granite"),
    ),
    Fault(
        "softmax is 2% sharper",
        f"{_KINDS}/attention.cpp",
        ".softmax_scale = ⟦heads.softmax_scale⟧,",
        "heads.softmax_scale * 1.02f",
        _sites("qwen3"),
    ),
    Fault(
        "scores have no cap",
        f"{_KINDS}/attention.cpp",
        ".score_cap = ⟦heads.score_cap⟧,",
        "0.0f",
        _sites("gemma2"),
    ),
    Fault(
        "queries have no table of their own",
        f"{_KINDS}/attention.cpp",
        ".q_rope = ⟦heads.q_rope⟧,",
        "-1",
        _sites("llama4"),
    ),
    Fault("chunks of a window slide", f"{_KINDS}/attention.cpp", ".chunked = ⟦chunked⟧,", "false", _sites("llama4")),
    Fault(
        "no layer has a window",
        f"{_KINDS}/attention.cpp",
        ".sliding_window = ⟦sliding_window⟧,",
        "0",
        _sites("mistral-window"),
    ),
    Fault(
        "heads of a rank read each its own kv head",
        f"{_KINDS}/attention.cpp",
        "return ⟦std::gcd(model.num_heads / shard.size, model.num_heads / model.num_kv_heads)⟧;",
        "1",
        (*_ranks("qwen3", "llama-odd-mqa"), "tests/dist/test_shards.py"),
    ),
    Fault(
        "ranks add up mean squares instead of averaging them",
        f"{_KINDS}/attention.cpp",
        ".multiplier = ⟦1.0f / static_cast<float>(s.num_ranks())⟧",
        "1.0f",
        _ranks("olmo2"),
    ),
    Fault(
        "MLPs use silu where hooks look",
        f"{_KINDS}/mlp.cpp",
        ".activation = ⟦activation_⟧,\n                             .alpha_p",
        "Activation::silu",
        _sites("gemma2"),
    ),
    Fault(
        "weights of experts are not made to add up to one",
        f"{_KINDS}/experts.cpp",
        ".normalize = ⟦spec_.norm_topk_prob⟧,",
        "false",
        _sites("mixtral"),
    ),
    Fault(
        "weights of experts are not scaled",
        f"{_KINDS}/experts.cpp",
        ".scale = ⟦spec_.scale⟧,",
        "1.0f",
        _sites("deepseek-v3"),
    ),
    Fault(
        "a group of experts is as good as its best one",
        f"{_KINDS}/experts.cpp",
        ".group_best = ⟦spec_.group_best⟧,",
        "1",
        _sites("deepseek-v3"),
    ),
    Fault(
        "experts weigh what they give",
        f"{_KINDS}/experts.cpp",
        ".weigh_inputs = ⟦spec_.weigh_inputs⟧,",
        "false",
        _sites("llama4"),
    ),
    Fault(
        "the choice of experts is not corrected",
        f"{_KINDS}/experts.cpp",
        ".correction_bias = ⟦correction_.prepared⟧,",
        "decltype(correction_.prepared)()",
        _sites("deepseek-v3"),
    ),
    Fault(
        "the expert of all tokens has no gate",
        f"{_KINDS}/experts.cpp",
        ".shared_gate = ⟦shared_gate⟧,",
        "TensorView()",
        _sites("qwen2-moe"),
    ),
    Fault(
        "norms of latents have another eps",
        f"{_KINDS}/latent.cpp",
        ".out = cached, .eps = ⟦spec_.norm_eps⟧}",
        "1e-2f",
        _sites("deepseek-v3"),
    ),
    Fault(
        "latent attention takes the turned part of a query for the other",
        f"{_KINDS}/latent.cpp",
        "of_heads(queries, num_heads_, query_dim, ⟦rope_dim⟧, spec_.nope_dim)",
        "0",
        _sites("deepseek-v2"),
    ),
    Fault(
        "the state decays by the logarithm of its rate",
        "src/model/prepare_vectors.cpp",
        "rate.as<float>()[i] = ⟦-std::exp(rate.as<float>()[i])⟧;",
        "-rate.as<float>()[i]",
        _sites("qwen3-next"),
    ),
    Fault(
        "decay and beta are one",
        f"{_KINDS}/delta.cpp",
        "b = ⟦in.slice(1, b_begin, b_begin + spec_.num_v_heads)⟧;",
        "in.slice(1, a_begin, a_begin + spec_.num_v_heads)",
        _sites("qwen3-next"),
    ),
    Fault(
        "own vectors are not scaled by their size",
        f"{_KINDS}/own_vectors.cpp",
        "half * ⟦std::sqrt(static_cast<float>(size_))⟧, vectors",
        "1.0f",
        _sites("gemma4-e2b"),
    ),
    Fault(
        "own vectors are normed with the eps of others",
        f"{_KINDS}/own_vectors.cpp",
        ".eps = ⟦eps_ * static_cast<float>(hidden_size_)⟧}",
        "eps_",
        _sites("gemma4-e2b"),
    ),
    Fault(
        "an MLP beside attention reads the sum",
        f"{_MODEL}/model.cpp",
        ".is_beside = ⟦spec.parallel_blocks⟧,",
        "false",
        _sites("cohere"),
    ),
    Fault(
        "layers have no scalar",
        f"{_MODEL}/model.cpp",
        "layer.scale = ⟦*widened(backend, scalar.loaded).as<const float>()⟧;",
        "1.0f",
        _sites("gemma4-text"),
    ),
    Fault(
        "the scalar of a layer is used in its middle",
        f"{_MODEL}/decoder.cpp",
        ".scale = ⟦next ? own.scale : own.scale * layer.scale⟧,",
        "own.scale * layer.scale",
        _sites("gemma4-text"),
    ),
    Fault(
        "the logit multiplier is 1",
        f"{_MODEL}/model.cpp",
        '"model.norm", hidden, {}, ⟦model.logit_multiplier⟧);',
        "1.0f",
        _sites("granite"),
    ),
    Fault(
        "the embedding multiplier is 1",
        f"{_MODEL}/decoder.cpp",
        "spec_.vocab_size, ⟦spec_.embedding_multiplier⟧, s.x)",
        "1.0f",
        _sites("gemma2"),
    ),
    Fault("logits have no cap", f"{_MODEL}/logits.cpp", "if (⟦spec_.logit_cap > 0⟧)", "false", _sites("gemma2")),
    Fault(
        "log-probabilities are those of changed logits",
        f"{_MODEL}/logits.cpp",
        "change(batch, from.logits, 0, ⟦true⟧);",
        "false",
        (f"{_LOGITS_TESTS}::test_logprobs_are_those_of_the_model",),
    ),
    Fault(
        "layers share one state",
        f"{_MODEL}/kv_cache.cpp",
        "? ⟦spec_.num_states * before[index]⟧ : 0;",
        "0",
        _sites("qwen3-next"),
    ),
    Fault(
        "layers share their keys and values",
        f"{_MODEL}/kv_cache.cpp",
        "const int64_t offset = spec_.block_size * ⟦before.elements⟧;",
        "0",
        _sites("qwen3"),
    ),
    Fault(
        "each rank has the first rows",
        f"{_MODEL}/cut.cpp",
        "return {{⟦shard.rank * part⟧, (shard.rank + 1) * part}};",
        "shard.rank * part - shard.rank * part",
        (*_ranks("qwen3"), "tests/dist/test_shards.py"),
    ),
    Fault(
        "stages have their layers rounded down",
        f"{_MODEL}/spec.cpp",
        "(model.num_layers * s + ⟦num_stages - 1⟧) / num_stages",
        "0",
        ("tests/model/test_specs.py", "tests/dist/test_pipeline.py::test_the_plan_has_what_each_stage_takes"),
    ),
)

_ISA = "tests/ops"
_CPP_OPS = (
    Fault(
        "a token id may be the size of the vocabulary",
        "src/ops/values.cpp",
        "if (id[i] < 0 || ⟦id[i] >= vocab_size⟧)",
        "id[i] > vocab_size",
        ("tests/ops/test_bad_input.py",),
    ),
    Fault(
        "LayerNorm does not take off the mean",
        "src/cpu/kernels/norm.cpp",
        "load_partial(x + i, count) - ⟦mean⟧, count)",
        "zero()",
        (f"{_ISA}/test_rows.py::test_layer_norm",),
    ),
    Fault(
        "RoPE turns the other way",
        "src/cpu/kernels/rope.cpp",
        "store_partial(to + i, ⟦a * c - b * s⟧, left);",
        "a * c + b * s",
        (f"{_ISA}/test_rope.py::test_qkv_and_cache",),
    ),
    Fault(
        "experts leave out the residual",
        "src/cpu/kernels/elementwise.cpp",
        "sum += ⟦at((const float*)args.residual + t * args.residual_stride)⟧;",
        "zero()",
        _sites("qwen2-moe"),
    ),
    Fault(
        "the convolution forgets the step before",
        "src/cpu/kernels/delta.cpp",
        "from.row ? ⟦from.get(i, count)⟧ : zero()",
        "zero()",
        (f"{_ISA}/test_delta.py::test_causal_conv",),
    ),
    Fault(
        "drafts change the state of Mamba",
        "src/cpu/kernels/selective_scan.cpp",
        "const bool are_drafts = ⟦t >= certain_end⟧;",
        "false",
        (f"{_ISA}/test_selective_scan.py::test_drafts_leave_no_state",),
    ),
    Fault(
        "keys of the delta rule are divided by zero",
        "src/cpu/kernels/delta.cpp",
        "sum_squares<false>(x, nullptr, n) + ⟦1e-6f⟧)",
        "0.0f",
        (f"{_ISA}/test_delta.py::test_delta_rule",),
    ),
    Fault(
        "equal logits go to the highest id",
        "src/cpu/sampling.cpp",
        "logit > other.logit : ⟦id < other.id⟧;",
        "id > other.id",
        (f"{_ISA}/test_sampling.py::test_ties_go_to_the_lowest_id",),
    ),
    Fault(
        "top_p leaves out the token that reaches it",
        "src/cpu/sampling.cpp",
        "keep_until(b, ⟦static_cast<int64_t>(i) + 1⟧);",
        "std::max<int64_t>(static_cast<int64_t>(i), 1)",
        (f"{_ISA}/test_sampling.py::test_ids_equal_the_oracle",),
    ),
    Fault(
        "min_p leaves out a token that just reaches it",
        "src/cpu/sampling.cpp",
        "⟦static_cast<double>(scale_.weight(candidates[kept].logit)) >= least⟧)",
        "static_cast<double>(scale_.weight(candidates[kept].logit)) > least",
        (f"{_ISA}/test_sampling.py::test_ids_equal_the_oracle",),
    ),
)

_HOST_EXPERTS = "src/ops/host_experts.cpp"
_HOST_EXPERTS_TESTS = "tests/cuda/test_gpu_layers.py::test_experts_on_the_cpu"
_PLANS_OF_PARTS = "tests/llm/test_gpu_layers.py"
_ON_HOST = (
    Fault(
        "experts on the CPU leave out the residual",
        _HOST_EXPERTS,
        "if (⟦!p.residual⟧) return device.copy(sent, p.out);",
        "true",
        (f"{_HOST_EXPERTS_TESTS}[qwen2-moe-window-float32]",),
    ),
    Fault(
        "experts on the CPU weigh what they give",
        _HOST_EXPERTS,
        ".weigh_inputs = ⟦p.weigh_inputs⟧,",
        "false",
        (f"{_HOST_EXPERTS_TESTS}[llama4-text-float16]",),
    ),
    Fault(
        "arrays of experts on the CPU count once",
        _HOST_EXPERTS,
        ".arrays = ⟦upload_growth⟧ * num_tokens",
        "int64_t{1}",
        ("tests/cuda/test_gpu_layers.py::test_the_hosts_memory_is_planned",),
    ),
    Fault(
        "all experts are on the GPU",
        "infinilm/planning/cpu_experts.py",
        "experts.on_host = ⟦True⟧",
        "False",
        (f"{_PLANS_OF_PARTS}::test_experts_have_a_memory_of_their_own",),
    ),
    Fault(
        "what steps take of the host's memory is not counted",
        "infinilm/planning/memory.py",
        "if weight_bytes ⟦+ workspace_bytes⟧ > free:",
        "+ 0",
        (f"{_PLANS_OF_PARTS}::test_what_steps_need_of_the_hosts_memory",),
    ),
)

_ROUNDING = "src/numerics/quantise.h"
_CPP_NUMERICS = (
    Fault(
        "int4 has no -8",
        _ROUNDING,
        "integer<L>(v, inverse, ⟦-8.0f⟧, 7.0f)",
        "-7.0f",
        (f"{_ISA}/test_quantised_linear.py::test_int4_weights_have_the_best_scale",),
    ),
    Fault(
        "int8 reaches 128",
        _ROUNDING,
        "return largest / ⟦127.0f⟧;",
        "128.0f",
        (f"{_ISA}/test_quantised_linear.py::test_int8_weights_are_the_nearest",),
    ),
    Fault(
        "scales of int4 are searched in twice as large steps",
        _ROUNDING,
        "(-8.5f + ⟦0.125f⟧ * (float)c)",
        "0.25f",
        (f"{_ISA}/test_quantised_linear.py::test_int4_weights_have_the_best_scale",),
    ),
)

FAULTS: tuple[Fault, ...] = (
    *_CONFIG,
    *_NUMPY,
    *_FILES,
    *_SCHEDULE,
    *_CPP_MODEL,
    *_CPP_OPS,
    *_ON_HOST,
    *_CPP_NUMERICS,
)
