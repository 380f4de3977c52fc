"""A later stage of a pipeline: a process with some layers of the model, which runs the steps that the first sends."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from infinilm import _core
from infinilm.checkpoint.fingerprint import weights_fingerprint
from infinilm.checkpoint.loading import load_weights
from infinilm.checkpoint.mapped import FileState
from infinilm.checkpoint.opening import open_checkpoint
from infinilm.config.spec import build_spec
from infinilm.devices.system import kernel_class, nccl_library
from infinilm.errors import ConfigError, EngineDeadError, InfinilmError
from infinilm.pipeline.identity import parts_of
from infinilm.pipeline.wire import ALIVE_SECONDS, OUTPUTS, Connection, accept, connect, listen, read_key
from infinilm.planning.memory import ModelPlan, plan_model
from infinilm.planning.stage_sizes import sizes_of

__all__ = ["run_stage"]

_CONNECT_SECONDS = 60.0


def run_stage(
    model: str | os.PathLike[str],
    stage: int,
    addresses: Sequence[str],
    settings: Mapping[str, Any],
    tell: Callable[[str], object] = print,
    *,
    listener: int | None = None,
) -> int:
    """Be a stage until the first one ends; returns the exit code of the process.

    Parameters
    ----------
    model
        The same as that of the first stage, on this machine.
    stage : int
        1 for the first of the later ones.
    addresses : sequence of str
        Addresses of the later stages, in order; this one listens at its own.
    settings : mapping
        Keywords of `plan_model` that are this machine's own: `device`, `tensor_parallel_size`, `num_threads`,
        `revision`. Others are those of the first stage.
    tell : callable
        Gets a line for the user: where it listens.
    listener : int, optional
        The descriptor of a socket that listens at its address already.

    Raises
    ------
    ConfigError
        The settings or the addresses cannot be; or the first stage has others.
    EngineDeadError
        Another stage has ended or failed.
    """
    if not 1 <= stage <= len(addresses):
        raise ConfigError(
            f"stage is {stage}, and stages has {len(addresses)} addresses, of stages 1 to {len(addresses)}: this one "
            "is none of them"
        )
    key = read_key(list(addresses))
    with listen(addresses[stage - 1]) if listener is None else socket.socket(fileno=listener) as door:
        tell(f"stage {stage} of {len(addresses) + 1} listens at {addresses[stage - 1]}")
        front, greeting = accept(door, key, lambda greeting: _why_not_front(greeting, stage, addresses))
        agent = _Agent(model, stage, addresses, key, front)
        try:
            agent.start(door, {**greeting["settings"], **settings})
        except BaseException as error:
            with contextlib.suppress(OSError):
                front.send("refused", error=str(error))
            agent.close()
            raise
    return agent.serve()


def _why_not_front(greeting: Mapping[str, Any], stage: int, addresses: Sequence[str]) -> str | None:
    if greeting.get("role") != "front":
        return "this stage waits for the first one"
    if greeting.get("stage") != stage or greeting.get("num_stages") != len(addresses) + 1:
        return (
            f"this is stage {stage} of {len(addresses) + 1}, but the first stage expects stage {greeting.get('stage')} "
            f"of {greeting.get('num_stages')} here"
        )
    return None


class _Agent:
    def __init__(
        self, model: str | os.PathLike[str], stage: int, addresses: Sequence[str], key: str, front: Connection
    ) -> None:
        self._model, self._stage, self._addresses, self._key = model, stage, addresses, key
        self._front = front
        self._links: list[Connection] = []
        self._engine: _core.InferEngine | None = None
        self._steps: dict[int, tuple[_core.PendingStep, npt.NDArray[np.int32] | None]] = {}
        self._running: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._failure: EngineDeadError | None = None
        self._files: Mapping[Path, FileState] = {}  # of its weights
        self._weights = ""  # their fingerprint, once it was asked for

    def start(self, listener: Any, settings: Mapping[str, Any]) -> None:
        """Plan, connect to the neighbours, load; each when the first stage says so."""
        num_stages = len(self._addresses) + 1
        seed = settings["seed"]
        planned = {name: value for name, value in settings.items() if name != "seed"}
        plan = plan_model(self._model, **planned, pipeline_parallel_size=num_stages, stage=self._stage)
        dummy = settings["load_format"] == "dummy"
        machine = {"kernels": kernel_class(plan.device, plan.dtype), "num_ranks": len(plan.devices)}
        self._front.send("planned", parts=parts_of(plan, dummy=dummy), sizes=sizes_of(plan.memory), machine=machine)
        self._front.receive("connect")
        self._connect(listener)
        self._load(plan, settings.get("num_threads") or 0, dummy, seed)
        self._front.send("loaded")
        cache, _ = self._front.receive("cache")
        assert self._engine is not None
        self._engine.reset_cache(
            cache["num_blocks"],
            cache["block_size"],
            cache["dtype"],
            cache["num_states"],
            cache["num_window_blocks"],
        )
        self._front.send("ready")

    def _connect(self, listener: Any) -> None:
        behind = -1  # its socket
        if self._stage < len(self._addresses):
            greeting = {"role": "activations", "key": self._key}
            link = connect(self._addresses[self._stage], f"stage {self._stage + 1}", greeting, _CONNECT_SECONDS)
            self._links.append(link)
            behind = link.sock.fileno()
        listener.settimeout(_CONNECT_SECONDS)  # the others may have ended since they said what they are
        try:
            link, _ = accept(
                listener,
                self._key,
                lambda greeting: (
                    None if greeting.get("role") == "activations" else "this stage has its connections already"
                ),
            )
        except TimeoutError as error:
            raise ConfigError(
                f"stage {self._stage}: no connection from the stage before came in {_CONNECT_SECONDS:.0f} seconds; "
                "start all stages again"
            ) from error
        self._links.append(link)
        self._sockets = link.sock.fileno(), behind

    def _load(self, plan: ModelPlan, num_threads: int, dummy: bool, seed: int) -> None:
        spec = build_spec(
            plan.config,
            dtype=plan.dtype,
            max_model_len=plan.memory.max_model_len,
            quantization=plan.quantization,
            fp8_inputs=plan.fp8_inputs,
        )
        self._engine = _core.InferEngine(
            spec,
            plan.devices,
            num_threads,
            nccl_library="" if plan.device == "cpu" else nccl_library(),
            num_stages=len(self._addresses) + 1,
            stage=(self._stage, *self._sockets),
        )
        if dummy:
            self._engine.load_dummy(plan.stored_dtype, seed)
        else:
            with open_checkpoint(plan.path) as checkpoint:
                self._files = checkpoint.states
                for loading in plan.loading:
                    load_weights(checkpoint, self._engine, **loading)
        self._engine.finish_loading()

    def serve(self) -> int:
        """Run steps until the first stage ends."""
        watcher = threading.Thread(target=self._watch, name="infinilm-stage")
        watcher.start()
        ended = threading.Event()
        threading.Thread(target=self._tell_of_life, args=(ended,), name="infinilm-alive", daemon=True).start()
        told = False
        try:
            while not told:
                told = self._take(*self._front.receive())
        except OSError:  # the first stage has gone, or this one has failed
            pass
        finally:
            ended.set()
            self.close()
            self._running.put(None)
            watcher.join()
            assert self._engine is not None
            self._steps.clear()
            self._engine.close()
        if self._failure is not None:
            raise self._failure
        if not told:
            raise EngineDeadError("the first stage of the pipeline has ended")
        return 0

    def _tell_of_life(self, ended: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while not ended.wait(ALIVE_SECONDS):
                self._front.send("alive")

    def _take(self, head: Mapping[str, Any], arrays: dict[str, npt.NDArray[Any]]) -> bool:
        """Do what a frame says; returns whether it was the last."""
        assert self._engine is not None
        what, number = head["what"], head.get("step", -1)
        if what == "step":
            allowed = None
            if head["late_masks"] is not None:
                allowed = arrays["allowed"] = np.zeros(head["late_masks"], np.int32)
            batch = _core.Batch(**arrays, return_logits=head["return_logits"], mtp_module=0)  # no drafts in pipelines
            self._steps[number] = self._engine.submit(batch, allowed is not None), allowed
            self._running.put(number)
        elif what == "weights":  # takes seconds, in which steps go on
            threading.Thread(target=self._tell_weights, args=(head["question"],), daemon=True).start()
        elif what in ("read_blocks", "write_blocks", "read_state", "write_state"):
            self._answer(what, head, arrays)
        elif step := self._steps.get(number):  # looked up once: `_watch` may take it out meanwhile
            pending, allowed = step
            if what == "masks":
                if allowed is not None:
                    allowed[:] = arrays["allowed"]
                pending.give_masks()
            elif what == "abort":
                pending.abort()
        return bool(what == "close")

    def _answer(self, what: str, head: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Copy blocks or a state out of the cache of this stage, or into it, behind the steps submitted before."""
        found, error = {}, None
        assert self._engine is not None
        try:
            given = [_core.from_numpy(array) for array in arrays.values()]
            copied = getattr(self._engine, what)(*head["of"], *([given] if what.startswith("write") else []))
            found = {str(rank): tensor.numpy() for rank, tensor in enumerate(copied or ())}
        except EngineDeadError:
            raise
        except InfinilmError as failure:
            error = str(failure)
        self._front.send("answer", found, question=head["question"], error=error)

    def _tell_weights(self, question: int) -> None:
        with contextlib.suppress(OSError):
            error, digest = None, ""
            try:
                digest = self._weights = self._weights or weights_fingerprint(self._files)
            except (OSError, InfinilmError) as failure:
                error = f"its weights cannot be read: {failure}"
            self._front.send("answer", question=question, error=error, digest=digest)

    def _watch(self) -> None:
        """Take the results of steps. What all stages find wrong the first one tells; other failures end this stage."""
        while (number := self._running.get()) is not None:
            try:
                pending = self._steps[number][0]
                while not pending.wait(0.5):
                    pass
                output = pending.result()
                if self._stage == len(self._addresses):
                    self._tell(number, output)
            except EngineDeadError as error:
                self._failure = error
                with contextlib.suppress(OSError):
                    self._front.send("failed", error=str(error))
                self.close()
            except InfinilmError:
                pass
            self._steps.pop(number, None)

    def _tell(self, number: int, output: _core.StepOutput) -> None:
        """Give the first stage what came of a step."""
        found = {name: getattr(output, name) for name in OUTPUTS}
        arrays = {name: tensor.numpy() for name, tensor in found.items() if tensor is not None}
        with contextlib.suppress(OSError):  # it has gone, which `serve` notices
            self._front.send("result", arrays, step=number, aborted=output.aborted)

    def close(self) -> None:
        """End the connections, so that no stage waits for this one, nor this one for others."""
        for link in (*self._links, self._front):
            link.close()
