"""A small HTTP server that speaks OpenAI's chat completions, and answers as a script says."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def chat_endpoint(answer, *, models=("policy",), key=None, status=200, listing=None, fails=lambda body: False):
    """(URL, requests so far) of a server; `answer` gives a turn's text for the body of its request.

    `listing` is (status, text) in the place of the list of models; a request that `fails` is answered with 500.
    """
    requests = []

    class Server(BaseHTTPRequestHandler):
        def do_GET(self):
            if listing is not None:
                return self.send(listing[0], listing[1].encode(), "text/html")
            if models is None:
                return self.say(404, {"error": {"message": "no list"}})
            self.say(200, {"object": "list", "data": [{"id": name, "object": "model"} for name in models]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            requests.append(body)
            if status != 200 or fails(body):
                return self.say(500 if fails(body) else status, {"error": {"message": "scripted", "type": "server_error"}})
            message = {"role": "assistant", "content": answer(body)}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            usage = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
            self.say(
                200, {"id": "c", "object": "chat.completion", "created": 1, "model": body["model"], "choices": [choice], "usage": usage}
            )

        def say(self, code, content):
            if key is not None and self.headers.get("authorization") != f"Bearer {key}":
                code, content = 401, {"error": {"message": "wrong key"}}
            self.send(code, json.dumps(content).encode(), "application/json")

        def send(self, code, data, kind):
            self.send_response(code)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
