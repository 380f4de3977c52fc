"""The families of towers: a row for each.

Sources of these facts: modeling_qwen2_vl.py, modeling_qwen2_5_vl.py, modeling_qwen3_vl.py, modeling_glm4v.py,
modeling_gemma4.py, modeling_gemma3.py, modeling_siglip.py, modeling_mistral3.py, modeling_pixtral.py,
modeling_idefics3.py and modeling_llama4.py of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from infinilm.config.families.names import TensorNames
from infinilm.config.towers.family import Linear, TowerFamily, TowerPlace

__all__ = ["TOWERS"]

_QWEN3_VL = TowerFamily(
    keys={
        "num_layers": "depth",
        "hidden_size": "hidden_size",
        "num_heads": "num_heads",
        "intermediate_size": "intermediate_size",
        "hidden_act": "hidden_act",
        "patch_size": "patch_size",
        "temporal_patch_size": "temporal_patch_size",
        "merge_size": "spatial_merge_size",
        "out_size": "out_hidden_size",
        "num_positions": "num_position_embeddings",
        "levels": "deepstack_visual_indexes",
    },
    defaults={
        "num_layers": 27,
        "hidden_size": 1152,
        "num_heads": 16,
        "intermediate_size": 4304,
        "hidden_act": "gelu_pytorch_tanh",
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "out_size": 3584,
        "num_positions": 2304,
        "levels": (8, 16, 24),
        "norm_eps": 1e-6,
    },
    places=(TowerPlace("model.visual.", "model.visual.merger."), TowerPlace("visual.", "visual.merger.")),
    names=TensorNames(
        layers="blocks",
        outside={
            "embed_patches": "{tower}patch_embed.proj",
            "embed_positions": "{tower}pos_embed",
            "norm": "{merger}norm",
            "merger_0": "{merger}linear_fc1",
            "merger_1": "{merger}linear_fc2",
        },
        renamed={
            "self_attn.o_proj": "attn.proj",
            "mlp.up_proj": "mlp.linear_fc1",
            "mlp.down_proj": "mlp.linear_fc2",
            "input_layernorm": "norm1",
            "post_attention_layernorm": "norm2",
        },
        joined={"attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")},
    ),
    level_names={
        "norm": "{{tower}}deepstack_merger_list.{}.norm",
        "0": "{{tower}}deepstack_merger_list.{}.linear_fc1",
        "1": "{{tower}}deepstack_merger_list.{}.linear_fc2",
    },
    merger=(Linear("merged", activated=True), Linear("out")),
    positions="stretched",
    rope="halves",
)

_QWEN3_5 = replace(_QWEN3_VL, defaults={**_QWEN3_VL.defaults, "levels": ()})

_QWEN2_VL = replace(
    _QWEN3_VL,
    keys={
        "num_layers": "depth",
        "hidden_size": "embed_dim",
        "num_heads": "num_heads",
        "mlp_ratio": "mlp_ratio",
        "hidden_act": "hidden_act",
        "patch_size": "patch_size",
        "temporal_patch_size": "temporal_patch_size",
        "merge_size": "spatial_merge_size",
        "out_size": "hidden_size",
    },
    defaults={
        "num_layers": 32,
        "hidden_size": 1280,
        "num_heads": 16,
        "mlp_ratio": 4,
        "hidden_act": "quick_gelu",
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "out_size": 3584,
        "num_positions": 0,
        "levels": (),
        "norm_eps": 1e-6,
    },
    names=replace(
        _QWEN3_VL.names,
        outside={
            "embed_patches": "{tower}patch_embed.proj",
            "norm": "{merger}ln_q",
            "merger_0": "{merger}mlp.0",
            "merger_1": "{merger}mlp.2",
        },
        renamed={
            **_QWEN3_VL.names.renamed,
            "mlp.up_proj": "mlp.fc1",
            "mlp.down_proj": "mlp.fc2",
        },
    ),
    level_names={},
    positions="none",
    patch_bias=False,
)

_QWEN2_5_VL = replace(
    _QWEN2_VL,
    keys={
        **{name: key for name, key in _QWEN3_VL.keys.items() if name not in ("num_positions", "levels")},
        "window_size": "window_size",
        "whole_layers": "fullatt_block_indexes",
    },
    defaults={
        **{name: value for name, value in _QWEN2_VL.defaults.items() if name != "mlp_ratio"},
        "hidden_size": 3584,
        "intermediate_size": 3420,
        "hidden_act": "silu",
        "window_size": 112,
        "whole_layers": (7, 15, 23, 31),
    },
    names=replace(
        _QWEN2_VL.names,
        renamed={"self_attn.o_proj": "attn.proj", "input_layernorm": "norm1", "post_attention_layernorm": "norm2"},
    ),
    norm="rms",
    gated=True,
)

_GLM4V = replace(
    _QWEN3_VL,
    keys={
        **{name: key for name, key in _QWEN3_VL.keys.items() if name not in ("num_positions", "levels")},
        "intermediate_size": "out_hidden_size",
        "merger_size": "intermediate_size",
        "image_size": "image_size",
        "norm_eps": "rms_norm_eps",
    },
    defaults={
        "num_layers": 24,
        "hidden_size": 1536,
        "num_heads": 12,
        "intermediate_size": 4096,
        "merger_size": 13696,
        "hidden_act": "silu",
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "out_size": 4096,
        "image_size": 336,
        "levels": (),
        "norm_eps": 1e-5,
    },
    fixed_keys={"vision_config.attention_bias": (False,)},
    names=replace(
        _QWEN3_VL.names,
        outside={
            "embed_patches": "{tower}patch_embed.proj",
            "patch_norm": "{tower}post_conv_layernorm",
            "embed_positions": "{tower}embeddings.position_embedding",
            "norm": "{tower}post_layernorm",
            "merger_0": "{tower}downsample",
            "merger_1": "{merger}proj",
            "merger_1_norm": "{merger}post_projection_norm",
            "merger_2_gate": "{merger}gate_proj",
            "merger_2_up": "{merger}up_proj",
            "merger_3": "{merger}down_proj",
        },
        renamed=_QWEN2_5_VL.names.renamed,
    ),
    level_names={},
    norm="rms",
    merger=(
        Linear("out"),
        Linear("out", bias=False, activated=True, norm_eps=1e-5),
        Linear("inner", bias=False, activated=True, gated=True),
        Linear("out", bias=False),
    ),
    merges_by_channel=True,
    positions="cubic",
    gated=True,
    bias=False,
    patch_norm=True,
    norm_first=True,
    resize="frames",
)

# What most configurations of towers call their sizes.
_USUAL_KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "hidden_act": "hidden_act",
    "patch_size": "patch_size",
}

# SigLIP (arXiv:2303.15343), and Idefics3's variant of it.
_SIGLIP_KEYS = {**_USUAL_KEYS, "image_size": "image_size", "norm_eps": "layer_norm_eps"}
_SIGLIP_NAMES = TensorNames(
    layers="encoder.layers",
    outside={
        "embed_patches": "{tower}embeddings.patch_embedding",
        "embed_positions": "{tower}embeddings.position_embedding",
        "norm": "{tower}post_layernorm",
    },
    renamed={
        "self_attn.o_proj": "self_attn.out_proj",
        "mlp.up_proj": "mlp.fc1",
        "mlp.down_proj": "mlp.fc2",
        "input_layernorm": "layer_norm1",
        "post_attention_layernorm": "layer_norm2",
    },
)
_SIGLIP_DEFAULTS = {
    "num_layers": 12,
    "hidden_size": 768,
    "num_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu_pytorch_tanh",
    "patch_size": 16,
    "temporal_patch_size": 1,
    "image_size": 224,
    "norm_eps": 1e-6,
    "levels": (),
}


def _places(tower: str, merger: str, inner: str = "") -> tuple[TowerPlace, ...]:
    """Names in files of transformers 5 and of earlier versions, with a module around the tower, or without."""
    return tuple(
        TowerPlace(f"{model}{tower}.{within}", f"{model}{merger}.")
        for model in ("model.", "")
        for within in ((inner, "") if inner else ("",))
    )


_GEMMA3 = TowerFamily(
    keys=_SIGLIP_KEYS,
    outer_keys={
        "image_token_id": ("image_token_id", "image_token_index"),
        "out_size": "text_config.hidden_size",
        "num_image_tokens": "mm_tokens_per_image",
    },
    defaults={**_SIGLIP_DEFAULTS, "num_image_tokens": 256, "image_token_id": 262144},
    places=_places("vision_tower", "multi_modal_projector", "vision_model."),
    names=replace(_SIGLIP_NAMES, outside={**_SIGLIP_NAMES.outside, "merger_norm": "{merger}mm_soft_emb_norm"}),
    merger=(Linear("out", bias=False),),
    merger_matrix="mm_input_projection_weight",
    pooled=True,
    pooled_norm_offset=1,
    positions="learned",
    rope="none",
    resize="square",
    text="between",
    placeholder="<start_of_image>",
    two_way=True,
)

_GEMMA4 = TowerFamily(
    keys={
        **_USUAL_KEYS,
        "num_kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "hidden_act": "hidden_activation",
        "norm_eps": "rms_norm_eps",
        "merge_size": "pooling_kernel_size",
        "axis_positions": "position_embedding_size",
        "standardized": "standardize",
        "clipped": "use_clipped_linears",
    },
    outer_keys={"image_token_id": "image_token_id", "out_size": "text_config.hidden_size"},
    defaults={
        "num_layers": 16,
        "hidden_size": 768,
        "num_heads": 12,
        "num_kv_heads": 12,
        "head_dim": 64,
        "intermediate_size": 3072,
        "hidden_act": "gelu_pytorch_tanh",
        "patch_size": 16,
        "temporal_patch_size": 1,
        "merge_size": 3,
        "axis_positions": 10240,
        "standardized": False,
        "clipped": False,
        "levels": (),
        "norm_eps": 1e-6,
        "rope_theta": 100.0,
        "image_token_id": 258880,
    },
    fixed_keys={"vision_config.attention_bias": (False,)},
    places=_places("vision_tower", "embed_vision"),
    names=TensorNames(
        layers="encoder.layers",
        outside={
            "embed_patches": "{tower}patch_embedder.input_proj",
            "std_scale": "{tower}std_scale",
            "std_bias": "{tower}std_bias",
            "merger_0": "{merger}embedding_projection",
        },
        renamed={
            f"{linear}{own}": f"{linear}{stored}"
            for own, stored in (
                ("", ".linear"),
                *((f"_clip.{of}_{bound}", f".{of}_{bound}") for of in ("input", "output") for bound in ("min", "max")),
            )
            for linear in (
                *(f"self_attn.{part}_proj" for part in "qkvo"),
                *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
            )
        },
    ),
    norm="rms",
    merger=(Linear("out", bias=False),),
    pooled=True,
    pooled_by_root=True,
    pooled_norm_weight=False,
    final_norm=False,
    positions="axes",
    position_table="patch_embedder.position_embedding_table",
    rope="quarters",
    qk_norm="head",
    v_norm=True,
    softmax_scale=1,
    post_norms=True,
    gated=True,
    bias=False,
    patch_bias=False,
    channels_last=True,
    resize="budget",
    text="marked",
    two_way="text_config.use_bidirectional_attention",
)

_IDEFICS3 = TowerFamily(
    keys=_SIGLIP_KEYS,
    outer_keys={
        "image_token_id": "image_token_id",
        "out_size": "text_config.hidden_size",
        "merge_size": "scale_factor",
    },
    defaults={**_SIGLIP_DEFAULTS, "patch_size": 32, "merge_size": 2, "image_token_id": 128257},
    places=_places("vision_model", "connector"),
    names=replace(_SIGLIP_NAMES, outside={**_SIGLIP_NAMES.outside, "merger_0": "{merger}modality_projection.proj"}),
    merger=(Linear("out", bias=False),),
    positions="bucketed",
    rope="none",
    resize="tiles",
    text="tiles",
)

_MISTRAL3 = TowerFamily(
    keys=_USUAL_KEYS,
    outer_keys={
        "image_token_id": ("image_token_id", "image_token_index"),
        "out_size": "text_config.hidden_size",
        "merge_size": "spatial_merge_size",
        "merger_eps": "text_config.rms_norm_eps",
        "merger_act": "projector_hidden_act",
    },
    defaults={
        "num_layers": 24,
        "hidden_size": 1024,
        "num_heads": 16,
        "intermediate_size": 4096,
        "hidden_act": "gelu",
        "patch_size": 16,
        "temporal_patch_size": 1,
        "merge_size": 2,
        "num_positions": 0,
        "levels": (),
        "norm_eps": 1e-5,
        "merger_eps": 1e-6,
        "merger_act": "gelu",
        "image_token_id": 10,
    },
    fixed_keys={"vision_feature_layer": (-1, [-1])},
    places=_places("vision_tower", "multi_modal_projector"),
    names=TensorNames(
        layers="transformer.layers",
        outside={
            "embed_patches": "{tower}patch_conv",
            "patch_norm": "{tower}ln_pre",
            "norm": "{merger}norm",
            "merger_0": "{merger}patch_merger.merging_layer",
            "merger_1": "{merger}linear_1",
            "merger_2": "{merger}linear_2",
        },
        renamed={
            **{f"self_attn.{part}_proj": f"attention.{part}_proj" for part in "qkvo"},
            **{f"mlp.{part}_proj": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
            "input_layernorm": "attention_norm",
            "post_attention_layernorm": "ffn_norm",
        },
    ),
    norm="rms",
    merger=(
        Linear("hidden", bias=False),
        Linear("out", bias="multimodal_projector_bias", activated=True),
        Linear("out", bias="multimodal_projector_bias"),
    ),
    merges_by_channel=True,
    positions="none",
    rope="turns",
    gated=True,
    bias=False,
    patch_bias=False,
    patch_norm=True,
    resize="edge",
    text="rows",
)

_LLAMA4 = TowerFamily(
    keys={
        **_USUAL_KEYS,
        "image_size": "image_size",
        "norm_eps": "norm_eps",
        "merger_size": "projector_output_dim",
        "shuffle_ratio": "pixel_shuffle_ratio",
    },
    outer_keys={"image_token_id": ("image_token_id", "image_token_index"), "out_size": "text_config.hidden_size"},
    defaults={
        "num_layers": 34,
        "hidden_size": 768,
        "num_heads": 16,
        "intermediate_size": 5632,
        "hidden_act": "gelu",
        "patch_size": 14,
        "temporal_patch_size": 1,
        "image_size": 448,
        "merger_size": 4096,
        "shuffle_ratio": 0.5,
        "norm_eps": 1e-5,
        "levels": (),
        "image_token_id": 200092,
    },
    fixed_keys={"vision_config.multi_modal_projector_bias": (False,)},
    places=tuple(TowerPlace("vision_model.", f"{at}multi_modal_projector.") for at in ("", "model.")),
    names=TensorNames(
        layers="model.layers",
        outside={
            "embed_patches": "{tower}patch_embedding.linear",
            "class_embedding": "{tower}class_embedding",
            "patch_norm": "{tower}layernorm_pre",
            "norm": "{tower}layernorm_post",
            "merger_0": "{tower}vision_adapter.mlp.fc1",
            "merger_1": "{tower}vision_adapter.mlp.fc2",
            "merger_2": "{merger}linear_1",
        },
        renamed={"mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"},
    ),
    merger=(
        Linear("inner", bias=False, activated=True),
        Linear("inner", bias=False, activated=True),
        Linear("out", bias=False),
    ),
    positions="learned",
    position_table="positional_embedding_vlm",
    class_token="class_embedding",
    rope="pairs",
    patch_bias=False,
    patch_norm=True,
    resize="canvas",
    text="canvas",
    placeholder="<|image|>",
)

TOWERS: Mapping[str, TowerFamily] = {
    "qwen2_vl": _QWEN2_VL,
    "qwen2_5_vl": _QWEN2_5_VL,
    "qwen3_vl": _QWEN3_VL,
    "qwen3_vl_moe": _QWEN3_VL,
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5,
    "glm4v": _GLM4V,
    "glm4v_moe": _GLM4V,
    "gemma3": _GEMMA3,
    "gemma4": _GEMMA4,
    "mistral3": _MISTRAL3,
    "idefics3": _IDEFICS3,
    "smolvlm": _IDEFICS3,
    "llama4": _LLAMA4,
}
"""By the model_type of config.json."""
