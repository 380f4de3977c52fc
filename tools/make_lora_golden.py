"""Write tests/lora/golden: random adapters of golden checkpoints, as PEFT saves them, and the logits that PEFT gives.

Needs torch, transformers 5.x and peft; run once, from the repository root (the tests need none of them):

    python tools/make_lora_golden.py

Per adapter: adapter_config.json and adapter_model.safetensors, written by PEFT, and expected.npz with `base`, the name
of the checkpoint, `input_ids` [n], and `logits` float32 [n, vocab_size], computed in float32.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path.insert(0, str(TESTS))
from goldens import golden  # noqa: E402

GOLDEN = TESTS / "lora" / "golden"
NUM_TOKENS = 8

# Base and settings of each.
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "patterns": (
        "qwen3",
        {
            "r": 2,
            "lora_alpha": 7,
            "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
            "rank_pattern": {"k_proj": 1, r"layers\.1\.mlp\.down_proj": 3},
            "alpha_pattern": {"model.layers.0.self_attn.o_proj": 1.5, "up_proj": 4},
        },
    ),
    "rslora": ("llama-odd-mqa", {"r": 2, "lora_alpha": 3, "use_rslora": True, "target_modules": "all-linear"}),
    "joined": ("phi3", {"r": 2, "lora_alpha": 4, "target_modules": r".*\.(qkv_proj|o_proj|gate_up_proj)"}),
    "renamed": ("starcoder2", {"r": 2, "lora_alpha": 5, "target_modules": ["v_proj", "c_fc", "c_proj"]}),
    "pairs": ("glm", {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "k_proj", "gate_up_proj"]}),
}


@torch.no_grad()
def make(name: str) -> None:
    base, settings = ADAPTERS[name]
    folder = GOLDEN / name
    shutil.rmtree(folder, ignore_errors=True)
    model = AutoModelForCausalLM.from_pretrained(golden(base), dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(len(name))
    ids = torch.randint(3, model.config.vocab_size, (1, NUM_TOKENS), generator=generator)
    plain = model(ids, use_cache=False).logits[0]
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings)).eval()
    for key, parameter in sorted(adapted.named_parameters()):
        if "lora_" in key:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * parameter.shape[1] ** -0.5 * (0.5 if "lora_B" in key else 1))
    logits = adapted(ids, use_cache=False).logits[0]
    if (logits - plain).abs().max() < 0.2 * plain.abs().max():
        raise RuntimeError(f"{name}: changes too little")
    adapted.save_pretrained(folder)
    (folder / "README.md").unlink()
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text()) | {"base_model_name_or_path": base}  # not where it was on this machine
    if isinstance(config["target_modules"], list):
        config["target_modules"].sort()
    path.write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    np.savez_compressed(folder / "expected.npz", base=base, input_ids=ids[0].numpy(), logits=logits.numpy())
    print(name, sum(file.stat().st_size for file in folder.iterdir()) // 1024, "KiB")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for each in ADAPTERS:
        make(each)
