"""What the linears of a model are given over a text: the Gram matrices that `infinilm quantize` rounds weights by."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from infinilm._core import CacheSpec, DeltaSpec, LayerSpec, MambaSpec, ShortConvSpec
from infinilm.config.spec import decoder_spec
from infinilm.engine.hooks import HookRegistry
from infinilm.errors import RequestError
from infinilm.llm import LLM

__all__ = ["Calibration"]

_LONGEST = 512  # tokens that see each other
_MOST_BYTES = 2 << 30  # of the matrices of the layers that one pass over the text collects
_PARAM = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")
_MIXER_INPUTS = re.compile(
    r"self_attn\.(q|k|v|gate|q_a|kv_a)_proj|linear_attn\.(in_proj_\w+|[qkvbfg]_proj|[fg]_a_proj)|(conv|mamba)\.in_proj"
)
_GATE_UP = re.compile(r"mlp\.(shared_expert\.|experts\.\d+\.)?(gate|up)_proj")


class Calibration:
    """A model that computes a text, to see the inputs of its linears; a context manager.

    Parameters
    ----------
    model
        As `LLM` takes it.
    text : str or sequence of int
        A text or token ids. Some thousand tokens of what the model will be used for; pieces of 512 see each other.

    Raises
    ------
    RequestError
        The text has no token.
    """

    def __init__(self, model: str | os.PathLike[str], text: str | Sequence[int], *, device: str = "auto") -> None:
        self._registry = HookRegistry()
        self._llm = LLM(
            model,
            device=device,
            dtype="float32",
            max_num_seqs=1,
            enable_prefix_caching=False,
            hooks=self._registry,
            use_tqdm=False,
        )
        longest = min(_LONGEST, self._llm.max_model_len)
        ids = self._llm.tokenize(text) if isinstance(text, str) else list(text)
        self._pieces = [ids[at : at + longest] for at in range(0, len(ids), longest)]
        if not self._pieces:
            self._llm.close()
            raise RequestError("calibration: expected a text of some tokens, got none")
        self._spec = decoder_spec(self._llm.config, self._llm.max_model_len)
        self._layers = self._spec.layers
        self._grams: dict[str, npt.NDArray[np.float32]] = {}

    def __enter__(self) -> Calibration:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the model."""
        self._llm.close()

    def gram(self, param: str) -> npt.NDArray[np.float32] | None:
        """Return the sums of products of a linear's inputs over the tokens, [inputs, inputs]; None: they are not seen.

        The sums of some layers are kept at a time: asking for layers in their order computes the text seldom.
        """
        match = _PARAM.fullmatch(param)
        site = self._site(int(match[1]), match[2]) if match else None
        if site is None:
            return None
        if site not in self._grams:
            assert match is not None
            self._collect(int(match[1]))
        return self._grams[site]

    def _site(self, layer: int, module: str) -> str | None:
        """The hook that sees what a module is given; None: there is none, as inside of experts."""
        spec = self._spec
        before = f"layer{layer - 1}_residual" if layer else "embedding"
        attention = f"layer{layer}_input_layernorm" if spec.pre_norms else before
        if _MIXER_INPUTS.fullmatch(module):
            return attention
        if module in ("self_attn.o_proj", "linear_attn.out_proj"):
            return f"layer{layer}_attention"
        if module in ("conv.out_proj", "mamba.out_proj"):
            return f"layer{layer}_{'conv' if module == 'conv.out_proj' else 'scan'}"
        if _GATE_UP.fullmatch(module):
            if spec.parallel_blocks and not spec.parallel_norms:
                return attention
            if not spec.pre_norms:
                return f"layer{layer}_attention_residual"
            return f"layer{layer}_{'pre_feedforward' if spec.post_norms else 'post_attention'}_layernorm"
        return f"layer{layer}_activation" if module == "mlp.down_proj" else None

    def _collect(self, first: int) -> None:
        layers, hidden_size = self._layers, self._spec.hidden_size
        mlp = layers[first].mlp
        sizes = hidden_size, hidden_size, _mixed_size(layers[first]), mlp.intermediate_size if mlp else 0
        count = max(_MOST_BYTES // (4 * sum(size * size for size in sizes)), 1)
        sites: set[str] = set()
        for layer in range(first, min(first + count, len(layers))):
            own = layers[layer]
            modules: list[str] = []
            for mixer in (own.mixer, own.mixer_beside):
                room = "conv" if isinstance(mixer, ShortConvSpec) else "mamba" if isinstance(mixer, MambaSpec) else None
                both = (
                    ("self_attn.q_proj", "self_attn.o_proj")
                    if room is None
                    else (f"{room}.in_proj", f"{room}.out_proj")
                )
                modules += both if mixer else ()
            modules += ["mlp.up_proj"] if own.mlp or own.experts else []
            modules += ["mlp.down_proj"] if own.mlp else []
            sites |= {site for module in modules if (site := self._site(layer, module))}
        self._grams = {}

        def add(name: str, tensor: Any, layer_idx: int) -> None:
            inputs = tensor.numpy().reshape(tensor.shape[0], -1)  # float32, as the model computes
            products = inputs.T @ inputs
            self._grams[name] = self._grams[name] + products if name in self._grams else products

        handles = [self._registry.register_hook(site, add) for site in sorted(sites)]
        try:
            for piece in self._pieces:
                self._llm.forward(piece)
        finally:
            for handle in handles:
                handle.remove()


def _mixed_size(layer: LayerSpec) -> int:
    """How many inputs the last linear of a layer's mixers has, at most."""
    cache: CacheSpec = layer.cache
    size = cache.num_heads * cache.head_dim
    for mixer in (layer.mixer, layer.mixer_beside):
        if isinstance(mixer, DeltaSpec):
            size = max(size, mixer.v_size)
        elif isinstance(mixer, MambaSpec):
            size = max(size, mixer.size)
        elif isinstance(mixer, ShortConvSpec):
            size = max(size, mixer.channels)
    return size
