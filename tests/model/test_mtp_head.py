"""MTP heads: the engine computes the same as the numpy model in float64, in any pieces and chains."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray
from reference.checkpoint import read_checkpoint
from speculation.heads import HEADS, NUM_MODULES, entry_with_head, make_with_head

from infinilm import _core
from infinilm.checkpoint import load_weights, open_checkpoint
from infinilm.config.json.model_config import AutoConfig
from infinilm.config.spec import MtpFormat, build_spec
from infinilm.errors import ConfigError, InfinilmError, RequestError
from infinilm.models.reference.model import ReferenceModel
from infinilm.scheduling.layout import most_probable

BLOCK_SIZE, NUM_BLOCKS = 4, 24
EXACT = MtpFormat()
EMBEDDING = "model.embed_tokens.weight"


class Heads:
    """A model with its head, in the engine and in numpy."""

    def __init__(
        self,
        folder: Path,
        name: str,
        form: MtpFormat = EXACT,
        changes: Mapping[str, NDArray[Any]] = MappingProxyType({}),
        **options: Any,
    ) -> None:
        make_with_head(folder, name, **changes)
        self.config = AutoConfig.from_pretrained(folder)
        self.ids = np.random.default_rng(3).integers(0, self.config.vocab_size, 40).astype(np.int32)
        self.spec = build_spec(self.config, dtype="float32", max_model_len=96, mtp=form)
        self.engine = _core.InferEngine(self.spec, **{"devices": "cpu", "num_threads": 2, **options})
        with open_checkpoint(folder) as checkpoint:
            load_weights(checkpoint, self.engine, dtype="float32", config=self.config, progress=False)
        self.engine.finish_loading()
        self.logits = np.zeros((0, 0), np.float32)  # of the last step
        self.num_states = 1 if any(layer.cache.states for layer in self.spec.layers) else 0
        self.engine.reset_cache(NUM_BLOCKS, BLOCK_SIZE, "float32", self.num_states)
        self.reference = ReferenceModel(self.config, dtype="float64", max_model_len=96, mtp=form)
        self.reference.load_weights(folder)

    def run(
        self, ids: Any, start: int, hidden_rows: Any = None, rows: Any = None, module: int = 0
    ) -> NDArray[np.float32]:
        """Logits of a step of the model, or of the head, of one sequence: [rows, outputs of the lm_head]."""
        count = len(ids)
        positions = np.arange(start, start + count, dtype=np.int32)
        states: dict[str, Any] = {}
        if self.num_states and hidden_rows is None:
            states = {"state_in": np.array([-1 if start == 0 else 0], np.int32), "state_out": np.zeros(1, np.int32)}
        batch = _core.Batch(
            input_ids=np.asarray(ids, np.int32),
            positions=positions,
            slot_mapping=positions.astype(np.int64),
            block_table=np.arange(NUM_BLOCKS, dtype=np.int32)[None],
            cu_seqlens_q=np.array([0, count], np.int32),
            context_lens=np.array([start + count], np.int32),
            logits_rows=np.arange(count, dtype=np.int32) if rows is None else np.asarray(rows, np.int32),
            hidden_rows=None if hidden_rows is None else np.asarray(hidden_rows, np.int32),
            mtp_module=module,
            return_logits=True,
            **states,
        )
        logits = self.engine.forward(batch).logits
        return np.zeros((0, 0), np.float32) if logits is None else logits.numpy().copy()

    def draw(self, ids: Any, hidden_rows: Any) -> list[int]:
        """The most probable tokens of a step of the head."""
        count = len(ids)
        positions = np.arange(count, dtype=np.int32)
        batch = _core.Batch(
            input_ids=np.asarray(ids, np.int32),
            positions=positions,
            slot_mapping=positions.astype(np.int64),
            block_table=np.arange(NUM_BLOCKS, dtype=np.int32)[None],
            cu_seqlens_q=np.array([0, count], np.int32),
            context_lens=np.array([count], np.int32),
            logits_rows=positions,
            hidden_rows=np.asarray(hidden_rows, np.int32),
            **most_probable(count),
        )
        drawn: Any = self.engine.forward(batch).ids
        return [int(token_id) for token_id in drawn.numpy()]

    def hidden(self) -> NDArray[np.float64]:
        """What the head reads of the model for all ids but the last, in float64: [n - 1, hidden_size]."""
        seen: dict[str, NDArray[np.float64]] = {}

        def tap(name: str, layer: int, activation: NDArray[np.float64]) -> None:
            seen[name] = activation

        self.reference.forward(self.ids[:-1], tap=tap)
        assert self.spec.mtp is not None
        return seen[f"layer{self.spec.num_layers - 1}_residual" if self.spec.mtp.before_norm else "final_norm"]


@pytest.fixture(scope="module", params=HEADS)
def heads(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Heads:
    return Heads(tmp_path_factory.mktemp("heads") / request.param, request.param)


def assert_close(got: NDArray[Any], expected: NDArray[Any]) -> None:
    """float32 over a few layers of at most 80 inputs."""
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-4 * max(1.0, float(np.abs(expected).max())))


def test_logits_are_those_of_the_reference(heads: Heads) -> None:
    expected, _ = heads.reference.draft(heads.ids[1:], heads.hidden())
    heads.run(heads.ids[:-1], 0)
    assert_close(heads.run(heads.ids[1:], 0, np.arange(len(heads.ids) - 1)), expected)


@given(cuts=st.lists(st.integers(1, 38), max_size=4, unique=True))
def test_pieces_give_the_same_bits(heads: Heads, cuts: list[int]) -> None:
    """The head follows steps of any size, and the model is as it is without."""
    n = len(heads.ids) - 1
    whole = heads.run(heads.ids[:-1], 0)
    drafted = heads.run(heads.ids[1:], 0, np.arange(n))
    ends = [*sorted(cuts), n]
    for begin, end in zip([0, *ends], ends, strict=False):
        np.testing.assert_array_equal(heads.run(heads.ids[begin:end], begin), whole[begin:end])
        got = heads.run(heads.ids[begin + 1 : end + 1], begin, np.arange(end - begin))
        np.testing.assert_array_equal(got, drafted[begin:end])


def test_a_chain_goes_on_from_its_own_hidden_state(heads: Heads) -> None:
    cache = heads.reference.new_cache()
    logits, hidden = heads.reference.draft(heads.ids[1:], heads.hidden(), cache)
    n = len(heads.ids) - 1
    heads.run(heads.ids[:-1], 0)
    got, row = heads.run(heads.ids[1:], 0, np.arange(n), [n - 1]), n - 1
    for step in range(4):
        assert_close(got[-1], logits[-1])
        token = [int(logits[-1].argmax())]
        logits, hidden = heads.reference.draft(token, hidden[-1:], cache)
        got, row = heads.run(token, n + step, [row]), 0


def test_rows_in_any_order(heads: Heads) -> None:
    """Only some positions may be wanted of the step before, as where a draft was wrong."""
    heads.run(heads.ids[:-1], 0)
    expected = heads.run(heads.ids[1:5], 0, [0, 1, 2, 3])
    heads.run(heads.ids[:20], 0)
    np.testing.assert_array_equal(heads.run(heads.ids[1:5], 0, [0, 1, 2, 3]), expected)
    heads.run(heads.ids[:-1], 0)
    assert heads.run(heads.ids[1:5], 0, [0, 1, 2, 3], []).size == 0, "a step that only keeps keys and values"


def test_keys_are_stored_without_drafts(heads: Heads) -> None:
    """A step without rows stores what the others read, and the next one goes on from the model's hidden states."""
    n = len(heads.ids) - 1
    heads.run(heads.ids[:-1], 0)
    expected = heads.run(heads.ids[1:], 0, np.arange(n), [n - 1])
    heads.engine.reset_cache(NUM_BLOCKS, BLOCK_SIZE, "float32", heads.num_states)
    heads.run(heads.ids[:-1], 0)
    assert heads.run(heads.ids[1:n], 0, np.arange(n - 1), []).size == 0
    np.testing.assert_array_equal(heads.run(heads.ids[n:], n - 1, [n - 1]), expected)


def test_inputs_that_files_have_in_the_other_order(tmp_path: Path) -> None:
    """MiMo projects the hidden state and then the embedding."""
    make_with_head(tmp_path, "mimo")
    stored = read_checkpoint(tmp_path)["model.mtp_layers.0.input_proj.weight"]
    config = AutoConfig.from_pretrained(tmp_path)
    reference = ReferenceModel(config, mtp=EXACT)
    reference.load_weights(tmp_path)
    loaded = reference.weights[f"model.layers.{config.num_hidden_layers}.eh_proj.weight"]
    hidden, embedding = np.split(stored, 2, axis=1)
    np.testing.assert_array_equal(loaded, np.concatenate((embedding, hidden), axis=1))


# ---- modules in turn ----


@pytest.fixture(scope="module", params=NUM_MODULES)
def modules(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Heads:
    folder = tmp_path_factory.mktemp("modules") / request.param
    size = AutoConfig.from_pretrained(make_with_head(folder, request.param)).vocab_size
    return Heads(folder, request.param, MtpFormat(lm_head_size=size, num_modules=NUM_MODULES[request.param]))


def test_each_module_reads_what_the_one_before_has_left(modules: Heads) -> None:
    """From the residual stream of the model on, with tokens one further, and keys, values and weights of its own."""
    hidden, num_modules = modules.hidden(), modules.spec.mtp.num_modules
    modules.run(modules.ids[:-1], 0)
    rows = np.arange(len(modules.ids) - 1)
    for module in range(num_modules):
        ids, rows = modules.ids[1 + module :], rows[: len(modules.ids) - 1 - module]
        expected, hidden = modules.reference.draft(ids, hidden[: len(ids)], module=module)
        assert_close(modules.run(ids, 0, rows, module=module), expected)


@given(cuts=st.lists(st.integers(1, 38), max_size=4, unique=True))
def test_modules_in_pieces_give_the_same_bits(modules: Heads, cuts: list[int]) -> None:
    """Each piece goes through all of them; steps without rows leave hidden states to the next module, too."""
    most = modules.spec.mtp.num_modules - 1
    n = len(modules.ids) - 1 - most
    modules.run(modules.ids[:n], 0)
    for module in range(most):
        modules.run(modules.ids[1 + module : 1 + module + n], 0, np.arange(n), [], module)
    drafted = modules.run(modules.ids[1 + most :], 0, np.arange(n), module=most)
    ends = [*sorted(cut for cut in cuts if cut < n), n]
    for begin, end in zip([0, *ends], ends, strict=False):
        modules.run(modules.ids[begin:end], begin)
        for module in range(most):
            ids = modules.ids[begin + 1 + module : end + 1 + module]
            modules.run(ids, begin, np.arange(end - begin), [0][: begin % 2], module)
        got = modules.run(modules.ids[begin + 1 + most : end + 1 + most], begin, np.arange(end - begin), module=most)
        np.testing.assert_array_equal(got, drafted[begin:end])


def test_modules_that_are_not_there(modules: Heads) -> None:
    num_modules = modules.spec.mtp.num_modules
    modules.run(modules.ids[:3], 0)
    with pytest.raises(RequestError, match=f"mtp_module is {num_modules}; .* has {num_modules} modules"):
        modules.run(modules.ids[1:3], 0, [0, 1], module=num_modules)
    with pytest.raises(RequestError, match="mtp_module is 1, but this is no step of an MTP head: pass hidden_rows"):
        modules.run(modules.ids[:3], 0, module=1)


# ---- weights of its own ----


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("name", "size"), [("qwen3-5-full", 128), ("deepseek-v3", 33), ("glm4-moe", 17), ("glm4-moe", 1)]
)
def test_an_lm_head_of_its_own(name: str, size: int, ranks: int, tmp_path: Path) -> None:
    """A copy of the model's, or its first rows: logits of the first ids alone, and what is drawn of these."""
    heads = Heads(tmp_path / "heads", name, MtpFormat(lm_head_size=size), devices=["cpu"] * ranks)
    expected, _ = heads.reference.draft(heads.ids[1:], heads.hidden())
    model, _ = Heads(tmp_path / "plain", name).reference.draft(heads.ids[1:], heads.hidden())
    np.testing.assert_allclose(expected, model[:, :size], rtol=0, atol=1e-12)
    n = len(heads.ids) - 1
    heads.run(heads.ids[:-1], 0)
    assert_close(heads.run(heads.ids[1:], 0, np.arange(n))[:, :size], expected)
    heads.run(heads.ids[:-1], 0)
    assert heads.draw(heads.ids[1:], np.arange(n)) == expected.argmax(axis=1).tolist()


@pytest.mark.parametrize("name", ["deepseek-v3", "glm4-moe"])
def test_an_lm_head_that_the_checkpoint_has(name: str, tmp_path: Path) -> None:
    entry = entry_with_head(name)["config"]
    shape = entry["vocab_size"], entry["hidden_size"]
    at = f"model.layers.{entry['num_hidden_layers']}."
    weight = np.random.default_rng(0).choice([-0.25, 0.0, 0.25], shape)  # which the files have exactly
    size = entry["vocab_size"] // 2
    heads = Heads(tmp_path / "own", name, MtpFormat(lm_head_size=size), {f"{at}shared_head.head.weight": weight})
    _, own = heads.reference.draft(heads.ids[1:], heads.hidden())
    n = len(heads.ids) - 1
    heads.run(heads.ids[:-1], 0)
    assert_close(heads.run(heads.ids[1:], 0, np.arange(n)), own @ weight[:size].T)


@pytest.mark.parametrize("name", ["qwen3-5-text", "deepseek-v3"])
def test_fewer_bits(name: str, tmp_path: Path) -> None:
    """The head's weights are those of the format, and no bit of the model changes."""
    plain = Heads(tmp_path / "plain", name)
    size, n = plain.config.vocab_size, len(plain.ids) - 1
    expected, _ = plain.reference.draft(plain.ids[1:], plain.hidden())
    whole = plain.run(plain.ids[:-1], 0)
    errors = []
    for quantization in ("int8", "int4"):
        heads = Heads(tmp_path / quantization, name, MtpFormat(quantization, size))
        np.testing.assert_array_equal(heads.run(heads.ids[:-1], 0), whole)
        got = heads.run(heads.ids[1:], 0, np.arange(n))
        errors.append(float(np.linalg.norm(got - expected) / np.linalg.norm(expected)))
    # Roundings of n bits in some matrices, one behind the other, have an error of some 2 ** -n each.
    assert 1e-4 < errors[0] < 0.03 < errors[1] < 0.4


# ---- bad input ----


def test_an_lm_head_larger_than_the_vocabulary(heads: Heads) -> None:
    spec = build_spec(heads.config, dtype="float32", max_model_len=96, mtp=MtpFormat(None, heads.config.vocab_size + 1))
    with pytest.raises(ConfigError, match="the lm_head of an MTP head has up to "):
        _core.InferEngine(spec, "cpu", 1)


def test_rows_that_are_not_there(heads: Heads) -> None:
    heads.run(heads.ids[:3], 0)
    with pytest.raises(InfinilmError, match=r"hidden_rows\[1\] is 3, expected 0 to 2"):
        heads.run(heads.ids[1:3], 0, [0, 3])
    with pytest.raises(RequestError, match="there is no step before this one, or it failed"):
        heads.run(heads.ids[1:3], 0, [0, 1])
    heads.run(heads.ids[:3], 0)
    assert heads.run(heads.ids[1:3], 0, [0, 1]).shape == (2, heads.config.vocab_size)


def test_a_model_without_a_head(heads: Heads) -> None:
    heads_of = build_spec(heads.config, dtype="float32", max_model_len=96)
    engine = _core.InferEngine(heads_of, "cpu", 1)
    engine.load_dummy("float32")
    engine.finish_loading()
    engine.reset_cache(NUM_BLOCKS, BLOCK_SIZE, "float32", heads.num_states)
    own, heads.engine = heads.engine, engine
    try:
        with pytest.raises(RequestError, match="this model has no MTP head"):
            heads.run(heads.ids[:3], 0, [0, 1, 2])
    finally:
        heads.engine = own
    with pytest.raises(ConfigError, match=r"pass mtp=MtpFormat\(\)"):
        ReferenceModel(heads.config).draft([1], np.zeros((1, heads.config.hidden_size)))


@pytest.mark.parametrize("name", ["qwen3-5-text", "deepseek-v3", "mimo"])
def test_stages(name: str, tmp_path: Path) -> None:
    """The head is in the last stage, which has an embedding for it: the same bits, of the model and of the head."""
    one = Heads(tmp_path / "one", name)
    two = Heads(tmp_path / "two", name, devices=["cpu", "cpu"], num_stages=2)
    embedding = sum(_core.param_bytes(_core.stage_spec(two.spec, stage, 2), "float32")[EMBEDDING] for stage in (0, 1))
    assert embedding == 2 * _core.param_bytes(one.spec, "float32")[EMBEDDING]
    n = len(one.ids) - 1
    for heads in (one, two):
        heads.logits = heads.run(heads.ids[:-1], 0)
    assert two.logits.tobytes() == one.logits.tobytes()
    for heads in (one, two):
        heads.logits = heads.run(heads.ids[1:], 0, np.arange(n))
    assert two.logits.tobytes() == one.logits.tobytes()
    assert two.draw(two.ids[1:3], [0, 1]) == one.draw(one.ids[1:3], [0, 1])


@pytest.mark.parametrize("name", ["qwen3-5-full", "deepseek-v3", "glm4-moe"])
def test_ranks(name: str, tmp_path: Path) -> None:
    one, two = (Heads(tmp_path / str(size), name, devices=["cpu"] * size) for size in (1, 2))
    for heads in (one, two):
        heads.run(heads.ids[:-1], 0)
    n = len(one.ids) - 1
    expected = one.run(one.ids[1:], 0, np.arange(n))
    assert_close(two.run(two.ids[1:], 0, np.arange(n)), expected)


def test_memory_is_counted(tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(make_with_head(tmp_path / "full", "qwen3-5-full"))
    spec, alone = (build_spec(config, dtype="float32", max_model_len=96, mtp=mtp) for mtp in (MtpFormat(), None))
    assert spec.kv_bytes_per_token("float32") * 4 == alone.kv_bytes_per_token("float32") * 5
    assert set(_core.param_shapes(spec)) > set(_core.param_shapes(alone))
