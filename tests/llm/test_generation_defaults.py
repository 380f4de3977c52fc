"""Defaults of generation: of the model's makers, unless the caller says otherwise; the same for LLM, CLI and models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli.support import run

from infinilm import LLM, AutoLlamaModel, ConfigError, RequestError, SamplingParams
from llm import tiny
from llm.support import PATIENCE, tokens

pytestmark = pytest.mark.one_rank  # a text of the checkpoint, read before a model is loaded

PROMPT = [5, 6, 7]
FILE = {
    "do_sample": True,
    "temperature": 0.7,
    "top_k": 9,
    "top_p": 0.8,
    "max_new_tokens": 6,
    "eos_token_id": [tiny.EOS],
}


def checkpoint(folder: Path, **values: Any) -> Path:
    tiny.make_checkpoint(folder)
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("defaults") / "m", **FILE)


def generated(llm: LLM, *args: Any, **sampling: Any) -> list[int]:
    return tokens(llm.generate(PROMPT, *args, ignore_eos=True, use_tqdm=False, **sampling))[0]


def test_defaults_keywords_and_whole_params(folder: Path) -> None:
    with LLM(folder, generation_config="none", use_tqdm=False) as plain, LLM(folder, use_tqdm=False) as llm:
        assert plain.default_sampling_params == SamplingParams()
        said = {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "max_tokens": 6}
        assert llm.default_sampling_params == llm.get_default_sampling_params() == SamplingParams(**said)
        for seed in range(5):
            whole = {"seed": seed, "max_tokens": 12}
            # nothing said: all of the file
            assert generated(llm, seed=seed) == generated(plain, seed=seed, **said)
            # a keyword changes one thing
            assert generated(llm, **whole) == generated(plain, **(said | whole))
            assert generated(llm, temperature=0, seed=seed) == generated(plain, temperature=0, max_tokens=6)
            # SamplingParams are taken whole
            assert generated(llm, SamplingParams(**whole)) == generated(plain, **whole)
        assert any(generated(llm, seed=s, max_tokens=12) != generated(plain, seed=s, max_tokens=12) for s in range(5))


def test_streams_and_requests_have_them_too(folder: Path) -> None:
    with LLM(folder, use_tqdm=False) as llm:
        want = generated(llm, seed=3)
        assert [e.token_id for e in llm.stream(PROMPT, seed=3, ignore_eos=True)] == want
        assert list(llm.submit(PROMPT, seed=3, ignore_eos=True).result(PATIENCE).outputs[0].token_ids) == want


def test_the_command_line_has_them(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def command(*options: str) -> list[int]:
        arguments = ("--model", folder, "--token-ids", "--no-echo", "--ignore-eos", *options, "5 6 7")
        assert run("generate", *arguments) == 0
        return list(map(int, capsys.readouterr().out.split()))

    with LLM(folder, use_tqdm=False) as llm:
        assert command("--seed", "3") == generated(llm, seed=3)
        assert command("--temperature", "0", "--max-tokens", "9") == generated(llm, temperature=0, max_tokens=9)


@pytest.mark.parametrize("backend", ["cpp", "python"])
def test_models_have_them(folder: Path, backend: Any) -> None:
    with LLM(folder, use_tqdm=False) as llm, AutoLlamaModel.from_pretrained(folder, "cpu", backend=backend) as model:
        for seed in range(3):
            got = model.generate(PROMPT, stop_on_eos=False, seed=seed)["output_token_ids"][0]
            assert got == generated(llm, seed=seed)
        greedy = model.generate(PROMPT, stop_on_eos=False, do_sample=False)["output_token_ids"][0]
        assert greedy == generated(llm, temperature=0) and len(greedy) == 6
        assert greedy == model.generate(PROMPT, stop_on_eos=False, temperature=0)["output_token_ids"][0]
        assert len(model.generate(PROMPT, 9, stop_on_eos=False)["output_token_ids"][0]) == 9


@pytest.mark.parametrize("backend", ["cpp", "python"])
@pytest.mark.parametrize(
    "said", [{"repetition_penalty": 1.3}, {"min_p": 0.2}, {"min_p": 0.1, "repetition_penalty": 1.7}]
)
def test_models_have_penalty_and_min_p(tmp_path: Path, backend: Any, said: Any) -> None:
    """In numpy, where LLM has its own code."""
    home = checkpoint(tmp_path / "m", do_sample=True, temperature=0.9, top_k=0, max_new_tokens=20, **said)
    rows = [PROMPT, [9], [41, 42, 41]]
    with LLM(home, use_tqdm=False) as llm, AutoLlamaModel.from_pretrained(home, "cpu", backend=backend) as model:
        for greedy in ({}, {"temperature": 0}):
            got = model.generate(rows, stop_on_eos=False, seed=5, **greedy)["output_token_ids"]
            want = [
                tokens(llm.generate(row, seed=5 + i, ignore_eos=True, use_tqdm=False, **greedy))[0]
                for i, row in enumerate(rows)
            ]
            assert got == want
        plain = model.generate(rows, stop_on_eos=False, seed=5, min_p=0.0, repetition_penalty=1.0)["output_token_ids"]
        assert plain != model.generate(rows, stop_on_eos=False, seed=5)["output_token_ids"]


def test_do_sample_false_is_greedy_unless_told(tmp_path: Path) -> None:
    home = checkpoint(tmp_path / "m", do_sample=False, temperature=0.8, max_new_tokens=8)
    with LLM(home, use_tqdm=False) as llm, AutoLlamaModel.from_pretrained(home, "cpu") as model:
        assert llm.default_sampling_params == SamplingParams(temperature=0, max_tokens=8)
        greedy = generated(llm)
        assert greedy == generated(llm) == model.generate(PROMPT, stop_on_eos=False)["output_token_ids"][0]
        drawn = [generated(llm, temperature=1.0, seed=s) for s in range(5)]
        assert any(d != greedy for d in drawn)
        model_drawn = model.generate(PROMPT, stop_on_eos=False, do_sample=True, top_k=-1, seed=0)["output_token_ids"][0]
        assert model_drawn == drawn[0]


def test_max_length(tmp_path: Path) -> None:
    home = checkpoint(tmp_path / "m", max_length=20)
    with LLM(home, use_tqdm=False) as llm, AutoLlamaModel.from_pretrained(home, "cpu") as model:
        assert len(generated(llm)) == 17 and len(generated(llm, max_tokens=30)) == 30
        assert len(generated(llm, SamplingParams(max_tokens=None))) == 125  # taken whole
        with pytest.raises(RequestError, match=r"prompt 0 has 20 tokens, and max_length.*is 20"):
            llm.generate([5] * 20)
        rows = model.generate([PROMPT, [1]], stop_on_eos=False)["output_token_ids"]
        assert [len(row) for row in rows] == [17, 19]
        with pytest.raises(RequestError, match="row 0 has 20 tokens, and max_length"):
            model.generate([5] * 20)
        assert len(model.generate([5] * 20, 3, stop_on_eos=False)["output_token_ids"][0]) == 3


def test_a_default_beyond_the_context_is_cut(tmp_path: Path) -> None:
    home = checkpoint(tmp_path / "m", max_new_tokens=10**6)
    with LLM(home, use_tqdm=False) as llm, AutoLlamaModel.from_pretrained(home, "cpu") as model:
        assert len(generated(llm, temperature=0)) == 125
        assert len(model.generate(PROMPT, stop_on_eos=False)["output_token_ids"][0]) == 125


def test_end_of_text_of_another_file(folder: Path, tmp_path: Path) -> None:
    with LLM(folder, use_tqdm=False) as llm:
        ids = generated(llm, temperature=0)
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"eos_token_id": ids[2]}))
    with LLM(folder, generation_config=other, use_tqdm=False) as llm:
        output = llm.generate(PROMPT, temperature=0, use_tqdm=False)[0].outputs[0]
        assert list(output.token_ids) == ids[:3] and output.finish_reason == "stop"


def test_a_bad_file_is_told_before_anything_is_loaded(tmp_path: Path) -> None:
    home = checkpoint(tmp_path / "m", temperature=-2)
    (home / "model.safetensors").unlink()
    for load in (lambda: AutoLlamaModel.from_pretrained(home, "cpu"), lambda: LLM(home, load_format="dummy")):
        with pytest.raises(ConfigError, match=r"generation_config.json: temperature is -2"):
            load()
    with LLM(home, load_format="dummy", generation_config="none", use_tqdm=False) as llm:
        assert len(generated(llm, max_tokens=3)) == 3


def test_the_bundled_model_tells_clean_stories() -> None:
    """Its makers say 0.7 and 0.95; at temperature 1 it makes up words."""
    with LLM("demo", use_tqdm=False) as llm:
        assert llm.default_sampling_params == SamplingParams(temperature=0.7, top_p=0.95, max_tokens=320)
        scores = [
            np.mean([x for x in score.logprobs if x is not None])
            for score in llm.score([o.outputs[0].text for o in llm.generate(["Once upon a time"] * 8, use_tqdm=False)])
        ]
    assert np.mean(scores) > -1.0
