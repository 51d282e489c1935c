"""JSON bodies of the engine contract, to and from psrl's types.

Invariant: a parsed answer has as many logprobs and versions as token ids, and as many ids as the engine's own usage counts. An
answer that breaks this is an EngineError, never a shorter Generation.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import orjson

from psrl.errors import EngineError
from psrl.protocols import TensorSlice, WeightManifest, WeightReport
from psrl.types import FinishReason, GenerateRequest, Generation, PolicyVersion


def generate_body(request: GenerateRequest) -> bytes:
    """The body of `POST /generate`. `cache_salt` is not sent: all episodes may share prefixes."""
    sampling = request.sampling
    params: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop_token_ids": list(sampling.stop_token_ids),
        "logprobs": 0,
    }
    if sampling.seed is not None:
        params["seed"] = sampling.seed
    body = {"token_ids": request.token_ids, "sampling_params": params, "request_id": request.request_id, "priority": request.priority}
    return orjson.dumps(body)


def parse_generation(raw: bytes, *, latency_s: float) -> Generation:
    """Read the answer of `POST /generate`.

    Raises:
        EngineError: It is not JSON, a field is missing or has another type, or counts differ.
    """
    try:
        body = orjson.loads(raw)
        choice = body["choices"][0]
        token_ids = choice["token_ids"]
        content = choice["logprobs"]["content"] if token_ids else []
        usage = body["usage"]
        generation = Generation(
            token_ids=token_ids,
            logprobs=[float(entry["logprob"]) for entry in content],
            policy_versions=_versions_of(choice["weight_versions"], len(token_ids)),
            finish_reason=FinishReason(choice["finish_reason"]),
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=(usage.get("prompt_tokens_details") or {"cached_tokens": 0})["cached_tokens"],
            latency_s=latency_s,
        )
        logprob_ids = [entry["token_id"] for entry in content]
        completion_tokens = usage["completion_tokens"]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise EngineError(f"engine broke the contract: {type(error).__name__}: {error} in {raw[:300]!r}") from error
    if completion_tokens != len(token_ids):
        raise EngineError(f"engine broke the contract: usage counts {completion_tokens} sampled tokens, the answer has {len(token_ids)}")
    if logprob_ids != token_ids:
        raise EngineError(f"engine broke the contract: logprobs are of {len(logprob_ids)} other ids than the {len(token_ids)} sampled")
    return generation


def manifest_to_json(manifest: WeightManifest) -> dict[str, Any]:
    """The manifest as `POST /update_weights` carries it."""
    return dataclasses.asdict(manifest)


def manifest_from_json(raw: dict[str, Any]) -> WeightManifest:
    """Read a manifest from an update body.

    Raises:
        EngineError: A field is missing or unknown.
    """
    try:
        tensors = tuple(
            TensorSlice(
                name=piece["name"],
                dtype=piece["dtype"],
                shape=tuple(int(size) for size in piece["shape"]),
                offset=int(piece["offset"]),
                size_bytes=int(piece["size_bytes"]),
            )
            for piece in raw["tensors"]
        )
        return WeightManifest(
            version=PolicyVersion(int(raw["version"])),
            tensors=tensors,
            total_bytes=int(raw["total_bytes"]),
            checksum=str(raw["checksum"]),
            location=dict(raw["location"]),
            follower_locations=tuple(dict(one) for one in raw.get("follower_locations", ())),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(f"weight manifest cannot be read: {type(error).__name__}: {error}") from error


def parse_weight_report(raw: bytes) -> WeightReport:
    """Read the answer of `POST /finish_weight_update`.

    Raises:
        EngineError: A field is missing.
    """
    try:
        body = orjson.loads(raw)
        return WeightReport(
            version=PolicyVersion(int(body["weight_version"])),
            num_matched=int(body["num_matched"]),
            num_expected=int(body["num_expected"]),
            checksum=str(body["checksum"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(f"engine broke the contract: weight report {raw[:300]!r}") from error


def _versions_of(spans: list[dict[str, Any]], num_tokens: int) -> list[int]:
    versions: list[int] = []
    for span in spans:
        if span["start"] != len(versions) or span["end"] < span["start"]:
            raise ValueError(f"weight_versions {spans} do not follow each other")
        versions += [int(span["version"])] * (span["end"] - span["start"])
    if len(versions) != num_tokens:
        raise ValueError(f"weight_versions {spans} cover {len(versions)} of {num_tokens} tokens")
    return versions
