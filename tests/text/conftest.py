from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

import infinilm
from infinilm.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer_with() -> Callable[[Iterable[str]], Tokenizer]:
    """Makes the tokenizer of the bundled model, with some texts as special tokens."""
    import tokenizers

    file = Path(infinilm.__file__).parent / "assets" / "demo" / "tokenizer.json"

    def make(special: Iterable[str]) -> Tokenizer:
        backend = tokenizers.Tokenizer.from_file(str(file))
        backend.add_special_tokens(list(special))
        return Tokenizer(backend, eos_token_ids=[1])

    return make
