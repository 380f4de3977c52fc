"""sample, find_best, log_probs and uniform: the documented procedures, id for id."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st
from reference import ops as oracle
from reference.ops import Array

from infinilm import _core
from infinilm.errors import InfinilmError
from ops import support
from ops.support import Output, assert_bitwise, backend, call, each_isa, each_threads, framed

MARGIN = 1e-9  # decisions closer than this to a boundary depend on the order of summation


@dataclass
class Requests:
    """Sampling parameters of a batch of rows, each [num_rows]."""

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    random_val: Array

    @staticmethod
    def of(
        num_rows: int,
        temperature: Any = 1.0,
        top_k: Any = 0,
        top_p: Any = 1.0,
        min_p: Any = 0.0,
        random_val: Any = 0.5,
    ) -> Requests:
        """Scalars, or one value per row."""
        full = [
            np.broadcast_to(np.asarray(value, kind), num_rows).copy()
            for value, kind in (
                (temperature, np.float32), (top_k, np.int32), (top_p, np.float32), (min_p, np.float32),
                (random_val, np.float32),
            )
        ]  # fmt: skip
        return Requests(*full)

    def columns(self) -> tuple[Array, ...]:
        return self.temperature, self.top_k, self.top_p, self.min_p, self.random_val


def draw(
    b: Any,
    logits: Array,
    requests: Requests,
    pad: tuple[int, int] = (0, 0),
    token_ids: Array | None = None,
    mask: oracle.Mask | None = None,
) -> Array:
    ids = Output((len(logits),), np.int32)
    names = None if token_ids is None else framed(token_ids, pad)
    masks = [None, None] if mask is None else [framed(mask.allowed, pad), framed(mask.allowed_row)]
    call(b, "sample", framed(logits, pad), *(framed(c) for c in requests.columns()), ids, names, *masks)
    return ids.check()


def find_best(
    b: Any,
    logits: Array,
    k: int,
    first_id: int = 0,
    pad: tuple[int, int] = (0, 0),
    mask: oracle.Mask | None = None,
) -> tuple[Array, Array]:
    best, ids = Output((len(logits), k)), Output((len(logits), k), np.int32)
    masks = [None, None] if mask is None else [framed(mask.allowed, pad), framed(mask.allowed_row)]
    call(b, "find_best", framed(logits, pad), best, ids, first_id, *masks)
    return best.check(), ids.check()


def make_logits(rng: np.random.Generator, num_rows: int, vocab_size: int, kind: str) -> Array:
    """Shapes of logits: smooth, with many ties, all equal, one dominant, and with masked (-inf) entries."""
    logits = (rng.standard_normal((num_rows, vocab_size)) * 3).astype(np.float32)
    if kind == "ties":
        logits = np.round(logits)
    elif kind == "equal":
        logits[...] = logits[:, :1]
    elif kind == "peaked":
        logits[np.arange(num_rows), rng.integers(0, vocab_size, num_rows)] += 30
    elif kind == "masked":
        keep = rng.integers(0, vocab_size, num_rows)
        hidden = rng.random(logits.shape) < 0.5
        hidden[np.arange(num_rows), keep] = False
        logits[hidden] = -np.inf
    return logits


def make_requests(rng: np.random.Generator, num_rows: int, vocab_size: int) -> Requests:
    """A mixed batch: every row its own parameters."""
    below_one = np.float32(1 - 2**-24)
    return Requests.of(
        num_rows,
        temperature=rng.choice([0.0, 0.01, 0.3, 0.7, 1.0, 1.0, 1.5, 100.0], num_rows),
        top_k=rng.choice([-1, 0, 1, 2, 5, 40, vocab_size, vocab_size + 1], num_rows),
        top_p=rng.choice([0.0, 1e-6, 0.1, 0.5, 0.9, 0.95, 0.999, 1.0, 1.0], num_rows),
        min_p=rng.choice([0.0, 0.0, 0.0, 0.01, 0.1, 0.5, 1.0], num_rows),
        random_val=np.where(
            rng.random(num_rows) < 0.2,
            rng.choice([0.0, 0.5, below_one], num_rows),
            rng.integers(0, 2**24, num_rows) * 2.0**-24,
        ),
    )


@each_isa
@each_threads
@given(
    num_rows=st.sampled_from((1, 2, 3, 7, 33)),
    vocab_size=support.sizes,
    kind=st.sampled_from(("smooth", "ties", "equal", "peaked", "masked")),
    pad=support.pads,
    seed=support.seeds,
)
def test_ids_equal_the_oracle(
    isa: str, threads: int, num_rows: int, vocab_size: int, kind: str, pad: tuple[int, int], seed: int
) -> None:
    """A mixed batch: exactly the oracle's ids, except rows within 1e-9 of a boundary."""
    rng = np.random.default_rng(seed)
    logits, requests = make_logits(rng, num_rows, vocab_size, kind), make_requests(rng, num_rows, vocab_size)
    want, margin = oracle.sample(logits.astype(np.float64), *requests.columns())
    clear = margin > MARGIN
    assume(clear.any())
    got = draw(backend(isa, threads), logits, requests, pad)
    wrong = np.flatnonzero((got != want) & clear)
    assert wrong.size == 0, [
        (int(r), int(got[r]), int(want[r]), [float(c[r]) for c in requests.columns()]) for r in wrong[:3]
    ]
    assert ((got >= 0) & (got < vocab_size)).all()


@each_isa
@each_threads
def test_large_vocabulary(isa: str, threads: int) -> None:
    """Qwen's 151936 entries: exactly the oracle's ids."""
    rng = np.random.default_rng(3)
    logits, requests = make_logits(rng, 7, 151936, "smooth"), make_requests(rng, 7, 151936)
    want, margin = oracle.sample(logits.astype(np.float64), *requests.columns())
    clear = margin > MARGIN
    assert clear.sum() >= 5
    got = draw(backend(isa, threads), logits, requests)
    assert got[clear].tolist() == want[clear].tolist()


@each_isa
@pytest.mark.parametrize("kind", ("smooth", "ties", "equal", "peaked", "masked"))
def test_one_row_of_a_large_vocabulary_by_many_threads(isa: str, kind: str) -> None:
    """Threads that share a row draw what one thread draws."""
    rng = np.random.default_rng(7)
    logits, requests = make_logits(rng, 24, 40000, kind), make_requests(rng, 24, 40000)
    want = draw(backend(isa, 1), logits, requests)
    for row in range(24):
        one = Requests(*(c[row : row + 1] for c in requests.columns()))
        for threads in support.THREADS:
            assert_bitwise(draw(backend(isa, threads), logits[row : row + 1], one), want[row : row + 1])


@each_isa
@given(seed=support.seeds, vocab_size=support.sizes)
def test_rows_do_not_depend_on_each_other(isa: str, seed: int, vocab_size: int) -> None:
    """A row alone draws what it draws in a batch, by any number of threads."""
    rng = np.random.default_rng(seed)
    logits, requests = make_logits(rng, 19, vocab_size, "ties"), make_requests(rng, 19, vocab_size)
    want = draw(backend(isa, 1), logits, requests)
    for threads in support.THREADS:
        assert_bitwise(draw(backend(isa, threads), logits, requests), want, f"{threads} threads")
        for row in range(0, 19, 6):
            part = Requests(*(c[row : row + 1] for c in requests.columns()))
            got = draw(backend(isa, threads), logits[row : row + 1], part)
            assert_bitwise(got, want[row : row + 1], f"row {row} alone")


@each_isa
@pytest.mark.parametrize("vocab_size", support.SIZES)
def test_ties_go_to_the_lowest_id(isa: str, vocab_size: int) -> None:
    """Greedy, top_k = 1, top_p = 0 and min_p over equal logits: -0 ties with 0, and the lowest id comes
    first.
    """
    logits = np.full((4, vocab_size), -1, np.float32)
    first = vocab_size // 2
    logits[:, first:] = 0.0
    logits[:, first] = -0.0
    requests = Requests.of(
        4, temperature=[0, 1, 1, 0.5], top_k=[0, 1, 0, 0], top_p=[1, 1, 0, 1], min_p=[0, 0, 0, 1],
        random_val=[0.9, 0.99, 0.99, 0],
    )  # fmt: skip
    assert draw(backend(isa, 2), logits, requests).tolist() == [first] * 4


@each_isa
def test_masked_tokens_are_never_drawn(isa: str) -> None:
    """-inf logits have no share: with one token left it is drawn whatever random_val is."""
    logits = np.full((3, 33), -np.inf, np.float32)
    logits[:, 19] = -50
    requests = Requests.of(3, temperature=[0, 1, 1.5], random_val=[0.5, 0.0, 1 - 2**-24])
    assert draw(backend(isa, 2), logits, requests).tolist() == [19] * 3


@each_isa
@pytest.mark.parametrize("temperature", (0.5, 1.0, 2.0))
def test_frequencies(isa: str, temperature: float) -> None:
    """20000 draws follow the softmax: chi-square below the 1e-6 quantile of 7 degrees of freedom. Fixed
    seeds.
    """
    logits = np.array([1.5, -0.5, 0.0, 0.25, 1.0, -1.0, 0.75, -2.0], np.float32)
    count = 20000
    random_val = [_core.uniform(1234, position) for position in range(count)]
    requests = Requests.of(count, temperature=temperature, random_val=random_val)
    ids = draw(backend(isa, 2), np.tile(logits, (count, 1)), requests)
    share = oracle.softmax(logits.astype(np.float64) / temperature)
    seen = np.bincount(ids, minlength=8)
    chi_square = float(np.sum((seen - count * share) ** 2 / (count * share)))
    assert chi_square < 40.5, (seen.tolist(), (count * share).round().tolist())


@each_isa
@pytest.mark.parametrize("bad", (np.nan, np.inf, -np.inf))
@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_logits_that_are_no_distribution(isa: str, bad: float, temperature: float) -> None:
    """NaN, +inf or nothing but -inf in a row: an error that names the row, and the next call is right
    again.
    """
    logits = np.zeros((5, 33), np.float32)
    logits[3] = bad if bad < 0 else logits[3]
    logits[3, 17] = bad
    b = backend(isa, 2)
    with pytest.raises(InfinilmError, match=r"^sample: .*row 3\b.*(NaN|inf)"):
        draw(b, logits, Requests.of(5, temperature=temperature))
    logits[3] = 0
    assert draw(b, logits, Requests.of(5, temperature=0)).tolist() == [0] * 5


@each_isa
def test_no_rows(isa: str) -> None:
    """A call with no rows does nothing."""
    assert draw(backend(isa, 2), np.zeros((0, 33), np.float32), Requests.of(0)).size == 0


@each_isa
@given(seed=support.seeds, vocab_size=support.sizes, pad=support.pads)
def test_candidates_that_have_token_ids(isa: str, seed: int, vocab_size: int, pad: tuple[int, int]) -> None:
    """What is drawn is told by its token id; rows that cannot be sampled stay what they are."""
    rng = np.random.default_rng(seed)
    logits, requests = make_logits(rng, 7, vocab_size, "ties"), make_requests(rng, 7, vocab_size)
    token_ids = rng.integers(0, 2**31 - 1, logits.shape).astype(np.int32)
    want = token_ids[np.arange(7), draw(backend(isa, 2), logits, requests)]
    assert_bitwise(draw(backend(isa, 2), logits, requests, pad, token_ids), want)
    logits[3] = np.nan
    with pytest.raises(InfinilmError, match=r"^sample: .*row 3\b.*NaN"):
        draw(backend(isa, 2), logits, requests, pad, token_ids)


@each_isa
@each_threads
@given(
    n=st.sampled_from((0, *support.SIZES)),
    k=st.sampled_from((1, 2, 3, 5, 8, 33, 63, 64)),
    first_id=st.sampled_from((0, 1, 75968, 2**31 - 1000)),
    pad=support.pads,
    seed=support.seeds,
)
def test_best(isa: str, threads: int, n: int, k: int, first_id: int, pad: tuple[int, int], seed: int) -> None:
    """Equal logits by id, +inf before all else and NaN before that, -inf with the first id."""
    logits = oracle.awkward_logits(np.random.default_rng(seed), n)
    oracle.assert_best(find_best(backend(isa, threads), logits, k, first_id, pad), logits, first_id)


@each_isa
@pytest.mark.parametrize("k", (1, 40, 64))
def test_best_of_a_large_vocabulary(isa: str, k: int) -> None:
    """Qwen's 151936 entries, also in ascending order, where each is better than all before."""
    logits = oracle.awkward_logits(np.random.default_rng(k), 151936)
    logits[0].sort()
    oracle.assert_best(find_best(backend(isa, 2), logits, k), logits, 0)
    assert find_best(backend(isa, 2), logits[:0], k)[0].size == 0


@each_isa
@given(seed=support.seeds, vocab_size=support.sizes, num_parts=st.sampled_from((1, 2, 3, 8)))
def test_the_best_of_parts_decide(isa: str, seed: int, vocab_size: int, num_parts: int) -> None:
    """Sampling from the best of each part of a vocabulary is sampling from all of it, where no more are kept."""
    rng, b = np.random.default_rng(seed), backend(isa, 2)
    logits, requests = make_logits(rng, 19, vocab_size, "ties"), make_requests(rng, 19, vocab_size)
    requests.top_k = rng.choice([1, 2, 5, 40, 64], 19).astype(np.int32)
    part = -(-vocab_size // num_parts)
    parts = [find_best(b, logits[:, first : first + part], 64, first) for first in range(0, num_parts * part, part)]
    best, token_ids = (np.concatenate([found[i] for found in parts], axis=1) for i in range(2))
    assert_bitwise(draw(b, best, requests, token_ids=token_ids), draw(b, logits, requests))


@each_isa
@each_threads
@given(
    num_rows=st.sampled_from((1, 2, 3, 7, 33)),
    vocab_size=support.sizes,
    kind=st.sampled_from(("smooth", "ties", "equal", "peaked")),
    pad=support.pads,
    seed=support.seeds,
)
def test_masked_ids_equal_the_oracle(
    isa: str, threads: int, num_rows: int, vocab_size: int, kind: str, pad: tuple[int, int], seed: int
) -> None:
    """Rows with masks of their own, shared ones and none: the oracle's ids of logits that are -inf where a bit is 0."""
    rng = np.random.default_rng(seed)
    logits, requests = make_logits(rng, num_rows, vocab_size, kind), make_requests(rng, num_rows, vocab_size)
    mask = oracle.random_mask(rng, num_rows, vocab_size)
    masked = mask.apply(logits)
    b = backend(isa, threads)
    got = draw(b, logits, requests, pad, mask=mask)
    assert_bitwise(got, draw(b, masked, requests, pad))
    want, margin = oracle.sample(masked.astype(np.float64), *requests.columns())
    assert (got == want)[margin > MARGIN].all()
    logits[mask.hidden(vocab_size)] = np.nan  # what is not allowed does not count, whatever it is
    assert_bitwise(draw(b, logits, requests, pad, mask=mask), got)


@each_isa
@each_threads
def test_masks_of_a_large_vocabulary(isa: str, threads: int) -> None:
    """Llama's 128256 entries, a few or nearly all of them allowed: as if the others were -inf. By any threads."""
    rng = np.random.default_rng(5)
    logits, requests = make_logits(rng, 9, 128256, "smooth"), make_requests(rng, 9, 128256)
    mask = oracle.random_mask(rng, 9, 128256)
    got = draw(backend(isa, threads), logits, requests, mask=mask)
    assert_bitwise(got, draw(backend(isa, 1), mask.apply(logits), requests))


@each_isa
@each_threads
@pytest.mark.parametrize("vocab_size", (1, 31, 32, 33, 1000))
def test_a_mask_that_allows_nothing(isa: str, threads: int, vocab_size: int) -> None:
    """An error that names the row; bits behind the vocabulary do not count; another row of the mask is drawn."""
    logits, requests = np.zeros((3, vocab_size), np.float32), Requests.of(3)
    allowed = np.zeros((2, (vocab_size + 31) // 32), np.int32)
    if vocab_size % 32:
        allowed[0, -1] = np.int32(-1) << np.int32(vocab_size % 32)
    allowed[1, 0] = 1
    b = backend(isa, threads)
    with pytest.raises(InfinilmError, match=r"^sample: .*row 2\b.*-inf"):
        draw(b, logits, requests, mask=oracle.Mask(allowed, np.array([1, -1, 0], np.int32)))
    assert draw(b, logits, requests, mask=oracle.Mask(allowed, np.array([1, 1, 1], np.int32))).tolist() == [0] * 3


@each_isa
@each_threads
@given(
    n=st.sampled_from((0, *support.SIZES)),
    k=st.sampled_from((1, 2, 5, 33, 64)),
    first_id=st.sampled_from((0, 1, 31, 32, 33, 1000)),
    pad=support.pads,
    seed=support.seeds,
)
def test_best_of_what_is_allowed(
    isa: str, threads: int, n: int, k: int, first_id: int, pad: tuple[int, int], seed: int
) -> None:
    """Bits are by token id, wherever in a word the first column is; NaN that is not allowed does not count."""
    rng = np.random.default_rng(seed)
    logits = oracle.awkward_logits(rng, n)
    mask = oracle.random_mask(rng, 8, first_id + n + int(rng.integers(70)))
    found = find_best(backend(isa, threads), logits, k, first_id, pad, mask)
    oracle.assert_best(found, mask.apply(logits, first_id), first_id)


@each_isa
@given(seed=support.seeds, vocab_size=support.sizes, num_parts=st.sampled_from((2, 3, 8)))
def test_the_best_of_masked_parts_decide(isa: str, seed: int, vocab_size: int, num_parts: int) -> None:
    """Masks of a cut vocabulary: sampling from the best of each part is sampling from all that is allowed."""
    rng, b = np.random.default_rng(seed), backend(isa, 2)
    logits, requests = make_logits(rng, 19, vocab_size, "ties"), make_requests(rng, 19, vocab_size)
    requests.top_k = rng.choice([1, 2, 5, 40, 64], 19).astype(np.int32)
    mask = oracle.random_mask(rng, 19, vocab_size)
    part = -(-vocab_size // num_parts)
    parts = [
        find_best(b, logits[:, first : first + part], 64, first, mask=mask)
        for first in range(0, num_parts * part, part)
        if first <= vocab_size
    ]
    best, token_ids = (np.concatenate([found[i] for found in parts], axis=1) for i in range(2))
    assert_bitwise(draw(b, best, requests, token_ids=token_ids), draw(b, logits, requests, mask=mask))


@each_isa
@pytest.mark.parametrize(
    ("allowed", "allowed_row", "message"),
    [
        (np.ones((2, 2), np.int32), None, "allowed and allowed_row belong together"),
        (None, np.zeros(3, np.int32), "allowed and allowed_row belong together"),
        (
            np.ones((2, 1), np.int32),
            np.zeros(3, np.int32),
            "allowed: expected at least 2 words.*up to 32; got 1",
        ),
        (np.ones((2, 2), np.int64), np.zeros(3, np.int32), "allowed: expected dtype int32"),
        (np.ones((2, 2), np.int32), np.zeros(2, np.int32), "allowed_row: num_rows is 3"),
        (np.ones((2, 2), np.int32), np.array([0, 2, 0], np.int32), r"allowed_row\[1\] is 2, expected -1 to 1"),
        (np.ones((2, 2), np.int32), np.array([0, 0, -2], np.int32), r"allowed_row\[2\] is -2, expected -1 to 1"),
    ],
)
def test_masks_that_do_not_fit(isa: str, allowed: Array | None, allowed_row: Array | None, message: str) -> None:
    """sample and find_best name what is wrong with a mask."""
    b, logits = backend(isa, 2), np.zeros((3, 33), np.float32)
    columns, ids = [framed(c) for c in Requests.of(3).columns()], Output((3,), np.int32)
    masks = [None if array is None else framed(array) for array in (allowed, allowed_row)]
    with pytest.raises(InfinilmError, match=f"^sample: {message}"):
        call(b, "sample", framed(logits), *columns, ids, None, *masks)
    best, best_ids = Output((3, 4)), Output((3, 4), np.int32)
    with pytest.raises(InfinilmError, match=f"^find_best: {message}"):
        call(b, "find_best", framed(logits), best, best_ids, 0, *masks)


@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**40))
def test_uniform_is_philox(seed: int, position: int) -> None:
    """The core's generator equals the oracle's, whose known answers tests/ops/test_oracle.py checks."""
    assert _core.uniform(seed, position) == oracle.uniform(seed, position)


def test_uniform_is_in_range() -> None:
    """[0, 1) with the mean of a uniform draw (five standard deviations of 1e5 draws)."""
    draws = np.array([_core.uniform(7, position) for position in range(100_000)])
    assert draws.min() >= 0 and draws.max() < 1
    assert abs(draws.mean() - 0.5) < 5 * (1 / 12 / len(draws)) ** 0.5


def log_probs(
    b: Any, logits: Array, drawn: Array, counts: Array, width: int, pad: tuple[int, int] = (0, 0)
) -> tuple[Array, Array]:
    """Ids and log-probabilities, [num_rows, width]; -77 where nothing was written."""
    ids, logprobs = np.full((len(logits), width), -77, np.int32), np.full((len(logits), width), -77, np.float32)
    b.log_probs(*(support.tensor(x) for x in (framed(logits, pad), drawn, counts, ids, logprobs)))
    return ids, logprobs


@each_isa
@each_threads
@given(
    n=support.sizes,
    width=st.sampled_from((1, 2, 3, 33, 65, 200)),
    pad=support.pads,
    kind=st.sampled_from(("awkward", "smooth", "ties", "equal", "peaked", "masked")),
    seed=support.seeds,
)
def test_log_probs(isa: str, threads: int, n: int, width: int, pad: tuple[int, int], kind: str, seed: int) -> None:
    """Against float64; other numbers of the best for each row, among them all; a row alone has the same bits."""
    rng, b = np.random.default_rng(seed), backend(isa, threads)
    logits = oracle.awkward_logits(rng, n) if kind == "awkward" else make_logits(rng, 8, n, kind)
    drawn = rng.integers(-1, n, 8).astype(np.int32)
    most = min(width - 1, n)
    counts = np.append(rng.integers(-1, most + 1, 7), most).astype(np.int32)
    got = log_probs(b, logits, drawn, counts, width, pad)
    oracle.assert_log_probs(got, logits, drawn, counts, -77)
    alone = log_probs(backend(isa, 1), logits[7:], drawn[7:], counts[7:], width)
    for values, among in zip(alone, got, strict=True):
        assert_bitwise(values, among[7:])


@each_isa
@pytest.mark.parametrize("rows", (1, 3))
def test_log_probs_of_a_large_vocabulary(isa: str, rows: int) -> None:
    """Qwen's 151936 entries, which several threads cut up among them: the bits of one."""
    rng = np.random.default_rng(rows)
    logits = make_logits(rng, rows, 151936, "ties")
    drawn, counts = rng.integers(0, 151936, rows).astype(np.int32), np.full(rows, 20, np.int32)
    got = log_probs(backend(isa, 4), logits, drawn, counts, 21)
    oracle.assert_log_probs(got, logits, drawn, counts, -77)
    for values, alone in zip(got, log_probs(backend(isa, 1), logits, drawn, counts, 21), strict=True):
        assert_bitwise(values, alone)


def test_log_probs_of_what_is_not_there() -> None:
    """More of the best than there is room for, or than the vocabulary has, and a token that it has not."""
    b, logits = backend("", 1), np.zeros((2, 7), np.float32)
    for drawn, counts, width, message in (
        ([0, 0], [0, 5], 5, r"num_logprobs\[1\]: expected -1 to 4, got 5"),
        ([0, 0], [8, 0], 12, r"num_logprobs\[0\]: expected -1 to 7, got 8"),
        ([0, 0], [0, -2], 5, r"num_logprobs\[1\]: expected -1 to 4, got -2"),
        ([0, 7], [0, 0], 5, r"drawn\[1\]: expected a token id below 7, got 7"),
    ):
        with pytest.raises(InfinilmError, match=f"^log_probs: {message}"):
            log_probs(b, logits, np.array(drawn, np.int32), np.array(counts, np.int32), width)


def test_changes_of_no_step_name_their_tokens() -> None:
    logits, penalties = np.zeros(4, np.float32), np.ones(3, np.float32)
    with pytest.raises(InfinilmError, match="the last one is -1, which is the token that a step computes"):
        _core.change_logits(logits, penalties, np.array([[-1, 0, 0]], np.int32))
    _core.change_logits(logits, penalties, np.zeros((0, 3), np.int32))
