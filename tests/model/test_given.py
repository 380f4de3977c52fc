"""Given embeddings and positions on axes: the engine computes as the numpy model does, in any pieces and company."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from goldens import golden
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from infinilm import _core
from infinilm.checkpoint import load_weights, open_checkpoint
from infinilm.config.json.model_config import AutoConfig
from infinilm.config.spec import GivenEmbeddings, build_spec
from infinilm.errors import ConfigError, InfinilmError, RequestError
from infinilm.models.reference.model import ReferenceModel

BLOCK_SIZE, NUM_BLOCKS, LEVELS, NUM_TOKENS = 4, 32, 3, 24

# Norms before sublayers alone, and norms behind them too, which are joined with sums.
MODELS = ("qwen3", "olmo2")


@dataclass
class Text:
    """Token ids, of which some have an embedding of their own, and positions on three axes."""

    ids: NDArray[np.int32]  # [num_tokens]
    rows: NDArray[np.int32]  # [num_given]: which tokens
    embeddings: NDArray[np.float32]  # [num_given, LEVELS * hidden_size]
    positions: NDArray[np.int32]  # [3, num_tokens]

    def piece(self, begin: int, end: int) -> Text:
        own = (self.rows >= begin) & (self.rows < end)
        return Text(
            self.ids[begin:end], self.rows[own] - begin, self.embeddings[own], self.positions[:, begin:end].copy()
        )


class Model:
    """The same model in the engine and in numpy."""

    def __init__(self, name: str, **options: Any) -> None:
        folder = golden(name)
        self.config = AutoConfig.from_pretrained(folder)
        axes = [i % 3 for i in range(self.config.head_dim // 2)]
        takes = GivenEmbeddings(LEVELS, axes)
        spec = build_spec(self.config, dtype="float32", max_model_len=NUM_BLOCKS * BLOCK_SIZE, given=takes)
        self.engine = _core.InferEngine(spec, **{"devices": "cpu", "num_threads": 2, **options})
        with open_checkpoint(folder) as checkpoint:
            load_weights(checkpoint, self.engine, dtype="float32", config=self.config, progress=False)
        self.engine.finish_loading()
        self.engine.reset_cache(NUM_BLOCKS, BLOCK_SIZE, "float32")
        self.reference = ReferenceModel(
            self.config, dtype="float64", max_model_len=NUM_BLOCKS * BLOCK_SIZE, given=takes
        )
        self.reference.load_weights(folder)

    def text(self, seed: int = 3) -> Text:
        rng = np.random.default_rng(seed)
        rows = np.flatnonzero(rng.random(NUM_TOKENS) < 0.4).astype(np.int32)
        return Text(
            rng.integers(0, self.config.vocab_size, NUM_TOKENS).astype(np.int32),
            rows,
            rng.standard_normal((len(rows), LEVELS * self.config.hidden_size)).astype(np.float32),
            rng.integers(0, 40, (3, NUM_TOKENS)).astype(np.int32),
        )

    def expected(self, text: Text) -> NDArray[np.float64]:
        embeddings = dict(zip(text.rows.tolist(), text.embeddings, strict=True))
        return self.reference.forward(text.ids, rope_positions=text.positions, given=embeddings)

    def run(self, texts: list[Text], starts: list[int], **changed: Any) -> NDArray[np.float32]:
        """Logits of a step of these pieces, each of a sequence that has so many tokens before."""
        counts = [len(text.ids) for text in texts]
        cu_seqlens = np.cumsum([0, *counts]).astype(np.int32)
        positions = [np.arange(start, start + n) for start, n in zip(starts, counts, strict=True)]
        per_sequence = NUM_BLOCKS // len(texts)
        slots = [i * per_sequence * BLOCK_SIZE + own for i, own in enumerate(positions)]
        rows = [text.rows + first for text, first in zip(texts, cu_seqlens[:-1], strict=True)]
        arrays: dict[str, Any] = {
            "input_ids": np.concatenate([text.ids for text in texts]),
            "positions": np.concatenate(positions).astype(np.int32),
            "slot_mapping": np.concatenate(slots).astype(np.int64),
            "block_table": np.arange(len(texts) * per_sequence, dtype=np.int32).reshape(len(texts), -1),
            "cu_seqlens_q": cu_seqlens,
            "context_lens": np.array([own[-1] + 1 for own in positions], np.int32),
            "logits_rows": np.arange(cu_seqlens[-1], dtype=np.int32),
            "rope_positions": np.concatenate([text.positions for text in texts], axis=1),
            "return_logits": True,
        }
        if any(map(len, rows)):
            arrays |= {
                "given": np.concatenate([text.embeddings for text in texts]),
                "given_rows": np.concatenate(rows).astype(np.int32),
            }
        logits = self.engine.forward(_core.Batch(**(arrays | changed))).logits
        assert logits is not None
        return logits.numpy().copy()


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Model:
    return Model(request.param)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_reference(name: str, ranks: int) -> None:
    model = Model(name, devices=["cpu"] * ranks)
    text = model.text()
    expected = model.expected(text)
    np.testing.assert_allclose(model.run([text], [0]), expected, rtol=0, atol=2e-5 * np.abs(expected).max())
    assert (
        np.abs(expected - model.expected(Text(text.ids, text.rows[:0], text.embeddings[:0], text.positions))).max() > 1
    )


@given(cuts=st.lists(st.integers(1, NUM_TOKENS - 1), max_size=4, unique=True), seed=st.integers(0, 99))
def test_pieces_and_company_change_no_bit(model: Model, cuts: list[int], seed: int) -> None:
    text, other = model.text(), model.text(seed)
    whole = model.run([text], [0])
    for begin, end in zip([0, *sorted(cuts)], [*sorted(cuts), NUM_TOKENS], strict=True):
        got = model.run([text.piece(begin, end), other.piece(begin, end)], [begin, begin])
        np.testing.assert_array_equal(got[: end - begin], whole[begin:end])


def test_hooks_see_the_sums_and_change_no_bit(model: Model) -> None:
    text, seen = model.text(), {}
    whole = model.run([text], [0])

    def hook(name: str, _layer: int, tensor: _core.Tensor, _rank: int) -> None:
        seen[name] = tensor.numpy().copy()

    wanted: dict[str, NDArray[np.float64]] = {}
    embeddings = dict(zip(text.rows.tolist(), text.embeddings, strict=True))
    model.reference.forward(
        text.ids,
        rope_positions=text.positions,
        given=embeddings,
        tap=lambda name, _, x: wanted.update({name: x}),
    )
    names = ["embedding", "layer0_residual", "layer1_attention_residual"]
    model.engine.set_hooks(hook, names)
    try:
        np.testing.assert_array_equal(model.run([text], [0]), whole)
    finally:
        model.engine.set_hooks(None, [])
    for name in names:
        np.testing.assert_allclose(seen[name], wanted[name], rtol=0, atol=2e-5 * np.abs(wanted[name]).max())


def test_one_position_counts_on_all_axes(model: Model) -> None:
    text = model.text()
    text.positions[:] = np.arange(NUM_TOKENS)
    np.testing.assert_array_equal(model.run([text], [0]), model.run([text], [0], rope_positions=None))


def test_what_does_not_fit_is_named(model: Model) -> None:
    text = model.text()
    size = model.config.hidden_size
    for changed, told in (
        ({"given_rows": text.rows[:-1]}, "num_given"),
        ({"given": None}, "given"),
        ({"given": text.embeddings[:, :-size].copy()}, f"expected.*{LEVELS * size}|{LEVELS * size}"),
        ({"given_rows": np.full_like(text.rows, text.rows[0])}, "two embeddings"),
        ({"given_rows": text.rows + NUM_TOKENS}, "given_rows"),
        ({"rope_positions": text.positions[:2].copy()}, "rope_positions"),
    ):
        with pytest.raises(InfinilmError, match=told):
            model.run([text], [0], **changed)
    model.run([text], [0])  # the engine is as it was


def test_a_model_of_token_ids_alone_refuses_both() -> None:
    model = Model("qwen3")
    spec = build_spec(model.config, dtype="float32", max_model_len=64)
    engine = _core.InferEngine(spec, "cpu", 1)
    engine.load_dummy("float32", 0)
    engine.finish_loading()
    engine.reset_cache(NUM_BLOCKS, BLOCK_SIZE, "float32")
    model.engine, text = engine, model.text()
    with pytest.raises(RequestError, match="rope_positions"):
        model.run([text], [0])
    with pytest.raises(RequestError, match="token ids alone"):
        model.run([text], [0], rope_positions=None)
    with pytest.raises(ConfigError, match="expected axes of"):
        build_spec(model.config, dtype="float32", max_model_len=64, given=GivenEmbeddings(1, (0, 1)))
