"""How many tokens a text has at least, without tokenising it: never more than it has."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from tokenizers import AddedToken, Regex, Tokenizer as Backend, models, normalizers, pre_tokenizers

from infinilm import LLM
from infinilm.errors import RequestError
from infinilm.text.token_bound import TokenBound

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["a", "b", "ab", "abab", "é", "\u2581", "\u2581a", "K", "A"]


def byte_level(normalizer=None):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, "ab", "abab", "ĠĠ", "ĠĠĠĠ"])}
    backend = Backend(models.BPE(vocab, [("a", "b"), ("ab", "ab"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.normalizer = normalizer
    return backend


def byte_fallback(normalizer, **keywords):
    vocab = {token: i for i, token in enumerate(["<unk>", *BYTES, *PIECES])}
    merges = [("a", "b"), ("ab", "ab"), ("\u2581", "a")]
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, **keywords))
    backend.normalizer = normalizer
    return backend


def stripping():
    backend = byte_level()
    backend.add_special_tokens([AddedToken("<x>", rstrip=True, lstrip=True, special=True)])
    return backend


BOUNDED = {
    "bytes": byte_level(),
    "NFC": byte_level(normalizers.NFC()),
    "NFKC": byte_level(normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])),
    "SentencePiece": byte_fallback(
        normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]), fuse_unk=True
    ),
    "shorter": byte_fallback(normalizers.Replace("abab", "K")),
    "strips": stripping(),
}
UNBOUNDED = {
    "drops": byte_level(normalizers.Replace(Regex("a+"), "")),
    "strips text": byte_level(normalizers.Strip()),
    "words": Backend(models.WordLevel({"<unk>": 0}, unk_token="<unk>")),
    "no bytes": Backend(models.BPE({"a": 0}, [])),
    "one unknown": Backend(models.BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>", fuse_unk=True)),
    "no blanks": byte_level(),
}
UNBOUNDED["no blanks"].pre_tokenizer = pre_tokenizers.Sequence(
    [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
)
# Composed and decomposed characters, halves of Hangul, capitals of mathematics, tokens that strip, and blanks.
texts = st.lists(
    st.sampled_from(["ab", "abab" * 9, " ", "    ", "\n\t", "<x>", "e\u0301", "\u03b1\u0313\u0300\u0345", "\U0001d400"])
    | st.sampled_from(["\u1100\u1161\u11a8", "\uffa1", "K", "é", "\0", "日本"])
    | st.text(max_size=5),
    max_size=20,
).map("".join)


@pytest.mark.parametrize("name", BOUNDED)
@settings(max_examples=50)
@given(text=texts)
def test_a_text_has_at_least_so_many_tokens(name, text):
    backend = BOUNDED[name]
    bound = TokenBound(backend)
    assert bound.most_characters > 0
    assert bound.least_tokens(text) <= len(backend.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("name", UNBOUNDED)
def test_no_bound_where_characters_can_vanish(name):
    assert TokenBound(UNBOUNDED[name]).least_tokens("a" * 1_000_000) == 0


def test_what_cannot_fit_is_refused_before_it_is_tokenised(monkeypatch):
    with LLM("demo") as llm:
        monkeypatch.setattr(llm.tokenizer, "encode", None)  # which nothing may call
        text = "a b c d " * (1 << 18)
        for refused in (
            lambda: llm.generate(text, use_tqdm=False),
            lambda: llm.embed(text),
            lambda: llm.chat([{"role": "user", "content": text}], use_tqdm=False),
        ):
            with pytest.raises(RequestError, match=r"has at least [0-9]+ tokens; the context holds 512"):
                refused()
