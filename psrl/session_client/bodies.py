"""JSON bodies of the session contract, to and from psrl's types.

Invariant: `record_from_json(record_to_json(record))` equals the record, but for the actions of its steps, which stay in the process
that read them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from psrl.errors import GatewayError, SessionRequestError
from psrl.types import (
    AgentSampling,
    EpisodeUid,
    FinishReason,
    Generation,
    GroupUid,
    Outcome,
    PolicyVersion,
    SamplingContract,
    SessionId,
    SessionLimits,
    SessionRecord,
    SessionSpec,
)
from psrl.types.json_form import message_from_json, message_to_json, trajectory_from_json, trajectory_to_json


def spec_to_json(spec: SessionSpec) -> dict[str, Any]:
    """The body of `POST /sessions`."""
    return dataclasses.asdict(spec)


def spec_from_json(raw: Any) -> SessionSpec:
    """Read the body of `POST /sessions`.

    Raises:
        SessionRequestError: A field is missing, unknown or has another type.
    """
    try:
        contract = dict(raw["contract"])
        contract["agent_sampling"] = AgentSampling(contract.get("agent_sampling", AgentSampling.OVERRIDE))
        spec = SessionSpec(
            uid=EpisodeUid(str(raw["uid"])),
            group=GroupUid(str(raw["group"])),
            admitted_version=PolicyVersion(int(raw["admitted_version"])),
            is_validation=bool(raw["is_validation"]),
            contract=SamplingContract(**contract),
            limits=SessionLimits(**raw["limits"]),
        )
        numbers = [getattr(part, entry.name) for part in (spec.contract, spec.limits) for entry in dataclasses.fields(part)]
        if any(not isinstance(number, (int, float, AgentSampling)) for number in numbers):
            raise TypeError("contract and limits hold numbers")
    except (KeyError, TypeError, ValueError) as error:
        raise SessionRequestError(
            status=400, code="invalid_session", message=f"the session's spec cannot be read: {type(error).__name__}: {error}"
        ) from error
    return spec


def record_to_json(record: SessionRecord) -> dict[str, Any]:
    """The answer of `GET` and `DELETE /sessions/{id}`."""
    return {
        "id": record.id,
        "uid": record.uid,
        "trajectories": [trajectory_to_json(trajectory) for trajectory in record.trajectories],
        "paths": record.paths,
        "messages": [message_to_json(message) for message in record.messages],
        "turn_texts": list(record.turn_texts),
        "num_turns": record.num_turns,
        "end": record.end,
        "error": record.error,
        "counts": record.counts,
        "generation_s": record.generation_s,
    }


def record_from_json(raw: Any) -> SessionRecord:
    """Read a record.

    Raises:
        GatewayError: It is not one.
    """
    try:
        return SessionRecord(
            id=SessionId(raw["id"]),
            uid=EpisodeUid(raw["uid"]),
            trajectories=tuple(trajectory_from_json(entry) for entry in raw["trajectories"]),
            paths=tuple(tuple(path) for path in raw["paths"]),
            messages=tuple(message_from_json(entry) for entry in raw["messages"]),
            turn_texts=tuple(raw["turn_texts"]),
            num_turns=raw["num_turns"],
            end=None if raw["end"] is None else Outcome(raw["end"]),
            error=raw["error"],
            counts=raw["counts"],
            generation_s=raw["generation_s"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise GatewayError(f"the gateway's record cannot be read: {type(error).__name__}: {error}") from error


def generation_of(answer: Any, *, latency_s: float) -> Generation:
    """What was sampled, from a chat completion that was asked to `return_token_ids`.

    Raises:
        GatewayError: It does not say.
    """
    try:
        choice, usage = answer["choices"][0], answer["usage"]
        is_cut = choice["finish_reason"] == "length"
        return Generation(
            token_ids=list(choice["token_ids"]),
            logprobs=list(choice["token_logprobs"]),
            policy_versions=list(choice["policy_versions"]),
            finish_reason=FinishReason.LENGTH if is_cut else FinishReason.STOP,
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
            latency_s=latency_s,
        )
    except (KeyError, IndexError, TypeError) as error:
        raise GatewayError(f"the gateway gave no ids of a turn: {type(error).__name__}: {error} in {answer!r:.300}") from error
