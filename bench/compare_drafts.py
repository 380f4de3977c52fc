"""Drafts beside llama.cpp's own, on the same files: tokens a second of answers that are code edits.

    python -m bench.compare_drafts FOLDER --llama LLAMA.CPP/build/bin [--types BF16,Q8_0,Q4_0] [--edits 4] [--threads 2]

A model with random weights writes nothing that anyone could draft, so these write the edits of bench.speculation. They
are of GPT-2's architecture, which adds a learned vector of each position to what the first layer reads. Sublayers add
nothing, since their last linears are zero, and are computed all the same. Row t of the lm_head is the sum of the
vectors of those positions whose next token is t. So each answer is a text with all its repetitions, whatever the
engine, and what an engine drafts is right or wrong as it would be in that text. The draft model is a smaller one of
this kind, to whose lm_head a part of the positions tells a wrong token.

FOLDER gets a file of each type, in which positions and lm_head are replaced for each text. Drafts of infinilm are those
of its defaults, or of the draft model; llama.cpp looks up by llama-lookup and by each kind of n-grams that
llama-speculative-simple has, and drafts with the same draft model, in its default number of tokens and in others. What
llama.cpp writes is compared with the answer, too. Told are tokens a second of the decoding alone, and of each source of
llama.cpp's drafts the best setting. Needs the packages gguf and mistral-common.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.shape_files import vocabulary
from bench.speculation import Text, edits, tekken
from infinilm import LLM

VOCAB_SIZE, NUM_POSITIONS, HEAD_DIM = 65536, 2048, 128
TARGET = {"hidden": 2048, "layers": 20, "inner": 8192}  # 1.0e9 weights in layers, 1.3e8 in the lm_head
DRAFT = {"hidden": 768, "layers": 6, "inner": 3072}  # 4.2e7 and 5.0e7
SIMPLE, N_GRAMS = "llama-speculative-simple", ["--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "16"]
SOURCES = {  # arguments of llama.cpp's programs, by what drafts; the best of the settings counts
    "lookup": [
        ["llama-lookup", "--spec-draft-n-max", "8"],
        ["llama-lookup", "--spec-draft-n-max", "16"],
        [SIMPLE, "--spec-type", "ngram-simple"],
        [SIMPLE, "--spec-type", "ngram-simple", *N_GRAMS],
        [SIMPLE, "--spec-type", "ngram-map-k", *(a.replace("simple", "map-k") for a in N_GRAMS)],
        [SIMPLE, "--spec-type", "ngram-mod"],
    ],
    "draft model": [[SIMPLE, "--spec-type", "draft-simple", "--spec-draft-n-max", n] for n in ("3", "5", "8")],
}


def directions(hidden: int) -> npt.NDArray[np.float32]:
    """Vectors of positions, [NUM_POSITIONS, hidden], any two of which are nearly orthogonal."""
    signs = np.random.default_rng(0).integers(2, size=(NUM_POSITIONS, hidden), dtype=np.int8)
    return (2 * signs - 1).astype(np.float32)


def make(path: Path, shape: dict[str, int], type_name: str, used: set[int]) -> None:
    """Write a model whose `used` tokens are words that texts of llama.cpp's programs name, as ``<17>``."""
    import gguf

    kind = gguf.GGMLQuantizationType[type_name]
    hidden, inner = shape["hidden"], shape["inner"]
    numbers = np.random.default_rng(1).standard_normal(1 << 22, np.float32)
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_context_length(NUM_POSITIONS)
    writer.add_embedding_length(hidden)
    writer.add_block_count(shape["layers"])
    writer.add_feed_forward_length(inner)
    writer.add_head_count(hidden // HEAD_DIM)
    writer.add_layer_norm_eps(1e-5)
    words = vocabulary(VOCAB_SIZE)
    tokens, types = words["tokenizer.ggml.tokens"], words["tokenizer.ggml.token_type"]
    for token in used:
        tokens[token], types[token] = f"<{token}>", gguf.TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(words["tokenizer.ggml.merges"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
    made: dict[tuple[int, int], Any] = {}  # by the shape: the same numbers in all layers

    def matrix(name: str, rows: int, columns: int, zero: bool = False) -> None:
        if (rows, columns) not in made:
            values = np.resize(numbers, (rows, columns)) * np.float32(columns**-0.5)
            made[rows, columns] = gguf.quants.quantize(values, kind)
        stored = made[rows, columns]
        writer.add_tensor(f"{name}.weight", np.zeros_like(stored) if zero else stored, raw_dtype=kind)

    def vector(name: str, size: int, value: float) -> None:
        writer.add_tensor(name, np.full(size, value, np.float32))

    matrix("token_embd", VOCAB_SIZE, hidden, zero=True)
    writer.add_tensor("position_embd.weight", directions(hidden))
    matrix("output", VOCAB_SIZE, hidden, zero=True)
    vector("output_norm.weight", hidden, 1)
    vector("output_norm.bias", hidden, 0)
    for i in range(shape["layers"]):
        for name, rows, columns, zero in (
            ("attn_qkv", 3 * hidden, hidden, False), ("attn_output", hidden, hidden, True),
            ("ffn_up", inner, hidden, False), ("ffn_down", hidden, inner, True),
        ):  # fmt: skip
            matrix(f"blk.{i}.{name}", rows, columns, zero)
            vector(f"blk.{i}.{name}.bias", rows, 0)
        for name in ("attn_norm", "ffn_norm"):
            vector(f"blk.{i}.{name}.weight", hidden, 1)
            vector(f"blk.{i}.{name}.bias", hidden, 0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def teach(path: Path, text: Text, right: float = 1.0) -> None:
    """Replace the lm_head by that of one text, of whose tokens a share is `right` and the others are another one."""
    import gguf

    (output,) = (t for t in gguf.GGUFReader(path, "r+").tensors if t.name == "output.weight")
    tokens = np.array(text.prompt + text.answer)
    hidden = int(output.shape[0])
    wrong = np.random.default_rng(2).random(len(tokens) - 1) >= right
    following = np.where(wrong, np.roll(tokens, 7)[1:], tokens[1:])
    rows, index = np.unique(following, return_inverse=True)
    head = np.zeros((len(rows), hidden), np.float32)
    np.add.at(head, index, directions(hidden)[: len(following)])
    output.data[:] = 0
    stored = gguf.quants.quantize(head * np.float32(hidden**-0.5), output.tensor_type)
    output.data[rows] = stored.view(output.data.dtype)


def ours(path: Path, text: Text, threads: int, speculation: Any) -> float:
    """Seconds of a token behind the first one."""
    with LLM(path, num_threads=threads, max_model_len=NUM_POSITIONS, use_tqdm=False, speculation=speculation) as llm:
        sampling: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "use_tqdm": False}
        llm.generate([text.prompt[:8]], max_tokens=4, **sampling)
        (output,) = llm.generate([text.prompt], max_tokens=len(text.answer), **sampling)
        if list(output.outputs[0].token_ids) != text.answer:
            raise SystemExit("infinilm has written another answer")
        assert output.metrics is not None
        times = output.metrics.token_times
        return (times[-1] - times[0]) / (len(times) - 1)


def llama_cpp(binaries: Path, arguments: list[str], path: Path, draft: Path, text: Text, threads: int) -> float:
    """Seconds of a token behind the prompt, as the program tells them."""
    command = [str(binaries / arguments[0]), *arguments[1:], "-m", str(path), "-t", str(threads), "-c", "2048"]
    command += ["-p", "".join(f"<{token}>" for token in text.prompt), "-n", str(len(text.answer)), "--temp", "0"]
    command += ["-md", str(draft), "-td", str(threads)] if "draft-simple" in arguments else []
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    said = done.stdout + done.stderr
    found = re.search(r"decoded +(\d+) tokens in +([\d.]+) seconds", said)
    if not found:
        raise SystemExit(f"{' '.join(arguments)}: llama.cpp said no time:\n{said[-3000:]}")
    written = [int(token) for token in re.findall(r"<(\d+)>", done.stdout)][len(text.prompt) :]
    if written[: len(text.answer) - 1] != text.answer[: len(written)][: len(text.answer) - 1]:
        raise SystemExit(f"{' '.join(arguments)}: llama.cpp has written another answer")
    return float(found[2]) / int(found[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--llama", type=Path, required=True, metavar="FOLDER", help="programs of llama.cpp")
    parser.add_argument("--types", default="BF16,Q8_0,Q4_0")
    parser.add_argument("--edits", type=int, default=4)
    parser.add_argument("--longest", type=int, default=250, help="tokens of an answer")
    parser.add_argument("--right", type=float, default=0.75, help="share of the draft model's tokens")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    texts = edits(tekken(), args.edits, args.longest, VOCAB_SIZE)
    used = {token for text in texts for token in (*text.prompt, *text.answer)}
    print(f"{len(texts)} edits, {sum(len(text.answer) for text in texts)} tokens of answers, {args.threads} threads")
    for type_name in args.types.split(","):
        target, draft = args.folder / f"target-{type_name}.gguf", args.folder / f"draft-{type_name}.gguf"
        make(target, TARGET, type_name, used)
        make(draft, DRAFT, type_name, used)
        model = {"method": "draft_model", "model": str(draft)}
        times: dict[str, list[float]] = {}
        for text in texts:
            teach(target, text)
            teach(draft, text, args.right)
            for name, speculation in (("off", "off"), ("lookup", "auto"), ("draft model", model)):
                times.setdefault(f"infinilm {name}", []).append(ours(target, text, args.threads, speculation))
            for source, settings in SOURCES.items():
                for arguments in settings:
                    took = llama_cpp(args.llama, arguments, target, draft, text, args.threads)
                    name = " ".join(arguments)
                    times.setdefault(f"llama.cpp {source}: {name}", []).append(took)
        lengths = [len(text.answer) for text in texts]
        rates = {name: sum(lengths) / np.dot(lengths, own) for name, own in times.items()}
        print(type_name)
        for name, rate in rates.items():
            print(f"  {name}: {rate:.1f} tokens/s, {rate / rates['infinilm off']:.2f} x infinilm off")
        for source in SOURCES:
            best = max(rate for name, rate in rates.items() if name.startswith(f"llama.cpp {source}"))
            print(f"  {source}: infinilm {rates[f'infinilm {source}'] / best:.2f} x the best of llama.cpp")


if __name__ == "__main__":
    main()
