"""The session router over HTTP, in front of a real engine: who may do what, and what each fault is answered with."""

import asyncio
import json
from functools import cache

import aiohttp
import pytest

from psrl.chat import load_renderer
from psrl.engine_client.client import HttpReplica
from psrl.engines.scripted.script import ScriptedFailure, ScriptedTurn
from psrl.errors import GatewayError
from psrl.types import AgentSampling, Outcome, Role, SessionLimits
from tests.gateway.gateway_kit import ADMIN_KEY, running_gateway, sampled_ids, scripted_engine, scripted_gateway, session_spec, until
from tests.real_models import qwen3_tokenizer_path

CALL = '<tool_call>\n{"name": "run", "arguments": {"code": "print(2+3)"}}\n</tool_call>'
TOOLS = [
    {
        "type": "function",
        "function": {"name": "run", "description": "Run it.", "parameters": {"type": "object", "properties": {"code": {"type": "string"}}}},
    }
]


@cache
def renderer():
    return load_renderer(str(qwen3_tokenizer_path()), tool_format="hermes")


def question(text="What is 2 + 3?"):
    return {"messages": [{"role": "user", "content": text}]}


def slow(text, latency_s):
    return ScriptedTurn(token_ids=tuple(sampled_ids(renderer(), text)), latency_s=latency_s)


async def post(http, address, body, *, path="/v1/chat/completions", key=None, raw=None):
    headers = {"authorization": f"Bearer {key or address.api_key}"}
    async with http.post(address.url + path, data=raw if raw is not None else json.dumps(body), headers=headers) as answer:
        return answer.status, json.loads(await answer.read())


def play(work, *turns, **gateway):
    """Run `work(client, core, http)` with a gateway whose engine answers `turns` over and over."""

    async def go():
        async with scripted_gateway(renderer(), *turns, **gateway) as (client, core), aiohttp.ClientSession() as http:
            return await work(client, core, http)

    return asyncio.run(asyncio.wait_for(go(), 60))


def is_busy(core):
    return core.load().num_running > 0


def is_idle(core):
    return not core.load().num_running and not core.load().num_waiting


def test_a_turn_is_answered_and_captured_exactly():
    async def work(client, core, http):
        address = await client.open(session_spec())
        answer = await client.chat(address, {**question(), "tools": TOOLS}, timeout_s=10)
        return answer, await client.close(address, abort=False)

    answer, record = play(work, f"Let me see.\n{CALL}")
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"code": "print(2+3)"}
    (trajectory,) = record.trajectories
    (step,) = trajectory.steps
    assert step.sampled_ids == sampled_ids(renderer(), f"Let me see.\n{CALL}")
    assert step.logprobs == [-0.5] * len(step.sampled_ids)
    assert answer["usage"]["completion_tokens"] == len(step.sampled_ids)
    assert answer["usage"]["prompt_tokens"] == len(step.observation_ids)
    assert record.counts["tool_calls"] == 1
    assert [message.role for message in record.messages] == [Role.USER, Role.ASSISTANT]


def test_an_unknown_session_and_a_wrong_secret_are_told_apart_and_give_nothing():
    async def work(client, core, http):
        one, other = await client.open(session_spec()), await client.open(session_spec("train-0-000001-e1"))
        statuses = []
        for url, key in (
            (f"{client.url}/sessions/none", one.api_key),
            (one.url, other.api_key),
            (one.url, ADMIN_KEY),
            (one.url, ""),
            (one.url, one.api_key),
        ):
            async with http.get(url, headers={"authorization": f"Bearer {key}"}) as answer:
                statuses.append((answer.status, ((await answer.json()).get("error") or {}).get("code")))
        async with http.post(f"{client.url}/sessions", json={}, headers={"authorization": f"Bearer {one.api_key}"}) as answer:
            statuses.append((answer.status, (await answer.json())["error"]["code"]))
        async with http.get(one.url, headers={"x-api-key": one.api_key}) as answer:
            statuses.append((answer.status, None))
        return statuses

    assert play(work, "5") == [
        (404, "unknown_session"),
        (401, "wrong_secret"),
        (401, "wrong_secret"),
        (401, "wrong_secret"),
        (200, None),
        (401, "wrong_secret"),
        (200, None),
    ]


def test_an_agent_cannot_delete_its_own_session():
    async def work(client, core, http):
        address = await client.open(session_spec())
        await client.chat(address, question(), timeout_s=10)
        async with http.delete(address.url, headers={"authorization": f"Bearer {address.api_key}"}) as answer:
            refused = answer.status, (await answer.json())["error"]["code"]
        return refused, await client.close(address, abort=False)

    refused, record = play(work, "5")
    assert refused == (401, "wrong_secret")
    assert record.num_turns == 1


@pytest.mark.parametrize(
    ("raw", "status", "code"),
    [
        (b"{", 400, "invalid_json"),
        (b"", 400, "invalid_json"),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', 400, "invalid_json"),
        (b"[" * 5000, 400, "invalid_json"),
    ],
)
def test_a_body_that_is_no_json_is_refused_and_the_session_goes_on(raw, status, code):
    async def work(client, core, http):
        address = await client.open(session_spec())
        refused = await post(http, address, None, raw=raw)
        assert (await post(http, address, question()))[0] == 200
        return refused

    found_status, body = play(work, "5")
    assert (found_status, body["error"]["code"]) == (status, code)


def test_a_spec_that_cannot_be_read_is_refused():
    async def work(client, core, http):
        codes = []
        for body in (
            {},
            [],
            {"uid": "a"},
            {**_raw_spec(), "limits": {"max_turns": "many"}},
            {**_raw_spec(), "contract": {"seed": 1, "x": 2}},
        ):
            async with http.post(f"{client.url}/sessions", json=body, headers={"authorization": f"Bearer {ADMIN_KEY}"}) as answer:
                codes.append((answer.status, (await answer.json())["error"]["code"]))
        return codes

    assert play(work, "5") == [(400, "invalid_session")] * 5


def _raw_spec():
    return {
        "uid": "a",
        "group": "a",
        "admitted_version": 0,
        "is_validation": False,
        "contract": {"seed": 1},
        "limits": {"max_turns": 1, "prompt_length": 9, "response_length": 9},
    }


def test_a_message_of_one_megabyte_is_rendered_and_another_session_is_served_meanwhile():
    async def work(client, core, http):
        limits = SessionLimits(max_turns=2, prompt_length=1_000_000, response_length=100)
        long, short = await client.open(session_spec(limits=limits)), await client.open(session_spec("train-0-000001-e1"))
        text = "x = 1\n" * (2**20 // 6)
        long_turn = asyncio.create_task(post(http, long, question(text)))
        await asyncio.sleep(0)
        assert (await post(http, short, question()))[0] == 200
        status, _ = await long_turn
        record = await client.close(long, abort=False)
        return status, record.trajectories[0]

    status, trajectory = play(work, "5")
    assert status == 200
    assert trajectory.num_tokens > 100_000


def test_a_body_beyond_the_limit_is_refused(monkeypatch):
    monkeypatch.setattr("psrl.gateway.session_router.MAX_BODY_BYTES", 1000)

    async def work(client, core, http):
        address = await client.open(session_spec())
        return await post(http, address, question("x" * 1000))

    status, body = play(work, "5")
    assert (status, body["error"]["code"]) == (413, "body_too_large")


def test_two_sub_agents_at_once_are_two_branches_each_exact():
    async def sub_agent(http, address, name):
        messages = [{"role": "system", "content": f"You are {name}."}, {"role": "user", "content": "Begin."}]
        for _ in range(3):
            _, body = await post(http, address, {"messages": messages})
            messages += [body["choices"][0]["message"], {"role": "user", "content": f"{name}, go on."}]

    async def work(client, core, http):
        address = await client.open(session_spec())
        await asyncio.gather(*(sub_agent(http, address, name) for name in ("one", "two")))
        return await client.close(address, abort=False)

    record = play(work, slow("Yes.", 0.02), slow("No, not yet.", 0.01), slow("Maybe.", 0.03))
    assert record.num_turns == 6
    assert record.counts["branches"] == 1
    assert [trajectory.num_turns for trajectory in record.trajectories] == [3, 3]
    texts = [renderer().decode(trajectory.ids()) for trajectory in record.trajectories]
    assert sorted(("You are one." in text, "You are two." in text) for text in texts) == [(False, True), (True, False)]


def test_three_hundred_turns_are_one_trajectory():
    async def work(client, core, http):
        address = await client.open(session_spec())
        messages = question()["messages"]
        for _ in range(300):
            status, body = await post(http, address, {"messages": messages})
            assert status == 200
            messages += [body["choices"][0]["message"], {"role": "user", "content": "And?"}]
        return await client.close(address, abort=False)

    record = play(work, "Five.", "No: six.")
    (trajectory,) = record.trajectories
    assert trajectory.num_turns == 300
    assert record.counts["branches"] == 0
    between = renderer().template.encode("\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n")
    assert all(step.observation_ids == between for step in trajectory.steps[1:])


def test_the_turns_of_a_session_are_limited():
    async def work(client, core, http):
        address = await client.open(session_spec(limits=SessionLimits(max_turns=1, prompt_length=500, response_length=500)))
        first = await post(http, address, question())
        second = await post(http, address, question())
        return first[0], second, await client.close(address, abort=False)

    first, (status, body), record = play(work, "5")
    assert first == 200
    assert (status, body["error"]["code"]) == (400, "max_turns")
    assert record.end is Outcome.MAX_TURNS
    assert record.num_turns == 1


def test_a_full_context_is_refused_and_a_shorter_branch_goes_on():
    async def work(client, core, http):
        address = await client.open(session_spec(limits=SessionLimits(max_turns=9, prompt_length=30, response_length=20)))
        _, body = await post(http, address, question())
        messages = [*question()["messages"], body["choices"][0]["message"], {"role": "user", "content": "x " * 30}]
        refused = await post(http, address, {"messages": messages})
        between = await client.record(address)
        compacted = await post(http, address, {**question("So far: 5."), "max_tokens": 3})
        return body, refused, between, compacted, await client.close(address, abort=False)

    body, (status, error), between, compacted, record = play(work, ScriptedTurn(token_ids=(100,)))
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 20
    assert (status, error["error"]["code"]) == (400, "context_length_exceeded")
    assert between.end is Outcome.MAX_TOKENS
    assert compacted[0] == 200
    assert record.end is None
    assert len(record.trajectories) == 2


def test_a_turn_that_is_cut_where_the_sessions_room_ends_says_so_until_another_turn_works():
    async def work(client, core, http):
        limits = SessionLimits(max_turns=9, prompt_length=100, response_length=200, max_tokens_per_turn=7)
        address = await client.open(session_spec(limits=limits))
        ends = []
        for body in (question(), {**question(), "max_tokens": 3}):
            _, answer = await post(http, address, body)
            assert answer["choices"][0]["finish_reason"] == "length"
            ends.append((answer["usage"]["completion_tokens"], (await client.record(address)).end))
        return ends

    assert play(work, ScriptedTurn(token_ids=(100,))) == [(7, Outcome.MAX_TOKENS), (3, None)]


def test_what_the_agent_asks_of_sampling_is_overridden_and_counted_or_refused():
    body = {**question(), "temperature": 0.2, "top_p": 1.0, "presence_penalty": 1.5, "max_tokens": 3}

    async def work(client, core, http):
        lax = await client.open(session_spec("train-0-000001-e1"))
        strict = await client.open(session_spec(agent_sampling=AgentSampling.REFUSE))
        return await post(http, lax, body), await post(http, strict, body), await client.close(lax, abort=False)

    (status, answer), (refused_status, refused), record = play(work, ScriptedTurn(token_ids=(100,)))
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 3
    assert record.counts["sampling_overrides/temperature"] == 1
    assert record.counts["sampling_overrides/presence_penalty"] == 1
    assert record.trajectories[0].temperature == 1.0
    assert refused_status == 400
    assert (refused["error"]["code"], refused["error"]["param"]) == ("sampling_contract", "temperature")


def test_a_stop_text_ends_the_turn_with_the_token_that_completes_it():
    async def work(client, core, http):
        address = await client.open(session_spec())
        _, body = await post(http, address, {**question(), "stop": ["</code>"]})
        return body["choices"][0], await client.close(address, abort=False)

    choice, record = play(work, "<code>1</code> and then much more")
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == "<code>1"
    sampled = record.trajectories[0].steps[0].sampled_ids
    text = renderer().decode(sampled)
    assert "</code>" in text
    assert "</code>" not in renderer().decode(sampled[:-1])
    assert sampled == sampled_ids(renderer(), "<code>1</code> and then much more")[: len(sampled)]


def test_numbers_of_any_size_in_a_call_reach_the_agent_and_the_record():
    async def work(client, core, http):
        address = await client.open(session_spec())
        _, body = await post(http, address, {**question(), "tools": TOOLS})
        async with http.get(address.url, headers={"authorization": f"Bearer {address.api_key}"}) as answer:
            return body["choices"][0]["message"]["tool_calls"][0], answer.status, await answer.text()

    call, status, record = play(work, CALL.replace('"print(2+3)"', str(2**70)))
    assert json.loads(call["function"]["arguments"]) == {"code": 2**70}
    assert status == 200
    assert str(2**70) in record


def test_a_call_that_cannot_be_read_is_shown_to_the_agent_as_it_was_written():
    async def work(client, core, http):
        address = await client.open(session_spec())
        _, body = await post(http, address, {**question(), "tools": TOOLS})
        return body["choices"][0], await client.close(address, abort=False)

    choice, record = play(work, 'Now.\n<tool_call>\n{"name": "run", "arguments": {broken}\n</tool_call>')
    assert choice["finish_reason"] == "stop"
    assert '{"name": "run", "arguments": {broken}' in choice["message"]["content"]
    assert record.counts["tool_errors/invalid_json"] == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_the_engine_and_nothing_is_captured(stream):
    async def work(client, core, http):
        address = await client.open(session_spec())
        turn = asyncio.create_task(post(http, address, {**question(), "stream": stream}))
        await until(lambda: is_busy(core))
        turn.cancel()
        await asyncio.gather(turn, return_exceptions=True)
        await until(lambda: is_idle(core))
        return await client.close(address, abort=False)

    record = play(work, slow("5", 30.0))
    assert record.num_turns == 0
    assert record.trajectories == ()


def test_deleting_a_session_waits_for_the_turn_in_flight():
    async def work(client, core, http):
        address = await client.open(session_spec())
        turn = asyncio.create_task(post(http, address, question()))
        await until(lambda: is_busy(core))
        closing = asyncio.create_task(client.close(address, abort=False))
        await asyncio.sleep(0.05)
        late = await post(http, address, question())
        record = await closing
        gone = await post(http, address, question())
        return (await turn)[0], late, record, gone

    status, (late_status, late), record, (gone_status, gone) = play(work, slow("5", 0.4))
    assert status == 200
    assert (late_status, late["error"]["code"]) == (409, "session_closed")
    assert record.num_turns == 1
    assert (gone_status, gone["error"]["code"]) == (404, "unknown_session")


@pytest.mark.parametrize("stream", [False, True])
def test_an_aborted_session_cancels_its_turn_down_to_the_engine(stream):
    async def ask(http, address):
        headers = {"authorization": f"Bearer {address.api_key}"}
        async with http.post(address.base_url + "/chat/completions", json={**question(), "stream": stream}, headers=headers) as answer:
            return answer.status, await answer.text()

    async def work(client, core, http):
        address = await client.open(session_spec())
        turn = asyncio.create_task(ask(http, address))
        await until(lambda: is_busy(core))
        record = await client.close(address, abort=True)
        await until(lambda: is_idle(core))
        return record, await turn

    record, (status, text) = play(work, slow("5", 30.0))
    assert record.num_turns == 0
    assert status == (200 if stream else 409)
    assert "session_closed" in text


def test_an_engine_that_fails_is_told_and_forgotten_once_a_turn_works():
    async def work(client, core, http):
        address = await client.open(session_spec())
        failed = await post(http, address, question())
        between = await client.record(address)
        worked = await post(http, address, question())
        return failed, between, worked[0], await client.close(address, abort=False)

    error = ScriptedTurn(failure=ScriptedFailure.ERROR)
    (status, body), between, worked, record = play(work, error, "5")
    assert (status, body["error"]["code"]) == (503, "engine_unavailable")
    assert between.end is Outcome.INFRA_ERROR
    assert worked == 200
    assert record.end is None
    assert record.num_turns == 1


def test_a_turn_that_began_before_a_fault_does_not_hide_it():
    async def work(client, core, http):
        address = await client.open(session_spec())
        early = asyncio.create_task(post(http, address, question("slow one")))
        await until(lambda: is_busy(core))
        late = await post(http, address, question("second one"))
        between = (await client.record(address)).end
        return (await early)[0], late[0], between, (await client.close(address, abort=False)).end

    error = ScriptedTurn(failure=ScriptedFailure.ERROR)
    early, late, between, end = play(work, slow("5", 0.5), error)
    assert (early, late) == (200, 503)
    assert between is Outcome.INFRA_ERROR
    assert end is Outcome.INFRA_ERROR


def test_a_client_that_gives_up_after_long_says_that_the_engines_were_slow(monkeypatch):
    monkeypatch.setattr("psrl.gateway.session_router.PATIENCE_S", 0.1)

    async def work(client, core, http):
        address = await client.open(session_spec())
        turn = asyncio.create_task(post(http, address, question()))
        await until(lambda: is_busy(core))
        await asyncio.sleep(0.15)
        turn.cancel()
        await asyncio.gather(turn, return_exceptions=True)
        await until(lambda: is_idle(core))
        return await client.close(address, abort=False)

    record = play(work, slow("5", 30.0))
    assert record.end is Outcome.INFRA_ERROR
    assert "gave up on a turn" in record.error
    assert record.generation_s > 0.1


def test_a_turn_that_fails_is_sampled_again_before_anybody_is_told():
    async def work(client, core, http):
        address = await client.open(session_spec())
        await client.chat(address, question(), timeout_s=30)
        return await client.close(address, abort=False)

    record = play(work, ScriptedTurn(failure=ScriptedFailure.DISCONNECT), "5", retry_for_s=5.0)
    assert record.num_turns == 1
    assert record.trajectories[0].steps[0].sampled_ids == sampled_ids(renderer(), "5")


def test_a_turn_that_the_engine_gives_back_unfinished_goes_on_with_what_it_has():
    ids = tuple(sampled_ids(renderer(), "one two three four five six"))

    async def go():
        async with scripted_gateway(renderer(), ScriptedTurn(token_ids=ids, per_token_s=0.1)) as (client, core):
            address = await client.open(session_spec())
            turn = asyncio.create_task(client.chat(address, question(), timeout_s=30))
            await until(lambda: core.load().num_sampled_tokens >= 2)
            core.abort(None)
            await turn
            return await client.close(address, abort=False)

    record = asyncio.run(go())
    (step,) = record.trajectories[0].steps
    assert record.counts["resumed_turns"] == 1
    assert step.finish_reason == "stop"
    cut = next(length for length in range(1, len(ids)) if step.sampled_ids == [*ids[:length], *ids])
    assert 0 < cut < len(ids)


def test_sessions_that_nobody_uses_expire_and_too_many_are_refused():
    async def work(client, core, http):
        first = await client.open(session_spec())
        with pytest.raises(GatewayError, match="too_many_sessions"):
            await client.open(session_spec("train-0-000001-e1"))
        while True:
            async with http.get(first.url, headers={"authorization": f"Bearer {first.api_key}"}) as answer:
                if answer.status == 404:
                    break
            await asyncio.sleep(0.05)
        await client.open(session_spec())
        async with http.get(f"{client.url}/metrics") as answer:
            return await answer.text()

    metrics = play(work, "5", max_sessions=1, idle_timeout_s=0.2)
    assert "psrl_gateway_sessions_expired_total 1\n" in metrics
    assert "psrl_gateway_sessions_open 1\n" in metrics


def test_the_engine_is_asked_with_the_sessions_seed_and_the_turns_number():
    """The scripted engine's own record of a request is its prompt; seeds are seen by a replica that writes them down."""
    asked = []

    class Listening(HttpReplica):
        async def generate(self, request):
            asked.append(request)
            return await super().generate(request)

    async def go():
        async with scripted_engine(renderer(), "5") as (url, _):
            replica = Listening(url)
            async with running_gateway(renderer(), replica) as client:
                address = await client.open(session_spec(seed=3))
                for _ in range(2):
                    await client.chat(address, question(), timeout_s=10)
            await replica.close()

    asyncio.run(go())
    assert [request.sampling.seed for request in asked] == [3 * 1_000_003, 3 * 1_000_003 + 1]
    assert len({request.session for request in asked}) == 1
