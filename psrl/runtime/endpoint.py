"""A model that somebody else serves, in the place of a run's engines and gateway: agents with sessions talk to it directly.

Nothing is captured of their turns, so there are no tokens, no limits but the agent's own, and nothing to train on.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from psrl.agent_loops.runner import EpisodeRunner
from psrl.config.endpoint import NO_KEY, Endpoint
from psrl.errors import ConfigError
from psrl.protocols import Sessions
from psrl.types import EpisodeTicket, LoopResult, Outcome, SessionAddress, SessionId, SessionRecord, SessionSpec, Task

LOOK_TIMEOUT_S = 20.0
FAULTS = frozenset(
    {
        "APIConnectionError",
        "APIError",
        "AuthenticationError",
        "BadGatewayError",
        "InternalServerError",
        "NotFoundError",
        "PermissionDeniedError",
        "RateLimitError",
        "ServiceUnavailableError",
        "Timeout",
    }
)
"""Exceptions of the clients of OpenAI and litellm that are the endpoint's doing, and say nothing about the model."""
CONTEXT_FULL = "ContextWindowExceededError"


class EndpointSessions(Sessions):
    """Every session is the endpoint itself."""

    def __init__(self, endpoint: Endpoint) -> None:
        """The endpoint's model has its name by now."""
        assert endpoint.model is not None, "look_at() comes first"
        self._endpoint = endpoint
        self._model = endpoint.model
        self._specs: dict[SessionId, SessionSpec] = {}

    async def open(self, spec: SessionSpec) -> SessionAddress:
        """The endpoint's address, under the episode's uid."""
        name = SessionId(spec.uid)
        self._specs[name] = spec
        return SessionAddress(id=name, url=self._endpoint.url, api_key=self._endpoint.api_key, model=self._model)

    async def record(self, address: SessionAddress) -> SessionRecord:
        """Nothing was seen."""
        spec = self._specs[address.id]
        return SessionRecord(id=address.id, uid=spec.uid, trajectories=(), messages=(), turn_texts=(), num_turns=0, is_captured=False)

    async def close(self, address: SessionAddress, *, abort: bool) -> SessionRecord:
        """Nothing was seen; turns in flight end with their agent."""
        record = await self.record(address)
        del self._specs[address.id]
        return record


class EndpointRunner(EpisodeRunner):
    """Plays episodes at an endpoint; what the endpoint did is no fault of the agent's."""

    async def _play(self, task: Task, ticket: EpisodeTicket) -> LoopResult:
        result = await super()._play(task, ticket)
        names = {name.partition("/")[2] for name in result.counts if name.startswith("errors/")}
        if result.outcome is not Outcome.AGENT_ERROR:
            return result
        if names & FAULTS:
            return dataclasses.replace(result, outcome=Outcome.INFRA_ERROR)
        return dataclasses.replace(result, outcome=Outcome.MAX_TOKENS) if CONTEXT_FULL in names else result


class NotHere:
    """Stands where a part of psrl's own engines would be; whoever uses it is told that there are none."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __getattr__(self, name: str) -> Any:
        rule = f"an endpoint of somebody else's gives no {self._what}"
        raise ConfigError(key="--model", value=name, rule=rule, fix="name a model folder, which psrl's own engine serves")


async def look_at(endpoint: Endpoint) -> Endpoint:
    """The endpoint with its model's name; asks it once for its list of models.

    Raises:
        ConfigError: Nobody answers, the key is refused, or it has no such model. An endpoint that keeps no list is taken at its word.
    """
    headers = {} if endpoint.api_key == NO_KEY else {"authorization": f"Bearer {endpoint.api_key}"}
    url = f"{endpoint.url}/v1/models"
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LOOK_TIMEOUT_S)) as http,
            http.get(url, headers=headers) as answer,
        ):
            status, kind = answer.status, answer.content_type
            text = await answer.text(errors="replace") if status == 200 else ""
    except (TimeoutError, aiohttp.ClientError, ValueError) as error:
        rule = f"does not answer at {url} ({type(error).__name__}: {error})"
        raise ConfigError(key="--model", value=endpoint.url, rule=rule, fix="start the server, or correct the address") from error
    if status in (401, 403):
        raise _refused_key(endpoint, status)
    if status >= 500:
        rule = f"answers {url} with {status}: the server is there and fails"
        raise ConfigError(key="--model", value=endpoint.url, rule=rule, fix="look at the server's own log, and try again once it works")
    listed = _listed(_content_of(text, endpoint, url, kind)) if status == 200 else []
    if endpoint.model is None and len(listed) != 1:
        rule = f"has {len(listed)} models" if listed else "does not say which models it has"
        fix = f"give --model-name NAME{', one of ' + ', '.join(listed[:20]) if listed else ''}"
        raise ConfigError(key="--model-name", value=None, rule=f"the endpoint {rule}", fix=fix)
    if endpoint.model is not None and listed and endpoint.model not in listed:
        rule = f"is no model of the endpoint, which has {', '.join(listed[:20])}"
        raise ConfigError(key="--model-name", value=endpoint.model, rule=rule, fix=f"give --model-name {listed[0]}")
    return dataclasses.replace(endpoint, model=endpoint.model or listed[0])


def _refused_key(endpoint: Endpoint, status: int) -> ConfigError:
    """Says which key was sent, never the key."""
    variable = endpoint.key_variable
    rule = (
        f"the endpoint refuses the key of {variable} ({status})" if variable else f"the endpoint wants a key ({status}), and none was given"
    )
    fix = "export the right key and name its variable with --api-key-env VARIABLE"
    return ConfigError(key="--api-key-env", value=variable, rule=f"{rule}: {endpoint.url}", fix=fix)


def _content_of(text: str, endpoint: Endpoint, url: str, kind: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        rule = f"answers {url} with {kind} that is no JSON: this is no OpenAI-compatible API"
        fix = "correct the address (host, port, and the path before /v1)"
        raise ConfigError(key="--model", value=endpoint.url, rule=rule, fix=fix) from error


def _listed(content: Any) -> list[str]:
    """Names of an answer of `GET /v1/models`; none where it is no such answer."""
    entries = content.get("data") if isinstance(content, Mapping) else None
    entries = entries if isinstance(entries, list) else []
    return [entry["id"] for entry in entries if isinstance(entry, Mapping) and isinstance(entry.get("id"), str)]
