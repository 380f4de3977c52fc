"""WordPiece, the vocabulary of BERT and its kin, as the parts of a tokenizer.json; and vocab.txt, its oldest form.

Source of the facts: `tokenization_bert.py` of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infinilm.errors import ConfigError
from infinilm.vocabulary.tokenizer_json import Json, added_token, token_text, whole

__all__ = ["SPECIAL_TOKENS", "tokenizer_json", "word_pieces"]

SPECIAL_TOKENS: Mapping[str, str] = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
"""What they are called where tokenizer_config.json does not say."""

_CLASSES = ("", "Bert", "DistilBert", "Electra", "MobileBert", "PreTrained")  # of which vocab.txt means this
_PREFIX = "##"  # of tokens that go on within a word
_LONGEST_WORD = 100  # characters; a longer one is one unknown token


def tokenizer_json(data: bytes, source: str, config: Mapping[str, Any], added: list[Json]) -> Json:
    """Return the content of a tokenizer.json for vocab.txt, which has the text of a token in each line.

    Parameters
    ----------
    data : bytes
        The content of vocab.txt.
    source : str
        The file that is named in errors.
    config : mapping
        The content of tokenizer_config.json: names of special tokens, `do_lower_case` and the like.
    added : list of dict
        Entries of added_tokens that files beside it say.

    Raises
    ------
    ConfigError
        The file is no text, lacks a special token, or belongs to a tokenizer of another kind.
    """
    name = str(config.get("tokenizer_class") or "").removesuffix("Fast").removesuffix("Tokenizer")
    if name not in _CLASSES:
        raise ConfigError(
            f"{source}: tokenizer_class {config['tokenizer_class']!r:.80} reads it in a way that is not supported; "
            "WordPiece is, as BertTokenizer has it; add tokenizer.json, which transformers writes"
        )
    try:
        texts = [line.rstrip("\r") for line in data.decode().removesuffix("\n").split("\n")]
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source}: expected a text in UTF-8: {error}") from error
    special = {key: token_text(config.get(key)) or text for key, text in SPECIAL_TOKENS.items()}
    ids = {text: i for i, text in enumerate(texts)}
    for key in ("unk_token", "cls_token", "sep_token"):
        if special[key] not in ids:
            raise ConfigError(f"{source}: has no token {special[key]!r:.80}, the {key}; is the file complete?")
    tokens = [added_token(ids[text], text, special=True) for text in special.values() if text in ids]
    named = {token["content"] for token in tokens}
    parts = word_pieces(
        ids,
        unknown=special["unk_token"],
        begin=special["cls_token"],
        end=special["sep_token"],
        lower_case=bool(config.get("do_lower_case", True)),
        strip_accents=config.get("strip_accents"),
        chinese_chars=bool(config.get("tokenize_chinese_chars", True)),
    )
    return whole(source, parts, texts, tokens + [token for token in added if token["content"] not in named])


def word_pieces(
    ids: Mapping[str, int],
    *,
    unknown: str,
    begin: str,
    end: str,
    lower_case: bool,
    strip_accents: bool | None = None,
    chinese_chars: bool = True,
) -> Json:
    """The parts of a tokenizer.json: words are cut into the longest tokens from the left.

    Parameters
    ----------
    ids
        Texts to ids; those that go on within a word begin with "##".
    unknown, begin, end
        Texts of the tokens of a word that cannot be cut, before a text, and behind each text of a pair.
    lower_case, strip_accents, chinese_chars
        Characters become lower case; lose their accents (None: as `lower_case`); Chinese ones are words.
    """

    def token(text: str, type_id: int) -> Json:
        return {"SpecialToken": {"id": text, "type_id": type_id}}

    def sequence(name: str, type_id: int) -> Json:
        return {"Sequence": {"id": name, "type_id": type_id}}

    single = [token(begin, 0), sequence("A", 0), token(end, 0)]
    return {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": chinese_chars,
            "strip_accents": strip_accents,
            "lowercase": lower_case,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [*single, sequence("B", 1), token(end, 1)],
            "special_tokens": {text: {"id": text, "ids": [ids[text]], "tokens": [text]} for text in (begin, end)},
        },
        "decoder": {"type": "WordPiece", "prefix": _PREFIX, "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": unknown,
            "continuing_subword_prefix": _PREFIX,
            "max_input_chars_per_word": _LONGEST_WORD,
            "vocab": dict(ids),
        },
    }
