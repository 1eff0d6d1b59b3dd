"""Serve a Hugging Face model on a CPU, with the part of vLLM's HTTP interface that prime-rl uses.

usage: server.py MODEL PORT LOG.jsonl [--words] [--plugin] [--experts]

Every request is logged; for /inference/v1/generate with the tokens of request and answer, and the
log-probs of the answer. Sampling is seeded. Once the file LOG.spoiled exists, log-probs of prompts
are 3 nats too high. With --words, answers are of the letters a to z, and end after each with
probability 1/6; the log-probs stay the model's. New weights are kept in LOG.weights. With --plugin
there are the routes of the scoring plugin, with a head that multiplies in float32. With --experts
each router of the model takes its least probable experts, and the answer names them as vLLM's with
enable_return_routed_experts: for all tokens but the last.
"""

import base64
import hashlib
import json
import shutil
import string
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import torch
from adapters import merge  # beside this program
from experts import Routing, in_one_tensor
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from prime_composer.scoring.wire import VERSION
from prime_composer.scoring.worker import RowsRequest

MAX_NEW = 32
SCORE, HEAD = "/v1/prime_composer/score", "/v1/prime_composer/head"


class Engine:
    """The model, and the log of its requests."""

    def __init__(self, path, log, words=False, experts=False):
        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
        self.base = {name: weight.clone() for name, weight in self.model.state_dict().items()}
        self.routing = Routing(self.model) if experts else None
        self.lock = threading.Lock()
        self.generator = torch.Generator().manual_seed(0)
        self.words = words
        self.name = path
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        vocabulary = json.loads((Path(path) / "tokenizer.json").read_text())["model"]["vocab"]
        self.letters = torch.tensor([vocabulary[letter] for letter in string.ascii_lowercase])
        self.log = open(log, "a", buffering=1)  # noqa: SIM115
        self.kept = Path(log).with_suffix(".weights")
        self.spoiled = Path(log).with_suffix(".spoiled")

    def logprobs(self, ids, temperature=1.0):
        return (self.model(torch.tensor([ids])).logits[0].float() / temperature).log_softmax(-1)

    @torch.no_grad()
    def generate(self, body):
        params = body.get("sampling_params", {})
        prompt = list(body["token_ids"])
        temperature = params.get("temperature", 1.0) or 1e-6
        stop = set(params.get("stop_token_ids") or [])
        with self.lock:
            scores = (
                self.score(prompt, params["prompt_logprobs"])
                if params.get("prompt_logprobs")
                else None
            )
            out, content, reason = [], [], "length"
            for _ in range(min(params.get("max_tokens") or 16, MAX_NEW)):
                row = self.logprobs(prompt + out, temperature)[-1]
                if self.words:
                    choice = torch.multinomial(row[self.letters].exp(), 1, generator=self.generator)
                    token = int(self.letters[choice])
                else:
                    token = int(torch.multinomial(row.exp(), 1, generator=self.generator))
                out.append(token)
                content.append(
                    {"token": f"token_id:{token}", "logprob": row[token].item(), "top_logprobs": []}
                )
                if token in stop:
                    reason = "stop"
                    break
                if self.words and torch.rand(1, generator=self.generator) < 1 / 6:
                    break
        choice = {
            "index": 0,
            "token_ids": out,
            "finish_reason": reason,
            "logprobs": {"content": content},
        }
        if self.routing is not None:
            choice["routed_experts"] = self.routed_experts()
        return {"request_id": "r", "choices": [choice], "prompt_logprobs": scores}

    def routed_experts(self):
        """Return the experts of the last forward, which had all tokens but the last."""
        experts = self.routing.used.to(torch.uint8).numpy()
        data = base64.b64encode(experts.tobytes()).decode()
        return {"data": data, "shape": list(experts.shape), "start": 0, "dtype": "uint8"}

    def score(self, ids, k):
        """Return rows as vLLM does: None for the first token, each own token first.

        An own token in the top K has its place there as its rank, also in a tie.
        """
        table = self.logprobs(ids) + 3.0 * self.spoiled.exists()
        rows = [None]
        for t in range(1, len(ids)):
            row = table[t - 1]
            entries = {
                str(ids[t]): {
                    "logprob": row[ids[t]].item(),
                    "rank": int((row >= row[ids[t]]).sum()),
                }
            }
            values, best = row.topk(k)
            for rank, (value, token) in enumerate(
                zip(values.tolist(), best.tolist(), strict=True), 1
            ):
                entries[str(token)] = {"logprob": value, "rank": rank}
            rows.append(entries)
        return rows

    @torch.no_grad()
    def plugin_scores(self, body):
        """Return the answer of the scoring plugin, as bytes."""
        head, sequences = self.model.lm_head.weight, []
        for sequence in body["sequences"]:
            ids = sequence["token_ids"]
            with self.lock:
                hidden = self.model.model(torch.tensor([ids])).last_hidden_state[0]
            asked = RowsRequest(sequence["start"], len(ids), (), tuple(sequence["skip"]))
            at = torch.cat([torch.arange(*both) for both in asked.ranges])
            hidden = hidden[at - 1]
            table = (hidden.float() @ head.float().T).log_softmax(-1)
            top, best = table.topk(max(1, body.get("k", 0)))
            own = table.gather(1, torch.tensor(ids)[at].unsqueeze(1))
            arrays = {
                "sampled": [("sampled", "float32", 0, own)],
                "top_k": [
                    ("top_ids", "int32", best.shape[1], best.int()),
                    ("top_logprobs", "float32", top.shape[1], top),
                ],
                "hidden": [("hidden", "bfloat16", hidden.shape[1], hidden.view(torch.int16))],
            }
            chosen = [field for kind in body["kinds"] for field in arrays[kind]]
            fields = [field[:3] for field in chosen]
            data = b"".join(field[3].contiguous().numpy().tobytes() for field in chosen)
            sequences.append({"n": len(hidden), "fields": fields, "data": data})
        facts = {
            "model": self.name,
            "vocab_size": head.shape[0],
            "hidden_size": head.shape[1],
            "max_model_len": 512,
            "dtype": "bfloat16",
            "kinds": list(("sampled", "top_k", "hidden")),
            "vllm": "none",
        }
        return packed(facts=facts, sequences=sequences)

    def plugin_head(self, body):
        """Return the output head, or what it is, as bytes."""
        rows = self.model.lm_head.weight.detach().view(torch.int16).numpy()
        first, last = body["first"], body["last"]
        if first == last:
            digests = b"".join(hashlib.sha256(row.tobytes()).digest() for row in rows)
            facts = {
                "rows": rows.shape[0],
                "columns": rows.shape[1],
                "dtype": "bfloat16",
                "sha256": hashlib.sha256(digests).hexdigest(),
                "scale": 1.0,
                "softcap": None,
                "bias": False,
                "computed_in": "float32",
            }
            return packed(facts=facts)
        part = rows[first:last]
        fields = [("weight", "bfloat16", rows.shape[1])]
        return packed(rows={"n": len(part), "fields": fields, "data": part.tobytes()})

    @torch.no_grad()
    def update(self, folder):
        state = {}
        # The trainer deletes it soon; the tests compute with each step's weights.
        shutil.copytree(folder, self.kept / Path(folder).name, dirs_exist_ok=True)
        for file in sorted(Path(folder).glob("*.safetensors")):
            state.update(load_file(file))
        with self.lock:
            missing = self.model.load_state_dict(in_one_tensor(state), strict=False).missing_keys
        return {
            "tensors": len(state),
            "missing": [name for name in missing if name != "lm_head.weight"],
        }

    def adapt(self, folder):
        """Take a LoRA adapter in the place of the last one."""
        with self.lock:
            merge(self.model, self.base, folder)


def packed(**content):
    return msgspec.msgpack.encode({"plugin": "prime_composer", "version": VERSION, **content})


def handler(engine, name, plugin):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args):
            pass

        def reply(self, value, code=200):
            # Compact, for the renderer finds the experts' data by the bytes before it.
            text = value if isinstance(value, bytes) else json.dumps(value, separators=(",", ":"))
            data = text if isinstance(text, bytes) else text.encode()
            self.send_response(code)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self):
            if self.path.startswith("/v1/models"):
                card = {
                    "id": name,
                    "object": "model",
                    "created": 0,
                    "owned_by": "test",
                    "max_model_len": 512,
                }
                return self.reply({"object": "list", "data": [card]})
            return self.reply({})

        def do_POST(self):
            raw = self.rfile.read(int(self.headers.get("content-length") or 0))
            body = json.loads(raw) if raw else {}
            path = self.path.split("?")[0]
            note = {"path": path}
            answer = {}
            if path == "/inference/v1/generate":
                answer = engine.generate(body)
                params = body.get("sampling_params", {})
                note |= {
                    "in": body["token_ids"],
                    "out": answer["choices"][0]["token_ids"],
                    "logprobs": [
                        entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]
                    ],
                    "params": params,
                }
                note["top_p"] = body.get("top_p")
                note["routed_experts"] = answer["choices"][0].get("routed_experts")
            elif plugin and path == SCORE:
                answer = engine.plugin_scores(body)
                note |= {"kinds": body.get("kinds", []), "k": body.get("k", 0)}
                for sequence in body["sequences"]:
                    note |= {"in": sequence["token_ids"], "start": sequence["start"]}
            elif plugin and path == HEAD:
                answer = engine.plugin_head(body)
            elif path == "/tokenize":
                ids = engine.tokenizer.encode(body["prompt"], add_special_tokens=False)
                answer = {"tokens": ids, "count": len(ids), "max_model_len": 4096}
            elif path == "/detokenize":
                answer = {"prompt": engine.tokenizer.decode(body["tokens"])}
            elif path == "/update_weights" and body.get("weight_dir"):
                note |= engine.update(body["weight_dir"]) | {"weight_dir": body["weight_dir"]}
            elif path == "/load_lora_adapter":
                engine.adapt(body["lora_path"])
            engine.log.write(json.dumps(note) + "\n")
            return self.reply(answer)

    return Handler


if __name__ == "__main__":
    path, port, log = sys.argv[1:4]
    switches = (f"--{name}" in sys.argv for name in ("words", "experts"))
    engine = Engine(path, log, *switches)
    requests = handler(engine, path, "--plugin" in sys.argv)
    ThreadingHTTPServer(("127.0.0.1", int(port)), requests).serve_forever()
