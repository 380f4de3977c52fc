"""What to say of a model whose family has no row: why, where that is known, or which name is near."""

from __future__ import annotations

import re
from collections.abc import Iterable

from infinilm.errors import ConfigError, did_you_mean

__all__ = ["LIST", "unsupported"]

LIST = "docs/architectures.md lists those that are"

# By the words of a model_type together; where no name is near, by the first of them.
_REASONS = {
    "it is an encoder whose math is not computed": (
        "albert camembert clip convbert deberta debertav2 electra ernie esm gte layoutlm longformer siglip"
    ),
    "it has an encoder and a decoder, and only decoders are computed": (
        "bart bigbirdpegasus blenderbot led longt5 m2m marian mbart mt5 pegasus prophetnet seamless switch t5 "
        "t5gemma udop umt5 whisper"
    ),
    "it has state space layers, which are not computed": (
        "codestralmamba falconmamba jamba mamba mamba2 plamo2 recurrentgemma rwkv rwkv5 rwkv6 rwkv7 xlstm zamba zamba2"
    ),
    "its positions are learned, and only those of RoPE are computed": ("biogpt ctrl gpt2 gptbigcode gptneo opt xglm"),
    "its positions are those of ALiBi, and only those of RoPE are computed": "bloom falcon mpt",
    "it makes pictures or reads them, and no text": "beit convnext deit detr dinov2 resnet sam segformer swin vit",
}
_REASON_OF = {word: reason for reason, words in _REASONS.items() for word in words.split()}
_CLASS = re.compile(r"(For[A-Z]\w*|LMHeadModel|Model|PreTrainedModel)$")


def unsupported(what: str, name: object, known: Iterable[str]) -> ConfigError:
    """The error of a name of a family that has no row; `what`: the key that has it, `known`: the names of all rows."""
    reason, hint = None, ""
    if isinstance(name, str):
        words = re.split(r"[_\-\s]+", _CLASS.sub("", name).lower())
        reason = _REASON_OF.get("".join(words))
        stems = {_CLASS.sub("", other): other for other in known}
        near = did_you_mean(_CLASS.sub("", name), stems)
        hint = next((f"; did you mean {other!r}?" for stem, other in stems.items() if repr(stem) in near), "")
        if not hint:
            reason = reason or _REASON_OF.get(words[0])
    told = f": {reason}" if reason else hint
    return ConfigError(f"{what} {name!r} is not supported{told}{';' if not told.endswith('?') else ''} {LIST}")
