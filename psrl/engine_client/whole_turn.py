"""A whole turn from an engine that may give it back unfinished.

An engine gives a turn back (`finish_reason` `abort`) when it takes newer weights, when its requests move to another replica, or when it
is told to abort. What it sampled is kept and sent again as prompt, so nothing is sampled twice, and each token keeps the version that
sampled it: a turn in which an update fell holds several. The seed stays: on equal weights an engine that draws by seed and position gives
the ids of a turn that nobody interrupted; one whose draws begin anew with each request must mix the prompt's length into the seed
(`SamplingParams.seed`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from psrl.errors import EngineError
from psrl.protocols import Generator
from psrl.types import FinishReason, GenerateRequest, Generation

MAX_RESUMES = 64
"""An engine that only ever gives back what it gets is broken. A turn that waits in a queue comes back with every update of its replica."""


def _nothing_to_do() -> None:
    return None


async def whole_turn(generator: Generator, request: GenerateRequest, *, before_resume: Callable[[], None] = _nothing_to_do) -> Generation:
    """Sample a turn to its end: `stop`, or `length` after `max_tokens` in all, never `abort`.

    `before_resume` is called each time before the rest is asked for; it may raise to give the turn up. A cancellation reaches the
    engine, which ends the request. The n-th part is request `<request_id>-r<n>`.

    Raises:
        EngineRequestError, EngineError: See `Generator.generate`; or the turn was given back more than `MAX_RESUMES` times, or has no
            token at all.

    Example:
        max_tokens=5, and 3 tokens of version 7 come back with `abort` -> the prompt and these 3 are asked for 2 more; they come from
        version 8 with `length` -> 5 tokens, versions 7 7 7 8 8, `length`.
    """
    whole = await generator.generate(request)
    while whole.finish_reason is FinishReason.ABORT:
        whole = _ended(whole, request)
        if whole.finish_reason is not FinishReason.ABORT:
            break
        if whole.num_resumes == MAX_RESUMES:
            raise EngineError(f"request {request.request_id}: the engine gave the turn back unfinished {MAX_RESUMES + 1} times")
        before_resume()
        whole = _joined(whole, await generator.generate(_rest_of(request, whole)))
    if not whole.token_ids:
        raise EngineError(f"request {request.request_id}: the engine sampled no token")
    return whole


def _ended(part: Generation, request: GenerateRequest) -> Generation:
    """A turn that was given back at the very moment of its end has ended."""
    sampling = request.sampling
    if part.token_ids and part.token_ids[-1] in sampling.stop_token_ids:
        return replace(part, finish_reason=FinishReason.STOP)
    if len(part.token_ids) >= sampling.max_tokens:
        return replace(part, finish_reason=FinishReason.LENGTH)
    return part


def _rest_of(request: GenerateRequest, done: Generation) -> GenerateRequest:
    return replace(
        request,
        request_id=f"{request.request_id}-r{done.num_resumes + 1}",
        token_ids=request.token_ids + done.token_ids,
        sampling=replace(request.sampling, max_tokens=request.sampling.max_tokens - len(done.token_ids)),
    )


def _joined(first: Generation, second: Generation) -> Generation:
    return replace(
        second,
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs + second.logprobs,
        policy_versions=first.policy_versions + second.policy_versions,
        prompt_tokens=first.prompt_tokens,
        cached_tokens=first.cached_tokens,
        latency_s=first.latency_s + second.latency_s,
        num_resumes=first.num_resumes + 1,
    )
