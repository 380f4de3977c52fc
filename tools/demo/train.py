"""Train the bundled demo model: a byte-level BPE tokenizer and a small Llama, on a CPU.

    python tools/demo/train.py --work /tmp/demo-work --out infinilm/assets/demo

The work directory holds the tokenizer, the tokenized corpus and the checkpoints; running the same command
again carries on from the last checkpoint.  ``--export-only`` writes the last checkpoint to ``--out``.

Needs torch, transformers, tokenizers, safetensors and numpy.  Nothing else in this project needs torch.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import story_words as words
import torch
from corpus import Document, documents
from demo_tokenizer import BOS, CHAT_TEMPLATE, EOS, encode, load_tokenizer, train_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

CONTEXT = 512
ROW = 512  # tokens per training row: two or three stories
MAX_BYTES = 4_000_000
# How much more a name, a thing or a pronoun counts than another token, at the start of training.
ENTITY_BOOST = 7.0
# transformers 5 writes these under new names; readers of the older layout look for the old ones.
CLASSIC: dict[str, Any] = {"rope_theta": 10000.0, "torch_dtype": "bfloat16"}


def model_config(vocab_size: int) -> LlamaConfig:
    """The architecture: every projection is a multiple of 64 wide, three query heads share a KV head."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=192,
        intermediate_size=384,
        num_hidden_layers=5,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )


def pack(docs: list[Document], tokenizer_path: Path) -> np.ndarray:
    """Rows of ``ROW`` + 1 tokens.

    Every row starts at the start of a document, as every prompt does at inference; the last document of
    a row is cut off where the row ends.
    """
    tokenizer = load_tokenizer(tokenizer_path)
    rows: list[list[int]] = []
    row: list[int] = []
    for start in range(0, len(docs), 4096):
        for ids in encode(tokenizer, docs[start : start + 4096]):
            row.extend(ids)
            if len(row) > ROW:
                rows.append(row[: ROW + 1])
                row = []
    return np.asarray(rows, dtype=np.uint16)


def prepare(work: Path, count: int, vocab_size: int) -> np.ndarray:
    """Tokenizer and packed corpus, made once."""
    tokenizer_path, rows_path = work / "tokenizer.json", work / "rows.npy"
    if not tokenizer_path.exists():
        train_tokenizer(islice(documents("train", seed=1), 12_000), vocab_size).save(str(tokenizer_path))
    if not rows_path.exists():
        np.save(rows_path, pack(list(islice(documents("train"), count)), tokenizer_path))
    rows: np.ndarray = np.load(rows_path)
    return rows


def learning_rate(step: int, progress: float, peak: float) -> float:
    """Linear warm-up over 100 steps, and a cosine from the peak at progress 0 to 2 % of it at progress 1."""
    return peak * min(1.0, (step + 1) / 100) * (0.02 + 0.49 * (1 + math.cos(math.pi * progress)))


def document_mask(tokens: torch.Tensor) -> torch.Tensor:
    """Which positions see which: earlier ones of the same document.

    Otherwise a story also sees the names in the stories packed before it, and none of those is the right one.
    """
    document = (tokens == BOS).cumsum(1)
    same = document[:, :, None] == document[:, None, :]
    length = tokens.shape[1]
    return (same & torch.ones(length, length, dtype=torch.bool).tril())[:, None]


def entity_weights(tokenizer_path: Path, vocab_size: int) -> torch.Tensor:
    """1 for tokens that say who, what or where, 0 for the rest."""
    tokenizer = load_tokenizer(tokenizer_path)
    names = words.GIRLS + words.BOYS + words.ANIMAL_GIRLS + words.ANIMAL_BOYS
    nouns = " ".join(words.ALL_OBJECTS + words.SPECIES + words.COLORS + tuple(p.noun for p in words.PLACES))
    helpers = " ".join(helper.split()[-1] for place in words.PLACES for helper in place.helpers)
    pronouns = "he him his she her He His She Her girl boy princess prince"
    text = "".join(f" {word}" for word in (*names, *nouns.split(), *helpers.split(), *pronouns.split()))
    weights = torch.zeros(vocab_size)
    weights[tokenizer.encode(text, add_special_tokens=False).ids] = 1.0
    return weights


@torch.no_grad()
def start_copying(model: Any) -> None:
    """Let one key-value group of two middle layers begin as a head that repeats what it looks at.

    Output times value projection is then a projection of the embedding space onto itself, so attending to
    a name makes that name likelier.  A first run of three million tokens without this had not learned to
    repeat a name.
    """
    config = model.config
    dim, groups = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    kv = config.num_key_value_heads - 1
    for layer in (2, 3):
        attention = model.model.layers[layer].self_attn
        basis = 1.5 * torch.linalg.qr(torch.randn(config.hidden_size, dim))[0]
        attention.v_proj.weight[kv * dim : (kv + 1) * dim] = basis.T
        for head in range(kv * groups, (kv + 1) * groups):
            attention.o_proj.weight[:, head * dim : (head + 1) * dim] = basis


def save_checkpoint(path: Path, state: dict[str, object]) -> None:
    """Write next to the file and rename, so that an interrupted write leaves the old checkpoint whole."""
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    os.replace(temporary, path)


def train(args: argparse.Namespace) -> Any:
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    rows = prepare(args.work, args.documents, args.vocab_size)
    model: Any = LlamaForCausalLM(model_config(args.vocab_size))
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim != 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=args.lr,
        betas=(0.9, 0.95),
    )
    step, seen, seconds = 0, 0, 0.0
    checkpoint_path = args.work / "checkpoint.pt"
    if checkpoint_path.exists():
        checkpoint = torch.load(checkpoint_path, weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        step, seen, seconds = checkpoint["step"], checkpoint["seen"], checkpoint["seconds"]
        print(f"resumed at step {step}", flush=True)
    else:
        start_copying(model)

    usable = len(rows) - len(rows) % args.batch
    print(f"{len(rows)} rows of {ROW} tokens", flush=True)
    order = np.random.default_rng(0).permutation(len(rows))
    entities = entity_weights(args.work / "tokenizer.json", args.vocab_size)
    history: list[float] = []
    started = saved = time.monotonic()
    model.train()
    while True:
        # On a busy machine the time runs out first; the schedule then follows the clock, so that the
        # learning rate is low when training stops, either way.
        elapsed = seconds + time.monotonic() - started
        progress = max(seen / usable, elapsed / (60 * args.minutes))
        done = progress >= 1.0
        if done or time.monotonic() - saved > 120:
            saved = time.monotonic()
            save_checkpoint(
                checkpoint_path,
                {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "step": step,
                    "seen": seen,
                    "seconds": elapsed,
                },
            )
        if done:
            print(f"done after step {step}, {elapsed / 60:.1f} min", flush=True)
            return model
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, progress, args.lr)
        batch = torch.from_numpy(rows[order[seen : seen + args.batch]].astype(np.int64))
        inputs = batch[:, :-1]
        logits = model(inputs, attention_mask=document_mask(inputs), use_cache=False).logits
        targets = batch[:, 1:].flatten()
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction="none")
        # Remembering names is the hard part, and names are few among the tokens: they count more at first.
        weights = 1.0 + ENTITY_BOOST * max(0.0, 1.0 - progress / 0.7) * entities[targets]
        loss: Any = (weights * losses).sum() / weights.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        seen += args.batch
        history.append(losses.mean().item())
        if step % 25 == 0:
            mean = sum(history) / len(history)
            print(f"step {step}, {progress:.1%}, loss {mean:.4f} {elapsed / 60:.1f} min", flush=True)
            history.clear()


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def export(model: Any, work: Path, out: Path) -> None:
    """Write the Hugging Face files: bf16 weights, configs and tokenizer."""
    out.mkdir(parents=True, exist_ok=True)
    model = model.to(torch.bfloat16).eval()
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    write_json(out / "config.json", CLASSIC | json.loads((out / "config.json").read_text(encoding="utf-8")))
    write_json(
        out / "generation_config.json",
        {
            "bos_token_id": BOS,
            "eos_token_id": EOS,
            "do_sample": True,
            "temperature": 0.7,
            "top_p": 0.95,
            "max_new_tokens": 320,
        },
    )
    load_tokenizer(work / "tokenizer.json").save(str(out / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "</s>",
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(out / "tokenizer_config.json", tokenizer_config)
    size = (out / "model.safetensors").stat().st_size
    print(f"exported to {out}: model.safetensors has {size} bytes")
    if size > MAX_BYTES:
        raise SystemExit(f"model.safetensors is larger than {MAX_BYTES} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="tokenizer, corpus and checkpoints")
    parser.add_argument("--out", type=Path, required=True, help="where the finished model goes")
    parser.add_argument("--documents", type=int, default=64_000)
    parser.add_argument("--vocab-size", type=int, default=1536)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=45.0, help="stop after this much training time")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--export-only", action="store_true", help="export the last checkpoint, do not train")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    if args.export_only:
        model = LlamaForCausalLM(model_config(args.vocab_size))
        model.load_state_dict(torch.load(args.work / "checkpoint.pt", weights_only=True)["model"])
    else:
        model = train(args)
    export(model, args.work, args.out)


if __name__ == "__main__":
    main()
