"""MiniMax-M3, whose heads of keys choose the blocks of keys that a token reads: prefixes, caches, chunks and ranks.

A block of keys has 4 tokens in the golden checkpoint, and a token reads 3 of them: what it sees beyond 12 tokens is
chosen.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from goldens import expected_of, golden
from reference.ops import store_int8

from infinilm import LLM, PagedKVCacheConfig, ReferenceModel, SamplingParams

NAME, KEYS, READ = "minimax-m3", 4, 12
SAMPLED = SamplingParams(temperature=0.8, seed=1, max_tokens=20, ignore_eos=True, logprobs=2)


def make(**settings: Any) -> LLM:
    # Drafts would follow the clock, and so would preemptions.
    options = {"dtype": "float32", "max_model_len": 128, "speculation": "off", "use_tqdm": False, **settings}
    return LLM(golden(NAME), **options)


def answers(outputs: Any) -> list[str]:
    """Tokens and their log-probabilities, which have the bits of the logits."""
    return [repr([(o.token_ids, o.logprobs) for o in output.outputs]) for output in outputs]


def prompts() -> list[list[int]]:
    """Some with a common beginning, of lengths on both sides of the ends of blocks of keys."""
    rng = np.random.default_rng(2)
    shared = rng.integers(3, 160, 50).tolist()
    return [shared[: 9 * i] + rng.integers(3, 160, 4 + 7 * i).tolist() for i in range(6)]


@pytest.mark.parametrize("block_size", [4, 6, 10, 16])
def test_prefixes_end_anywhere_in_a_block_of_keys(block_size: int) -> None:
    """Blocks of the cache end at the ends of those of keys or inside of them; a hit changes no bit either way."""
    ids = np.random.default_rng(3).integers(3, 160, 61).tolist()
    cache = PagedKVCacheConfig(block_size=block_size, num_blocks=3 * (128 // block_size + 1))
    lengths = range(READ + 2, len(ids), 5)
    with make(enable_prefix_caching=False) as llm:
        alone = [answers(llm.generate([*ids[:length], 7, 9], SAMPLED, use_tqdm=False)) for length in lengths]
    ends = set()
    with make(kv_cache=cache) as llm:
        llm.generate(ids, SAMPLED, use_tqdm=False)
        for length, expected in zip(lengths, alone, strict=True):
            (output,) = llm.generate([*ids[:length], 7, 9], SAMPLED, use_tqdm=False)
            hit = output.metrics.cached_tokens
            assert hit == length // block_size * block_size
            assert answers([output]) == expected
            ends.add(hit % KEYS)
    assert ends == ({0} if block_size % KEYS == 0 else {0, 2})


@pytest.mark.parametrize("kv_cache_dtype", ["float32", "int8"])
@pytest.mark.parametrize(("chunk", "tokens", "threads"), [(7, 128, 2), (2048, 144, 3), (1, 640, 1)])
def test_answers_are_those_given_alone(chunk: int, tokens: int, threads: int, kv_cache_dtype: str) -> None:
    """Bit for bit: whatever the chunks, threads, company, hits of the prefix cache and preemptions."""
    texts, common = prompts(), {"kv_cache_dtype": kv_cache_dtype}
    with make(num_threads=1, max_num_seqs=1, enable_prefix_caching=False, **common) as llm:
        alone = [answers(llm.generate(text, SAMPLED, use_tqdm=False))[0] for text in texts]
        logits = [llm.forward(text).tobytes() for text in texts]
        size = tokens * llm.memory.kv_bytes_per_token
    with make(num_threads=threads, max_num_batched_tokens=chunk, max_num_seqs=5, kv_cache=size, **common) as llm:
        for _ in range(2):  # the second from the prefix cache
            assert answers(llm.generate(texts, SAMPLED, use_tqdm=False)) == alone
        assert [llm.forward(text).tobytes() for text in texts] == logits
        assert (llm.metrics().num_preemptions > 0) == (tokens < 640)


@pytest.mark.parametrize("seed", range(4))
def test_a_cache_of_8_bits_rounds_once(seed: int) -> None:
    """Keys, values and what blocks are chosen by: the same logits as where the numpy model rounds each of them once.

    Near the exact ones they need not be: in a model of random weights, blocks whose scores are near each other take
    each other's place.
    """
    ids = np.random.default_rng(seed).integers(3, 160, 90).tolist()
    reference = ReferenceModel.from_pretrained(golden(NAME), max_model_len=128)
    head_dim = reference.config.head_dim
    assert reference.config.index_head_dim == head_dim

    def round_once(name: str, _layer: int, values: np.ndarray) -> np.ndarray | None:
        if name.partition("_")[2] not in ("k_rope", "v_proj", "index_k"):
            return None
        integers, scales = store_int8(values.reshape(len(values), -1, head_dim))
        return np.asarray(integers * scales[..., None], np.float32).reshape(values.shape)

    exact, want = reference.forward(ids), reference.forward(ids, tap=round_once)
    with make(kv_cache_dtype="int8") as llm:
        got = np.asarray(llm.forward(ids))
    assert np.abs(exact - want)[:READ].max() < 0.1 * np.abs(exact).max()  # where all keys are read
    assert np.abs(got - want).max() < 0.1 * np.abs(exact - want)[:READ].max()


def test_ranks() -> None:
    """Each has its heads of keys, and the indexers of these."""
    expected = expected_of(NAME)
    with make(tensor_parallel_size=2, device="cpu") as llm:
        for _ in range(2):  # the second from the prefix cache
            (output,) = llm.generate(
                expected["input_ids"].tolist(), temperature=0, max_tokens=16, ignore_eos=True, use_tqdm=False
            )
            assert list(output.outputs[0].token_ids) == expected["greedy_ids"].tolist()
