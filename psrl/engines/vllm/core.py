"""vLLM's `AsyncLLM` as an `EngineCore`.

Invariant: weights change only while vLLM stands still and after it has given up all keys, so no key and no running step crosses a
version; the version of each token is vLLM's own record of it (`weight_versions`).

One thread runs an event loop in which all of vLLM's front lives; the methods may be called from any thread and hand over to it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from vllm import SamplingParams as VllmSampling
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMError
from vllm.inputs.engine import tokens_input
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from psrl.engine_client.bodies import manifest_to_json
from psrl.engines.contract import EngineLoad, PauseMode, SampledTurn, TurnDone, TurnFailure, TurnRequest
from psrl.engines.vllm.seeds import vllm_seed
from psrl.engines.vllm.step_counts import StepCounts
from psrl.engines.vllm.update import checked_report, shapes_of_folder, start_report
from psrl.engines.vllm.worker_extension import BROKEN, FAILED
from psrl.errors import EngineError, WeightSyncError
from psrl.protocols import WeightManifest, WeightReport
from psrl.types import FinishReason, PolicyVersion

JOIN_TIMEOUT_S = 10.0
SHUTDOWN_S = 2.0
"""For vLLM's own processes to end; then they are killed. Less than `ChildProcess` gives the whole server."""

CLOSED = "engine is closed"

Answer = TypeVar("Answer")


class VllmCore:
    """Implements `contract.EngineCore`."""

    def __init__(self, arguments: AsyncEngineArgs, *, model_path: Path) -> None:
        """Start vLLM; returns when it can serve.

        Raises:
            EngineError: It cannot; its own log has the cause.
        """
        self.model_name = model_path.name
        self._failure: str | None = None
        self._shapes = shapes_of_folder(model_path)
        self._report = start_report(self._shapes)
        self._staged: WeightReport | None = None
        self._counts = StepCounts()
        self._turns: dict[str, asyncio.Task[None]] = {}
        self._num_prompt = self._num_cached = 0
        self._overtaken: list[asyncio.Event] = []  # pauses with `wait` that are under way
        self._is_paused = False
        self._updating = asyncio.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-engine", daemon=True)
        self._thread.start()
        self._engine: AsyncLLM = self._soon(self._started(arguments)).result()
        config = self._engine.vllm_config
        self.max_model_len: int = config.model_config.max_model_len
        self.vocab_size: int = config.model_config.get_vocab_size()
        num_copies = config.parallel_config.data_parallel_size
        self._num_wanted_tokens = num_copies * config.scheduler_config.max_num_seqs * self.max_model_len
        blocks = config.cache_config.num_gpu_blocks or 0
        self._num_cache_tokens = blocks * config.cache_config.block_size
        print(f"vllm engine: {effective_settings(config)}", flush=True)

    # ------------------------------------------------------------ called from any thread

    @property
    def failure(self) -> str | None:
        """See the contract."""
        if self._failure is None and self._engine.errored:
            self._failure = "vLLM's engine died; the log has the cause"
        return self._failure

    def submit(self, request: TurnRequest, on_done: TurnDone) -> None:
        """Queue a request; the caller has checked it against max_model_len and the vocabulary."""
        if self.failure is not None:
            on_done(TurnFailure.ERROR)
            return
        self._loop.call_soon_threadsafe(self._begin, request, on_done)

    def abort(self, request_ids: Sequence[str] | None) -> Future[int]:
        """See the contract."""
        return self._soon(self._abort(request_ids))

    def pause(self, mode: PauseMode, *, clear_cache: bool) -> Future[None]:
        """See the contract. `keep` with `clear_cache` also gives up the keys of running requests, which are then computed again."""
        return self._soon(self._pause(mode, clear_cache=clear_cache))

    def resume(self) -> Future[None]:
        """See the contract."""
        return self._soon(self._resume())

    def stage_weights(self, manifest: WeightManifest) -> Future[WeightReport]:
        """See the contract. A version that was staged and not committed is forgotten."""
        return self._soon(self._stage(manifest))

    def commit_weights(self, version: PolicyVersion) -> Future[WeightReport]:
        """See the contract."""
        return self._soon(self._commit(version))

    def reset_prefix_cache(self) -> Future[None]:
        """See the contract. Where requests run, they give up their keys too: vLLM knows no other way."""
        return self._soon(self._reset_prefix_cache())

    def weight_report(self) -> WeightReport:
        """See the contract."""
        return self._report

    def load(self) -> EngineLoad:
        """Counts now. vLLM does not count the keys of ended turns: `cache_filled` is that of running ones."""
        num_turns = len(self._turns)
        num_running = min(self._counts.num_running, num_turns)
        filled = self._counts.cache_usage if num_running else 0.0
        return EngineLoad(
            num_running=num_running,
            num_waiting=num_turns - num_running,
            num_prompt_tokens=self._num_prompt,
            num_cached_tokens=self._num_cached,
            num_sampled_tokens=self._counts.num_sampled,
            cache_usage=min(1.0, filled * self._num_cache_tokens / self._num_wanted_tokens),
            cache_filled=filled,
            tokens_per_s=self._counts.rate.per_s(),
        )

    def close(self) -> None:
        """End vLLM's processes and the thread."""
        if self._failure != CLOSED:
            self._failure = CLOSED
            self._loop.call_soon_threadsafe(self._loop.create_task, self._stop())
        self._thread.join(JOIN_TIMEOUT_S)

    # ------------------------------------------------------------ in the loop

    async def _started(self, arguments: AsyncEngineArgs) -> AsyncLLM:
        engine = AsyncLLM.from_engine_args(arguments, stat_loggers=[self._counts.logger])
        await engine.get_supported_tasks()  # asked for once; from here on a request is known to vLLM within its task's first step
        await engine.update_weight_version(str(self._report.version))
        await engine.collective_rpc("psrl_begin")
        return engine

    def _begin(self, request: TurnRequest, on_done: TurnDone) -> None:
        self._turns[request.request_id] = self._loop.create_task(self._play(request, on_done))

    async def _play(self, request: TurnRequest, on_done: TurnDone) -> None:
        """One turn. Waits for vLLM's answer; unblocked by it, by an abort, by vLLM's death, or cancelled at the end."""
        turn: SampledTurn | TurnFailure = TurnFailure.ERROR
        self._num_prompt += len(request.token_ids)
        try:
            last: RequestOutput | None = None
            prompt, sampling = tokens_input(request.token_ids), self._sampling(request)
            async for output in self._engine.generate(prompt, sampling, request.request_id, priority=request.priority):
                last = output
            if last is not None and last.outputs[0].finish_reason in tuple(FinishReason):
                turn = sampled_turn(last)
                self._num_cached += turn.cached_tokens
        except VLLMError as error:
            print(f"vllm engine: request {request.request_id}: {type(error).__name__}: {error}", flush=True)
        finally:
            del self._turns[request.request_id]
            on_done(turn)

    def _sampling(self, request: TurnRequest) -> VllmSampling:
        sampling, length = request.sampling, len(request.token_ids)
        return VllmSampling(
            max_tokens=min(sampling.max_tokens, self.max_model_len - length),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=None if sampling.seed is None else vllm_seed(sampling.seed, length),
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,  # the stop ids are the request's, and no others
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    async def _abort(self, request_ids: Sequence[str] | None) -> int:
        ids = [one for one in (self._turns if request_ids is None else request_ids) if one in self._turns]
        if ids:
            await self._engine.abort(ids)
        return len(ids)

    async def _pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        self._is_paused = True
        if mode is not PauseMode.WAIT:
            self._overtake()
            await self._engine.pause_generation(mode=mode.value, clear_cache=clear_cache)
            if mode is PauseMode.ABORT:
                self._counts.nothing_runs()
            return
        overtaken = asyncio.Event()
        self._overtaken.append(overtaken)
        both = (
            asyncio.ensure_future(self._engine.pause_generation(mode="wait", clear_cache=clear_cache)),
            asyncio.ensure_future(overtaken.wait()),
        )
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        both[1].cancel()
        if both[0].done():
            both[0].result()

    async def _resume(self) -> None:
        self._overtake()
        self._is_paused = False
        await self._engine.resume_generation()

    def _overtake(self) -> None:
        """The latest command decides: pauses that still wait for running requests have ended."""
        for overtaken in self._overtaken:
            overtaken.set()
        self._overtaken.clear()

    async def _reset_prefix_cache(self) -> None:
        if not await self._engine.reset_prefix_cache():
            await self._engine.reset_prefix_cache(reset_running_requests=True)

    async def _stage(self, manifest: WeightManifest) -> WeightReport:
        async with self._updating:
            self._staged = None
            report = await asyncio.to_thread(checked_report, manifest, self._shapes)
            for answer in await self._in_all_workers("psrl_stage", manifest_to_json(manifest)):
                if FAILED in answer:
                    raise WeightSyncError(answer[FAILED])  # nobody has loaded anything
            self._staged = report
            return report

    async def _commit(self, version: PolicyVersion) -> WeightReport:
        async with self._updating:
            staged = self._staged
            if staged is None or staged.version != version:
                raise WeightSyncError(f"version {version} cannot be finished: staged is {None if staged is None else staged.version}")
            self._staged = None
            # Also when paused: only `keep` with a cleared cache makes sure that nothing steps and that no key is left.
            await self._engine.pause_generation(mode="keep", clear_cache=True)
            try:
                self._raise_failed(await self._in_all_workers("psrl_commit", int(version)))
                await self._engine.update_weight_version(str(version))
                self._report = staged
            finally:
                if not self._is_paused:
                    await self._engine.resume_generation()
            return staged

    async def _in_all_workers(self, method: str, *args: Any) -> list[dict[str, Any]]:
        """Answers of the workers of all data-parallel engines. `AsyncLLM.collective_rpc` gives those of the first one only."""
        engines = await self._engine.engine_core.call_utility_all_async("collective_rpc", method, None, args, None)
        return [answer for answers in engines for answer in answers]

    def _raise_failed(self, answers: Sequence[dict[str, Any]]) -> None:
        causes = [answer[FAILED] for answer in answers if FAILED in answer]
        broken = [answer[BROKEN] for answer in answers if BROKEN in answer]
        if broken or 0 < len(causes) < len(answers):
            # Some workers have the new version, or none has a whole one.
            self._failure = f"weights are mixed after a failed update: {(broken or causes)[0]}"
        if causes:
            raise WeightSyncError(causes[0])

    async def _stop(self) -> None:
        for turn in list(self._turns.values()):
            turn.cancel()
        await asyncio.gather(*self._turns.values(), return_exceptions=True)
        await asyncio.to_thread(self._engine.shutdown, SHUTDOWN_S)
        self._loop.stop()

    def _soon(self, work: Coroutine[Any, Any, Answer]) -> Future[Answer]:
        if not self._thread.is_alive():
            work.close()
            refused: Future[Answer] = Future()
            refused.set_exception(EngineError(self._failure or CLOSED))
            return refused
        return asyncio.run_coroutine_threadsafe(_as_engine_error(work, lambda: self.failure), self._loop)


async def _as_engine_error(work: Coroutine[Any, Any, Answer], failure: Callable[[], str | None]) -> Answer:
    try:
        return await work
    except VLLMError as error:
        raise EngineError(failure() or f"{type(error).__name__}: {error}") from error


def sampled_turn(output: RequestOutput) -> SampledTurn:
    """vLLM's record of an ended request as the contract has it."""
    completion = output.outputs[0]
    ids = list(completion.token_ids)
    versions: list[int] = []
    for span in completion.weight_versions or ():
        assert span.start == len(versions), f"weight versions {completion.weight_versions} do not follow each other"
        versions += [int(span.version)] * (span.end - span.start)
    return SampledTurn(
        token_ids=ids,
        logprobs=[entry[token].logprob for token, entry in zip(ids, completion.logprobs or (), strict=True)],
        versions=versions,
        finish_reason=FinishReason(completion.finish_reason),
        cached_tokens=output.num_cached_tokens or 0,
    )


def effective_settings(config: VllmConfig) -> str:
    """What vLLM made of its arguments, in a line."""
    model, cache, parallel, scheduler = config.model_config, config.cache_config, config.parallel_config, config.scheduler_config
    words = {
        "dtype": model.dtype,
        "max_model_len": model.max_model_len,
        "enforce_eager": model.enforce_eager,
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "data_parallel_size": parallel.data_parallel_size,
        "nodes": parallel.nnodes,
        "executor": parallel.distributed_executor_backend,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "enable_prefix_caching": cache.enable_prefix_caching,
        "key_blocks": cache.num_gpu_blocks,
        "block_size": cache.block_size,
    }
    return "serves with " + ", ".join(f"{name}={value}" for name, value in words.items())
