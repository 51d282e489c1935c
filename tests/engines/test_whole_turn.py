"""Turns that engines give back unfinished: random cuts, then real engines over HTTP that pause, update, move and go away."""

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from psrl.engine_client.client import HttpGenerator
from psrl.engine_client.whole_turn import MAX_RESUMES, whole_turn
from psrl.engines.scripted.core import ScriptedCore
from psrl.engines.scripted.script import Script, ScriptedTurn
from psrl.engines.server import build_app
from psrl.engines.torch.architecture import read_architecture
from psrl.engines.torch.core import TorchCore
from psrl.engines.torch.weights import load_folder
from psrl.errors import EngineError
from psrl.parameter_server.layout import lay_out, pieces_of
from psrl.parameter_server.transports.shared_memory import publish
from psrl.types import FinishReason, GenerateRequest, Generation, SamplingParams
from tests.engines.tiny_models import save_tiny_qwen3
from tests.gateway.gateway_kit import running_app, until

STOP = 63
PROMPT = [3, 1, 4, 1, 5]


def request(session="s", *, max_tokens=200, stop_token_ids=(), **fields):
    sampling = SamplingParams(max_tokens=max_tokens, seed=11, stop_token_ids=stop_token_ids)
    return GenerateRequest(request_id=f"{session}-0", token_ids=PROMPT, sampling=sampling, session=session, **fields)


class CutEngine:
    """Draws by position, as the torch engine does; gives its n-th request back after `cuts[n]` tokens, then takes newer weights."""

    def __init__(self, cuts, *, stop_at):
        self._cuts, self._stop_at = iter(cuts), stop_at
        self.version = 0
        self.requests = []
        self.sampled = []  # (id, logprob, version) of every token ever drawn

    async def generate(self, asked):
        self.requests.append(asked)
        assert asked.sampling.max_tokens >= 1, "a turn of no tokens was asked for"
        cut = next(self._cuts, None)
        ids, reason = [], FinishReason.ABORT
        while cut is None or len(ids) < cut:
            position = len(asked.token_ids) + len(ids) - len(PROMPT)
            ids.append(STOP if position == self._stop_at else position % 50)
            if cut is not None and len(ids) == cut:
                break  # Given back with its last token, whatever that is.
            if ids[-1] in asked.sampling.stop_token_ids:
                reason = FinishReason.STOP
                break
            if len(ids) == asked.sampling.max_tokens:
                reason = FinishReason.LENGTH
                break
        ids = ids[: asked.sampling.max_tokens]
        drawn = [(one, -float(len(self.sampled) + index), self.version) for index, one in enumerate(ids)]
        self.sampled += drawn
        self.version += reason is FinishReason.ABORT
        return Generation(
            token_ids=ids,
            logprobs=[logprob for _, logprob, _ in drawn],
            policy_versions=[version for _, _, version in drawn],
            finish_reason=reason,
            prompt_tokens=len(asked.token_ids),
            cached_tokens=0,
            latency_s=1.0,
        )


@settings(max_examples=150, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 6), max_size=12),
    stop_at=st.none() | st.integers(0, 30),
    max_tokens=st.integers(1, 30),
)
def test_a_turn_cut_anywhere_is_the_turn_that_nobody_cut(cuts, stop_at, max_tokens):
    asked = request(max_tokens=max_tokens, stop_token_ids=(STOP,))
    undisturbed = asyncio.run(whole_turn(CutEngine([], stop_at=stop_at), asked))
    engine = CutEngine(cuts, stop_at=stop_at)
    whole = asyncio.run(whole_turn(engine, asked))
    assert whole.token_ids == undisturbed.token_ids
    assert whole.finish_reason is undisturbed.finish_reason
    assert list(zip(whole.token_ids, whole.logprobs, whole.policy_versions, strict=True)) == engine.sampled
    assert (whole.prompt_tokens, whole.latency_s) == (len(PROMPT), float(len(engine.requests)))
    assert whole.num_resumes == len(engine.requests) - 1 <= len(cuts)
    done = 0
    for number, part in enumerate(engine.requests):
        assert part.request_id == ("s-0" if number == 0 else f"s-0-r{number}")
        assert part.token_ids == PROMPT + whole.token_ids[:done]
        assert part.sampling.max_tokens == max_tokens - done
        assert (part.sampling.seed, part.session) == (11, "s")
        done += min(cuts[number], max_tokens - done) if number < len(cuts) else 0


def test_an_engine_that_only_gives_back_is_left_after_a_number_of_times():
    engine = CutEngine([0] * 1000, stop_at=None)
    with pytest.raises(EngineError, match=f"s-0: the engine gave the turn back unfinished {MAX_RESUMES + 1} times"):
        asyncio.run(whole_turn(engine, request()))


def test_whoever_waits_may_give_a_turn_up_when_it_comes_back():
    class NotWantedError(Exception):
        pass

    def give_up():
        raise NotWantedError

    with pytest.raises(NotWantedError):
        asyncio.run(whole_turn(CutEngine([2], stop_at=None), request(), before_resume=give_up))


# ------------------------------------------------------------ real engines


def torch_core(folder):
    weights = load_folder(Path(folder), read_architecture(Path(folder)), dtype=torch.float32, device=torch.device("cpu"))
    return TorchCore(weights, model_name="m", max_num_seqs=8, num_cache_slots=8, max_model_len=1024, num_threads=1)


def scripted_core():
    """Says 5 6 7 8 over and over, one token each millisecond."""
    return ScriptedCore(Script(turns=(ScriptedTurn(token_ids=(5, 6, 7, 8), per_token_s=0.001),), vocab_size=64, max_model_len=1024))


@asynccontextmanager
async def replicas(*cores, **options):
    """The engines over HTTP; yields a generator whose instances they are, in order."""
    async with asynccontextmanager(_served)(cores) as urls:
        generator = HttpGenerator(urls, **{"request_timeout_s": 30.0} | options)
        try:
            yield generator
        finally:
            await generator.close()
            for core in cores:
                core.close()


async def _served(cores):
    if not cores:
        yield []
        return
    async with running_app(build_app(cores[0])) as url, asynccontextmanager(_served)(cores[1:]) as others:
        yield [url, *others]


def play(body, *cores, **options):
    async def go():
        async with replicas(*cores, **options) as generator:
            return await asyncio.wait_for(body(generator), 60)

    return asyncio.run(go())


async def when_sampled(core, num_tokens):
    await until(lambda: core.load().num_sampled_tokens >= num_tokens)


def test_a_pause_that_gives_turns_back_changes_no_token_of_them(qwen3_folder):
    core = torch_core(qwen3_folder)

    async def body(generator):
        (alone,) = [await generator.generate(request("alone"))]
        before = core.load().num_sampled_tokens
        turn = asyncio.create_task(whole_turn(generator, request("cut")))
        for num_tokens in (5, 40, 90):
            await when_sampled(core, before + num_tokens)
            await generator.replicas[0].pause("abort")
            await generator.replicas[0].resume()
        return alone, await turn

    alone, cut = play(body, core)
    assert cut.num_resumes >= 1
    assert cut.token_ids == alone.token_ids
    assert cut.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
    assert cut.policy_versions == [0] * 200


@pytest.mark.parametrize("mode", ["abort", pytest.param("keep", marks=pytest.mark.slow)])
def test_after_an_update_in_its_middle_a_turn_is_the_new_weights_own(qwen3_folder, tmp_path, mode):
    core, fresh = torch_core(qwen3_folder), torch_core(save_tiny_qwen3(tmp_path / "new", seed=5))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "new", dtype=torch.float32)
    tensors = list(model.state_dict().items())
    layout = lay_out(tensors, version=3)
    published = publish(layout, pieces_of(tensors, layout))

    async def body(generator):
        turn = asyncio.create_task(whole_turn(generator, request("cut", instance=0)))
        await when_sampled(core, 20)
        await generator.replicas[0].pause(mode, clear_cache=False)
        await asyncio.wrap_future(core.stage_weights(published.manifest))
        await asyncio.wrap_future(core.commit_weights(3))
        await generator.replicas[0].resume()
        cut = await turn
        start = cut.policy_versions.index(3)
        rest = GenerateRequest(
            request_id="rest",
            token_ids=PROMPT + cut.token_ids[:start],
            sampling=SamplingParams(max_tokens=200 - start, seed=11),
            session="rest",
            instance=1,
        )
        old = await generator.generate(request("old", instance=1))
        return cut, start, await generator.generate(rest), old

    cut, start, rest, old = play(body, core, fresh)
    assert 20 <= start < 200
    assert cut.policy_versions == [0] * start + [3] * (200 - start)
    assert cut.num_resumes == (1 if mode == "abort" else 0)
    assert cut.token_ids[start:] == rest.token_ids
    assert cut.logprobs[start:] == pytest.approx(rest.logprobs, abs=1e-4)
    assert cut.token_ids != old.token_ids  # The old weights would have said something else from the start.


@pytest.mark.parametrize("kind", ["torch", pytest.param("scripted", marks=pytest.mark.slow)])
def test_a_turn_moves_to_another_replica_with_what_it_has(kind, qwen3_folder):
    cores = [torch_core(qwen3_folder) if kind == "torch" else scripted_core() for _ in range(3)]

    async def body(generator):
        (alone,) = [await generator.generate(request("alone", instance=2))]
        turns = [asyncio.create_task(whole_turn(generator, request(f"s{n}", instance=0))) for n in range(3)]
        await when_sampled(cores[0], 30)
        num_moved = await generator.move(["s0", "s1", "unknown"], 1)
        sampled = [await turn for turn in turns]
        after = await generator.generate(request("s0", instance=0))
        return alone, num_moved, sampled, after

    alone, num_moved, sampled, after = play(body, *cores)
    assert num_moved == 2
    assert [turn.num_resumes for turn in sampled] == [1, 1, 0]
    elsewhere = cores[1].load().num_sampled_tokens
    assert 200 < elsewhere < 3 * 200  # `after`, and the rests of two turns.
    if kind == "torch":
        assert all(turn.token_ids == alone.token_ids for turn in [*sampled, after])
        assert all(turn.logprobs == pytest.approx(alone.logprobs, abs=1e-4) for turn in sampled)
    assert cores[0].load().num_sampled_tokens + elsewhere == 4 * 200  # Nothing was sampled twice; "s0" stayed where it went.


def test_a_turn_that_nobody_waits_for_is_gone_at_the_engine_also_after_a_resume(qwen3_folder):
    core = scripted_core()

    async def body(generator):
        turn = asyncio.create_task(whole_turn(generator, request(max_tokens=1000)))
        await when_sampled(core, 10)
        await generator.replicas[0].pause("abort")
        await generator.replicas[0].resume()
        await until(lambda: core.load().num_running == 1)
        turn.cancel()
        await until(lambda: core.load().num_running + core.load().num_waiting == 0)
        with pytest.raises(asyncio.CancelledError):
            await turn

    play(body, core)
    assert core.load().num_sampled_tokens < 1000


def test_turns_are_placed_where_the_request_or_the_placement_says_and_elsewhere_only_when_that_fails():
    cores = [scripted_core() for _ in range(3)]

    def served(before):
        return [core.load().num_prompt_tokens - start for core, start in zip(cores, before, strict=True)]

    async def body(generator):
        async def ask(session, **fields):
            before = [core.load().num_prompt_tokens for core in cores]
            await generator.generate(request(session, max_tokens=2, **fields))
            return [number > 0 for number in served(before)].index(True)

        assert [await ask("a", instance=2), await ask("a", instance=0), await ask("a")] == [2, 2, 2]
        generator.place("a", 1)
        assert [await ask("a", instance=2), await ask("a")] == [1, 1]
        generator.forget("a")
        assert await ask("a", instance=0) == 0
        cores[0].close()  # Answers 500 from now on.
        assert await ask("a", instance=0) in (1, 2)
        assert await ask("b", instance=0) in (1, 2)

    play(body, *cores, retry_for_s=5.0)


@pytest.mark.slow
def test_when_all_replicas_fail_each_is_tried_again_until_one_is_back():
    cores = [scripted_core() for _ in range(2)]

    async def body(generator):
        for core in cores:
            core.close()
        turn = asyncio.create_task(generator.generate(request(max_tokens=2)))
        with pytest.raises(EngineError, match=r"[3-9] attempts failed in .*engine is closed"):
            await turn

    play(body, *cores, retry_for_s=0.9)


def test_the_body_says_the_priority():
    asked = request(priority=7)
    seen = []

    async def app(scope, receive, send):
        if scope["type"] != "http":
            return
        message = await receive()
        seen.append(message["body"])
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def go():
        async with running_app(app) as url:
            generator = HttpGenerator([url], retry_for_s=0)
            with pytest.raises(EngineError):
                await generator.generate(asked)
            await generator.close()

    asyncio.run(go())
    assert b'"priority":7' in seen[0]
