"""The demo model's tokenizer: byte-level BPE with four special tokens, and its chat template."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from corpus import Document
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SPECIALS = ("<s>", "</s>", "<|user|>", "<|assistant|>")
BOS, EOS, USER, ASSISTANT = range(4)

# System messages are left out: the model has never seen one.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<|user|>' + message['content'] | trim }}"
    "{% elif message['role'] == 'assistant' %}{{ '<|assistant|>' + message['content'] | trim + eos_token }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(docs: Iterable[Document], vocab_size: int) -> Tokenizer:
    """Train on plain text; all 256 bytes are in the vocabulary, so there is no unknown token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (part for doc in docs for part in (doc.text, *(p for turn in doc.turns for p in turn)) if part)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B:1", special_tokens=[("<s>", BOS)]),
        ]
    )
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    tokenizer: Tokenizer = Tokenizer.from_file(str(path))
    return tokenizer


def encode(tokenizer: Tokenizer, docs: list[Document]) -> list[list[int]]:
    """Token ids of whole documents, from ``<s>`` to the last ``</s>``, as the chat template lays them out."""
    parts = [part for doc in docs for part in (doc.text, *(p for turn in doc.turns for p in turn)) if part]
    encoded = iter(tokenizer.encode_batch(parts, add_special_tokens=False))
    out: list[list[int]] = []
    for doc in docs:
        ids = [BOS]
        if doc.text:
            ids += [*next(encoded).ids, EOS]
        for _ in doc.turns:
            ids += [USER, *next(encoded).ids]
            ids += [ASSISTANT, *next(encoded).ids, EOS]
        out.append(ids)
    return out
