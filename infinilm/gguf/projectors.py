"""mmproj files: the towers of models whose texts are GGUF files, as llama.cpp's converter writes them.

`clip.projector_type` says the kind. A row of `PROJECTORS` brings a file to what a Hugging Face checkpoint of the model
says of its tower: the content of config.json and of preprocessor_config.json, and the names of tensors.

Sources of these facts: tools/mtmd/clip.cpp, clip-impl.h and conversion/*.py of llama.cpp, as of 2026.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from infinilm.errors import ConfigError
from infinilm.gguf.file import GgufFile, open_gguf, reading
from infinilm.unsupported import unsupported

__all__ = [
    "PROJECTORS",
    "Projector",
    "ProjectorFile",
    "find_projector",
    "image_token_id",
    "projectors_among",
    "rope_values",
    "tower_of",
]

_PREFIX = "clip.vision."
_OF_LAYER = re.compile(r"v\.blk\.(\d+)\.(\w+)")
_OF_LEVEL = re.compile(r"v\.deepstack\.(\d+)\.(\w+)")
# Which of several files beside a model: the first has what the weights were trained in, and all of it; the others have
# as much or less.
_PRECISIONS = ("BF16", "F32", "F16", "Q8_0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Projector:
    """One row of the table.

    Attributes
    ----------
    model_type : str
        What config.json of such a model says.
    image_token : str
        The token of the model of texts that stands for a row of a picture.
    keys : mapping of str to str
        Keys of `vision_config`, by those of the file.
    constants : mapping of str to float
        Keys of the file whose values are no settings of such a tower, and what they are.
    outer : mapping of str to str
        Keys of config.json itself, by those of the file.
    settings : mapping of str to str
        Keys of the file that preprocessor_config.json has, too: `size.longest_edge` is a key within another.
    known : mapping of str to value
        What preprocessor_config.json has beside, where no key of the file says it.
    act : str
        The activation of the MLP, where the file does not say that it is SiLU; "quick_gelu" is said by no key.
    modules, layer_modules, level_modules : mapping of str to str
        What a checkpoint calls the modules outside of layers, those of a layer, and those of a level, by their names in
        the file. `{}` is the number of the layer, or of the level.
    norm_offsets : frozenset of str
        Tensors to which the converter has added one.
    pairs : bool
        Rows of queries and keys are in the order of pairs that RoPE turns.
    may_be_swapped : bool
        Older converters gave the two linears of an MLP each other's name.
    interleaved : bool
        Frequencies of the axes of the model of texts take turns.
    frames : bool
        What embeds patches is stored in two tensors, one for each frame.
    whole_layers : str
        The key of the file that says that every so many layers see all of a picture, and others windows. "": all do.
    """

    model_type: str
    image_token: str
    keys: Mapping[str, str]
    constants: Mapping[str, float] = field(default_factory=dict)
    outer: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    known: Mapping[str, Any] = field(default_factory=dict)
    act: str
    modules: Mapping[str, str]
    layer_modules: Mapping[str, str]
    level_modules: Mapping[str, str] = field(default_factory=dict)
    norm_offsets: frozenset[str] = frozenset()
    pairs: bool = False
    may_be_swapped: bool = False
    interleaved: bool = False
    frames: bool = False
    whole_layers: str = ""


_SIZES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "feed_forward_length": "intermediate_size",
    "patch_size": "patch_size",
    "image_size": "image_size",
}
_SIGLIP_KEYS = {**_SIZES, "attention.layer_norm_epsilon": "layer_norm_eps"}


def _of_layers(prefix: str, **modules: str) -> dict[str, str]:
    return {name: f"{prefix}.{{}}.{module}" for name, module in modules.items()}


def _siglip_layers(prefix: str) -> dict[str, str]:
    return _of_layers(
        prefix,
        attn_q="self_attn.q_proj",
        attn_k="self_attn.k_proj",
        attn_v="self_attn.v_proj",
        attn_out="self_attn.out_proj",
        ffn_up="mlp.fc1",
        ffn_down="mlp.fc2",
        ln1="layer_norm1",
        ln2="layer_norm2",
    )


def _siglip_modules(tower: str) -> dict[str, str]:
    return {
        "v.patch_embd": f"{tower}.embeddings.patch_embedding",
        "v.position_embd": f"{tower}.embeddings.position_embedding",
        "v.post_ln": f"{tower}.post_layernorm",
    }


_GEMMA_TOWER = "model.vision_tower.vision_model"
_PIXTRAL_PROJECTOR = "model.multi_modal_projector"

_QWEN_PIXELS = {"image_min_pixels": "size.shortest_edge", "image_max_pixels": "size.longest_edge"}
_QWEN2_VL = Projector(
    model_type="qwen2_vl",
    image_token="<|image_pad|>",
    keys={  # the converter writes another number as feed_forward_length, so that tensors alone say it
        "block_count": "depth",
        "embedding_length": "embed_dim",
        "attention.head_count": "num_heads",
        "patch_size": "patch_size",
        "spatial_merge_size": "spatial_merge_size",
        "projection_dim": "hidden_size",
    },
    constants={"attention.layer_norm_epsilon": 1e-6},
    settings=_QWEN_PIXELS,
    known={"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16384}},  # as published models have it
    act="quick_gelu",
    modules={
        "v.patch_embd": "model.visual.patch_embed.proj",
        "v.post_ln": "model.visual.merger.ln_q",
        "mm.0": "model.visual.merger.mlp.0",
        "mm.2": "model.visual.merger.mlp.2",
    },
    layer_modules=_of_layers(
        "model.visual.blocks",
        attn_q="self_attn.q_proj",
        attn_k="self_attn.k_proj",
        attn_v="self_attn.v_proj",
        attn_out="attn.proj",
        ffn_up="mlp.fc1",
        ffn_down="mlp.fc2",
        ln1="norm1",
        ln2="norm2",
    ),
    may_be_swapped=True,
    frames=True,
)

PROJECTORS: Mapping[str, Projector] = {
    "qwen2vl_merger": _QWEN2_VL,
    "qwen2.5vl_merger": replace(
        _QWEN2_VL,
        model_type="qwen2_5_vl",
        keys={
            "block_count": "depth",
            "embedding_length": "hidden_size",
            "attention.head_count": "num_heads",
            "feed_forward_length": "intermediate_size",
            "patch_size": "patch_size",
            "spatial_merge_size": "spatial_merge_size",
            "projection_dim": "out_hidden_size",
            "window_size": "window_size",
        },
        act="silu",
        layer_modules={
            **_QWEN2_VL.layer_modules,
            **_of_layers(
                "model.visual.blocks", ffn_gate="mlp.gate_proj", ffn_up="mlp.up_proj", ffn_down="mlp.down_proj"
            ),
        },
        whole_layers="n_wa_pattern",
    ),
    "gemma3": Projector(
        model_type="gemma3",
        image_token="<image_soft_token>",
        keys=_SIGLIP_KEYS,
        outer={"projector.scale_factor": "scale_factor"},
        act="gelu_pytorch_tanh",
        modules={
            **_siglip_modules(_GEMMA_TOWER),
            "mm.input_projection.weight": "model.multi_modal_projector.mm_input_projection_weight",
            "mm.soft_emb_norm": "model.multi_modal_projector.mm_soft_emb_norm",
        },
        layer_modules=_siglip_layers(f"{_GEMMA_TOWER}.encoder.layers"),
        norm_offsets=frozenset({"mm.soft_emb_norm.weight"}),
        may_be_swapped=True,
    ),
    "idefics3": Projector(
        model_type="idefics3",
        image_token="<image>",
        keys=_SIGLIP_KEYS,
        outer={"projector.scale_factor": "scale_factor"},
        settings={"preproc_image_size": "size.longest_edge", "image_size": "max_image_size.longest_edge"},
        act="gelu_pytorch_tanh",
        modules={
            **_siglip_modules("model.vision_model"),
            "mm.model.fc": "model.connector.modality_projection.proj",
        },
        layer_modules=_siglip_layers("model.vision_model.encoder.layers"),
        may_be_swapped=True,
    ),
    "pixtral": Projector(
        model_type="mistral3",
        image_token="[IMG]",
        keys=_SIZES,
        constants={"attention.layer_norm_epsilon": 1e-5},
        outer={"spatial_merge_size": "spatial_merge_size"},
        settings={"image_size": "size.longest_edge"},
        act="gelu",
        modules={
            "v.patch_embd": "model.vision_tower.patch_conv",
            "v.pre_ln": "model.vision_tower.ln_pre",
            "mm.input_norm": f"{_PIXTRAL_PROJECTOR}.norm",
            "mm.patch_merger": f"{_PIXTRAL_PROJECTOR}.patch_merger.merging_layer",
            "mm.1": f"{_PIXTRAL_PROJECTOR}.linear_1",
            "mm.2": f"{_PIXTRAL_PROJECTOR}.linear_2",
        },
        layer_modules=_of_layers(
            "model.vision_tower.transformer.layers",
            attn_q="attention.q_proj",
            attn_k="attention.k_proj",
            attn_v="attention.v_proj",
            attn_out="attention.o_proj",
            ffn_gate="feed_forward.gate_proj",
            ffn_up="feed_forward.up_proj",
            ffn_down="feed_forward.down_proj",
            ln1="attention_norm",
            ln2="ffn_norm",
        ),
        pairs=True,
    ),
    "qwen3vl_merger": Projector(
        model_type="qwen3_vl",
        image_token="<|image_pad|>",
        keys={
            "block_count": "depth",
            "embedding_length": "hidden_size",
            "attention.head_count": "num_heads",
            "feed_forward_length": "intermediate_size",
            "patch_size": "patch_size",
            "spatial_merge_size": "spatial_merge_size",
            "projection_dim": "out_hidden_size",
        },
        constants={"attention.layer_norm_epsilon": 1e-6},
        settings=_QWEN_PIXELS,
        known={"size": {"shortest_edge": 1 << 16, "longest_edge": 1 << 24}},  # as published models have it
        act="gelu_pytorch_tanh",
        modules={
            "v.patch_embd": "model.visual.patch_embed.proj",
            "v.position_embd": "model.visual.pos_embed",
            "v.post_ln": "model.visual.merger.norm",
            "mm.0": "model.visual.merger.linear_fc1",
            "mm.2": "model.visual.merger.linear_fc2",
        },
        layer_modules=_of_layers(
            "model.visual.blocks",
            attn_qkv="attn.qkv",
            attn_out="attn.proj",
            ffn_up="mlp.linear_fc1",
            ffn_down="mlp.linear_fc2",
            ln1="norm1",
            ln2="norm2",
        ),
        level_modules=_of_layers("model.visual.deepstack_merger_list", norm="norm", fc1="linear_fc1", fc2="linear_fc2"),
        interleaved=True,
        frames=True,
    ),
}
"""By `clip.projector_type`."""

_OPTIONAL = frozenset(
    {"projector.scale_factor", "spatial_merge_size", "image_min_pixels", "image_max_pixels", "window_size"}
)


class ProjectorFile(NamedTuple):
    """A tower in an mmproj file.

    Attributes
    ----------
    path : Path
    gguf : GgufFile
    row : Projector
    config : dict
        `model_type`, `vision_config` and what else config.json says of the tower.
    settings : dict
        The content of preprocessor_config.json.
    """

    path: Path
    gguf: GgufFile
    row: Projector
    config: dict[str, Any]
    settings: dict[str, Any]

    @classmethod
    def open(cls, path: Path) -> ProjectorFile:
        """Read the header of a file.

        Raises
        ------
        FileNotFoundError, WeightError
            It is absent or damaged.
        ConfigError
            It is no mmproj file, or its tower is none that is computed here.
        """
        gguf = open_gguf(path)
        with reading(path):
            row = _row_of(path, gguf.metadata)
            return cls(path, gguf, row, *_Reader(path, gguf, row).read())

    def names(self) -> dict[str, str]:
        """What a checkpoint calls the tensors of the tower, by their names in the file; others are not read."""
        levels = self.config["vision_config"].get("deepstack_visual_indexes", ())
        swapped = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"} if self._is_swapped() else {}

        def name_of(tensor: str) -> str | None:
            if tensor in self.row.modules:
                return self.row.modules[tensor]
            module, _, kind = tensor.rpartition(".")
            if match := _OF_LAYER.fullmatch(module):
                found = self.row.layer_modules.get(swapped.get(match[2], match[2]))
                found = found and found.format(match[1])
            elif (match := _OF_LEVEL.fullmatch(module)) and int(match[1]) in levels:
                found = self.row.level_modules.get(match[2])
                found = found and found.format(levels.index(int(match[1])))
            else:
                found = self.row.modules.get(module)
            return f"{found}.{kind}" if found else None

        named = {tensor: name_of(tensor) for tensor in self.gguf.tensors}
        return {tensor: name for tensor, name in named.items() if name is not None}

    def _is_swapped(self) -> bool:
        down = self.gguf.tensors.get("v.blk.0.ffn_down.weight")
        size = self.gguf.metadata.get(f"{_PREFIX}embedding_length")
        return self.row.may_be_swapped and down is not None and down.shape[0] != size == down.shape[-1]


def _row_of(path: Path, metadata: Mapping[str, Any]) -> Projector:
    kind = metadata.get("general.type", metadata.get("general.architecture"))
    if kind not in ("mmproj", "clip"):
        raise ConfigError(
            f"{path}: general.type is {kind!r:.80}; expected 'mmproj': such files are called mmproj-*.gguf, and the "
            "model of texts is passed as the model"
        )
    name = metadata.get("clip.vision.projector_type", metadata.get("clip.projector_type"))
    if not isinstance(name, str):
        raise ConfigError(f"{path}: clip.projector_type, which names the kind of tower, is missing or no text")
    if name not in PROJECTORS:
        raise unsupported(f"{path}: clip.projector_type", name, PROJECTORS, "docs/images.md lists those that are")
    return PROJECTORS[name]


class _Reader:
    """Brings the metadata of a file to the keys of a checkpoint."""

    def __init__(self, path: Path, gguf: GgufFile, row: Projector) -> None:
        self._path, self._gguf, self._row = path, gguf, row
        self._said = {k.removeprefix(_PREFIX): v for k, v in gguf.metadata.items() if k.startswith(_PREFIX)}

    def read(self) -> tuple[dict[str, Any], dict[str, Any]]:
        row, sizes = self._row, self._values(self._row.keys)
        for key, known in row.constants.items():
            if _rounded(self._value(key)) != known:
                raise ConfigError(f"{self._name(key)} is {self._said[key]!r}; computed is {known}")
        sizes["hidden_act"] = self._act()
        if row.level_modules:
            at = self._said.get("is_deepstack_layers", [])
            sizes["deepstack_visual_indexes"] = [i for i, has_level in enumerate(at) if has_level]
            sizes["num_position_embeddings"] = self._gguf.tensors["v.position_embd.weight"].shape[0]
        if row.whole_layers:
            every = self._value(row.whole_layers)
            if not isinstance(every, int) or every < 1:
                raise ConfigError(f"{self._name(row.whole_layers)} is {every!r}; expected a number of layers")
            sizes["fullatt_block_indexes"] = list(range(every - 1, self._value("block_count"), every))
        config = {"model_type": row.model_type, "vision_config": sizes, **self._values(row.outer)}
        if row.model_type == "gemma3":  # a side of the squares of patches that become a row
            side = self._value("image_size") // self._value("patch_size") // config.pop("scale_factor", 4)
            config["mm_tokens_per_image"] = side**2
        elif row.model_type == "qwen2_vl" and "v.blk.0.ffn_up.weight" in self._gguf.tensors:
            sizes["mlp_ratio"] = max(self._gguf.tensors["v.blk.0.ffn_up.weight"].shape) // sizes["embed_dim"]
        elif row.model_type == "mistral3":
            self._value("spatial_merge_size")  # without a merger it is the tower of another family
            config["multimodal_projector_bias"] = "mm.1.bias" in self._gguf.tensors
        settings = {**row.known, "image_mean": self._value("image_mean"), "image_std": self._value("image_std")}
        for key, where in row.settings.items():
            if key in self._said or key not in _OPTIONAL:
                outer, inner = where.split(".")
                settings[outer] = {**settings.get(outer, {}), inner: self._value(key)}
        return config, settings

    def _act(self) -> str:
        if self._gguf.metadata.get("clip.use_silu"):
            return "silu"
        says_gelu, means_quick = bool(self._gguf.metadata.get("clip.use_gelu")), self._row.act == "quick_gelu"
        if says_gelu and not means_quick:
            return self._row.act
        if says_gelu or not means_quick:
            raise ConfigError(
                f"{self._path}: {'clip.use_gelu' if says_gelu else 'neither clip.use_gelu nor clip.use_silu'} is true, "
                "which means another activation than such a tower has"
            )
        return self._row.act

    def _values(self, keys: Mapping[str, str]) -> dict[str, Any]:
        return {to: _rounded(self._value(key)) for key, to in keys.items() if key in self._said or key not in _OPTIONAL}

    def _value(self, key: str) -> Any:
        if key not in self._said:
            raise ConfigError(f"{self._name(key)} is missing")
        return self._said[key]

    def _name(self, key: str) -> str:
        return f"{self._path}: {_PREFIX}{key}"


def _rounded(value: Any) -> Any:
    """A number as it was before it became a float32."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def image_token_id(text: GgufFile, row: Projector) -> int:
    """The token of a model of texts that stands for a row of a picture. ConfigError: its vocabulary has none."""
    tokens = text.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or row.image_token not in tokens:
        raise ConfigError(f"{text.path}: its vocabulary has no token {row.image_token!r}, which stands for a picture")
    return tokens.index(row.image_token)


def rope_values(text: GgufFile, row: Projector) -> dict[str, Any]:
    """What `rope_parameters` of a model of texts say of the axes of its frequencies."""
    sections = text.metadata.get(f"{text.metadata.get('general.architecture')}.rope.dimension_sections")
    if not isinstance(sections, list):
        return {}
    return {"mrope_section": sections[:3], "mrope_interleaved": row.interleaved}


def projectors_among(names: Iterable[str]) -> list[str]:
    """The names of mmproj files among others, the one to take first."""

    def place(name: str) -> tuple[int, str]:
        words = re.split(r"[-.]", name.upper())
        return next((i for i, own in enumerate(_PRECISIONS) if own in words), len(_PRECISIONS)), name

    found = [name for name in names if "mmproj" in name.lower() and name.lower().endswith(".gguf")]
    return sorted(found, key=place)


def tower_of(model: str, names: Iterable[str]) -> list[str]:
    """The name of the mmproj file that goes with a GGUF file of a repository, if there is one: it is in its folder."""
    beside = [name for name in names if PurePosixPath(name).parent == PurePosixPath(model).parent]
    towers = projectors_among(beside)
    return towers[:1] if model not in towers else []


def find_projector(model: Path) -> Path | None:
    """The mmproj file beside a GGUF file; None: there is none. The best precision wins."""
    found = projectors_among(entry.name for entry in model.parent.iterdir())
    return model.parent / found[0] if found and model.name not in found else None
