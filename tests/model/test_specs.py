"""The structs of a model's specification: what Python sees of each follows from its list of fields."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from facts import ROOMS

from infinilm import ConfigError, _core
from infinilm.config.sublayers.delta import delta_spec

SPECS = [*ROOMS, _core.CacheSpec, _core.CostSpec]


@pytest.mark.parametrize("spec", SPECS)
def test_a_spec_is_made_of_its_repr(spec: type) -> None:
    text = repr(spec())
    assert text.startswith(f"{spec.__name__}(") and repr(eval(text, vars(_core).copy())) == text


def test_fields_by_position_and_by_name() -> None:
    mlp = _core.MlpSpec(16, gated=False)
    assert (mlp.intermediate_size, mlp.bias, mlp.gated, mlp.activation) == (16, False, False, "silu")
    layer = _core.LayerSpec(_core.AttentionSpec(rope=2), experts=_core.ExpertsSpec(count=2, shared=mlp))
    assert layer.mlp is None and layer.experts is not None and layer.experts.shared is not None
    assert layer.experts.shared.intermediate_size == 16
    layer.experts = None
    layer.mixer = _core.DeltaSpec(v_dim=3)
    assert isinstance(layer.mixer, _core.DeltaSpec) and layer.mixer.v_dim == 3
    assert _core.ModelSpec(layers=[_core.LayerSpec(mlp=mlp)]).layers[0].mixer is None


def test_fields_that_cannot_be() -> None:
    with pytest.raises(
        TypeError, match="MlpSpec has no field 'bais'; it has intermediate_size, bias, down_bias, gated"
    ):
        _core.MlpSpec(bais=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="MlpSpec: bias: expected bool, got 'x'"):
        _core.MlpSpec(bias="x")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="MlpSpec: intermediate_size is given twice"):
        _core.MlpSpec(3, intermediate_size=2)  # type: ignore[misc]
    with pytest.raises(TypeError, match="MlpSpec: expected up to 9 fields, got 10"):
        _core.MlpSpec(1, True, True, True, "silu", None, 0, 1, 1, 4)  # type: ignore[call-arg]
    with pytest.raises(
        TypeError,
        match=r"mixer: expected AttentionSpec \| LatentSpec \| DeltaSpec \| ShortConvSpec \| MambaSpec \| None, got 3",
    ):
        _core.LayerSpec(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="qk_norm 'ring' is not one of none, head, all, head_behind_rope, turned_he"):
        _core.AttentionSpec(qk_norm="ring")


def test_keys_that_are_chosen_are_refused_where_none_are_there_to_be_shared() -> None:
    """A layer that reads what the layer before chose needs that layer, in its stage of a pipeline, and no MTP head."""

    def engine(shared: list[bool], head: bool | None = None, num_stages: int = 1) -> None:
        def layer(shares: bool) -> _core.LayerSpec:
            indexer = _core.IndexerSpec(num_heads=2, head_dim=8, top_k=3, shared=shares)
            sizes = {"num_heads": 2, "q_rank": 8, "kv_rank": 8, "rope_dim": 4, "nope_dim": 4, "v_dim": 4}
            return _core.LayerSpec(_core.LatentSpec(**sizes, rope=0, indexer=indexer), _core.MlpSpec(8))

        spec = _core.ModelSpec(
            vocab_size=32, hidden_size=16, num_layers=len(shared), max_model_len=16, rms_norm_eps=1e-6,
            ropes=[_core.RopeSpec([1.0, 0.5])], layers=[layer(own) for own in shared],
        )  # fmt: skip
        if head is not None:
            spec.mtp = _core.MtpSpec([layer(head)])
        _core.InferEngine(spec, ["cpu"] * num_stages, num_stages=num_stages)

    engine([False, True], head=False)
    with pytest.raises(ConfigError, match="layer 0 reads the keys that the layer before it chose; there is none"):
        engine([True, False])
    with pytest.raises(ConfigError, match="layer 1, the first of a stage of a pipeline, reads the keys that the layer"):
        engine([False, True], num_stages=2)
    with pytest.raises(ConfigError, match="an MTP head needs an indexer of its own"):
        engine([False, True], head=True)


def test_indexers_that_do_not_fit_their_layer_are_refused() -> None:
    def engine(q_rank: int = 8, **changes: int) -> None:
        sizes = {"num_heads": 2, "kv_rank": 8, "rope_dim": 4, "nope_dim": 4, "v_dim": 4}
        indexer = _core.IndexerSpec(**{"num_heads": 2, "head_dim": 8, "top_k": 3, **changes})
        mixer = _core.LatentSpec(**sizes, q_rank=q_rank, rope=0, indexer=indexer)
        spec = _core.ModelSpec(
            vocab_size=32, hidden_size=16, num_layers=1, max_model_len=16, rms_norm_eps=1e-6,
            ropes=[_core.RopeSpec([1.0, 0.5])], layers=[_core.LayerSpec(mixer, _core.MlpSpec(8))],
        )  # fmt: skip
        _core.InferEngine(spec, ["cpu"])

    engine()
    for changes, got in (
        ({"q_rank": 0}, "a latent of 0, 2 heads of 8 and 3 keys"),
        ({"head_dim": 2}, "a latent of 8, 2 heads of 2 and 3 keys"),
        ({"num_heads": 0}, "a latent of 8, 0 heads of 8 and 3 keys"),
        ({"top_k": 0}, "a latent of 8, 2 heads of 8 and 0 keys"),
    ):
        with pytest.raises(ConfigError, match=f"an indexer needs .* at least 4 elements, .*; got {got}"):
            engine(**changes)


def test_each_kind_says_what_it_keeps_and_costs() -> None:
    """A layer's cache and cost follow from its mixer; ranks have their part of both."""
    attention = _core.AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=16, sliding_window=5)
    latent = _core.LatentSpec(num_heads=8, kv_rank=24, rope_dim=8, nope_dim=4, v_dim=6)
    delta = _core.DeltaSpec(num_k_heads=2, num_v_heads=4, k_dim=8, v_dim=6, conv_size=4)
    shared = _core.AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=16, sliding_window=5, kv_owner=0)
    conv = _core.ShortConvSpec(channels=20, conv_size=3)
    mamba = _core.MambaSpec(num_heads=6, head_dim=4, num_groups=2, state_dim=8, conv_size=4)
    mixers = (attention, latent, delta, shared, conv, mamba)
    layers = [_core.LayerSpec(mixer, _core.MlpSpec(16)) for mixer in mixers]
    layers += [_core.LayerSpec(mixer=mamba, mixer_beside=attention), _core.LayerSpec(mlp=_core.MlpSpec(16))]
    layers += [_core.LayerSpec(mixer=mamba, block=_core.SharedBlockSpec(attention, _core.MlpSpec(16)))]
    spec = _core.ModelSpec(layers=layers, num_layers=9)

    def kept(of: _core.ModelSpec) -> list[tuple[object, ...]]:
        caches = [layer.cache for layer in of.layers]
        return [(c.kind, c.num_heads, c.num_kv_heads, c.head_dim, c.value_dim, c.owner, c.states) for c in caches]

    assert kept(spec) == [
        ("paged", 8, 2, 16, 16, -1, []),
        ("latent", 8, 1, 32, 24, -1, []),
        ("none", 0, 0, 0, 0, -1, [[3, 2 * 16 + 24], [4, 8, 6]]),
        ("shared", 8, 2, 16, 16, 0, []),
        ("none", 0, 0, 0, 0, -1, [[2, 20]]),
        ("none", 0, 0, 0, 0, -1, [[3, 24 + 2 * 16], [6, 8, 4]]),
        ("paged", 8, 2, 16, 16, -1, [[3, 24 + 2 * 16], [6, 8, 4]]),
        ("none", 0, 0, 0, 0, -1, []),
        ("paged", 8, 2, 16, 16, -1, [[3, 24 + 2 * 16], [6, 8, 4]]),
    ]
    assert kept(_core.local_spec(spec, 1, 2)) == [
        ("paged", 4, 1, 16, 16, -1, []),
        ("latent", 4, 1, 32, 24, -1, []),
        ("none", 0, 0, 0, 0, -1, [[3, 16 + 12], [2, 8, 6]]),
        ("shared", 4, 1, 16, 16, 0, []),
        ("none", 0, 0, 0, 0, -1, [[2, 10]]),
        ("none", 0, 0, 0, 0, -1, [[3, 12 + 2 * 8], [3, 8, 4]]),
        ("paged", 4, 1, 16, 16, -1, [[3, 12 + 2 * 8], [3, 8, 4]]),
        ("none", 0, 0, 0, 0, -1, []),
        ("paged", 4, 1, 16, 16, -1, [[3, 12 + 2 * 8], [3, 8, 4]]),
    ]
    of_mamba = [(0, 5 * 24 * 8), (8 * 32, 5 * 24 * 8), (0, 0), (8 * 32, 5 * 24 * 8)]
    costs = [(layer.cost.of_pair, layer.cost.of_token) for layer in spec.layers]
    assert costs == [(8 * 32, 0), (8 * (32 + 24), 0), (0, 7 * 4 * 8 * 6), (8 * 32, 0), (0, 2 * 4 * 20), *of_mamba]
    assert spec.state_bytes() == 4 * (3 * 56 + 4 * 8 * 6 + 2 * 20 + 3 * (3 * 56 + 6 * 8 * 4))
    assert spec.kv_bytes_per_token("float16") == 2 * (3 * 2 * 2 * 16 + 32)
    with pytest.raises(
        ConfigError,
        match="8 attention heads, 2 key heads of linear attention, 20 channels of short convolutions, 6 heads of Mamba "
        "layers, 2 groups of Mamba layers and intermediate_size 16",
    ):
        _core.local_spec(spec, 0, 4)


def model_of(layer: _core.LayerSpec, **fields: object) -> _core.ModelSpec:
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_layers": 1, "max_model_len": 8}
    return _core.ModelSpec(layers=[layer], **{**sizes, **fields})  # type: ignore[arg-type]


def test_experts_beside_attention_read_its_norm() -> None:
    experts = _core.ExpertsSpec(count=2, top_k=1, expert=_core.MlpSpec(16))
    layer = _core.LayerSpec(_core.AttentionSpec(num_heads=2, num_kv_heads=2, head_dim=8), experts=experts)
    _core.InferEngine(model_of(layer, parallel_blocks=True), ["cpu"])
    with pytest.raises(ConfigError, match="experts beside a mixer need a norm of what they read"):
        _core.InferEngine(model_of(layer, parallel_blocks=True, pre_norms=False, post_norms=True), ["cpu"])


ATTENTION = _core.AttentionSpec(num_heads=2, num_kv_heads=2, head_dim=8)
MLP = _core.MlpSpec(16)
WIDE = _core.AttentionSpec(num_heads=2, num_kv_heads=2, head_dim=8, inputs=2)
MAMBA = _core.MambaSpec(2, 8, 1, 8, 4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"parallel_norms": True}, "parallel_norms are norms of parallel_blocks"),
        ({"lm_head_bias": True, "tie_word_embeddings": True}, "lm_head_bias is of an lm_head that is no embedding"),
    ],
)
def test_what_contradicts_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _core.InferEngine(model_of(_core.LayerSpec(ATTENTION, MLP), **fields), ["cpu"])


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (_core.LayerSpec(), "a layer needs a mixer, an MLP or experts"),
        (_core.LayerSpec(mlp=MLP, mixer_beside=ATTENTION), "mixer_beside: expected a mixer that it is beside"),
        (
            _core.LayerSpec(ATTENTION, MLP, mixer_beside=ATTENTION),
            "two mixers side by side: expected one that keeps keys",
        ),
        (_core.LayerSpec(_core.MambaSpec(3, 8, 2), MLP), "heads in multiples of their groups"),
        (
            _core.LayerSpec(_core.MambaSpec(2, 8, 1, 8, 4, dt_min=2, dt_max=1), MLP),
            "dt_min .2.* must be at most dt_max",
        ),
        (_core.LayerSpec(MAMBA, block=_core.SharedBlockSpec(ATTENTION, MLP)), "a shared block reads rows of 2"),
        (_core.LayerSpec(MAMBA, block=_core.SharedBlockSpec(WIDE, MLP, adapter_rank=-1)), "adapter_rank must be 0"),
        (
            _core.LayerSpec(MAMBA, block=_core.SharedBlockSpec(WIDE, MLP, attention_adapters=True)),
            "adapter_rank must be 0 or positive, and positive with attention_adapters; got 0",
        ),
        (
            _core.LayerSpec(MAMBA, block=_core.SharedBlockSpec(WIDE, MLP, owner=1)),
            "layer 0 shares the block of layer 1",
        ),
        (_core.LayerSpec(MAMBA, block=_core.SharedBlockSpec(WIDE, MLP, use=1)), "layer 0 .* and is use 1 of all"),
        (_core.LayerSpec(block=_core.SharedBlockSpec(WIDE, MLP)), "a layer needs a mixer, an MLP or experts"),
        (
            _core.LayerSpec(MAMBA, MLP, block=_core.SharedBlockSpec(WIDE, MLP)),
            "a shared block is of layers of Mamba alone",
        ),
        (_core.LayerSpec(ATTENTION, _core.MlpSpec()), "intermediate_size must be positive, got 0"),
        (_core.LayerSpec(_core.AttentionSpec(), MLP), r"num_heads \(0\) must be a multiple of num_kv_heads \(0\)"),
        (_core.LayerSpec(_core.AttentionSpec(2, 2, 8, rope=0), MLP), "a layer has rope 0 of 0"),
        (_core.LayerSpec(_core.AttentionSpec(2, 2, 8, chunked=True), MLP), "chunked needs the size as sliding_window"),
        (_core.LayerSpec(_core.AttentionSpec(2, 2, 8, v_norm=True), MLP), "v_norm needs a norm of each head of k"),
        (_core.LayerSpec(_core.LatentSpec(2), MLP), "latent attention needs heads, latents and an even number"),
        (_core.LayerSpec(_core.DeltaSpec(2, 3), MLP), "heads of v in multiples of those of k"),
        (_core.LayerSpec(_core.ShortConvSpec(8, 9), MLP), "1 to 8 tokens; got 8 channels and 9 tokens"),
        (_core.LayerSpec(ATTENTION, experts=_core.ExpertsSpec(2, 3)), "needs 1 to 2 experts per token .* got 3 and 0"),
        (
            _core.LayerSpec(ATTENTION, experts=_core.ExpertsSpec(2, 1, MLP, num_groups=3)),
            "groups of experts do not fit: 2 experts in 3",
        ),
        (
            _core.LayerSpec(ATTENTION, experts=_core.ExpertsSpec(2, 1, _core.MlpSpec(16, out_multiplier=2))),
            "experts have no multipliers of their own",
        ),
        (
            _core.LayerSpec(ATTENTION, MLP, _core.ExpertsSpec(2, 1, MLP)),
            "experts beside an MLP need norms before and after",
        ),
    ],
)
def test_each_kind_refuses_what_cannot_be(layer: _core.LayerSpec, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _core.InferEngine(model_of(layer), ["cpu"])


def test_the_limits_of_the_delta_rule_are_declared_once() -> None:
    """A specification and a configuration allow what the kernels have room for, and no more."""

    def engine(**sizes: int) -> None:
        fields = {"num_k_heads": 1, "num_v_heads": 1, "k_dim": 8, "v_dim": 8, "conv_size": 4, **sizes}
        _core.InferEngine(model_of(_core.LayerSpec(_core.DeltaSpec(**fields), MLP)), ["cpu"])

    def config(**sizes: int) -> None:
        names = {"k_dim": "linear_key_head_dim", "conv_size": "linear_conv_kernel_dim"}
        heads = {"linear_num_key_heads": 1, "linear_num_value_heads": 1, "linear_value_head_dim": 8}
        heads |= {"linear_allow_neg_eigval": False, "kda_lower_bound": 0}
        dims = {"linear_key_head_dim": 8, "linear_conv_kernel_dim": 4, **{names[k]: v for k, v in sizes.items()}}
        delta_spec(SimpleNamespace(**heads, **dims))  # type: ignore[arg-type]

    for make in (engine, config):
        make(k_dim=_core.DELTA_MOST_K_DIM, conv_size=_core.DELTA_MOST_TAPS)
        for name, most in (("k_dim", _core.DELTA_MOST_K_DIM), ("conv_size", _core.DELTA_MOST_TAPS)):
            with pytest.raises(ConfigError, match=rf"\b({most}|{most + 1})\b"):  # up to, or below
                make(**{name: most + 1})
