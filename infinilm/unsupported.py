"""What to say of a model whose family has no row: which math is missing, and the nearest family that is computed.

`REFUSED` is also the list of docs/architectures.md, which `tools/refused_page.py` writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from infinilm.errors import ConfigError, did_you_mean

__all__ = ["LIST", "REFUSED", "Refused", "missing_math", "unsupported"]

LIST = "docs/architectures.md lists those that are"


@dataclass(frozen=True, slots=True)
class Refused:
    """Classes that are not computed for one reason.

    Attributes
    ----------
    classes : str
        Their names in `architectures` of config.json, with spaces between them.
    missing : str
        The math that is missing, with the keys of config.json that ask for it.
    nearest : str
        The class that is computed and comes nearest.
    also : str
        Other names that mean the same: those of `model_type`, or of `general.architecture` in a GGUF file, where these
        are not the words of a class.
    """

    classes: str
    missing: str
    nearest: str
    also: str = ""


REFUSED: tuple[Refused, ...] = (
    Refused(
        "Gemma4AssistantForCausalLM Gemma4UnifiedAssistantForCausalLM",
        "a drafter, which reads the keys and values of its model and is loaded beside it: "
        "`speculation={'method': 'mtp', 'model': ...}`",
        "Gemma4ForConditionalGeneration",
        "gemma4assistant gemma4unifiedassistant",
    ),
    Refused(
        "Mamba2ForCausalLM",
        "models without attention",
        "BambaForCausalLM",
        "mamba2 codestralmamba plamo2",
    ),
    Refused(
        "JambaForCausalLM MambaForCausalLM FalconMambaForCausalLM ZambaForCausalLM",
        "Mamba of the first kind, whose states have a decay of each element",
        "BambaForCausalLM",
    ),
    Refused(
        "RwkvForCausalLM RecurrentGemmaForCausalLM xLSTMForCausalLM",
        "states that are neither those of Mamba-2 nor of the delta rule",
        "Qwen3NextForCausalLM",
        "rwkv5 rwkv6 rwkv7 rwkv6qwen2 arwkv7",
    ),
    Refused(
        "DeciLMForCausalLM",
        "layers of unequal sizes, some without attention or without an MLP (`block_configs`, `no_op`)",
        "LlamaForCausalLM",
        "nemotronnas deci",
    ),
    Refused(
        "ChatGLMModel QWenLMHeadModel",
        "code of their own on the hub, with q, k and v in one tensor and other names of keys (`kv_channels`, "
        "`ffn_hidden_size`); GLM-4-9B-hf is `GlmForCausalLM`",
        "GlmForCausalLM",
    ),
    Refused(
        "MiMoV2ForCausalLM",
        "q, k and v in one tensor that is cut for several ranks (`attention_projection_layout`)",
        "MiMoV2FlashForCausalLM",
    ),
    Refused(
        "KimiK3ForConditionalGeneration KimiK3ForCausalLM",
        "sublayers that read what earlier layers gave, by attention over layers (`attn_res_block_size`), and an "
        "activation of their own (`situ`)",
        "BailingHybridForCausalLM",
    ),
    Refused(
        "DeepseekV4ForCausalLM Qwen4ExpForCausalLM",
        "several residual streams (`hc_mult`, `hc_count`), keys that are compressed or chosen (`index_topk`)",
        "DeepseekV3ForCausalLM",
    ),
    Refused(
        "LongcatFlashForCausalLM",
        "experts that do nothing (`zero_expert_num`)",
        "DeepseekV3ForCausalLM",
    ),
    Refused(
        "BitNetForCausalLM",
        "norms inside of sublayers (`attn_sub_norm`, `ffn_sub_norm`)",
        "LlamaForCausalLM",
        "bitnetb158",
    ),
    Refused(
        "DbrxForCausalLM",
        "`clip_qkv`, all experts of a layer in one tensor, keys inside of `attn_config` and `ffn_config`",
        "MixtralForCausalLM",
    ),
    Refused(
        "BioGptForCausalLM XGLMForCausalLM GPTNeoForCausalLM CTRLLMHeadModel",
        "other variants of GPT-2, with sine positions or local attention",
        "GPT2LMHeadModel",
    ),
    Refused(
        "RWForCausalLM GPTRefactForCausalLM",
        "ALiBi whose slopes are rounded (`alibi` of RefinedWeb)",
        "MptForCausalLM",
        "refact refinedweb refinedwebmodel",
    ),
    Refused(
        "MiniCPMV",
        "keys of the text part at the top, its tensors below `llm.`",
        "Qwen3ForCausalLM",
    ),
    Refused(
        "Qwen2_5OmniForConditionalGeneration Qwen3OmniMoeForConditionalGeneration",
        "the text part two levels deep (`thinker_config`, `text_config`), its tensors below `thinker.`; speech is a "
        "second model (`talker_config`)",
        "Qwen3VLMoeForConditionalGeneration",
    ),
    Refused(
        "Ernie4_5_VLMoeForConditionalGeneration",
        "two sets of experts, for text and for images, of unequal sizes (`moe_intermediate_size` is a list)",
        "Ernie4_5_MoeForCausalLM",
    ),
    Refused(
        "PaliGemmaForConditionalGeneration",
        "tokens of a prompt that see those after them, too",
        "Gemma3ForConditionalGeneration",
    ),
    Refused(
        "MllamaForConditionalGeneration",
        "cross-attention to the pictures",
        "Llama4ForConditionalGeneration",
    ),
    Refused(
        "T5ForConditionalGeneration BartForConditionalGeneration WhisperForConditionalGeneration",
        "an encoder beside the decoder, which reads it by cross-attention",
        "Gemma3ForCausalLM",
        "bigbirdpegasus blenderbot led longt5 m2m marian mbart mt5 pegasus prophetnet seamless switch t5gemma "
        "t5encoder udop umt5",
    ),
    Refused(
        "DebertaV2Model ElectraModel AlbertModel",
        "attention between contents and positions apart, or other encoders whose math has no row",
        "BertModel",
        "camembert clip convbert deberta ernie esm gte layoutlm longformer siglip",
    ),
    Refused(
        "ViTModel ResNetModel SamModel",
        "text: they make pictures or read them",
        "Qwen3VLForConditionalGeneration",
        "beit convnext deit detr dinov2 segformer swin",
    ),
)

_CLASS = re.compile(r"(For[A-Z]\w*|LMHeadModel|Model|PreTrainedModel)$")


def _words(name: str) -> list[str]:
    return re.split(r"[_\-\s.]+", _CLASS.sub("", name).lower())


def _names(row: Refused) -> Iterator[str]:
    for name in row.classes.split():
        yield "".join(_words(name))
    yield from row.also.split()


_BY_NAME = {name: row for row in REFUSED for name in _names(row)}


def missing_math(name: str, first_word: bool = False) -> Refused | None:
    """The row of a name of a family; with `first_word`, of the first of its words alone."""
    words = _words(name)
    return _BY_NAME.get(words[0] if first_word else "".join(words))


def unsupported(what: str, name: object, known: Iterable[str], where: str = LIST) -> ConfigError:
    """The error of a name of a family that has no row, in three lines where it is known what is missing.

    `what`: the key that has it, `known`: the names of all rows, `where`: the page that lists them.
    """
    row, hint = None, ""
    if isinstance(name, str):
        row = missing_math(name)
        stems = {_CLASS.sub("", other): other for other in known}
        near = did_you_mean(_CLASS.sub("", name), stems)
        hint = next((f"; did you mean {other!r}?" for stem, other in stems.items() if repr(stem) in near), "")
        if not hint:
            row = row or missing_math(name, first_word=True)
    if row:
        missing = row.missing.replace("`", "")
        return ConfigError(
            f"{what} {name!r} is not supported\nmissing: {missing}\nnearest that is computed: {row.nearest}; {where}"
        )
    return ConfigError(f"{what} {name!r} is not supported{hint}{'' if hint else ';'} {where}")
