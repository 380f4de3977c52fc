"""Vocabularies without tokenizer.json give the ids of the libraries whose files they are."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mistral_common.tokens.tokenizers.tekken as mistral
import pytest
import sentencepiece
import tiktoken
from hypothesis import example, given, strategies as st
from tokenizers import Tokenizer as Backend

from infinilm.checkpoint import resolve_model
from infinilm.errors import ConfigError, RequestError
from infinilm.text.tokenizer import Tokenizer
from infinilm.vocabulary.charsmap import CharacterRules, CharacterTable
from infinilm.vocabulary.pre_tokenizers import PRE_TOKENIZERS
from infinilm.vocabulary.sentencepiece import parse
from infinilm.vocabulary.tokenizer_json import byte_level_text

HOSTILE = [
    "",
    " ",
    "  two  blanks and a tab\tand\n\n\nlines \r\n end ",
    "It's we'LL I'D can't 'tis ''",
    "1234567 1,234.56 ½ ² Ⅷ ٣٤٥",
    "cafe\u0301 café Å Å ﬁ ｆｕｌｌ",
    "你好，世界。これはテスト 한국어",
    "👩‍👩‍👧‍👦 🏳️‍🌈 ☃ \U0001f1e9\U0001f1ea",
    "x" * 50 + "\x01\x7f\ufeff\u200b\u2028\u00a0",
    "def f(x):\n    return x**2  # ?!\n\n\t\t/* path/to//file */",
    "▁▁ under▁score <0x41> Ġ Ċ",
    "ABCdefGHI jKlMN ÀÉÎ ЖЗи ǅ",
    "नमस्ते ไทย עברית العربية",
]
# SentencePiece ends a text at a NUL.
TEXTS = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"])) | st.text(
    st.sampled_from("abehlot AZ019'.,!\n\r\t ▁é漢한я<>|s/"), max_size=60
)
STORIES = [
    *("Once upon a time there was a little fox.", "The fox's friends said: 'We'll see 12 or 345 stars!'"),
    *("Der Fuchs aß 7 Äpfel.", "你好，世界。", "def f(x):\n    return x ** 2", "Привет, как дела?"),
] * 20


# ---- SentencePiece ----


def trained(**options: Any) -> bytes:
    """A model that SentencePiece itself has trained."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(STORIES),
        model_writer=out,
        minloglevel=2,
        **{"vocab_size": 400, "byte_fallback": True, "hard_vocab_limit": False, "character_coverage": 0.999} | options,
    )
    return out.getvalue()


MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "bpe", "normalization_rule_name": "identity", "remove_extra_whitespaces": False},
    "gemma": {
        **{"model_type": "bpe", "normalization_rule_name": "identity", "remove_extra_whitespaces": False},
        **{"add_dummy_prefix": False, "split_digits": True, "user_defined_symbols": ["<turn>", "<tool>"]},
    },
    "mistral": {
        **{"model_type": "bpe", "normalization_rule_name": "identity", "remove_extra_whitespaces": False},
        "user_defined_symbols": ["[INST]", "[/INST]"],
    },
    "bpe, single blanks": {"model_type": "bpe", "normalization_rule_name": "identity"},
    "bpe, no bytes": {"model_type": "bpe", "normalization_rule_name": "identity", "byte_fallback": False},
    "unigram": {"model_type": "unigram", "normalization_rule_name": "identity"},
    "unigram, no bytes": {"model_type": "unigram", "normalization_rule_name": "identity", "byte_fallback": False},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Tokenizer]]:
    """By name: SentencePiece's own processor, and what is read here."""
    made: dict[str, tuple[Any, Tokenizer]] = {}

    def get(name: str) -> tuple[Any, Tokenizer]:
        if name not in made:
            folder = tmp_path_factory.mktemp("model")
            (folder / "tokenizer.model").write_bytes(trained(**MODELS[name]))
            own = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
            made[name] = own, Tokenizer.from_folder(folder)
        return made[name]

    return get


@pytest.mark.parametrize("name", MODELS)
@example("".join(HOSTILE))
@given(text=TEXTS)
def test_sentencepiece(models: Any, name: str, text: str) -> None:
    own, tokenizer = models(name)
    for part in (text, *HOSTILE) if text == "".join(HOSTILE) else (text,):
        if any(mark in part for mark in ("<s>", "</s>", "<unk>", "<0x")):
            continue  # special tokens are read as such here, as in transformers
        assert tokenizer.encode(part, add_special_tokens=False) == own.encode(part), part


def test_special_tokens(models: Any) -> None:
    """Texts begin with bos where tokenizer_config.json says nothing, and special tokens are those of the file."""
    own, tokenizer = models("llama")
    assert tokenizer.encode("hello") == [own.bos_id(), *own.encode("hello")]
    assert tokenizer.special_tokens["eos_token"] == "</s>" and tokenizer.special_tokens["unk_token"] == "<unk>"
    assert tokenizer.decode(own.encode("two  blanks")) == "two  blanks"


@pytest.fixture(scope="module", params=["nmt_nfkc", "nmt_nfkc_cf", "nfkc"])
def normalised(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, Tokenizer]]:
    """Models with a table of replaced characters: SentencePiece's own processor, and what is read here."""
    made = []
    for kind in ("bpe", "unigram"):
        folder = tmp_path_factory.mktemp("model")
        data = trained(model_type=kind, normalization_rule_name=request.param)
        (folder / "tokenizer.model").write_bytes(data)
        made.append((sentencepiece.SentencePieceProcessor(model_proto=data), Tokenizer.from_folder(folder)))
    return made


# Marks that combine, alone and on letters, jamo, letters of several, wide ones, and what is replaced by nothing.
OFTEN = "aAeE\u00c0\u0300\u0301\u0308\u0345\u0323\u1100\u1161\u11a8\uac00ﬁ①½\u00a8\u00adＡ゙かﾞｶ\u200b\ufeff\x01\x7f\r\n\t"
REPLACED = st.lists(st.sampled_from(f"{OFTEN} \u3000İſ…㌔\ufdfa") | st.characters(), max_size=12).map("".join)


@example(text="".join(HOSTILE))
@example(text="A\u0300\u0301")  # the tokenizers library loses the second mark
@given(text=TEXTS | REPLACED)
def test_normalisation(normalised: list[tuple[Any, Tokenizer]], text: str) -> None:
    """Characters are replaced as SentencePiece replaces them."""
    for own, tokenizer in normalised:
        for part in (text, *HOSTILE) if text == "".join(HOSTILE) else (text,):
            if any(mark in own.normalize(part) for mark in ("<s>", "</s>", "<unk>", "<0x")):
                continue  # special tokens are read as such here, as in transformers
            assert tokenizer.encode(part, add_special_tokens=False) == own.encode(part), part


def test_replaced_characters_make_no_special_token(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(trained(model_type="bpe", normalization_rule_name="nfkc"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    ids = tokenizer.encode("＜s＞ Ａ</s>", add_special_tokens=False)
    assert ids.count(tokenizer.token_to_id("<s>")) == 0 and ids[-1] == tokenizer.token_to_id("</s>")


@pytest.mark.parametrize(
    "data",
    [
        b"\x01",
        b"\x08\x00\x00\x00\x00",
        b"\x03\x00\x00\x00abc",
        b"\x00\x00\x00\x00",
    ],
)
def test_damaged_tables_of_characters(data: bytes) -> None:
    with pytest.raises(ValueError, match="table of characters"):
        CharacterTable(data)


@given(st.binary(min_size=4, max_size=200), st.text(max_size=20))
def test_any_table_of_characters(data: bytes, text: str) -> None:
    """A damaged one replaces wrongly, and ends."""
    table = CharacterTable((len(data) // 4 * 4).to_bytes(4, "little") + data + b"\0")
    assert isinstance(CharacterRules(table)(text), str)


@pytest.mark.parametrize("data", [b"\x0a\x02\x08\x01", b"\x1a\x0b\x10\xff\xff\xff\xff\xff\xff\xff\xff\x7f\x00"])
def test_texts_stored_as_numbers(data: bytes) -> None:
    """A number where a text belongs is neither decoded nor taken for a size."""
    with pytest.raises(ConfigError, match="a text is stored as a number"):
        parse(data, "tokenizer.model")


@given(st.data())
def test_damaged_models(data: Any) -> None:
    """Whatever the bytes are, the answer is a model or a ConfigError that names the file."""
    whole = SMALL_MODEL
    cut = data.draw(st.integers(0, len(whole)))
    changed = bytearray(whole[:cut])
    for _ in range(data.draw(st.integers(0, 3)) if changed else 0):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    try:
        parse(bytes(changed), "tokenizer.model")
    except ConfigError as error:
        assert str(error).startswith("tokenizer.model: ")


SMALL_MODEL = trained(model_type="bpe")


# ---- lists of ranks ----


def byte_pairs() -> list[bytes]:
    """Tokens by rank, as the demo model's merges make them."""
    state = json.loads(Backend.from_file(str(resolve_model("demo") / "tokenizer.json")).to_str())
    byte_of = {char: byte for byte, char in enumerate(byte_level_text(bytes(range(256))))}
    merged = ["".join(merge) for merge in state["model"]["merges"]]
    return [bytes([byte]) for byte in range(256)] + [bytes(byte_of[char] for char in text) for text in merged]


PAIRS = list(dict.fromkeys(byte_pairs()))


def written(folder: Path, name: str, class_name: str, added: dict[str, Any] | None = None) -> Tokenizer:
    lines = [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(PAIRS)]
    (folder / name).write_bytes(b"\n".join(lines) + b"\n")
    config = {"tokenizer_class": class_name, "added_tokens_decoder": added or {}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.from_folder(folder)


def encoding(pattern: str) -> tiktoken.Encoding:
    table = {token: rank for rank, token in enumerate(PAIRS)}
    return tiktoken.Encoding("own", pat_str=pattern, mergeable_ranks=table, special_tokens={})


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    end = {str(len(PAIRS) + 1): {"content": "<|im_end|>", "special": True}}
    return written(tmp_path_factory.mktemp("kimi"), "tiktoken.model", "TikTokenTokenizer", end)


# tiktoken has no intersection of classes: the same expression as a difference is in the regex library's own spelling.
KIMI_PATTERN = PRE_TOKENIZERS["kimi-k2"].patterns[0]


@example("".join(HOSTILE))
@given(text=TEXTS)
def test_ranks(kimi: Tokenizer, text: str) -> None:
    own = encoding(KIMI_PATTERN)
    assert kimi.encode(text) == own.encode_ordinary(text)


def test_special_tokens_of_ranks(kimi: Tokenizer) -> None:
    first = len(PAIRS)
    assert kimi.encode("a<|im_end|>") == [PAIRS.index(b"a"), first + 1]
    assert kimi.id_to_token(first) == f"<|reserved_token_{first}|>" and kimi.vocab_size == first + 256


def test_an_unknown_class_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer class 'Xyz'.*known are TikTokenTokenizer.*Pass tokenizer="):
        written(tmp_path, "tiktoken.model", "Xyz")


@pytest.mark.parametrize("content", [b"YQ== 0\nYg== 2\n", b"YQ== 0\n? 1\n", b"YQ==\n", b"YQ== 0\nYQ== 1\n", b"\x00"])
def test_damaged_ranks(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "TikTokenTokenizer"}')
    (tmp_path / "tiktoken.model").write_bytes(content)
    with pytest.raises(ConfigError, match=r"tiktoken\.model: .*fetch it again"):
        Tokenizer.from_folder(tmp_path)


# ---- tekken.json ----


def tekken(**changes: Any) -> dict[str, Any]:
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(PAIRS)
    ]
    config = {
        "pattern": PRE_TOKENIZERS["tekken"].patterns[0],
        "num_vocab_tokens": len(PAIRS),
        "default_vocab_size": len(PAIRS) + 100 - 5,  # the last five belong to larger vocabularies
        "default_num_special_tokens": 100,
        "version": "v3",
    }
    return {"config": config, "vocab": vocab, **changes}


@pytest.fixture(scope="module")
def mistral_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Tokenizer]:
    folder = tmp_path_factory.mktemp("tekken")
    (folder / "tekken.json").write_text(json.dumps(tekken()))
    return mistral.Tekkenizer.from_file(folder / "tekken.json"), Tokenizer.from_folder(folder)


@example("".join(HOSTILE))
@given(text=TEXTS)
def test_tekken(mistral_pair: tuple[Any, Tokenizer], text: str) -> None:
    own, tokenizer = mistral_pair
    if not any(f"[{mark}" in text or f"<{mark}" in text for mark in ("INST", "s>", "unk", "pad", "SPECIAL")):
        assert tokenizer.encode(text) == own.encode(text, bos=True, eos=False)


def test_special_tokens_of_tekken(mistral_pair: tuple[Any, Tokenizer]) -> None:
    own, tokenizer = mistral_pair
    assert tokenizer.vocab_size == own.n_words
    assert [tokenizer.id_to_token(i) for i in range(100)] == [own.id_to_piece(i) for i in range(100)]
    assert tokenizer.bos_token_id == own.bos_id and tokenizer.special_tokens["eos_token"] == "</s>"


@pytest.mark.parametrize(
    "changes",
    [
        {"config": None},
        {"vocab": []},
        {"vocab": [{"rank": 1}] * 2000},
        {"special_tokens": [{"rank": -1, "token_str": "a"}]},
    ],
)
def test_damaged_tekken(tmp_path: Path, changes: dict[str, Any]) -> None:
    (tmp_path / "tekken.json").write_text(json.dumps(tekken(**changes)))
    with pytest.raises(ConfigError, match=r"tekken\.json: .*fetch it again"):
        Tokenizer.from_folder(tmp_path)


# ---- vocab.json and merges.txt ----


def test_merges(tmp_path: Path) -> None:
    """The demo model's tokenizer.json in two files gives the same ids."""
    source = Backend.from_file(str(resolve_model("demo") / "tokenizer.json"))
    state = json.loads(source.to_str())
    (tmp_path / "vocab.json").write_text(json.dumps(state["model"]["vocab"]))
    merges = [" ".join(merge) for merge in state["model"]["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    added = {str(token["id"]): token for token in state["added_tokens"]}
    config = {"tokenizer_class": "GPT2Tokenizer", "added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_folder(tmp_path)
    for text in HOSTILE:
        assert tokenizer.encode(text) == source.encode(text, add_special_tokens=False).ids, text
    (tmp_path / "merges.txt").write_text("a b\nno merge\n")
    with pytest.raises(ConfigError, match=r"line \d of merges\.txt"):
        Tokenizer.from_folder(tmp_path)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="pass tokenizer="):
        Tokenizer.from_folder(tmp_path).encode("hello")
    with pytest.raises(ConfigError, match=r"expected tokenizer\.json, or a folder that holds it or one of"):
        Tokenizer.from_folder(tmp_path, tmp_path)
