"""Make the kept files of tests/golden: what transformers computes from tiny random checkpoints.

Needs torch and transformers 5.x (the tests need neither); from the repository root:

    python tools/make_golden.py [name ...]

A new golden is one entry in a tests/golden/GROUP.json, written by hand:

    "qwen3": {"config": {the config.json}, "dtype": "bfloat16", "num_tokens": 24, "max_model_len": 128}

The tool adds `seed` and `tensors` to the entries that are named (all, if none is), and their results to GROUP.npz.
Optional keys of an entry:
- `about`: what a reader should know.
- `seed`: the first one to try, 0 if there is none.
- `num_files`: shards of the checkpoint.
- `saved_as`: "modules" for a file with the names of the modules of transformers, where those differ from published
  ones, which `save_pretrained` writes (for instance experts in one tensor instead of one tensor each).
- `transposed`: part of the names of stacked matrices that published files have as [experts, inputs, outputs].
- `transformers`: for a family whose code is on the hub and not in transformers, how to say the same math there:
  `config` (keys that replace those of `config`), `names` (their parts of names and ours, replaced in this order),
  `qkv` (the name of the one tensor of q, k and v, and how many groups of heads take turns in its rows),
  `unit_rows` and `unit_columns` (tensors whose rows or columns are divided by their lengths), and `unused` (tensors of
  the file that no math reads).

All is computed in float32 from the weights as stored, with eager attention; greedy tokens by full recomputation. Rope
types whose frequencies depend on the length in transformers are frozen at those for max_model_len tokens, see
infinilm/config/sublayers/rope.py. The seed is the first one, from that of the entry on, with which
- every greedy token leads by 1e-3 of the largest logit,
- logits and attention are far from flat,
- no logit differs from that of float64 by 5e-6 of the largest one: tests allow float32 some 1e-5.
"""

from __future__ import annotations

import json
import math
import re
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from make_golden_facts import write_facts
from safetensors import safe_open
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from goldens import KEPT, expand, make_weights, random_bits, read_groups, rounded, write_weights

NUM_GREEDY = 16
MIN_LEAD = 1e-3
MAX_ROUNDING = 5e-6
Shapes = dict[str, list[int]]


# ---- models of transformers ----


def their_config(entry: dict[str, Any]) -> dict[str, Any]:
    return {**entry["config"], **entry.get("transformers", {}).get("config", {})}


def read_config(entry: dict[str, Any], folder: Path) -> Any:
    (folder / "config.json").write_text(json.dumps(their_config(entry)))
    return AutoConfig.from_pretrained(folder)


def model_class(config: Any) -> Any:
    """The class of a model, which for those that also see is not one of `AutoModelForCausalLM`."""
    own = getattr(transformers, config.architectures[0], None)
    autos = (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText)
    return own or next(auto._model_mapping[type(config)] for auto in autos if type(config) in auto._model_mapping)


def text_model(model: Any) -> Any:
    for name in ("transformer", "gpt_neox"):  # in the words of GPT-2, and of GPT-NeoX
        if hasattr(model, name):
            return getattr(model, name)
    if not hasattr(model, "model"):  # of Llama 4
        return model.language_model.model
    return getattr(model.model, "language_model", getattr(model.model, "text_model", model.model))


def their_shapes(entry: dict[str, Any], folder: Path) -> tuple[Shapes, Any]:
    """The tensors that transformers saves of such a model, and its configuration."""
    config = read_config(entry, folder)
    model = model_class(config)(config)
    if entry.get("saved_as") == "modules":
        shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
        if model.config.tie_word_embeddings:
            shapes.pop("lm_head.weight", None)
    else:
        model.save_pretrained(folder)
        shapes = {}
        for path in folder.glob("*.safetensors"):
            with safe_open(path, "pt") as file:
                shapes |= {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            path.unlink()
    for name, shape in shapes.items():
        if entry.get("transposed", "\n") in name:
            shape[1:] = shape[:0:-1]
    return shapes, config


# ---- their tensors and ours: another name, or q, k and v in one ----


def our_name(name: str, hub: dict[str, Any]) -> str:
    for theirs, ours in hub.get("names", {}).items():
        name = name.replace(theirs, ours)
    return name


def our_shapes(shapes: Shapes, hub: dict[str, Any]) -> Shapes:
    ours: Shapes = {}
    for name, shape in shapes.items():
        if "qkv" in hub and ".q_proj." in name:
            rows = sum(shapes[name.replace("q_proj", part)][0] for part in ("q_proj", "k_proj", "v_proj"))
            ours[name.replace("self_attn.q_proj", hub["qkv"]["name"])] = [rows, *shape[1:]]
        elif "qkv" not in hub or (".k_proj." not in name and ".v_proj." not in name):
            ours[our_name(name, hub)] = shape
    return ours | hub.get("unused", {})


def their_weights(weights: dict[str, Any], shapes: Shapes, hub: dict[str, Any]) -> dict[str, Any]:
    theirs = {}
    for name, shape in shapes.items():
        if "qkv" in hub and ".q_proj." in name:
            parts = [name.replace("q_proj", part) for part in ("q_proj", "k_proj", "v_proj")]
            joined = weights[name.replace("self_attn.q_proj", hub["qkv"]["name"])]
            groups = joined.reshape(hub["qkv"]["groups"], -1, shape[1])
            cuts = np.cumsum([shapes[part][0] // len(groups) for part in parts])[:-1]
            for part, rows in zip(parts, np.split(groups, cuts, axis=1), strict=True):
                theirs[part] = rows.reshape(-1, shape[1])
        elif our_name(name, hub) in weights:
            theirs[name] = weights[our_name(name, hub)]
    for key, axis in (("unit_rows", 1), ("unit_columns", 0)):
        for name in hub.get(key, ()):
            theirs[name] = theirs[name] / np.linalg.norm(theirs[name], axis=axis, keepdims=True)
    return theirs


# ---- what an entry gets ----

SHARP_NORMS = (
    *("q_norm.weight", "k_norm.weight", "query_layernorm.weight", "key_layernorm.weight"),
    *("q_layernorm.weight", "k_layernorm.weight"),
)


def mean_and_spread(name: str, shape: list[int], config: Any) -> tuple[float, float]:
    """The mean and spread of a tensor's values.

    Every layer has about unit gain, logits are far from flat, and attention is far from uniform.
    """
    kind = config.model_type
    if name.endswith((*SHARP_NORMS, "q_a_layernorm.weight")):
        # Scores of unit variance would be too flat; in Gemma 4 they are not divided by the root of head_dim.
        return (0.7, 0.15) if kind.startswith(("gemma3n", "gemma4")) else (1.5, 0.3)
    if name.endswith(("norm.weight", "router.scale", "expert_scale")) or re.search(
        r"layernorm_|\.ln_\w+\.weight", name
    ):
        return 1.0, 0.2
    if name.endswith("correct_output_scale"):
        return 1.0, 0.2
    if name.endswith("_coefs.weight"):
        return 0.0, 0.1  # with more of each other, streams would carry rounding errors far
    if name.endswith("modality_router.weight"):
        return 0.0, math.sqrt(shape[1])  # of what is divided by the size of a row
    if name.endswith("layer_scalar"):
        return 0.8, 0.1
    if name.endswith("embed_tokens_per_layer.weight"):
        return 0.0, 1.0
    if name.endswith((".act_fn.beta", ".act_fn.eps")):  # the constants of xIELU
        return (0.5 if name.endswith("beta") else -1e-6), 0.0
    if name.endswith("A_log"):
        return -1.0, 0.7  # states that remember some tokens
    if name.endswith("bias"):
        return 0.0, 0.3
    if name.endswith("embed_tokens.weight"):
        # The blocks of Zamba 2 read it beside the residual stream: a small one makes rounding grow from norm to norm.
        is_small = config.tie_word_embeddings and kind != "zamba2"
        return 0.0, 1 / math.sqrt(shape[1]) if is_small else 1.0
    gain = 1.5 if any(part in name for part in ("q_proj", "k_proj", "qkv_proj", "lm_head")) else 1.0
    inputs = shape[-1] if len(shape) == 3 else math.prod(shape[1:])
    if kind == "gpt2" and ".c_" in name:  # [inputs, outputs]
        inputs, gain = shape[0], 1.5 if "c_attn" in name else 1.0
    if len(shape) == 3 and ".experts." in name:
        if kind == "gpt_oss" and "gate_up" in name:
            gain = 4.0  # so that some values are clamped
        if kind in ("gpt_oss", "qwen3_vl_moe") or "llama4" in kind:  # [experts, inputs, outputs]
            inputs = shape[-2]
    return 0.0, gain / math.sqrt(inputs)


def describe(shapes: Shapes, hub: dict[str, Any], config: Any) -> dict[str, Any]:
    """{pattern of names: [shape, mean, spread]}."""
    ours = our_shapes(shapes, hub)
    sources = {our_name(name, hub): name for name in shapes}
    rows = {}
    for name, shape in ours.items():
        if name in hub.get("unused", {}):
            mean, spread = 0.0, 0.0
        else:
            mean, spread = mean_and_spread(sources.get(name, "q_proj"), shape, config)
        rows[name] = [shape, mean, float(f"{spread:.4g}")]
    return compact(rows)


def compact(rows: dict[str, Any]) -> dict[str, Any]:
    """Names that differ in numbers only, and have the same row, as one pattern, if it stands for no other name."""
    groups: dict[str, list[str]] = {}
    for name, row in rows.items():
        groups.setdefault(json.dumps([re.sub(r"\.\d+(?=\.)", ".#", name), row]), []).append(name)
    found = {}
    for names in groups.values():
        pattern = join_numbers(names)
        patterns = [pattern] if set(expand(pattern)) == set(names) else names
        found.update((each, rows[names[0]]) for each in patterns)
    return found


def join_numbers(names: list[str]) -> str:
    parts = [re.split(r"(?<=\.)(\d+)(?=\.)", name) for name in names]
    columns = [sorted(set(column), key=lambda text: (len(text), text)) for column in zip(*parts, strict=True)]
    return "".join(column[0] if len(column) == 1 else f"{{{ranges(map(int, column))}}}" for column in columns)


def ranges(numbers: Iterable[int]) -> str:
    """`0..3,5`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs)


def freeze_rope(model: Any, max_model_len: int) -> None:
    """Make the frequencies those of `max_model_len` tokens, whatever the length of the input."""
    text, config = text_model(model), model.config.get_text_config()
    rotary = getattr(text, "pos_emb", None) or getattr(text, "rotary_emb", None)  # LFM2's experts have the other name
    if getattr(rotary, "rope_type", None) in ("dynamic", "longrope"):
        inv_freq, rotary.attention_scaling = ROPE_INIT_FUNCTIONS[rotary.rope_type](
            config, torch.device("cpu"), seq_len=max_model_len
        )
        rotary.inv_freq = inv_freq
        rotary.rope_type = "frozen"


def load_model(name: str, folder: Path, dtype: torch.dtype, max_model_len: int) -> Any:
    config = AutoConfig.from_pretrained(folder)
    model, info = model_class(config).from_pretrained(
        folder,
        config=config,
        dtype=dtype,
        attn_implementation="eager",
        experts_implementation="eager",  # others have no float64
        output_loading_info=True,
    )
    if any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        raise RuntimeError(f"{name}: {info}")
    freeze_rope(model.eval(), max_model_len)
    return model


@torch.no_grad()
def compute(name: str, entry: dict[str, Any], folder: Path) -> dict[str, Any] | str:
    """What transformers computes from `folder`, or what is wrong with this seed."""
    model = load_model(name, folder, torch.float32, entry["max_model_len"])
    words = random_bits(f"{name}/input_ids", entry["seed"], entry["num_tokens"])
    ids = [3 + int(word) % (model.config.get_text_config().vocab_size - 3) for word in words]
    result = model(torch.tensor([ids]), use_cache=False, output_attentions=True)
    logits = result.logits[0]
    peak = max(layer[0, :, -1].amax(-1).mean().item() for layer in result.attentions)
    if logits.std() < 0.5 or peak < 0.25:
        return f"too flat (logits {logits.std():.2f}, attention {peak:.2f})"
    exact = load_model(name, folder, torch.float64, entry["max_model_len"])
    rounding = (exact(torch.tensor([ids]), use_cache=False).logits[0] - logits).abs().max() / logits.abs().max()
    if rounding > MAX_ROUNDING:
        return f"float32 is too far from float64: {rounding:.1e}"

    tokens = list(ids)
    for _ in range(NUM_GREEDY):
        last = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        best = last.topk(2).values
        if (best[0] - best[1]) / last.abs().max() < MIN_LEAD:
            return "a greedy token leads by too little"
        tokens.append(int(last.argmax()))
    return {
        "input_ids": np.array(ids, np.int32),
        "logits": logits.numpy(),
        "greedy_ids": np.array(tokens[len(ids) :], np.int32),
    }


def complete(name: str, entry: dict[str, Any]) -> dict[str, Any]:
    """Fill in the entry's `seed` and `tensors`; returns the results."""
    hub = entry.get("transformers", {})
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        shapes, config = their_shapes(entry, folder)
        first = entry.pop("seed", 0)
        entry.update(seed=first, tensors=describe(shapes, hub, config))
        for entry["seed"] in range(first, first + 100):
            stored = {key: rounded(values, entry["dtype"]) for key, values in make_weights(name, entry).items()}
            write_weights(folder, their_weights(stored, shapes, hub), "float32")
            result = compute(name, entry, folder)
            if not isinstance(result, str):
                return result
    raise RuntimeError(f"{name}: no seed of 100 will do; the last one: {result}")


def write_json(path: Path, entries: dict[str, Any]) -> None:
    path.write_text(fitted(entries, 1, "") + "\n", encoding="utf-8")


def fitted(value: Any, levels: int, indent: str) -> str:
    """JSON with lines of at most 120 characters where that can be."""
    text = json.dumps(value)
    if not isinstance(value, dict | list) or not value or (levels <= 0 and len(indent) + len(text) <= 110):
        return text
    inner = indent + " "
    if isinstance(value, dict):
        rows = [f"{inner}{json.dumps(key)}: {fitted(each, levels - 1, inner)}" for key, each in value.items()]
    else:
        rows = [inner + fitted(each, levels - 1, inner) for each in value]
    left, right = "{}" if isinstance(value, dict) else "[]"
    return left + "\n" + ",\n".join(rows) + "\n" + indent + right


README = """# Golden checkpoints

What transformers computes from tiny random checkpoints. Their weights are a function of names and seeds:
`tests/goldens.py` writes a checkpoint when a test asks for it.

- `GROUP.json`: for each checkpoint its configuration, its tensors and a seed; `GROUP.npz`: the expected values
- `rope.json`: rotary frequencies; `defaults.json`: the defaults of the configuration classes

Made by `python tools/make_golden.py`, whose header says how to add one, with torch 2.13 and transformers 5.23 or newer.
Only new entries are written by hand.
"""


def main() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    chosen = sys.argv[1:]
    groups = read_groups()
    if unknown := set(chosen) - {name for entries in groups.values() for name in entries}:
        raise SystemExit(f"no such golden: {', '.join(sorted(unknown))}; add its entry to a tests/golden/GROUP.json")
    for group, entries in groups.items():
        path = KEPT / f"{group}.npz"
        results = dict(np.load(path)) if path.exists() else {}
        results = {key: array for key, array in results.items() if key.partition("/")[0] in entries}
        for name, entry in entries.items():
            if not chosen or name in chosen:
                made = complete(name, entry)
                results |= {f"{name}/{key}": array for key, array in made.items()}
                print(f"{name}: seed {entry['seed']}, greedy {made['greedy_ids'].tolist()}")
        np.savez_compressed(path, **dict(sorted(results.items())))
        write_json(KEPT / f"{group}.json", entries)
    write_facts(KEPT)
    (KEPT / "README.md").write_text(README)


if __name__ == "__main__":
    main()
