"""What an agent asks of sampling, held against the session's contract; and stop texts, which the engine does not know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from psrl.errors import SessionRequestError
from psrl.gateway.dialects.base import AskedSampling
from psrl.types import AgentSampling, FinishReason, Generation, SamplingContract


def broken_parameters(asked: AskedSampling, contract: SamplingContract) -> list[str]:
    """Names of the agent's parameters that ask for another distribution than the contract's.

    Raises:
        SessionRequestError: There are some, and the contract refuses them.
    """
    kept = {"temperature": contract.temperature, "top_p": contract.top_p, "top_k": contract.top_k}
    broken = [name for name, value in asked.others.items() if name not in kept or value != kept[name]]
    if broken and contract.agent_sampling is AgentSampling.REFUSE:
        name = broken[0]
        allowed = f"only {kept[name]!r} is allowed" if name in kept else "it is not allowed"
        raise SessionRequestError(
            status=400,
            code="sampling_contract",
            param=name,
            message=f"{name}={asked.others[name]!r} breaks the sampling contract of this session: {allowed}. Leave it out",
        )
    return broken


def cut_at_stop(generation: Generation, stop_texts: Sequence[str], decode: Callable[[Sequence[int]], str]) -> tuple[Generation, str | None]:
    """The turn through the token that completes the first stop text, and that text; the turn itself where there is none.

    What was sampled after it is dropped: nobody sees it and it is not trained on. Costs a decoding for each doubling of the length.

    Example:
        ids of "a", "STO", "P now" with stop text "STOP" -> all three ids, "STOP"; the text after it is not given out.
    """
    ids = generation.token_ids
    if not stop_texts or not _first_in(decode(ids), stop_texts):
        return generation, None
    low, high = 1, len(ids)  # the first `high` ids hold a stop text, the first `low - 1` do not
    while low < high:
        middle = (low + high) // 2
        if _first_in(decode(ids[:middle]), stop_texts):
            high = middle
        else:
            low = middle + 1
    cut = replace(
        generation,
        token_ids=ids[:high],
        logprobs=generation.logprobs[:high],
        policy_versions=generation.policy_versions[:high],
        finish_reason=FinishReason.STOP,
    )
    return cut, _first_in(decode(ids[:high]), stop_texts)


def _first_in(text: str, stop_texts: Sequence[str]) -> str | None:
    found = [(position, stop) for stop in stop_texts if (position := text.find(stop)) >= 0]
    return min(found)[1] if found else None
