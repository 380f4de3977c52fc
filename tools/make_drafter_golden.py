"""Make the kept files of tests/golden_drafters: what transformers drafts with tiny random drafters of Gemma 4.

Needs torch and transformers 5.x (the tests need neither); from the repository root:

    python tools/make_drafter_golden.py

The models are goldens of tests/golden, and their drafters are made by tests/speculation/heads.py. For each model
drafters.npz has `NAME/texts` [num_texts, num_tokens]; and of the tokens that the drafter makes behind each text
`NAME/drafts` [num_texts, num_drafts] and `NAME/logits` [num_texts, num_drafts, vocab_size], computed in float64. As
where a model decodes with its cache, a layer with a window sees as many keys as that has.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Gemma4AssistantForCausalLM

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests")]

from goldens import golden  # noqa: E402
from speculation.heads import DRAFTED, make_assistant  # noqa: E402

NUM_TEXTS, NUM_TOKENS, NUM_DRAFTS = 6, 23, 4


@torch.no_grad()
def drafted(name: str, folder: Path) -> dict[str, Any]:
    """The arrays of one model."""
    settings: dict[str, Any] = {"dtype": torch.float64, "attn_implementation": "eager"}
    if "enable_moe_block" in AutoConfig.from_pretrained(golden(name)).get_text_config().to_dict():
        settings["experts_implementation"] = "eager"  # others have no float64
    model = AutoModelForCausalLM.from_pretrained(golden(name), **settings)
    drafter = Gemma4AssistantForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    text = model.config.get_text_config()
    texts = np.random.default_rng(3).integers(0, text.vocab_size, (NUM_TEXTS, NUM_TOKENS))
    drafts, logits = [], []
    for ids in texts:
        out = model(torch.tensor(ids[None, :-1]), output_hidden_states=True, return_shared_kv_states=True)
        keys = dict(out.shared_kv_states.items())
        seen = keys["sliding_attention"]
        keys["sliding_attention"] = tuple(part[:, :, -text.sliding_window :] for part in seen)
        token, hidden = torch.tensor(ids[None, -1:]), out.hidden_states[-1][:, -1:]
        positions = torch.tensor([[len(ids) - 1]])
        for _ in range(NUM_DRAFTS):
            embedded = torch.cat([model.get_input_embeddings()(token), hidden], dim=-1)
            made = drafter(inputs_embeds=embedded, position_ids=positions, shared_kv_states=keys)
            token, hidden = made.logits.argmax(-1), made.last_hidden_state
            drafts.append(int(token))
            logits.append(made.logits[0, 0].numpy())
    return {
        "texts": texts.astype(np.int32),
        "drafts": np.array(drafts, np.int32).reshape(NUM_TEXTS, NUM_DRAFTS),
        "logits": np.array(logits, np.float32).reshape(NUM_TEXTS, NUM_DRAFTS, -1),
    }


def main() -> None:
    """Compute all."""
    arrays: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in DRAFTED:
            made = drafted(name, make_assistant(Path(folder) / name, name))
            arrays |= {f"{name}/{key}": array for key, array in made.items()}
    np.savez_compressed(ROOT / "tests" / "golden_drafters" / "drafters.npz", **arrays)


if __name__ == "__main__":
    main()
