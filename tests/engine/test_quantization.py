"""What quantised weights and an int8 KV cache cost: KL divergence from float32 over held-out text of the bundled
model's own generator.

Perplexity does not tell a right scheme from a wrong scale; this does. Bounds are what the same schemes give in numpy,
with a margin of some standard errors.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from ops.test_quantised_linear import int4_weights, int8_weights, quantised_x
from quantised_files.test_arithmetic import fp8

from infinilm import InferEngine, ReferenceModel, StaticKVCacheConfig
from infinilm.checkpoint.folder import resolve_model
from infinilm.config.json.model_config import AutoConfig
from infinilm.text.tokenizer import Tokenizer

NUM_STORIES = 24


def held_out_tokens() -> list[list[int]]:
    """Stories, each from the token that begins a text on."""
    tools = str(Path(__file__).resolve().parents[2] / "tools" / "demo")
    sys.path.insert(0, tools)
    try:
        import corpus
    finally:
        sys.path.remove(tools)
    rng = random.Random("heldout-99")
    tokenizer = Tokenizer.from_folder(resolve_model("demo"), None)
    return [[0, *tokenizer.encode(corpus.make_story(rng, "heldout")[1])] for _ in range(NUM_STORIES)]


def log_probabilities(
    stories: list[list[int]], quantization: str | None, cache_dtype: str = "float32"
) -> NDArray[np.float64]:
    """[num_tokens, vocab_size]: of what follows each token, one token of every story a step."""
    longest = max(map(len, stories))
    config = AutoConfig.from_pretrained(resolve_model("demo"))
    config.dtype = "float32"
    cache = StaticKVCacheConfig(max_batch_size=len(stories), max_cache_len=longest, dtype=cache_dtype)
    engine = InferEngine(config, device_type="cpu", cache_config=cache, quantization=quantization)
    engine.load_weights("demo", use_tqdm=False)
    steps = []
    for at in range(longest):
        ids = [[story[at] if at < len(story) else 0] for story in stories]
        step = InferEngine.Input(ids, cache_lengths=[at] * len(stories))
        output = engine.forward(step, return_logits=True)
        assert output.logits is not None
        logits = output.logits.numpy().astype(np.float64)[[at < len(story) for story in stories]]
        logits -= logits.max(axis=-1, keepdims=True)
        steps.append(logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True)))
    engine.close()
    return np.concatenate(steps)


@pytest.fixture(scope="module")
def reference() -> tuple[list[list[int]], NDArray[np.float64]]:
    stories = held_out_tokens()
    return stories, log_probabilities(stories, None)


def fp8_weights(weight: NDArray[np.float32]) -> NDArray[np.float64]:
    """[n, k]: the nearest e4m3 numbers, with a scale for each row."""
    scale = np.abs(weight).max(axis=1, keepdims=True) / 448
    return fp8(weight / scale) * scale


INPUTS_OF_LINEARS = ("input_layernorm", "attention", "post_attention_layernorm", "activation", "final_norm")


class RoundedModel:
    """The float64 model with weights rounded as `quantization` says, and x of each linear as int8: not beside fp8, and
    not with `weights_alone`."""

    def __init__(self, quantization: str | None, weights_alone: bool = False) -> None:
        self.model = ReferenceModel.from_pretrained("demo", dtype="float64")
        for name, weight in self.model.weights.items():
            if weight.ndim == 2 and quantization is not None:
                at_the_ends = name.startswith(("model.embed_tokens", "lm_head"))
                rounded = int8_weights if at_the_ends or quantization == "int8" else int4_weights
                rounded = fp8_weights if quantization == "fp8" and not at_the_ends else rounded
                self.model.weights[name] = rounded(weight.astype(np.float32)).astype(np.float64)
        self.quantization = None if weights_alone or quantization == "fp8" else quantization  # of x

    def round_x(self, name: str, _layer: int, x: NDArray[np.float64]) -> NDArray[np.float64] | None:
        """A tap."""
        if self.quantization is None or not name.endswith(INPUTS_OF_LINEARS):
            return None
        rows = x.reshape(len(x), -1)  # [num_tokens, in_features]
        return quantised_x(rows, "int8" if name == "final_norm" else self.quantization).reshape(x.shape)

    def log_probabilities(self, stories: list[list[int]]) -> NDArray[np.float64]:
        logits = np.concatenate([self.model.forward(story, tap=self.round_x) for story in stories])
        logits -= logits.max(axis=-1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


class RoundedCache(RoundedModel):
    """The float64 model whose keys and values are rounded with a scale for each head of a token, to int8 or to fp8."""

    def __init__(self, dtype: str) -> None:
        super().__init__(None)
        self.dtype = dtype

    def round_x(self, name: str, _layer: int, x: NDArray[np.float64]) -> NDArray[np.float64] | None:
        """A tap."""
        if not name.endswith(("k_rope", "v_proj")):
            return None
        heads = x.reshape(len(x), -1, self.model.config.head_dim)  # [num_tokens, num_kv_heads, head_dim]
        scale = np.abs(heads).max(axis=-1, keepdims=True) / {"int8": 127, "fp8": 448}[self.dtype]
        return ((np.rint if self.dtype == "int8" else fp8)(heads / scale) * scale).reshape(x.shape)


def mean_divergence(exact: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    return float((np.exp(exact) * (exact - other)).sum(axis=-1).mean())


@pytest.fixture(scope="module")
def exact_in_numpy() -> NDArray[np.float64]:
    return RoundedModel(None).log_probabilities(held_out_tokens())


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_the_loss_is_that_of_the_same_rounding_in_numpy(
    reference: tuple[list[list[int]], NDArray[np.float64]], exact_in_numpy: NDArray[np.float64], quantization: str
) -> None:
    """Within 10%, each against its own exact model: the kernels lose nothing that the scheme does not."""
    stories, exact = reference
    of_engine = mean_divergence(exact, log_probabilities(stories, quantization))
    of_numpy = mean_divergence(exact_in_numpy, RoundedModel(quantization).log_probabilities(stories))
    assert 0.9 * of_numpy <= of_engine <= 1.1 * of_numpy, (of_engine, of_numpy)


@pytest.mark.parametrize(
    ("quantization", "cache_dtype", "most", "other_best"),
    [
        ("int8", "float32", 1.2e-4, 0.008),
        ("int4", "float32", 1.8e-3, 0.024),
        (None, "int8", 4e-6, 0.003),
        ("int4", "int8", 1.8e-3, 0.024),
    ],
)
def test_kl_divergence_from_float32(
    reference: tuple[list[list[int]], NDArray[np.float64]],
    quantization: str | None,
    cache_dtype: str,
    most: float,
    other_best: float,
) -> None:
    """In nats per token; and the share of tokens whose likeliest successor is another one."""
    stories, exact = reference
    rounded = log_probabilities(stories, quantization, cache_dtype)
    divergence = mean_divergence(exact, rounded)
    others = float((exact.argmax(axis=-1) != rounded.argmax(axis=-1)).mean())
    assert 0 < divergence <= most, divergence
    assert others <= other_best, others


def test_kl_divergence_of_fp8(exact_in_numpy: NDArray[np.float64]) -> None:
    """In numpy: `quantization="fp8"` is of GPUs, whose linears tests/cuda hold to the same weights."""
    rounded = RoundedModel("fp8").log_probabilities(held_out_tokens())
    assert 0 < mean_divergence(exact_in_numpy, rounded) <= 1.6e-4


@pytest.mark.parametrize(("dtype", "most"), [("int8", 4e-6), ("fp8", 1e-4)])
def test_kl_divergence_of_a_cache(exact_in_numpy: NDArray[np.float64], dtype: str, most: float) -> None:
    """In numpy: a cache in fp8 is of GPUs, whose attention tests/cuda hold to the same keys and values, and whose
    rounding they hold to the same rule.
    """
    rounded = RoundedCache(dtype).log_probabilities(held_out_tokens())
    assert 0 < mean_divergence(exact_in_numpy, rounded) <= most


def test_kl_divergence_of_int8_weights_alone(exact_in_numpy: NDArray[np.float64]) -> None:
    """In numpy: x stays as it is, as on GPUs, so what int8 costs beyond this is the rounding of x."""
    rounded = RoundedModel("int8", weights_alone=True).log_probabilities(held_out_tokens())
    assert 0 < mean_divergence(exact_in_numpy, rounded) <= 2e-5
