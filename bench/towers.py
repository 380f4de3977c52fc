"""Towers of real shapes beside their peers: the seconds in which one picture becomes rows, resizing left out.

    python -m bench.towers FOLDER --tower qwen3-vl-2b --side 1024 --mtmd LLAMA.CPP/build/bin/llama-mtmd-cli \\
        --peers-python PEERS/bin/python [--rounds 3] [--threads 2]

FOLDER gets the tower with random weights as mmproj files (BF16, F16), and a model of texts of a few layers, which
llama.cpp wants beside it. All read the same picture of side x side pixels. Infinilm computes in bfloat16, from the BF16
file; llama.cpp from either, and transformers (in PEERS, an environment with torch) in bfloat16 and in float32. In a
round each of them computes the picture once; medians are printed, the ratio to the fastest peer, and the share that the
products of the tower have of the arithmetic peak of the same cores, measured before and behind.

On a machine that others use, --cpu-time compares what can be compared there: one thread of each engine but llama.cpp,
by its CPU time.
"""

from __future__ import annotations

import argparse
import functools
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

# Sides of a patch are chosen so that the picture has as many patches in all of them.
TOWERS: dict[str, dict[str, Any]] = {
    "qwen3-vl-2b": {"layers": 24, "hidden": 1024, "inner": 4096, "heads": 16, "patch": 16, "out": 2048},
    "siglip-400m": {"layers": 27, "hidden": 1152, "inner": 4304, "heads": 16, "patch": 16, "out": 2048},
}
LEVELS = (5, 11, 17)
TEXT_LAYERS = 3
WORDS = [
    "<|vision_start|>",
    "<|image_pad|>",
    "<|vision_end|>",
    "<start_of_image>",
    "<image_soft_token>",
    "<end_of_image>",
]


def flops(shape: dict[str, Any], name: str, patches: int) -> float:
    """Multiplications and additions of one picture."""
    hidden, inner = shape["hidden"], shape["inner"]
    layer = 2 * patches * (4 * hidden**2 + 2 * hidden * inner) + 4 * patches**2 * hidden
    embed = 2 * patches * hidden * 3 * shape["patch"] ** 2 * (2 if name == "qwen3-vl-2b" else 1)
    if name == "qwen3-vl-2b":
        merged = 4 * hidden
        return float(shape["layers"] * layer + embed + 2 * (patches / 4) * merged * (merged + shape["out"]) * 4)
    return float(shape["layers"] * layer + embed + 2 * (patches / 16) * hidden * shape["out"])


def make(folder: Path, name: str, side: int) -> None:
    """Write the files that are not there."""
    import gguf

    folder.mkdir(parents=True, exist_ok=True)
    shape = TOWERS[name]
    hidden, inner, out = shape["hidden"], shape["inner"], shape["out"]
    numbers = np.random.default_rng(0).standard_normal(1 << 22, np.float32)

    def noise(*size: int) -> Any:  # the same in all layers
        return np.resize(numbers, size) * np.float32(size[-1] ** -0.5)

    @functools.cache
    def stored(rows: int, columns: int, kind: str) -> Any:
        return gguf.quants.quantize(noise(rows, columns), gguf.GGMLQuantizationType[kind])

    text = folder / "model.gguf"
    if not text.exists():
        writer = gguf.GGUFWriter(text, "qwen3vl")
        writer.add_context_length(8192)
        writer.add_embedding_length(out)
        writer.add_block_count(TEXT_LAYERS)
        writer.add_feed_forward_length(64)
        writer.add_head_count(16)
        writer.add_head_count_kv(2)
        writer.add_key_length(128)
        writer.add_value_length(128)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_rope_freq_base(5e6)
        writer.add_rope_dimension_sections([24, 20, 20, 0])
        writer.add_uint32("qwen3vl.n_deepstack_layers", len(LEVELS) if name == "qwen3-vl-2b" else 0)
        letters = [chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 324))]
        tokens = [*letters, "ab", *WORDS]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list(tokens)
        writer.add_token_types(
            [gguf.TokenType.NORMAL] * (len(tokens) - len(WORDS)) + [gguf.TokenType.CONTROL] * len(WORDS)
        )
        writer.add_token_merges(["a b"])
        writer.add_eos_token_id(len(tokens) - 1)
        writer.add_tensor("token_embd.weight", noise(len(tokens), out))
        writer.add_tensor("output_norm.weight", np.ones(out, np.float32))
        for i in range(TEXT_LAYERS):
            for module, size in (
                ("attn_q", (2048, out)), ("attn_k", (256, out)), ("attn_v", (256, out)), ("attn_output", (out, 2048)),
                ("ffn_gate", (64, out)), ("ffn_up", (64, out)), ("ffn_down", (out, 64)),
            ):  # fmt: skip
                writer.add_tensor(f"blk.{i}.{module}.weight", noise(*size))
            for module, count in (("attn_norm", out), ("ffn_norm", out), ("attn_q_norm", 128), ("attn_k_norm", 128)):
                writer.add_tensor(f"blk.{i}.{module}.weight", np.ones(count, np.float32))
        _finish(writer)
    for kind in ("BF16", "F16"):
        is_qwen = name == "qwen3-vl-2b"
        path = _projector(folder, side, kind)
        if path.exists():
            continue
        writer = gguf.GGUFWriter(path, "clip")
        writer.add_string("general.type", "mmproj")
        writer.add_bool("clip.has_vision_encoder", True)
        writer.add_string("clip.projector_type", "qwen3vl_merger" if is_qwen else "gemma3")
        writer.add_bool("clip.use_gelu", True)
        for key, number in (
            ("projection_dim", out), ("image_size", side), ("patch_size", shape["patch"]), ("embedding_length", hidden),
            ("feed_forward_length", inner), ("block_count", shape["layers"]), ("attention.head_count", shape["heads"]),
        ):  # fmt: skip
            writer.add_uint32(f"clip.vision.{key}", number)
        writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
        for key in ("image_mean", "image_std"):
            writer.add_array(f"clip.vision.{key}", [0.5, 0.5, 0.5])
        if is_qwen:
            writer.add_uint32("clip.vision.spatial_merge_size", 2)
            writer.add_array("clip.vision.is_deepstack_layers", [i in LEVELS for i in range(shape["layers"])])

        def linear(module: str, rows: int, columns: int, writer: Any = writer, kind: str = kind) -> None:
            writer.add_tensor(
                f"{module}.weight", stored(rows, columns, kind), raw_dtype=gguf.GGMLQuantizationType[kind]
            )
            writer.add_tensor(f"{module}.bias", np.zeros(rows, np.float32))

        def norm(module: str, count: int, writer: Any = writer) -> None:
            writer.add_tensor(f"{module}.weight", np.ones(count, np.float32))
            writer.add_tensor(f"{module}.bias", np.zeros(count, np.float32))

        kernel = (hidden, 3, shape["patch"], shape["patch"])
        writer.add_tensor("v.patch_embd.weight", noise(*kernel))
        writer.add_tensor("v.patch_embd.bias", np.zeros(hidden, np.float32))
        norm("v.post_ln", hidden)
        for i in range(shape["layers"]):
            at = f"v.blk.{i}."
            if is_qwen:
                linear(f"{at}attn_qkv", 3 * hidden, hidden)
            else:
                for part in "qkv":
                    linear(f"{at}attn_{part}", hidden, hidden)
            linear(f"{at}attn_out", hidden, hidden)
            linear(f"{at}ffn_up", inner, hidden)
            linear(f"{at}ffn_down", hidden, inner)
            norm(f"{at}ln1", hidden)
            norm(f"{at}ln2", hidden)
        if is_qwen:
            writer.add_tensor("v.patch_embd.weight.1", noise(*kernel))
            writer.add_tensor("v.position_embd.weight", noise(2304, hidden))
            linear("mm.0", 4 * hidden, 4 * hidden)
            linear("mm.2", out, 4 * hidden)
            for level in LEVELS:
                norm(f"v.deepstack.{level}.norm", 4 * hidden)
                linear(f"v.deepstack.{level}.fc1", 4 * hidden, 4 * hidden)
                linear(f"v.deepstack.{level}.fc2", out, 4 * hidden)
        else:
            writer.add_uint32("clip.vision.projector.scale_factor", 4)
            writer.add_tensor("v.position_embd.weight", noise((side // shape["patch"]) ** 2, hidden))
            writer.add_tensor("mm.input_projection.weight", noise(hidden, out))
            writer.add_tensor("mm.soft_emb_norm.weight", np.ones(hidden, np.float32))
        _finish(writer)


def _projector(folder: Path, side: int, kind: str) -> Path:
    """The file of a tower; positions of that of Qwen3-VL are for all sizes."""
    return folder / (f"mmproj-{kind}.gguf" if folder.name == "qwen3-vl-2b" else f"mmproj-{side}-{kind}.gguf")


def _finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama_cpp(binary: Path, folder: Path, side: int, kind: str, threads: int) -> float:
    """Seconds, as llama.cpp itself tells them."""
    command = [
        str(binary), "-m", str(folder / "model.gguf"), "--mmproj", str(_projector(folder, side, kind)),
        *["--image", str(folder / f"{side}.png")] * 2, "-p", "ab", "-n", "1", "-t", str(threads), "--no-warmup",
        "--no-mmproj-offload", "-ngl", "0", "--image-max-tokens", "4096", "--chat-template", "chatml", "-lv", "4",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    said = done.stdout + done.stderr
    times = re.findall(r"(?:slice encoded|batch encoding done) in (\d+) ms", said)
    if not times:
        raise SystemExit(f"llama.cpp said no time:\n{said[-3000:]}")
    return sum(map(int, times[len(times) // 2 :])) / 1000  # of the second picture: the first has memory allocated


def transformers(name: str, side: int, dtype: str, threads: int, clock: Callable[[], float]) -> float:
    """Runs in the environment of the peers: seconds of a tower that it makes."""
    import torch

    torch.set_num_threads(threads)
    shape = TOWERS[name]
    torch.manual_seed(0)
    patches = (side // shape["patch"]) ** 2
    if name == "qwen3-vl-2b":
        from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
        from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

        config = Qwen3VLVisionConfig(
            depth=shape["layers"], hidden_size=shape["hidden"], intermediate_size=shape["inner"],
            num_heads=shape["heads"], out_hidden_size=shape["out"], deepstack_visual_indexes=list(LEVELS),
        )  # fmt: skip
        model: Any = Qwen3VLVisionModel._from_config(config, attn_implementation="sdpa")
        grid = side // shape["patch"]
        inputs: Any = (torch.randn(patches, 6 * shape["patch"] ** 2), torch.tensor([[1, grid, grid]]))
    else:
        from transformers import SiglipVisionConfig, SiglipVisionModel

        config = SiglipVisionConfig(
            num_hidden_layers=shape["layers"], hidden_size=shape["hidden"], intermediate_size=shape["inner"],
            num_attention_heads=shape["heads"], image_size=side, patch_size=shape["patch"], vision_use_head=False,
        )  # fmt: skip
        model = SiglipVisionModel._from_config(config, attn_implementation="sdpa")
        inputs = (torch.randn(1, 3, side, side),)
    model = model.to(getattr(torch, dtype)).eval()
    inputs = tuple(own.to(model.dtype) if own.is_floating_point() else own for own in inputs)
    with torch.inference_mode():
        model(*inputs)  # which has kernels made and memory allocated
        started = clock()
        model(*inputs)
        return clock() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tower", choices=TOWERS, required=True)
    parser.add_argument("--side", type=int, default=512, help="pixels of each side of the picture")
    parser.add_argument("--mtmd", type=Path, metavar="FILE", help="llama-mtmd-cli")
    parser.add_argument("--peers-python", metavar="FILE", help="the Python of an environment with transformers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true", help="one thread of each engine, and its CPU time")
    parser.add_argument("--prepare", action="store_true", help="write the files, and end")
    parser.add_argument("--transformers", metavar="DTYPE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    clock = time.process_time if args.cpu_time else time.perf_counter
    if args.transformers:
        print(transformers(args.tower, args.side, args.transformers, args.threads, clock))
        return
    if args.cpu_time:
        if args.mtmd:
            parser.error("--cpu-time: llama.cpp tells the time on the wall alone; leave --mtmd out")
        args.threads = 1
    folder = args.folder / args.tower
    make(folder, args.tower, args.side)
    from PIL import Image

    shown = np.random.default_rng(0).integers(256, size=(args.side, args.side, 3), dtype=np.uint8)
    Image.fromarray(shown).save(folder / f"{args.side}.png")
    if args.prepare:
        return
    from infinilm import LLM
    from infinilm.bench.limits import measure_limits

    times: dict[str, list[float]] = {}
    settings: dict[str, Any] = {"dtype": "bfloat16", "kv_cache": "64MiB", "use_tqdm": False, "speculation": "off"}
    settings |= {"num_threads": args.threads, "max_image_pixels": 1 << 21}
    peaks = [measure_limits(args.threads, "bfloat16").flops_per_second]
    with LLM(folder / "model.gguf", mmproj=_projector(folder, args.side, "BF16"), **settings) as llm:
        patches = llm.tower.prepare([shown])
        num_patches = len(patches[0].pixels)
        llm.tower(patches)  # which has memory allocated; the others do so, too, before they count
        for _ in range(args.rounds):
            started = clock()
            llm.tower(patches)
            times.setdefault("infinilm bfloat16", []).append(clock() - started)
            for kind in ("BF16", "F16") if args.mtmd else ():
                took = llama_cpp(args.mtmd, folder, args.side, kind, args.threads)
                times.setdefault(f"llama.cpp {kind}", []).append(took)
            for dtype in ("bfloat16", "float32") if args.peers_python else ():
                command = [args.peers_python, __file__, str(args.folder), "--transformers", dtype]
                command += ["--tower", args.tower, "--side", str(args.side), "--threads", str(args.threads)]
                command += ["--cpu-time"] * args.cpu_time
                took = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])
                times.setdefault(f"transformers {dtype}", []).append(took)
    peaks.append(measure_limits(args.threads, "bfloat16").flops_per_second)
    medians = {engine: statistics.median(own) for engine, own in times.items()}
    own = medians.pop("infinilm bfloat16")
    rate = flops(TOWERS[args.tower], args.tower, num_patches) / own
    print(f"{args.tower}, {args.side} x {args.side} pixels, {num_patches} patches, {args.threads} threads")
    print(f"  infinilm bfloat16: {own:.2f} s, {rate / 1e9:.0f} Gflop/s, {100 * rate / max(peaks):.0f} % of the peak")
    for engine, seconds in medians.items():
        print(f"  {engine}: {seconds:.2f} s, {seconds / own:.2f} x")


if __name__ == "__main__":
    sys.exit(main())
