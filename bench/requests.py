"""Requests as an `LLM` makes them, for benchmarks of what is between the call and the engine."""

from __future__ import annotations

from typing import Any

from infinilm import LLM
from infinilm.lora.adapters import Adapters
from infinilm.requests.limits import RequestLimits
from infinilm.requests.prompts import RequestMaker
from infinilm.requests.receipts import ReceiptMaker


def request_maker(llm: LLM, engine: Any) -> RequestMaker:
    """Makes requests for the model of an `LLM` that another engine, or none, shall run; there are no adapters."""
    limits, adapters = RequestLimits(), Adapters(engine)
    return RequestMaker(
        llm.config,
        llm.tokenizer,
        llm.chat_template,
        llm.grammars,
        llm.generation_config,
        llm.max_model_len,
        None,
        limits,
        limits.max_queued_seqs,
        adapters,
        ReceiptMaker({}, {}, lambda: "", adapters, llm.tokenizer, has_hooks=lambda: False, tower=lambda: None),
        "benchmarks have no pictures",
    )
