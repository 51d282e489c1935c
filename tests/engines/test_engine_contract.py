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


def turn(request_id="r", *, prompt=(1, 2, 3), **sampling):
    params = SamplingParams(**{"max_tokens": 16, "seed": 7} | sampling)
    return GenerateRequest(request_id=request_id, token_ids=list(prompt), session=request_id, sampling=params)


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
        before = (await replica.metrics())["psrl_engine_sampled_tokens_total"]
        running = asyncio.create_task(replica.generate(turn(max_tokens=2000)))
        await until_sampled(replica, 5, since=before)
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
        async with asyncio.timeout(30):
            while (await replica.metrics())["psrl_engine_waiting"] < 1:
                await asyncio.sleep(0)
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
        before = (await replica.metrics())["psrl_engine_sampled_tokens_total"]
        running = asyncio.create_task(replica.generate(turn(max_tokens=400)))
        await until_sampled(replica, 5, since=before)
        await replica.stage_weights(manifest)
        await replica.pause("keep")
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
