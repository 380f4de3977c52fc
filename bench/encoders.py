"""Encoders of real shapes beside their peers: passages a second, the time of a query, and how near vectors are.

    python -m bench.encoders FOLDER --peers-python PEERS/bin/python --shape bge-small [--rounds 5] [--passages 96]
    python -m bench.encoders FOLDER --peers-python PEERS/bin/python --shape bge-small --cosines 1000 [--longest 64]

FOLDER gets a checkpoint of the shape with random weights, once, made by the peers' environment: one with torch,
transformers and sentence-transformers. With onnxruntime and onnx its graph is compared, too, also in int8, and with
fastembed what that package makes of the graph; with llama-cpp-python (or, for cosines, xllamacpp) a GGUF file, for
which LLAMA_CPP names a checkout of llama.cpp, whose converter writes it. Each engine is a process of its own with
--threads threads, which stays loaded. In a round each of them makes the vectors of the same passages, of mixed lengths,
then of one query of 12 tokens, ten times. Ratios are taken within rounds; medians are printed.

`--cosines N`: instead, the cosines of N texts to sentence-transformers in float32; of Jina v2, which transformers does
not have, to llama.cpp. `--longest`: tokens of the longest passage.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "bge-small": {"kind": "Bert", "hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536},
    "bge-base": {"kind": "Bert", "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
    "xlm-r-base": {
        "kind": "XLMRoberta",
        "hidden_size": 768,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "vocab_size": 250002,
        "max_position_embeddings": 514,
        "type_vocab_size": 1,
        "pad_token_id": 1,
    },
    "modernbert-base": {
        "kind": "ModernBert",
        "hidden_size": 768,
        "num_attention_heads": 12,
        "intermediate_size": 1152,
        "num_hidden_layers": 22,
        "vocab_size": 50368,
    },
    "nomic-base": {
        "kind": "NomicBert",
        "hidden_size": 768,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "vocab_size": 30528,
        "max_position_embeddings": 2048,
    },
    "mpnet-base": {
        "kind": "MPNet",
        "hidden_size": 768,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "max_position_embeddings": 514,
    },
    "embedding-gemma": {
        "kind": "Gemma3Text",
        "hidden_size": 768,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "intermediate_size": 1152,
        "num_hidden_layers": 24,
        "vocab_size": 262144,
        "sliding_window": 512,
        "max_position_embeddings": 2048,
        "use_bidirectional_attention": True,
    },
    "roberta-base": {
        "kind": "Roberta",
        "hidden_size": 768,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "vocab_size": 50265,
        "max_position_embeddings": 514,
        "type_vocab_size": 1,
        "pad_token_id": 1,
    },
    "distilbert-base": {"kind": "DistilBert", "dim": 768, "n_heads": 12, "n_layers": 6, "hidden_dim": 3072},
    "eurobert-210m": {
        "kind": "EuroBert",
        "hidden_size": 768,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "vocab_size": 128256,
    },
    "jina-v3": {"kind": "JinaEmbeddingsV3", "hidden_size": 1024, "num_hidden_layers": 24},
    "jina-v2-base": {
        "kind": "JinaBert",
        "hidden_size": 768,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "vocab_size": 30528,
        "max_position_embeddings": 8192,
        "position_embedding_type": "alibi",
        "feed_forward_type": "geglu",
        "emb_pooler": "mean",
    },
    "qwen3-embedding-0.6b": {
        "kind": "Qwen3",
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "vocab_size": 151669,
    },
}
WITHOUT_PEERS_OF_PYTHON = ("jina-v2-base",)  # transformers has no class of these; llama.cpp has
ENGINES = ("infinilm float32", "infinilm bfloat16", "infinilm int8", "sentence-transformers float32")
ENGINES += ("sentence-transformers bfloat16", "onnxruntime float32", "onnxruntime int8", "fastembed float32")
ENGINES += ("llama.cpp float32", "llama.cpp bfloat16", "llama.cpp int8")
NUM_WORDS = 20000
QUERY_TOKENS, QUERIES = 12, 10
BATCH = 8  # texts that peers pad to one length
GRAPH_INPUTS = ("input_ids", "attention_mask")


def make(folder: Path, shape: str) -> None:
    """Write the checkpoint, its tokenizer and the files of sentence-transformers. Runs in the peers' environment."""
    import torch
    import transformers
    from sentence_transformers import SentenceTransformer, models as modules
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    from tools import jina_bert_v2

    values = dict(SHAPES[shape])
    kind = values.pop("kind")
    torch.manual_seed(0)
    made = jina_bert_v2.JinaBertModel if kind == "JinaBert" else getattr(transformers, f"{kind}Model")
    made(made.config_class(initializer_range=0.05, **values)).save_pretrained(folder / "plain")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{i}" for i in range(NUM_WORDS))]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", unk_token="[UNK]"
    )
    fast.model_input_names = ["input_ids", "attention_mask"]
    fast.save_pretrained(folder / "plain")
    if shape in WITHOUT_PEERS_OF_PYTHON:
        _write_modules(folder / "plain", values["hidden_size"])
        (folder / "plain").rename(folder / "model")
        return
    transformer = modules.Transformer(str(folder / "plain"), max_seq_length=512)
    pooling = modules.Pooling(transformer.get_word_embedding_dimension(), pooling_mode="mean")
    SentenceTransformer(modules=[transformer, pooling, modules.Normalize()]).save(str(folder / "model"))


def _write_modules(folder: Path, size: int) -> None:
    """The files of sentence-transformers for a model that it cannot open: the mean, scaled to length 1."""
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": size, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    config = json.loads((folder / "tokenizer_config.json").read_text())  # whose class llama.cpp's converter asks for
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": "BertTokenizer"}))


def texts_of(count: int, longest: int = 400) -> list[str]:
    """Passages of 16 tokens to the longest, most of them short: the same ones in each process."""
    found = []
    for i in range(count):
        length = 16 + (i * 7919 % 97) ** 2 * (longest - 16) // 97**2
        found.append(" ".join(f"w{(7919 * j + 104729 * i + 17) % NUM_WORDS}" for j in range(length - 2)))
    return found


def query() -> str:
    return " ".join(f"w{(31 * j) % NUM_WORDS}" for j in range(QUERY_TOKENS - 2))


def encoder_of(engine: str, folder: Path, threads: int) -> Callable[[list[str]], Any]:
    """What makes the vectors of texts, [num_texts, hidden_size]."""
    name, kind = engine.split()
    model = str(folder / "model")
    if name == "infinilm":
        from infinilm import LLM

        # What is not in linears is bfloat16 beside integers, too.
        settings = {"quantization": kind, "dtype": "bfloat16"} if kind.startswith("int") else {"dtype": kind}
        llm = LLM(model, num_threads=threads, use_tqdm=False, **settings)
        return lambda texts: llm.embed(texts, use_tqdm=False)
    if name == "sentence-transformers":
        import torch
        from sentence_transformers import SentenceTransformer

        torch.set_num_threads(threads)
        peer = SentenceTransformer(model, device="cpu", model_kwargs={"dtype": getattr(torch, kind)})
        # The best of the three sizes of batches that were tried: 8, 32 and 64.
        return lambda texts: peer.encode(texts, batch_size=BATCH, show_progress_bar=False, convert_to_numpy=True)
    if name == "llama.cpp":
        return _llama(folder / "model", kind, threads)
    path = folder / "model" / "model.onnx"
    if not path.exists():
        _export(path)
    if name == "fastembed":
        return _fastembed(path, threads)
    return _graph(_quantized(path) if kind == "int8" else path, threads)


def _export(path: Path) -> None:
    """Write the model as a graph with the fusions of onnxruntime: attention, GELU and norms."""
    import torch
    from onnxruntime.transformers.optimizer import optimize_model
    from sentence_transformers import SentenceTransformer

    peer = SentenceTransformer(str(path.parent), device="cpu")
    tokenizer, model = peer.tokenizer, peer[0].auto_model
    inputs = dict(tokenizer(["w1 w2 w3", "w4"], padding=True, return_tensors="pt"))
    sizes = {0: torch.export.Dim("texts"), 1: torch.export.Dim("tokens")}

    class States(torch.nn.Module):  # type: ignore[misc]
        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            return model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state

    model.config._attn_implementation = "eager"
    program = torch.onnx.export(
        States(),
        tuple(inputs[name] for name in GRAPH_INPUTS),
        input_names=list(GRAPH_INPUTS),
        dynamic_shapes=(sizes, sizes),
        dynamo=True,
    )
    program.save(str(path))
    config = model.config
    made = optimize_model(str(path), "bert", num_heads=config.num_attention_heads, hidden_size=config.hidden_size)
    made.save_model_to_file(str(path))
    print(made.get_fused_operator_statistics(), file=sys.stderr)


def _quantized(path: Path) -> Path:
    """The graph with linears of int8, whose inputs are rounded as they come."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    made = path.with_name("model-int8.onnx")
    if not made.exists():
        quantize_dynamic(str(path), str(made), weight_type=QuantType.QInt8, per_channel=True)
    return made


def _fastembed(path: Path, threads: int) -> Callable[[list[str]], Any]:
    """The graph as fastembed runs it, with its own tokenizing, padding and pooling."""
    import numpy as np
    from fastembed import TextEmbedding
    from fastembed.common.model_description import ModelSource, PoolingType

    name, size = "bench/shape", json.loads((path.parent / "config.json").read_text())["hidden_size"]
    TextEmbedding.add_custom_model(name, PoolingType.MEAN, True, ModelSource(hf=name), size, model_file=path.name)
    peer = TextEmbedding(name, specific_model_path=str(path.parent), threads=threads)
    return lambda texts: np.array(list(peer.embed(texts, batch_size=BATCH)))


def _graph(path: Path, threads: int) -> Callable[[list[str]], Any]:
    """The graph by onnxruntime; batches sorted by length."""
    import numpy as np
    import onnxruntime
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path.parent / "tokenizer.json"))
    tokenizer.enable_padding()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def encode(texts: list[str]) -> Any:
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        vectors: list[Any] = [None] * len(texts)
        for begin in range(0, len(texts), BATCH):
            rows = order[begin : begin + BATCH]
            encoded = tokenizer.encode_batch([texts[i] for i in rows])
            inputs = [np.array(x, np.int64) for x in zip(*((e.ids, e.attention_mask) for e in encoded), strict=True)]
            states = session.run(None, dict(zip(GRAPH_INPUTS, inputs, strict=True)))[0]
            mask = inputs[1][..., None]
            pooled = (states * mask).sum(1) / mask.sum(1)
            for i, vector in zip(rows, pooled / np.linalg.norm(pooled, axis=1, keepdims=True), strict=True):
                vectors[i] = vector
        return np.array(vectors)

    return encode


def _convert(checkout: Path, model: Path, path: Path, kind: str) -> None:
    """Write a GGUF file. The converter knows tokenizers by what they make of a text; that of a benchmark is none."""
    code = "import sys; import conversion.base; conversion.base.TextModel.get_vocab_base_pre = lambda *_: 'default'; "
    code += "import convert_hf_to_gguf; convert_hf_to_gguf.main()"
    environment = {**os.environ, "PYTHONPATH": f"{checkout}:{checkout / 'gguf-py'}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-c", code, str(model), "--outfile", str(path), "--outtype", kind]
    subprocess.run(command, check=True, env=environment, stdout=sys.stderr)


def _llama(model: Path, kind: str, threads: int) -> Callable[[list[str]], Any]:
    """The model as a GGUF file, made by the converter of the checkout of llama.cpp that LLAMA_CPP names; int8: Q8_0."""
    import numpy as np

    path = model / f"model-{kind}.gguf"
    if not path.exists():
        _convert(
            Path(os.environ["LLAMA_CPP"]), model, path, {"float32": "f32", "bfloat16": "bf16", "int8": "q8_0"}[kind]
        )
    try:
        from llama_cpp import LLAMA_POOLING_TYPE_MEAN, Llama
    except ImportError:
        return _xllama(path, threads)
    peer = Llama(
        str(path),
        embedding=True,
        pooling_type=LLAMA_POOLING_TYPE_MEAN,
        n_threads=threads,
        n_threads_batch=threads,
        n_ctx=512,
        n_batch=512,
        n_ubatch=512,
        verbose=False,
    )
    # One after the other: three times as fast as several in a batch, whose tokens it scores with those of all.
    return lambda texts: np.array([peer.embed(text, normalize=True) for text in texts])


def _xllama(path: Path, threads: int) -> Callable[[list[str]], Any]:
    """The file by xllamacpp, whose wheel needs no compiler and has AVX2 alone: for cosines, not for times."""
    import numpy as np
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.embedding = str(path), True
    params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.n_ctx = params.n_batch = params.n_ubatch = 512
    params.n_parallel, params.cpuparams.n_threads, params.cpuparams_batch.n_threads = 1, threads, threads
    server = xllamacpp.Server(params)

    def encode(texts: list[str]) -> Any:
        answers = [server.handle_embeddings({"input": text, "model": path.stem}) for text in texts]
        return np.array([answer["data"][0]["embedding"] for answer in answers])

    return encode


def serve(engine: str, folder: Path, threads: int) -> None:
    """Answer {"passages": n} and {"query": true} with seconds, {"vectors": n} with a file, a JSON object a line."""
    import numpy as np

    encode = encoder_of(engine, folder, threads)
    encode(texts_of(8))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        if "vectors" in command:
            path = folder / f"{engine.replace(' ', '-')}.npy"
            np.save(path, np.asarray(encode(texts_of(command["vectors"], command["longest"])), np.float32))
            print(json.dumps({"path": str(path)}), flush=True)
            continue
        texts = texts_of(command["passages"], command["longest"]) if "passages" in command else [query()]
        seconds = []
        for _ in range(1 if "passages" in command else QUERIES):
            started = time.perf_counter()
            encode(texts)
            seconds.append(time.perf_counter() - started)
        print(json.dumps({"seconds": statistics.median(seconds)}), flush=True)


class Worker:
    """An engine in a process."""

    def __init__(self, engine: str, folder: Path, python: str, threads: int) -> None:
        command = [python, "-m", "bench.encoders", str(folder), "--serve", engine, "--threads", str(threads)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TRANSFORMERS_VERBOSITY": "error"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.ask()

    def ask(self, **command: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        if command:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise SystemExit(f"an engine ended with {self._process.wait()}")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--peers-python", default=sys.executable)
    parser.add_argument("--shape", choices=SHAPES, default="bge-small")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--passages", type=int, default=96)
    parser.add_argument("--longest", type=int, default=400)
    parser.add_argument("--cosines", type=int, default=0)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--make", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.folder, options.threads)
        return
    folder = options.folder if options.make else options.folder / options.shape
    if options.make:
        make(folder, options.shape)
        return
    if not (folder / "model" / "modules.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = [options.peers_python, "-m", "bench.encoders", str(folder), "--make", "--shape", options.shape]
        subprocess.run(command, check=True)
    python = {engine: sys.executable if engine.startswith("infinilm") else options.peers_python for engine in ENGINES}
    if options.cosines:
        compare(folder, options, python)
        return
    workers = {engine: Worker(engine, folder, python[engine], options.threads) for engine in options.engines}
    found: dict[str, list[tuple[float, float]]] = {engine: [] for engine in workers}
    for _ in range(options.rounds):
        for engine, worker in workers.items():
            passages = worker.ask(passages=options.passages, longest=options.longest)["seconds"]
            found[engine].append((passages, worker.ask(query=True)["seconds"]))
    for worker in workers.values():
        worker.close()
    first = next(iter(found))
    print(f"| {options.shape} | passages/s | time, {first} 1 | query ms | time, {first} 1 |\n|---|---|---|---|---|")
    for engine, seconds in found.items():
        ratios = [[own[i] / base[i] for own, base in zip(seconds, found[first], strict=True)] for i in (0, 1)]
        rate = options.passages / statistics.median(own for own, _ in seconds)
        time_of_query = 1e3 * statistics.median(own for _, own in seconds)
        told = [f"{statistics.median(each):.2f} ({min(each):.2f} .. {max(each):.2f})" for each in ratios]
        print(f"| {engine} | {rate:.1f} | {told[0]} | {time_of_query:.2f} | {told[1]} |")


def compare(folder: Path, options: argparse.Namespace, python: dict[str, str]) -> None:
    """Print the cosines of all engines to sentence-transformers in float32, or to llama.cpp."""
    import numpy as np

    vectors = {}
    reference = "llama.cpp float32" if options.shape in WITHOUT_PEERS_OF_PYTHON else "sentence-transformers float32"
    for engine in dict.fromkeys([reference, *options.engines]):
        worker = Worker(engine, folder, python[engine], options.threads)
        vectors[engine] = np.load(worker.ask(vectors=options.cosines, longest=options.longest)["path"]).astype(
            np.float64
        )
        worker.close()
    wanted = vectors[reference]
    for engine, got in vectors.items():
        lengths = np.linalg.norm(got, axis=1) * np.linalg.norm(wanted, axis=1)
        cosines = (got * wanted).sum(1) / lengths
        print(f"{options.shape} {engine}: least cosine {cosines.min():.8f}, mean {cosines.mean():.8f}")


if __name__ == "__main__":
    main()
