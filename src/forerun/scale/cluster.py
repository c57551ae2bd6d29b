"""Replicas on Ray Serve: the deployment, its router, the way to it, and their beginning and end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import random
import signal
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import ray
import torch
from ray import serve
from ray.exceptions import RayActorError, RayError, WorkerCrashedError
from ray.serve.api import RunTarget
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.exceptions import RayServeException, RequestCancelledError
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview

from forerun.core.config import COUNT, check_within
from forerun.core.errors import ConfigError, one_line
from forerun.engine.client import ClosedError
from forerun.engine.metrics import Snapshot
from forerun.scale.affinity import BLOCK, Affinity, blocks
from forerun.scale.pool import LostError, ReplicaPool
from forerun.scale.replica import KEPT, Entry, Facts, Line, Message, Outbox, Replica, Request, alike

log = logging.getLogger("forerun")

ENGINE = "engine"
"""The deployment's name."""
PERIOD = 1.0
"""Seconds between two looks at how the replicas stand."""
GROW, SHRINK = 5.0, 600.0
"""Seconds that the load must want more replicas, or fewer, before it gets them."""
UNTOLD = 10.0
"""Seconds after which replicas that do not say how they stand are not there."""


@dataclass(frozen=True)
class Replicas:
    """What to run: ``engine`` and ``speculative`` as for ``Replica``, ``threads`` for each; ``number`` of them, or as
    many between ``number`` and ``most`` as the load wants. Raises ConfigError for numbers that make no sense."""

    engine: Mapping[str, Any] = field(default_factory=dict)
    speculative: Any = None
    number: int = 1
    most: int | None = None
    threads: int = 1
    max_queue: int = 1024
    affine: bool = True
    """False: requests go to replicas drawn by chance, wherever their prompts have been."""
    drain_seconds: float = 600.0
    """That a replica which is replaced has for what it has begun; what is left then goes on elsewhere."""

    def __post_init__(self) -> None:
        check_within(self, {"number threads": COUNT})
        if self.most is not None and self.most < self.number:
            raise ConfigError(f"max_replicas ({self.most}) is less than the replicas to begin with ({self.number})")

    @property
    def cores(self) -> int:
        """That one of them computes with."""
        return self.threads * int(self.engine.get("tensor_parallel_size") or 1)

    def bound(self) -> serve.Application:
        """The deployment, bound to its arguments."""
        count: dict[str, Any] = {"num_replicas": self.number}
        if self.most is not None:
            policy = AutoscalingPolicy(policy_function="forerun.scale.affinity:policy")
            count = {
                "autoscaling_config": AutoscalingConfig(
                    min_replicas=self.number,
                    max_replicas=self.most,
                    policy=policy,
                    upscale_delay_s=GROW,
                    downscale_delay_s=SHRINK,
                )
            }
        router = RequestRouterConfig(
            request_router_class="forerun.scale.cluster:AffineRouter",
            request_router_kwargs={"block": int(self.engine.get("page_size") or BLOCK), "affine": self.affine},
        )
        deployment = serve.deployment(EngineReplica).options(
            name=ENGINE,
            ray_actor_options={"num_cpus": self.cores},
            max_ongoing_requests=4096,
            graceful_shutdown_timeout_s=self.drain_seconds,
            health_check_period_s=2,
            request_router_config=router,
            **count,
        )
        return deployment.bind(dict(self.engine), self.speculative, self.threads, self.max_queue)


class EngineReplica:
    """The deployment."""

    def __init__(self, engine: Mapping[str, Any], speculative: Any, threads: int, max_queue: int) -> None:
        torch.set_num_threads(threads)
        self.replica = Replica(engine, speculative, max_queue=max_queue)
        self.name = serve.get_replica_context().replica_id.unique_id
        self.outboxes: dict[str, Outbox] = {}

    async def answer(self, request: Request, front: str, number: int) -> AsyncGenerator[str]:
        """This replica's name. What the answer says is for the front to ``listen`` to."""
        outbox = self.outboxes.setdefault(front, Outbox())
        outbox.begin()
        try:
            yield self.name
            async with contextlib.aclosing(self.replica.answer(request)) as messages:
                async for message in messages:
                    outbox.put(number, message)
            outbox.put(number, None)
        finally:
            outbox.end()
            self._forget_later(front, outbox)

    async def listen(self, line: Line) -> AsyncGenerator[list[Entry]]:
        """What this replica's answers to a front say. Raises ClosedError if it is another replica that was meant."""
        if line.replica != self.name:
            raise ClosedError(f"replica {line.replica} cannot be reached")
        outbox = self.outboxes.setdefault(line.front, Outbox())
        outbox.listeners += 1
        try:
            while entries := await outbox.taken():
                yield entries
        finally:
            outbox.listeners -= 1
            self._forget_later(line.front, outbox)

    def _forget_later(self, front: str, outbox: Outbox) -> None:
        """Let go of what nobody answers to or takes from any more: a front may be gone."""

        def forget() -> None:
            if not outbox.used and self.outboxes.get(front) is outbox:
                del self.outboxes[front]

        if not outbox.used:
            asyncio.get_running_loop().call_later(KEPT, forget)

    async def facts(self) -> Facts:
        return self.replica.facts

    async def snapshot(self) -> Snapshot:
        return self.replica.snapshot()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        usage, capacity = self.replica.snapshot().usage, self.replica.facts.max_num_seqs
        return {
            "usage": usage,
            "capacity": capacity,
            "listeners": sum(each.listeners for each in self.outboxes.values()),
        }

    def __del__(self) -> None:
        if hasattr(self, "replica"):
            self.replica.close()


class AffineRouter(RequestRouter):
    """Ray Serve's router of requests to replicas: ``Affinity``'s order."""

    def initialize_state(self, block: int = BLOCK, affine: bool = True) -> None:
        self.block, self.affinity = block, Affinity()
        self.affine = affine
        self.ongoing: dict[Any, set[str]] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        line = _first(pending_request)
        if isinstance(line, Line):
            named = [replica for name, replica in by_id.items() if name.unique_id == line.replica]
            return [named or candidate_replicas]
        for name in [name for name in self.ongoing if name not in by_id]:
            del self.ongoing[name]
            self.affinity.forget(name)
        if self.affine:
            load = {name: len(self.ongoing.get(name, ())) for name in by_id}
            request = _request(pending_request)
            refused = 0 if request is None else request.misfits
            order = self.affinity.order(load, *self._of(pending_request), refused=refused)
        else:
            order = random.sample(list(by_id), len(by_id))
        return [[by_id[name]] for name in order]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: Any, result: Any) -> None:
        if _request(pending_request) is None:
            return
        self.ongoing.setdefault(replica_id, set()).add(pending_request.metadata.internal_request_id)
        if self.affine:
            self.affinity.note(replica_id, *self._of(pending_request))

    def _of(self, pending: PendingRequest | None) -> tuple[list[bytes], str | None]:
        """The names of the blocks, and the session, of a request, if it is one of ours."""
        request = _request(pending)
        if request is None:
            return [], None
        return list(blocks([*request.prompt, *request.committed], self.block)), request.session

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        self.ongoing.get(replica_id, set()).discard(internal_request_id)


def _first(pending: PendingRequest | None) -> Any:
    return pending.args[0] if pending is not None and pending.args else None


def _request(pending: PendingRequest | None) -> Request | None:
    first = _first(pending)
    return first if isinstance(first, Request) else None


@dataclass
class _Inbox:
    """What a replica has said of one answer."""

    said: asyncio.Queue[Message | Exception | None] = field(default_factory=asyncio.Queue)
    line: Line | None = None
    """On which it comes."""


@contextlib.contextmanager
def _lost(inboxes: Callable[[], list[_Inbox]]) -> Iterator[None]:
    """Tell those who wait for a replica that it is lost."""
    try:
        yield
    except RequestCancelledError:
        pass  # by us
    except Exception as error:  # it belongs to whoever waits
        reported = (
            LostError(one_line(error)) if isinstance(error, (RayError, RayServeException, ClosedError)) else error
        )
        if not isinstance(error, (RayActorError, WorkerCrashedError, ClosedError)):
            log.error("a replica failed with a request", exc_info=error)
        for inbox in inboxes():
            inbox.said.put_nowait(reported)


class Cluster:
    """The way from this process to the replicas behind ``handle``."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self.handle = handle
        self.answering = handle.options(stream=True, method_name="answer")
        self.listen = handle.options(stream=True, method_name="listen")
        self.number = 1
        self._name = uuid4().hex
        self._numbers = itertools.count()
        self._inboxes: dict[int, _Inbox] = {}
        """By number: of what is being answered."""
        self._listening: dict[Line, asyncio.Task[None]] = {}

    async def facts(self) -> Facts:
        """Of one of the replicas. Raises ConfigError where others have another checkpoint or version."""
        result: Facts = await self.handle.options(method_name="facts").remote()
        reported = await asyncio.to_thread(self._all, "facts")
        alike(item.checkpoint for item in reported if isinstance(item, Facts))
        return result

    async def send(self, request: Request) -> AsyncGenerator[Message]:
        """A pool's ``send``."""
        number, inbox = next(self._numbers), _Inbox()
        self._inboxes[number] = inbox
        asked = self.answering.remote(request, self._name, number)
        task = asyncio.create_task(self._ask(asked, self._name, inbox))
        try:
            while (said := await inbox.said.get()) is not None:
                if isinstance(said, Exception):
                    raise said
                yield said
        finally:
            task.cancel()
            asked.cancel()
            del self._inboxes[number]

    async def _ask(self, asked: Any, name: str, inbox: _Inbox) -> None:
        """See to it that the replica that answers is listened to, and that its loss is noticed."""
        with _lost(lambda: [inbox]):
            async for replica in asked:
                inbox.line = Line(replica, name)
                if inbox.line not in self._listening:
                    # Not in the request's own context: Ray Serve would end this with the request.
                    task = asyncio.create_task(self._listen(inbox.line), context=Context())
                    self._listening[inbox.line] = task

    async def _listen(self, line: Line) -> None:
        """Give what a replica says to whom it is for, as long as there is anyone."""

        def inboxes() -> list[_Inbox]:
            return [inbox for inbox in self._inboxes.values() if inbox.line == line]

        def lost() -> list[_Inbox]:
            # Whatever still takes from this line's outbox must not take from that of later requests.
            self._name = uuid4().hex
            return inboxes()

        try:
            with _lost(lost):
                while inboxes():
                    async for entries in self.listen.remote(line):
                        for number, said in entries:
                            if number in self._inboxes:
                                self._inboxes[number].said.put_nowait(said)
        finally:
            del self._listening[line]
            if inboxes():
                for inbox in lost():
                    inbox.said.put_nowait(LostError(f"replica {line.replica} cannot be listened to any more"))

    async def pool(self, max_queue: int) -> ReplicaPool:
        """The replicas as one engine, which knows how they stand for as long as the event loop runs."""
        facts = await self.facts()
        pool = ReplicaPool(facts, self.send, max_queue=max_queue, capacity=lambda: self.number * facts.max_num_seqs)
        pool.latest = await asyncio.to_thread(self.together)
        self.watching = asyncio.create_task(self.watch(pool))
        return pool

    async def watch(self, pool: ReplicaPool) -> None:
        """Tell ``pool`` how the replicas stand, for as long as it runs."""
        while True:
            try:
                pool.latest = await asyncio.to_thread(self.together)
            except (RayError, RayServeException, TimeoutError) as error:
                log.warning("replicas do not say how they stand: %s", one_line(error))
                pool.latest = None
            await asyncio.sleep(PERIOD)

    def together(self) -> Snapshot:
        """How the replicas stand that say so within ``UNTOLD`` seconds. Raises TimeoutError where none does."""
        reported = [item for item in self._all("snapshot") if isinstance(item, Snapshot)]
        if not reported:
            raise TimeoutError("there is none")
        self.number = len(reported)
        return Snapshot.merged(reported)

    def _all(self, method: str) -> list[Any]:
        """What every replica says, or its exception."""
        return list(self.handle.broadcast(method).results(timeout_s=UNTOLD, return_exceptions=True))


NAME = "forerun"
"""With which the names of applications on Ray Serve begin: each run has its own."""
ADDRESS = "RAY_ADDRESS"
"""The variable that names a Ray cluster; without it, one is made on this machine."""
START = 600.0
"""Seconds in which the replicas must come up."""


@contextlib.contextmanager
def cluster(*requested: Replicas) -> Iterator[list[DeploymentHandle]]:
    """The running replicas, an application for each of ``requested``; on leaving, they end. Raises ConfigError where
    they do not come up."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    local = ADDRESS not in os.environ
    cores = sum((replicas.most or replicas.number) * replicas.cores for replicas in requested)
    ray.init(
        num_cpus=cores if local else None, include_dashboard=False if local else None, log_to_driver=False,
        logging_level=logging.ERROR, configure_logging=False,
    )  # fmt: skip
    try:
        with contextlib.ExitStack() as begun:
            begun.callback(ray.shutdown)
            serve.start(proxy_location="Disabled")
            handles = []
            for replicas in requested:
                name = f"{NAME}-{uuid4().hex[:8]}"
                begun.callback(serve.delete, name)
                handles.append(started(replicas, name))
            yield handles
    except SystemExit as ended:
        if ended.code != signal.SIGTERM:
            raise
        # Ray's handler made an exit of it, so that the replicas end; whoever sent it should not see a failure.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)


def started(replicas: Replicas, name: str) -> DeploymentHandle:
    """Deploy, or update what is deployed, and wait until all of it runs. Raises ConfigError if it does not."""
    target = RunTarget(replicas.bound(), name=name, route_prefix=None)
    (handle,) = serve.run_many([target], wait_for_applications_running=False)
    ends, reported = time.monotonic() + START, ""
    while True:
        application = serve.status().applications[name]
        if application.status == ApplicationStatus.RUNNING:
            return handle
        if application.status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY):
            raise ConfigError(f"the replicas do not come up: {_cause(application)}")
        if time.monotonic() > ends:
            raise ConfigError(f"the replicas have not come up within {START:g} seconds: {_cause(application)}")
        said = _said(application)
        if said != reported:
            log.warning("the replicas are not up yet: %s", _cause(application))
        reported = said
        time.sleep(0.1)


def _said(application: ApplicationStatusOverview) -> str:
    """What Ray says of replicas that do not run yet."""
    return " ".join(item.message for item in application.deployments.values()) or application.message


def _cause(application: ApplicationStatusOverview) -> str:
    """The last line of that, which is an exception's; how the replicas stand where there is none."""
    lines = [line.strip() for line in _said(application).splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line.split(":")[0] and not line.startswith("ray")]
    states = [item.replica_states for item in application.deployments.values()]
    stand = ", ".join(f"{count} {name.lower()}" for each in states for name, count in each.items())
    return (errors or lines or [stand or "none has been begun"])[-1]
