"""Tokenizers made from the metadata of GGUF files: the ids of the tokenizer that the metadata were written from."""

from __future__ import annotations

import json
import random
import unicodedata
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, strategies as st
from tokenizers import AddedToken, Regex, Tokenizer as Backend, decoders, models, normalizers, pre_tokenizers, trainers

from gguf_files.conversion import convert
from gguf_files.writer import As, File
from infinilm import LLM
from infinilm.checkpoint import resolve_model
from infinilm.config import AutoConfig
from infinilm.errors import ConfigError
from infinilm.text.generation_config import GenerationConfig
from infinilm.text.opening import open_texts
from infinilm.text.tokenizer import Tokenizer
from infinilm.vocabulary.pre_tokenizers import PRE_TOKENIZERS
from infinilm.vocabulary.tokenizer_json import merges_by_score

DEMO = resolve_model("demo")
HOSTILE = [
    "",
    " ",
    "  two  blanks and a tab\tand\n\n\nlines \r\n end ",
    "It's we'LL I'D can't 'tis ''",
    "1234567 1,234.56 ½ ² Ⅷ ٣٤٥",
    "cafe\u0301 café Å Å ﬁ",
    "你好，世界。これはテスト 한국어",
    "👩‍👩‍👧‍👦 🏳️‍🌈 ☃ \U0001f1e9\U0001f1ea",
    "<s> </s> <|user|>hello<|assistant|> <|user |> <unk>",
    "x" * 50 + "\x00\x01\x7f\ufeff\u200b\u2028\u00a0",
    "def f(x):\n    return x**2  # ?!\n\n\t\t/* path/to//file */",
    "▁▁ under▁score <0x41> Ġ Ċ",
    "ABCdefGHI jKlMN ÀÉÎ ЖЗи ǅ",
    "नमस्ते ไทย עברית",
    "12345a 123456_ x1234567 ٣٤٥٦ 12½34 " + "1234567890" * 103,
    "a\r\n\r\n b\r c \n\n\td.\n\n",
    "of the year e\u0301te\u0301 in it. 서울의 봄 of/\n\nລາວ ខ្មែរ မြန်မာ",
]
TEXTS = st.text() | st.text(st.sampled_from("abz AZ019'.,!\n\r\t ▁é漢<>|s/"), max_size=40)


def metadata_of(backend: Backend, kind: str, special: dict[str, int], **more: Any) -> dict[str, Any]:
    """As a converter writes them: texts, kinds, and merges or scores."""
    state = json.loads(backend.to_str())
    added = {token["id"]: token for token in state["added_tokens"]}
    texts = [backend.id_to_token(i) for i in range(backend.get_vocab_size())]
    byte_tokens = {f"<0x{byte:02X}>" for byte in range(256)}
    types = [
        (2 if text == "<unk>" else 3 if added[i]["special"] else 4)
        if i in added
        else 6
        if kind != "gpt2" and text in byte_tokens
        else 1
        for i, text in enumerate(texts)
    ]
    out: dict[str, Any] = {"tokenizer.ggml.model": kind, "tokenizer.ggml.tokens": texts}
    out["tokenizer.ggml.token_type"] = As("int32", types)
    if kind in ("gpt2", "gemma4"):
        out["tokenizer.ggml.merges"] = [" ".join(merge) for merge in state["model"]["merges"]]
    out |= {f"tokenizer.ggml.{name}_token_id": token_id for name, token_id in special.items()}
    return out | {f"tokenizer.ggml.{key}": value for key, value in more.items()}


def open_tokenizer(path: Path, metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_folder(File({"general.architecture": "llama", **config()} | metadata, TENSORS).write(path))


def config() -> dict[str, Any]:
    return {k: v for k, v in DEMO_FILE.metadata.items() if k.startswith("llama.")}


DEMO_FILE = convert(DEMO)
TENSORS = {"token_embd.weight": DEMO_FILE.tensors["token_embd.weight"]}
STORIES = ["Once upon a time there was a little fox.", "The fox's friends said: 'We'll see 12 or 345 stars!'"] * 20


# ---- byte-level BPE ----


def demo_metadata(**more: Any) -> dict[str, Any]:
    backend = Backend.from_file(str(DEMO / "tokenizer.json"))
    return metadata_of(backend, "gpt2", {"bos": 0, "eos": 1}, pre="gpt-2", add_bos_token=True) | more


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Tokenizer]:
    """From the folder, and from a file."""
    return Tokenizer.from_folder(DEMO), open_tokenizer(tmp_path_factory.mktemp("demo") / "a.gguf", demo_metadata())


def check_same(original: Tokenizer | Backend, made: Tokenizer, text: str) -> None:
    for special in (True, False):
        expected = original.encode(text, add_special_tokens=special)
        ids = expected if isinstance(expected, list) else expected.ids
        assert made.encode(text, add_special_tokens=special) == ids, text
        assert made.decode(ids, skip_special_tokens=special) == original.decode(ids, skip_special_tokens=special), text


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_texts(demo: tuple[Tokenizer, Tokenizer], text: str) -> None:
    check_same(*demo, text)


@given(TEXTS)
def test_any_text(demo: tuple[Tokenizer, Tokenizer], text: str) -> None:
    check_same(*demo, text)


def test_of_the_whole_vocabulary(demo: tuple[Tokenizer, Tokenizer]) -> None:
    original, made = demo
    assert made.vocab_size == original.vocab_size
    for i in range(original.vocab_size + 3):
        assert made.id_to_token(i) == original.id_to_token(i)
        assert made.token_bytes(i) == original.token_bytes(i)
        if i < original.vocab_size:
            assert made.is_special(i) == original.is_special(i)
    assert made.bos_token_id == original.bos_token_id and made.eos_token_ids == original.eos_token_ids


def split(*patterns: str, digits: bool = False) -> list[pre_tokenizers.PreTokenizer]:
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return [*steps, *([pre_tokenizers.Digits(individual_digits=True)] if digits else []), byte_level(use_regex=False)]


def byte_level(use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


GPT2_DIGITS = [pre_tokenizers.Digits(individual_digits=True), byte_level(use_regex=True)]

# What the tokenizer.json files of these models say, as they are published: how texts are split, the normaliser, and
# whether pieces that are tokens need no merges.
PUBLISHED: dict[str, tuple[list[pre_tokenizers.PreTokenizer], str | None, bool]] = {
    "llama-bpe": (
        split(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
            r"\s+(?!\S)|\s+"
        ),
        None,
        True,
    ),
    "qwen2": (
        split(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
            r"\s+(?!\S)|\s+"
        ),
        "NFC",
        False,
    ),
    "tekken": (
        split(
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}"
            r"\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
        None,
        True,
    ),
    "jais-2": (
        split(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
            r"\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|"
            r"\s{1,2}(?!\S)|\s{1}"
        ),
        None,
        False,
    ),
    "deepseek-coder": (split("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", digits=True), None, False),
    "command-r": (GPT2_DIGITS, "NFC", False),
    "exaone": (GPT2_DIGITS, "NFKC", False),
    "smollm": (GPT2_DIGITS, None, False),
    "mellum2": (GPT2_DIGITS, None, False),
    "modern-bert": ([byte_level(use_regex=True)], "NFC", False),
    "laguna": (
        [
            pre_tokenizers.Split(Regex(r"(?:\r?\n)+(?!\r?\n)"), "merged_with_next"),
            *split(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
                r"\s+(?!\S)|\s+"
            ),
        ],
        None,
        False,
    ),
    "bailingmoe2": (
        split(
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
        ),
        "NFC",
        False,
    ),
    "lfm2": (  # of LFM2.5 8B
        split(
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|"
            r"\s+(?!\S)|\s"
        ),
        None,
        True,
    ),
    "exaone-moe": (
        split(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}|"
            r" ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
        ),
        "NFC",
        False,
    ),
    "afmoe": (
        split(
            r"\p{Nd}{1,510}(?=(?>\p{Nd}{510})*(?:\P{Nd}|$))|\G\p{Nd}{510}",
            r"\A\p{Nd}{1,2}(?=\p{Nd}{3}+\z)",
            r"\A\p{Nd}{3}|\G\p{Nd}{3}",
            r"(?:[\u4E00-\u9FFF\u3040-\u309F\u30A0-\u30FF\u3400-\u4DBF\uf900-\uFAFF\uFF65-\uFF9F\u2F00-\u2FDF]+|"
            r"[\u0E00-\u0E7F]+|[\u0E80-\u0EFF]+|[\u1780-\u17FF]+|[\u1000-\u109F\uAA60-\uAA7F\uA9E0-\uA9FF]+|"
            r"[\uAC00-\uD7AF\u1100-\u11FF]+)",
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"""
            r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        None,
        False,
    ),
    "bloom": (split(r" ?[^(\s|[.,!?…。，、।۔،])]+"), None, False),
    "falcon": (
        [
            pre_tokenizers.Punctuation("contiguous"),
            byte_level(use_regex=True),
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
        ],
        None,
        False,
    ),
}


O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PUBLISHED |= {
    "cohere2moe": (split(r"\d{1,3}(?=(?:\d{3})*\b)", O200K), None, False),
    # The tokenizer.json of these models is not known here. This is how llama.cpp splits texts (src/llama-vocab.cpp).
    "falcon-h1": PUBLISHED["llama-bpe"],
    "pixtral": PUBLISHED["llama-bpe"],
    "kanana2": (split(O200K), None, False),
    "mellum": ([byte_level(use_regex=True)], None, False),
}


def trained(name: str) -> Backend:
    steps, normalizer, ignore_merges = PUBLISHED[name]
    backend = Backend(models.BPE(ignore_merges=ignore_merges))
    if normalizer is not None:
        backend.normalizer = getattr(normalizers, normalizer)()
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(  # type: ignore[call-arg]
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(STORIES + [*HOSTILE, "!😀!𝄀!𐄀"] * 3, trainer)
    backend.add_special_tokens(["<s>", "</s>", "<|user|>"])
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    return backend


@pytest.mark.parametrize("name", PUBLISHED)
def test_pre_tokenizers(name: str, tmp_path: Path) -> None:
    backend = trained(name)
    made = open_tokenizer(tmp_path / "a.gguf", metadata_of(backend, "gpt2", {}, pre=name, add_bos_token=False))
    for text in [*HOSTILE, "call <tool>it</tool>"]:
        check_same(backend, made, text)

    @given(TEXTS)
    @example("e\u0301\u0301 'S")
    @example("a \r\n  \n b 1 \r1234567a 123456")
    @example("!\U00011de3! ﬁ½")  # numeric by one list and not by another
    def any_text(text: str) -> None:
        check_same(backend, made, text)

    any_text()


# What the code of these models says, which split by tiktoken: the expression, and the normaliser.
BY_RANK: dict[str, tuple[str, str | None]] = {
    "kimi-k2": (
        r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+",
        None,
    ),
    "hunyuan": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
        r"\s+(?!\S)|\s+",
        "NFC",
    ),
}


def merged_by_rank(piece: str, ranks: dict[str, int]) -> list[int]:
    """The tokens of a piece as tiktoken finds them: neighbours that make a token merge, that of the lowest id first."""
    if piece in ranks:
        return [ranks[piece]]
    parts = list(piece)
    while True:
        made = [(ranks.get(left + right, 1 << 30), at) for at, (left, right) in enumerate(pairwise(parts))]
        rank, at = min(made, default=(1 << 30, 0))
        if rank == 1 << 30:
            return [ranks[part] for part in parts]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@pytest.mark.parametrize("name", BY_RANK)
def test_merges_by_rank(name: str, tmp_path: Path) -> None:
    """Ids are those of tiktoken, also of tokens that the merges of the file do not lead to; these may be absent."""
    pattern, normalizer = BY_RANK[name]
    PUBLISHED["by rank"] = split(pattern), normalizer, False
    backend = trained("by rank")
    texts = [backend.id_to_token(i) for i in range(backend.get_vocab_size(with_added_tokens=False))]
    rng = random.Random(1)
    texts += sorted({"".join(rng.choices(texts, k=2)) for _ in range(400)} - set(texts))
    ranks = {text: i for i, text in enumerate(texts)}
    metadata = metadata_of(backend, "gpt2", {}, pre=name, add_bos_token=False)
    metadata |= {"tokenizer.ggml.tokens": texts, "tokenizer.ggml.token_type": As("int32", [1] * len(texts))}
    made = open_tokenizer(tmp_path / "a.gguf", metadata)
    del metadata["tokenizer.ggml.merges"]
    without = open_tokenizer(tmp_path / "b.gguf", metadata)

    def check(text: str) -> None:
        plain = text if normalizer is None else unicodedata.normalize(normalizer, text)
        pieces = backend.pre_tokenizer.pre_tokenize_str(plain) if plain else []  # type: ignore[attr-defined]
        expected = [token for piece, _ in pieces for token in merged_by_rank(piece, ranks)]
        assert made.encode(text) == without.encode(text) == expected, text

    for text in [*HOSTILE, *STORIES[:2], "我想在apple工作1314151天～ ABC我's", "foxfoxstars friendsWe'll"]:
        check(text)

    @given(TEXTS | st.lists(st.sampled_from(STORIES[1].split()), max_size=6).map("".join))
    def any_text(text: str) -> None:
        check(text)

    any_text()


def test_every_pre_tokenizer_is_usable(tmp_path: Path) -> None:
    """Nothing that a text has is lost, however it is split."""
    for name in PRE_TOKENIZERS:
        made = open_tokenizer(tmp_path / f"{name}.gguf", demo_metadata() | {"tokenizer.ggml.pre": name})
        for text in HOSTILE:
            if PRE_TOKENIZERS[name].normalizer is None:
                ids = made.encode(text, add_special_tokens=False)
                assert made.decode(ids, skip_special_tokens=False) == text, (name, text)


# ---- SentencePiece ----


def sentencepiece_bpe() -> tuple[Backend, list[float]]:
    """Like the tokenizer.json of Llama 2, with scores as SentencePiece gives them: minus the rank."""
    backend = Backend(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])  # type: ignore
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False)  # type: ignore[call-arg]
    backend.train_from_iterator(STORIES + ["cafe café naïve  blanks", "12 123 1234"] * 5, trainer)
    state = json.loads(backend.to_str())
    state["added_tokens"] = state["added_tokens"][:3]  # bytes are tokens of the model
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend = Backend.from_str(json.dumps(state))
    backend.decoder = decoders.Sequence(steps)  # type: ignore[assignment]
    rank = {"".join(merge): i for i, merge in enumerate(state["model"]["merges"])}
    size = backend.get_vocab_size()
    scores = [float(-rank.get(backend.id_to_token(i), 10000 + i)) if i > 258 else 0.0 for i in range(size)]
    return backend, scores


def test_sentencepiece(tmp_path: Path) -> None:
    backend, scores = sentencepiece_bpe()
    special = {"bos": 1, "eos": 2, "unknown": 0}
    metadata = metadata_of(backend, "llama", special, scores=scores, add_bos_token=False)
    made = open_tokenizer(tmp_path / "a.gguf", metadata)
    for text in HOSTILE:
        check_same(backend, made, text)

    @given(TEXTS)
    def any_text(text: str) -> None:
        check_same(backend, made, text)

    any_text()
    # Where the file does not say, texts begin with the bos token; where it says, no blank is put before them.
    del metadata["tokenizer.ggml.add_bos_token"]
    other = open_tokenizer(tmp_path / "b.gguf", metadata | {"tokenizer.ggml.add_space_prefix": False})
    assert other.encode("a fox")[0] == 1 and made.encode("a fox")[0] != 1
    assert str(made.id_to_token(made.encode("a fox")[0])).startswith("▁")
    assert other.encode("a")[1] == other.token_to_id("a")
    assert other.decode(other.encode(" a fox")) == " a fox" and made.decode(made.encode("a fox")) == "a fox"


def test_sentencepiece_with_a_list_of_merges(tmp_path: Path) -> None:
    """As Gemma 4's tokenizer.json: no blank is put before a text, and texts begin with the bos token."""
    backend, _ = sentencepiece_bpe()
    backend.normalizer = normalizers.Replace(" ", "▁")  # type: ignore[assignment]
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps)  # type: ignore[assignment]
    metadata = metadata_of(backend, "gemma4", {"bos": 1, "eos": 2, "unknown": 0})
    made = open_tokenizer(tmp_path / "a.gguf", metadata | {"tokenizer.ggml.add_bos_token": False})
    for text in HOSTILE:
        check_same(backend, made, text)

    @given(TEXTS)
    def any_text(text: str) -> None:
        check_same(backend, made, text)

    any_text()
    assert open_tokenizer(tmp_path / "b.gguf", metadata).encode("a fox")[0] == 1


def tried_at_every_place(vocab: dict[str, int], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """The pairs of `merges_by_score`, found by cutting each text everywhere."""
    normal = {text: i for text, i in vocab.items() if types[i] == 1}
    pairs = [(text[:at], text[at:]) for text in normal for at in range(1, len(text))]
    found = [(left, right) for left, right in pairs if left in normal and right in normal]
    ranks = {pair: (-scores[normal["".join(pair)]], *(-len(part) for part in pair)) for pair in found}
    return sorted(found, key=lambda pair: (*ranks[pair], normal[pair[0]], normal[pair[1]]))


@given(st.data())
def testmerges_by_score(data: st.DataObject) -> None:
    texts = data.draw(st.lists(st.text("ab▁é", max_size=7), min_size=1, max_size=60, unique=True))
    vocab = {text: i for i, text in enumerate(texts)}
    scores = [data.draw(st.sampled_from([-1.0, -2.0])) for _ in texts]
    types = [data.draw(st.sampled_from([1, 1, 1, 6])) for _ in texts]
    assert merges_by_score(vocab, scores, types) == tried_at_every_place(vocab, scores, types)


def test_a_token_of_four_million_characters() -> None:
    """Cutting it at every place would take half an hour."""
    texts = ["a", "b", "ab", "a" * 4_000_000, "a" * 3_999_999 + "b"]
    merges = merges_by_score({text: i for i, text in enumerate(texts)}, [0.0] * 5, [1] * 5)
    assert merges == [("a", "b")]


def test_unigram(tmp_path: Path) -> None:
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()  # type: ignore[assignment]
    backend.decoder = decoders.Metaspace()  # type: ignore[assignment]
    trainer = trainers.UnigramTrainer(  # type: ignore[call-arg]
        vocab_size=150, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(STORIES, trainer)
    scores = [score for _, score in json.loads(backend.to_str())["model"]["vocab"]]
    special = {"eos": 1, "unknown": 2}
    metadata = metadata_of(backend, "t5", special, scores=scores, add_eos_token=False)
    made = open_tokenizer(tmp_path / "a.gguf", metadata)
    for text in [text for text in HOSTILE if text]:
        check_same(backend, made, text)
    ending = open_tokenizer(tmp_path / "b.gguf", metadata | {"tokenizer.ggml.add_eos_token": True})
    assert ending.encode("a fox") == [*made.encode("a fox"), 1]


# ---- what else the metadata say ----


def test_bos_and_eos(tmp_path: Path) -> None:
    both = open_tokenizer(tmp_path / "a.gguf", demo_metadata() | {"tokenizer.ggml.add_eos_token": True})
    assert both.encode("a")[0] == 0 and both.encode("a")[-1] == 1
    metadata = demo_metadata()
    del metadata["tokenizer.ggml.add_bos_token"]
    assert open_tokenizer(tmp_path / "b.gguf", metadata).encode("a")[0] != 0
    llama = open_tokenizer(tmp_path / "c.gguf", metadata | {"tokenizer.ggml.pre": "llama-bpe"})
    assert llama.encode("a")[0] == 0
    turns = open_tokenizer(tmp_path / "d.gguf", metadata | {"tokenizer.ggml.eot_token_id": 3})
    assert turns.eos_token_ids == {1, 3}
    none = metadata | {"tokenizer.ggml.bos_token_id": 2**32 - 1}
    assert open_tokenizer(tmp_path / "e.gguf", none).bos_token_id is None


def test_known_ends_of_answers(tmp_path: Path) -> None:
    metadata = demo_metadata()
    metadata["tokenizer.ggml.tokens"][2] = "<|im_end|>"  # a control token
    metadata["tokenizer.ggml.tokens"][3] = "<|eot_id|>"
    metadata["tokenizer.ggml.token_type"].value[3] = 1  # a word like any other
    assert open_tokenizer(tmp_path / "a.gguf", metadata).eos_token_ids == {1, 2}


@pytest.mark.parametrize("pair", [("<|return|>", "<|call|>"), ("<|calls|>", "<|flush|>")])
def test_what_ends_a_channel_ends_no_answer(pair: tuple[str, str], tmp_path: Path) -> None:
    metadata = demo_metadata()
    first = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] += ["<|end|>", *pair]
    types = metadata["tokenizer.ggml.token_type"].value
    types += [3, 3, 3]
    assert open_tokenizer(tmp_path / "a.gguf", metadata).eos_token_ids == {1, first + 1, first + 2}
    types[-1] = 1  # without the second of the pair
    assert open_tokenizer(tmp_path / "b.gguf", metadata).eos_token_ids == {1, first, first + 1}


def test_whole_models(tmp_path: Path) -> None:
    """Text, chat, eos and defaults of sampling from one file."""
    template = json.loads((DEMO / "tokenizer_config.json").read_text())["chat_template"]
    more = {"tokenizer.chat_template": template, "general.sampling.temp": 0.8, "general.sampling.top_k": As("int32", 7)}
    path = File(DEMO_FILE.metadata | demo_metadata() | more, DEMO_FILE.tensors).write(tmp_path / "fox.gguf")
    messages = [{"role": "user", "content": "Hello"}]
    with LLM("demo", dtype="float32", use_tqdm=False) as original, LLM(path, use_tqdm=False) as model:
        for prompt in ("Once upon a time", "The little fox"):
            expected, got = (llm.generate(prompt, temperature=0, max_tokens=40)[0] for llm in (original, model))
            assert got.outputs[0].text == expected.outputs[0].text
            assert list(got.prompt_token_ids) == list(expected.prompt_token_ids)
        assert model.chat_template.render(messages) == original.chat_template.render(messages)
        assert (model.default_sampling_params.temperature, model.default_sampling_params.top_k) == (0.8, 7)
        plain = model.generate("Once", temperature=0.8, seed=1, top_k=0)[0].outputs[0]
        assert plain.finish_reason == "stop"  # the eos token
    tokenizer, chat = open_texts(path, None, None, GenerationConfig.from_folder(path, "none"))
    assert tokenizer.special_tokens["bos_token"] == "<s>" and chat
    assert GenerationConfig.from_folder(path, "none").sampling_params.temperature == 1.0
    assert AutoConfig.from_pretrained(path).eos_token_id == [1]


def test_a_file_without_vocabulary(tmp_path: Path) -> None:
    path = DEMO_FILE.write(tmp_path / "a.gguf")
    assert not Tokenizer.from_folder(path)
    other = Tokenizer.from_folder(path, DEMO)
    assert other.encode("a") == Tokenizer.from_folder(DEMO).encode("a")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "rwkv"}, r"kind 'rwkv' \(tokenizer.ggml.model\) are not supported, only gpt2, llama, gemma4, t5"),
        ({"pre": "default"}, r"how texts are split \(tokenizer.ggml.pre\) is 'default', and only these are known:"),
        ({"merges": ["a b c"]}, "the merge 'a b c' is not of two tokens to a third"),
        ({"merges": ["ab"]}, "the merge 'ab' is not of two tokens to a third"),
        ({"merges": As("int32", [1])}, "tokenizer.ggml.merges must be a list of texts"),
        ({"token_type": As("int32", [1])}, "expected a tokenizer.ggml.token_type for each of 1536 tokens"),
        ({"tokens": As("int32", [1])}, "tokenizer.ggml.tokens must be a list of texts"),
        ({"model": "llama"}, "expected a number of tokenizer.ggml.scores for each token"),
    ],
)  # fmt: skip
def test_what_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    metadata = demo_metadata() | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    with pytest.raises(ConfigError, match=message):
        open_tokenizer(tmp_path / "a.gguf", metadata)
