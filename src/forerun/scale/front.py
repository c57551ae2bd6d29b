"""``forerun serve --replicas``: this process answers HTTP, and replicas on Ray Serve compute."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from uuid import uuid4

import ray
from ray import serve
from ray.serve.api import RunTarget
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview

from forerun.core.errors import ConfigError
from forerun.scale.cluster import Cluster, Replicas
from forerun.scale.replica import Facts
from forerun.serve.app import ServerOptions, create_app
from forerun.serve.run import ConnectionLimits, DrainingServer

log = logging.getLogger("forerun")

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
        serve.start(proxy_location="Disabled")
        names = [f"{NAME}-{uuid4().hex[:8]}" for _ in requested]
        with contextlib.ExitStack() as begun:
            handles = []
            for replicas, name in zip(requested, names):
                begun.callback(serve.delete, name)
                handles.append(started(replicas, name))
            yield handles
    finally:
        ray.shutdown()


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


def run(
    replicas: Replicas,
    options: ServerOptions,
    listener: socket.socket,
    limits: ConnectionLimits,
    *,
    drain_seconds: float,
    tell: Callable[[Facts], None],
) -> None:
    """Serve until a signal ends it. ``tell`` says what runs."""

    async def answer(handle: DeploymentHandle) -> None:
        pool = await Cluster(handle).pool(replicas.max_queue)
        tell(pool.facts)
        app = create_app(pool, options.serving(pool.facts.model))
        gc.collect()
        gc.freeze()
        await DrainingServer(app, pool, drain_seconds, limits).serve(sockets=[listener])

    try:
        with cluster(replicas) as (handle,), contextlib.suppress(KeyboardInterrupt):
            asyncio.run(answer(handle))
    except SystemExit as ended:
        if ended.code != signal.SIGTERM:
            raise
        # Ray's handler made an exit of it, so that the replicas end; whoever sent it should not see a failure.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)
