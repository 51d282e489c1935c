"""Programs at SandboxFusion services: what is tried again and what is not, and answers of the published service."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from psrl.config.sandbox import SandboxConfig
from psrl.errors import ConfigError, SandboxError, SandboxUnavailableError
from psrl.sandbox import BackendSandboxes, build_interpreter
from psrl.sandbox.sandbox_fusion import result_of
from psrl.types import SandboxSpec

FINISHED = {"status": "Finished", "execution_time": 0.05, "return_code": 0, "stdout": "5\n", "stderr": ""}
"""As the published service answers: without psrl's own fields."""
SUCCESS = {"status": "Success", "message": "", "compile_result": None, "run_result": FINISHED, "executor_pod_name": None, "files": {}}
BROKEN = {**SUCCESS, "status": "SandboxError", "message": "no space left on device", "run_result": None}


@asynccontextmanager
async def service_that_answers(*answers):
    """A server of its own whose answers come in this order, the last one for ever: (status, body). Gives URL and requests."""
    asked = []

    async def run_code(request):
        asked.append((request.headers, await request.json()))
        status, body = answers[min(len(asked), len(answers)) - 1]
        return web.Response(status=status, text=body if isinstance(body, str) else json.dumps(body))

    app = web.Application()
    app.add_routes([web.post("/run_code", run_code)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}", asked
    finally:
        await runner.cleanup()


def settings_of(*urls, **settings):
    return SandboxConfig(
        **{"backend": "sandbox_fusion", "urls": list(urls), "num_workers": 4, "max_queue_s": 5.0, "wall_s": 2.0, **settings}
    )


async def run_at(*urls, code="print(2+3)", use=None, **settings):
    interpreter = build_interpreter(settings_of(*urls, **settings))
    try:
        return await (use(interpreter) if use else interpreter.run_program(code))
    finally:
        await interpreter.stop()


def asked_of(*answers, **settings):
    """(result or error, requests) of one program at a service that answers so."""

    async def play():
        async with service_that_answers(*answers) as (url, asked):
            try:
                return await run_at(url, **settings), asked
            except SandboxError as error:
                return error, asked

    return asyncio.run(play())


def test_the_request_has_the_published_fields_and_the_limits():
    result, [(headers, body)] = asked_of((200, SUCCESS), memory_mb=300)
    assert (result.stdout, result.exit_code, result.killed_by) == (b"5\n", 0, None)
    limits = {"compile_timeout": 2.0, "run_timeout": 2.0, "memory_limit_MB": 300}
    assert body == {"code": body["code"], "language": "python", **limits, "stdin": "", "files": {}, "fetch_files": []}
    assert "authorization" not in headers


NO_TEXT = {**SUCCESS, "run_result": {**FINISHED, "stdout": 5}}


@pytest.mark.parametrize(
    "bad", [(500, "oops"), (503, ""), (429, {"detail": "busy"}), (200, BROKEN), (200, "no JSON"), (200, {}), (200, NO_TEXT)]
)
def test_what_the_world_got_wrong_is_tried_again(bad):
    result, asked = asked_of(bad, (200, SUCCESS))
    assert (result.stdout, len(asked)) == (b"5\n", 2)


def test_what_the_program_got_wrong_is_not_tried_again():
    for ran in ({**FINISHED, "return_code": 1}, {**FINISHED, "status": "TimeLimitExceeded", "return_code": None}):
        result, asked = asked_of((200, {**SUCCESS, "status": "Failed", "run_result": ran}))
        assert (result.exit_code, len(asked)) == (ran["return_code"], 1)


@pytest.mark.parametrize(
    ("status", "fix"), [(401, "api_key_file"), (404, "sandbox.urls"), (422, "is it a SandboxFusion service"), (413, "size")]
)
def test_a_refusal_that_another_try_would_not_change_says_the_fix(status, fix):
    error, asked = asked_of((status, {"detail": "no"}))
    assert isinstance(error, SandboxUnavailableError)
    assert fix in str(error)
    assert len(asked) == 1


def test_a_service_whose_sandbox_stays_broken_ends_with_its_words_and_not_with_a_result():
    error, asked = asked_of((200, BROKEN))
    assert "no space left on device" in str(error)
    assert len(asked) == 4


def test_a_service_that_stays_busy_ends_at_the_deadline():
    error, asked = asked_of((429, {"detail": "256 wait"}), max_queue_s=0.4)
    assert isinstance(error, SandboxError)
    assert "256 wait" in str(error)
    assert len(asked) >= 2


def test_a_service_that_is_down_is_left_aside_while_another_answers():
    async def play():
        async with service_that_answers((200, SUCCESS)) as (url, asked):

            async def many(interpreter):
                return await asyncio.gather(*(interpreter.run_program("1") for _ in range(20)))

            results = await run_at("http://127.0.0.1:9", url, use=many)
            return results, asked

    results, asked = asyncio.run(play())
    assert [result.stdout for result in results] == [b"5\n"] * 20
    assert len(asked) == 20


def test_programs_are_spread_over_the_services():
    async def play():
        async with service_that_answers((200, SUCCESS)) as (one, asked_one), service_that_answers((200, SUCCESS)) as (two, asked_two):

            async def many(interpreter):
                await asyncio.gather(*(interpreter.run_program("1") for _ in range(20)))

            await run_at(one, two, use=many)
            return len(asked_one), len(asked_two)

    num_one, num_two = asyncio.run(play())
    assert num_one + num_two == 20
    assert min(num_one, num_two) >= 4


def test_preflight_names_the_one_service_that_does_not_print_5():
    wrong = {**SUCCESS, "run_result": {**FINISHED, "stdout": "five\n"}}

    async def play():
        async with service_that_answers((200, SUCCESS)) as (good, _), service_that_answers((200, wrong)) as (bad, _):
            with pytest.raises(SandboxUnavailableError, match=rf"must print 5 but {bad} gave b'five"):
                await run_at(good, bad, use=lambda interpreter: interpreter.preflight())

    asyncio.run(play())


def test_the_key_of_the_file_is_sent(tmp_path):
    key_file = tmp_path / "key"
    key_file.write_text("secret\n")
    _, [(headers, _)] = asked_of((200, SUCCESS), api_key_file=str(key_file))
    assert headers["authorization"] == "Bearer secret"
    key_file.write_text("\n")
    with pytest.raises(ConfigError, match="holds no key"):
        build_interpreter(settings_of("http://127.0.0.1:9", api_key_file=str(key_file)))


def test_answers_of_the_published_service_become_results():
    def read(**ran):
        return result_of({**SUCCESS, "status": "Failed", "run_result": {**FINISHED, **ran}}, max_bytes=4096)

    late = read(status="TimeLimitExceeded", return_code=None, execution_time=2.0)
    assert (late.exit_code, late.killed_by, late.run_s) == (None, "wall_time", 2.0)
    killed = read(return_code=-9)
    assert (killed.exit_code, killed.killed_by) == (None, "signal:9")
    assert read(return_code=3, stdout=None).exit_code == 3
    with pytest.raises(SandboxError, match="exception on running command"):
        read(status="Error", return_code=None, stderr="exception on running command")


def test_what_a_service_does_not_cut_is_cut_to_head_and_tail_and_counted():
    # A cap of 4,096: 3,072 for stdout, of which half is head and half is tail.
    long = result_of({**SUCCESS, "run_result": {**FINISHED, "stdout": "a" * 5000 + "z" * 5000}}, max_bytes=4096)
    assert long.dropped_output_bytes == 10_000 - 3072
    assert long.stdout == b"a" * 1536 + b"\n[... 6928 bytes dropped ...]\n" + b"z" * 1536


def test_a_place_that_lasts_is_not_to_be_had_and_the_error_says_where():
    with pytest.raises(ConfigError, match="keeps nothing") as caught:
        BackendSandboxes(settings_of("http://127.0.0.1:9")).make(SandboxSpec())
    assert caught.value.fix == "set sandbox.backend=bubblewrap or docker"
