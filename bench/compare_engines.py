"""One engine in a process of its own, driven over pipes: what compare.py starts for each.

    python -m bench.compare_engines probe                  # versions of the packages that are installed
    python -m bench.compare_engines KIND '{"model": ..}'   # serves commands, a JSON object a line

A command is {"prefill": tokens} or {"requests": [[prompt tokens, new tokens], ..]}, answered with {"seconds": ..}, or
{"decode": [batch, context], "steps": n}, answered with {"step_seconds": [..]}; an answer may be {"error": ..}. Prompts
are random token ids, tokens are chosen greedily, nothing ends a sequence. Sequences stay where they are between two
commands, so that a prompt is computed once and each command goes on from where the last one ended.

Peers run in an environment of their own: at the top only the standard library is imported.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOM = 512  # tokens that a sequence may grow by before it begins anew
PACKAGES = {
    "llama.cpp": "llama_cpp_python",
    "ctranslate2": "ctranslate2",
    "openvino": "openvino",
    "onnxruntime-genai": "onnxruntime_genai",
    "transformers": "transformers",
}
MODULES = {"llama_cpp_python": "llama_cpp"}
Key = tuple[int, int]  # sequences, and the tokens each began with


def prompt(vocab_size: int, length: int, sequence: int = 0) -> list[int]:
    return [100 + (7919 * i + 104729 * sequence + 17) % (vocab_size - 200) for i in range(length)]


def file_bytes(folder: str, suffix: str) -> int:
    return sum(path.stat().st_size for path in Path(folder).iterdir() if path.name.endswith(suffix))


class Engine:
    """An engine has `version`, `weight_bytes`, and these: `prefill`, `begin` and `step`; some have `requests`."""

    version: str
    weight_bytes: int
    settings: dict[str, Any]

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.clock = time.process_time if settings["cpu_time"] else time.perf_counter
        self.vocab_size: int = settings["vocab_size"]
        self.lengths: dict[Key, int] = {}
        self.load()

    def load(self) -> None:
        raise NotImplementedError

    def prefill(self, ids: list[int]) -> None:
        """One prompt to its first new token; nothing is kept."""
        raise NotImplementedError

    def begin(self, key: Key, prompts: list[list[int]]) -> None:
        """Compute prompts and keep their sequences under `key`, instead of what was there."""
        raise NotImplementedError

    def step(self, key: Key, length: int) -> None:
        """One token for each sequence of `key`, whose cache has `length` tokens."""
        raise NotImplementedError

    def requests(self, prompts: list[list[int]], num_tokens: list[int]) -> None:
        """So many new tokens for each prompt, as the engine serves requests that are there at once."""
        raise NotImplementedError

    def decode(self, key: Key, steps: int) -> list[float]:
        batch, context = key
        if self.lengths.get(key, context + ROOM) + steps > context + ROOM:
            self.begin(key, [prompt(self.vocab_size, context, i) for i in range(batch)])
            self.lengths[key] = context
        seconds = []
        for _ in range(steps):
            started = self.clock()
            self.step(key, self.lengths[key])
            seconds.append(self.clock() - started)
            self.lengths[key] += 1
        return seconds

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        if "prefill" in command:
            ids = prompt(self.vocab_size, command["prefill"])
            started = self.clock()
            self.prefill(ids)
            return {"seconds": self.clock() - started}
        if "requests" in command:
            prompts = [prompt(self.vocab_size, length, i) for i, (length, _) in enumerate(command["requests"])]
            started = self.clock()
            self.requests(prompts, [num_tokens for _, num_tokens in command["requests"]])
            return {"seconds": self.clock() - started}
        batch, context = command["decode"]
        return {"step_seconds": self.decode((batch, context), command["steps"])}


class Infinilm(Engine):
    """`InferEngine` stepped by hand over a paged cache, as the others are stepped by hand.

    Where the model keeps states, the rows of a static cache hold the sequences of one key at a time.
    """

    block_size = 16

    def load(self) -> None:
        import infinilm
        from infinilm.planning.memory import plan_model

        self.infinilm = infinilm
        quantization = self.settings["quantization"]
        plan = plan_model(self.settings["model"], quantization=quantization, device="cpu", max_model_len=4096)
        config = plan.config
        config.dtype = plan.dtype
        self.tables: dict[Key, list[list[int]]] = {}
        num_blocks = 0
        for batch, context in [(1, self.settings["prefill"]), *map(tuple, self.settings["decodes"])]:
            blocks = -(-(context + ROOM) // self.block_size)
            begins = range(num_blocks, num_blocks + batch * blocks, blocks)
            self.tables[batch, context] = [list(range(begin, begin + blocks)) for begin in begins]
            num_blocks += batch * blocks
        self.in_rows: Key | None = None
        self.has_rows = plan.memory.num_states > 0
        if self.has_rows:
            longest = max(context for _, context in self.tables) + ROOM
            sequences = max(batch for batch, _ in self.tables)
            cache = infinilm.StaticKVCacheConfig(sequences, longest, dtype=plan.memory.kv_cache_dtype)
        else:
            cache = infinilm.PagedKVCacheConfig(
                num_blocks=num_blocks, block_size=self.block_size, dtype=plan.memory.kv_cache_dtype
            )
        self.engine = infinilm.InferEngine(config, device_type="cpu", cache_config=cache, quantization=quantization)
        self.engine.load_weights(self.settings["model"], use_tqdm=False)
        self.last: dict[Key, Any] = {}
        self.llm: Any = None
        self.weight_bytes = plan.memory.weight_bytes
        self.version = f"infinilm {infinilm.__version__}, {infinilm._core.selected_cpu_isa()}"

    def forward(self, key: Key, tokens: list[int], lengths: list[int], cached: int) -> Any:
        of_cache: dict[str, Any] = {"input_ids": [tokens], "block_tables": self.tables[key]}
        if self.has_rows:  # all of them are as long
            of_cache = {"input_ids": [tokens[i : i + lengths[0]] for i in range(0, len(tokens), lengths[0])]}
        fields = self.engine.Input(
            **of_cache, input_lengths=lengths, cache_lengths=[cached] * len(lengths), temperature=0.0
        )
        return self.engine.forward(fields).output_ids.numpy()

    def decode(self, key: Key, steps: int) -> list[float]:
        if self.has_rows and self.in_rows != key:
            self.lengths.pop(key, None)
        return super().decode(key, steps)

    def prefill(self, ids: list[int]) -> None:
        self.in_rows = None
        self.forward((1, self.settings["prefill"]), ids, [len(ids)], 0)

    def begin(self, key: Key, prompts: list[list[int]]) -> None:
        self.in_rows = key
        self.last[key] = self.forward(key, list(itertools.chain(*prompts)), [len(ids) for ids in prompts], 0)

    def step(self, key: Key, length: int) -> None:
        self.last[key] = self.forward(key, self.last[key].tolist(), [1] * key[0], length)

    def requests(self, prompts: list[list[int]], num_tokens: list[int]) -> None:
        if self.llm is None:
            # The prompts come again in each round: none of them may be in the cache.
            self.llm = self.infinilm.LLM(
                self.settings["model"],
                device="cpu",
                quantization=self.settings["quantization"],
                enable_prefix_caching=False,
                max_model_len=4096,
                max_num_seqs=32,
                speculation="off",
            )
        params = [self.infinilm.SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in num_tokens]
        for output, wanted in zip(self.llm.generate(prompts, params), num_tokens, strict=True):
            if len(output.outputs[0].token_ids) != wanted:
                raise RuntimeError(f"{len(output.outputs[0].token_ids)} of {wanted} tokens came")


def open_llama_cpp() -> Any:
    """The module llama_cpp, silent. LLAMA_CPP_LIB_PATH, its own variable, may name a folder of prebuilt libraries."""
    import ctypes

    import llama_cpp

    open_llama_cpp.silent = llama_cpp.llama_log_callback(lambda *_: None)  # type: ignore[attr-defined]
    llama_cpp.llama_log_set(open_llama_cpp.silent, None)  # type: ignore[attr-defined]
    if folder := os.environ.get("LLAMA_CPP_LIB_PATH"):  # such builds have a library for each kind of CPU
        ctypes.CDLL(f"{folder}/libggml.so").ggml_backend_load_all_from_path(folder.encode())
    llama_cpp.llama_backend_init()
    return llama_cpp


class LlamaCpp(Engine):
    """llama_decode called directly, without sampler and tokenizer; KV cache and repacking as it chooses."""

    def load(self) -> None:
        import numpy

        self.np, self.llama = numpy, open_llama_cpp()
        self.model = self.llama.llama_model_load_from_file(
            self.settings["model"].encode(), self.llama.llama_model_default_params()
        )
        if not self.model:
            raise RuntimeError("the model did not load")
        self.contexts: dict[Key, tuple[Any, Any]] = {}
        self.last: dict[Key, list[int]] = {}
        self.weight_bytes = self.llama.llama_model_size(self.model)
        self.version = f"llama-cpp-python {self.llama.__version__}"

    def context(self, key: Key, batch: int = 0) -> tuple[Any, Any]:
        """A context, emptied, and a batch of so many tokens; 0: as many as are best for steps of its sequences."""
        if key not in self.contexts:
            params = self.llama.llama_context_default_params()
            params.n_seq_max = key[0]
            params.n_ctx = key[0] * -(-(key[1] + ROOM) // 256) * 256
            params.n_batch = params.n_ubatch = batch or (512 if key[0] == 1 else 64)
            params.kv_unified = batch > 0  # else it would cut batches in which not all sequences take part
            params.n_threads = params.n_threads_batch = self.settings["threads"]
            context = self.llama.llama_init_from_model(self.model, params)
            if not context:
                raise RuntimeError("no context could be made")
            self.contexts[key] = context, self.llama.llama_batch_init(params.n_batch, 0, 1)
        context, items = self.contexts[key]
        self.llama.llama_memory_clear(self.llama.llama_get_memory(context), True)
        return context, items

    def run(self, key: Key, items: list[tuple[int, int, int, bool]]) -> list[int]:
        """Items (token, position, sequence, whether its logits are wanted); the best tokens of those wanted."""
        context, batch = self.contexts[key]
        batch.n_tokens = len(items)
        for i, (token, position, sequence, wanted) in enumerate(items):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
            batch.seq_id[i][0] = sequence
        if code := self.llama.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode failed with {code}")
        logits = (self.llama.llama_get_logits_ith(context, i) for i, item in enumerate(items) if item[3])
        return [int(self.np.ctypeslib.as_array(row, (self.vocab_size,)).argmax()) for row in logits]

    def prefill(self, ids: list[int]) -> None:
        self.begin((1, self.settings["prefill"]), [ids])

    def begin(self, key: Key, prompts: list[list[int]]) -> None:
        self.context(key)
        most = 512 if key[0] == 1 else 64
        items = [(token, i, s, i == len(ids) - 1) for s, ids in enumerate(prompts) for i, token in enumerate(ids)]
        self.last[key] = []
        for i in range(0, len(items), most):
            self.last[key] += self.run(key, items[i : i + most])

    def step(self, key: Key, length: int) -> None:
        self.last[key] = self.run(key, [(token, length, s, True) for s, token in enumerate(self.last[key])])

    def requests(self, prompts: list[list[int]], num_tokens: list[int]) -> None:
        """As its server does: each batch has the next token of all that decode, and prompts as far as there is room."""
        key, most = (len(prompts), max(map(len, prompts))), 512
        self.context(key, batch=most)
        tokens = [list(ids) for ids in prompts]  # of each sequence; those up to done[s] are in its cache
        done = [0] * len(prompts)
        ends = [len(ids) + wanted - 1 for ids, wanted in zip(prompts, num_tokens, strict=True)]
        while running := [s for s in range(len(prompts)) if done[s] < ends[s]]:
            items: list[tuple[int, int, int, bool]] = []
            for s in sorted(running, key=lambda s: len(tokens[s]) - done[s]):
                for i in range(done[s], min(len(tokens[s]), done[s] + most - len(items))):
                    items.append((tokens[s][i], i, s, i == len(tokens[s]) - 1))
                    done[s] = i + 1
            best = iter(self.run(key, items))
            for _, _, s, wanted in items:
                if wanted:
                    tokens[s].append(next(best))


class LlamaBench(Engine):
    """A build's `llama-batched-bench`: each piece of work is a process of its own, which loads the file first.

    Its clock has milliseconds. It tells the time of all steps, so a step is their mean, and there are no requests.
    """

    def load(self) -> None:
        self.program: list[str] = self.settings["program"]
        self.weight_bytes = os.path.getsize(self.settings["model"])
        self.version = " ".join(self.program)
        self.run(1, 1, 1)

    def run(self, batch: int, context: int, steps: int) -> dict[str, float]:
        """The row of its table: seconds of the prompts under "T_PP s", of the steps under "T_TG s"."""
        cache = batch * -(-(context + steps) // 256) * 256
        options = {"-m": self.settings["model"], "-t": self.settings["threads"], "-c": cache}
        options |= {"-npp": context, "-ntg": steps, "-npl": batch}
        command = [*self.program, *(str(part) for option in options.items() for part in option)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = (done.stdout + done.stderr).strip().splitlines()
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
        if done.returncode or len(rows) != 3:  # names of columns, a rule, and the one row
            raise RuntimeError(f"{self.program[0]} ended with {done.returncode}: {lines[-1] if lines else 'no word'}")
        return dict(zip(rows[0], map(float, rows[2]), strict=True))

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        if "prefill" in command:
            return {"seconds": self.run(1, command["prefill"], 1)["T_PP s"]}
        (batch, context), steps = command["decode"], command["steps"]
        return {"step_seconds": [self.run(batch, context, steps)["T_TG s"] / steps]}


class CTranslate2(Engine):
    """generate_batch. There is no call for a step: callbacks give the times, and each command computes its prompts."""

    def load(self) -> None:
        import ctranslate2

        self.generator = ctranslate2.Generator(
            self.settings["model"], compute_type="int8", intra_threads=self.settings["threads"], inter_threads=1
        )
        self.weight_bytes = file_bytes(self.settings["model"], "model.bin")
        self.version = f"ctranslate2 {ctranslate2.__version__}"

    def ends(self, prompts: list[list[int]], num_tokens: int) -> list[float]:
        """When each of the tokens was there for every sequence."""
        at: list[list[float]] = [[] for _ in prompts]
        self.generator.generate_batch(
            [[f"t{i}" for i in ids] for ids in prompts],
            max_length=num_tokens,
            min_length=num_tokens,
            beam_size=1,
            sampling_topk=1,
            include_prompt_in_result=False,
            callback=lambda step: bool(at[step.batch_id].append(self.clock())),
        )
        return [max(times) for times in zip(*at, strict=True)]

    def prefill(self, ids: list[int]) -> None:
        self.ends([ids], 1)

    def decode(self, key: Key, steps: int) -> list[float]:
        ends = self.ends([prompt(self.vocab_size, key[1], i) for i in range(key[0])], steps + 1)
        return [b - a for a, b in itertools.pairwise(ends)]


class OpenVino(Engine):
    """The stateful model that openvino-genai runs, called step by step; precisions and KV cache as it chooses."""

    def load(self) -> None:
        import numpy
        import openvino

        self.np = numpy
        core = openvino.Core()
        model = core.read_model(f"{self.settings['model']}/openvino_model.xml")
        self.take_last(model)
        options = {
            "INFERENCE_NUM_THREADS": self.settings["threads"],
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": 1,
        }
        self.compiled = core.compile_model(model, "CPU", options)
        self.inputs = {name for port in self.compiled.inputs for name in port.get_names()}
        self.requests: dict[Key, Any] = {}
        self.last: dict[Key, Any] = {}
        self.weight_bytes = file_bytes(self.settings["model"], "openvino_model.bin")
        self.version = f"openvino {openvino.__version__.split('-')[0]}"

    def take_last(self, model: Any) -> None:
        """Logits of the last position alone, as openvino-genai changes the model before it compiles it."""
        from openvino import opset13

        node = model.output("logits").get_node()
        while node.get_type_name() != "MatMul":
            node = node.input_value(0).get_node()
        begin, end, one = (opset13.constant(self.np.array([value], self.np.int64)) for value in (-1, 2**31 - 1, 1))
        last = opset13.slice(node.input_value(0), begin, end, one, one)
        node.input(0).replace_source_output(last.output(0))

    def run(self, key: Key, ids: Any, cached: int) -> None:
        batch, length = ids.shape
        feeds = {
            "input_ids": ids,
            "attention_mask": self.np.ones((batch, cached + length), self.np.int64),
            "beam_idx": self.np.arange(batch, dtype=self.np.int32),
        }
        if "position_ids" in self.inputs:
            feeds["position_ids"] = self.np.tile(self.np.arange(cached, cached + length), (batch, 1))
        request = self.requests[key]
        request.infer(feeds, share_inputs=True)
        self.last[key] = request.get_tensor("logits").data[:, -1].argmax(-1)[:, None].astype(self.np.int64)

    def prefill(self, ids: list[int]) -> None:
        self.begin((1, self.settings["prefill"]), [ids])

    def begin(self, key: Key, prompts: list[list[int]]) -> None:
        if key not in self.requests:
            self.requests[key] = self.compiled.create_infer_request()
        self.requests[key].reset_state()
        self.run(key, self.np.array(prompts, self.np.int64), 0)

    def step(self, key: Key, length: int) -> None:
        self.run(key, self.last[key], length)


class OnnxRuntime(Engine):
    """onnxruntime-genai's Generator, greedy."""

    def load(self) -> None:
        import numpy
        import onnxruntime_genai

        self.np, self.genai = numpy, onnxruntime_genai
        path = Path(self.settings["model"]) / "genai_config.json"
        config = json.loads(path.read_text())
        config["model"]["decoder"].setdefault("session_options", {})["intra_op_num_threads"] = self.settings["threads"]
        path.write_text(json.dumps(config, indent=2))
        self.model = onnxruntime_genai.Model(str(path.parent))
        self.generators: dict[Key, Any] = {}
        self.weight_bytes = file_bytes(str(path.parent), ".data")
        self.version = f"onnxruntime-genai {onnxruntime_genai.__version__}"

    def generator(self, prompts: list[list[int]]) -> Any:
        params = self.genai.GeneratorParams(self.model)
        most = len(prompts[0]) + ROOM + 8
        params.set_search_options(max_length=most, min_length=most, do_sample=False, batch_size=len(prompts))
        generator = self.genai.Generator(self.model, params)
        generator.append_tokens(self.np.array(prompts, self.np.int32))
        generator.generate_next_token()
        return generator

    def prefill(self, ids: list[int]) -> None:
        self.generator([ids])

    def begin(self, key: Key, prompts: list[list[int]]) -> None:
        self.generators.pop(key, None)
        self.generators[key] = self.generator(prompts)

    def step(self, key: Key, length: int) -> None:
        self.generators[key].generate_next_token()


class Transformers(Engine):
    """The eager model in a plain loop, its least overhead: logits of the last position alone."""

    def load(self) -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"
        import torch
        import transformers

        self.torch, self.transformers = torch, transformers
        torch.set_num_threads(self.settings["threads"])
        torch.set_grad_enabled(False)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(self.settings["model"], dtype=torch.bfloat16)
        self.model.eval()
        self.kept: dict[Key, tuple[Any, Any]] = {}
        self.weight_bytes = sum(p.numel() * p.element_size() for p in self.model.parameters())
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"

    def run(self, ids: Any, cache: Any) -> tuple[Any, Any]:
        out = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values

    def prefill(self, ids: list[int]) -> None:
        self.run(self.torch.tensor([ids]), None)

    def begin(self, key: Key, prompts: list[list[int]]) -> None:
        self.kept[key] = self.run(self.torch.tensor(prompts), None)

    def step(self, key: Key, length: int) -> None:
        self.kept[key] = self.run(*self.kept[key])


class Limits(Engine):
    """Not an engine: the read bandwidth and the arithmetic peak of the machine, by infinilm."""

    def load(self) -> None:
        from infinilm import _core

        self.measure = _core.measure_cpu_limits
        self.weight_bytes = 0
        self.version = "limits"

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        read, flops = self.measure(self.settings["threads"], "float32", 256 << 20)
        _, bf16_flops = self.measure(self.settings["threads"], "bfloat16", 64 << 20)
        return {"read_bytes_per_second": read, "flops_per_second": flops, "bf16_flops_per_second": bf16_flops}


KINDS: dict[str, type[Engine]] = {
    "infinilm": Infinilm,
    "llama.cpp": LlamaCpp,
    "llama-bench": LlamaBench,
    "ctranslate2": CTranslate2,
    "openvino": OpenVino,
    "onnxruntime-genai": OnnxRuntime,
    "transformers": Transformers,
    "limits": Limits,
}


def probe() -> dict[str, str]:
    """Versions of the peers that are here."""
    found = {}
    for kind, package in PACKAGES.items():
        if importlib.util.find_spec(MODULES.get(package, package)):
            try:
                found[kind] = importlib.metadata.version(package.replace("_", "-"))
            except importlib.metadata.PackageNotFoundError:
                found[kind] = "unknown"
    return found


def serve(kind: str, settings: dict[str, Any]) -> None:
    """Answer commands until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print

    def give(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    if settings["cpu_time"]:  # one thread: engines that count CPUs find one
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    try:
        started = time.perf_counter()
        engine = KINDS[kind](settings)
    except Exception as error:
        give({"error": f"{type(error).__name__}: {error}"})
        return
    seconds = time.perf_counter() - started
    give({"version": engine.version, "weight_bytes": engine.weight_bytes, "load_seconds": seconds})
    for line in sys.stdin:
        try:
            give(engine.answer(json.loads(line)))
        except Exception as error:
            give({"error": f"{type(error).__name__}: {error}"})
    answers.flush()
    os._exit(0)  # some libraries crash when the interpreter takes them down


if __name__ == "__main__":
    if sys.argv[1:] == ["probe"]:
        print(json.dumps(probe()))
    else:
        serve(sys.argv[1], json.loads(sys.argv[2]))
