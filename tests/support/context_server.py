"""A stand-in for a vLLM server whose connector compresses: its models, replies and refusals."""

import contextlib
import json
import threading
from fractions import Fraction
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODEL = "served"
TEXT = "Alice was beginning to get very tired of sitting by her sister on the bank."
QUESTION = "Who is tired?"


class ContextServer(ThreadingHTTPServer):
    """Contexts by name, and every body that was sent.

    A new context is listed as being made `looks` times. A question is answered with the context's
    name and the question's own tokens as text, one word at a time, each together with `told`. Names
    that begin with "bad" fail.
    """

    def __init__(self, tokenizer, looks=1):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.tokenizer, self.looks = tokenizer, looks
        self.contexts, self.waiting, self.bodies = {}, {}, []
        self.headers, self.told, self.connector = [], {}, True
        self.failing = self.refusing = False
        self.ended = "stop"
        self.daemon_threads = True

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/v1"

    def listed(self):
        for name, left in self.waiting.items():
            self.waiting[name] = left - 1
            if left == 0:
                failed = {"state": "failed", "reason": "Its document has one token."}
                made = {"state": "ready", "entries": 1200, "bytes": 614400, "seconds": 0.5}
                self.contexts[name] |= failed if self.failing or name.startswith("bad") else made
        return {"contexts": list(self.contexts.values())}

    def compress(self, ids, name, ratio=None, recipe="gracekv-agnostic", save=False, **other):
        if each := other.pop("entries_per_head", None):
            ratio = Fraction(len(ids), each)
        other = {x: value for x, value in other.items() if x not in ("into", "limit")}
        if ratio in (None, "NaN") or (amount := Fraction(ratio)) < 1 or other:
            raise Refusal(400, f"A ratio is at least 1; got {ratio}. {other or ''}")
        asked = {"name": name, "ratio": float(amount), "recipe": recipe, "saved": save}
        begun = {"state": "compressing", "length": len(ids), "entries": None, "pages": 3}
        self.contexts[name] = asked | begun
        self.waiting[name] = self.looks
        return {"name": name, "state": "compressing"}

    def reply(self, ids, order):
        """The reply's `kv_transfer_params`."""
        match order:
            case {"compress": options}:
                return self.compress(ids, **options)
            case {"extend": options}:
                self.find(options["name"])
                if self.refusing:
                    raise Refusal(max(400, self.refusing), "It is being made.")
                longer = {**options, "name": options.get("into", options["name"])}
                return self.compress(ids, **longer)
            case {"list": name}:
                found = self.listed()["contexts"]
                return {"contexts": [x for x in found if name in (True, x["name"])]}
            case {"delete": name}:
                self.find(name)
                if self.contexts[name]["state"] == "compressing":
                    raise Refusal(400, f"Context {name!r} is being made. Delete it afterwards.")
                del self.contexts[name]
                return {"name": name, "state": "deleted"}
        self.find(order)
        return {"name": order, "state": "ready"}

    def find(self, name):
        if name not in self.contexts:
            raise Refusal(404, f"There is no context {name!r}.")

    def answer(self, ids, order):
        """The pieces of an answer."""
        asked = self.tokenizer.decode(ids, skip_special_tokens=True).strip()
        return [f"{order}:", *(f" {word}" for word in asked.split())]


class Refusal(Exception):
    """An HTTP status and its reason."""

    def body(self):
        """In the format of vLLM's server."""
        status, reason = self.args
        return {"error": {"message": reason, "type": "BadRequestError", "code": status}}


@contextlib.contextmanager
def context_server(tokenizer, looks=1):
    """A running `ContextServer`."""
    with ContextServer(tokenizer, looks) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        root = self.server.tokenizer.name_or_path
        self._say(200, {"object": "list", "data": [{"id": MODEL, "object": "model", "root": root}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        self.server.headers.append(self.headers)
        ids, order = body["prompt"], body["kv_transfer_params"]["gracekv"]
        try:
            reply = self.server.reply(ids, order)
        except Refusal as refusal:
            if body.get("stream"):
                # vLLM checks a request only after the stream has begun.
                self._stream([refusal.body()])
            else:
                self._say(refusal.args[0], refusal.body())
            return
        pieces = self.server.answer(ids, order)
        if body.get("stream"):
            told = [[{"index": 0, "text": piece} | self.server.told] for piece in pieces]
            told[-1][0]["finish_reason"] = self.server.ended
            self._stream(map(_chunk, [*told, []]))
            return
        said = {"kv_transfer_params": {"gracekv": reply}} if self.server.connector else {}
        choice = {"index": 0, "text": "".join(pieces), "finish_reason": self.server.ended}
        self._say(200, _chunk([choice]) | said)

    def _stream(self, chunks):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # a client may stop reading
            for line in [*map(json.dumps, chunks), "[DONE]"]:
                self.wfile.write(f"data: {line}\n\n".encode())

    def _say(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


def _chunk(choices):
    choices = [{"finish_reason": None, "logprobs": None} | choice for choice in choices]
    always = {"id": "1", "object": "text_completion", "created": 0, "model": MODEL}
    return always | {"choices": choices}


def extensions(server):
    """Options and ids of each requested extension."""
    orders = [(x["kv_transfer_params"]["gracekv"], x["prompt"]) for x in server.bodies]
    return [(x["extend"], ids) for x, ids in orders if "extend" in x]
