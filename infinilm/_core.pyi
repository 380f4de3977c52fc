"""The C++ core of infinilm: tensors, ops and the engine."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy
from numpy.typing import NDArray


class Tensor:
    """
    An n-dimensional array that shares memory with its owner; exchanges with other libraries through DLPack.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def strides(self) -> tuple[int, ...]:
        """In elements."""

    @property
    def dtype(self) -> str:
        """Such as 'bfloat16'."""

    @property
    def device(self) -> str:
        """Such as 'cpu'."""

    def numpy(self) -> numpy.ndarray:
        """
        A numpy array that shares the memory; bfloat16, which numpy lacks, comes as a float32 copy.
        """

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """As numpy(), for numpy's own functions."""

    def memory(self) -> Any:
        """
        The bytes of a contiguous tensor, as a numpy array of uint8 that shares them; read-only where the tensor is.
        """

    def __dlpack__(self, **kwargs: object) -> Any: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...

    def __repr__(self) -> str: ...

def from_numpy(array: object, dtype: str | None = None) -> Tensor:
    """
    A tensor that shares the array's memory; a uint16 array needs dtype='bfloat16' or 'float16'.
    """

def from_dlpack(object: object) -> Tensor:
    """A tensor that shares the memory of any DLPack or buffer object."""

def cpu_isas() -> list[str]:
    """Builds of the CPU kernels that this machine can run, slowest first."""

def selected_cpu_isa() -> str:
    """The one used unless told otherwise."""

def cpu_multiplies_bf16() -> bool:
    """
    Whether it multiplies bfloat16 by bfloat16, so that compute_dtype bfloat16 rounds the inputs of linears.
    """

def cpu_fuses_products() -> bool:
    """
    Whether it rounds a product and its sum once. All that do give the same bits, but for products of bfloat16.
    """

def parse_device(device: str) -> tuple[str, int]:
    """Kind and index of a device such as 'cuda:1'. ConfigError: it is none."""

def cuda_devices() -> list[dict[str, Any]]:
    """The usable GPUs, at least one. DeviceError: why there is none."""

def cuda_free_bytes(device: int) -> int:
    """
    Bytes of memory that are free on a GPU. Takes some of them, if this process does not use that GPU yet.
    """

def default_num_threads() -> int:
    """Cores this process may use, no more than its cgroups' quota."""

def measure_cpu_limits(num_threads: int = 0, compute_dtype: str = 'float32', buffer_bytes: int = 1073741824) -> tuple[float, float]:
    """
    Measured read bandwidth in bytes/s and arithmetic peak in flop/s. buffer_bytes: what is read, 64 MiB to 1 GiB.
    """

class Backend:
    """
    The ops of one device, for tests and experiments; one thread at a time.
    """

    def __init__(self, device: str, isa: str = '', num_threads: int = 0, compute_dtype: str = 'float32') -> None: ...

    def prepare_linear(self, parts: Sequence[tuple[Tensor, Tensor | None]], kind: str = 'plain', head_dim: int = 0, quantization: str = 'none', types: Sequence[str] = []) -> PreparedLinear:
        """
        parts: weight and bias of each. types: of parts that are blocks, as load_param takes them.
        """

    def adopt_linear(self, panels: Tensor, scales: Tensor | None, out_features: Sequence[int], in_features: int, kind: str = 'plain', head_dim: int = 0) -> PreparedLinear:
        """A linear of the tensors of another one; out_features: of each part."""

    def unpack_linear(self, linear: PreparedLinear, part: int = 0) -> Tensor: ...

    def linear(self, x: Tensor, weight: PreparedLinear, out: Tensor, residual: Tensor | None = None, norm: Tensor | None = None, scratch: Tensor | None = None, eps: float = 0.0, activation: str = 'silu') -> None:
        """With norm ([in_features]): of rms_norm(x); scratch is as large as x."""

    def linear_act(self, x: Tensor, weight: PreparedLinear, out: Tensor, activation: str) -> None:
        """activation(linear of a plain weight)."""

    def head_linear(self, x: Tensor, weight: PreparedLinear, out: Tensor) -> None:
        """x: [num_tokens, num_heads, in_features]; weight: by_head."""

    def lora(self, x: Tensor, parts: Sequence[tuple[PreparedLinear, PreparedLinear, float, Tensor]], out: Tensor, inner: Tensor, delta: Tensor) -> None:
        """parts: (a, b, scale, rows) of each adapter; out is changed in place."""

    def embedding(self, ids: Tensor, table: Tensor, out: Tensor, first_id: int | None = None, quantization: str = 'none', multiplier: float = 1.0, known_ids: int = 0) -> None:
        """
        table: [vocab_size, hidden_size], prepared for this call, or the rows of it from first_id on.
        """

    def rms_norm(self, x: Tensor, weight: Tensor, out: Tensor, eps: float, mean_square: Tensor | None = None, num_groups: int = 1) -> None: ...

    def mean_square(self, x: Tensor, out: Tensor, multiplier: float = 1.0) -> None: ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor | None, out: Tensor, eps: float, multiplier: float = 1.0, scale: float = 1.0) -> None: ...

    def row_moment(self, x: Tensor, out: Tensor, multiplier: float = 1.0, centre: Tensor | None = None) -> None:
        """
        out = multiplier * mean(x), or with a centre, multiplier * mean((x - centre)^2), of each row.
        """

    def sparsify(self, x: Tensor, mean: Tensor, variance: Tensor, deviations: float) -> None:
        """x = max(x - (mean + deviations * sqrt(variance)), 0), in place."""

    def match_rms(self, x: Tensor, like: Tensor, least: float) -> None:
        """x = x * rms(like) / max(rms(x), sqrt(least)), in place."""

    def mix_streams(self, x: Tensor, streams: Tensor, router: Tensor, coefficients: Tensor, corrects: bool, eps: float, scale: Tensor | None = None, scaled: Tensor | None = None) -> None:
        """
        A step of alternating updates: x and streams [num_streams, num_tokens, hidden_size], in place.
        """

    def act_mul(self, gate_up: Tensor, out: Tensor, activation: str = 'silu', up: Tensor | None = None, alpha_p: float = 0.0, alpha_n: float = 0.0, limit: float = 0.0) -> None: ...

    def clip(self, x: Tensor, out: Tensor, low: float, high: float) -> None:
        """out = min(max(x, low), high); NaN stays."""

    def soft_cap(self, x: Tensor, cap: float) -> None:
        """x = cap * tanh(x / cap), in place."""

    def gather_rows(self, x: Tensor, rows: Tensor, out: Tensor) -> None: ...

    def sum_parts(self, parts: Tensor, out: Tensor) -> None: ...

    def rope_table(self, positions: Tensor, inv_freq: Tensor, attention_factor: float, cos_sin: Tensor, scale_beta: float = 0.0, scale_positions: int = 1, axes: Tensor | None = None) -> None: ...

    def qk_norm_rope_store_kv(self, qkv: Tensor, cos_sin: Tensor | None, q_norm: Tensor | None, k_norm: Tensor | None, slot_mapping: Tensor | None, k_cache: Tensor, v_cache: Tensor | None, num_heads: int, num_kv_heads: int, head_dim: int, eps: float, k_scales: Tensor | None = None, v_scales: Tensor | None = None, v_norm: Tensor | None = None, q_turned: Tensor | None = None, value_dim: int = 0) -> None: ...

    def paged_attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor | None, block_table: Tensor, cu_seqlens_q: Tensor, context_lens: Tensor, out: Tensor, softmax_scale: float, sliding_window: int = 0, k_scales: Tensor | None = None, v_scales: Tensor | None = None, score_cap: float = 0.0, sinks: Tensor | None = None, two_way: bool = False, position_bias: Tensor | None = None, two_way_seqs: Tensor | None = None) -> None: ...

    def choose_keys(self, q: Tensor, weights: Tensor | None, k_cache: Tensor, block_table: Tensor, cu_seqlens_q: Tensor, context_lens: Tensor, slots: Tensor, k_scales: Tensor | None = None, run_keys: int = 1, last_runs: int = 0, slot_heads: int = 1, slot_head: int = 0) -> None: ...

    def route(self, logits: Tensor, ids: Tensor, weights: Tensor, scoring: str = 'softmax', normalize: bool = False, scale: float = 1.0, correction_bias: Tensor | None = None, num_groups: int = 1, top_groups: int = 1, expert_scales: Tensor | None = None, group_best: int = 2, tolerance: float = 0.0) -> None: ...

    def experts(self, x: Tensor, ids: Tensor, weights: Tensor, gate_up: Sequence[PreparedLinear], down: Sequence[PreparedLinear], out: Tensor, inner: Tensor, parts: Tensor, shared: Tensor | None = None, shared_gate: Tensor | None = None, residual: Tensor | None = None, activation: str = 'silu', limit: float = 0.0) -> None:
        """gate_up, down: [num_experts], put together for this call."""

    def causal_conv(self, x: Tensor, weight: Tensor, state: Tensor, cu_seqlens_q: Tensor, state_in: Tensor, state_out: Tensor, out: Tensor, state_tokens: Tensor | None = None, gate_in: Tensor | None = None, gate_out: Tensor | None = None, bias: Tensor | None = None, num_replayed: Tensor | None = None, x_log: Tensor | None = None, gate_in_log: Tensor | None = None) -> None: ...

    def delta_rule(self, qkv: Tensor, z: Tensor, a: Tensor, b: Tensor, decay_rate: Tensor, dt_bias: Tensor, norm: Tensor, state: Tensor, cu_seqlens_q: Tensor, state_in: Tensor, state_out: Tensor, gates: Tensor, out: Tensor, num_k_heads: int, eps: float, state_tokens: Tensor | None = None, num_replayed: Tensor | None = None, kv_log: Tensor | None = None, a_log: Tensor | None = None, b_log: Tensor | None = None, by_element: bool = False, sigmoid_gate: bool = False, doubled_beta: bool = False, lower_bound: float = 0.0) -> None: ...

    def selective_scan(self, xbc: Tensor, dt: Tensor, decay_rate: Tensor, dt_bias: Tensor, skip: Tensor, state: Tensor, cu_seqlens_q: Tensor, state_in: Tensor, state_out: Tensor, gates: Tensor, out: Tensor, num_groups: int, dt_multiplier: float = 1.0, dt_min: float = 0.0, dt_max: float = 3.4028234663852886e+38, state_tokens: Tensor | None = None, num_replayed: Tensor | None = None, xb_log: Tensor | None = None, dt_log: Tensor | None = None) -> None: ...

    def log_drafts(self, parts: Sequence[Tensor], log: Tensor, cu_seqlens_q: Tensor, state_in: Tensor, state_out: Tensor, state_tokens: Tensor) -> None: ...

    def gated_norm(self, x: Tensor, gate: Tensor, weight: Tensor | None, out: Tensor, group_size: int, eps: float, norm_first: bool = False, gate_multiplier: float = 1.0) -> None: ...

    def find_best(self, logits: Tensor, best: Tensor, ids: Tensor, first_id: int = 0, allowed: Tensor | None = None, allowed_row: Tensor | None = None) -> None: ...

    def log_probs(self, logits: Tensor, drawn: Tensor, num_logprobs: Tensor, ids: Tensor, logprobs: Tensor) -> None: ...

    def sample(self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, random_val: Tensor, ids: Tensor, token_ids: Tensor | None = None, allowed: Tensor | None = None, allowed_row: Tensor | None = None) -> None: ...

class PreparedLinear:
    """Weights of a linear in a backend's own form."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...

    @property
    def tensors(self) -> tuple[Tensor | None, Tensor | None]:
        """
        Panels and scales, as adopt_linear takes them; None where there are none.
        """

def uniform(seed: int, position: int) -> float:
    """The uniform draw in [0, 1) of a request's seed at a position."""

def fill_uniform(seeds: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], positions: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')]) -> None:
    """uniform() for many requests at once."""

def change_logits(logits: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], penalties: Annotated[NDArray[numpy.float32], dict(shape=(3), order='C', device='cpu', writable=False)], tokens: Annotated[NDArray[numpy.int32], dict(shape=(None, 3), order='C', device='cpu', writable=False)]) -> None:
    """
    What penalties [3] and tokens [num_changes, 3], as Batch has them for each row, change in logits [vocab_size], in place.
    """

class IndexerSpec:
    """An indexer, by which a token chooses the keys that it reads."""

    def __init__(self, num_heads: int = 0, head_dim: int = 0, top_k: int = 0, shared: bool = False, norm_eps: float = 0.0, by_head: bool = False, run_keys: int = 1, last_runs: int = 0) -> None: ...

    @property
    def num_heads(self) -> int: ...

    @num_heads.setter
    def num_heads(self, arg: int, /) -> None: ...

    @property
    def head_dim(self) -> int: ...

    @head_dim.setter
    def head_dim(self, arg: int, /) -> None: ...

    @property
    def top_k(self) -> int:
        """Keys that a token reads."""

    @top_k.setter
    def top_k(self, arg: int, /) -> None: ...

    @property
    def shared(self) -> bool:
        """A token reads the keys that it chose in the layer before."""

    @shared.setter
    def shared(self, arg: bool, /) -> None: ...

    @property
    def norm_eps(self) -> float:
        """Epsilon in the norms of keys and of queries."""

    @norm_eps.setter
    def norm_eps(self, arg: float, /) -> None: ...

    @property
    def by_head(self) -> bool:
        """Each head chooses for one head of keys, by its own scores."""

    @by_head.setter
    def by_head(self, arg: bool, /) -> None: ...

    @property
    def run_keys(self) -> int:
        """Neighbouring keys that are chosen together."""

    @run_keys.setter
    def run_keys(self, arg: int, /) -> None: ...

    @property
    def last_runs(self) -> int:
        """Runs at the end of what a token sees that it always reads."""

    @last_runs.setter
    def last_runs(self, arg: int, /) -> None: ...

    def __repr__(self) -> str: ...

class AttentionSpec:
    """Attention over the keys and values of each head."""

    def __init__(self, num_heads: int = 0, num_kv_heads: int = 0, head_dim: int = 0, v_head_dim: int = 0, softmax_scale: float = 0.0, score_cap: float = 0.0, sliding_window: int = 0, chunked: bool = False, rope: int = -1, q_rope: int = -1, kv_owner: int = -1, qkv_bias: bool = False, out_bias: bool = False, clip_qkv: float = 0.0, sinks: bool = False, output_gate: bool = False, gate_by_head: bool = False, softplus_gate: bool = False, qk_norm: str = 'none', v_norm: bool = False, out_multiplier: float = 1.0, inputs: int = 1, two_way: bool = False, spans: bool = True, indexer: IndexerSpec | None = None) -> None: ...

    @property
    def num_heads(self) -> int: ...

    @num_heads.setter
    def num_heads(self, arg: int, /) -> None: ...

    @property
    def num_kv_heads(self) -> int: ...

    @num_kv_heads.setter
    def num_kv_heads(self, arg: int, /) -> None: ...

    @property
    def head_dim(self) -> int: ...

    @head_dim.setter
    def head_dim(self, arg: int, /) -> None: ...

    @property
    def v_head_dim(self) -> int:
        """Elements of a head's value, at most head_dim; 0: head_dim."""

    @v_head_dim.setter
    def v_head_dim(self, arg: int, /) -> None: ...

    @property
    def softmax_scale(self) -> float: ...

    @softmax_scale.setter
    def softmax_scale(self, arg: float, /) -> None: ...

    @property
    def score_cap(self) -> float:
        """Scores s become score_cap * tanh(s / score_cap); 0: they stay."""

    @score_cap.setter
    def score_cap(self, arg: float, /) -> None: ...

    @property
    def sliding_window(self) -> int:
        """Keys that a token sees; 0: all."""

    @sliding_window.setter
    def sliding_window(self, arg: int, /) -> None: ...

    @property
    def chunked(self) -> bool:
        """The window begins where the position is a multiple of its size."""

    @chunked.setter
    def chunked(self, arg: bool, /) -> None: ...

    @property
    def rope(self) -> int:
        """An index into ModelSpec.ropes; -1: none."""

    @rope.setter
    def rope(self, arg: int, /) -> None: ...

    @property
    def q_rope(self) -> int:
        """What turns q, where that is another; else -1."""

    @q_rope.setter
    def q_rope(self, arg: int, /) -> None: ...

    @property
    def kv_owner(self) -> int:
        """The earlier layer whose keys and values it reads; -1: it has its own."""

    @kv_owner.setter
    def kv_owner(self, arg: int, /) -> None: ...

    @property
    def qkv_bias(self) -> bool: ...

    @qkv_bias.setter
    def qkv_bias(self, arg: bool, /) -> None: ...

    @property
    def out_bias(self) -> bool: ...

    @out_bias.setter
    def out_bias(self, arg: bool, /) -> None: ...

    @property
    def clip_qkv(self) -> float:
        """
        Elements of q, k and v are clipped to -clip_qkv and clip_qkv; 0: they stay.
        """

    @clip_qkv.setter
    def clip_qkv(self, arg: float, /) -> None: ...

    @property
    def sinks(self) -> bool:
        """Each head has a number that joins the softmax of its scores."""

    @sinks.setter
    def sinks(self, arg: bool, /) -> None: ...

    @property
    def output_gate(self) -> bool:
        """Its result is multiplied by the sigmoid of a linear."""

    @output_gate.setter
    def output_gate(self, arg: bool, /) -> None: ...

    @property
    def gate_by_head(self) -> bool:
        """That linear gives one number for each head."""

    @gate_by_head.setter
    def gate_by_head(self, arg: bool, /) -> None: ...

    @property
    def softplus_gate(self) -> bool:
        """It is softplus, and not sigmoid."""

    @softplus_gate.setter
    def softplus_gate(self, arg: bool, /) -> None: ...

    @property
    def qk_norm(self) -> str:
        """none, head, all, head_behind_rope, turned_heads or layer_of_heads."""

    @qk_norm.setter
    def qk_norm(self, arg: str, /) -> None: ...

    @property
    def v_norm(self) -> bool:
        """RMSNorm of each head of v, without weight."""

    @v_norm.setter
    def v_norm(self, arg: bool, /) -> None: ...

    @property
    def out_multiplier(self) -> float:
        """Multiplies what it adds."""

    @out_multiplier.setter
    def out_multiplier(self, arg: float, /) -> None: ...

    @property
    def inputs(self) -> int:
        """It reads rows of so many times hidden_size."""

    @inputs.setter
    def inputs(self, arg: int, /) -> None: ...

    @property
    def two_way(self) -> bool:
        """Tokens see those behind them, too, as encoders do."""

    @two_way.setter
    def two_way(self, arg: bool, /) -> None: ...

    @property
    def spans(self) -> bool:
        """Tokens of a span, such as an image, see all of it, where steps say so."""

    @spans.setter
    def spans(self, arg: bool, /) -> None: ...

    @property
    def indexer(self) -> IndexerSpec | None:
        """By which each token chooses what it reads; None: it reads all."""

    @indexer.setter
    def indexer(self, value: IndexerSpec | None) -> None: ...

    def __repr__(self) -> str: ...

class LatentSpec:
    """Attention whose keys and values are made of a latent of each token."""

    def __init__(self, num_heads: int = 0, q_rank: int = 0, kv_rank: int = 0, rope_dim: int = 0, nope_dim: int = 0, v_dim: int = 0, norm_eps: float = 0.0, softmax_scale: float = 0.0, rope: int = -1, q_scale: int = -1, latent_bias: bool = False, out_bias: bool = False, head_gate: bool = False, indexer: IndexerSpec | None = None) -> None: ...

    @property
    def num_heads(self) -> int: ...

    @num_heads.setter
    def num_heads(self, arg: int, /) -> None: ...

    @property
    def q_rank(self) -> int:
        """0: queries are made of the hidden state."""

    @q_rank.setter
    def q_rank(self, arg: int, /) -> None: ...

    @property
    def kv_rank(self) -> int: ...

    @kv_rank.setter
    def kv_rank(self, arg: int, /) -> None: ...

    @property
    def rope_dim(self) -> int:
        """Elements of a query that RoPE turns."""

    @rope_dim.setter
    def rope_dim(self, arg: int, /) -> None: ...

    @property
    def nope_dim(self) -> int:
        """And what it does not."""

    @nope_dim.setter
    def nope_dim(self, arg: int, /) -> None: ...

    @property
    def v_dim(self) -> int:
        """Elements of a heads values."""

    @v_dim.setter
    def v_dim(self, arg: int, /) -> None: ...

    @property
    def norm_eps(self) -> float:
        """Epsilon in the norms of latents."""

    @norm_eps.setter
    def norm_eps(self, arg: float, /) -> None: ...

    @property
    def softmax_scale(self) -> float: ...

    @softmax_scale.setter
    def softmax_scale(self, arg: float, /) -> None: ...

    @property
    def rope(self) -> int:
        """An index into ModelSpec.ropes."""

    @rope.setter
    def rope(self, arg: int, /) -> None: ...

    @property
    def q_scale(self) -> int:
        """The rope that scales whole queries by their position; -1: none."""

    @q_scale.setter
    def q_scale(self, arg: int, /) -> None: ...

    @property
    def latent_bias(self) -> bool:
        """The linears that make latents have biases."""

    @latent_bias.setter
    def latent_bias(self, arg: bool, /) -> None: ...

    @property
    def out_bias(self) -> bool: ...

    @out_bias.setter
    def out_bias(self, arg: bool, /) -> None: ...

    @property
    def head_gate(self) -> bool:
        """What a head gives is multiplied by the sigmoid of a linear."""

    @head_gate.setter
    def head_gate(self, arg: bool, /) -> None: ...

    @property
    def indexer(self) -> IndexerSpec | None:
        """By which each token chooses what it reads; None: it reads all."""

    @indexer.setter
    def indexer(self, value: IndexerSpec | None) -> None: ...

    def __repr__(self) -> str: ...

    @property
    def query_dim(self) -> int:
        """A head of a query."""

    @property
    def row_dim(self) -> int:
        """What the cache has of a token."""

class DeltaSpec:
    """A causal convolution and the gated delta rule."""

    def __init__(self, num_k_heads: int = 0, num_v_heads: int = 0, k_dim: int = 0, v_dim: int = 0, conv_size: int = 0, by_element: bool = False, apart: bool = False, doubled_beta: bool = False, norm_eps: float = 0.0, lower_bound: float = 0.0, gate_rank: int = 0) -> None: ...

    @property
    def num_k_heads(self) -> int:
        """Heads of q and k."""

    @num_k_heads.setter
    def num_k_heads(self, arg: int, /) -> None: ...

    @property
    def num_v_heads(self) -> int: ...

    @num_v_heads.setter
    def num_v_heads(self, arg: int, /) -> None: ...

    @property
    def k_dim(self) -> int:
        """Elements of a head of q and k."""

    @k_dim.setter
    def k_dim(self, arg: int, /) -> None: ...

    @property
    def v_dim(self) -> int: ...

    @v_dim.setter
    def v_dim(self, arg: int, /) -> None: ...

    @property
    def conv_size(self) -> int:
        """Tokens that the convolution sees."""

    @conv_size.setter
    def conv_size(self, arg: int, /) -> None: ...

    @property
    def by_element(self) -> bool:
        """Each row of a state has a decay of its own."""

    @by_element.setter
    def by_element(self, arg: bool, /) -> None: ...

    @property
    def apart(self) -> bool:
        """Q, k and v have linears and convolutions of their own."""

    @apart.setter
    def apart(self, arg: bool, /) -> None: ...

    @property
    def doubled_beta(self) -> bool:
        """What a token changes of a state is twice as much."""

    @doubled_beta.setter
    def doubled_beta(self, arg: bool, /) -> None: ...

    @property
    def norm_eps(self) -> float:
        """Of the norm of what it gives; 0: rms_norm_eps."""

    @norm_eps.setter
    def norm_eps(self, arg: float, /) -> None: ...

    @property
    def lower_bound(self) -> float:
        """
        Of the logarithms of decays, which come through a sigmoid then; 0: there is none.
        """

    @lower_bound.setter
    def lower_bound(self, arg: float, /) -> None: ...

    @property
    def gate_rank(self) -> int:
        """Elements that decays and the gate are made of; 0: the hidden state."""

    @gate_rank.setter
    def gate_rank(self, arg: int, /) -> None: ...

    def __repr__(self) -> str: ...

    @property
    def k_size(self) -> int:
        """All heads of q, or of k."""

    @property
    def v_size(self) -> int:
        """All heads of v."""

class ShortConvSpec:
    """A convolution over the last tokens, between two gates."""

    def __init__(self, channels: int = 0, conv_size: int = 0) -> None: ...

    @property
    def channels(self) -> int: ...

    @channels.setter
    def channels(self, arg: int, /) -> None: ...

    @property
    def conv_size(self) -> int:
        """Tokens that the convolution sees."""

    @conv_size.setter
    def conv_size(self, arg: int, /) -> None: ...

    def __repr__(self) -> str: ...

class MambaSpec:
    """A causal convolution and the state space of Mamba-2."""

    def __init__(self, num_heads: int = 0, head_dim: int = 0, num_groups: int = 0, state_dim: int = 0, conv_size: int = 0, conv_bias: bool = False, proj_bias: bool = False, norm: str = 'behind_gate', dt_min: float = 0.0, dt_max: float = 3.4028234663852886e+38, gate_multiplier: float = 1.0, x_multiplier: float = 1.0, b_multiplier: float = 1.0, c_multiplier: float = 1.0, dt_multiplier: float = 1.0, out_multiplier: float = 1.0) -> None: ...

    @property
    def num_heads(self) -> int:
        """Heads of x."""

    @num_heads.setter
    def num_heads(self, arg: int, /) -> None: ...

    @property
    def head_dim(self) -> int:
        """Elements of a head of x."""

    @head_dim.setter
    def head_dim(self, arg: int, /) -> None: ...

    @property
    def num_groups(self) -> int:
        """Groups of heads with the same B and C."""

    @num_groups.setter
    def num_groups(self, arg: int, /) -> None: ...

    @property
    def state_dim(self) -> int:
        """Elements of a group of B, or of C."""

    @state_dim.setter
    def state_dim(self, arg: int, /) -> None: ...

    @property
    def conv_size(self) -> int:
        """Tokens that the convolution sees."""

    @conv_size.setter
    def conv_size(self, arg: int, /) -> None: ...

    @property
    def conv_bias(self) -> bool: ...

    @conv_bias.setter
    def conv_bias(self, arg: bool, /) -> None: ...

    @property
    def proj_bias(self) -> bool:
        """Whether both linears have one."""

    @proj_bias.setter
    def proj_bias(self, arg: bool, /) -> None: ...

    @property
    def norm(self) -> str:
        """RMSNorm of each group of heads: none, behind_gate or before_gate."""

    @norm.setter
    def norm(self, arg: str, /) -> None: ...

    @property
    def dt_min(self) -> float:
        """The least step."""

    @dt_min.setter
    def dt_min(self, arg: float, /) -> None: ...

    @property
    def dt_max(self) -> float: ...

    @dt_max.setter
    def dt_max(self, arg: float, /) -> None: ...

    @property
    def gate_multiplier(self) -> float:
        """Multiplies the gate that the first linear makes."""

    @gate_multiplier.setter
    def gate_multiplier(self, arg: float, /) -> None: ...

    @property
    def x_multiplier(self) -> float: ...

    @x_multiplier.setter
    def x_multiplier(self, arg: float, /) -> None: ...

    @property
    def b_multiplier(self) -> float: ...

    @b_multiplier.setter
    def b_multiplier(self, arg: float, /) -> None: ...

    @property
    def c_multiplier(self) -> float: ...

    @c_multiplier.setter
    def c_multiplier(self, arg: float, /) -> None: ...

    @property
    def dt_multiplier(self) -> float: ...

    @dt_multiplier.setter
    def dt_multiplier(self, arg: float, /) -> None: ...

    @property
    def out_multiplier(self) -> float:
        """Multiplies what it adds."""

    @out_multiplier.setter
    def out_multiplier(self, arg: float, /) -> None: ...

    def __repr__(self) -> str: ...

    @property
    def size(self) -> int:
        """All heads of x."""

    @property
    def group_size(self) -> int:
        """All groups of B, or of C."""

class MlpSpec:
    """down(activation(gate) * up), or down(activation(up))."""

    def __init__(self, intermediate_size: int = 0, bias: bool = False, down_bias: bool = False, gated: bool = True, activation: str = 'silu', gate_deviations: float | None = None, limit: float = 0.0, in_multiplier: float = 1.0, out_multiplier: float = 1.0) -> None: ...

    @property
    def intermediate_size(self) -> int: ...

    @intermediate_size.setter
    def intermediate_size(self, arg: int, /) -> None: ...

    @property
    def bias(self) -> bool:
        """Whether all linears have one."""

    @bias.setter
    def bias(self, arg: bool, /) -> None: ...

    @property
    def down_bias(self) -> bool:
        """Whether the last linear alone has one."""

    @down_bias.setter
    def down_bias(self, arg: bool, /) -> None: ...

    @property
    def gated(self) -> bool:
        """down(activation(gate) * up); else down(activation(up))."""

    @gated.setter
    def gated(self, arg: bool, /) -> None: ...

    @property
    def activation(self) -> str: ...

    @activation.setter
    def activation(self, arg: str, /) -> None: ...

    @property
    def gate_deviations(self) -> float | None:
        """
        Standard deviations above its mean from which on the gate of a token is left, less that; None: all of it.
        """

    @gate_deviations.setter
    def gate_deviations(self, value: float | None) -> None: ...

    @property
    def limit(self) -> float:
        """
        Of clamped_silu: what silu of the gate is at most, and up in both directions.
        """

    @limit.setter
    def limit(self, arg: float, /) -> None: ...

    @property
    def in_multiplier(self) -> float:
        """Multiplies the norm that it reads."""

    @in_multiplier.setter
    def in_multiplier(self, arg: float, /) -> None: ...

    @property
    def out_multiplier(self) -> float:
        """Multiplies what it adds."""

    @out_multiplier.setter
    def out_multiplier(self, arg: float, /) -> None: ...

    def __repr__(self) -> str: ...

class ExpertsSpec:
    """Experts, of which each token goes to some."""

    def __init__(self, count: int = 0, top_k: int = 0, expert: MlpSpec = ..., latent_size: int = 0, shared: MlpSpec | None = None, shared_gate: bool = False, router_bias: bool = False, scoring: str = 'softmax', tolerance: float = 0.0, correction_bias: bool = False, norm_topk_prob: bool = False, scale: float = 1.0, num_groups: int = 1, top_groups: int = 1, group_best: int = 2, weigh_inputs: bool = False, post_norm: bool = False, out_multiplier: float = 1.0, on_host: bool = False) -> None: ...

    @property
    def count(self) -> int: ...

    @count.setter
    def count(self, arg: int, /) -> None: ...

    @property
    def top_k(self) -> int:
        """Experts that compute a token."""

    @top_k.setter
    def top_k(self, arg: int, /) -> None: ...

    @property
    def expert(self) -> MlpSpec:
        """Each of them."""

    @expert.setter
    def expert(self, arg: MlpSpec, /) -> None: ...

    @property
    def latent_size(self) -> int:
        """Experts read and give so many elements; 0: hidden_size."""

    @latent_size.setter
    def latent_size(self, arg: int, /) -> None: ...

    @property
    def shared(self) -> MlpSpec | None:
        """One that all tokens go to."""

    @shared.setter
    def shared(self, value: MlpSpec | None) -> None: ...

    @property
    def shared_gate(self) -> bool:
        """Its result is weighed by the sigmoid of a logit."""

    @shared_gate.setter
    def shared_gate(self, arg: bool, /) -> None: ...

    @property
    def router_bias(self) -> bool: ...

    @router_bias.setter
    def router_bias(self, arg: bool, /) -> None: ...

    @property
    def scoring(self) -> str:
        """softmax, sigmoid or sparse_mixer."""

    @scoring.setter
    def scoring(self, arg: str, /) -> None: ...

    @property
    def tolerance(self) -> float:
        """How far from the best an expert counts; of sparse_mixer."""

    @tolerance.setter
    def tolerance(self, arg: float, /) -> None: ...

    @property
    def correction_bias(self) -> bool:
        """Added to scores for the choice alone."""

    @correction_bias.setter
    def correction_bias(self, arg: bool, /) -> None: ...

    @property
    def norm_topk_prob(self) -> bool: ...

    @norm_topk_prob.setter
    def norm_topk_prob(self, arg: bool, /) -> None: ...

    @property
    def scale(self) -> float:
        """Multiplies the weights of a token's experts."""

    @scale.setter
    def scale(self, arg: float, /) -> None: ...

    @property
    def num_groups(self) -> int: ...

    @num_groups.setter
    def num_groups(self, arg: int, /) -> None: ...

    @property
    def top_groups(self) -> int:
        """A token's experts are those of its best groups."""

    @top_groups.setter
    def top_groups(self, arg: int, /) -> None: ...

    @property
    def group_best(self) -> int:
        """Experts of a group that say how good it is."""

    @group_best.setter
    def group_best(self, arg: int, /) -> None: ...

    @property
    def weigh_inputs(self) -> bool:
        """An expert reads the token times its weight."""

    @weigh_inputs.setter
    def weigh_inputs(self, arg: bool, /) -> None: ...

    @property
    def post_norm(self) -> bool:
        """A norm for what experts alone add to the residual stream."""

    @post_norm.setter
    def post_norm(self, arg: bool, /) -> None: ...

    @property
    def out_multiplier(self) -> float:
        """Multiplies what they add."""

    @out_multiplier.setter
    def out_multiplier(self, arg: float, /) -> None: ...

    @property
    def on_host(self) -> bool:
        """
        Beside a GPU, they are in memory of the host, and the CPU computes them.
        """

    @on_host.setter
    def on_host(self, arg: bool, /) -> None: ...

    def __repr__(self) -> str: ...

class LaurelSpec:
    """A learned residual layer beside a mixer."""

    def __init__(self, rank: int = 0) -> None: ...

    @property
    def rank(self) -> int:
        """Elements between its two linears."""

    @rank.setter
    def rank(self, arg: int, /) -> None: ...

    def __repr__(self) -> str: ...

class AltUpSpec:
    """Alternating updates of several residual streams."""

    def __init__(self, num_streams: int = 0) -> None: ...

    @property
    def num_streams(self) -> int:
        """Residual streams, with the one that sublayers read and add to."""

    @num_streams.setter
    def num_streams(self, arg: int, /) -> None: ...

    def __repr__(self) -> str: ...

class SharedBlockSpec:
    """A block of attention and an MLP that several layers share."""

    def __init__(self, attention: AttentionSpec = ..., mlp: MlpSpec = ..., owner: int = 0, use: int = 0, adapter_rank: int = 0, attention_adapters: bool = False) -> None: ...

    @property
    def attention(self) -> AttentionSpec:
        """It reads rows of 2 * hidden_size."""

    @attention.setter
    def attention(self, arg: AttentionSpec, /) -> None: ...

    @property
    def mlp(self) -> MlpSpec: ...

    @mlp.setter
    def mlp(self, arg: MlpSpec, /) -> None: ...

    @property
    def owner(self) -> int:
        """The first layer that uses the block, under whose name its weights are."""

    @owner.setter
    def owner(self, arg: int, /) -> None: ...

    @property
    def use(self) -> int:
        """How many layers before this one use a block, whichever."""

    @use.setter
    def use(self, arg: int, /) -> None: ...

    @property
    def adapter_rank(self) -> int:
        """
        Rank of what the layer adds to the first linear of the MLP; 0: nothing.
        """

    @adapter_rank.setter
    def adapter_rank(self, arg: int, /) -> None: ...

    @property
    def attention_adapters(self) -> bool:
        """It adds such to q, k and v, too."""

    @attention_adapters.setter
    def attention_adapters(self, arg: bool, /) -> None: ...

    def __repr__(self) -> str: ...

class OwnVectorsSpec:
    """Vectors that a token has for each layer."""

    def __init__(self, size: int = 0, vocab_size: int = 0, activation: str = 'silu', pad_id: int = 0) -> None: ...

    @property
    def size(self) -> int:
        """Elements of the vector for one layer."""

    @size.setter
    def size(self, arg: int, /) -> None: ...

    @property
    def vocab_size(self) -> int:
        """Rows of the table; ids beyond it have the vectors of id 0."""

    @vocab_size.setter
    def vocab_size(self, arg: int, /) -> None: ...

    @property
    def activation(self) -> str: ...

    @activation.setter
    def activation(self, arg: str, /) -> None: ...

    @property
    def pad_id(self) -> int:
        """The row of tokens whose embedding is given."""

    @pad_id.setter
    def pad_id(self, arg: int, /) -> None: ...

    def __repr__(self) -> str: ...

class EmbeddingSumSpec:
    """What is added to the embedding of a token."""

    def __init__(self, num_positions: int = 0, position_offset: int = 0, num_types: int = 0) -> None: ...

    @property
    def num_positions(self) -> int:
        """Learned positions; 0: there are none."""

    @num_positions.setter
    def num_positions(self, arg: int, /) -> None: ...

    @property
    def position_offset(self) -> int:
        """The learned position of a text's first token."""

    @position_offset.setter
    def position_offset(self, arg: int, /) -> None: ...

    @property
    def num_types(self) -> int:
        """Types of tokens; 0: there are none."""

    @num_types.setter
    def num_types(self, arg: int, /) -> None: ...

    def __repr__(self) -> str: ...

class PositionBiasSpec:
    """What is added to scores of attention by the distance of a key."""

    def __init__(self, slopes: Sequence[float] = ..., num_buckets: int = 0, buckets: Sequence[int] = ...) -> None: ...

    @property
    def slopes(self) -> list[float]:
        """[num_heads] times the distance is taken off; empty: rows are learned."""

    @slopes.setter
    def slopes(self, arg: Sequence[float], /) -> None: ...

    @property
    def num_buckets(self) -> int:
        """Learned rows; 0: there are slopes."""

    @num_buckets.setter
    def num_buckets(self, arg: int, /) -> None: ...

    @property
    def buckets(self) -> list[int]:
        """[2 * max_model_len - 1]: the learned row of each distance."""

    @buckets.setter
    def buckets(self, arg: Sequence[int], /) -> None: ...

    def __repr__(self) -> str: ...

class MergerLinear:
    """One of the linears that make a row of the result of a tower."""

    def __init__(self, size: int = 0, bias: bool = False, norm_eps: float = 0.0, activated: bool = False, gated: bool = False, activation: str = 'gelu') -> None: ...

    @property
    def size(self) -> int:
        """Outputs."""

    @size.setter
    def size(self, arg: int, /) -> None: ...

    @property
    def bias(self) -> bool: ...

    @bias.setter
    def bias(self, arg: bool, /) -> None: ...

    @property
    def norm_eps(self) -> float:
        """The epsilon of a LayerNorm with bias behind it; 0: there is none."""

    @norm_eps.setter
    def norm_eps(self, arg: float, /) -> None: ...

    @property
    def activated(self) -> bool:
        """The activation is behind that."""

    @activated.setter
    def activated(self, arg: bool, /) -> None: ...

    @property
    def gated(self) -> bool:
        """
        It is two linears, and what the activation makes of the first multiplies the second.
        """

    @gated.setter
    def gated(self, arg: bool, /) -> None: ...

    @property
    def activation(self) -> str: ...

    @activation.setter
    def activation(self, arg: str, /) -> None: ...

    def __repr__(self) -> str: ...

class TowerSpec:
    """What an encoder of images has besides its layers."""

    def __init__(self, patch_dim: int = 0, patch_bias: bool = False, patch_norm: bool = False, norm_first: bool = False, num_positions: int = 0, class_token: bool = False, norm: bool = True, merged_patches: int = 1, pooled: bool = False, standardized: bool = False, pooled_scale: float = 1.0, pooled_norm_weight: bool = True, pooled_norm_offset: float = 0.0, merger: Sequence[MergerLinear] = ..., eps: float = 0.0, levels: Sequence[int] = ...) -> None: ...

    @property
    def patch_dim(self) -> int:
        """Numbers of a patch."""

    @patch_dim.setter
    def patch_dim(self, arg: int, /) -> None: ...

    @property
    def patch_bias(self) -> bool: ...

    @patch_bias.setter
    def patch_bias(self, arg: bool, /) -> None: ...

    @property
    def patch_norm(self) -> bool:
        """A norm of what embeds patches takes its place."""

    @patch_norm.setter
    def patch_norm(self, arg: bool, /) -> None: ...

    @property
    def norm_first(self) -> bool:
        """Positions are added behind this norm, and not before it."""

    @norm_first.setter
    def norm_first(self, arg: bool, /) -> None: ...

    @property
    def num_positions(self) -> int:
        """Rows of the table of learned positions; 0: there are none."""

    @num_positions.setter
    def num_positions(self, arg: int, /) -> None: ...

    @property
    def class_token(self) -> bool:
        """
        The last token of a sequence is a vector of the model, of which no row is made.
        """

    @class_token.setter
    def class_token(self, arg: bool, /) -> None: ...

    @property
    def norm(self) -> bool:
        """There is a norm behind the layers."""

    @norm.setter
    def norm(self, arg: bool, /) -> None: ...

    @property
    def merged_patches(self) -> int:
        """Neighbouring patches that become one row of the result."""

    @merged_patches.setter
    def merged_patches(self, arg: int, /) -> None: ...

    @property
    def pooled(self) -> bool:
        """
        It is made of their mean, behind RMSNorm, and not of all their numbers.
        """

    @pooled.setter
    def pooled(self, arg: bool, /) -> None: ...

    @property
    def standardized(self) -> bool:
        """
        Their mean x, times pooled_scale, becomes (x - bias) * scale before this norm.
        """

    @standardized.setter
    def standardized(self, arg: bool, /) -> None: ...

    @property
    def pooled_scale(self) -> float:
        """Multiplies their mean."""

    @pooled_scale.setter
    def pooled_scale(self, arg: float, /) -> None: ...

    @property
    def pooled_norm_weight(self) -> bool:
        """This norm has a weight."""

    @pooled_norm_weight.setter
    def pooled_norm_weight(self, arg: bool, /) -> None: ...

    @property
    def pooled_norm_offset(self) -> float:
        """Added to the weight of this norm."""

    @pooled_norm_offset.setter
    def pooled_norm_offset(self, arg: float, /) -> None: ...

    @property
    def merger(self) -> list[MergerLinear]:
        """The linears that make a row; the last one gives it."""

    @merger.setter
    def merger(self, arg: Sequence[MergerLinear], /) -> None: ...

    @property
    def eps(self) -> float:
        """The epsilon of the norms behind the layers."""

    @eps.setter
    def eps(self, arg: float, /) -> None: ...

    @property
    def levels(self) -> list[int]:
        """Layers whose results are merged, too."""

    @levels.setter
    def levels(self, arg: Sequence[int], /) -> None: ...

    def __repr__(self) -> str: ...

class RopeSpec:
    """A table of rotations."""

    def __init__(self, inv_freq: Sequence[float] = ..., attention_factor: float = 1.0, scale_beta: float = 0.0, scale_positions: int = 1, scale_offset: int = 0, axes: Sequence[int] = ...) -> None: ...

    @property
    def inv_freq(self) -> list[float]:
        """[rotary_dim / 2]"""

    @inv_freq.setter
    def inv_freq(self, arg: Sequence[float], /) -> None: ...

    @property
    def attention_factor(self) -> float: ...

    @attention_factor.setter
    def attention_factor(self, arg: float, /) -> None: ...

    @property
    def scale_beta(self) -> float: ...

    @scale_beta.setter
    def scale_beta(self, arg: float, /) -> None: ...

    @property
    def scale_positions(self) -> int: ...

    @scale_positions.setter
    def scale_positions(self, arg: int, /) -> None: ...

    @property
    def scale_offset(self) -> int: ...

    @scale_offset.setter
    def scale_offset(self, arg: int, /) -> None: ...

    @property
    def axes(self) -> list[int]:
        """
        [rotary_dim / 2]: the axis of each frequency; empty: tokens have one position.
        """

    @axes.setter
    def axes(self, arg: Sequence[int], /) -> None: ...

    def __repr__(self) -> str: ...

class CacheSpec:
    """What a layer keeps of the tokens before, and how its heads read it."""

    def __init__(self, kind: str = 'paged', num_heads: int = 0, num_kv_heads: int = 0, head_dim: int = 0, value_dim: int = 0, index_dim: int = 0, top_k: int = 0, run_keys: int = 1, sliding_window: int = 0, chunked: bool = False, two_way: bool = False, spans: bool = True, owner: int = -1, states: Sequence[Sequence[int]] = ..., log_columns: int = 0) -> None: ...

    @property
    def kind(self) -> str: ...

    @kind.setter
    def kind(self, arg: str, /) -> None: ...

    @property
    def num_heads(self) -> int:
        """That read rows of blocks; 0: there are none."""

    @num_heads.setter
    def num_heads(self, arg: int, /) -> None: ...

    @property
    def num_kv_heads(self) -> int: ...

    @num_kv_heads.setter
    def num_kv_heads(self, arg: int, /) -> None: ...

    @property
    def head_dim(self) -> int:
        """Elements of a key."""

    @head_dim.setter
    def head_dim(self, arg: int, /) -> None: ...

    @property
    def value_dim(self) -> int:
        """
        Elements of a value, which is the end of a latent, or the beginning of a row as long as a key.
        """

    @value_dim.setter
    def value_dim(self, arg: int, /) -> None: ...

    @property
    def index_dim(self) -> int:
        """Elements of what keys are chosen by; 0: there is none."""

    @index_dim.setter
    def index_dim(self, arg: int, /) -> None: ...

    @property
    def top_k(self) -> int:
        """Tokens that a token reads, chosen among those that it sees; 0: all."""

    @top_k.setter
    def top_k(self, arg: int, /) -> None: ...

    @property
    def run_keys(self) -> int:
        """Neighbouring tokens that are chosen together."""

    @run_keys.setter
    def run_keys(self, arg: int, /) -> None: ...

    @property
    def sliding_window(self) -> int:
        """Tokens that a token sees; 0: all."""

    @sliding_window.setter
    def sliding_window(self, arg: int, /) -> None: ...

    @property
    def chunked(self) -> bool: ...

    @chunked.setter
    def chunked(self, arg: bool, /) -> None: ...

    @property
    def two_way(self) -> bool:
        """A token sees rows of those behind it, too."""

    @two_way.setter
    def two_way(self, arg: bool, /) -> None: ...

    @property
    def spans(self) -> bool:
        """Tokens of a span see all of it, where steps say so."""

    @spans.setter
    def spans(self, arg: bool, /) -> None: ...

    @property
    def owner(self) -> int:
        """The earlier layer whose keys and values a shared cache reads."""

    @owner.setter
    def owner(self, arg: int, /) -> None: ...

    @property
    def states(self) -> list[list[int]]:
        """The shapes of the tensors of a state; empty: there is none."""

    @states.setter
    def states(self, arg: Sequence[Sequence[int]], /) -> None: ...

    @property
    def log_columns(self) -> int:
        """Elements that a state reads of a token, which a log keeps of drafts."""

    @log_columns.setter
    def log_columns(self, arg: int, /) -> None: ...

    def __repr__(self) -> str: ...

class CostSpec:
    """The work of a sublayer that mixes tokens, besides its linears."""

    def __init__(self, of_pair: int = 0, of_token: int = 0) -> None: ...

    @property
    def of_pair(self) -> int:
        """Multiplications for each query and each key that it sees."""

    @of_pair.setter
    def of_pair(self, arg: int, /) -> None: ...

    @property
    def of_token(self) -> int:
        """Multiplications and additions for each token, whatever came before."""

    @of_token.setter
    def of_token(self, arg: int, /) -> None: ...

    def __repr__(self) -> str: ...

class LayerSpec:
    """
    The sublayers of a layer: a mixer or two side by side, then an MLP, experts, or both.
    """

    def __init__(self, mixer: AttentionSpec | LatentSpec | DeltaSpec | ShortConvSpec | MambaSpec | None = None, mlp: MlpSpec | None = None, experts: ExpertsSpec | None = None, mixer_beside: AttentionSpec | LatentSpec | DeltaSpec | ShortConvSpec | MambaSpec | None = None, laurel: LaurelSpec | None = None, norms_behind: bool = False, block: SharedBlockSpec | None = None) -> None: ...

    @property
    def mixer(self) -> AttentionSpec | LatentSpec | DeltaSpec | ShortConvSpec | MambaSpec | None:
        """What mixes a token with those before it."""

    @mixer.setter
    def mixer(self, value: AttentionSpec | LatentSpec | DeltaSpec | ShortConvSpec | MambaSpec | None) -> None: ...

    @property
    def mlp(self) -> MlpSpec | None: ...

    @mlp.setter
    def mlp(self, value: MlpSpec | None) -> None: ...

    @property
    def experts(self) -> ExpertsSpec | None:
        """In place of the MLP, or beside it."""

    @experts.setter
    def experts(self, value: ExpertsSpec | None) -> None: ...

    @property
    def mixer_beside(self) -> AttentionSpec | LatentSpec | DeltaSpec | ShortConvSpec | MambaSpec | None:
        """A mixer of another kind, which reads the same norm."""

    @mixer_beside.setter
    def mixer_beside(self, value: AttentionSpec | LatentSpec | DeltaSpec | ShortConvSpec | MambaSpec | None) -> None: ...

    @property
    def laurel(self) -> LaurelSpec | None:
        """A second way around the mixer, which reads the same norm."""

    @laurel.setter
    def laurel(self, value: LaurelSpec | None) -> None: ...

    @property
    def norms_behind(self) -> bool:
        """
        Its sublayers norm what they add, not what they read as those of other layers do.
        """

    @norms_behind.setter
    def norms_behind(self, arg: bool, /) -> None: ...

    @property
    def block(self) -> SharedBlockSpec | None:
        """A block that several layers share, whose result the mixer reads, too."""

    @block.setter
    def block(self, value: SharedBlockSpec | None) -> None: ...

    def __repr__(self) -> str: ...

    @property
    def cache(self) -> CacheSpec:
        """What its mixers keep of the tokens before."""

    @property
    def cost(self) -> CostSpec:
        """The work of its mixers."""

class MtpSpec:
    """An MTP head, which drafts, and how it keeps its weights."""

    def __init__(self, layers: Sequence[LayerSpec] = ..., quantization: str = 'none', lm_head_size: int = 0, taps: Sequence[int] = ..., norm_before_residual: bool = False, hidden_size: int = 0, num_modules: int = 1, before_norm: bool = False) -> None: ...

    @property
    def layers(self) -> list[LayerSpec]:
        """They count as those behind the last."""

    @layers.setter
    def layers(self, arg: Sequence[LayerSpec], /) -> None: ...

    @property
    def quantization(self) -> str:
        """How the linears of the head are kept."""

    @quantization.setter
    def quantization(self, arg: str, /) -> None: ...

    @property
    def lm_head_size(self) -> int:
        """
        Outputs of the head's own lm_head, which are the first ids of the vocabulary; 0: it uses the model's.
        """

    @lm_head_size.setter
    def lm_head_size(self, arg: int, /) -> None: ...

    @property
    def taps(self) -> list[int]:
        """
        Layers at whose beginning an EAGLE-3 head reads the residual stream; empty: it reads the last norm.
        """

    @taps.setter
    def taps(self, arg: Sequence[int], /) -> None: ...

    @property
    def norm_before_residual(self) -> bool:
        """
        With taps: what it reads is normed before it becomes its residual stream.
        """

    @norm_before_residual.setter
    def norm_before_residual(self, arg: bool, /) -> None: ...

    @property
    def hidden_size(self) -> int:
        """
        Of its layers, between projections from and to that of the model; 0: it is that of the model.
        """

    @hidden_size.setter
    def hidden_size(self, arg: int, /) -> None: ...

    @property
    def num_modules(self) -> int:
        """
        Modules that draft in turn: each has an equal part of the layers, and reads what the one before has left.
        """

    @num_modules.setter
    def num_modules(self, arg: int, /) -> None: ...

    @property
    def before_norm(self) -> bool:
        """
        It reads hidden states that no norm has changed, of the model and of itself; else those behind the last norm.
        """

    @before_norm.setter
    def before_norm(self, arg: bool, /) -> None: ...

    def __repr__(self) -> str: ...

class ModelSpec:
    """Everything the engine needs to know of a model, as plain numbers."""

    def __init__(self, dtype: str = 'float32', quantization: str = 'none', fp8_inputs: bool = False, vocab_size: int = 0, hidden_size: int = 0, num_layers: int = 0, max_model_len: int = 0, rms_norm_eps: float = 0.0, norm: str = 'rms', norm_weights: bool = True, pre_norms: bool = True, post_norms: bool = False, stream_norms: str = 'none', parallel_blocks: bool = False, parallel_norms: bool = False, norm_offset: float = 0.0, embedding_multiplier: float = 1.0, residual_multiplier: float = 1.0, logit_multiplier: float = 1.0, logit_cap: float = 0.0, lm_head: bool = True, lm_head_bias: bool = False, tie_word_embeddings: bool = False, layer_scalars: bool = False, clipped_linears: bool = False, own_vectors: OwnVectorsSpec | None = None, altup: AltUpSpec | None = None, embedding_sum: EmbeddingSumSpec | None = None, embedding_norm: bool = False, tower: TowerSpec | None = None, ropes: Sequence[RopeSpec] = ..., position_bias: PositionBiasSpec | None = None, given_levels: int = 0, layers: Sequence[LayerSpec] = ..., mtp: MtpSpec | None = None) -> None: ...

    @property
    def dtype(self) -> str:
        """What the engine computes in."""

    @dtype.setter
    def dtype(self, arg: str, /) -> None: ...

    @property
    def quantization(self) -> str: ...

    @quantization.setter
    def quantization(self, arg: str, /) -> None: ...

    @property
    def fp8_inputs(self) -> bool:
        """Linears of FP8 weights round what they read to FP8, too: on GPUs."""

    @fp8_inputs.setter
    def fp8_inputs(self, arg: bool, /) -> None: ...

    @property
    def vocab_size(self) -> int: ...

    @vocab_size.setter
    def vocab_size(self, arg: int, /) -> None: ...

    @property
    def hidden_size(self) -> int: ...

    @hidden_size.setter
    def hidden_size(self, arg: int, /) -> None: ...

    @property
    def num_layers(self) -> int: ...

    @num_layers.setter
    def num_layers(self, arg: int, /) -> None: ...

    @property
    def max_model_len(self) -> int: ...

    @max_model_len.setter
    def max_model_len(self, arg: int, /) -> None: ...

    @property
    def rms_norm_eps(self) -> float: ...

    @rms_norm_eps.setter
    def rms_norm_eps(self, arg: float, /) -> None: ...

    @property
    def norm(self) -> str: ...

    @norm.setter
    def norm(self, arg: str, /) -> None: ...

    @property
    def norm_weights(self) -> bool:
        """Norms have weights; else they have neither weights nor biases."""

    @norm_weights.setter
    def norm_weights(self, arg: bool, /) -> None: ...

    @property
    def pre_norms(self) -> bool:
        """A norm for the input of each sublayer."""

    @pre_norms.setter
    def pre_norms(self, arg: bool, /) -> None: ...

    @property
    def post_norms(self) -> bool:
        """A norm for what each sublayer adds to the residual stream."""

    @post_norms.setter
    def post_norms(self, arg: bool, /) -> None: ...

    @property
    def stream_norms(self) -> str:
        """
        Which norms take the place of the residual stream: none, embedding (the first) or all, as in BERT.
        """

    @stream_norms.setter
    def stream_norms(self, arg: str, /) -> None: ...

    @property
    def parallel_blocks(self) -> bool:
        """Attention and MLP read the same residual stream."""

    @parallel_blocks.setter
    def parallel_blocks(self, arg: bool, /) -> None: ...

    @property
    def parallel_norms(self) -> bool:
        """Each of them has a norm of its own; else both read one."""

    @parallel_norms.setter
    def parallel_norms(self, arg: bool, /) -> None: ...

    @property
    def norm_offset(self) -> float:
        """Added to every norm weight."""

    @norm_offset.setter
    def norm_offset(self, arg: float, /) -> None: ...

    @property
    def embedding_multiplier(self) -> float: ...

    @embedding_multiplier.setter
    def embedding_multiplier(self, arg: float, /) -> None: ...

    @property
    def residual_multiplier(self) -> float:
        """Multiplies what a sublayer adds."""

    @residual_multiplier.setter
    def residual_multiplier(self, arg: float, /) -> None: ...

    @property
    def logit_multiplier(self) -> float: ...

    @logit_multiplier.setter
    def logit_multiplier(self, arg: float, /) -> None: ...

    @property
    def logit_cap(self) -> float:
        """Logits l become logit_cap * tanh(l / logit_cap); 0: they stay."""

    @logit_cap.setter
    def logit_cap(self, arg: float, /) -> None: ...

    @property
    def lm_head(self) -> bool:
        """
        Rows that are asked for give logits; else what the last norm makes of them.
        """

    @lm_head.setter
    def lm_head(self, arg: bool, /) -> None: ...

    @property
    def lm_head_bias(self) -> bool: ...

    @lm_head_bias.setter
    def lm_head_bias(self, arg: bool, /) -> None: ...

    @property
    def tie_word_embeddings(self) -> bool: ...

    @tie_word_embeddings.setter
    def tie_word_embeddings(self, arg: bool, /) -> None: ...

    @property
    def layer_scalars(self) -> bool:
        """Each layer multiplies the residual stream it leaves."""

    @layer_scalars.setter
    def layer_scalars(self, arg: bool, /) -> None: ...

    @property
    def clipped_linears(self) -> bool:
        """Linears of layers clip what they read and give."""

    @clipped_linears.setter
    def clipped_linears(self, arg: bool, /) -> None: ...

    @property
    def own_vectors(self) -> OwnVectorsSpec | None: ...

    @own_vectors.setter
    def own_vectors(self, value: OwnVectorsSpec | None) -> None: ...

    @property
    def altup(self) -> AltUpSpec | None:
        """Several residual streams, which alternating updates mix."""

    @altup.setter
    def altup(self, value: AltUpSpec | None) -> None: ...

    @property
    def embedding_sum(self) -> EmbeddingSumSpec | None:
        """What is added to the embedding."""

    @embedding_sum.setter
    def embedding_sum(self, value: EmbeddingSumSpec | None) -> None: ...

    @property
    def embedding_norm(self) -> bool:
        """The embedding is normed, beside the norms of sublayers."""

    @embedding_norm.setter
    def embedding_norm(self, arg: bool, /) -> None: ...

    @property
    def tower(self) -> TowerSpec | None:
        """An encoder of images: what it has besides its layers."""

    @tower.setter
    def tower(self, value: TowerSpec | None) -> None: ...

    @property
    def ropes(self) -> list[RopeSpec]: ...

    @ropes.setter
    def ropes(self, arg: Sequence[RopeSpec], /) -> None: ...

    @property
    def position_bias(self) -> PositionBiasSpec | None:
        """What is added to scores by the distance of a key."""

    @position_bias.setter
    def position_bias(self, value: PositionBiasSpec | None) -> None: ...

    @property
    def given_levels(self) -> int:
        """
        Levels of embeddings that steps are given: the embedding, then what is added behind layers; 0: none.
        """

    @given_levels.setter
    def given_levels(self, arg: int, /) -> None: ...

    @property
    def layers(self) -> list[LayerSpec]:
        """[num_layers]"""

    @layers.setter
    def layers(self, arg: Sequence[LayerSpec], /) -> None: ...

    @property
    def mtp(self) -> MtpSpec | None:
        """The MTP head, which drafts."""

    @mtp.setter
    def mtp(self, value: MtpSpec | None) -> None: ...

    def __repr__(self) -> str: ...

    @property
    def own_layers(self) -> tuple[int, int]:
        """
        The first layer of a stage of a pipeline and the one behind its last; without stages, of all layers.
        """

    def kv_bytes_per_token(self, dtype: str, windows_only: bool = False, device: str = 'cpu') -> int:
        """
        Bytes of a token of a KV cache in this dtype: keys and values of all layers, or of those with a window. Those of all layers on a GPU have what prompts need to read 8 bits, too.
        """

    def state_bytes(self, device: str = 'cpu', num_log_rows: int = 0) -> int:
        """
        Bytes of the states that all layers keep of one sequence, with so many rows of their logs; 0: no layer has one.
        """

def param_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """What a checkpoint of this model holds, without an engine."""

def adapter_params(spec: ModelSpec) -> dict[str, str]:
    """
    The weights that adapters of requests may change, and what of them ranks divide: "rows", "columns", or none, "whole".
    """

def sites(spec: ModelSpec) -> list[tuple[str, int]]:
    """
    Where hooks may look: the names of sites, and the layer of each; -1: outside layers.
    """

def packed_shapes(spec: ModelSpec, format: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """
    Names, dtypes and shapes of the tensors that linears become when all are packed for CPUs in a format: float32, bfloat16, float16, int8 or int4.
    """

def linears(spec: ModelSpec, num_ranks: int = 1) -> dict[str, tuple[list[str], bool, int]]:
    """
    By their names in packed checkpoints: the weights that each linear joins, whether these are gate and up, and what divides all places where ranks cut its inputs (0: they do not). Linears by head are left out, and those that the engine quantises.
    """

DELTA_MOST_TAPS: int = 8

DELTA_MOST_K_DIM: int = 256

PACKED_LAYOUT_VERSION: int = 1

def weight_bytes(spec: ModelSpec, dtype: str, num_ranks: int = 1) -> int:
    """
    Bytes of the parameters as tensors of a dtype: of the rank that has most. spec: of the model, or of a stage.
    """

def param_bytes(spec: ModelSpec, dtype: str) -> dict[str, int]:
    """
    Bytes of each parameter once it is prepared, where tensors are stored as dtype; weight_bytes is their sum. spec: of the model, or of a stage, where those of others have 0.
    """

def param_ops(spec: ModelSpec) -> dict[str, str]:
    """
    The op that reads each parameter, as times of a step name it. A vector counts with the linear that stands behind it in the model, since that one reads what the vector has scaled.
    """

def workspace_bytes(spec: ModelSpec, *, device: str, num_ranks: int, num_threads: int, num_tokens: int, num_rows: int, num_returned_rows: int, num_adapters: int = 0, most_rank: int = 0) -> int:
    """
    Bytes that steps take at most besides weights and cache: on a CPU of all ranks, else of one GPU. spec: of the whole model, or of a stage. num_threads: of all ranks together; 0: one per core. A step has up to num_tokens tokens, draws tokens from up to num_rows rows of logits, and returns up to num_returned_rows rows besides. num_adapters, most_rank: of a step, and of them.
    """

def host_workspace_bytes(spec: ModelSpec, *, num_tokens: int, num_threads: int) -> tuple[int, int]:
    """
    What steps of up to num_tokens tokens take at most of the host's memory where experts of the model stay there beside a GPU (ExpertsSpec.on_host), besides weights: bytes of arrays, which InferEngine.host_expert_bytes tells once such a step has run; and of scratch of the CPU's kernels and pinned memory. num_threads: 0: one per core.
    """

def local_spec(spec: ModelSpec, tp_rank: int, tp_size: int) -> ModelSpec:
    """
    The part of the model that a rank of tensor parallelism has: its heads and intermediate_size. ConfigError: a tp_size that does not fit the model.
    """

def stage_spec(spec: ModelSpec, stage: int, num_stages: int, num_layers: Sequence[int] = []) -> ModelSpec:
    """
    The part of the model that a stage of a pipeline has: a run of its layers, with the embedding before the first one, and the final norm and the lm_head behind the last one. num_layers: of each stage; empty: equally many. ConfigError: more stages than layers, or other numbers of layers.
    """

class Batch:
    """
    One step of work; the arrays are used in place and must not change until the step is done.
    """

    def __init__(self, *, input_ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], positions: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], slot_mapping: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)] | Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu', writable=False)], block_table: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | Annotated[NDArray[numpy.int32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], cu_seqlens_q: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], context_lens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], logits_rows: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], temperature: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, top_k: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, top_p: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, min_p: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, random_val: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, allowed: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None = None, allowed_row: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, previous_rows: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, adapter_ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, state_in: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, state_out: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, state_tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, num_replayed: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, change_rows: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None = None, penalties: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None = None, change_tokens: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None = None, num_logprobs: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, hidden_rows: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, token_types: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, rope_positions: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None = None, given: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None = None, given_rows: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, patches: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None = None, position_rows: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None = None, position_weights: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None = None, two_way_seqs: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, window_lens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, return_logits: bool = False, mtp_module: int = 0) -> None: ...

    def arrays(self) -> dict[str, Tensor]:
        """Those that are there, in place, by name."""

    @property
    def return_logits(self) -> bool: ...

    @property
    def mtp_module(self) -> int:
        """With hidden_rows: the module of the MTP head that computes it."""

class StepOutput:
    @property
    def ids(self) -> Tensor | None:
        """
        [num_rows] int32; of a step that was submitted, negative where the row cannot be sampled: see sample_fault
        """

    @property
    def logprob_ids(self) -> Tensor | None:
        """
        [num_rows, width] int32: the token that was sampled, then the best of the model's logits, as many as Batch.num_logprobs asks for; what is behind is not defined. -1: logits that are no distribution
        """

    @property
    def logprobs(self) -> Tensor | None:
        """[num_rows, width] float32: their log-probabilities"""

    @property
    def logits(self) -> Tensor | None:
        """
        [num_rows, vocab_size] float32, of a draft [num_rows, MtpSpec.lm_head_size] where the head has an lm_head of its own; of a model without an lm_head [num_rows, hidden_size], the states after the last norm; of a tower [num_rows, levels * out_size], where a row stands for neighbouring patches
        """

    @property
    def aborted(self) -> bool:
        """
        PendingStep.abort ended the step early: there is nothing else, and what the cache holds of its tokens is not defined.
        """

MAX_LOGPROBS: int = 64

def sample_fault(id: int) -> str:
    """Why a row has a negative id: what its logits are."""

class PendingStep:
    """A step on its way."""

    def abort(self) -> None:
        """
        Ends the step before its next half of a layer, or before it begins; those behind it run. A step that is nearly done is done.
        """

    def give_masks(self) -> None:
        """
        Batch.allowed is complete now: a step that was submitted with late_masks may sample.
        """

    def wait(self, seconds: float) -> bool:
        """Waits so long at most; returns whether the step is done."""

    def result(self) -> StepOutput:
        """Waits for the step and gives its output, once; raises what it raised."""

class GraphCounts:
    @property
    def recorded(self) -> int: ...

    @property
    def launched(self) -> int: ...

    @property
    def launched_ahead(self) -> int:
        """
        Launched steps that began while the device worked on the one before; steps with masks do not count.
        """

    @property
    def kept(self) -> int: ...

    @property
    def failure(self) -> str:
        """
        Why steps could not be recorded, so that all run kernel by kernel; empty: nothing failed.
        """

class InferEngine:
    """Loads weights, keeps the KV cache, runs steps."""

    def __init__(self, spec: ModelSpec, devices: str | Sequence[str] = 'cpu', num_threads: int = 0, isa: str = '', nccl_library: str = '', graphs: bool = True, num_stages: int = 1, stage: tuple[int, int, int] | None = None, stage_layers: Sequence[int] = [], stage_dtypes: Sequence[str] = []) -> None:
        """
        devices: of each rank, stage by stage of those that are here, such as ['cuda:0', 'cuda:1'] or ['cpu', 'cpu']; or of the only one. num_threads: of all ranks together; 0: one per core. graphs: GPUs launch decode steps of a shape that came before as one. num_stages: of a pipeline; stage: of several the one that is here, the socket from the stage before and that to the stage behind, of which copies are made and which the first and the last one have not; None: all are. stage_layers: of each stage; empty: equally many. stage_dtypes: what each stage computes in, where stages are on unlike devices, such as ['cpu', 'cuda:0']; then load_param names the stage.
        """

    @property
    def num_ranks(self) -> int:
        """Ranks of each stage."""

    @property
    def spec(self) -> ModelSpec: ...

    def param_shapes(self) -> dict[str, tuple[int, ...]]:
        """Checkpoint names and shapes of the parameters the model needs."""

    def load_param(self, name: str, tensor: Tensor, type: str = '', stage: int = -1) -> list[str]:
        """
        Takes one full parameter. Read-only ones are kept for state_dict. A linear is prepared with its last tensor: returns the names of those that were, whose memory is not read again. type: the tensor is uint8, rows of blocks of a GGUF file; see gguf_type, gguf_dequantise. stage: with stage_dtypes, the one that takes it.
        """

    def loaded_params(self) -> list[str]:
        """Names of the parameters that are loaded."""

    def own_params(self, stage: int = -1) -> list[str]:
        """
        Names that load_param takes and that are needed here, or by one stage: of parameters, and of the packed tensors of linears. Those of stages elsewhere count as loaded.
        """

    def take_packed(self) -> dict[str, Tensor]:
        """
        The linears that are prepared, as tensors for a file that load_param takes again; they count as not loaded then. Of one rank.
        """

    def load_dummy(self, dtype: str, seed: int = 0) -> None:
        """Random weights, for benchmarks."""

    def update_params(self, tensors: Sequence[tuple[str, Tensor]], stage: int = -1) -> None:
        """
        Other values of parameters, as load_param takes them, behind the steps submitted before. The cache stays as it is. stage: as for load_param. WeightError: one does not fit; nothing has changed then.
        """

    @property
    def weights_version(self) -> int:
        """How often parameters were loaded or changed."""

    def finish_loading(self) -> None:
        """All parameters are there: the engine can run."""

    def state_dict(self) -> list[dict[str, Tensor]]:
        """The parameters as loaded, read-only: of each rank, the parts it has."""

    def add_adapter(self, id: int, tensors: Sequence[tuple[str, Tensor, Tensor, float]]) -> None:
        """
        Takes an adapter, which steps name by its id (Batch.adapter_ids): for each weight its name, A [rank, in_features], B [out_features, rank] and the scale of B A. WeightError: one does not fit; then there is no such adapter.
        """

    def remove_adapter(self, id: int) -> None:
        """Lets go of an adapter after the steps submitted before."""

    def set_hooks(self, callback: Callable[[str, int, Tensor, int], Tensor | None] | None, names: Sequence[str], names_of_all_ranks: Sequence[str] = ()) -> None:
        """
        Calls callback(name, layer, tensor, rank) inside forward at the named sites, on rank 0 or on every rank; a returned tensor replaces it.
        """

    def reset_cache(self, num_blocks: int, block_size: int, dtype: str = '', num_states: int = 0, num_window_blocks: int = 0, num_log_rows: int = 0, stage_dtypes: Sequence[str] = []) -> None:
        """
        Allocates the KV cache anew, empty. dtype: of keys and values; empty: the spec's. num_states: of sequences, in models with layers that have a state. num_window_blocks: of layers with a window, if they have blocks of their own; then slot_mapping and block_table of a Batch have one more axis in front, first the slots and blocks of all other layers, then theirs. num_log_rows: of each state, which keep what it reads of drafts, so that those that were right can be replayed (num_replayed of a Batch). stage_dtypes: in place of dtype, of each stage.
        """

    def read_blocks(self, group: int, blocks: Sequence[int]) -> list[Tensor]:
        """
        Blocks of a group of layers as bytes, after the steps submitted before: of each rank that is here [num_blocks, bytes_per_block] uint8. RequestError: there is no such block.
        """

    def write_blocks(self, group: int, blocks: Sequence[int], data: Sequence[Tensor]) -> None:
        """
        Fills blocks with what read_blocks gave of a cache of the same shape. RequestError: it does not fit.
        """

    def read_state(self, state: int) -> list[Tensor]:
        """
        A state of all layers as bytes: of each rank [1, bytes_per_state] uint8.
        """

    def write_state(self, state: int, num_tokens: int, data: Sequence[Tensor]) -> None:
        """Fills a state, which has seen num_tokens, with what read_state gave."""

    def time_ops(self, on: bool) -> None:
        """
        Takes the time of every op of rank 0 from the next step on, beginning at zero; or no more. ConfigError: not on a CPU.
        """

    def op_times(self) -> dict[str, tuple[int, float]]:
        """
        By op, how often it was called and the seconds it took in all steps so far; none while time_ops is off.
        """

    def forward(self, batch: Batch) -> StepOutput:
        """Runs one step."""

    def submit(self, batch: Batch, late_masks: bool = False) -> PendingStep:
        """
        Queues one step behind those submitted before, and returns at once. late_masks: Batch.allowed may change until PendingStep.give_masks, for which the step waits before it samples.
        """

    @property
    def weight_bytes(self) -> int: ...

    def host_expert_bytes(self) -> int:
        """
        Bytes of the host's memory that arrays of experts have taken so far whose weights are there, beside a GPU (ExpertsSpec.on_host).
        """

    def graph_counts(self, stage: int = -1) -> GraphCounts:
        """
        What has become of graphs so far, in a stage that is in this process; -1: in the first one. ConfigError: there is no such stage.
        """

    def close(self) -> None:
        """Frees weights, cache and threads; idempotent."""

class GgufHeader:
    """The checked header of a GGUF file."""

    @staticmethod
    def parse(bytes: bytes, file_size: int) -> GgufHeader | None:
        """
        Reads the header of a file of file_size bytes that begins with these bytes. None: the header goes on behind them. WeightError: the file is damaged.
        """

    @property
    def version(self) -> int: ...

    @property
    def keys(self) -> list[str]:
        """Keys of the metadata."""

    def value(self, key: str) -> bool | int | float | str | list[Any]:
        """
        The value of a key of the metadata. KeyError: it is not there. WeightError: a text that is not UTF-8.
        """

    @property
    def tensors(self) -> list[tuple[str, str, tuple[int, ...], int, int]]:
        """
        Name, type, shape (slowest dimension first), first byte in the file, and number of bytes.
        """

def gguf_dequantise(data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], type: str, shape: Sequence[int], dtype: str, *, num_threads: int = 0) -> Tensor:
    """
    The weights of a tensor of a GGUF file, rounded to nearest. data: its bytes. num_threads: 0: one per core.
    """

def gguf_regroup(data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], type: str, shape: Sequence[int], *, num_threads: int = 0) -> Tensor:
    """
    Blocks of a type as those of gguf_regrouped_type, with the same numbers: [rows, bytes]. num_threads: 0: one per core.
    """

def gguf_regrouped_type(name: str) -> str:
    """
    The type whose blocks can hold those of a type of GGUF files; empty: no other one can.
    """

def gguf_type(name: str) -> tuple[int, int, bool, int]:
    """
    What a type of GGUF files is: the weights of a block, its bytes, whether gguf_dequantise reads it, and its bytes where CPUs compute with its integers (0: they do not).
    """

def gguf_readable_types() -> str:
    """The types of GGUF files that gguf_dequantise reads, as a list."""

def dequantise_codes(codes: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], order: str, bits: int, shape: Sequence[int], *, values: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], scales: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], dtype: str, zeros: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None = None, minima: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None = None, group_size: int = 0, scale_rows: int = 1, group_of: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, begin: int, end: int, num_threads: int = 0) -> Tensor:
    """
    Rows begin to end of a matrix [rows, columns] of codes as plain numbers, rounded to nearest: (values[code] - zero) * scale + minimum. order: where the bits of a code lie, see src/codes/matrix.h. scales, zeros, minima: [rows / scale_rows, groups] of group_size columns, or of those that group_of says. num_threads: 0: one per core.
    """

def make_blocks(codes: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], order: str, bits: int, shape: Sequence[int], *, scales: Annotated[NDArray[numpy.uint8], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], group_size: int, block: int = 32, flip: int = 0, begin: int, end: int, num_threads: int = 0) -> Tensor:
    """
    Rows begin to end of a matrix of codes of up to 4 bits, or of 8, as blocks of 32, 64 or 128, such as Q4_0, Q4_1, MXFP4 and Q8_0 of a GGUF file, or Z4_128 with zero points, as load_param takes them. scales: [rows, groups, bytes of a scale]. flip: xored to codes of 8 bits.
    """

def quantise_int4(weights: Any, group_size: int, *, num_threads: int = 0) -> tuple[Tensor, Tensor]:
    """
    Weights [rows, columns] in float32 as integers of -8 to 7, int8 of that shape, and bfloat16 scales [rows, columns / group_size], of 16 each the one with the least squared error.
    """

class SuffixAutomaton:
    """
    A text of token ids that grows, and its longest suffix that has occurred before.
    """

    def __init__(self) -> None: ...

    def extend(self, token_ids: Sequence[int]) -> None:
        """
        Append tokens, in amortised constant time each. One thread at a time may use the object.
        """

    def __len__(self) -> int: ...

    @property
    def match_length(self) -> int:
        """
        Length of the longest suffix that ends earlier in the text, too; the two may overlap.
        """

    def draft(self, limit: int, min_match: int = 1) -> list[int]:
        """
        At most `limit` tokens that followed the most recent earlier occurrence of that suffix; behind the end of the text they repeat from their beginning. Empty if the suffix is shorter than `min_match`.
        """
