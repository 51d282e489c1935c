"""One suite for every engine, through real HTTP."""
# ruff: noqa: ASYNC110 (polling the metrics route is the point)

import asyncio
import dataclasses

import httpx
import pytest

from psrl.engine_client.client import HttpReplica
from psrl.errors import EngineError
from psrl.parameter_server.push import publish_tensors
from psrl.parameter_server.transports.shared_memory import open_version
from psrl.types import FinishReason, GenerateRequest, SamplingParams
from tests.engines.tiny_models import save_tiny_qwen3


def turn(request_id="r", *, prompt=(1, 2, 3), priority=0, **sampling):
    params = SamplingParams(**{"max_tokens": 16, "seed": 7} | sampling)
    return GenerateRequest(request_id=request_id, token_ids=list(prompt), session=request_id, sampling=params, priority=priority)


def with_replica(url, body):
    async def run():
        replica = HttpReplica(url, request_timeout_s=60)
        try:
            return await asyncio.wait_for(body(replica), 90)
        finally:
            await replica.resume()
            await replica.close()

    return asyncio.run(run())


async def until_running(replica, count):
    async with asyncio.timeout(30):
        while (await replica.metrics())["psrl_engine_running"] < count:
            await asyncio.sleep(0)


async def until_waiting(replica, count):
    async with asyncio.timeout(30):
        while (await replica.metrics())["psrl_engine_waiting"] < count:
            await asyncio.sleep(0)


async def until_sampled(replica, count, *, since):
    async with asyncio.timeout(30):
        while (await replica.metrics())["psrl_engine_sampled_tokens_total"] < since + count:
            await asyncio.sleep(0)


@pytest.fixture(scope="module")
def next_versions(tmp_path_factory):
    """Manifests of other weights under increasing versions, in shared memory."""
    from safetensors.torch import load_file

    folder = save_tiny_qwen3(tmp_path_factory.mktemp("next"), seed=2)
    tensors = load_file(folder / "model.safetensors")
    written = []

    def write(version):
        written.append(publish_tensors(tensors, version))
        return written[-1].manifest

    yield write
    for shared in written:
        shared.close()


def test_a_turn_has_ids_logprobs_and_versions_of_the_asked_length(engine_url):
    generation = with_replica(engine_url, lambda replica: replica.generate(turn(max_tokens=11)))
    assert len(generation.token_ids) == len(generation.logprobs) == len(generation.policy_versions) == 11
    assert generation.finish_reason is FinishReason.LENGTH
    assert generation.prompt_tokens == 3
    assert all(logprob <= 0 for logprob in generation.logprobs)


def test_a_stop_id_ends_the_turn_and_is_part_of_it(engine_url):
    whole = with_replica(engine_url, lambda replica: replica.generate(turn(max_tokens=8)))
    stop = whole.token_ids[4]
    cut = with_replica(engine_url, lambda replica: replica.generate(turn(max_tokens=8, stop_token_ids=(stop,))))
    assert cut.finish_reason is FinishReason.STOP
    assert cut.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]


def test_the_context_limit_cuts_a_turn_as_length(engine_url):
    generation = with_replica(engine_url, lambda replica: replica.generate(turn(prompt=[3] * 2040, max_tokens=100)))
    assert (len(generation.token_ids), generation.finish_reason) == (8, FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": "abc"}, "token_ids"),
        ({"token_ids": [1, -2]}, "token_ids"),
        ({"token_ids": [64]}, "token_ids"),
        ({"token_ids": [1] * 2048}, "token_ids"),
        ({"token_ids": [1], "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"token_ids": [1], "sampling_params": {"top_p": 0}}, "sampling_params.top_p"),
        ({"token_ids": [1], "sampling_params": {"top_k": "x"}}, "sampling_params.top_k"),
        ({"token_ids": [1], "sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
        ({"token_ids": [1], "sampling_params": {"seed": "x"}}, "sampling_params.seed"),
        ({"token_ids": [1], "sampling_params": {"stop_token_ids": [None]}}, "sampling_params.stop_token_ids"),
        ({"token_ids": [True]}, "token_ids"),
        ({"token_ids": [1], "sampling_params": {"max_tokens": 1.5}}, "sampling_params.max_tokens"),
        ({"token_ids": [1], "sampling_params": {"min_p": 0.1}}, "sampling_params.min_p"),
        ({"token_ids": [1], "sampling_params": {"logprobs": 5}}, "sampling_params.logprobs"),
        ({"token_ids": [1], "priority": "first"}, "priority"),
        ({"token_ids": [1], "priority": True}, "priority"),
        ([], "body"),
    ],
)
def test_bad_input_is_400_and_names_the_field(engine_url, body, field):
    response = httpx.post(f"{engine_url}/generate", json=body, timeout=10)
    assert response.status_code == 400
    assert response.json()["error"]["field"] == field


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/pause?mode=stop", {}, "mode"),
        ("/pause?clear_cache=perhaps", {}, "clear_cache"),
        ("/abort_requests", {}, "request_ids"),
        ("/abort_requests", {"request_ids": "one"}, "request_ids"),
        ("/update_weights", {"update_info": {"version": 3}}, "update_info"),
        ("/finish_weight_update", {"weight_version": 3}, "weight_version"),
    ],
)
def test_a_bad_command_is_400_and_names_the_field(engine_url, path, body, field):
    response = httpx.post(engine_url + path, json=body, timeout=10)
    assert (response.status_code, response.json()["error"]["field"]) == (400, field)


def test_an_update_that_was_not_staged_is_500_and_says_so(engine_url):
    response = httpx.post(engine_url + "/finish_weight_update", json={"weight_version": "99"}, timeout=10)
    assert response.status_code == 500
    assert "staged is None" in response.json()["error"]["message"]


def test_the_routes_that_a_gateway_probes_answer(engine_url):
    for path in ("/health", "/v1/models", "/version", "/metrics", "/weight_info"):
        assert httpx.get(engine_url + path, timeout=10).status_code == 200
    assert httpx.get(engine_url + "/v1/models", timeout=10).json()["data"][0]["max_model_len"] == 2048


def test_pause_abort_returns_what_was_sampled(engine_url):
    async def body(replica):
        running = await begun_turn(replica, max_tokens=2000)
        await replica.pause("abort")
        return await running

    generation = with_replica(engine_url, body)
    assert generation.finish_reason is FinishReason.ABORT
    assert 5 <= len(generation.token_ids) < 2000


def test_pause_wait_lets_the_running_turn_end_and_new_ones_queue(engine_url):
    async def body(replica):
        running = asyncio.create_task(replica.generate(turn("first", max_tokens=300)))
        await until_running(replica, 1)
        await replica.pause("wait")
        first = await running
        queued = asyncio.create_task(replica.generate(turn("second")))
        await until_waiting(replica, 1)
        assert not queued.done()
        await replica.resume()
        return first, await queued

    first, second = with_replica(engine_url, body)
    assert (len(first.token_ids), first.finish_reason) == (300, FinishReason.LENGTH)
    assert len(second.token_ids) == 16


def test_an_update_inside_a_turn_gives_two_version_spans_and_a_report(engine_url, next_versions):
    async def body(replica):
        old = await replica.version()
        manifest = next_versions(old + 1)
        running = await begun_turn(replica, max_tokens=400)
        await replica.pause("keep")  # before staging: on a busy machine the turn could end meanwhile
        await replica.stage_weights(manifest)
        report = await replica.finish_weights(manifest.version)
        await replica.resume()
        return old, manifest, report, await running, await replica.version()

    old, manifest, report, generation, version = with_replica(engine_url, body)
    assert report.version == version == old + 1
    assert report.num_matched == report.num_expected == len(manifest.tensors)
    assert report.checksum == manifest.checksum
    assert sorted(set(generation.policy_versions)) == [old, old + 1]
    assert generation.policy_versions == sorted(generation.policy_versions)
    assert len(generation.token_ids) == 400


async def begun_turn(replica, *, max_tokens):
    """A turn of which a few tokens are there."""
    before = (await replica.metrics())["psrl_engine_sampled_tokens_total"]
    running = asyncio.create_task(replica.generate(turn(max_tokens=max_tokens)))
    await until_sampled(replica, 5, since=before)
    return running


async def served_version(replica, next_versions):
    """The next version, staged and served as a sync does it; returns its manifest."""
    manifest = next_versions(await replica.version() + 1)
    await replica.stage_weights(manifest)
    await replica.finish_weights(manifest.version)
    return manifest


def test_a_staged_version_is_served_only_when_it_is_finished_and_decoding_goes_on_meanwhile(engine_url, next_versions):
    async def body(replica):
        old = await replica.version()
        running = asyncio.create_task(replica.generate(turn(max_tokens=2000)))
        await until_running(replica, 1)
        staged = await replica.stage_weights(next_versions(old + 1))
        before = (await replica.metrics())["psrl_engine_sampled_tokens_total"]
        await until_sampled(replica, 5, since=before)
        still = await replica.version()
        await replica.abort()
        return old, staged, still, await running

    old, staged, still, generation = with_replica(engine_url, body)
    assert (staged.version, still) == (old + 1, old)
    assert staged.num_matched == staged.num_expected
    assert set(generation.policy_versions) == {old}


def test_a_turn_that_is_given_back_at_an_update_goes_on_with_the_new_weights_alone(engine_url, next_versions):
    async def body(replica):
        old = await replica.version()
        manifest = next_versions(old + 1)
        running = await begun_turn(replica, max_tokens=2000)
        await replica.stage_weights(manifest)
        await replica.pause("abort")
        given_back = await running
        again = asyncio.create_task(replica.generate(turn(prompt=[1, 2, 3, *given_back.token_ids])))
        await until_waiting(replica, 1)
        await replica.finish_weights(manifest.version)
        await replica.resume()
        return old, given_back, await again

    old, given_back, again = with_replica(engine_url, body)
    assert (given_back.finish_reason, set(given_back.policy_versions)) == (FinishReason.ABORT, {old})
    assert again.policy_versions == [old + 1] * 16
    assert again.cached_tokens == 0  # its keys are of the old weights


def test_an_update_that_waits_changes_the_weights_between_two_turns(engine_url, next_versions):
    async def body(replica):
        old = await replica.version()
        manifest = next_versions(old + 1)
        running = asyncio.create_task(replica.generate(turn("first", max_tokens=100)))
        await until_running(replica, 1)
        await replica.stage_weights(manifest)
        await replica.pause("wait")
        after = asyncio.create_task(replica.generate(turn("second")))
        await until_waiting(replica, 1)
        await replica.finish_weights(manifest.version)
        await replica.resume()
        return old, await running, await after

    old, first, second = with_replica(engine_url, body)
    assert (first.finish_reason, first.policy_versions) == (FinishReason.LENGTH, [old] * 100)
    assert second.policy_versions == [old + 1] * 16


def test_no_key_of_older_weights_is_used_for_a_prompt_that_was_seen(engine_url, next_versions):
    async def body(replica):
        await replica.generate(turn(prompt=[4] * 50))
        await served_version(replica, next_versions)
        return await replica.generate(turn(prompt=[4] * 50))

    assert with_replica(engine_url, body).cached_tokens == 0


def test_waiting_turns_begin_by_priority_and_then_as_they_came(engine_url):
    async def body(replica):
        ended = []

        async def play(name, priority):
            await replica.generate(turn(name, priority=priority, max_tokens=20))
            ended.append(priority)

        await replica.pause("keep")
        turns = []
        for priority in (2, 0, -1, 2, 0, -1):
            turns += [asyncio.create_task(play(f"{priority}-{n}", priority)) for n in range(4)]
            await until_waiting(replica, len(turns))
        await replica.resume()
        await asyncio.gather(*turns)
        return ended

    # Eight turns of one length run at once, so those of one priority end together.
    assert with_replica(engine_url, body) == [-1] * 8 + [0] * 8 + [2] * 8


def test_the_rate_of_sampling_is_reported(engine_url):
    async def body(replica):
        await replica.generate(turn(max_tokens=100))
        return await replica.metrics()

    metrics = with_replica(engine_url, body)
    # All tokens of the engine's life, at most, in a window of 1.75 s at least.
    assert 0 < metrics["psrl_engine_tokens_per_s"] <= metrics["psrl_engine_sampled_tokens_total"] / 1.75


def test_a_damaged_version_is_refused_and_the_old_one_stays(engine_url, next_versions, tmp_path):
    async def body(replica):
        before = await replica.weight_info()
        manifest = next_versions(before and int(before["weight_version"]) + 1)
        damaged = bytearray(open_version(manifest).tobytes())
        damaged[100] ^= 1
        (tmp_path / "damaged").write_bytes(damaged)
        place = {"path": str(tmp_path / "damaged"), "inode": str((tmp_path / "damaged").stat().st_ino)}
        for location, cause in (place, "checksum"), ({"path": "/nowhere"}, "cannot map"), ({"inode": "1"}, "no longer there"):
            moved = dataclasses.replace(manifest, location=manifest.location | location)
            with pytest.raises(EngineError, match=cause):
                await replica.stage_weights(moved)
            with pytest.raises(EngineError, match="staged is None"):
                await replica.finish_weights(manifest.version)
        return before, await replica.weight_info(), await replica.generate(turn())

    before, after, generation = with_replica(engine_url, body)
    assert before == after
    assert len(generation.token_ids) == 16


def test_abort_by_id_ends_that_turn_only(engine_url):
    async def body(replica):
        one = asyncio.create_task(replica.generate(turn("one", max_tokens=2000)))
        two = asyncio.create_task(replica.generate(turn("two", max_tokens=100)))
        await until_running(replica, 2)
        await replica.abort(["one"])
        return await one, await two

    one, two = with_replica(engine_url, body)
    assert (one.finish_reason, two.finish_reason) == (FinishReason.ABORT, FinishReason.LENGTH)


def test_a_client_that_hangs_up_frees_the_engine(engine_url):
    async def body(replica):
        running = asyncio.create_task(replica.generate(turn(max_tokens=2000)))
        await until_running(replica, 1)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        async with asyncio.timeout(1.5):  # far less than the turn takes in the scripted engine
            while (await replica.metrics())["psrl_engine_running"] > 0:
                await asyncio.sleep(0)

    with_replica(engine_url, body)


def test_a_client_that_hangs_up_during_a_pause_frees_the_engine(engine_url):
    async def body(replica):
        running = asyncio.create_task(replica.generate(turn(max_tokens=2000)))
        await until_running(replica, 1)
        await replica.pause("keep")
        queued = asyncio.create_task(replica.generate(turn("second")))
        async with asyncio.timeout(30):
            while (await replica.metrics())["psrl_engine_waiting"] < 1:
                await asyncio.sleep(0)
            for one in (running, queued):
                one.cancel()
            await asyncio.gather(running, queued, return_exceptions=True)
            while (load := await replica.metrics())["psrl_engine_running"] + load["psrl_engine_waiting"] > 0:
                await asyncio.sleep(0)

    with_replica(engine_url, body)


def test_a_later_pause_that_keeps_ends_one_that_waits(engine_url):
    async def body(replica):
        running = asyncio.create_task(replica.generate(turn(max_tokens=2000)))
        await until_running(replica, 1)
        waiting = asyncio.create_task(replica.pause("wait"))
        await asyncio.sleep(0)
        while not waiting.done():
            await replica.pause("keep")
        stood_at = (await replica.metrics())["psrl_engine_sampled_tokens_total"]
        await replica.reset_prefix_cache()  # a command: it runs between two steps, of which there must be none
        assert (await replica.metrics())["psrl_engine_sampled_tokens_total"] == stood_at
        await replica.abort()
        return await running

    assert with_replica(engine_url, body).finish_reason is FinishReason.ABORT


def test_thirty_turns_at_once_all_come_back(engine_url):
    async def body(replica):
        return await asyncio.gather(*(replica.generate(turn(f"r{n}", prompt=[n % 7, 2], seed=n, max_tokens=5 + n)) for n in range(30)))

    assert [len(one.token_ids) for one in with_replica(engine_url, body)] == [5 + n for n in range(30)]
