"""The method of `LLM` that changes weights while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infinilm.checkpoint.fingerprint import WeightHistory
from infinilm.checkpoint.updating import digest_of, read_update
from infinilm.config.json.model_config import ModelConfig
from infinilm.errors import RequestError
from infinilm.planning.memory import ModelPlan
from infinilm.requests.receipts import ReceiptMaker
from infinilm.serving.engine_thread import EngineThread

__all__ = ["WeightMethods"]


class WeightMethods:
    """What `LLM` has for training beside serving."""

    _thread: EngineThread
    _engine: Any
    _plan: ModelPlan
    _history: WeightHistory
    _receipts: ReceiptMaker
    _is_plain: bool
    _has_all_stages: bool
    config: ModelConfig

    def update_weights(self, tensors: Mapping[str, Any]) -> None:
        """Give weights other values between two steps, as training does, without loading the model again.

        The model is then, bit for bit, what it would be if a checkpoint with these tensors had been loaded. All or none
        of them change. Prefixes are forgotten, also those in tiers, which are found again if the weights become what
        they were by the same updates. Running requests go on: what they have computed is computed again, and all tokens
        from then on are of the new weights; they get no receipt. Adapters and a draft model stay as they are.

        Parameters
        ----------
        tensors
            By their names in the checkpoint, such as ``model.layers.0.self_attn.q_proj.weight``: arrays of floats of
            numpy, torch, jax, ... They are rounded to the dtype of the checkpoint, and copied. What is not named stays
            as it is; where weights are kept in few bits (`quantization`), those that are kept together (q, k and v;
            gate and up) are named together.

        Raises
        ------
        WeightError
            A name that the model has not, another shape or dtype, or part of what is kept together in few bits.
        RequestError
            The checkpoint is packed, quantised, or of GGUF, whose weights are not kept as numbers; or stages are in
            processes of their own.
        EngineDeadError
            The `LLM` is closed, or a rank has failed.

        Examples
        --------
        >>> llm.update_weights({"lm_head.weight": array})  # doctest: +SKIP
        """
        if not self._is_plain:
            raise RequestError(
                "update_weights: the weights of this checkpoint are packed or quantised, so that no number of it can "
                "be replaced: load a checkpoint in 16 or 32 bits; quantization=... may round it while it is loaded"
            )
        if not self._has_all_stages:
            raise RequestError("update_weights: stages in processes of their own take no other weights in this version")
        if not isinstance(tensors, Mapping):
            raise TypeError(f"update_weights: expected a dict of name to array, got {type(tensors).__name__}")
        dtypes = [of.dtype for of in self._plan.formats]
        params = [read_update(tensors, self._engine, self.config, self._plan.stored_dtype, dtype) for dtype in dtypes]
        digest = digest_of(params[0])

        def update() -> None:
            for stage, own in enumerate(params):
                self._engine.update_params(own, *([stage] if self._plan.is_split else []))
            self._history.changed(digest)
            self._receipts.forget_weights()
            self._thread.forget_computed()

        self._thread.between_steps(update)
