"""`psrl serve sandbox` by its API: the published answers, its limits, and that nothing of it is left."""

import asyncio
import base64
import contextlib
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import orjson
import psutil
import pytest
from sandbox_service import sandbox_server

from psrl.cli.main import main
from psrl.sandbox.reaper import labelled_processes


def post(url, body, *, headers=None):
    """(status, answer) of a request to `/run_code`."""
    data = body if isinstance(body, bytes) else orjson.dumps(body)
    request = urllib.request.Request(f"{url}/run_code", data=data, headers={"content-type": "application/json", **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, orjson.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, orjson.loads(error.read())


def ask_in_vain(url, body):
    """The server ends before the program does."""
    with contextlib.suppress(OSError, http.client.HTTPException, orjson.JSONDecodeError):
        post(url, body)


def ran(url, code, language="python", **fields):
    status, answer = post(url, {"code": code, "language": language, **fields})
    assert status == 200, answer
    return answer


def get(url, path):
    with urllib.request.urlopen(f"{url}{path}", timeout=10) as answer:
        return answer.read()


def test_a_program_that_ends_well_is_a_success_with_the_published_fields(sandbox_service):
    answer = ran(sandbox_service, "print(2+3)\n7")
    assert (answer["status"], answer["message"], answer["compile_result"], answer["files"]) == ("Success", "", None, {})
    result = answer["run_result"]
    # A script, as there: the value of a last expression is not shown.
    assert (result["status"], result["return_code"], result["stdout"], result["stderr"]) == ("Finished", 0, "5\n", "")
    assert 0 < result["execution_time"] < 5


def test_a_program_that_fails_is_failed_with_its_code_and_stderr(sandbox_service):
    answer = ran(sandbox_service, "import sys\nprint('out')\nsys.exit(3)")
    assert (answer["status"], answer["run_result"]["status"], answer["run_result"]["return_code"]) == ("Failed", "Finished", 3)
    assert ran(sandbox_service, "1/0")["run_result"]["stderr"].splitlines()[-1] == "ZeroDivisionError: division by zero"


def test_a_program_out_of_time_is_failed_with_what_it_printed(sandbox_service):
    answer = ran(sandbox_service, "print('on', flush=True)\nwhile True: pass", run_timeout=0.5)
    result = answer["run_result"]
    assert (answer["status"], result["status"], result["return_code"]) == ("Failed", "TimeLimitExceeded", None)
    assert (result["stdout"], result["killed_by"]) == ("on\n", "wall_time")
    assert result["execution_time"] >= 0.5


def test_a_request_may_ask_for_less_memory_and_not_for_more(sandbox_service):
    take = "x = bytearray({} * 2**20)\nprint('had it')"
    assert ran(sandbox_service, take.format(200), memory_limit_MB=100)["run_result"]["stderr"].endswith("MemoryError\n")
    assert ran(sandbox_service, take.format(200))["status"] == "Success"
    assert ran(sandbox_service, take.format(900), memory_limit_MB=100_000)["status"] == "Failed"


def test_stdin_and_files_go_in_files_come_back_and_nothing_of_it_stays(sandbox_service):
    code = "import sys\nprint(sys.stdin.read() + open('in/a.txt').read())\nopen('out.bin', 'wb').write(bytes(range(256)))"
    files = {"in/a.txt": base64.b64encode(b"world").decode(), "left_out": None}
    answer = ran(sandbox_service, code, stdin="hello ", files=files, fetch_files=["out.bin", "missing"])
    assert answer["run_result"]["stdout"] == "hello world\n"
    assert {path: base64.b64decode(content) for path, content in answer["files"].items()} == {"out.bin": bytes(range(256))}
    for _ in range(6):  # whichever of the server's sandboxes has it
        assert ran(sandbox_service, "import os\nprint(os.listdir('.'), os.listdir('/dev/shm'))")["run_result"]["stdout"] == "[] []\n"


def test_bash_runs_as_a_script(sandbox_service):
    answer = ran(sandbox_service, "read name\necho hello $name\nexit 4", "bash", stdin="you\n")
    assert (answer["run_result"]["stdout"], answer["run_result"]["return_code"]) == ("hello you\n", 4)


def test_endless_output_is_cut_to_head_and_tail_and_counted(sandbox_service):
    result = ran(sandbox_service, "print('a' * 100_000 + 'z' * 100_000)")["run_result"]
    assert len(result["stdout"]) < 64 * 1024
    assert result["stdout"].startswith("aaa")
    assert result["stdout"].endswith("zzz\n")
    assert result["dropped_output_bytes"] == 200_001 - 48 * 1024
    assert ran(sandbox_service, "while True: print('x' * 10**6)")["run_result"]["killed_by"] in ("output", "wall_time", "cpu_time")


def test_output_that_is_no_text_is_answered(sandbox_service):
    assert ran(sandbox_service, "import sys\nsys.stdout.buffer.write(b'\\xff\\x00ok')")["run_result"]["stdout"] == "\ufffd\x00ok"


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ({"code": "1", "language": "cpp"}, ["language"]),
        ({"language": "python"}, ["code"]),
        ({"code": "1", "language": "python", "run_timeout": 0}, ["run_timeout"]),
        ({"code": "1", "language": "python", "files": {"a": "no base64!"}}, ["files"]),
        (b"{", []),
    ],
)
def test_a_wrong_request_is_422_and_says_where(sandbox_service, body, where):
    status, answer = post(sandbox_service, body)
    assert (status, answer["detail"][0]["loc"]) == (422, where)


def test_a_file_outside_of_the_sandbox_is_refused(sandbox_service):
    status, answer = post(sandbox_service, {"code": "1", "language": "python", "files": {"/etc/passwd": ""}})
    assert (status, "cannot be written" in answer["detail"]) == (422, True)


def test_a_request_that_is_too_large_is_413(sandbox_service):
    assert post(sandbox_service, {"code": "#" * (17 * 2**20), "language": "python"})[0] == 413


def test_health_ping_and_metrics_answer(sandbox_service):
    assert orjson.loads(get(sandbox_service, "/health")) == {"status": "ok", "num_workers": 3, "running": 0, "waiting": 0}
    assert get(sandbox_service, "/v1/ping") == b'"pong"'
    ran(sandbox_service, "1")
    samples = dict(line.rsplit(" ", 1) for line in get(sandbox_service, "/metrics").decode().splitlines())
    assert float(samples['psrl_sandbox_requests_total{status="200"}']) >= 1
    assert float(samples["psrl_sandbox_run_seconds_total"]) > 0


def test_beyond_workers_and_queue_the_answer_is_429_with_the_reason_and_whoever_is_in_is_served(tmp_path):
    with sandbox_server(tmp_path, "--num-workers", 1, "--max-queue", 2) as server:
        begun = threading.Barrier(8)

        def ask(_):
            begun.wait()
            return post(server.url, {"code": "import time\ntime.sleep(1)\nprint('ran')", "language": "python"})

        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(ask, range(8)))
        assert sorted(status for status, _ in answers) == [200] * 3 + [429] * 5
        assert {answer["run_result"]["stdout"] for status, answer in answers if status == 200} == {"ran\n"}
        reasons = {answer["detail"] for status, answer in answers if status == 429}
        assert reasons == {"1 programs run and 2 wait, as many as may: try again, or elsewhere"}


def test_a_wait_for_a_place_has_an_end(tmp_path):
    with sandbox_server(tmp_path, "--num-workers", 1, "--max-queue-s", 0.5) as server, ThreadPoolExecutor(2) as threads:
        body = {"code": "import time\ntime.sleep(2)", "language": "python"}
        answers = list(threads.map(lambda _: post(server.url, body), range(2)))
        assert sorted(status for status, _ in answers) == [200, 429]
        assert "no place became free within 0.5 s" in next(answer["detail"] for status, answer in answers if status == 429)


def test_a_body_that_does_not_arrive_takes_a_place_only_for_a_while(tmp_path):
    head = b"POST /run_code HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"
    with sandbox_server(tmp_path, "--num-workers", 1, "--max-queue", 0, "--max-queue-s", 1) as server:
        place = urllib.parse.urlsplit(server.url)
        with socket.create_connection((place.hostname, place.port), timeout=30) as slow:
            slow.sendall(head)
            while orjson.loads(get(server.url, "/health"))["waiting"] == 0:
                time.sleep(0.01)
            body = {"code": "print(1)", "language": "python"}
            assert post(server.url, body)[0] == 429
            assert slow.recv(1000).startswith(b"HTTP/1.1 408")
            assert post(server.url, body)[0] == 200


def test_with_a_key_only_its_owner_runs_programs(tmp_path):
    (tmp_path / "key").write_text("secret\n")
    with sandbox_server(tmp_path, "--num-workers", 1, "--api-key-file", tmp_path / "key") as server:
        body = {"code": "print(1)", "language": "python"}
        assert post(server.url, body)[0] == 401
        assert post(server.url, body, headers={"authorization": "Bearer other"})[0] == 401
        for header in ({"authorization": "Bearer secret"}, {"x-api-key": "secret"}):
            assert post(server.url, body, headers=header)[1]["run_result"]["stdout"] == "1\n"
        assert get(server.url, "/v1/ping") == b'"pong"'


def test_sigterm_ends_the_programs_and_leaves_nothing(tmp_path):
    run = f"sigterm_{os.getpid()}"
    with sandbox_server(tmp_path, "--num-workers", 2, "--run", run, "--wall-s", 300, "--cpu-s", 300) as server:
        body = {"code": "import os, time\nos.fork()\ntime.sleep(300)", "language": "python", "run_timeout": 300}
        threading.Thread(target=ask_in_vain, args=(server.url, body), daemon=True).start()
        while orjson.loads(get(server.url, "/health"))["running"] == 0:
            time.sleep(0.02)
        os.kill(server.pid, signal.SIGTERM)
        assert asyncio.run(asyncio.wait_for(server.ended(), 15)) == 0
    assert not [label for label in labelled_processes().values() if label.startswith(f"{run}.")]


def test_one_file_under_many_names_is_not_held_as_often(sandbox_service):
    code = "open('f', 'wb').write(bytes(20 * 2**20))"
    assert list(ran(sandbox_service, code, fetch_files=["f", "./f"])["files"]) == ["f", "./f"]
    status, answer = post(sandbox_service, {"code": code, "language": "python", "fetch_files": [f"{'./' * n}f" for n in range(4)]})
    assert (status, answer["detail"]) == (413, f"fetch_files: more than the {64 * 2**20} bytes that a program's files may take")


def test_a_server_that_cannot_make_sandboxes_says_why(tmp_path):
    environment = {**os.environ, "PATH": str(tmp_path)}
    argv = [sys.executable, "-m", "psrl.sandbox_server", "--port", "0"]
    ended = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "sandbox server: bwrap is not installed. Fix: apt-get install bubblewrap" in ended.stderr


def test_the_command_serves_on_several_ports_starts_a_killed_server_again_and_ends_clean(tmp_path):
    argv = [sys.executable, "-m", "psrl", "serve", "sandbox", "--port", "0", "--num-servers", "2", "--num-workers", "1"]
    process = subprocess.Popen([*argv, "--log-dir", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        lines = iter(process.stdout)
        shown = next(line for line in lines if line.startswith("sandbox.backend=sandbox_fusion"))
        urls = re.findall(r"http://[\d.:]+", shown)
        assert len(urls) == 2
        assert [ran(url, "print(1)")["served_by"] for url in urls] == [url.removeprefix("http://") for url in urls]
        servers = psutil.Process(process.pid).children()
        servers[0].kill()
        assert "it is started again" in next(lines)
        for _ in range(100):
            try:
                assert [ran(url, "print(2)")["run_result"]["stdout"] for url in urls] == ["2\n"] * 2
                break
            except urllib.error.URLError:
                time.sleep(0.1)
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert list(lines)[-1] == "stopped\n"
        assert not [child for child in family if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    finally:
        process.kill()
        process.wait(10)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--host", "0.0.0.0"], "openssl rand"),
        (["--backend", "process"], "would be you"),
        (["--port", "65535", "--num-servers", "2"], "beyond 65535"),
        (["--api-key-file", "/nowhere"], "holds no key"),
        (["--wall-s", "0"], "must be above 0"),
        (["--packages", "no-such-thing"], "is not installed here"),
        (["--backend", "sandbox_fusion"], "is what asks this service"),
    ],
)
def test_wrong_options_end_before_anything_starts(capsys, options, words):
    with pytest.raises(SystemExit) as ended:
        main(["serve", "sandbox", *options])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
