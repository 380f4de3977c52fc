"""Streaming text: deltas joined = the text decoded at once, cut at the earliest stop string."""

import time

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import AddedToken, Tokenizer as Backend, decoders, models, normalizers, pre_tokenizers, trainers

from infinilm.errors import RequestError
from infinilm.sampling_params import SamplingParams
from infinilm.text.detokenize import IncrementalDetokenizer, OutputText, StopStrings
from infinilm.text.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog, the fox; the end.",
    "hello world, hello there. naïve café — déjà vu",
    "日本語のテキスト 中文文本 한국어",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 e\u0301 a\u0308 \u200d",
    "def f(x):\n    return x + 1\n\n\tif x: pass",
]
SPECIAL = ["<s>", "</s>", "<|im_end|>"]
BYTES = [f"<0x{b:02X}>" for b in range(256)]


def add_tokens(backend):
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens(
        [AddedToken("<tool>", special=False), AddedToken("b c", special=False), AddedToken("é", special=False)]
    )
    return backend


def byte_level(decoder=None):
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoder or decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return add_tokens(backend)


def word_level(decoder=None):
    words = ["[UNK]", *dict.fromkeys(" ".join(CORPUS).split()), "##ing", ".", "n't", ",", "ab</w>", "</w>"]
    backend = Backend(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if decoder:
        backend.decoder = decoder
    return add_tokens(backend)


def sentencepiece_vocabulary():
    pieces = [
        "▁",
        "▁▁",
        "▁▁▁▁",
        "▁the",
        "▁dog",
        "dog",
        "s",
        "e",
        "a",
        "▁a",
        "é",
        "日",
        "本",
        "👍",
        "\u200d",
        "\u0301",
        "�",
        "\n",
        ".",
    ]
    return ["<unk>", *BYTES, *pieces, "<0x", "0x41>"]


def llama_decoder():
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return decoders.Sequence(steps)


def llama(decoder=None):
    vocabulary = {t: i for i, t in enumerate(sentencepiece_vocabulary())}
    backend = Backend(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoder or llama_decoder()
    return add_tokens(backend)


def unigram(scheme="always"):
    vocabulary = [(t, -float(i)) for i, t in enumerate(sentencepiece_vocabulary())]
    backend = Backend(models.Unigram(vocabulary, 0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return add_tokens(backend)


BUILDERS = {
    "byte-level BPE": byte_level,
    "byte-level in a sequence": lambda: byte_level(decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])),
    "byte-level with more steps": lambda: byte_level(
        decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    ),
    "WordLevel": word_level,
    "WordPiece decoder": lambda: word_level(decoders.WordPiece()),
    "BPE decoder with suffix": lambda: word_level(decoders.BPEDecoder()),
    "Llama-2": llama,
    "Gemma": lambda: llama(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])),
    "Unigram": unigram,
    "Unigram without prefix": lambda: unigram("never"),
}
TOKENIZERS = {name: Tokenizer(build()) for name, build in BUILDERS.items()}
names = st.sampled_from(sorted(TOKENIZERS))


@st.composite
def streams(draw):
    """A tokenizer and ids: random ones, ids of a text, and (for byte fallback) bytes of a text, valid or not."""
    name = draw(names)
    tokenizer = TOKENIZERS[name]
    alphabet = "the dog.é日👍\u200d🏽\u0301�\n aé<>0x4"
    ids = []
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["random", "text", "bytes", "few"]))
        if kind == "random":
            ids += draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=8))
        elif kind == "text":
            text = draw(st.one_of(st.text(alphabet, max_size=10), st.text(max_size=5), st.sampled_from(CORPUS)))
            ids += tokenizer.encode(text)
        elif kind == "few":
            ids += draw(st.lists(st.integers(0, 3).map(lambda i: 257 + i), max_size=6))
        else:
            raw = draw(st.one_of(st.text(alphabet, max_size=4).map(str.encode), st.binary(max_size=4)))
            found = [tokenizer.token_to_id(f"<0x{b:02X}>") for b in raw]
            ids += [i for i in found if i is not None]
    return name, ids


@settings(max_examples=400, deadline=None)
@given(stream=streams(), skip=st.booleans())
def test_deltas_join_to_the_whole(stream, skip):
    name, ids = stream
    detokenizer = IncrementalDetokenizer(TOKENIZERS[name], skip)
    deltas = [detokenizer.push(i) for i in ids]
    deltas.append(detokenizer.finish())
    assert "".join(deltas) == TOKENIZERS[name].decode(ids, skip)
    assert detokenizer.finish() == ""
    in_groups = IncrementalDetokenizer(TOKENIZERS[name], skip)
    for begin in range(0, len(ids), 3):
        assert in_groups.push_some(ids[begin : begin + 3]) == "".join(deltas[begin : min(begin + 3, len(ids))])
    at_once = OutputText(TOKENIZERS[name], SamplingParams(skip_special_tokens=skip))
    assert at_once.push_all(ids) == at_once.text == "".join(deltas)
    assert at_once.finished


def earliest_stop(text, stops):
    """(end, begin, stop) of the stop string that completes first in a text; of ties, the one that begins first."""
    found = [
        (begin + len(stop), begin, stop) for stop in stops for begin in range(len(text)) if text.startswith(stop, begin)
    ]
    return min(found, default=None)


stop_lists = st.lists(
    st.one_of(
        st.text("theog .é日\n", min_size=1, max_size=4), st.sampled_from(["dog", " the", "👍🏽", "<s>", "�", "ee"])
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=400, deadline=None)
@given(stream=streams(), stops=stop_lists, include=st.booleans(), skip=st.booleans())
def test_text_is_cut_at_the_earliest_stop(stream, stops, include, skip):
    name, ids = stream
    params = SamplingParams(stop=stops, include_stop_str_in_output=include, skip_special_tokens=skip)
    output = OutputText(TOKENIZERS[name], params)
    joined = ""
    for token_id in ids:
        joined += output.push(token_id)
        assert output.text == joined
        if output.stopped_by is not None:
            assert output.finished
            assert output.push(token_id) == ""
            break
    joined += output.finish()
    assert output.finished
    assert output.text == joined
    whole = TOKENIZERS[name].decode(ids, skip)
    stop = earliest_stop(whole, stops)
    if stop is None:
        assert (joined, output.stopped_by) == (whole, None)
    else:
        end, begin, text = stop
        assert (joined, output.stopped_by) == (whole[: end if include else begin], text)


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    include=st.booleans(),
)
def test_stop_strings_alone(pieces, stops, include):
    """A tiny alphabet, so that stops overlap with themselves and each other; held text is never more than needed."""
    stopper, output = StopStrings(stops, include), ""
    for i, piece in enumerate(pieces):
        output += stopper.push(piece)
        if stopper.stopped_by is None:
            so_far = "".join(pieces[: i + 1])
            longest = max((k for s in stops for k in range(len(s)) if k and so_far.endswith(s[:k])), default=0)
            assert len(so_far) - len(output) == longest
    whole, stop = "".join(pieces), earliest_stop("".join(pieces), stops)
    output += stopper.finish()
    assert stopper.stopped_by == (stop and stop[2])
    assert output == (whole if stop is None else whole[: stop[0] if include else stop[1]])


def deltas_of(tokenizer, tokens):
    detokenizer = IncrementalDetokenizer(tokenizer)
    return [detokenizer.push(tokenizer.token_to_id(t)) for t in tokens] + [detokenizer.finish()]


def test_text_comes_as_early_as_it_can():
    tokenizer = TOKENIZERS["byte-level BPE"]
    assert deltas_of(tokenizer, ["a", "ð", "Ł", "ĳ", "į", "b"]) == ["a", "", "", "", "👍", "b", ""]
    assert deltas_of(tokenizer, ["ð", "Ł", "a"]) == ["", "", "�a", ""]
    assert deltas_of(tokenizer, ["ð", "Ł"]) == ["", "", "�"]
    assert deltas_of(tokenizer, ["ÿ", "a"]) == ["�", "a", ""]


def test_byte_fallback_runs_are_held():
    tokenizer = TOKENIZERS["Llama-2"]
    run = ["<0xE2>", "<0x82>", "<0xAC>"]
    assert deltas_of(tokenizer, ["▁the", *run, "s"]) == ["the", "", "", "", "€s", ""]
    assert deltas_of(tokenizer, ["▁the", *run, "<0xFF>", "s"]) == ["the", "", "", "", "", "����s", ""]
    assert deltas_of(tokenizer, ["▁the", "▁", "▁", "▁dog"]) == ["the", " ", " ", " dog", ""]
    assert deltas_of(tokenizer, run) == ["", "", "", "€"]


def test_special_tokens_inside_a_character():
    tokenizer = TOKENIZERS["byte-level BPE"]
    assert deltas_of(tokenizer, ["ð", "Ł", "<s>", "ĳ", "į"]) == ["", "", "", "", "👍", ""]


def test_ids_outside_the_vocabulary():
    for tokenizer in TOKENIZERS.values():
        detokenizer = IncrementalDetokenizer(tokenizer)
        assert detokenizer.push(10**6) == ""
        for bad in (-1, 2**32):
            with pytest.raises(RequestError, match="token id must be in"):
                detokenizer.push(bad)
        with pytest.raises(TypeError):
            detokenizer.push("a")


COSTS = [
    (name, token)
    for name, tokenizer in TOKENIZERS.items()
    for token in (None, "▁", "a", "<0x41>", "é")
    if token is None or tokenizer.token_to_id(token) is not None
]
COSTS.remove(("byte-level with more steps", "é"))  # bad bytes without end keep that window open


@pytest.mark.parametrize(("name", "token"), COSTS)
def test_cost_per_token_does_not_grow(name, token):
    """The window stays small, whatever comes: counted, not timed."""
    tokenizer = TOKENIZERS[name]
    ids = [tokenizer.token_to_id(token)] if token else tokenizer.encode(" ".join(CORPUS))
    detokenizer = IncrementalDetokenizer(tokenizer)
    decoded = []
    plain = detokenizer._decode
    detokenizer._decode = lambda ids: (decoded.append(len(ids)), plain(ids))[1]
    ids = (ids * 3000)[:3000]
    text = "".join(map(detokenizer.push, ids)) + detokenizer.finish()
    assert text == tokenizer.decode(ids)
    assert sum(decoded) <= 12 * len(ids)


def test_long_stop_strings_are_cheap():
    stopper = StopStrings(["a" * 2000 + "b", "xy"])
    begin = time.thread_time()
    text = "".join(stopper.push("cab ") for _ in range(20_000)) + stopper.finish()
    assert time.thread_time() - begin < 5  # of the CPU, whatever else the machine does
    assert text == "cab " * 20_000


@pytest.mark.parametrize("stop", ["abc", [""], ["a", 3]])
def test_bad_stop_strings(stop):
    with pytest.raises(RequestError, match="stop strings must be nonempty strings"):
        StopStrings(stop)


def test_stop_found_only_at_the_end():
    """A run of byte tokens is held back by the detokenizer, so its text meets the stops in finish()."""
    tokenizer = TOKENIZERS["Llama-2"]
    output = OutputText(tokenizer, SamplingParams(stop="€"))
    assert [output.push(tokenizer.token_to_id(t)) for t in ["▁the", "<0xE2>", "<0x82>", "<0xAC>"]] == [
        "the",
        "",
        "",
        "",
    ]
    assert output.stopped_by is None
    assert output.finish() == ""
    assert (output.text, output.stopped_by) == ("the", "€")


def test_without_tokenizer():
    absent = Tokenizer(None)
    output = OutputText(absent)
    assert output.push(5) == "" == output.finish()
    with pytest.raises(RequestError, match="token ids still work"):
        OutputText(absent, SamplingParams(stop="x"))
    with pytest.raises(RequestError, match="token ids still work"):
        IncrementalDetokenizer(absent)
