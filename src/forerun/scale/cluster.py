"""Replicas on Ray Serve: the deployment, its router, the client of it, and how they are started and stopped."""

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
from forerun.scale.affinity import BLOCK, Affinity, block_hashes
from forerun.scale.pool import LostError, ReplicaPool
from forerun.scale.replica import Entry, Facts, Message, Outbox, Replica, Request, Subscription, check_same

log = logging.getLogger("forerun")

ENGINE = "engine"
"""The deployment's name."""
SNAPSHOT_PERIOD = 1.0
"""Seconds between two snapshots of the replicas."""
SNAPSHOT_TIMEOUT = 10.0
"""Seconds after which a replica that gives no snapshot counts as absent."""
UPSCALE_DELAY, DOWNSCALE_DELAY = 5.0, 600.0
"""Seconds for which the load must need more replicas, or fewer, before their number changes."""
OUTBOX_TIMEOUT = 60.0
"""Seconds after which the outbox of a front that neither asks nor listens is deleted."""


@dataclass(frozen=True)
class Replicas:
    """The replicas to run.

    ``engine`` and ``speculative`` are as for ``Replica``. With ``max_replicas``, their number follows the load between
    ``num_replicas`` and that. Raises ConfigError for numbers that make no sense.
    """

    engine: Mapping[str, Any] = field(default_factory=dict)
    speculative: Any = None
    num_replicas: int = 1
    max_replicas: int | None = None
    threads: int = 1
    """CPU threads of each."""
    max_queue: int = 1024
    affine: bool = True
    """False: requests go to random replicas, whatever these have cached."""
    drain_seconds: float = 600.0
    """For the running requests of a replica that is replaced; after that they continue on others."""

    def __post_init__(self) -> None:
        check_within(self, {"num_replicas threads": COUNT})
        if self.max_replicas is not None and self.max_replicas < self.num_replicas:
            raise ConfigError(f"max_replicas ({self.max_replicas}) is less than replicas ({self.num_replicas})")

    @property
    def cores(self) -> int:
        """CPU cores of each."""
        return self.threads * int(self.engine.get("tensor_parallel_size") or 1)

    def bind(self) -> serve.Application:
        """Returns the deployment, bound to its arguments."""
        count: dict[str, Any] = {"num_replicas": self.num_replicas}
        if self.max_replicas is not None:
            autoscaling = AutoscalingConfig(
                min_replicas=self.num_replicas,
                max_replicas=self.max_replicas,
                policy=AutoscalingPolicy(policy_function="forerun.scale.affinity:policy"),
                upscale_delay_s=UPSCALE_DELAY,
                downscale_delay_s=DOWNSCALE_DELAY,
            )
            count = {"autoscaling_config": autoscaling}
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
    """The deployment: answers requests of fronts, and sends them the messages to which they subscribe."""

    def __init__(self, engine: Mapping[str, Any], speculative: Any, threads: int, max_queue: int) -> None:
        torch.set_num_threads(threads)
        self.replica = Replica(engine, speculative, max_queue=max_queue)
        self.name = serve.get_replica_context().replica_id.unique_id
        self.outboxes: dict[str, Outbox] = {}

    async def answer(self, request: Request, front: str, number: int) -> AsyncGenerator[str]:
        """Yields this replica's name. The front receives the messages of the answer by ``listen``."""
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
            self._delete_later(front, outbox)

    async def listen(self, subscription: Subscription) -> AsyncGenerator[list[Entry]]:
        """Yields the messages of this replica's answers to a front. Raises ClosedError if another replica is meant."""
        if subscription.replica != self.name:
            raise ClosedError(f"replica {subscription.replica} cannot be reached")
        outbox = self.outboxes.setdefault(subscription.front, Outbox())
        outbox.listeners += 1
        try:
            while entries := await outbox.take():
                yield entries
        finally:
            outbox.listeners -= 1
            self._delete_later(subscription.front, outbox)

    def _delete_later(self, front: str, outbox: Outbox) -> None:
        """Deletes an outbox after a while, unless it is used again: its front may be gone."""

        def delete() -> None:
            if not outbox.used and self.outboxes.get(front) is outbox:
                del self.outboxes[front]

        if not outbox.used:
            asyncio.get_running_loop().call_later(OUTBOX_TIMEOUT, delete)

    async def facts(self) -> Facts:
        return self.replica.facts

    async def snapshot(self) -> Snapshot:
        return self.replica.engine.snapshot()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return {
            "usage": self.replica.engine.snapshot().usage,
            "capacity": self.replica.facts.max_num_seqs,
            "listeners": sum(outbox.listeners for outbox in self.outboxes.values()),
        }

    def __del__(self) -> None:
        if hasattr(self, "replica"):
            self.replica.engine.close()


class AffineRouter(RequestRouter):
    """Ray Serve's router of requests to replicas, in the order of ``Affinity``."""

    def initialize_state(self, block: int = BLOCK, affine: bool = True) -> None:
        self.block, self.affine = block, affine
        self.affinity = Affinity()
        self.ongoing: dict[Any, set[str]] = {}
        """By replica: the ids of its requests in progress."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        request = _argument(pending_request)
        if isinstance(request, Subscription):
            named = [replica for name, replica in by_id.items() if name.unique_id == request.replica]
            return [named or candidate_replicas]
        for name in [name for name in self.ongoing if name not in by_id]:
            del self.ongoing[name]
            self.affinity.forget(name)
        if self.affine:
            load = {name: len(self.ongoing.get(name, ())) for name in by_id}
            rejections = request.rejections if isinstance(request, Request) else 0
            order = self.affinity.order(load, *self._keys(request), rejections=rejections)
        else:
            order = random.sample(list(by_id), len(by_id))
        return [[by_id[name]] for name in order]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: Any, result: Any) -> None:
        request = _argument(pending_request)
        if not isinstance(request, Request):
            return
        self.ongoing.setdefault(replica_id, set()).add(pending_request.metadata.internal_request_id)
        if self.affine:
            self.affinity.note(replica_id, *self._keys(request))

    def _keys(self, request: Any) -> tuple[list[bytes], str | None]:
        """Returns the block hashes and the session of a request; none for anything else."""
        if not isinstance(request, Request):
            return [], None
        return list(block_hashes([*request.prompt, *request.committed], self.block)), request.session

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        self.ongoing.get(replica_id, set()).discard(internal_request_id)


def _argument(pending: PendingRequest | None) -> Any:
    """The request to Ray: a ``Request`` or ``Subscription``, or neither."""
    return pending.args[0] if pending is not None and pending.args else None


@dataclass
class _Inbox:
    """The messages of one answer that were received."""

    messages: asyncio.Queue[Message | Exception | None] = field(default_factory=asyncio.Queue)
    subscription: Subscription | None = None
    """By which they come."""


@contextlib.contextmanager
def _report_loss(inboxes: Callable[[], list[_Inbox]]) -> Iterator[None]:
    """Puts an exception of a replica into the ``inboxes`` of those who wait for it."""
    try:
        yield
    except RequestCancelledError:
        pass  # by us
    except Exception as error:  # those who wait get it
        if not isinstance(error, (RayActorError, WorkerCrashedError, ClosedError)):
            log.error("a replica failed with a request", exc_info=error)
        lost = isinstance(error, (RayError, RayServeException, ClosedError))
        for inbox in inboxes():
            inbox.messages.put_nowait(LostError(one_line(error)) if lost else error)


class Cluster:
    """The client of the replicas behind ``handle``, in this process, which is a front."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self.handle = handle
        self.answering = handle.options(stream=True, method_name="answer")
        self.listen = handle.options(stream=True, method_name="listen")
        self.num_replicas = 1
        self._name = uuid4().hex
        self._numbers = itertools.count()
        self._inboxes: dict[int, _Inbox] = {}
        """By number: those of answers in progress."""
        self._listening: dict[Subscription, asyncio.Task[None]] = {}

    async def facts(self) -> Facts:
        """Returns one replica's facts. Raises ConfigError if others have another checkpoint or version."""
        result: Facts = await self.handle.options(method_name="facts").remote()
        reported = await asyncio.to_thread(self._call_all, "facts")
        check_same(item.checkpoint for item in reported if isinstance(item, Facts))
        return result

    async def send(self, request: Request) -> AsyncGenerator[Message]:
        """The ``Send`` of a pool."""
        number, inbox = next(self._numbers), _Inbox()
        self._inboxes[number] = inbox
        response = self.answering.remote(request, self._name, number)
        task = asyncio.create_task(self._subscribe(response, self._name, inbox))
        try:
            while (message := await inbox.messages.get()) is not None:
                if isinstance(message, Exception):
                    raise message
                yield message
        finally:
            task.cancel()
            response.cancel()
            del self._inboxes[number]

    async def _subscribe(self, response: Any, front: str, inbox: _Inbox) -> None:
        """Subscribes to the replica that answers, and notices its loss."""
        with _report_loss(lambda: [inbox]):
            async for replica in response:
                inbox.subscription = subscription = Subscription(replica, front)
                if subscription not in self._listening:
                    # Not in the request's own context: Ray Serve would end this with the request.
                    task = asyncio.create_task(self._listen(subscription), context=Context())
                    self._listening[subscription] = task

    async def _listen(self, subscription: Subscription) -> None:
        """Puts the messages of a replica into inboxes, for as long as there are any."""

        def inboxes() -> list[_Inbox]:
            return [inbox for inbox in self._inboxes.values() if inbox.subscription == subscription]

        def lost() -> list[_Inbox]:
            # Whoever still takes from the outbox of this subscription must not take from that of later requests.
            self._name = uuid4().hex
            return inboxes()

        try:
            with _report_loss(lost):
                while inboxes():
                    async for entries in self.listen.remote(subscription):
                        for number, message in entries:
                            if number in self._inboxes:
                                self._inboxes[number].messages.put_nowait(message)
        finally:
            del self._listening[subscription]
            if inboxes():
                for inbox in lost():
                    error = LostError(f"replica {subscription.replica} cannot be listened to any more")
                    inbox.messages.put_nowait(error)

    async def pool(self, max_queue: int) -> ReplicaPool:
        """Returns the replicas as one engine, with snapshots of them for as long as the event loop runs."""
        facts = await self.facts()
        pool = ReplicaPool(
            facts, self.send, max_queue=max_queue, capacity=lambda: self.num_replicas * facts.max_num_seqs
        )
        pool.latest = await asyncio.to_thread(self.snapshot)
        self.watching = asyncio.create_task(self.watch(pool))
        return pool

    async def watch(self, pool: ReplicaPool) -> None:
        """Keeps the latest snapshot in ``pool``."""
        while True:
            try:
                pool.latest = await asyncio.to_thread(self.snapshot)
            except (RayError, RayServeException, TimeoutError) as error:
                log.warning("replicas give no snapshot: %s", one_line(error))
                pool.latest = None
            await asyncio.sleep(SNAPSHOT_PERIOD)

    def snapshot(self) -> Snapshot:
        """Returns the snapshot of all replicas that answer in time. Raises TimeoutError if none does."""
        snapshots = [item for item in self._call_all("snapshot") if isinstance(item, Snapshot)]
        if not snapshots:
            raise TimeoutError("no replica answers")
        self.num_replicas = len(snapshots)
        return Snapshot.merged(snapshots)

    def _call_all(self, method: str) -> list[Any]:
        """Returns what every replica returns, or its exception."""
        return list(self.handle.broadcast(method).results(timeout_s=SNAPSHOT_TIMEOUT, return_exceptions=True))


NAME = "forerun"
"""The beginning of the names of applications on Ray Serve: each run has its own."""
ADDRESS = "RAY_ADDRESS"
"""The variable with the address of a Ray cluster; without it, one is started on this machine."""
STARTUP_TIMEOUT = 600.0
"""Seconds for the replicas to come up."""


@contextlib.contextmanager
def cluster(*requested: Replicas) -> Iterator[list[DeploymentHandle]]:
    """Starts replicas, an application for each of ``requested``, and stops them on leaving. Raises ConfigError if they
    do not come up."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    local = ADDRESS not in os.environ
    cores = sum((each.max_replicas or each.num_replicas) * each.cores for each in requested)
    ray.init(
        num_cpus=cores if local else None, include_dashboard=False if local else None, log_to_driver=False,
        logging_level=logging.ERROR, configure_logging=False,
    )  # fmt: skip
    try:
        with contextlib.ExitStack() as started:
            started.callback(ray.shutdown)
            serve.start(proxy_location="Disabled")
            handles = []
            for replicas in requested:
                name = f"{NAME}-{uuid4().hex[:8]}"
                started.callback(serve.delete, name)
                handles.append(deploy(replicas, name))
            yield handles
    except SystemExit as error:
        if error.code != signal.SIGTERM:
            raise
        # Ray's handler of the signal raised it, so that the replicas end. Whoever sent it should see no failure.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)


def deploy(replicas: Replicas, name: str) -> DeploymentHandle:
    """Deploys replicas, or updates them, and waits until all of them run. Raises ConfigError if they do not."""
    target = RunTarget(replicas.bind(), name=name, route_prefix=None)
    (handle,) = serve.run_many([target], wait_for_applications_running=False)
    deadline, logged = time.monotonic() + STARTUP_TIMEOUT, ""
    while True:
        application = serve.status().applications[name]
        if application.status == ApplicationStatus.RUNNING:
            return handle
        if application.status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY):
            raise ConfigError(f"the replicas do not come up: {_cause(application)}")
        if time.monotonic() > deadline:
            raise ConfigError(
                f"the replicas have not come up within {STARTUP_TIMEOUT:g} seconds: {_cause(application)}"
            )
        message = _message(application)
        if message != logged:
            log.warning("the replicas are not up yet: %s", _cause(application))
        logged = message
        time.sleep(0.1)


def _message(application: ApplicationStatusOverview) -> str:
    """Returns Ray's message about replicas that do not run yet."""
    return " ".join(item.message for item in application.deployments.values()) or application.message


def _cause(application: ApplicationStatusOverview) -> str:
    """Returns the last line of that message, if possible of an exception, else the states of the replicas."""
    lines = [line.strip() for line in _message(application).splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line.split(":")[0] and not line.startswith("ray")]
    states = [item.replica_states for item in application.deployments.values()]
    counts = ", ".join(f"{count} {name.lower()}" for each in states for name, count in each.items())
    return (errors or lines or [counts or "none was started"])[-1]
