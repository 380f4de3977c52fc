"""Measure the demo model on held-out text, and print sample continuations.

    python tools/demo/evaluate.py --model infinilm/assets/demo

Perplexity is per token, in float32, over every token after ``<s>`` (including ``</s>``), each document on
its own.  Bits per byte divides the same total by the UTF-8 bytes of the text; for conversations only the
messages' text counts as bytes, but the markers' loss is included.

Needs torch, transformers and tokenizers.
"""

from __future__ import annotations

import argparse
import math
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from corpus import Document, documents
from demo_tokenizer import EOS, encode, load_tokenizer
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

SAMPLES = (
    "Once upon a time",
    "One windy day, a curious cat named Coco",
    "<|user|>Tell me a story about a brave fox.",
)
BATCH = 16


def text_bytes(doc: Document) -> int:
    """UTF-8 bytes of everything in the document that is text."""
    return len((doc.text + "".join(part for turn in doc.turns for part in turn)).encode())


@torch.inference_mode()
def score(model: Any, sequences: list[list[int]]) -> tuple[float, int]:
    """Total negative log-likelihood in nats, and the number of predicted tokens."""
    total, count = 0.0, 0
    for start in range(0, len(sequences), BATCH):
        chunk = sequences[start : start + BATCH]
        width = max(map(len, chunk))
        ids = torch.full((len(chunk), width), EOS)
        labels = torch.full((len(chunk), width), -100)
        for row, sequence in enumerate(chunk):
            ids[row, : len(sequence)] = torch.tensor(sequence)
            labels[row, 1 : len(sequence)] = torch.tensor(sequence[1:])
        # Padding is on the right and attention is causal, so no mask is needed.
        logits = model(ids, use_cache=False).logits[:, :-1].float()
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
        )
        total += loss.item()
        count += sum(len(sequence) - 1 for sequence in chunk)
    return total, count


@torch.inference_mode()
def continue_text(model: Any, tokenizer: Tokenizer, prompt: str, temperature: float, seed: int) -> str:
    """The prompt and its continuation; ``temperature`` 0 is greedy.  Ends in "</s>" if the model stopped."""
    torch.manual_seed(seed)
    if prompt.startswith("<|user|>"):
        prompt += "<|assistant|>"
    ids = torch.tensor([tokenizer.encode(prompt).ids])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=400,
        do_sample=temperature > 0,
        temperature=temperature or None,
        top_p=1.0 if temperature else None,
        top_k=0 if temperature else None,
        pad_token_id=EOS,
    )
    text: str = tokenizer.decode(out[0, 1:].tolist(), skip_special_tokens=False)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("infinilm/assets/demo"))
    parser.add_argument("--documents", type=int, default=1000, help="held-out documents to score")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--samples", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model: Any = LlamaForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    model.eval()
    tokenizer = load_tokenizer(args.model / "tokenizer.json")

    if args.samples:
        for prompt in SAMPLES:
            for temperature in (0.0, 0.7):
                label = "greedy" if temperature == 0 else f"temperature {temperature}, seed 1"
                print(f"--- {label}\n{continue_text(model, tokenizer, prompt, temperature, 1)}\n", flush=True)
    for split in ("train", "heldout"):
        docs = list(islice(documents(split, seed=99), args.documents))
        nats, tokens = score(model, encode(tokenizer, docs))
        size = sum(map(text_bytes, docs))
        print(
            f"{split} (seed 99): {len(docs)} documents, {tokens} tokens, {size} bytes: "
            f"loss {nats / tokens:.4f}, perplexity {math.exp(nats / tokens):.3f}, "
            f"bits per byte {nats / math.log(2) / size:.4f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
