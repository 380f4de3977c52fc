"""The first stage of a pipeline whose others are processes of their own: it sends them the steps that it runs."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from infinilm import _core
from infinilm.cache import CacheConfig
from infinilm.errors import ConfigError, EngineDeadError, RequestError
from infinilm.pipeline.identity import check_parts, parts_of
from infinilm.pipeline.wire import ALIVE_SECONDS, OUTPUTS, Arrays, Connection, connect, read_key
from infinilm.planning.memory import ModelPlan
from infinilm.planning.stage_sizes import join_sizes, sizes_of

__all__ = ["FrontStage", "StagedEngine", "check_settings", "count_stages"]

_CONNECT_SECONDS = 60.0
_MOST_SILENCES = 15  # a stage that is silent for so many times ALIVE_SECONDS counts as lost
_LOST = "of the pipeline has ended"  # what the core says of a neighbour (src/dist/stage_link.cpp)
_LOOK_EVERY_SECONDS = 60.0  # while a result is waited for; it is taken as soon as it comes
_REPORT_SECONDS = 2.0  # that another stage has to say why it ended


def count_stages(addresses: Sequence[str], pipeline_parallel_size: int) -> int:
    """How many stages there are; `addresses`: of those in other processes. ConfigError: that contradicts the size."""
    if isinstance(addresses, str) or not all(isinstance(address, str) for address in addresses):
        raise ConfigError(f"stages: expected a list of addresses such as '10.0.0.7:7000', got {addresses!r}")
    if addresses and pipeline_parallel_size not in (1, len(addresses) + 1):
        raise ConfigError(
            f"pipeline_parallel_size is {pipeline_parallel_size}, but stages has {len(addresses)} addresses, those of "
            "all but the first stage; pass one of them"
        )
    return len(addresses) + 1 if addresses else pipeline_parallel_size


def check_settings(kv_cache: object, hooks: object, lora: object) -> None:
    """ConfigError: what stages in several processes do not have."""
    for what, is_asked in (
        ("a CacheConfig as kv_cache", isinstance(kv_cache, CacheConfig)),
        ("hooks", hooks is not None),
        ("LoRA adapters", bool(lora)),
    ):
        if is_asked:
            raise ConfigError(f"stages: {what}: this needs all stages in one process; use pipeline_parallel_size alone")


class FrontStage:
    """The other stages, as the first one sees them; then an engine that runs on all of them.

    Parameters
    ----------
    addresses : sequence of str
        Addresses of the later stages, in order.
    settings : mapping
        Keywords of `plan_model` that hold for all stages, and `seed`.
    plan : ModelPlan
        The plan of the first stage.

    Raises
    ------
    ConfigError
        A stage cannot be reached, differs, or has not enough memory.

    As a context manager it lets the others end if the first stage fails meanwhile.
    """

    def __init__(self, addresses: Sequence[str], settings: Mapping[str, Any], plan: ModelPlan) -> None:
        key = read_key(list(addresses))
        self.num_stages = len(addresses) + 1
        self._names = [f"stage {i} at {address}" for i, address in enumerate(addresses, start=1)]
        self._controls: list[Connection] = []
        self._link: Connection | None = None
        self._dummy = settings["load_format"] == "dummy"
        try:
            for i, address in enumerate(addresses, start=1):
                greeting = {"role": "front", "key": key, "stage": i, "num_stages": self.num_stages}
                greeting["settings"] = {**settings, "max_model_len": plan.memory.max_model_len}
                self._controls.append(connect(address, f"stage {i}", greeting, _CONNECT_SECONDS))
            own = parts_of(plan, dummy=self._dummy)
            sizes = [sizes_of(plan.memory)]
            self.machines: list[dict[str, Any]] = []  # kernels and number of ranks of each later stage
            for control in self._controls:
                planned = self._receive(control, "planned")
                check_parts(control.name, own, planned["parts"])
                sizes.append(planned["sizes"])
                self.machines.append(planned["machine"])
            self.memory = join_sizes(plan.memory, sizes)
            for control in self._controls:
                control.send("connect")
            greeting = {"role": "activations", "key": key}
            self._link = connect(addresses[0], "stage 1", greeting, _CONNECT_SECONDS)
        except BaseException:
            self.close()
            raise
        self.stage = (0, -1, self._link.sock.fileno())

    @staticmethod
    def _receive(control: Connection, expected: str) -> dict[str, Any]:
        try:
            return control.receive(expected)[0]
        except OSError as error:
            raise ConfigError(f"{control.name} does not start: {error}") from None

    def engine(self, core: _core.InferEngine) -> StagedEngine:
        """The engine of all stages, once they have loaded their weights; `core` has those of the first."""
        for control in self._controls:
            self._receive(control, "loaded")
        assert self._link is not None
        return StagedEngine(core, self._controls, self._link, [machine["num_ranks"] for machine in self.machines])

    def __enter__(self) -> FrontStage:
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        if failed is not None:
            self.close()

    def close(self) -> None:
        """Let all others end."""
        for connection in (*self._controls, *([self._link] if self._link else [])):
            connection.close()


class StagedEngine:
    """What `LLM` uses of a `_core.InferEngine`, for the stages of several processes."""

    def __init__(
        self, core: _core.InferEngine, controls: Sequence[Connection], link: Connection, num_ranks: Sequence[int]
    ) -> None:
        self._num_ranks = num_ranks  # of each later stage
        self._answers: dict[tuple[int, str], Future[Any]] = {}  # by question and stage
        self._core, self._controls, self._link = core, controls, link
        self._process = os.getpid()
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # steps reach all stages in the same order
        self._steps: dict[int, StagedStep] = {}  # whose results the last stage has not told yet
        self._reports: list[str] = []  # one for each stage that has ended, in order of their ends
        self._reported = threading.Event()
        self._closed = False
        self._monitors: list[threading.Thread] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def reset_cache(
        self,
        num_blocks: int,
        block_size: int,
        dtype: str,
        num_states: int = 0,
        num_window_blocks: int = 0,
        num_log_rows: int = 0,
    ) -> None:
        """The cache of all stages, once. ConfigError: there is one."""
        if self._monitors:
            raise ConfigError("the cache of stages in several processes keeps its size")
        self._core.reset_cache(num_blocks, block_size, dtype, num_states, num_window_blocks, num_log_rows)
        self._tell_all(
            "cache",
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=dtype,
            num_states=num_states,
            num_window_blocks=num_window_blocks,
        )
        for control in self._controls:
            FrontStage._receive(control, "ready")
            monitor = threading.Thread(target=self._monitor, args=(control,), name="infinilm-stage", daemon=True)
            self._monitors.append(monitor)
            monitor.start()

    def submit(self, batch: _core.Batch, late_masks: bool = False) -> StagedStep:
        """Queue a step in all stages; the last one tells what came of it."""
        arrays = {name: array.numpy() for name, array in batch.arrays().items()}
        shape = list(arrays.pop("allowed").shape) if late_masks else None
        with self._lock:
            number = next(self._numbers)
            fields = {"step": number, "late_masks": shape, "return_logits": batch.return_logits}
            step = self._steps[number] = StagedStep(self, number, batch)
            try:
                self._tell_all("step", arrays, **fields)
                step.start(self._core.submit(batch, late_masks))
            except BaseException:
                self.forget(number)
                raise
            return step

    def forward(self, batch: _core.Batch) -> StageOutput:
        """Run a step."""
        return self.submit(batch).result()

    def read_blocks(self, group: int, blocks: Sequence[int]) -> list[_core.Tensor]:
        """Blocks as bytes: of each rank of each stage."""
        return self._copied("read_blocks", group, list(blocks))

    def write_blocks(self, group: int, blocks: Sequence[int], data: Sequence[_core.Tensor]) -> None:
        """Fill blocks with what `read_blocks` gave. RequestError: it does not fit."""
        self._copied("write_blocks", group, list(blocks), data=data)

    def read_state(self, state: int) -> list[_core.Tensor]:
        """A state as bytes: of each rank of each stage."""
        return self._copied("read_state", state)

    def write_state(self, state: int, num_tokens: int, data: Sequence[_core.Tensor]) -> None:
        """Fill a state with what `read_state` gave. RequestError: it does not fit."""
        self._copied("write_state", state, num_tokens, data=data)

    def check_weights(self, digest: str) -> None:
        """ConfigError: the files of another stage are not those of this digest. It takes as long as reading them."""
        for control, answer in zip(self._controls, self._ask("weights"), strict=True):
            if (found := answer.result()[0]["digest"]) != digest:
                raise ConfigError(
                    f"{control.name}: the digest of its weights is {found[:16]}, that of the first stage is "
                    f"{digest[:16]}: give all stages the same checkpoint"
                )

    def _copied(self, what: str, *of: Any, data: Sequence[_core.Tensor] | None = None) -> list[_core.Tensor]:
        """Have each stage copy a part of its cache; `data`: what is written, of each rank of each stage."""
        if data is not None and len(data) <= sum(self._num_ranks):
            raise RequestError(
                f"expected the bytes of more than {sum(self._num_ranks)} ranks, got those of {len(data)}"
            )
        own, parts = [], None
        if data is not None:
            num_own = len(data) - sum(self._num_ranks)
            ends = [num_own, *(num_own + end for end in itertools.accumulate(self._num_ranks))]
            own = [data[:num_own]]
            parts = [{str(i): data[i].numpy() for i in range(a, b)} for a, b in itertools.pairwise(ends)]
        answers = self._ask(what, parts, of=of)
        copied = list(getattr(self._core, what)(*of, *own) or ())
        for answer in answers:
            copied += [_core.from_numpy(array) for array in answer.result()[1].values()]
        return copied

    def _ask(self, what: str, arrays: Sequence[Arrays] | None = None, **fields: Any) -> list[Future[Any]]:
        """Ask each later stage something, behind the steps so far; `arrays`: for each of them.

        A future gives the head and the arrays of an answer, a RequestError of the stage's, or an EngineDeadError.
        """
        with self._lock:
            number = next(self._numbers)
            asked: list[Future[Any]] = [Future() for _ in self._controls]
            # Noted first: a stage that is lost from here on fails those that are noted.
            self._answers |= {(number, one.name): answer for one, answer in zip(self._controls, asked, strict=True)}
            if self._reports:
                raise self.explain()
            try:
                for i, control in enumerate(self._controls):
                    control.send(what, arrays[i] if arrays else None, question=number, **fields)
            except OSError:
                raise self.explain() from None
            return asked

    def set_hooks(self, callback: Any, *names: Any) -> None:
        """Hooks would see the layers of one process alone. ConfigError: there are some."""
        if callback is not None:
            raise ConfigError("hooks need all stages of the model in one process")
        self._core.set_hooks(None, [])

    def add_adapter(self, *_: Any) -> None:
        """ConfigError: adapters are in one process alone."""
        raise ConfigError("LoRA adapters need all stages of the model in one process")

    def remove_adapter(self, _: int) -> None:
        """There are none."""

    def close(self) -> None:
        """End all stages; with an error where one was lost, so that a supervisor starts them again."""
        if self._process != os.getpid():
            return
        with self._lock:
            if not self._closed:
                self._closed = True
                for control in self._controls if not self._reports else ():
                    try:
                        control.send("close")
                    except OSError:  # it has gone before
                        continue
        self._core.close()
        for connection in (*self._controls, self._link):
            connection.close()

    def tell(self, what: str, arrays: Mapping[str, Any] | None = None, **fields: Any) -> None:
        """Send all stages a word about a step. EngineDeadError: one has gone."""
        with self._lock:
            self._tell_all(what, arrays, **fields)

    def _tell_all(self, what: str, arrays: Mapping[str, Any] | None = None, **fields: Any) -> None:
        if self._reports:
            raise self.explain()
        for control in self._controls:
            try:
                control.send(what, arrays, **fields)
            except OSError:
                raise self.explain() from None

    def forget(self, number: int) -> None:
        """No result of this step will come."""
        self._steps.pop(number, None)

    def explain(self, error: EngineDeadError | None = None) -> EngineDeadError:
        """The error of a pipeline that has stopped: with what another stage says, if one says something."""
        self._reported.wait(_REPORT_SECONDS)
        if not self._reports:
            return error or EngineDeadError("a stage of the pipeline has ended")
        dead = EngineDeadError(self._reports[0])
        dead.__cause__ = ConnectionError(self._reports[0])
        return dead

    def _monitor(self, control: Connection) -> None:
        """Take in what a stage tells, and note its end."""
        why = f"{control.name} has ended"
        silences = 0
        try:
            while silences < _MOST_SILENCES:  # counted one by one: all processes may have been stopped for a while
                if not control.has_more(ALIVE_SECONDS):
                    silences += 1
                    continue
                silences = 0
                head, arrays = control.receive()
                if head["what"] == "result":
                    output = StageOutput.of(arrays, head["aborted"])  # first: if it fails, the step is still to be lost
                    if step := self._steps.pop(head["step"], None):
                        step.finish(output)
                if head["what"] == "answer" and (answer := self._answers.pop((head["question"], control.name), None)):
                    if head["error"] is None:
                        answer.set_result((head, arrays))
                    else:
                        answer.set_exception(RequestError(f"{control.name}: {head['error']}"))
                if head["what"] == "failed":
                    why = f"{control.name} has failed: {head['error']}"
            why = f"{control.name} has ended, or does not answer"
        except (OSError, ValueError, ConfigError):  # closed here, or there
            pass
        except Exception as error:  # a frame that is none of this version
            why = f"{control.name} has failed: it sent what cannot be understood ({error!r})"
        finally:  # in any case, so that no caller waits for a result for ever
            if not self._closed:
                self._lose(why)

    def _lose(self, why: str) -> None:
        """A stage has gone: no step gets a result any more."""
        self._reports.append(why)
        self._reported.set()
        self._link.close()  # the core waits there
        for step in list(self._steps.values()):
            step.finish(None)
        for key in list(self._answers):
            if answer := self._answers.pop(key, None):
                answer.set_exception(self.explain())


@dataclass(frozen=True, slots=True)
class StageOutput:
    """What the last stage has made of a step; as `_core.StepOutput`."""

    ids: _core.Tensor | None
    logprob_ids: _core.Tensor | None
    logprobs: _core.Tensor | None
    logits: _core.Tensor | None
    aborted: bool

    @classmethod
    def of(cls, arrays: Mapping[str, Any], aborted: bool) -> StageOutput:
        """Make the output from the arrays of a frame."""
        found = {name: _core.from_numpy(arrays[name]) if name in arrays else None for name in OUTPUTS}
        return cls(**found, aborted=aborted)


class StagedStep:
    """A step on its way through all stages; as `_core.PendingStep`."""

    def __init__(self, engine: StagedEngine, number: int, batch: _core.Batch) -> None:
        self._engine, self._number, self._batch = engine, number, batch
        self._pending: _core.PendingStep | None = None  # the part of the first stage, until that is done
        self._failure: BaseException | None = None  # why that part failed
        self._output: StageOutput | None = None
        self._finished = threading.Event()

    def start(self, pending: _core.PendingStep) -> None:
        """The first stage has it."""
        self._pending = pending

    def finish(self, output: StageOutput | None) -> None:
        """The last stage is done with it; None: a stage has gone."""
        self._output = output
        self._finished.set()

    def wait(self, seconds: float) -> bool:
        """Whether it is done within so many seconds."""
        end = time.monotonic() + seconds
        if self._pending is not None:
            if not self._pending.wait(seconds):
                return False
            try:
                self._pending.result()
            except BaseException as error:  # then no other stage gives a result
                self._failure = error
                self._engine.forget(self._number)
                self._finished.set()
            self._pending = None
        return self._finished.wait(max(end - time.monotonic(), 0))

    def abort(self) -> None:
        """End it early, in whichever stage it is."""
        if self._pending is not None:
            self._pending.abort()
        self._engine.tell("abort", step=self._number)

    def give_masks(self) -> None:
        """Its masks are complete."""
        if self._pending is not None:
            self._pending.give_masks()
        self._engine.tell("masks", {"allowed": self._batch.arrays()["allowed"].numpy()}, step=self._number)

    def result(self) -> StageOutput:
        """Wait for it."""
        while not self.wait(_LOOK_EVERY_SECONDS):
            pass
        if self._failure is not None:
            if isinstance(self._failure, EngineDeadError) and _LOST in str(self._failure):
                raise self._engine.explain(self._failure) from None
            raise self._failure  # it is this stage that failed
        if self._output is None:
            raise self._engine.explain()
        return self._output
