"""A stand-in for a vLLM server: right answers of a tiny checkpoint, spoiled on request.

It answers on 127.0.0.1 as vLLM 0.32 does. Scores and samples are computed by transformers on the
CPU, one request at a time, without padding. The same request therefore gets the same numbers,
whatever else is asked at once.

    with SpoilingServer(checkpoint) as server:
        server.spoil("positive_0.3", after=4, times=2)
"""

import base64
import copy
import hashlib
import itertools
import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from prime_composer.backends.cpu_guard import hide_cuda_packages
from prime_composer.backends.hf_model import without_progress_bars
from prime_composer.scoring.wire import VERSION
from prime_composer.scoring.worker import RowsRequest
from tests.faults import modes
from tests.stand_in import DROPPED, UNAUTHORIZED, Reply, StandIn

hide_cuda_packages()
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

SCORE_PATH, HEAD_PATH = "/v1/prime_composer/score", "/v1/prime_composer/head"


_starts = itertools.count()


class BadRequest(Exception):
    """A request that vLLM answers with 400."""


class RightAnswers:
    """A checkpoint in memory, and what a vLLM server answers with it."""

    def __init__(self, checkpoint: Path, max_logprobs: int, processed: bool):
        self.path = checkpoint
        self.processed = processed
        with without_progress_bars():
            self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        has_tokenizer = (checkpoint / "tokenizer.json").is_file()
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint) if has_tokenizer else None
        config = self.model.config
        self.vocab_size: int = config.vocab_size
        self.max_logprobs = self.vocab_size if max_logprobs == -1 else max_logprobs
        self.max_model_len: int = config.max_position_embeddings
        ends = self.model.generation_config.eos_token_id
        self.eos = {ends} if isinstance(ends, int) else {*(ends or [])}
        self.temperature = 1.0
        """Of the scores; right is 1."""
        self.limits: dict[str, int] | None = None
        """That the scoring plugin names; None for none, as an older one."""
        self.begin()
        self._words: dict[int, str] = {}

    def begin(self) -> None:
        """Be another process, with the weights that are there."""
        self.started = next(_starts)
        self.fingerprint: str | None = f"start-{self.started}"
        self.version = "default"

    def reload(self, directory: Path) -> None:
        """Read the weights of every safetensors file in a directory, as ``reload_weights`` does."""
        weights = {}
        for file in sorted(directory.glob("*.safetensors")):
            weights |= load_file(file)
        if not weights:
            raise BadRequest(f"no safetensors in {directory}")
        self.model.load_state_dict(weights, strict=not self.model.config.tie_word_embeddings)
        self.fingerprint = f"start-{next(_starts)}"

    def card(self) -> dict[str, Any]:
        """Return the entry of ``/v1/models``."""
        return {
            "id": str(self.path),
            "object": "model",
            "owned_by": "vllm",
            "root": str(self.path),
            "max_model_len": self.max_model_len,
        }

    def token_ids(self, prompt: Any) -> list[int]:
        """Return the token ids of a request's prompt."""
        if isinstance(prompt, str):
            return self._named_tokenizer().encode(prompt, add_special_tokens=False)
        if not isinstance(prompt, list) or not prompt or not all(type(i) is int for i in prompt):
            raise BadRequest("prompt must be a list of token ids")
        if not all(0 <= token < self.vocab_size for token in prompt):
            raise BadRequest(f"Token id {max(prompt)} is out of vocabulary")
        return prompt

    def _named_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise BadRequest("this server has no tokenizer")
        return self.tokenizer

    def text(self, tokens: list[int]) -> str:
        """Return the text of tokens; numbers where there is no tokenizer."""
        if self.tokenizer is None:
            return " ".join(map(str, tokens))
        return self.tokenizer.decode(tokens)

    def word(self, token: int) -> str:
        """Return the text of one token, decoded once."""
        if token not in self._words:
            self._words[token] = self.text([token])
        return self._words[token]

    @torch.no_grad()
    def rows(self, tokens: list[int], k: int) -> list[Any]:
        """Return prompt_logprobs: None, then the own token and the top K of each position."""
        if k > self.max_logprobs:
            raise BadRequest(
                f"Requested prompt logprobs of {k}, which is greater than max allowed: "
                f"{self.max_logprobs}"
            )
        logits = self.model(input_ids=torch.tensor([tokens])).logits[0, :-1].float()
        logprobs = torch.log_softmax(logits / self.temperature, dim=-1)
        best = logprobs.topk(k, dim=-1)
        rows: list[Any] = [None]
        for t, own in enumerate(tokens[1:]):
            value = float(logprobs[t, own])
            # vLLM writes the own token first. Outside the top K its rank counts all at least as
            # probable ids.
            row = {own: (value, int((logprobs[t] >= value).sum()))}
            top = zip(best.indices[t].tolist(), best.values[t].tolist(), strict=True)
            for rank, (token, logprob) in enumerate(top, start=1):
                row[token] = (logprob, rank)
            rows.append(
                {
                    str(token): {
                        "logprob": logprob,
                        "rank": rank,
                        "decoded_token": self.word(token),
                    }
                    for token, (logprob, rank) in row.items()
                }
            )
        return rows

    def facts(self) -> dict[str, Any]:
        """Return what the scoring plugin says of the model."""
        return {
            "model": str(self.path),
            "vocab_size": self.vocab_size,
            "hidden_size": self.model.config.hidden_size,
            "max_model_len": self.max_model_len,
            "dtype": "float32",
            "kinds": ["sampled", "top_k", "given", "hidden"],
            "vllm": "0.32.0",
            "limits": self.limits,
        }

    @torch.no_grad()
    def arrays(self, question: dict[str, Any], one: dict[str, Any]) -> dict[str, Any]:
        """Return one sequence of the scoring plugin's answer."""
        tokens, start = self.token_ids(one["token_ids"]), one["start"]
        if not 1 <= start < len(tokens):
            raise BadRequest(f"start = {start} of {len(tokens)} tokens")
        answer = self.model(input_ids=torch.tensor([tokens]), output_hidden_states=True)
        logits = answer.logits[0, :-1].float()
        asked = RowsRequest(start, len(tokens), (), tuple(one.get("skip", ())))
        at = torch.cat([torch.arange(*both) for both in asked.ranges])
        logprobs = torch.log_softmax(logits / self.temperature, dim=-1)[at - 1]
        best = logprobs.topk(question["k"], dim=-1)
        own = logprobs.gather(1, torch.tensor(tokens)[at, None])[:, 0]
        chosen = np.frombuffer(base64.b64decode(one.get("given", "")), "<i4").reshape(len(own), -1)
        found = {
            "sampled": {"sampled": own},
            "top_k": {"top_ids": best.indices.int(), "top_logprobs": best.values},
            "given": {"given": logprobs.gather(1, torch.from_numpy(chosen.astype(np.int64)))},
            "hidden": {"hidden": answer.hidden_states[-1][0, at - 1]},
        }
        fields, data = [], b""
        for kind in question["kinds"]:
            for name, array in found[kind].items():
                dtype = "int32" if array.dtype == torch.int32 else "float32"
                fields.append([name, dtype, 0 if array.ndim == 1 else array.shape[1]])
                data += array.contiguous().numpy().tobytes()
        return {"n": len(own), "fields": fields, "data": data}

    def head(self, first: int, last: int) -> dict[str, Any]:
        """Return the scoring plugin's answer about the output head."""
        weight = self.model.lm_head.weight.detach().numpy()
        if first < last:
            data = weight[first:last].tobytes()
            fields = [["weight", "float32", weight.shape[1]]]
            return {"rows": {"n": last - first, "fields": fields, "data": data}}
        facts = {"rows": weight.shape[0], "columns": weight.shape[1], "dtype": "float32"}
        rows = b"".join(hashlib.sha256(row.tobytes()).digest() for row in weight)
        facts |= {"sha256": hashlib.sha256(rows).hexdigest(), "scale": 1.0}
        return {"facts": facts | {"softcap": None, "bias": False, "computed_in": "float32"}}

    @torch.no_grad()
    def choice(self, prompt: list[int], body: dict[str, Any], index: int, seed: int) -> Any:
        """Sample one choice with log-probs of its tokens."""
        maximum = body.get("max_tokens", 16)
        if len(prompt) + maximum > self.max_model_len:
            raise BadRequest(
                f"This model's maximum context length is {self.max_model_len} tokens; the request "
                f"has {len(prompt)} and {maximum} to come"
            )
        temperature = body.get("temperature", 1.0)
        if body.get("top_p", 1.0) < 1:
            raise BadRequest("the stand-in has no nucleus")
        stops = {*(body.get("stop_token_ids") or []), *self.eos}
        generator = torch.Generator().manual_seed(seed + index)
        tokens: list[int] = []
        logprobs: list[float] = []
        tops: list[dict[str, float]] = []
        reason = "length"
        for _ in range(maximum):
            logits = self.model(input_ids=torch.tensor([prompt + tokens])).logits[0, -1].float()
            raw = torch.log_softmax(logits, dim=-1)
            if temperature == 0:
                token, shown = int(raw.argmax()), raw
            else:
                log_mu = torch.log_softmax(logits / temperature, dim=-1)
                token = int(torch.multinomial(log_mu.exp(), 1, generator=generator))
                shown = log_mu if self.processed else raw
            tokens.append(token)
            logprobs.append(float(shown[token]))
            best = shown.topk(body.get("logprobs") or 0)
            pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            tops.append({f"token_id:{token}": logprobs[-1]})
            tops[-1] |= {f"token_id:{other}": value for other, value in pairs}
            if token in stops:
                reason = "stop"
                break
        return {
            "index": index,
            "text": self.text(tokens),
            "logprobs": {
                "tokens": [f"token_id:{token}" for token in tokens],
                "token_logprobs": logprobs,
                "top_logprobs": tops,
                "text_offset": [0] * len(tokens),
            },
            "finish_reason": reason,
            "stop_reason": None,
            "token_ids": tokens,
            "prompt_token_ids": prompt,
        }


@dataclass
class Spoiling:
    """A way to spoil answers, and for which requests."""

    mode: str  # a name of ``tests.faults.modes``
    road: str | None  # one of ``modes.ROADS``; None for scoring and sampling
    skip: int  # requests that are still answered right
    left: int | None  # requests that are still to be spoiled; None for all
    row: int | None  # index of the one row to spoil; None for every row

    def claims(self, road: str) -> bool:
        """Return whether this request is to be spoiled, and count it."""
        if road != self.road and not (self.road is None and road in ("scoring", "sampling")):
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        if self.left is None:
            return True
        self.left -= 1
        return self.left >= 0


class SpoilingServer(StandIn):
    """A server of a checkpoint on 127.0.0.1, whose answers can be spoiled.

    Attributes:
        requests: paths asked for, with their number.
        spoiled: spoiled answers, by mode.
        before: called before each request is answered, for tests that act at that moment.
        versions: whether the weights have versions, as since vLLM 0.32.
        metrics: whether /metrics says when it was started.
        can_tokenize: whether /tokenize and /detokenize exist.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        *,
        max_logprobs: int = -1,  # largest K; -1 for the vocabulary
        api_key: str | None = None,  # asked for as a bearer token
        processed: bool = True,  # whether log mu is after temperature
        plugin: bool = False,  # whether it has the scoring plugin
        other: str | Path | None = None,  # of the same vocabulary, for ``modes.MODELS``
    ):
        super().__init__(self._respond)
        self._settings = (max_logprobs, processed)
        self._right = RightAnswers(Path(checkpoint), *self._settings)
        self._other = None if other is None else RightAnswers(Path(other), *self._settings)
        self.api_key = api_key
        self.versions = self.metrics = self.can_tokenize = True
        self.plugin = plugin
        self.requests: Counter[str] = Counter()
        self.spoiled: Counter[str] = Counter()
        self.before: Callable[[str], object] = lambda road: None
        self._spoilings: list[Spoiling] = []
        self._lock = threading.Lock()
        self._unseeded = 0
        self._seen: set[tuple[int, ...]] = set()

    @property
    def model(self) -> str:
        """Name of the served model: its directory."""
        return str(self._right.path)

    def spoil(
        self,
        mode: str,
        after: int = 0,
        times: int | None = None,
        *,
        road: str | None = None,
        row: int | None = None,
    ) -> None:
        """Spoil answers from now on, in addition to what is spoiled already.

        ``after`` requests of the road are still answered right, and then ``times`` are spoiled
        (None: all): in every row of scores, or in ``row`` alone.
        """
        own = modes.road_of(mode)
        with self._lock:
            self._spoilings.append(Spoiling(mode, road or own, after, times, row))

    def heal(self) -> None:
        """Answer right again, and forget what was asked before."""
        with self._lock:
            self._spoilings.clear()
            self._seen.clear()

    def swap(self, checkpoint: str | Path) -> None:
        """Serve other weights under the old name, as a server restarted with another model does."""
        name = self._right.path
        with self._lock:
            self._right = RightAnswers(Path(checkpoint), *self._settings)
            self._right.path = name

    def start(self) -> None:
        """Listen, as another process of that port."""
        self._right.begin()
        super().start()

    def _respond(self, method: str, path: str, content: bytes, headers: Mapping[str, str]) -> Reply:
        if self.api_key is not None and headers.get("Authorization") != f"Bearer {self.api_key}":
            return UNAUTHORIZED
        try:
            body = json.loads(content or b"null")
        except ValueError as error:
            return refusal(400, str(error))
        return self.answer(method, path, body)

    def answer(self, method: str, path: str, body: Any) -> Reply:
        """Return the reply to a request, spoiled where it is claimed."""
        road = road_of_request(path, body)
        self.before(road or "")
        with self._lock:
            self.requests[path] += 1
            claimed = next((s for s in self._spoilings if s.claims(road)), None) if road else None
            if claimed is not None:
                self.spoiled[claimed.mode] += 1
            try:
                return self._reply(method, path, body, claimed)
            except BadRequest as error:
                return refusal(400, str(error))

    def _reply(self, method: str, path: str, body: Any, claimed: Spoiling | None) -> Reply:
        mode = "" if claimed is None else claimed.mode
        if mode.startswith("status_"):
            reply = refusal(int(mode.split("_")[1]), f"spoiled with {mode}")
            reply.headers = {"Retry-After": "1"} if mode.endswith("_after") else {}
            return reply
        if mode in modes.BODIES:
            return Reply.of(modes.BODIES[mode])
        answer = self._answer(method, path, body, mode)
        if isinstance(answer, Reply):
            return answer
        if claimed is not None:
            answer = self._spoiled(answer, claimed)
        content = (modes.pack if path in (SCORE_PATH, HEAD_PATH) else modes.encode)(answer)
        if mode in modes.PACKED_BODIES:
            content = modes.PACKED_BODIES[mode](content)
        return played(Reply.of(content), mode)

    def _spoiled(self, answer: Any, claimed: Spoiling) -> Any:
        mode, answer = claimed.mode, copy.deepcopy(answer)
        if mode in modes.ROWS:
            rows = answer["choices"][0]["prompt_logprobs"]
            for t in range(1, len(rows)) if claimed.row is None else [claimed.row]:
                rows[t] = modes.ROWS[mode](rows[t])
            return answer
        if mode in modes.WHOLE:
            return modes.WHOLE[mode](answer)
        if mode == "tokens_shifted":
            return answer | {"tokens": [token + 1 for token in answer["tokens"]]}
        return answer

    def _answer(self, method: str, path: str, body: Any, mode: str) -> Any:
        match method, path:
            case "GET", "/v1/models":
                return {"object": "list", "data": [self._right.card()]}
            case "GET", "/metrics" if self.metrics:
                seconds = f"process_start_time_seconds {1.76e9 + self._right.started}"
                return Reply.of(f"# TYPE of_others gauge\n{seconds}\n".encode())
            case "POST", "/v1/completions":
                return self._completion(body, mode)
            case "POST", "/inference/v1/generate":  # as prime-rl asks for scores
                k, tokens = body["sampling_params"]["prompt_logprobs"], body["token_ids"]
                return {"prompt_logprobs": self._scores(self._right.token_ids(tokens), k, mode)}
            case "POST", "/v1/prime_composer/score" if self.plugin:
                return self._packed(body, mode)
            case "POST", "/v1/prime_composer/head" if self.plugin:
                greeting = {"plugin": "prime_composer", "version": VERSION}
                return greeting | self._right.head(body["first"], body["last"])
            case "POST", "/tokenize" if self.can_tokenize:
                tokens = self._right.token_ids(body["prompt"])
                return {
                    "count": len(tokens),
                    "max_model_len": self._right.max_model_len,
                    "tokens": tokens,
                    "token_strs": None,
                }
            case "POST", "/detokenize" if self.can_tokenize:
                return {"prompt": self._right.text(body["tokens"])}
            case "POST", "/collective_rpc":
                if mode != "reload_ignored":
                    self._right.reload(Path(body["kwargs"]["weights_path"]))
                return {"results": [None]}
            case "POST", "/reset_prefix_cache":
                return {"success": True}
            case "POST", "/update_weight_version" if self.versions:
                self._right.version = body["new_version"]
                return {"success": True, "new_version": self._right.version}
            case "GET", "/weight_info" if self.versions:
                return {"weight_version": self._right.version}
        return Reply.of({"detail": "Not Found"}, status=404)

    def _completion(self, body: Any, mode: str) -> Any:
        if body.get("model") not in (None, str(self._right.path)):
            return refusal(404, f"The model `{body['model']}` does not exist.")
        tokens = self._right.token_ids(body.get("prompt"))
        seed = body.get("seed")
        if seed is None:
            self._unseeded += 1
            seed = self._unseeded
        choices = [
            self._right.choice(tokens, body, index, seed) for index in range(body.get("n") or 1)
        ]
        for choice in choices:
            if body.get("logprobs") is None:
                choice["logprobs"] = None
            choice["prompt_logprobs"] = None
        k = body.get("prompt_logprobs")
        if k is not None:
            choices[0]["prompt_logprobs"] = self._scores(tokens, k, mode)
        return {
            "id": f"cmpl-{sum(self.requests.values())}",
            "object": "text_completion",
            "created": 1_760_000_000,
            "model": str(self._right.path),
            "choices": choices,
            "usage": {"prompt_tokens": len(tokens)},
        }

    def _packed(self, body: Any, mode: str) -> Any:
        return {
            "plugin": "prime_composer",
            "version": VERSION,
            "facts": self._right.facts()
            | {"fingerprint": self._right.fingerprint if body["sequences"] else None},
            "sequences": [
                self._ask_model(
                    one["token_ids"], mode, lambda model, one=one: model.arrays(body, one)
                )
                for one in body["sequences"]
            ],
        }

    def _scores(self, tokens: list[int], k: int, mode: str) -> list[Any]:
        return self._ask_model(tokens, mode, lambda model: model.rows(tokens, k))

    def _ask_model(self, tokens: list[int], mode: str, ask: Callable[[RightAnswers], Any]) -> Any:
        """Return an answer of the model, or of the one that a mode of ``modes.MODELS`` names."""
        model = self._right
        is_new = tuple(tokens) not in self._seen
        self._seen.add(tuple(tokens))
        if mode == "tempered":
            model.temperature = 1.3
        elif mode == "other_model" or (mode == "other_model_for_new" and is_new):
            assert self._other is not None, "SpoilingServer(other=...) is missing"
            model = self._other
        try:
            return ask(model)
        finally:
            model.temperature = 1.0


def road_of_request(path: str, body: Any) -> str | None:
    """Return the road of a request, one of ``modes.ROADS``; None for what cannot be spoiled."""
    match path:
        case "/v1/completions":
            return "sampling" if (body or {}).get("prompt_logprobs") is None else "scoring"
        case "/inference/v1/generate":
            return "scoring"
        case "/v1/prime_composer/score":
            return "binary" if body.get("sequences") else None
        case "/v1/prime_composer/head":
            return "head"
        case "/v1/models":
            return "models"
        case "/collective_rpc":
            return "reload"
        case "/tokenize" | "/detokenize":
            return "tokenize"
    return None


def refusal(status: int, message: str) -> Reply:
    """Return an error in vLLM's layout."""
    error = {"message": message, "type": "BadRequestError", "param": None, "code": status}
    return Reply.of({"error": error}, status=status)


def played(reply: Reply, mode: str) -> Reply:
    """Return a reply as a mode of ``modes.CONNECTIONS`` has it; as it is for others."""
    match mode:
        case "drop":
            return DROPPED
        case "cut":
            return replace(reply, parts=[reply.body[: len(reply.body) // 2]])
    return reply
