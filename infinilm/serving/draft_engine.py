"""The engine of a draft model, in the same process: loaded beside that of the model, with a cache for as many tokens.

Both engines compute in turns, since drafts are made between steps, so each may have all CPU threads. The device of
the first rank computes the drafts.
"""

from __future__ import annotations

from infinilm import _core
from infinilm.checkpoint import load_weights, open_checkpoint
from infinilm.config.spec import build_spec
from infinilm.errors import CacheFullError, ConfigError, DeviceError
from infinilm.planning.cache_plan import MemoryPlan
from infinilm.planning.memory import ModelPlan
from infinilm.scheduling.block_manager import DEFAULT_BLOCK_SIZE, BlockManager
from infinilm.scheduling.draft_model import DraftModel
from infinilm.scheduling.steps import tokens_of_a_step
from infinilm.speculation.settings import DraftModelSettings
from infinilm.text.tokenizer import Tokenizer

__all__ = ["DraftModelEngine", "check_vocabulary"]


def check_vocabulary(plan: ModelPlan, draft: ModelPlan, tokenizer: Tokenizer) -> None:
    """Refuse a draft model whose ids mean other tokens: none of its drafts would be right but by chance.

    One of them may have more ids, of tokens that were added or only pad the vocabulary.

    Parameters
    ----------
    plan, draft : ModelPlan
        The plans of the model and of the draft model.
    tokenizer : Tokenizer
        The one of the model.

    Raises
    ------
    ConfigError
        The vocabularies differ; without a tokenizer of both, their sizes do.
    """
    other = Tokenizer.from_folder(draft.path)
    if tokenizer and other:
        token_id = tokenizer.first_difference(other)
        differs = token_id is not None and (
            f"token {token_id} is {other.id_to_token(token_id)!r} there and {tokenizer.id_to_token(token_id)!r} here"
        )
    else:
        sizes = draft.config.vocab_size, plan.config.vocab_size
        differs = sizes[0] != sizes[1] and f"it has {sizes[0]} tokens, and the model {sizes[1]}"
    if differs:
        raise ConfigError(
            f"speculation: the draft model {draft.path} has another vocabulary than {plan.path}: {differs}; take a "
            "smaller model of the same line"
        )


class DraftModelEngine:
    """A draft model in memory.

    Parameters
    ----------
    plan : ModelPlan
        The plan of the draft model.
    settings : DraftModelSettings
    max_model_len : int
        The longest context of the model. Behind its own last position the draft model drafts nothing.
    num_threads : int
        0: one per physical core.
    load_format, seed, use_tqdm
        As for `LLM`.

    Raises
    ------
    ConfigError, WeightError, DeviceError
        The checkpoint does not fit, or there is no memory for it.
    """

    def __init__(
        self,
        plan: ModelPlan,
        settings: DraftModelSettings,
        max_model_len: int,
        num_threads: int,
        load_format: str,
        seed: int,
        *,
        use_tqdm: bool,
    ) -> None:
        self._plan, self._settings = plan, settings
        self._max_model_len = min(max_model_len, plan.config.max_position_embeddings)
        spec = build_spec(
            plan.config,
            dtype=plan.dtype,
            max_model_len=self._max_model_len,
            quantization=plan.quantization,
            fp8_inputs=plan.fp8_inputs,
        )
        self._engine = _core.InferEngine(spec, plan.device, num_threads)
        if load_format == "dummy":
            self._engine.load_dummy(plan.stored_dtype, seed)
        else:
            with open_checkpoint(plan.path) as checkpoint:
                for loading in plan.loading:
                    load_weights(checkpoint, self._engine, progress=use_tqdm, **loading)
        self._engine.finish_loading()

    def drafters(self, memory: MemoryPlan, max_num_batched_tokens: int) -> DraftModel:
        """What drafts from now on, with an empty cache of as many tokens as `memory` has for the model.

        Raises
        ------
        CacheFullError
            There is no room for it.
        """
        blocks = BlockManager(
            -(-memory.num_tokens // DEFAULT_BLOCK_SIZE), DEFAULT_BLOCK_SIZE, memory.max_num_seqs, self._max_model_len
        )
        try:
            self._engine.reset_cache(blocks.groups[0].num_blocks, blocks.block_size, self._plan.memory.kv_cache_dtype)
        except DeviceError as error:
            raise CacheFullError(f"no room for the KV cache of the draft model: {error}; lower kv_cache") from error
        return DraftModel(
            self._engine,
            blocks,
            num_tokens=self._settings.num_tokens,
            vocab_size=self._plan.config.vocab_size,
            max_model_len=self._max_model_len,
            max_num_batched_tokens=tokens_of_a_step(max_num_batched_tokens, memory.max_num_seqs, 1),
        )

    def close(self) -> None:
        """Free weights and cache; nothing drafts any more. Idempotent."""
        self._engine.close()
