"""Check that models which transformers saves are read: every golden family in 13 layers, with weights of its own.

    python tools/check_saved_again.py [name ...]

Needs torch, transformers and infinilm in one environment, which tools/saved_again.sh makes; the tests need no torch,
and check configurations alone (tests/config/test_saved_again.py). Names of layers of two digits, and stacks of experts,
are written otherwise by some versions of transformers: run this with the newest one. Logits must agree to 2e-5 of the
largest, or to 4 times what transformers' own in float32 differ from those in float64.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from make_golden import freeze_rope, model_class

import infinilm

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from config.test_saved_again import KNOWN, longer
from goldens import config_of

NUM_LAYERS, MAX_MODEL_LEN = 13, 64

_STEPS = "transformers makes steps of a state at least time_step_min, which the published code does not"
# What differs, and why that is so with transformers 5.24. A release that mends one of these is told of, too.
OTHERWISE = {
    "nemotron-h": _STEPS,
    "nemotron-3": _STEPS,
    "nemotron-3-super": _STEPS,
    "kimi-k25": "transformers calls layers `blocks`, as no published file does",
    "llama4": "transformers fails in the model with a tower",
    "gemma3n": "its tower needs the package timm",
}


@torch.no_grad()
def worst_errors(name: str, folder: Path) -> tuple[float, float]:
    """The largest differences of logits from float64, here and in transformers, as shares of the largest logit."""
    torch.manual_seed(0)
    (folder / "config.json").write_text(json.dumps(longer(config_of(name), NUM_LAYERS)))
    config = transformers.AutoConfig.from_pretrained(folder)
    config.dtype = torch.float32
    model = model_class(config)._from_config(config, attn_implementation="eager", experts_implementation="eager")
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else parameter
    freeze_rope(model.eval(), MAX_MODEL_LEN)
    model.save_pretrained(folder)
    ids = list(range(3, 40))
    theirs = model(torch.tensor([ids]), use_cache=False).logits[0].numpy()
    exact = model.double()(torch.tensor([ids]), use_cache=False).logits[0].numpy()
    with infinilm.LLM(folder, dtype="float32", max_model_len=MAX_MODEL_LEN, num_threads=1, use_tqdm=False) as llm:
        ours = np.array(llm.forward(ids))
    here, there = (float(np.abs(logits - exact).max() / np.abs(exact).max()) for logits in (ours, theirs))
    return here, there


def main() -> None:
    torch.set_num_threads(1)  # more wait for each other: these models are small
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    failed = []
    for name in sys.argv[1:] or KNOWN:
        with tempfile.TemporaryDirectory() as folder:
            try:
                here, there = worst_errors(name, Path(folder))
            except Exception as problem:  # whatever it is, the others are looked at, too
                failed.append(name)
                print(f"{name}: {type(problem).__name__}: {problem}", flush=True)
                continue
        failed += [name] * (here > max(2e-5, 4 * there))
        print(f"{name}: {here:.1e} (transformers {there:.1e})", flush=True)
    for name in failed:
        print(f"{name} differs: {OTHERWISE.get(name, 'which is new')}")
    chosen = sys.argv[1:] or KNOWN
    if new := [name for name in failed if name not in OTHERWISE]:
        sys.exit(f"not as transformers computes it: {', '.join(new)}")
    if mended := [name for name in OTHERWISE if name in chosen and name not in failed]:
        sys.exit(f"as transformers computes it by now, so take these out of OTHERWISE: {', '.join(mended)}")


if __name__ == "__main__":
    main()
