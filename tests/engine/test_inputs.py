"""`InferEngine.Input`: random mixes of prefill, chunks and decode equal requests that run alone, bit for bit; what is
not a valid input is refused by name and changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from goldens import golden
from hypothesis import given, strategies as st
from llm import tiny
from reference import ops

import infinilm
from engine.support import Alone, Foreign, make_engine, run
from infinilm import (
    LLM,
    CacheFullError,
    DeviceError,
    InferEngine,
    PagedKVCacheConfig,
    RequestError,
    SamplingParams,
    StaticKVCacheConfig,
)
from infinilm.errors import InfinilmError

MARGIN = 1e-5  # sampling: float32 in the engine, float64 in the oracle; closer to a boundary either side is right
SEEDS = st.integers(0, 2**32 - 1)


# ---- valid inputs ----


def test_fields_have_defaults_and_can_be_read_and_written() -> None:
    fields = InferEngine.Input()
    for name in ("input_ids", "position_ids", "cache_lengths", "input_lengths", "input_offsets", "block_tables"):
        assert getattr(fields, name) is None
    assert fields.slot_mapping is None
    assert (fields.temperature, fields.top_k, fields.top_p, fields.random_val) == (1.0, 50, 1.0, 0.1)
    fields.input_ids = [[1]]
    fields.temperature = 0
    assert repr(fields) == "Input(input_ids=[[1]], temperature=0, top_k=50, top_p=1.0, random_val=0.1)"
    with pytest.raises(AttributeError):
        fields.block_table = 3  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="Input has no field 'block_table'; did you mean 'block_tables'"):
        InferEngine.Input(block_table=3)  # type: ignore[arg-type]


def test_output(engine: InferEngine) -> None:
    output = engine.forward(InferEngine.Input([[5, 9]]))
    assert output.logits is None
    assert (output.output_ids.shape, output.output_ids.dtype) == ((1,), "int32")
    output = engine.forward(InferEngine.Input([[5, 9]]), return_logits=True)
    assert output.logits is not None
    assert (output.logits.shape, output.logits.dtype) == ((1, tiny.VOCAB_SIZE), "float32")
    first = output.logits.numpy().copy()
    engine.forward(InferEngine.Input([[7, 7]]), return_logits=True)
    assert np.array_equal(output.logits.numpy(), first), "an output is the caller's"


def random_sampling(rng: np.random.Generator, n: int) -> dict[str, Any]:
    """Parameters of n requests; some are scalars."""
    drawn = {
        "temperature": rng.choice([0.0, 0.3, 1.0, 1.7], n),
        "top_k": rng.choice([-1, 0, 1, 5, 50, 10**6], n),
        "top_p": rng.choice([0.05, 0.5, 0.9, 1.0], n),
        "random_val": rng.random(n, np.float32),
    }
    return {name: values if rng.random() < 0.8 else values[0] for name, values in drawn.items()}


def check_sampled(ids: Any, logits: Any, sampling: dict[str, Any]) -> None:
    """Sampled ids are the oracle's."""
    n = len(ids)
    columns = [
        np.broadcast_to(np.asarray(sampling[name], dtype), (n,))
        for name, dtype in (("temperature", np.float32), ("top_k", np.int64), ("top_p", np.float32))
    ]
    draws = np.broadcast_to(np.asarray(sampling["random_val"], np.float32), (n,))
    expected, margins = ops.sample(logits.astype(np.float64), *columns, np.zeros(n), draws)
    sure = margins > MARGIN
    assert np.array_equal(ids[sure], expected[sure])


class Growing:
    """Sequences that grow chunk by chunk, and what each must give."""

    def __init__(self, alone: Alone, rng: np.random.Generator, n: int) -> None:
        self.alone, self.rng = alone, rng
        self.tokens: list[list[int]] = [[] for _ in range(n)]

    def grow(self, rows: Any, longest: int) -> tuple[list[list[int]], list[int]]:
        """New tokens for each of the rows, and how many are in the cache already."""
        vocab = self.alone.engine.config.vocab_size
        chunks = [
            self.rng.integers(0, vocab, 1 if self.rng.random() < 0.4 else self.rng.integers(1, longest + 1)).tolist()
            for _ in rows
        ]
        cached = [len(self.tokens[row]) for row in rows]
        for row, chunk in zip(rows, chunks, strict=True):
            self.tokens[row] += chunk
        return chunks, cached

    def check(self, rows: Any, logits: Any) -> None:
        for row, got in zip(rows, logits, strict=True):
            assert np.array_equal(got, self.alone.logits(self.tokens[row])), f"request {row}"


def random_integers(rng: np.random.Generator, values: Any) -> Any:
    """The same as a list, or as an array of some integer dtype."""
    dtype = rng.choice(["list", "int32", "int64", "uint16", "tensor"])
    if dtype == "list":
        return np.asarray(values).tolist()
    return infinilm.from_dlpack(np.asarray(values, np.int64)) if dtype == "tensor" else np.asarray(values, dtype)


def check_static(engine: InferEngine, alone: Alone, seed: int) -> None:
    rng = np.random.default_rng(seed)
    max_batch = int(rng.integers(1, 5))
    engine.reset_cache(StaticKVCacheConfig(max_batch, 60))
    growing = Growing(alone, rng, max_batch)
    for _ in range(6):
        rows = range(int(rng.integers(1, max_batch + 1)))
        chunks, cached = growing.grow(rows, 9)
        lengths = [len(chunk) for chunk in chunks]
        seq_len = max(lengths) + int(rng.integers(3))
        ids = np.full((len(chunks), seq_len), rng.choice([0, -1, 10**6]))  # what does not count may be anything
        for row, chunk in enumerate(chunks):
            ids[row, : len(chunk)] = chunk
        fields: dict[str, Any] = {"input_ids": ids, "input_lengths": random_integers(rng, lengths)}
        if set(lengths) == {seq_len} and rng.random() < 0.5:
            del fields["input_lengths"]
        if any(cached) or rng.random() < 0.5:
            fields["cache_lengths"] = random_integers(rng, cached)
        if rng.random() < 0.3:
            fields["position_ids"] = np.asarray(cached)[:, None] + np.arange(seq_len)
        if rng.random() < 0.3:
            fields["input_offsets"] = np.arange(len(chunks) + int(rng.integers(2))) * seq_len
        sampling = random_sampling(rng, len(chunks))
        out, logits = run(engine, **fields, **sampling)
        growing.check(rows, logits)
        check_sampled(out, logits, sampling)


def check_paged(engine: InferEngine, alone: Alone, seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, block_size = int(rng.integers(1, 6)), int(rng.choice([1, 2, 3, 5, 16, 64]))
    max_blocks = -(-60 // block_size)
    num_blocks = n * max_blocks + int(rng.integers(4))
    engine.reset_cache(PagedKVCacheConfig(num_blocks=num_blocks, block_size=block_size))
    tables = rng.permutation(num_blocks)[: n * max_blocks].reshape(n, max_blocks)
    growing = Growing(alone, rng, n)
    for _ in range(6):
        rows = rng.permutation(n)[: int(rng.integers(1, n + 1))]
        chunks, cached = growing.grow(rows, 9)
        lengths = np.array([len(chunk) for chunk in chunks])
        offsets = np.append(0, np.cumsum(lengths))
        in_cache = np.concatenate([c + np.arange(k) for c, k in zip(cached, lengths, strict=True)])
        table = tables[rows].copy()
        needed = -(-(np.array(cached) + lengths) // block_size)
        table[np.arange(max_blocks) >= needed[:, None]] = rng.choice([-1, 0, 10**9])  # not looked at
        fields: dict[str, Any] = {
            "input_ids": [np.concatenate(chunks).tolist()],
            "block_tables": table[:, : max(needed) + int(rng.integers(2))],
        }
        how = rng.choice(["lengths", "starts", "offsets", "both"]) if len(rows) > 1 else rng.choice(["", "lengths"])
        if how in ("lengths", "both"):
            fields["input_lengths"] = random_integers(rng, lengths)
        if how in ("starts", "offsets", "both"):
            fields["input_offsets"] = random_integers(rng, offsets[:-1] if how == "starts" else offsets)
        if any(cached) or rng.random() < 0.5:
            fields["cache_lengths"] = random_integers(rng, cached)
        if rng.random() < 0.3:
            fields["position_ids"] = in_cache if rng.random() < 0.5 else in_cache[None]
        if rng.random() < 0.3:
            request = np.repeat(np.arange(len(rows)), lengths)
            slots = table[request, in_cache // block_size] * block_size + in_cache % block_size
            fields["slot_mapping"] = random_integers(rng, slots)
        sampling = random_sampling(rng, len(rows))
        out, logits = run(engine, **fields, **sampling)
        growing.check(rows, logits)
        check_sampled(out, logits, sampling)


@given(seed=SEEDS)
def test_static_mixes_equal_requests_alone(engine: InferEngine, alone: Alone, seed: int) -> None:
    check_static(engine, alone, seed)


@given(seed=SEEDS)
def test_paged_mixes_equal_requests_alone(engine: InferEngine, alone: Alone, seed: int) -> None:
    check_paged(engine, alone, seed)


@pytest.mark.parametrize("name", ["mistral-window", "qwen2-sliding", "qwen3"])
def test_mixes_in_other_families(name: str) -> None:
    """Sliding windows in all layers and in some, and norms of q and k."""
    alone = Alone(golden(name))
    with alone.engine, make_engine(golden(name)) as engine:
        for seed in range(2):
            check_static(engine, alone, seed)
            check_paged(engine, alone, seed)


def test_blocks_before_the_window_are_not_looked_at() -> None:
    """Where every layer has a window, they may have been given to someone else."""
    folder = golden("mistral-window")
    alone = Alone(folder)
    with alone.engine, make_engine(folder, PagedKVCacheConfig(num_blocks=30, block_size=2)) as engine:
        window = engine.config.sliding_window
        assert window is not None
        tokens = list(range(1, 2 * window + 2))
        table = np.arange(len(tokens) // 2 + 1)[None]
        run(engine, input_ids=[tokens[:-1]], block_tables=table)
        first = (len(tokens) - window) // 2  # the block of the oldest key the last token sees
        table[0, :first] = -1
        decode = {"input_ids": [tokens[-1:]], "cache_lengths": [len(tokens) - 1]}
        assert np.array_equal(run(engine, **decode, block_tables=table)[1][0], alone.logits(tokens))
        table[0, first] = -1
        with pytest.raises(RequestError, match=rf"block_tables\[0, {first}\] is -1"):
            run(engine, **decode, block_tables=table)


def test_positions_are_honoured(engine: InferEngine, alone: Alone) -> None:
    """Attention is relative, rounding is not: shifted positions give nearly the same, scaled ones another answer."""
    engine.reset_cache(StaticKVCacheConfig(2, 20))
    ids = [[5, 9, 2], [5, 9, 2]]
    plain = alone.logits(ids[0])
    shifted = run(engine, input_ids=ids, position_ids=[40, 41, 42])[1]
    assert np.array_equal(shifted[0], shifted[1])
    assert not np.array_equal(shifted[0], plain)
    assert np.abs(shifted[0] - plain).max() <= 1e-4 * np.abs(plain).max()
    mixed = run(engine, input_ids=ids, position_ids=[[0, 1, 2], [0, 3, 9]])[1]
    assert np.array_equal(mixed[0], plain)
    assert np.abs(mixed[1] - plain).max() > 1e-3 * np.abs(plain).max()


def test_a_shared_prefix(engine: InferEngine, alone: Alone) -> None:
    """Two requests may read the blocks of one, and each writes its own."""
    engine.reset_cache(PagedKVCacheConfig(num_blocks=4, block_size=2))
    prefix = [3, 1, 4, 1]
    run(engine, input_ids=[prefix], block_tables=[[2, 0]])
    ids = {"input_ids": [[5, 9, 2]], "input_lengths": [2, 1], "cache_lengths": [4, 4]}
    logits = run(engine, **ids, block_tables=[[2, 0, 1], [2, 0, 3]])[1]
    assert np.array_equal(logits[0], alone.logits([*prefix, 5, 9]))
    assert np.array_equal(logits[1], alone.logits([*prefix, 2]))


def test_a_draw_that_rounds_to_one_is_below_it(engine: InferEngine) -> None:
    engine.reset_cache(StaticKVCacheConfig())
    ids = run(engine, input_ids=[[5, 9]], random_val=1 - 1e-12, top_k=0)[0]
    assert 0 <= ids[0] < tiny.VOCAB_SIZE


# ---- invalid inputs ----

STATIC: dict[str, Any] = {"input_ids": [[5, 9, 2], [7, 1, 1]], "input_lengths": [3, 2], "cache_lengths": [2, 0]}
PAGED: dict[str, Any] = {
    "input_ids": [[5, 9, 2, 7, 1]],
    "input_lengths": [3, 2],
    "cache_lengths": [2, 0],
    "block_tables": [[3, 0], [1, -1]],
}
BAD_OF_BOTH: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"input_ids": None}, RequestError, "input_ids is missing"),
    ({"input_ids": [5, 9]}, RequestError, r"input_ids.*\[batch, seq_len\], .*got \[2\]"),
    ({"input_ids": [[[5]]]}, RequestError, r"input_ids.*\[1, 1, 1\]"),
    ({"input_ids": [[]]}, RequestError, r"input_ids.*\[1, 0\]"),
    ({"input_ids": [[5, 9], [5]]}, RequestError, "input_ids.*rectangular"),
    ({"input_ids": [[0.5]]}, RequestError, "input_ids.*integers.*float64"),
    ({"input_ids": "the"}, RequestError, "input_ids.*integers"),
    ({"input_ids": [[True]]}, RequestError, "input_ids.*bool"),
    ({"input_ids": np.array([[2**64 - 1]], np.uint64)}, RequestError, "input_ids.*18446744073709551615"),
    ({"input_ids": Foreign()}, DeviceError, "input_ids.*device type 2"),
    ({"cache_lengths": [0]}, RequestError, r"cache_lengths.*\[2\].*\[1\]"),
    ({"cache_lengths": [0, -1]}, RequestError, r"cache_lengths\[1\] is -1"),
    ({"cache_lengths": [2**40, 0]}, RequestError, r"cache_lengths\[0\]"),
    ({"cache_lengths": [99, 0]}, CacheFullError, "request 0 would have 102 tokens"),
    ({"cache_lengths": 3}, RequestError, r"cache_lengths.*got \[\]"),
    ({"input_lengths": [3]}, RequestError, "input_lengths"),
    ({"input_lengths": [3, 0]}, RequestError, r"input_lengths\[1\] is 0"),
    ({"input_lengths": [-1, 6]}, RequestError, r"input_lengths\[0\] is -1"),
    ({"input_lengths": [9, 2]}, RequestError, r"input_lengths\[0\] is 9"),
    ({"input_lengths": [[3, 2]]}, RequestError, "input_lengths"),
    ({"input_offsets": [0, 1, 2, 3]}, RequestError, "input_offsets"),
    ({"input_offsets": [1, 2, 3]}, RequestError, "input_offsets"),
    ({"position_ids": [0, 1]}, RequestError, "position_ids"),
    ({"temperature": -1}, RequestError, r"temperature\[0\] is -1"),
    ({"temperature": [1, np.nan]}, RequestError, r"temperature\[1\] is nan"),
    ({"temperature": np.inf}, RequestError, "temperature"),
    ({"temperature": 1e300}, RequestError, "temperature"),
    ({"temperature": [1, 1, 1]}, RequestError, r"temperature.*\[2\].*\[3\]"),
    ({"temperature": "hot"}, RequestError, "temperature.*numbers"),
    ({"top_k": -2}, RequestError, r"top_k\[0\] is -2"),
    ({"top_k": 2**31}, RequestError, "top_k"),
    ({"top_k": 1.5}, RequestError, "top_k.*integers"),
    ({"top_p": 0}, RequestError, "top_p"),
    ({"top_p": [0.5, 1.5]}, RequestError, r"top_p\[1\] is 1.5"),
    ({"top_p": [[0.5, 0.5]]}, RequestError, "top_p"),
    ({"random_val": 1}, RequestError, r"random_val\[0\] is 1"),
    ({"random_val": -0.1}, RequestError, "random_val"),
    ({"random_val": [0.5]}, RequestError, "random_val"),
]
BAD_STATIC: list[tuple[dict[str, Any], type[Exception], str]] = [
    *BAD_OF_BOTH,
    ({"input_ids": [[5, 9, 2], [7, tiny.VOCAB_SIZE, 1]]}, RequestError, r"input_ids\[1, 1\] is 270, expected 0..269"),
    ({"input_ids": [[5, -1, 2], [7, 1, 1]]}, RequestError, r"input_ids\[0, 1\] is -1"),
    ({"input_ids": [[1]] * 5, "input_lengths": None}, CacheFullError, "5 rows.*4.*max_batch_size"),
    ({"cache_lengths": [6, 0]}, CacheFullError, "request 0 would have 9.*max_cache_len"),
    ({"position_ids": [[0, 1, -2], [0, 1, 2]]}, RequestError, r"position_ids\[0, 2\] is -2"),
    ({"position_ids": [0, 2**31, 1]}, RequestError, r"position_ids\[1\]"),
    ({"position_ids": [0, 1, -2]}, RequestError, r"position_ids\[2\]"),  # of one row only
    ({"block_tables": [[0], [1]]}, RequestError, "block_tables.*static"),
    ({"slot_mapping": [0, 1, 2]}, RequestError, "slot_mapping.*static"),
]
BAD_PAGED: list[tuple[dict[str, Any], type[Exception], str]] = [
    *BAD_OF_BOTH,
    ({"input_ids": [[5, 9, 2], [7, 1, 1]]}, RequestError, "input_ids.*paged.*batch is 1"),
    ({"input_ids": [[5, 9, 2, 7, 270]]}, RequestError, r"input_ids\[0, 4\] is 270"),
    ({"block_tables": None}, RequestError, "block_tables is missing.*paged"),
    ({"block_tables": [3, 1]}, RequestError, "block_tables"),
    ({"block_tables": [[], []]}, RequestError, "block_tables"),
    ({"block_tables": [[3, 8], [1, -1]]}, RequestError, r"block_tables\[0, 1\] is 8, expected 0..7"),
    ({"block_tables": [[3, 0], [-1, 1]]}, RequestError, r"block_tables\[1, 0\] is -1"),
    ({"block_tables": [[3, 0.5], [1, -1]]}, RequestError, "block_tables.*integers"),
    ({"block_tables": [[3], [1]]}, CacheFullError, "request 0 would have 5 .*block_tables has room for 4"),
    ({"block_tables": [[3, 1], [1, -1]]}, RequestError, "block 1 is written twice.*requests 0 and 1"),
    ({"block_tables": [[3, 0]]}, RequestError, "input_lengths"),
    ({"input_lengths": None}, RequestError, "input_lengths is missing.*paged"),
    ({"input_lengths": [3, 1]}, RequestError, "input_lengths.*sum of 5.*got 4"),
    ({"input_offsets": [0, 2, 5]}, RequestError, "input_offsets.*input_lengths.*differ"),
    ({"input_offsets": [0, 3, 4], "input_lengths": None}, RequestError, "input_offsets"),
    ({"input_offsets": [0, 5, 5], "input_lengths": None}, RequestError, "input_offsets"),
    ({"input_offsets": [3, 0], "input_lengths": None}, RequestError, "input_offsets"),
    ({"position_ids": [0, 1, -2, 0, 1]}, RequestError, r"position_ids\[2\] is -2"),
    ({"slot_mapping": [14, 15, 0, 4]}, RequestError, r"slot_mapping.*\[5\].*\[4\]"),
    ({"slot_mapping": [14, 15, 0, 4, 32]}, RequestError, r"slot_mapping\[4\] is 32, expected 0..31"),
    ({"slot_mapping": [14, 15, 0, 4, -1]}, RequestError, r"slot_mapping\[4\] is -1"),
    ({"slot_mapping": [14, 15, 0, 4, 6]}, RequestError, r"slot_mapping\[4\] is 6, .*request 1 has slot 5"),
]


@pytest.fixture(scope="module")
def small_static(folder: Path) -> Any:
    with make_engine(folder, StaticKVCacheConfig(4, 8)) as engine:
        yield engine


@pytest.fixture(scope="module")
def small_paged(folder: Path) -> Any:
    with make_engine(folder, PagedKVCacheConfig(num_blocks=8, block_size=4)) as engine:
        yield engine


def fill(engine: InferEngine) -> None:
    """What request 0 of STATIC and PAGED has in the cache."""
    tables = None if isinstance(engine.get_cache_config(), StaticKVCacheConfig) else [[3]]
    run(engine, input_ids=[[8, 6]], block_tables=tables)


def check_good(engine: InferEngine, alone: Alone, good: dict[str, Any]) -> None:
    logits = run(engine, **good)[1]
    assert np.array_equal(logits[0], alone.logits([8, 6, 5, 9, 2]))
    assert np.array_equal(logits[1], alone.logits([7, 1]))


def check_refused(
    engine: InferEngine, alone: Alone, good: dict[str, Any], bad: tuple[dict[str, Any], type[Exception], str]
) -> None:
    change, error, message = bad
    fill(engine)
    with pytest.raises(error, match=f"(?s){message}"):
        run(engine, **(good | change))
    check_good(engine, alone, good)


@pytest.mark.parametrize("bad", BAD_STATIC, ids=lambda bad: str(bad[0])[:50])
def test_bad_static_input(small_static: InferEngine, alone: Alone, bad: Any) -> None:
    check_refused(small_static, alone, STATIC, bad)


@pytest.mark.parametrize("bad", BAD_PAGED, ids=lambda bad: str(bad[0])[:50])
def test_bad_paged_input(small_paged: InferEngine, alone: Alone, bad: Any) -> None:
    check_refused(small_paged, alone, PAGED, bad)


def test_not_an_input(small_static: InferEngine, alone: Alone) -> None:
    for bad in ([[5, 9]], None, {"input_ids": [[5]]}):
        with pytest.raises(TypeError, match=r"InferEngine\.Input"):
            small_static.forward(bad)  # type: ignore[arg-type]
    fill(small_static)
    check_good(small_static, alone, STATIC)


ARRAYS = st.one_of(
    st.none(),
    st.integers(-3, 300),
    st.floats(-2, 2),
    st.text(max_size=2),
    st.lists(st.integers(-2, 9), max_size=6),
    st.lists(st.lists(st.integers(-2, 9), min_size=2, max_size=3), max_size=3),
    st.lists(st.floats(width=32), max_size=3),
    st.integers(-(2**63), 2**63 - 1).map(lambda v: np.array([[v]])),
    st.sampled_from([np.zeros((0, 3), np.int32), np.zeros((2, 2), np.float16), np.array(["a"]), object(), {}, [{}]]),
)
NAMES = InferEngine.Input.__slots__


@pytest.mark.parametrize("kind", ["static", "paged"])
@given(changes=st.lists(st.dictionaries(st.sampled_from(NAMES), ARRAYS, max_size=4), min_size=20, max_size=20))
def test_random_inputs(
    small_static: InferEngine, small_paged: InferEngine, alone: Alone, kind: str, changes: list[dict[str, Any]]
) -> None:
    """They are run or refused, never worse; a good one afterwards gives what it always gives."""
    engine, good = (small_static, STATIC) if kind == "static" else (small_paged, PAGED)
    for change in changes:
        try:
            ids, logits = run(engine, **(good | change))
            assert logits.shape == (len(ids), tiny.VOCAB_SIZE)
        except (InfinilmError, TypeError, ValueError) as error:
            assert isinstance(error, InfinilmError) or "expected" in str(error), repr(error)
    fill(engine)
    check_good(engine, alone, good)


# ---- continuous batching by hand ----


def test_continuous_batching_by_hand_is_generate(folder: Path) -> None:
    """A scheduler on a paged cache, with nothing but the engine layer; its tokens are those of `LLM.generate`."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 256, n).tolist() for n in (1, 17, 4, 30, 9, 12)]
    max_tokens, block_size, budget = 12, 4, 16
    settings = [(0.0, 0), (0.9, 11), (0.0, 0), (1.3, 2**40 + 7), (0.7, 5), (0.0, 0)]  # temperature, seed
    params = [SamplingParams(temperature=t, seed=s, max_tokens=max_tokens, ignore_eos=True) for t, s in settings]
    with LLM(folder, dtype="float32") as llm:
        expected = [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False)]

    engine = make_engine(folder, PagedKVCacheConfig(num_blocks=20, block_size=block_size))
    free = rng.permutation(20).tolist()
    waiting, running = list(range(len(prompts))), []
    tokens = [list(prompt) for prompt in prompts]
    computed = [0] * len(prompts)
    blocks: list[list[int]] = [[] for _ in prompts]
    most_at_once = 0
    while waiting or running:
        worst_case = [-(-(len(prompts[i]) + max_tokens) // block_size) for i in range(len(prompts))]
        while waiting and worst_case[waiting[0]] <= len(free):  # reserve what it can ever need
            i = waiting.pop(0)
            blocks[i] = [free.pop() for _ in range(worst_case[i])]
            running.append(i)
        room, step = budget, []
        for i in sorted(running, key=lambda i: len(tokens[i]) - computed[i]):  # decodes first
            count = min(len(tokens[i]) - computed[i], room)
            if count:
                step.append((i, count))
                room -= count
        most_at_once = max(most_at_once, len(step))
        width = max(len(blocks[i]) for i, _ in step)
        output = engine.forward(
            InferEngine.Input(
                input_ids=[[t for i, n in step for t in tokens[i][computed[i] : computed[i] + n]]],
                input_lengths=[n for _, n in step],
                cache_lengths=[computed[i] for i, _ in step],
                block_tables=[blocks[i] + [-1] * (width - len(blocks[i])) for i, _ in step],
                temperature=[settings[i][0] for i, _ in step],
                random_val=[ops.uniform(settings[i][1], computed[i] + n) for i, n in step],
                top_k=-1,
            )
        )
        for (i, n), token in zip(step, output.output_ids.numpy().tolist(), strict=True):
            computed[i] += n
            if computed[i] == len(tokens[i]):  # else a chunk of the prompt: its sample means nothing
                tokens[i].append(token)
            if len(tokens[i]) == len(prompts[i]) + max_tokens:
                running.remove(i)
                free += blocks[i]
    engine.close()
    assert [t[len(p) :] for t, p in zip(tokens, prompts, strict=True)] == expected
    assert most_at_once > 1
