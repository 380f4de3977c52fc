"""`infinilm serve`: the API of OpenAI over HTTP, and a page to talk to the model."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinilm.cli.arguments import (
    Parser,
    add_control_vector,
    add_lora,
    add_model_settings,
    add_quiet,
    add_speculation,
    add_tiers,
    flag,
    make_llm,
    model_settings,
    non_negative,
    positive,
    size,
)
from infinilm.cli.front import add_front, needs_packages, read_front, seconds, signals_end_it
from infinilm.cli.output import note
from infinilm.cli.receipts import add_sign, signing_key
from infinilm.cli.route import ROUTING, add_routing, routing_settings
from infinilm.errors import ConfigError

if TYPE_CHECKING:
    from infinilm.llm import LLM
    from infinilm.server.host import ModelSource
    from infinilm.server.settings import ServerSettings

__all__ = ["add_serve", "run_serve"]


_BY_TEMPLATE = "it is not needed: the model's chat template tells how"
_GPU_LAYERS = "here it is --gpu-layers N or auto, or --device cuda for all layers"
_CPU_MOE = "here it is --cpu-moe N, all or auto"
_HINTS = {
    # Options that vLLM has.
    "--enable-auto-tool-choice": _BY_TEMPLATE,
    "--tool-call-parser": _BY_TEMPLATE,
    "--reasoning-parser": _BY_TEMPLATE,
    "--enable-reasoning": _BY_TEMPLATE,
    "--lora-modules": "here it is --lora NAME=FOLDER",
    "--enable-lora": "it is not needed beside --lora NAME=FOLDER",
    "--speculative-config": "here it is --speculation, which takes the same JSON with the method ngram",
    "--tp": "here it is --tensor-parallel-size",
    "-tp": "here it is --tensor-parallel-size",
    "--pp": "here it is --pipeline-parallel-size",
    "-pp": "here it is --pipeline-parallel-size",
    "--data-parallel-size": "here it is --replicas",
    "-dp": "here it is --replicas",
    "--gpu-memory-utilization": "here it is --kv-cache, such as 80% of what is free",
    "--enable-chunked-prefill": "it is not needed: prompts are always computed in chunks",
    "--enforce-eager": "it is not needed: nothing is compiled for a model",
    "--trust-remote-code": "it is not needed: no code of a checkpoint is run",
    "--disable-log-requests": "it is not needed: requests are logged with --log-requests alone",
    "--guided-decoding-backend": "it is not needed: there is one, llguidance",
    # Options that llama.cpp has.
    "--ctx-size": "here it is --max-model-len",
    "-c": "here it is --max-model-len",
    "--parallel": "here it is --max-num-seqs",
    "-np": "here it is --max-num-seqs",
    "--alias": "here it is --served-model-name",
    "--chat-template-file": "here it is --chat-template",
    "--jinja": "it is not needed: chat templates are always Jinja",
    "--n-gpu-layers": _GPU_LAYERS,
    "-ngl": _GPU_LAYERS,
    "--n-cpu-moe": _CPU_MOE,
    "-ncmoe": _CPU_MOE,
    "-cmoe": _CPU_MOE,
}


def add_serve(parser: Parser) -> None:
    """Add the arguments of the command."""
    parser.hints = _HINTS
    add_model_settings(parser, positional=True, several=True)
    add_lora(parser, "served as a model of this name; may be repeated")
    add_control_vector(parser)
    add_tiers(parser)
    add_speculation(parser)
    add_quiet(parser)
    texts = parser.add_argument_group("what the model reads")
    texts.add_argument(
        "--tokenizer", metavar="PATH", help="a tokenizer.json or the folder of one; default: the model's"
    )
    texts.add_argument(
        "--chat-template", metavar="TEMPLATE", help="Jinja text, a file, or the name of one of the model's templates"
    )
    texts.add_argument(
        "--generation-config",
        default="auto",
        metavar="PATH",
        help="defaults of sampling: another generation_config.json, or none",
    )
    texts.add_argument(
        "--load-format", default="auto", metavar="FORMAT", help="auto, or dummy: random weights, for benchmarks"
    )
    several = parser.add_argument_group("several models", "See NAME=MODEL of --model.")
    several.add_argument(
        "--on-demand",
        action="store_true",
        help="load models when they are first asked for; those that do not fit together take turns",
    )
    several.add_argument(
        "--keep-alive",
        type=seconds,
        metavar="S",
        help="unload a model S seconds after its last request, until the next one; default: never",
    )
    several.add_argument(
        "--memory", type=size, metavar="SIZE", help="what all models may take together; default: what is free"
    )
    loads = parser.add_argument_group("requests")
    loads.add_argument("--max-num-seqs", type=positive, default=64, metavar="N", help="sequences at a time; default 64")
    loads.add_argument(
        "--max-num-batched-tokens", type=positive, default=2048, metavar="N", help="tokens of a step; default 2048"
    )
    loads.add_argument(
        "--max-queued-requests",
        type=non_negative,
        default=1024,
        metavar="N",
        help="sequences that wait beyond --max-num-seqs; more get status 429; default 1024",
    )
    loads.add_argument(
        "--max-queued-tokens",
        type=positive,
        default=1 << 22,
        metavar="N",
        help="tokens of prompts that may wait; default 4194304",
    )
    loads.add_argument(
        "--request-timeout",
        type=seconds,
        default=0,
        metavar="S",
        help="seconds of a request, also while it waits; default 0: no limit",
    )
    loads.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep what was computed for prompts that begin alike; default",
    )
    loads.add_argument(
        "--allowed-media-path",
        type=Path,
        metavar="FOLDER",
        help="pictures of requests may be files below it, by file: addresses; default: none may",
    )
    loads.add_argument(
        "--allowed-media-hosts",
        nargs="+",
        default=(),
        metavar="HOST",
        help="pictures of requests may be fetched of these hosts; default: of none",
    )
    loads.add_argument("--seed", type=non_negative, metavar="N", help="makes requests without a seed repeatable")
    group = add_front(parser)
    group.add_argument(
        "--served-model-name", nargs="+", metavar="NAME", help="names in the API; default: that of the folder"
    )
    group.add_argument(
        "--lora-folder",
        metavar="FOLDER",
        help="let clients load and unload adapters that lie in it, by /v1/load_lora_adapter; default: they cannot",
    )
    group.add_argument(
        "--receipts",
        action="store_true",
        help="give receipts to requests with return_receipt; reads the files of the weights once more",
    )
    add_sign(group)
    group.add_argument(
        "--prefix-peers",
        nargs="+",
        default=(),
        metavar="HOST",
        help="fetch prefixes from these hosts where a router says that they have them: names, addresses or networks, "
        "HOST or HOST:PORT; the first --api-key is shown to them; default: from none",
    )
    group.add_argument(
        "--role",
        choices=["both", "prefill", "decode"],
        default="both",
        help="behind a router: compute prompts that others answer, or answer with prompts that others computed; "
        "default: both",
    )
    group.add_argument("--no-page", action="store_true", help="no chat page at /")
    group.add_argument(
        "--unknown-fields",
        choices=["refuse", "warn"],
        help="of requests: status 400, or ignore them and tell it in the log and in a header; default: warn at "
        "/v1/messages and /v1/responses, which agents use, refuse elsewhere",
    )
    group.add_argument(
        "--sse-ping-interval",
        type=seconds,
        default=15,
        metavar="S",
        help="seconds of silence in a stream after which a comment is sent; default 15; 0: none",
    )
    staged = parser.add_argument_group("a pipeline of processes", "The key of all stages: INFINILM_STAGE_KEY.")
    staged.add_argument(
        "--stages",
        type=lambda text: text.split(","),
        default=(),
        metavar="HOST:PORT,..",
        help="where stages 1, 2, .. of the model run; stage 0 is the server",
    )
    staged.add_argument(
        "--stage", type=non_negative, default=0, metavar="I", help="be this stage, at its address of --stages"
    )
    routed = add_routing(parser)
    routed.add_argument(
        "--replicas",
        type=positive,
        metavar="N",
        help="so many servers behind one address, on this machine or a cluster",
    )
    routed.add_argument(
        "--ray-address",
        metavar="ADDRESS",
        help='place them, or the stages of a pipeline, on this Ray cluster: its address, "auto" for that of this '
        'machine, "local" for a new one',
    )


def run_serve(args: argparse.Namespace) -> int:
    """Serve until a signal ends it."""
    with signals_end_it():
        several = args.models or args.on_demand or args.keep_alive is not None or args.memory is not None
        if several and (args.stages or args.replicas is not None or args.ray_address is not None):
            raise ConfigError(
                "several models, --on-demand, --keep-alive and --memory are of one server without stages; start one "
                "for each model that is to have replicas"
            )
        if (args.role != "both" or args.prefix_peers) and (args.replicas is not None or args.ray_address is not None):
            raise ConfigError(
                "--role and --prefix-peers are of one server; put `infinilm route` in front of several. Replicas of "
                "one machine with --host-cache or --disk-cache fetch from each other by themselves"
            )
        if args.stages and (args.replicas is not None or args.ray_address is not None):
            raise ConfigError("--stages are those of one server; put `infinilm route` in front of several")
        _check_alone(args)
        if args.stage:
            return _be_stage(args)
        if args.ray_address is not None and args.replicas is not None and args.pipeline_parallel_size > 1:
            raise ConfigError(
                "--ray-address places replicas or stages of one server, not both; leave out --replicas or "
                "--pipeline-parallel-size"
            )
        if args.replicas is None and args.ray_address is not None and args.pipeline_parallel_size > 1:
            return _serve_stages(args)
        return _serve(args) if args.replicas is None and args.ray_address is None else _serve_replicas(args)


def _check_alone(args: argparse.Namespace) -> None:
    """ConfigError: several models or servers would share the CPU that has a part of each."""
    option = "--gpu-layers" if args.gpu_layers is not None else "--cpu-moe" if args.cpu_moe is not None else None
    if option is None:
        return
    for name, is_there in (
        ("--stage", bool(args.stage)),
        ("--replicas", args.replicas is not None),
        ("--ray-address", args.ray_address is not None),
        ("more than one --model", bool(args.models)),
    ):
        if is_there:
            raise ConfigError(f"{option} is of one model of one server, and has the CPU to itself; leave {name} out")


def _serve_stages(args: argparse.Namespace) -> int:
    """Serve a model whose later stages are on a cluster."""
    with needs_packages("a cluster of stages", "ray"):
        from infinilm.ray.stages import placed_stages
    with placed_stages(args, args.ray_address) as stages:
        args.stages = stages
        return _serve(args)


def _be_stage(args: argparse.Namespace) -> int:
    """Have some layers of the model, until the first stage ends."""
    from infinilm.pipeline import run_stage

    if args.lora or args.merge_lora:
        raise ConfigError("--lora and --merge-lora: stages in processes of their own have no adapters")
    own = ("device", "tensor_parallel_size", "num_threads", "revision")
    settings = {name: getattr(args, name) for name in own}
    return run_stage(args.model, args.stage, args.stages, settings, note, listener=getattr(args, "listener", None))


def _serve_replicas(args: argparse.Namespace) -> int:
    """Start servers, and a router in front of them."""
    if args.lora_folder is not None:
        raise ConfigError(
            "--lora-folder is of one server: replicas must have the same adapters; give all of them --lora"
        )
    with needs_packages("a router of replicas", "router"):
        from infinilm.router.processes import local_replicas
        from infinilm.router.run import serve_router

    front, options = read_front(args, model_names=())
    count = args.replicas or 1
    if args.ray_address is None:
        launch = local_replicas(args, count, front.drain_timeout)
    else:
        with needs_packages("a cluster of replicas", "ray"):
            from infinilm.ray.cluster import cluster_replicas
        launch = cluster_replicas(args, count, args.ray_address, front.drain_timeout)
    return serve_router(routing_settings(args, front), (), launch=launch, **options)


def _serve(args: argparse.Namespace) -> int:
    for name in ROUTING:
        if getattr(args, name, None) is not None:  # a replica's process has none of them
            raise ConfigError(f"{flag(name)} is of a router: it needs --replicas or --ray-address")
    with needs_packages("the server", "server"):
        from infinilm.server.host import ModelHost
        from infinilm.server.run import serve
    from infinilm.planning.sizes import parse_size

    sources = _sources(args)
    settings, options = read_front(
        args,
        model_names=sources[0].names,
        max_queued_requests=args.max_queued_requests,
        max_queued_tokens=args.max_queued_tokens,
        page=not args.no_page,
        lora_folder=args.lora_folder,
        receipts=args.receipts,
        role=args.role,
        receipt_key=signing_key(args.sign, args.receipts, "--receipts"),
        unknown_fields=args.unknown_fields,
        sse_ping_interval=args.sse_ping_interval,
    )
    _check_role(args, settings)
    if args.allowed_media_path is not None and not args.allowed_media_path.is_dir():
        raise ConfigError(f"--allowed-media-path: there is no folder {args.allowed_media_path}")
    if args.lora_folder is not None and not Path(args.lora_folder).is_dir():
        raise ConfigError(f"--lora-folder: there is no folder {args.lora_folder}")
    free_bytes = None if args.memory is None else parse_size("--memory", args.memory)

    def make_models() -> ModelHost:
        return ModelHost(
            settings,
            sources,
            keep_alive=args.keep_alive,
            on_demand=args.on_demand,
            free_bytes=free_bytes,
            max_wait=args.request_timeout or None,
        )

    return serve(make_models, **options)


def _check_role(args: argparse.Namespace, settings: ServerSettings) -> None:
    """ConfigError: prefixes cannot go from or to this server as its options say."""
    from infinilm.server.keys import Keys

    has_key = bool(Keys(settings.api_keys, settings.api_key_file))
    if args.role == "prefill" and (not has_key or (args.host_cache is None and args.disk_cache is None)):
        raise ConfigError(
            "--role prefill keeps what it computes for others: it needs --host-cache or --disk-cache, and an --api-key "
            "that they show"
        )
    if args.role == "decode" and not args.prefix_peers:
        raise ConfigError("--role decode fetches what others computed: name these by --prefix-peers")
    if args.prefix_peers and not settings.api_keys:
        raise ConfigError("--prefix-peers are shown a key of this server: it needs --api-key or INFINILM_API_KEY")


def _sources(args: argparse.Namespace) -> list[ModelSource]:
    """The models that the options name, the first of which is that of the command. ConfigError: they do not fit."""
    is_named = args.model != "demo" or getattr(args, "has_model", False) or not args.models
    more = [_one_more(args, *given) for given in args.models]
    if args.served_model_name and not is_named:
        raise ConfigError("--served-model-name names MODEL, and there are models as NAME=MODEL alone")
    sources = [_of_command(args), *more] if is_named else more
    taken: set[str] = set()
    for name in (name for source in sources for name in source.names):
        if not name.strip():  # such as --served-model-name "$NAME"
            raise ConfigError(f"{'--model' if args.models else '--served-model-name'}: a name is empty")
        if name in taken and args.models:
            raise ConfigError(f"--model: two models have the name {name!r}; give one of them another, as NAME=MODEL")
        taken.add(name)
    if is_named:
        if clash := sorted(dict(args.lora or ()).keys() & taken):
            raise ConfigError(f"--lora: {clash[0]!r} is the name of a model; choose another for the adapter")
    elif args.lora or args.merge_lora or args.lora_folder:
        raise ConfigError("adapters are of MODEL, and there are models as NAME=MODEL alone; name one without NAME=")
    return sources


def _of_command(args: argparse.Namespace) -> ModelSource:
    """The model whose options are those of the command."""
    settings = model_settings(args)
    own: dict[str, Any] = {
        "chat_template": args.chat_template,
        "tokenizer": args.tokenizer,
        "generation_config": args.generation_config,
        "stages": args.stages,
    }
    names = tuple(args.served_model_name or [_model_name(args.model)])
    return _source(args, names, args.model, settings, own)


def _one_more(args: argparse.Namespace, name: str, model: str, options: Mapping[str, Any]) -> ModelSource:
    """Another model, which shares the devices and the limits of the command, and has all else of its own."""
    texts = {key: options[key] for key in ("chat_template", "tokenizer") if key in options}
    settings = {"device": args.device} | {key: value for key, value in options.items() if key not in texts}
    others = argparse.Namespace(
        **{
            **vars(args),
            "model": model,
            "control_vector": None,
            "speculation": "auto",
            "host_cache": None,
            "disk_cache": None,
            "prefix_peers": (),
        }
    )
    return _source(others, (name,), model, settings, texts)


def _source(
    args: argparse.Namespace, names: tuple[str, ...], model: str, settings: Mapping[str, Any], texts: Mapping[str, Any]
) -> ModelSource:
    """A model of a server; `settings`: keywords of `plan_model`, `texts`: more of `LLM`."""
    from infinilm.images import MediaRules
    from infinilm.planning.memory import ModelPlan, plan_drafting
    from infinilm.requests.limits import RequestLimits
    from infinilm.server.host import ModelSource
    from infinilm.server.keys import keys_of
    from infinilm.tiers import PeerRules

    keys = tuple(args.api_key or ()) or keys_of("INFINILM_API_KEY")
    peers = PeerRules(tuple(args.prefix_peers), keys[0]) if args.prefix_peers and keys else None
    planned: dict[str, Any] = {
        "num_threads": args.num_threads,
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "load_format": args.load_format,
        **settings,
    }

    def load(kv_cache: int | None) -> LLM:
        return make_llm(
            args,
            seed=args.seed,
            enable_prefix_caching=args.enable_prefix_caching,
            limits=RequestLimits(max_seconds=args.request_timeout or None),
            prefix_peers=peers,
            media=MediaRules(args.allowed_media_path, tuple(map(str.lower, args.allowed_media_hosts))),
            **planned | ({} if kv_cache is None else {"kv_cache": kv_cache}),
            **texts,
        )

    def plan(free_bytes: int) -> ModelPlan:
        return plan_drafting(model, memory=free_bytes, speculation=args.speculation, use_tqdm=not args.quiet, **planned)

    return ModelSource(names, load, plan)


def _model_name(model: str) -> str:
    """The name of the folder or of the file, or the hub id as it is."""
    from infinilm.gguf.file import is_gguf

    path = Path(model)
    if is_gguf(path):
        return path.stem
    return path.resolve().name if path.is_dir() else model
