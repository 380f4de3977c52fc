"""`ModelHost`: the models of a server, which of them are in memory, and who waits for one.

A model is absent, loading, ready, draining or failed:

- A request for one that is absent makes it load, and waits, as those that come meanwhile do.
- One that is ready answers. A request holds it (`ModelHost.lease`) from when its body is read to its last byte.
- One that is draining has to go, because it was idle for long, or another one needs its memory. What holds it runs to
  its end; who asks for it now waits until it is gone and loads it again.
- One that has failed, while it was loaded or later, tells so for some seconds, and then a request tries again.

Models load one at a time. Before that the least recently used of the others go, until the memory suffices: what each
takes is known from its plan (`infinilm.planning.together`), made at the start. Names of states and of the fields that
tell them are those of llama.cpp's server in router mode, where there are such.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from infinilm.config.families import family_of
from infinilm.errors import ConfigError, InfinilmError, WeightError, told
from infinilm.llm import LLM
from infinilm.planning.memory import ModelPlan
from infinilm.planning.sizes import format_bytes
from infinilm.planning.together import plan_together
from infinilm.planning.tower import TowerPlan
from infinilm.pooling.labels import LabelRecipe
from infinilm.pooling.recipe import VectorRecipe
from infinilm.pooling.task import task_of
from infinilm.server.bodies import ApiError
from infinilm.server.guard import Receive, attended
from infinilm.server.metrics import LoadedModels
from infinilm.server.service import Service, queue_full
from infinilm.server.settings import ServerSettings
from infinilm.serving.turns import Turns

__all__ = ["HostedModel", "ModelHost", "ModelSource"]

logger = logging.getLogger("infinilm.server")

T = TypeVar("T")

_RETRY_SECONDS = 5.0  # after a failure

_STATUS = {"absent": "unloaded", "ready": "loaded", "draining": "unloading", "failed": "unloaded"}


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that a server may load.

    Attributes
    ----------
    names : tuple of str
        Names of it in the API; the first is the one that answers carry.
    load : callable
        Makes the `LLM`, with a KV cache of so many bytes; None: as large as its settings say.
    plan : callable
        Plans it for so many free bytes.
    """

    names: tuple[str, ...]
    load: Callable[[int | None], LLM]
    plan: Callable[[int], ModelPlan]


@dataclass(eq=False, slots=True)
class HostedModel:
    """A model of a server, whether it is in memory or not.

    Attributes
    ----------
    service : Service
        Answers requests while the model is in memory, and counts for as long as the server runs.
    source : ModelSource or None
        None: the service has its model from elsewhere, and keeps it.
    state : str
        "absent", "loading", "ready", "draining" or "failed".
    num_bytes, kv_cache : int
        What it takes in memory, and its cache of that, by its plan; 0 and None: it was not planned.
    max_model_len, task, reads_images
        Known from the plan or since it was first loaded.
    num_leases, num_waiting : int
        Requests that hold it, and those that wait until it is ready.
    last_used : float
        When the last of these has ended: seconds of the event loop.
    num_loads : int
    failed_at : float
    loras : mapping of str to Path
        The adapters that it had when it was unloaded.
    """

    service: Service
    source: ModelSource | None
    state: str = "absent"
    num_bytes: int = 0
    kv_cache: int | None = None
    max_model_len: int | None = None
    task: str | None = None
    reads_images: bool = False
    num_leases: int = 0
    num_waiting: int = 0
    last_used: float = 0.0
    num_loads: int = 0
    failed_at: float = -math.inf
    loras: dict[str, Path] = field(default_factory=dict)
    timer: asyncio.TimerHandle | None = None

    @property
    def name(self) -> str:
        """The name that its answers carry."""
        return self.service.settings.model_names[0]

    @property
    def names(self) -> tuple[str, ...]:
        """All that requests may name: the model, then its adapters."""
        return (*self.service.settings.model_names, *(self.service.loras or self.loras))

    def status(self) -> dict[str, Any]:
        """What /v1/models tells of its state."""
        state = "ready" if self.source is None else self.state
        failed = {"failed": True} if state == "failed" else {}
        return {"value": _STATUS.get(state, state), **failed}

    def learn(self) -> None:
        """Note what is told of it while it is not in memory, if it is now."""
        if (llm := self.service.loaded) is not None:
            self.max_model_len, self.task, self.reads_images = llm.max_model_len, llm.task, llm.reads_images


class ModelHost:
    """The models of a server.

    Parameters
    ----------
    settings : ServerSettings
        Its `model_names` are those of the first model, which requests mean that name none.
    sources : sequence of ModelSource
        None: a service that gets its model from elsewhere (`Service.serve`).
    keep_alive : float, optional
        Seconds after the last request until a model is unloaded; None: it stays, unless others need its memory.
    on_demand : bool
        Models are loaded when they are first asked for, and need not fit in memory together.
    free_bytes : int, optional
        What all models may take together; None: what is free.
    max_wait : float, optional
        Seconds that a request waits for its model at most.

    Attributes
    ----------
    models : list of HostedModel
    collectors : tuple of Collector
        Metrics of the models together.
    """

    def __init__(
        self,
        settings: ServerSettings,
        sources: Sequence[ModelSource] = (),
        *,
        keep_alive: float | None = None,
        on_demand: bool = False,
        free_bytes: int | None = None,
        max_wait: float | None = None,
    ) -> None:
        self._keep_alive, self._on_demand, self._free_bytes = keep_alive, on_demand, free_bytes
        self._max_wait = max_wait
        first = Service(settings)
        self.models = [HostedModel(first, sources[0] if sources else None)]
        for source in sources[1:]:
            self.models.append(HostedModel(first.beside(source.names), source))
        self._budget: float = math.inf  # bytes of all models together
        self._turns = Turns()
        self._is_started = False
        self._loading = asyncio.Lock()  # models load one at a time
        self._changed = asyncio.Event()  # of this moment: set at the next change that requests or loads may wait for
        self._tasks: set[asyncio.Task[Any]] = set()
        several = LoadedModels(lambda: [(m.name, m.state == "ready", m.num_loads) for m in self.models])
        self.collectors = () if self.is_alone else (several,)
        for model in self.models:
            model.service.names_elsewhere = partial(self._names_beside, model)
            model.service.on_death = partial(self._bury, model)

    # ---- what there is ----

    @property
    def first(self) -> Service:
        """The service of the first model."""
        return self.models[0].service

    @property
    def is_alone(self) -> bool:
        """Whether there is one model."""
        return len(self.models) == 1

    @property
    def death(self) -> BaseException | None:
        """What ended the engine of the only model; one of several is loaded again."""
        return self.first.death if self.is_alone else None

    async def died(self) -> None:
        """Wait until the engine of the only model is dead."""
        await self.first.died()

    def state(self) -> str:
        """Whether requests are served, "ok", or why not: "loading", "draining", "dead"."""
        state = self.first.state() if self.is_alone else "draining" if self.first.is_draining else "loading"
        return "ok" if state == "loading" and self._is_started else state

    def check_open(self) -> None:
        """ApiError while nothing new may begin."""
        if (state := self.state()) != "ok":
            raise ApiError(f"the server is {state}", 503, code=state, headers={"Retry-After": "5"})

    @property
    def model_names(self) -> tuple[str, ...]:
        """All that requests may name."""
        return tuple(name for model in self.models for name in model.names)

    def _names_beside(self, model: HostedModel) -> tuple[str, ...]:
        return tuple(name for other in self.models if other is not model for name in other.names)

    def find(self, name: str | None) -> HostedModel:
        """The model that a request names, or an adapter of it; None: the first. ApiError: there is none."""
        if name is None:
            return self.models[0]
        for model in self.models:
            if name in model.names:
                return model
        served = ", ".join(map(repr, self.model_names))
        raise ApiError(
            f"the model {name!r:.200} does not exist here; served: {served}", 404, param="model", code="model_not_found"
        )

    # ---- requests ----

    @contextlib.asynccontextmanager
    async def lease(self, name: str | None, receive: Receive | None = None) -> AsyncIterator[Service]:
        """Hold a model for a request, which waits until the model is loaded.

        Parameters
        ----------
        name : str or None
            As in `find`.
        receive : callable, optional
            ASGI's, behind the body: a client that leaves while it waits waits no longer.

        Raises
        ------
        ApiError
            There is no such model, or it cannot be loaded; too many wait; nothing new may begin.
        """
        model = self.find(name)
        while model.source is not None and model.state != "ready":
            await self._wait_for(model, receive)
        model.num_leases += 1
        try:
            yield model.service
        finally:
            model.num_leases -= 1
            self._rest(model)

    async def _wait_for(self, model: HostedModel, receive: Receive | None) -> None:
        if model.num_waiting >= max(model.service.settings.max_queued_requests, 1):
            model.service.metrics.num_refused += 1
            raise queue_full(f"{model.num_waiting} requests wait until {model.name!r} is loaded; try again later")
        ready = self._ready(model)
        model.num_waiting += 1
        try:
            await (asyncio.wait_for(ready, self._max_wait) if receive is None else self._attended(receive, ready))
        except asyncio.TimeoutError:
            raise ApiError(
                f"the model {model.name!r} was not loaded within {self._max_wait:g} s, the time limit of this server: "
                "try again later",
                504,
                code="timeout",
            ) from None
        finally:
            model.num_waiting -= 1
            self._rest(model)

    def _attended(self, receive: Receive, ready: Coroutine[Any, Any, None]) -> Coroutine[Any, Any, None]:
        return attended(receive, ready, self._max_wait)

    async def _ready(self, model: HostedModel) -> None:
        """Wait until a model is ready, which is loaded if it is not."""
        while model.state != "ready":
            self.check_open()
            if model.state == "failed" and self._now() - model.failed_at < _RETRY_SECONDS:
                raise ApiError(
                    f"the model {model.name!r} has failed; the log of the server says why",
                    503,
                    code="model_failed",
                    headers={"Retry-After": f"{_RETRY_SECONDS:g}"},
                )
            if model.state in ("absent", "failed"):
                model.state = "loading"
                self._begin(self._load_if_wanted(model))
            await self._changed.wait()

    def _rest(self, model: HostedModel) -> None:
        """A request has left a model or waits for it no longer, or it was loaded: it may be idle from now."""
        model.last_used = self._now()
        if model.num_leases:
            return
        self._change()
        if model.timer is not None:
            model.timer.cancel()
        if self._keep_alive is not None and model.source is not None:
            model.timer = asyncio.get_running_loop().call_later(self._keep_alive, self._expire, model)

    def _expire(self, model: HostedModel) -> None:
        if model.state == "ready" and not (model.num_leases or model.num_waiting):
            logger.info("%s was idle for %g s and is unloaded", model.name, self._keep_alive)
            model.state = "draining"
            self._begin(self._unload(model))

    # ---- the life of models ----

    async def start(self) -> None:
        """Plan the memory of all models, and load those that are not loaded on demand. Raises what makes it fail."""
        if not self.is_alone or self._on_demand:
            await _in_daemon(self._plan)
        for model in self.models if not self._on_demand else ():
            model.state = "loading"
            await self._load(model)
        self._is_started = True
        self._change()

    def _plan(self) -> None:
        """Decide what each model may take."""
        sources = {model.name: model.source for model in self.models if model.source is not None}
        planners = {name: source.plan for name, source in sources.items()}
        plans, self._budget = plan_together(planners, self._free_bytes, must_fit=not self._on_demand)
        for model in self.models:
            plan = plans[model.name]
            model.num_bytes, model.kv_cache = plan.memory.total_bytes, plan.memory.kv_budget_bytes
            model.max_model_len, model.reads_images = plan.memory.max_model_len, isinstance(plan.tower, TowerPlan)
            labels = None
            if plan.config.head == "score":
                head = family_of(plan.config.architecture).label_head
                labels = LabelRecipe.from_model(plan.path, head.pooling)
            vectors = VectorRecipe.from_model(plan.path, plan.config.hidden_size)
            model.task = task_of(plan.config.head, labels, vectors, is_encoder=plan.config.is_encoder)

    async def _load_if_wanted(self, model: HostedModel) -> None:
        """Load a model that requests wait for; these are told of a failure."""
        try:
            async with self._loading:
                if await self._make_room(model):
                    await self._load(model)
                else:
                    model.state = "absent"
        except BaseException as error:  # otherwise those who wait for it would wait for ever
            logger.exception("the model %s cannot be loaded: %s", model.name, told(error))
            model.state, model.failed_at = "failed", self._now()
        finally:
            self._change()

    async def _make_room(self, model: HostedModel) -> bool:
        """Unload others until there is memory for a model; False: no request waits for it any more."""
        while self._num_bytes() + model.num_bytes > self._budget:
            if not model.num_waiting:
                return False
            if any(other.state == "draining" for other in self.models):
                await self._changed.wait()
                continue
            # Each model fits alone, so there is another one. One that answers goes last.
            ready = [other for other in self.models if other.state == "ready"]
            victim = min(ready, key=lambda other: (other.num_leases > 0, other.last_used))
            if victim.num_waiting:  # it has just been loaded for those that are about to hold it
                await asyncio.sleep(0)
                continue
            logger.info("%s is unloaded, as %s needs its memory", victim.name, model.name)
            victim.state = "draining"
            while victim.num_leases and model.num_waiting:
                await self._changed.wait()
            if victim.num_leases:
                victim.state = "ready"
                if victim.service.death is not None:  # which has come meanwhile
                    self._bury(victim)
                self._change()
                return False
            await self._unload(victim)
        return bool(model.num_waiting)

    def _num_bytes(self) -> int:
        return sum(model.num_bytes for model in self.models if model.state in ("ready", "draining"))

    async def _load(self, model: HostedModel) -> None:
        assert model.source is not None
        llm = await _in_daemon(partial(self._loaded, model, model.source))
        model.service.serve(llm)
        model.learn()
        model.state = "ready"
        model.num_loads += 1
        self._rest(model)
        self._change()
        logger.info("%s is loaded and takes %s", model.name, format_bytes(llm.memory.total_bytes))

    def _loaded(self, model: HostedModel, source: ModelSource) -> LLM:
        """Load, in a thread."""
        llm = source.load(model.kv_cache)
        if not self.is_alone or llm.config.is_encoder:  # alone, so that its queries overtake its passages
            llm.take_turns(self._turns)
        for name, folder in model.loras.items():
            if name not in llm.loras:
                try:
                    llm.add_lora(name, folder)
                except (ConfigError, WeightError, OSError) as error:
                    logger.error("the adapter %s is not loaded again: %s", name, told(error))
        return llm

    async def _unload(self, model: HostedModel, then: str = "absent") -> None:
        """Free a model that no request holds, whose state says already that it goes; `then`: its state afterwards."""
        llm = model.service.leave()
        if llm is not None:
            model.loras = dict(llm.loras)
            with contextlib.suppress(InfinilmError):
                await asyncio.to_thread(llm.close)
        model.state = then
        self._change()

    def _bury(self, model: HostedModel) -> None:
        """The engine of a model has died: free the model, so that it is loaded again. The only one ends the process."""
        if self.is_alone or model.state != "ready":
            return
        logger.error("the engine of %s died: %s", model.name, model.service.death)
        model.state, model.failed_at = "draining", self._now()
        self._begin(self._unload_dead(model))

    async def _unload_dead(self, model: HostedModel) -> None:
        while model.num_leases:  # of requests that are being told
            await self._changed.wait()
        await self._unload(model, "failed")

    async def drain(self) -> None:
        """Let nothing new in, and wait until what runs has ended."""
        for model in self.models:
            model.service.is_draining = True
        self._change()
        await asyncio.gather(*(model.service.drain() for model in self.models))

    def close(self) -> None:
        """Free all models; running requests fail."""
        for model in self.models:
            if (llm := model.service.leave()) is not None:
                llm.close()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _change(self) -> None:
        """Wake all who wait for a change."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _in_daemon(work: Callable[[], T]) -> asyncio.Future[T]:
    """Do work in a thread that the process does not wait for: a signal ends it while a large model is being read."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(results: list[T], error: BaseException | None) -> None:
        if done.done():  # cancelled
            return
        if error is None:
            done.set_result(results[0])
        else:
            done.set_exception(error)

    def run() -> None:
        results: list[T] = []
        failure: BaseException | None = None
        try:
            results.append(work())
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell, results, failure)

    threading.Thread(target=run, name="infinilm-load", daemon=True).start()
    return done
