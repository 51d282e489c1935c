"""A turn to write, and a server of one dialect without a policy: it answers every request with the turn that it was given."""

from __future__ import annotations

import json
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import anthropic
import openai

from psrl.errors import SessionRequestError
from psrl.gateway.dialects.base import ChatTurn, TurnEnd
from psrl.gateway.dialects.fields import ReadBefore
from psrl.types import FinishReason, Generation, Message, Role, ToolCall

CALL = ToolCall(id="call-0-0", name="run", arguments={"code": 'print("a\n")', "times": 2})
ASKED = Message(role=Role.USER, content="What is 2+3?")


def assistant(content="", *, reasoning=None, calls=()):
    return Message(role=Role.ASSISTANT, content=content, reasoning=reasoning, tool_calls=tuple(calls))


def make_turn(answer, *, end=None, stop_text=None, id="t0", token_texts=("fi", "ve", "<end>")):
    """A turn of 3 sampled tokens after 10 prompt tokens, 4 of them cached."""
    return ChatTurn(
        id=id,
        created=1_700_000_000,
        answer=answer,
        end=end or (TurnEnd.TOOL_CALLS if answer.tool_calls else TurnEnd.STOP),
        stop_text=stop_text,
        generation=Generation(
            token_ids=[7, 8, 2],
            logprobs=[-0.5, -0.25, -0.125],
            policy_versions=[3, 3, 4],
            finish_reason=FinishReason.STOP,
            prompt_tokens=10,
            cached_tokens=4,
            latency_s=0.0,
        ),
        token_texts=tuple(token_texts),
    )


class TurnServer(ThreadingHTTPServer):
    """Keeps what was asked in `requests`; answers with `turn`, or with `error` where it is set."""

    daemon_threads = True

    def __init__(self, dialect):
        super().__init__(("127.0.0.1", 0), _Exchange)
        self.dialect = dialect
        self.turn = make_turn(assistant("five"))
        self.error = None
        self.stream_error = None
        self.requests = []
        self.earlier = {}

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def history(self, id):
        if id not in self.earlier:
            raise SessionRequestError(status=404, code="unknown_turn", message=f"no turn {id}", param="previous_response_id")
        return self.earlier[id]

    def answer(self, body):
        """(status, content type, bytes) of a request."""
        try:
            if self.error is not None:
                raise self.error
            request = self.dialect.read_request(body, history=self.history, read_before=ReadBefore())
        except SessionRequestError as error:
            return error.status, "application/json", json.dumps(self.dialect.write_error(error)).encode()
        self.requests.append(request)
        self.earlier[self.turn.id] = [*request.messages, self.turn.answer]
        if not request.wants_stream:
            return 200, "application/json", json.dumps(self.dialect.write_answer(self.turn, request), ensure_ascii=False).encode()
        if self.stream_error is not None:
            return 200, "text/event-stream", self.dialect.keep_alive + self.dialect.write_stream_error(self.stream_error)
        events = list(self.dialect.write_stream(self.turn, request))
        return 200, "text/event-stream", self.dialect.keep_alive.join([b"", *events])


class _Exchange(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        known = self.path.partition("?")[0] == self.server.dialect.path
        status, kind, content = self.server.answer(body) if known else (404, "text/plain", self.path.encode())
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@contextmanager
def served(dialect):
    """The server, in a thread of its own until the end of the block."""
    server = TurnServer(dialect)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def openai_client(server):
    http = openai.DefaultHttpxClient(trust_env=False)
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="a-key", max_retries=0, http_client=http, timeout=20)


def anthropic_client(server):
    http = anthropic.DefaultHttpxClient(trust_env=False)
    return anthropic.Anthropic(base_url=server.url, api_key="a-key", max_retries=0, http_client=http, timeout=20)


def outcome_of(dialect, body, *, read_before=None):
    """(status, code, param) of the error that a request is answered with, or what it was read as."""
    try:
        return dialect.read_request(body, history=lambda id: [], read_before=read_before or ReadBefore())
    except SessionRequestError as error:
        return error.status, error.code, error.param
