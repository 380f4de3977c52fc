"""`AutoModelForCausalLM`: what programs written for transformers give, and what they get."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from llm import tiny

from infinilm import AutoLlamaModel, AutoModelForCausalLM, ConfigError, DeviceError, RequestError
from infinilm.models.causal_lm import CausalLM
from infinilm.text.generation_config import GenerationConfig
from infinilm.text.tokenizer import Tokenizer

ROW = [5, 6, 7]
PAD = 3


@pytest.fixture(scope="module", params=["cpp", "python"])
def model(request: pytest.FixtureRequest, folder: Path) -> Iterator[CausalLM]:
    with AutoModelForCausalLM.from_pretrained(folder, backend=request.param, torch_dtype="float32") as made:
        yield made.eval()


def plain(model: CausalLM, rows: Any, count: int, **settings: Any) -> list[list[int]]:
    return model.model.generate(rows, count, stop_on_eos=True, **settings)["output_token_ids"]


def test_ids_with_the_prompt(model: CausalLM) -> None:
    out = model.generate(np.array([ROW]), max_new_tokens=6)
    assert isinstance(out, np.ndarray) and out.dtype == np.int64 and out.shape[0] == 1
    assert out[0].tolist() == ROW + plain(model, ROW, 6)[0]
    assert model.generate([ROW], max_new_tokens=6).tolist() == model.generate(ROW, 6).tolist() == out.tolist()
    assert model.generate(np.array([ROW]), max_length=9).tolist() == out.tolist()


def test_a_dict_on_demand(model: CausalLM, folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    out = model.generate([ROW], 6, return_dict_in_generate=True, tokenizer=tokenizer)
    assert out.sequences.tolist() == out["sequences"].tolist() == model.generate([ROW], 6).tolist()
    assert out.output_token_ids == plain(model, ROW, 6) and out.output_content == [
        tokenizer.decode(out.output_token_ids[0])
    ]
    with pytest.raises(AttributeError, match="scores"):
        _ = out.scores


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(4, 200), min_size=1, max_size=9), min_size=1, max_size=4),
    left=st.booleans(),
    masked=st.booleans(),
)
def test_padding_does_not_count(model: CausalLM, rows: list[list[int]], left: bool, masked: bool) -> None:
    width = max(map(len, rows))
    pads = [[PAD] * (width - len(row)) for row in rows]
    ids = np.array([pad + row if left else row + pad for row, pad in zip(rows, pads, strict=True)])
    mask: Any = {"attention_mask": (ids != PAD).astype(np.int64)} if masked else {}
    out = model.generate(ids, max_new_tokens=5, pad_token_id=PAD, **mask)
    assert (out[:, :width] == ids).all()
    new = plain(model, rows, 5)
    longest = max(map(len, new))
    assert out[:, width:].tolist() == [row + [PAD] * (longest - len(row)) for row in new]


def test_padding_that_also_ends_texts_counts_without_a_mask(model: CausalLM) -> None:
    ids = np.array([[tiny.EOS, *ROW]])
    assert model.generate(ids, max_new_tokens=4)[0, 4:].tolist() == plain(model, [tiny.EOS, *ROW], 4)[0]
    masked = model.generate(ids, attention_mask=[[0, 1, 1, 1]], max_new_tokens=4)
    assert masked[0].tolist() == [tiny.EOS, *ROW, *plain(model, ROW, 4)[0]]


class FakeTensor:
    """As much of a torch tensor as is asked of one."""

    def __init__(self, array: Any) -> None:
        self.array = np.asarray(array)

    def detach(self) -> FakeTensor:
        return self

    cpu = detach

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.array

    def new_tensor(self, data: Any) -> FakeTensor:
        return FakeTensor(data)


FakeTensor.__module__ = "torch"


def test_tensors_of_torch_come_back_as_such(model: CausalLM) -> None:
    out = model.generate(FakeTensor([ROW]), 6, attention_mask=FakeTensor([[1, 1, 1]]))
    assert isinstance(out, FakeTensor) and out.array.tolist() == model.generate([ROW], 6).tolist()


def test_no_input_begins_with_bos(model: CausalLM) -> None:
    assert model.generate(max_new_tokens=4)[0].tolist() == [tiny.BOS, *plain(model, [tiny.BOS], 4)[0]]


def test_end_of_text(model: CausalLM) -> None:
    whole = plain(model, ROW, 8)[0]
    out = model.generate([ROW, [9]], max_new_tokens=8, eos_token_id=[whole[2]], pad_token_id=PAD)
    assert out[0, 3:].tolist()[:3] == whole[:3] and set(out[0, 6:].tolist()) <= {PAD}


class FakeTextStreamer:
    """It treats what it gets as a TextStreamer of transformers does."""

    def __init__(self, tokenizer: Tokenizer, skip_prompt: bool) -> None:
        self.tokenizer, self.skip_prompt, self.is_prompt = tokenizer, skip_prompt, True
        self.cache: list[int] = []
        self.text = ""

    def put(self, value: Any) -> None:
        if len(value.shape) > 1 and value.shape[0] > 1:
            raise ValueError("TextStreamer only supports batch size 1")
        if len(value.shape) > 1:
            value = value[0]
        if self.skip_prompt and self.is_prompt:
            self.is_prompt = False
            return
        self.cache.extend(value.tolist())

    def end(self) -> None:
        self.text = self.tokenizer.decode(self.cache)


@pytest.mark.parametrize("skip_prompt", [False, True])
def test_a_text_streamer(model: CausalLM, folder: Path, skip_prompt: bool) -> None:
    streamer = FakeTextStreamer(Tokenizer.from_folder(folder), skip_prompt)
    out = model.generate(np.array([ROW]), max_new_tokens=8, streamer=streamer)[0].tolist()
    assert streamer.cache == out[3 if skip_prompt else 0 :]
    assert streamer.text == streamer.tokenizer.decode(streamer.cache)
    with pytest.raises(ValueError, match="batch size 1"):
        model.generate([ROW, ROW], max_new_tokens=8, streamer=streamer)


class Theirs:
    """A GenerationConfig of transformers."""

    def to_diff_dict(self) -> dict[str, Any]:
        return {"do_sample": True, "temperature": 0.7, "top_k": 9, "max_new_tokens": 7, "transformers_version": "5"}


def test_generation_configs(model: CausalLM, caplog: pytest.LogCaptureFixture) -> None:
    want = plain(model, ROW, 7, temperature=0.7, top_k=9, seed=1)[0]
    for config in (Theirs(), Theirs().to_diff_dict(), GenerationConfig.from_dict(Theirs().to_diff_dict())):
        assert model.generate([ROW], generation_config=config, seed=1)[0, 3:].tolist() == want
    assert model.generate([ROW], 2, generation_config=Theirs(), seed=1)[0, 3:].tolist() == want[:2]
    greedy = model.generate([ROW], generation_config=Theirs(), do_sample=False)[0].tolist()
    assert greedy == model.generate([ROW], 7)[0].tolist()
    end = greedy[5]
    assert model.generate([ROW], 7, generation_config={"eos_token_id": end})[0].tolist() == greedy[:6]
    with caplog.at_level(logging.WARNING, "infinilm"):
        model.generate([ROW], 2, generation_config={"num_beams": 4})
    assert "num_beams" in caplog.text
    with pytest.raises(TypeError, match="generation_config: expected"):
        model.generate([ROW], 2, generation_config=3)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_return_sequences": 2}, RequestError, "num_return_sequences=2 is not available"),
        ({"stop_strings": ["x"]}, RequestError, "stop_strings"),
        ({"min_new_tokens": 3}, RequestError, "min_new_tokens"),
        ({"stopping_criteria": [len]}, RequestError, "stopping_criteria"),
        ({"output_scores": True}, RequestError, "output_scores"),
        ({"temprature": 1}, TypeError, "did you mean 'temperature'"),
        ({"input_ids": "text"}, TypeError, "got a text"),
        ({"input_ids": [1.5]}, RequestError, "lists of token ids"),
        ({"input_ids": np.zeros((1, 2))}, RequestError, "float64"),
        ({"input_ids": np.zeros((1, 2, 3), int)}, RequestError, r"\[1, 2, 3\]"),
        ({"input_ids": [[]]}, RequestError, "row 0 is empty"),
        ({"input_ids": []}, RequestError, "row 0 is empty"),
        ({"input_ids": [[tiny.VOCAB_SIZE]]}, RequestError, "out of range"),
        ({"attention_mask": [[1, 1]]}, RequestError, r"attention_mask: expected the shape.*\[3\].*\[1, 2\]"),
        ({"attention_mask": [[1, 0, 1]]}, RequestError, "attention_mask, row 0"),
        ({"attention_mask": [[0, 0, 0]]}, RequestError, "row 0 is empty"),
        ({"attention_mask": [[0, 2, 1]]}, RequestError, "other numbers"),
        ({"max_new_tokens": None, "max_length": 3}, RequestError, "max_length is 3"),
        ({"max_new_tokens": None, "max_length": "3"}, TypeError, "max_length"),
        ({"pad_token_id": "x"}, TypeError, "pad_token_id"),
        ({"eos_token_id": "x"}, RequestError, "eos_token_id"),
    ],
)
def test_bad_arguments(model: CausalLM, arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        model.generate(**{"input_ids": [ROW], "max_new_tokens": 3} | arguments)
    assert model.generate([ROW], 3, num_beams=1, use_cache=True, stopping_criteria=[]).shape[1] > 3


def test_from_pretrained_in_their_words(folder: Path) -> None:
    for words in ({"torch_dtype": "bfloat16"}, {"device_map": "cpu", "dtype": "bfloat16"}, {"device_map": {"": "cpu"}}):
        with AutoModelForCausalLM.from_pretrained(folder, **words) as model:  # type: ignore[arg-type]
            assert model.device == "cpu"
            assert model.dtype == ("bfloat16" if len(words) == 2 or "torch_dtype" in words else "float32")
    with AutoModelForCausalLM.from_pretrained(folder, "cpu", torch_dtype="auto", device_map=None) as model:
        assert model.dtype == "float32" and "CausalLM" in repr(model)
    with pytest.raises(ConfigError, match="give one"):
        AutoModelForCausalLM.from_pretrained(folder, torch_dtype="float32", dtype="bfloat16")
    with pytest.raises(ConfigError, match="one device for all"):
        AutoModelForCausalLM.from_pretrained(folder, device_map={"a": 0, "b": 1})
    with pytest.raises(ConfigError, match="revision"):  # of a folder; what names one is a hub id
        AutoModelForCausalLM.from_pretrained(folder, revision="v2")
    with pytest.raises(TypeError, match="did you mean 'torch_dtype'"):
        AutoModelForCausalLM.from_pretrained(folder, torch_dtypes="float32")  # type: ignore[arg-type]


def test_the_models_own_generation_config(tmp_path: Path) -> None:
    home = tiny.make_checkpoint(tmp_path / "m")
    (home / "generation_config.json").write_text(json.dumps({"max_new_tokens": 4, "pad_token_id": PAD}))
    with (
        AutoModelForCausalLM.from_pretrained(home, "cpu") as model,
        AutoLlamaModel.from_pretrained(home, "cpu") as other,
    ):
        out = model.generate(np.array([[PAD, PAD, *ROW]]))
        assert out[0].tolist() == [PAD, PAD, *ROW, *other.generate(ROW)["output_token_ids"][0]]


def test_names_of_transformers(model: CausalLM) -> None:
    """What moves a model leaves it where it is, or says that it cannot; what is not there says where it is."""
    assert model.to("cpu") is model.to(device="cpu", dtype=None) is model.cpu() is model.to("float32") is model
    for wanted in ("cuda", "bfloat16"):
        with pytest.raises(ConfigError, match=rf"float32 on cpu and stays so; asked for {wanted}: pass device="):
            model.to(wanted)
    for name, message in {
        "half": "from_pretrained",
        "state_dict": r"engine\.state_dict",
        "train": "nothing to train",
    }.items():
        with pytest.raises(AttributeError, match=f"CausalLM has no attribute '{name}': .*{message}"):
            getattr(model, name)
    with pytest.raises(TypeError, match=r"LLM\(path\)\.forward"):
        model([[1, 2]])


def test_a_device_by_its_number(folder: Path) -> None:
    with pytest.raises((ConfigError, DeviceError), match="cuda"):
        AutoModelForCausalLM.from_pretrained(folder, device_map={"": 999})
