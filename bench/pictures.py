"""The first token of a second question about a picture, beside that of a text of as many tokens that is known.

    python -m bench.pictures --layers 28 --side 1024 --rounds 9

The model has the shape of Qwen3-VL-2B and random weights. The picture is a JPEG file, as clients send it. Both ways
take turns, and the ratio is of the medians.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from infinilm import LLM

PLACEHOLDER = 150

TEXT = {
    "model_type": "qwen3_vl_text",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 8192,
    "rope_theta": 5000000.0,
    "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20]},
}
TOWER = {
    "model_type": "qwen3_vl",
    "depth": 24,
    "hidden_size": 1024,
    "num_heads": 16,
    "intermediate_size": 4096,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 2048,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [5, 11, 17],
    "hidden_act": "gelu_pytorch_tanh",
}
PIXELS = {"size": {"shortest_edge": 65536, "longest_edge": 16777216}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28, help="of the model of texts")
    parser.add_argument("--side", type=int, default=1024, help="pixels of each side of the picture")
    parser.add_argument("--question", type=int, default=24, help="tokens of a question")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    config = {
        "model_type": "qwen3_vl",
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "image_token_id": PLACEHOLDER,
        "tie_word_embeddings": True,
        "text_config": {**TEXT, "num_hidden_layers": args.layers},
        "vision_config": TOWER,
    }
    out = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (args.side // 16, args.side // 16, 3)).astype(np.uint8)
    Image.fromarray(noise).resize((args.side, args.side)).save(out, "JPEG", quality=90)
    picture = out.getvalue()
    with tempfile.TemporaryDirectory() as name:
        Path(name, "config.json").write_text(json.dumps(config))
        Path(name, "preprocessor_config.json").write_text(json.dumps(PIXELS))
        settings: dict[str, Any] = {"load_format": "dummy", "dtype": "bfloat16", "kv_cache": "1GiB", "use_tqdm": False}
        with LLM(name, max_model_len=8192, max_num_seqs=4, speculation="off", **settings) as llm:
            begin = [1, 2, PLACEHOLDER, 3]
            seen = {"prompt_token_ids": [*begin, 9], "images": [picture]}
            started = time.perf_counter()
            first = llm.generate(seen, max_tokens=1, use_tqdm=False)[0]
            print(f"{len(first.prompt_token_ids)} tokens, first question {time.perf_counter() - started:.2f} s")
            text = [100 + i % 40 for i in range(len(first.prompt_token_ids) - 1)]
            llm.generate([[*text, 9]], max_tokens=1, use_tqdm=False)
            times: dict[str, list[float]] = {"picture": [], "text": []}
            for number in range(args.rounds):
                question = [10 + (number * 7 + i) % 80 for i in range(args.question)]
                prompts: dict[str, Any] = {
                    "picture": {"prompt_token_ids": begin + question, "images": [picture]},
                    "text": {"prompt_token_ids": text + question},
                }
                for way, prompt in prompts.items():
                    started = time.perf_counter()
                    answer = llm.generate(prompt, max_tokens=1, use_tqdm=False)[0]
                    times[way].append(time.perf_counter() - started)
                    assert answer.metrics.cached_tokens >= len(text) // 16 * 16, answer.metrics
    median = {way: statistics.median(of) for way, of in times.items()}
    print(
        f"{len(picture) >> 10} KiB, question of {args.question} tokens: picture {median['picture'] * 1e3:.1f} ms, text "
        f"{median['text'] * 1e3:.1f} ms: {median['picture'] / median['text']:.2f} x"
    )


if __name__ == "__main__":
    main()
