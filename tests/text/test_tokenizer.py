"""The tokenizer of a checkpoint folder."""

import json

import pytest
from tokenizers import Tokenizer as Backend, models, pre_tokenizers, processors

from infinilm.checkpoint import resolve_model
from infinilm.errors import ConfigError, RequestError
from infinilm.text.tokenizer import Tokenizer

WORDS = ["[UNK]", "hello", "world", "<s>", "</s>", "<|end|>"]


def make_backend():
    backend = Backend(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<s>", "</s>", "<|end|>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 3)])
    return backend


def write(folder, backend=None, **files):
    (backend or make_backend()).save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return Tokenizer.from_folder(folder)


def test_encode_and_decode(tmp_path):
    tokenizer = write(tmp_path)
    assert tokenizer
    assert tokenizer.available
    assert tokenizer.encode("hello world") == [3, 1, 2]
    assert tokenizer.encode("hello world", add_special_tokens=False) == [1, 2]
    assert tokenizer.decode([3, 1, 2, 4]) == "hello world"
    assert tokenizer.decode((3, 1), skip_special_tokens=False) == "<s> hello"
    assert tokenizer.decode([1, 99, 2]) == "hello world"
    assert tokenizer.decode([]) == ""
    assert tokenizer.vocab_size == 6
    assert (tokenizer.id_to_token(4), tokenizer.token_to_id("</s>"), tokenizer.id_to_token(99)) == ("</s>", 4, None)
    assert "6 tokens" in repr(tokenizer)


def test_truncation_and_padding_of_the_file_are_off(tmp_path):
    backend = make_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    assert write(tmp_path, backend).encode("hello world hello") == [3, 1, 2, 1]


@pytest.mark.parametrize(
    ("generation", "config", "special", "expected"),
    [
        ({"eos_token_id": 5}, {"eos_token_id": 4}, "</s>", {5}),
        ({"eos_token_id": [5, 4]}, {}, None, {4, 5}),
        ({"eos_token_id": None}, {"eos_token_id": 4}, None, {4}),
        (None, {"eos_token_id": [4, 4]}, None, {4}),
        (None, {"text_config": {"eos_token_id": 5}}, None, {5}),
        (None, {}, "</s>", {4}),
        (None, {}, {"content": "</s>", "lstrip": False}, {4}),
        (None, {}, "absent", set()),
        (None, {}, None, set()),
    ],
)
def test_eos_ids(tmp_path, generation, config, special, expected):
    files = {"config": config}
    if generation is not None:
        files["generation_config"] = generation
    if special is not None:
        files["tokenizer_config"] = {"eos_token": special}
    assert write(tmp_path, **files).eos_token_ids == expected


@pytest.mark.parametrize("value", ["</s>", -1, 1.5, True, [4, None]])
def test_bad_eos_ids(tmp_path, value):
    with pytest.raises(ConfigError, match=r"config\.json: eos_token_id must be a token id >= 0 or a list"):
        write(tmp_path, config={"eos_token_id": value})


def test_special_tokens(tmp_path):
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None, "model_max_length": 5}
    tokenizer = write(tmp_path, tokenizer_config=config, special_tokens_map={"bos_token": "old", "unk_token": "[UNK]"})
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "[UNK]"}
    assert tokenizer.bos_token_id == 3
    assert write(tmp_path, tokenizer_config={}, special_tokens_map={}, config={"bos_token_id": 3}).bos_token_id == 3


def test_tokenizer_of_another_folder(tmp_path):
    model, other = tmp_path / "model", tmp_path / "other"
    model.mkdir()
    other.mkdir()
    (model / "config.json").write_text('{"eos_token_id": 5}')
    write(other, config={"eos_token_id": 4})
    for place in (other, str(other), other / "tokenizer.json"):
        tokenizer = Tokenizer.from_folder(model, place)
        assert tokenizer.encode("hello") == [3, 1]
        assert tokenizer.eos_token_ids == {5}
    with pytest.raises(ConfigError, match=r"expected tokenizer\.json, or a folder that holds it"):
        Tokenizer.from_folder(model, tmp_path / "absent")


def test_no_tokenizer(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7]}')
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert not tokenizer
    assert not tokenizer.available
    assert tokenizer.eos_token_ids == {7}
    assert "absent" in repr(tokenizer)
    for use in (
        lambda: tokenizer.encode("x"),
        lambda: tokenizer.decode([1]),
        lambda: tokenizer.vocab_size,
        lambda: tokenizer.id_to_token(1),
    ):
        with pytest.raises(RequestError, match=r"tokenizer\.json does not exist.*token ids still work"):
            use()


@pytest.mark.parametrize("raw", [b"", b"{}", b'{"model": 3}', b"\xff"])
def test_damaged_tokenizer(tmp_path, raw):
    (tmp_path / "tokenizer.json").write_bytes(raw)
    with pytest.raises(ConfigError, match=r"tokenizer\.json: refused by the tokenizers library"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("raw", [b"", b"[]", b"\xff", b"[" * 99_999])
def test_damaged_config(tmp_path, raw):
    (tmp_path / "config.json").write_bytes(raw)
    with pytest.raises(ConfigError, match=r"config\.json"):
        Tokenizer.from_folder(tmp_path)


def test_bad_arguments(tmp_path):
    tokenizer = write(tmp_path)
    with pytest.raises(TypeError, match="text must be str, got bytes"):
        tokenizer.encode(b"hello")
    with pytest.raises(RequestError, match="lone surrogate at character 3"):
        tokenizer.encode("abc\ud800")
    with pytest.raises(RequestError, match=r"token id must be in 0\.\.2\*\*32-1, got -1"):
        tokenizer.decode([-1])
    with pytest.raises(TypeError):
        tokenizer.decode(["a"])


# ---- files on which the library panics ----


def demo_with(folder, **changes):
    """The bundled tokenizer with some of its parts replaced."""
    raw = json.loads((resolve_model("demo") / "tokenizer.json").read_text())
    model = changes.pop("model", {})
    raw.update(changes)
    raw["model"] |= model
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    return Tokenizer.from_folder(folder)


SPLIT = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}


def test_panic_while_loading(tmp_path):
    with pytest.raises(ConfigError, match=r"tokenizer\.json: refused by the tokenizers library"):
        demo_with(tmp_path, normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"})


def test_panic_while_encoding(tmp_path):
    tokenizer = demo_with(tmp_path, pre_tokenizer=SPLIT)
    with pytest.raises(RequestError, match=r"tokenizer\.json: the text cannot be tokenised: .*retry-limit"):
        tokenizer.encode("x" * 40)
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"


def test_failure_while_encoding(tmp_path):
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "x"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    with pytest.raises(RequestError, match="the text cannot be tokenised: WordLevel error"):
        Tokenizer.from_folder(tmp_path).encode("hello")


def test_panic_while_decoding(tmp_path):
    tokenizer = write(tmp_path)

    class PanicException(BaseException):
        """What the library raises, of which no way from `decode` is known."""

    class Backend:
        def __init__(self, error):
            self.error = error

        def decode(self, *_, **__):
            raise self.error

    for error in (PanicException("slice index"), Exception("slice index")):
        tokenizer._backend = Backend(error)
        with pytest.raises(RequestError, match="token ids cannot be made text: slice index"):
            tokenizer.decode([1])
    tokenizer._backend = Backend(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        tokenizer.decode([1])


@pytest.mark.parametrize("prefix", [" ", "##", "é", "x" * 50, "Ġ"])
def test_merges_without_their_prefix(tmp_path, prefix):
    """Several of these panic in the library, and with some vocabularies the process aborts."""
    with pytest.raises(ConfigError, match=r"tokenizer\.json: the merge .* without the continuing_subword_prefix"):
        demo_with(tmp_path, model={"continuing_subword_prefix": prefix})


def test_merges_with_their_prefix(tmp_path):
    model = {
        "vocab": {"a": 0, "b": 1, "##b": 2, "ab": 3, "##a": 4},
        "merges": [["a", "##b"]],
        "continuing_subword_prefix": "##",
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model | {"type": "BPE"}}))
    assert Tokenizer.from_folder(tmp_path).encode("ab") == [3]
    model["merges"] = ["a ##b"]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model | {"type": "BPE"}}))
    assert Tokenizer.from_folder(tmp_path).encode("ab") == [3]


class Fast:
    """What this library sees of a fast tokenizer of transformers."""

    def __init__(self, backend):
        self.backend_tokenizer = backend
        self.special_tokens_map = {"eos_token": "</s>", "bos_token": "<s>", "additional_special_tokens": ["<a>"]}


def test_tokenizer_objects(tmp_path):
    """They give the ids that their file gives, and stay as they are."""
    write(tmp_path, make_backend(), generation_config={"eos_token_id": 7})
    file = Tokenizer.from_folder(tmp_path)
    backend = make_backend()
    backend.enable_truncation(1)
    for given in (Fast(backend), backend, file):
        tokenizer = Tokenizer.from_folder(tmp_path, given)
        assert tokenizer.encode("hello world") == file.encode("hello world")
        assert tokenizer.eos_token_ids == {7} and type(given).__name__ in repr(tokenizer)
    assert backend.truncation is not None
    special = Tokenizer.from_folder(tmp_path, Fast(backend)).special_tokens
    assert special == {"eos_token": "</s>", "bos_token": "<s>"}
    for given in (object(), 5, {"a": 1}):
        with pytest.raises(TypeError, match="expected a folder, .* got " + type(given).__name__):
            Tokenizer.from_folder(tmp_path, given)
