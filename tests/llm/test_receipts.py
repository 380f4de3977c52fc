"""Receipts: an answer is computed once more from its receipt and is equal, and whatever is changed in one is found."""

from __future__ import annotations

import base64
import io
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli.support import run
from goldens import golden
from hypothesis import given, settings, strategies as st
from lora.adapters import make_adapter
from PIL import Image
from speculation.test_requests import KINDS, PROMPTS
from vision import pictures_of, tokenizer_of

import infinilm
from infinilm import LLM, HookRegistry, Receipt, ReceiptError, RequestError, RequestLimits, Verdict
from infinilm.scheduling.drafting import MAX_REPLAYED_TOKENS
from infinilm.scheduling.states import NUM_LOG_ROWS
from llm import tiny
from llm.test_vision import TEMPLATE as VISION_TEMPLATE, load as load_vision, prompt as vision_prompt


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_checkpoint(tmp_path_factory.mktemp("receipts") / "tiny")


def open_tiny(folder: Path, **changes: Any) -> LLM:
    adapter = folder.parent / "adapter"
    lora = {"one": adapter if adapter.exists() else make_adapter(adapter, folder)}
    return LLM(folder, lora=lora, limits=RequestLimits(max_logprobs=200), use_tqdm=False, **changes)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with open_tiny(folder) as made:
        yield made


def receipts_of(llm: LLM, *prompts: Any, **sampling: Any) -> list[Receipt]:
    outputs = llm.generate(
        list(prompts), return_receipt=True, use_tqdm=False, **{"max_tokens": 40, "seed": 5} | sampling
    )
    receipts = [choice.receipt for output in outputs for choice in output.outputs]
    assert all(isinstance(receipt, Receipt) for receipt in receipts)
    return receipts  # type: ignore[return-value]


@pytest.fixture(scope="module")
def receipt(llm: LLM) -> Receipt:
    """One whose every parameter decides something."""
    (made,) = receipts_of(
        llm, "Once upon a time", temperature=0.9, top_k=50, top_p=0.95, frequency_penalty=0.5, repetition_penalty=1.2,
        logit_bias={7: 1.0}, ignore_eos=True,
    )  # fmt: skip
    return made


# ---- answers about pictures ----


def receipts_of_pictures(llm: LLM, name: str) -> list[Receipt]:
    prompts = [vision_prompt(i, name) for i in range(4)]
    outputs = llm.generate(prompts, temperature=0.9, seed=5, max_tokens=9, ignore_eos=True, return_receipt=True)
    receipts = [output.outputs[0].receipt for output in outputs]
    assert all(receipt is not None for receipt in receipts)
    return receipts  # type: ignore[return-value]


@pytest.mark.parametrize("name", ["qwen3-vl", "gemma3", "idefics3"])
def test_an_answer_about_pictures_is_verified_with_these(name: str, tmp_path: Path) -> None:
    """From JSON, by another engine, which gets the pictures in any order, also as files of another kind."""
    pictures = pictures_of(name)
    with load_vision(name) as llm:
        receipts = receipts_of_pictures(llm, name)
    assert [len(receipt.images) for receipt in receipts] == [1, 2, 0, 3]
    texts = [receipt.to_json() for receipt in receipts]
    assert [Receipt.from_json(text) for text in texts] == receipts
    Image.fromarray(pictures[1]).save(tmp_path / "a.bmp")
    with load_vision(name, enable_prefix_caching=False) as llm:
        shown = [pictures[3], tmp_path / "a.bmp", pictures[2], pictures[0]]
        assert llm.verify(texts, images=shown, use_tqdm=False) == [Verdict("equal")] * 4
        verdicts = llm.verify(texts, images=[pictures[1], pictures[2]], use_tqdm=False)
        assert [verdict.status for verdict in verdicts] == ["incomparable", "equal", "equal", "incomparable"]
        assert (
            f"picture 0 of its prompt is missing, whose pixels have the SHA-256 {receipts[0].images[0]['sha256']}"
            in (verdicts[0].reason)
        )
        other = {**receipts[0].images[0], "prepared": "0" * 64}
        wrong = replace(receipts[0], images=(other,))
        (verdict,) = llm.verify(wrong, images=shown, use_tqdm=False)
        assert verdict.status == "incomparable" and "picture 0 is prepared in another way here" in verdict.reason
        swapped = replace(receipts[1], images=receipts[1].images[::-1])
        (verdict,) = llm.verify(swapped, images=shown, use_tqdm=False)
        assert verdict.status in ("different", "incomparable") and not verdict
        with pytest.raises(RequestError, match="picture 0"):
            llm.verify(texts, images=[b"no picture"])
    with load_vision(name, max_image_pixels=0) as llm:
        (verdict,) = llm.verify(texts[0], images=shown, use_tqdm=False)
        assert verdict.status == "incomparable" and "tower" in verdict.reason


def test_pictures_of_low_detail_are_made_small_again() -> None:
    large = np.random.default_rng(4).integers(256, size=(40, 600, 3), dtype=np.uint8)
    png = io.BytesIO()
    Image.fromarray(large).save(png, "png")
    url = "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()
    part = {"type": "image_url", "image_url": {"url": url, "detail": "low"}}
    settings = {"tokenizer": tokenizer_of("qwen3-vl"), "chat_template": VISION_TEMPLATE}
    with load_vision("qwen3-vl", **settings) as llm:
        asked = [{"role": "user", "content": [part]}]
        receipts = [llm.chat(asked, max_tokens=4, return_receipt=True)[0].outputs[0].receipt for _ in range(2)]
        assert receipts[0] is not None and receipts[0].images[0]["detail"] == "low"
        assert receipts[1] is not None and receipts[1].images == receipts[0].images  # of a file that is known
        assert llm.verify(receipts[0], images=[large], use_tqdm=False) == [Verdict("equal")]


@pytest.mark.parametrize(
    "images",
    [[], "a", [3], [{}], [{"sha256": "ab", "detail": "high", "grid": [1, 1], "tiles": [0, 0], "prepared": "0" * 64}],
     [{"sha256": "0" * 64, "detail": "best", "grid": [1, 1], "tiles": [0, 0], "prepared": "0" * 64}],
     [{"sha256": "0" * 64, "detail": "low", "grid": [1], "tiles": [0, 0], "prepared": "0" * 64}]],
)  # fmt: skip
def test_pictures_of_receipts_are_checked(images: Any, receipt: Receipt) -> None:
    content = json.loads(receipt.to_json())
    content["request"]["images"] = images
    with pytest.raises(ReceiptError, match=r"request.images"):
        Receipt.from_json(content)


# ---- what is equal ----


@pytest.mark.parametrize("kind", KINDS)
def test_kinds(llm: LLM, folder: Path, kind: str) -> None:
    """Each kind of request, from JSON, in company, and where it draws no drafts of its own."""
    receipts = receipts_of(llm, *PROMPTS, **KINDS[kind])
    texts = [receipt.to_json() for receipt in receipts]
    assert [Receipt.from_json(text) for text in texts] == receipts
    before = llm.metrics()
    assert llm.verify(texts, use_tqdm=False) == [Verdict("equal")] * len(receipts)
    assert llm.metrics().num_draft_tokens == before.num_draft_tokens  # what is replayed is not counted


def test_other_engines_of_the_same_kind(folder: Path, llm: LLM, receipt: Receipt) -> None:
    """Threads, chunks, the cache and the longest sequence decide nothing."""
    with open_tiny(folder, num_threads=1, max_num_batched_tokens=9, speculation="off", max_model_len=100) as other:
        assert other.verify([receipt] * 3, use_tqdm=False) == [Verdict("equal")] * 3


def test_a_receipt_changes_no_answer(llm: LLM) -> None:
    for sampling in ({}, {"logprobs": 2}, {"stop": ["e"]}):
        plain, told = (
            llm.generate(PROMPTS, return_receipt=wanted, use_tqdm=False, max_tokens=20, seed=1, **sampling)
            for wanted in (False, True)
        )
        for one, other in zip(plain, told, strict=True):
            (first,), (second,) = one.outputs, other.outputs
            assert first.receipt is None and second.receipt is not None
            assert repr(replace(second, receipt=None)) == repr(first) and second.logprobs == first.logprobs
        (*events, last) = llm.stream("the", return_receipt=True, max_tokens=5, seed=1, **sampling)
        assert all(event.receipt is None for event in events)
        assert (last.logprob is None) == ("logprobs" not in sampling)
        assert isinstance(last.receipt, Receipt) and llm.verify(last.receipt)[0]


def test_answers_that_go_on(llm: LLM, receipt: Receipt) -> None:
    """Nothing is claimed of tokens that came with the request."""
    begin = receipt.token_ids[:9]
    prompt: Any = {"prompt_token_ids": list(receipt.prompt_token_ids), "output_token_ids": begin}
    (rest,) = receipts_of(llm, prompt, temperature=1.0)
    assert rest.num_given == 9 and len(rest.logprobs) == len(rest.token_ids) - 9
    assert llm.verify(rest)[0]


@pytest.mark.parametrize("name", ["qwen3-next", "tiny"])
def test_prompt_and_answer_are_one_pass(folder: Path, name: str) -> None:
    """A model with states verifies so as many tokens as its states can go back."""
    with LLM(folder if name == "tiny" else golden(name), use_tqdm=False) as one:
        (made,) = receipts_of(one, [5, 6, 7, 8], ignore_eos=True, max_tokens=1 + NUM_LOG_ROWS)
        before = one.metrics().num_steps
        assert one.verify(made)[0]
        assert one.metrics().num_steps - before == 1


def test_as_many_tokens_a_step_as_there_is_room_for(folder: Path) -> None:
    with open_tiny(folder, max_model_len=512, max_num_seqs=4) as llm:
        receipts = receipts_of(llm, "the", "a", max_tokens=450, ignore_eos=True)
        before = llm.metrics().num_steps
        assert all(llm.verify(receipts, use_tqdm=False))
        # The prompts, and then both answers, of which a step replays so much; a few more where one had room alone.
        assert llm.metrics().num_steps - before <= 2 * 450 // MAX_REPLAYED_TOKENS + 4


def test_models_with_states_replay_as_much_as_their_log_holds() -> None:
    with LLM(golden("qwen3-5-text"), max_model_len=160, use_tqdm=False) as llm:
        (receipt,) = receipts_of(llm, [1, 2, 3, 4, 5], max_tokens=100, ignore_eos=True)
        before = llm.metrics().num_steps
        assert llm.verify(receipt)[0]
        assert llm.metrics().num_steps - before <= 100 // (1 + NUM_LOG_ROWS) + 2


# ---- what is not ----


def changed(receipt: Receipt, path: tuple[str, ...], value: Any) -> Receipt:
    content = json.loads(receipt.to_json())
    part = content
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    return Receipt.from_json(content)


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_changed_token_or_number_is_found(llm: LLM, receipt: Receipt, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["token", "logprob", "prompt", "shorter", "longer", "end"]))
    place = data.draw(st.integers(0, len(receipt.token_ids) - 1))
    ids, logprobs = list(receipt.token_ids), receipt.logprobs.copy()
    forged = receipt
    if kind == "token":
        ids[place] = data.draw(st.integers(0, llm.config.vocab_size - 1).filter(lambda other: other != ids[place]))
        forged = replace(receipt, token_ids=tuple(ids))
    elif kind == "logprob":
        logprobs[place] = np.nextafter(logprobs[place], np.float32(-np.inf))
        forged = replace(receipt, logprobs=logprobs)
    elif kind == "prompt":
        prompt = list(receipt.prompt_token_ids)
        at = data.draw(st.integers(0, len(prompt) - 1))
        prompt[at] = prompt[at] ^ 1
        forged = replace(receipt, prompt_token_ids=tuple(prompt))
    elif kind == "shorter":
        forged = replace(receipt, token_ids=tuple(ids[: place + 1]), logprobs=logprobs[: place + 1])
        place += 1
    elif kind == "longer":
        forged = replace(receipt, token_ids=(*ids, 5), logprobs=np.append(logprobs, np.float32(-1)))
        place = len(ids)
    else:
        forged, place = replace(receipt, finish_reason="stop"), -1
    if forged == receipt:
        return
    (verdict,) = llm.verify(forged, use_tqdm=False)
    assert verdict.status == "different" and verdict.reason
    if kind in ("token", "logprob", "shorter", "longer"):
        assert verdict.position == place
    elif kind == "end":
        assert verdict.position is None


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", 0.8), ("seed", 6), ("top_k", 1), ("top_p", 0.1), ("frequency_penalty", 0.0),
     ("repetition_penalty", 1.0), ("logit_bias", None), ("min_p", 0.9), ("max_tokens", 39), ("max_tokens", 41),
     ("logit_bias", {"7": 90.0}), ("constraint", {"kind": "regex", "text": "[ab]*"})],
)  # fmt: skip
def test_a_changed_parameter_is_found(llm: LLM, receipt: Receipt, name: str, value: Any) -> None:
    forged = changed(receipt, ("request", name), value)
    if name == "constraint":
        forged = changed(forged, ("request", "ignore_eos"), False)
    (verdict,) = llm.verify(forged)
    assert verdict.status == "different" and verdict.reason


def test_a_changed_weight_is_found(folder: Path, receipt: Receipt, tmp_path: Path) -> None:
    """By the fingerprint; and by the log-probabilities, if the receipt claims these weights."""
    other = tiny.make_checkpoint(tmp_path / "other")
    file = other / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 0x80  # the sign of the last weight
    file.write_bytes(data)
    with LLM(other, use_tqdm=False) as llm:
        (verdict,) = llm.verify(receipt)
        assert (verdict.status, verdict.position) == ("incomparable", None) and "weights" in verdict.reason
        (own,) = receipts_of(llm, "the")
        (verdict,) = llm.verify(replace(receipt, model=own.model))
        assert verdict.status == "different"


def test_other_arithmetic_is_told(folder: Path, llm: LLM, receipt: Receipt) -> None:
    for name, value in (("kernels", "other"), ("version", "0.0.0"), ("dtype", "float16"), ("num_ranks", 3)):
        (verdict,) = llm.verify(changed(receipt, ("engine", name), value))
        assert verdict.status == "incomparable" and name in verdict.reason
    with LLM(folder, quantization="int8", use_tqdm=False) as other:
        (verdict,) = other.verify(receipt)
        assert verdict.status == "incomparable" and "quantization is None in the receipt, 'int8' here" in verdict.reason


def test_the_adapter_is_found_by_what_it_is(folder: Path, llm: LLM) -> None:
    (made,) = receipts_of(llm, "the", lora="one")
    with LLM(folder, lora={"another name": folder.parent / "adapter"}, use_tqdm=False) as other:
        assert other.verify(made)[0]
    with LLM(folder, use_tqdm=False) as other:
        (verdict,) = other.verify(made)
        assert verdict.status == "incomparable" and "adapter" in verdict.reason


def test_what_cannot_run_here(folder: Path, receipt: Receipt) -> None:
    with open_tiny(folder, max_model_len=len(receipt.prompt_token_ids)) as other:
        (verdict,) = other.verify(receipt)
        assert verdict.status == "incomparable" and "max_model_len" in verdict.reason
    with LLM(folder, limits=RequestLimits(max_seconds=1e-6), use_tqdm=False) as other:
        (verdict,) = other.verify(receipt)
        assert verdict.status == "incomparable" and "the request failed" in verdict.reason


def test_an_adapter_that_takes_the_place_of_another(folder: Path, tmp_path: Path) -> None:
    place = make_adapter(tmp_path / "adapter", folder)
    with LLM(folder, lora={"one": place}, use_tqdm=False) as llm:
        (made,) = receipts_of(llm, "the", lora="one")
        llm.remove_lora("one")
        config = json.loads((place / "adapter_config.json").read_text())
        (place / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 2 * config["lora_alpha"]}))
        llm.add_lora("one", place)
        (verdict,) = llm.verify(made)
        assert verdict.status == "incomparable" and "adapter" in verdict.reason


# ---- bad input ----


def test_what_no_receipt_can_name(folder: Path, receipt: Receipt) -> None:
    hooks = HookRegistry()
    with LLM(folder, hooks=hooks, use_tqdm=False) as llm:
        handle = hooks.register_hook("embedding", lambda *_: None)
        with pytest.raises(infinilm.RequestError, match=r"return_receipt: .* hooks"):
            llm.generate("the", return_receipt=True)
        with pytest.raises(infinilm.RequestError, match=r"verify: .* hooks"):
            llm.verify(receipt)
        handle.remove()
        with pytest.raises(infinilm.RequestError, match="logits_processor"):
            llm.generate("the", return_receipt=True, logits_processor=lambda _, logits: logits)
        assert llm.verify(receipts_of(llm, "the"))[0]
    with open_tiny(folder, seed=3) as llm:
        file = folder / "model.safetensors"
        os.utime(file, (1, 1))
        with pytest.raises(infinilm.WeightError, match="was written after the model was loaded"):
            llm.generate("the", return_receipt=True)
        assert llm.generate("the", max_tokens=1)


def test_an_answer_that_did_not_end_has_none(llm: LLM) -> None:
    request = llm.submit("the", return_receipt=True, max_tokens=60, ignore_eos=True)
    request.cancel()
    assert request.result().outputs[0].receipt is None


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (("receipt",), 2, '"receipt": 1'),
        (("receipt",), True, '"receipt": 1'),
        (("more",), 1, "'more'"),
        (("model",), [], "model: expected an object"),
        (("answer",), {"token_ids": [1]}, "answer: expected the keys"),
        (("answer", "token_ids"), [], r"answer\.token_ids"),
        (("answer", "token_ids"), [-1], r"answer\.token_ids"),
        (("answer", "token_ids"), [1.0], r"answer\.token_ids"),
        (("answer", "token_ids"), "12", r"answer\.token_ids"),
        (("answer", "num_given"), -1, r"answer\.num_given"),
        (("answer", "num_given"), True, r"answer\.num_given"),
        (("answer", "logprobs"), "AA==", r"answer\.logprobs"),
        (("answer", "logprobs"), "!", r"answer\.logprobs"),
        (("answer", "logprobs"), 5, r"answer\.logprobs"),
        (("answer", "finish_reason"), "abort", r"answer\.finish_reason"),
        (("answer", "stop_reason"), [], r"answer\.stop_reason"),
        (("request", "prompt_token_ids"), None, r"request\.prompt_token_ids"),
        (("request", "n"), 2, "request: expected the keys"),
        (("request", "temperature"), "hot", "request: temperature"),
        (("request", "temperature"), -1, "request: temperature"),
        (("request", "constraint"), {"kind": "regex"}, "request"),
        (("request", "constraint"), {"kind": "regex", "text": "("}, "request"),
        (("request", "logit_bias"), {"x": 1}, "request"),
        (("signature",), {"key": "x"}, "signature: expected the texts key and value"),
    ],
)  # fmt: skip
def test_what_is_no_receipt(llm: LLM, receipt: Receipt, path: tuple[str, ...], value: Any, told: str) -> None:
    content = json.loads(receipt.to_json())
    part = content
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    with pytest.raises(ReceiptError, match=f"receipt 1: .*{told}"):
        llm.verify([receipt, content], use_tqdm=False)
    assert llm.verify(receipt)[0]


@pytest.mark.parametrize("text", ["", "[]", "{", "1", '{"receipt": NaN}', "[" * 100_000, b"\xff\xfe"])
def test_texts_that_are_no_receipts(text: Any) -> None:
    with pytest.raises(ReceiptError):
        Receipt.from_json(text)


# ---- signatures and the command line ----


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    for name in ("one", "other"):
        subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", folder / f"{name}.pem"], check=True)
        public = ["openssl", "pkey", "-in", folder / f"{name}.pem", "-pubout", "-out", folder / f"{name}.pub"]
        subprocess.run(public, check=True)
    subprocess.run(["openssl", "genrsa", "-out", folder / "rsa.pem", "1024"], check=True, capture_output=True)
    return folder


def test_signatures(llm: LLM, receipt: Receipt, keys: Path) -> None:
    signed = receipt.signed(keys / "one.pem")
    assert Receipt.from_json(signed.to_json()) == signed != receipt and llm.verify(signed)[0]
    signed.check_signature()
    signed.check_signature(keys / "one.pub")
    with pytest.raises(ReceiptError, match="another key"):
        signed.check_signature(keys / "other.pub")
    with pytest.raises(ReceiptError, match="no signature"):
        receipt.check_signature()
    forged = replace(changed(receipt, ("request", "skip_special_tokens"), False), signature=signed.signature)
    with pytest.raises(ReceiptError, match="does not fit"):
        forged.check_signature()
    for name in ("rsa.pem", "one.pub"):
        with pytest.raises(ReceiptError, match="Ed25519 private key"):
            receipt.signed(keys / name)


def test_command_line(folder: Path, keys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, model = tmp_path / "receipts.jsonl", ("--model", folder, "--quiet")
    made = ("generate", "the", "--receipt", file, "--sign", keys / "one.pem", "--n", 2, "-n", 8, "--seed", 1)
    assert run(*made, *model) == 0
    first, second = file.read_text().splitlines()
    capsys.readouterr()
    assert run("verify", file, "--key", keys / "one.pub", *model) == 0
    assert capsys.readouterr().out == f"{file}:1: equal\n{file}:2: equal\n"
    forged = tmp_path / "forged.json"
    content = json.loads(first)
    content["answer"]["token_ids"][3] ^= 1
    del content["signature"]
    forged.write_text(json.dumps(content))
    assert run("verify", forged, file, "--json", *model) == 1
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["status"], one["position"]) for one in told] == [("different", 3), ("equal", None), ("equal", None)]
    assert run("verify", forged, "--key", keys / "one.pub", *model) == 1
    assert "the receipt has no signature" in capsys.readouterr().out
    for arguments, message in (
        (("verify", keys / "one.pem", *model), "one.pem:1: a receipt is JSON"),
        (("verify", file, "--key", keys / "rsa.pem", *model), "expected an Ed25519 public key"),
        ((*made, *model), "File exists"),
        (("generate", "the", "--sign", keys / "one.pem", *model), "pass --receipt FILE"),
        (("generate", "the", "--receipt", tmp_path / "new", "--sign", keys / "rsa.pem", *model), "Ed25519 private key"),
    ):
        assert run(*arguments) in (1, 2)
        assert message in capsys.readouterr().err
    assert Receipt.from_json(second).check_signature(keys / "one.pub") is None and not (tmp_path / "new").exists()
