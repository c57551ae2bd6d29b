"""``serve run forerun.scale.app:build``: the API and the replicas as one application of a Ray Serve cluster."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator
from ray import serve
from ray.serve.handle import DeploymentHandle

from forerun.scale.cluster import Cluster, Replicas
from forerun.serve.app import create_app
from forerun.serve.options import ServerOptions

API = "api"
"""The name of the deployment that answers HTTP."""


class Arguments(BaseModel):
    """The arguments of ``build``, from ``serve run ... key=value`` or the ``args`` of a config file."""

    model_config = ConfigDict(extra="forbid")

    model: str = "forerun:target"
    speculative_config: Any = Field(None, description="LLM's, as an object or as JSON")
    engine: Any = Field(default_factory=dict, description="LLM's other options, as an object or as JSON")
    replicas: int = 1
    max_replicas: int | None = None
    threads: int = 1
    max_queue: int = 1024
    drain_seconds: float = 600.0
    served_model_name: str | None = None
    api_key: str | None = None
    allowed_origins: list[str] = Field(default_factory=list)
    chat_template: str | None = Field(None, description="the template itself")
    request_timeout: float = 600.0
    metrics_names: str = "forerun"

    @field_validator("speculative_config", "engine", mode="before")
    @classmethod
    def _from_json(cls, given: Any) -> Any:
        return json.loads(given) if isinstance(given, str) else given


class Front:
    """The deployment that answers HTTP: a pool of the replicas behind ``handle``."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, handle: DeploymentHandle, given: Arguments
    ) -> None:
        pool = await Cluster(handle).pool(given.max_queue)
        options = ServerOptions(
            served_model_name=given.served_model_name or "",
            api_key=given.api_key,
            allowed_host=None,
            allowed_origin=given.allowed_origins,
            chat_template=given.chat_template,
            request_timeout=given.request_timeout,
            metrics_names=given.metrics_names,
        )
        self.asgi = create_app(pool, options.named_after(pool.facts.model))

    def __serve_build_asgi_app__(self) -> Any:
        """The ASGI application; called by Ray Serve, after ``__init__``."""
        return self.asgi


def build(arguments: Arguments) -> serve.Application:
    """Returns the application. The API itself gets replicas by the deployment's options in a config file."""
    replicas = Replicas(
        engine={"page_size": 64, **arguments.engine, "model": arguments.model},
        speculative=arguments.speculative_config,
        num_replicas=arguments.replicas,
        max_replicas=arguments.max_replicas,
        threads=arguments.threads,
        max_queue=arguments.max_queue,
        drain_seconds=arguments.drain_seconds,
    )
    front = serve.deployment(serve.ingress()(Front)).options(
        name=API,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=4096,
        graceful_shutdown_timeout_s=arguments.request_timeout,
    )
    return front.bind(replicas.bind(), arguments)
