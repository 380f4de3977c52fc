"""What each format of weights costs the bundled model, and whether files of real tools are read as the tools do.

    python -m bench.format_quality --tools-python TOOLS/bin/python [--out FOLDER] [FORM...]

TOOLS is an environment with torch, transformers, llama-cpp-python, gguf, llm-compressor, datasets, bitsandbytes,
ModelOpt, and the sources of AutoAWQ and GPTQModel on its path; a form whose tool is missing is left out with a word.
Each form is made by format_files.py and kept in FOLDER. Prints a table of

    KL, other best   mean divergence of next tokens from the float32 model's, nats a token, and the share of tokens
                     after which another one is the most likely: over held-out stories, of the weights alone
    read             the largest difference to the logits of the tool's own reading, over four times their root mean
                     square, with dtype="float32", and with "auto"
    tokens           how many of llama.cpp's greedy tokens are infinilm's, with dtype="float32"

The bundled model's widths, 192 and 384, are no multiples of 256, which K types need, nor of 128: real tools take other
types for such tensors. So it is widened with zeros, which is the same function, bit for bit but for the order of sums:
norms, whose means are over four times as many numbers, have half their weights. Groups of 16, 32 and 64 are those that
there were, or zeros.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench import ROOT, command as command_of
from infinilm import LLM
from infinilm.checkpoint import Checkpoint, resolve_model
from infinilm.debug.loss import measure_loss

sys.path += [str(ROOT / "tests"), str(ROOT / "tools/demo")]

from quantised_files.writers import Tensors, bf16, of_bf16, save

GGUF = ["Q8_0", "Q6_K", "Q5_K", "Q5_1", "Q5_0", "Q4_K", "Q4_1", "Q4_0", "IQ4_NL", "IQ4_XS", "MXFP4", "Q3_K", "Q2_K"]
GGUF += ["F16", "BF16", "TQ1_0", "TQ2_0"]
MIXES = ["Q5_K_M", "Q5_K_S", "Q4_K_M", "Q4_K_S", "Q3_K_L", "Q3_K_M", "Q3_K_S", "Q2_K mix", "IQ3_M", "IQ3_XXS"]
CT = ["W8A16", "W4A16", "W4A16_ASYM", "W8A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16", "MXFP4A16"]
CT += ["MXFP8", "NVFP4", "W2A16", "W3A16", "W5A16", "W6A16", "W7A16", "W4A8", "W4AFP8", "MXFP4"]
FORMS = (
    [f"gguf {name}" for name in GGUF + MIXES]
    + [f"ct {name}" for name in CT]
    + ["fp8 128x128", "fp8 64x32", "fp8 tensor", "fp8 fbgemm"]
)
FORMS += ["modelopt FP8", "modelopt NVFP4", "awq gemm g128", "awq gemm all", "awq gemv g32"]
FORMS += [f"gptq {bits} {more}" for bits in (2, 3, 4, 8) for more in ("g128", "asym act g32", "asym v2 all")]
FORMS += [f"bnb {name}" for name in ("int8", "nf4", "nf4 double", "fp4")] + ["awq gemm", "awq gemv"]
FORMS += [f"gptq {name}" for name in ("8", "4", "4 asym", "4 asym act", "4 asym v2", "3 asym", "2 asym")]


def filled(array: npt.NDArray[np.float32], shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """With zeros behind the end of each axis."""
    larger = np.zeros(shape, np.float32)
    larger[tuple(map(slice, array.shape))] = array
    return larger


def widened(source: Path, folder: Path) -> Path:
    """The bundled model with widths of 768, 256 (of o_proj) and 512."""
    config = json.loads((source / "config.json").read_text())
    hidden, inter = 4 * config["hidden_size"], 512
    kv, dim, each = config["num_key_value_heads"], config["head_dim"], 256 // config["head_dim"]
    heads = config["num_attention_heads"] // kv, each // kv  # that share keys: as they were, and with those of zeros
    config |= {"hidden_size": hidden, "intermediate_size": inter, "num_attention_heads": each}
    config["rms_norm_eps"] /= 4
    shapes = {"gate_proj": (inter, hidden), "up_proj": (inter, hidden), "down_proj": (hidden, inter)}
    tensors: Tensors = {}
    with Checkpoint(source) as checkpoint:
        for name in checkpoint.tensors:
            old, module = of_bf16(checkpoint.array(name)), name.split(".")[-2]
            if old.ndim == 1:
                new = filled(old / 2, (hidden,))
            elif module == "q_proj":
                new = filled(old.reshape(kv, heads[0], dim, -1), (kv, heads[1], dim, hidden)).reshape(-1, hidden)
            elif module == "o_proj":
                new = filled(old.reshape(-1, kv, heads[0], dim), (hidden, kv, heads[1], dim)).reshape(hidden, -1)
            else:
                new = filled(old, shapes.get(module, (len(old), hidden)))
            tensors[name] = "BF16", bf16(new)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for other in ("tokenizer.json", "tokenizer_config.json"):
        (folder / other).write_bytes((source / other).read_bytes())
    save(folder / "model.safetensors", tensors)
    return folder


def held_out_stories(count: int) -> list[str]:
    import corpus

    rng = random.Random("heldout-99")
    return [corpus.make_story(rng, "heldout")[1] for _ in range(count)]


def difference(model: Path, expected: npt.NDArray[np.float32], ids: list[int], dtype: str) -> float:
    with LLM(model, dtype=dtype, max_num_seqs=1, max_model_len=64, use_tqdm=False) as llm:
        got = np.array(llm.forward(ids))
    return float(np.abs(got - expected).max() / (4 * np.sqrt((expected**2).mean())))


def greedy(model: Path, prompt: list[int], count: int) -> list[int]:
    with LLM(model, dtype="float32", max_num_seqs=1, max_model_len=64, use_tqdm=False) as llm:
        output = llm.generate(prompt, temperature=0, max_tokens=count, ignore_eos=True, use_tqdm=False)[0]
    return list(output.outputs[0].token_ids)


def measure(form: str, made: Path, stories: list[str]) -> str:
    expected = np.load(f"{made}.npz")
    ids = expected["ids"].tolist()
    loss = measure_loss("demo", made, stories)
    off = [difference(made, expected["logits"], ids, dtype) for dtype in ("float32", "auto")]
    same = ""
    if "greedy" in expected:
        theirs = expected["greedy"].tolist()
        ours = greedy(made, expected["prompt"].tolist(), len(theirs))
        same = f"{sum(a == b for a, b in zip(ours, theirs, strict=True))} of {len(theirs)}"
    return f"| {form} | {loss.kl:.1e} | {100 * loss.other_best:.2f} % | {off[0]:.1e} | {off[1]:.1e} | {same} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools-python", default=sys.executable)
    parser.add_argument("--out", type=Path, default=Path("formats"))
    parser.add_argument("--stories", type=int, default=24)
    parser.add_argument("forms", nargs="*", default=FORMS)
    args = parser.parse_args()
    args.out.mkdir(exist_ok=True)
    demo, wide = resolve_model("demo"), args.out / "widened"
    if not wide.exists():
        widened(demo, wide)
    stories = held_out_stories(args.stories)
    print("| form | KL | other best | read, float32 | read, auto | tokens |\n|---|---|---|---|---|---|", flush=True)
    print(f"| (widened) | {measure_loss('demo', wide, stories).kl:.1e} | | | | |", flush=True)
    for form in args.forms:
        made = args.out / (form.replace(" ", "-") + (".gguf" if form.startswith("gguf ") else ""))
        if not made.exists():
            command = [*command_of("format_files", args.tools_python), wide, form, made]
            run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if run.returncode:
                print(f"{form}: not made: {run.stdout.strip().splitlines()[-1]}", file=sys.stderr, flush=True)
                continue
        try:
            print(measure(form, made, stories), flush=True)
        except Exception as error:  # of one form
            print(f"{form}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
