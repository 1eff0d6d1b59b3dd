"""Student rollouts and teacher scores from running vLLM servers, over ``/v1/completions`` with token ids.

Start the servers so (GPU; on a CPU machine ``python -m prime_composer.backends.vllm_serve --model DIR`` takes the place
of ``vllm serve DIR``, with ``--kv-cache-memory-bytes 1073741824`` and one ``VLLM_CPU_OMP_THREADS_BIND`` core each):

    teacher:  vllm serve TEACHER --port 8001 --max-logprobs 64
    student:  VLLM_SERVER_DEV_MODE=1 vllm serve STUDENT --port 8000 --logprobs-mode processed_logprobs

``--max-logprobs`` has to reach the loss's K (vLLM's default is 20). ``--logprobs-mode processed_logprobs`` makes mu the
distribution that was sampled from; it matters at temperature != 1 or top_p < 1. ``VLLM_SERVER_DEV_MODE=1`` opens the
endpoints that reload weights and reset the prefix cache; weights travel through a directory that both sides see.

A server answers in JSON, about 1 MB for 256 tokens at K = 64: several times slower than an engine in this process.
"""

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from prime_composer.backends.alignment import (
    check_lengths,
    check_support_size,
    make_rollout,
    place,
    sequences_to_score,
)
from prime_composer.backends.protocols import Rollout, SamplingParams, TeacherScores

T = TypeVar("T")

ATTEMPTS = 4
"""Times that a request is sent. vLLM drops a connection that was idle for 5 s, in the middle of the next request."""


class ServerError(ValueError):
    """The server is not there, or not the one that the recipe needs; the message names the remedy."""


class Server:
    """A running vLLM server: what sampler and scorer share.

    Args:
        url: base URL, with or without ``/v1``.
        model: the model that the server should serve (its path, hub id or served name). None takes what it serves.
        max_logprobs: the server's --max-logprobs, where it is known; otherwise the server itself refuses a larger K.
        weights_dir: a directory that this process can write and the server can read, for ``update_weights``. None is
            the system's temporary directory: the server runs on this machine.
        concurrency: requests under way at once.
        timeout: seconds that one request may take.
        api_key: sent as a bearer token.

    Raises:
        ServerError: nothing answers at the URL, or it serves another model.
        ImportError: httpx is not installed.
    """

    section = "[rollout]"

    def __init__(
        self,
        url: str,
        model: str | Path | None = None,
        *,
        max_logprobs: int | None = None,
        weights_dir: str | Path | None = None,
        concurrency: int = 32,
        timeout: float = 600.0,
        api_key: str | None = None,
    ):
        try:
            import httpx
        except ModuleNotFoundError as error:
            raise ImportError(
                "A vLLM server needs httpx: pip install 'prime-composer[engine]'."
            ) from error
        self._httpx = httpx
        self.url = url.rstrip("/").removesuffix("/v1")
        self.weights_dir = weights_dir
        self._client = httpx.Client(
            base_url=self.url,
            timeout=httpx.Timeout(timeout, connect=10.0),
            limits=httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        )
        self._keyed = bool(api_key)
        self._pool = ThreadPoolExecutor(max_workers=concurrency)
        try:
            card = self._find(None if model is None else str(model))
        except BaseException:
            self.close()
            raise
        self.model: str = card["id"]
        self.max_model_len: int | None = card.get("max_model_len")
        self.max_logprobs = max_logprobs
        self.vocab_size = read_vocab_size(card.get("root") or self.model)

    def _find(self, model: str | None) -> dict[str, Any]:
        """The server's own description of the model that it should serve."""
        served = self._request("GET", "/v1/models").json()["data"]
        if model is None:
            return served[0]
        names = {
            str(name): card for card in served for name in (card["id"], card.get("root")) if name
        }
        if model not in names:
            raise ServerError(
                f"The server at {self.url} serves {', '.join(sorted(names))}, and the recipe names {model}; set model in "
                f"{self.section} to what it serves, or start it with that model."
            )
        return names[model]

    def update_weights(self, model: nn.Module) -> None:
        """Write the weights into a directory, let the server load them, and let it forget every cached prefix.

        Every entry of ``state_dict()`` is written, a tied ``lm_head.weight`` too: ``save_pretrained`` would leave it
        out, and the CPU engine would go on with the old head and say nothing.

        Raises:
            ServerError: the server has no reload endpoint (start it with VLLM_SERVER_DEV_MODE=1) or cannot read the
                directory.
        """
        from safetensors.torch import save_file

        directory = Path(tempfile.mkdtemp(prefix="prime_composer_weights_", dir=self.weights_dir))
        try:
            directory.chmod(0o755)
            weights = {
                name: value.detach().cpu().contiguous().clone()
                for name, value in model.state_dict().items()
            }
            save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
            call = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
            self._dev_request("/collective_rpc", call)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        self.forget_prefixes()

    def forget_prefixes(self) -> None:
        if not self._dev_request("/reset_prefix_cache", None).json()["success"]:
            raise ServerError(
                f"The server at {self.url} did not reset its prefix cache: other requests are running on it."
            )

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._client.close()

    def _map(self, function: Callable[..., T], items: Sequence[Any]) -> list[T]:
        """``function`` of each item, side by side, in order; the first error stops the rest."""
        futures = [self._pool.submit(function, item) for item in items]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()

    def _complete(self, prompt: Sequence[int], **settings: Any) -> list[dict[str, Any]]:
        body = {"model": self.model, "prompt": list(prompt), "return_token_ids": True, **settings}
        choices = self._request("POST", "/v1/completions", body).json()["choices"]
        return sorted(choices, key=lambda choice: choice["index"])

    def _dev_request(self, path: str, body: Any):
        try:
            return self._request("POST", path, body)
        except ServerError as error:
            if "answered 404" not in str(error):
                raise
            raise ServerError(
                f"The server at {self.url} has no {path}, so its weights cannot be updated; start it with "
                "VLLM_SERVER_DEV_MODE=1 in its environment."
            ) from error

    def _request(self, method: str, path: str, body: Any = None):
        """One request, sent again when the connection was dropped.

        Raises:
            ServerError: unreachable, timed out, or refused; the server's own words are in the message.
        """
        httpx = self._httpx
        for attempt in range(ATTEMPTS):
            try:
                response = self._client.request(method, path, json=body)
                break
            except httpx.TimeoutException as error:
                raise ServerError(
                    f"The server at {self.url} did not answer {path} in time ({error!r})."
                ) from error
            except httpx.TransportError as error:
                if attempt == ATTEMPTS - 1:
                    raise ServerError(
                        f"No vLLM server answers at {self.url} ({error}); start one, `vllm serve MODEL --port ...`, or "
                        f"correct the url in {self.section}."
                    ) from error
                time.sleep(0.1 * 2**attempt)
        if response.is_success:
            return response
        try:
            words = response.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            words = response.text[:300]
        if "prompt logprobs" in words and "max allowed" in words:
            raise ServerError(
                f"The server at {self.url} refuses that K ({words}); start it with a larger --max-logprobs, or lower the loss's k."
            )
        if response.status_code == 401:
            raise ServerError(
                f"The server at {self.url} asks for an API key and got {'another' if self._keyed else 'none'}: put it into the "
                f"environment variable that api_key_var in {self.section} names (VLLM_API_KEY where it names none)."
            )
        raise ServerError(
            f"The server at {self.url} answered {response.status_code} to {path}: {words}"
        )


class ServerSampler(Server):
    """Rollouts of a running vLLM server (``rollout.Sampler``). See ``Server`` for the other arguments.

    Args:
        eos_token_ids: where a completion ends, beside the server's own EOS and ``SamplingParams.stop_token_ids``.
        seeded: send a seed with each request, for the same rollouts every time. A CPU server needs
            ``--no-enable-chunked-prefill`` for that (``vllm_serve`` sets it), or its engine crashes.
    """

    def __init__(
        self,
        url: str,
        model: str | Path | None = None,
        *,
        weights_dir: str | Path | None = None,
        concurrency: int = 32,
        timeout: float = 600.0,
        api_key: str | None = None,
        eos_token_ids: Sequence[int] = (),
        seeded: bool = True,
    ):
        super().__init__(
            url,
            model,
            weights_dir=weights_dir,
            concurrency=concurrency,
            timeout=timeout,
            api_key=api_key,
        )
        self.eos_token_ids = tuple(eos_token_ids)
        self.seeded = seeded
        self._processed: bool | None = None
        self._lock = threading.Lock()

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seed: int
    ) -> list[Rollout]:
        """``params.n`` rollouts per prompt, in prompt order; the same seed gives the same rollouts where seeded.

        mu is the distribution that each token was drawn from; greedy tokens have log mu = 0.

        Raises:
            ServerError: the server is gone, or returns raw log-probs where they are not mu.
            ValueError: a prompt and ``max_tokens`` together do not fit into ``max_model_len``, or a prompt is empty.
        """
        if self.max_model_len is not None:
            check_lengths(prompts, params.max_tokens, self.max_model_len)
        greedy = params.temperature == 0
        if not greedy and (params.temperature != 1 or params.top_p < 1):
            self._check_processed(prompts[0])

        def sample(index: int) -> list[Rollout]:
            settings = plain_sampling(
                n=1 if greedy else params.n,
                temperature=params.temperature,
                top_p=params.top_p,
                max_tokens=params.max_tokens,
                stop_token_ids=sorted({*self.eos_token_ids, *params.stop_token_ids}),
                logprobs=0,
            )
            if self.seeded and not greedy:
                # One stream per prompt; vLLM adds 1 for each further completion of a group.
                settings["seed"] = (seed * 2_654_435_761 + index * 65_537) % 2**31
            rollouts = []
            for choice in self._complete(prompts[index], **settings):
                ids = choice["token_ids"]
                logprobs = [0.0] * len(ids) if greedy else choice["logprobs"]["token_logprobs"]
                rollouts.append(
                    make_rollout(prompts[index], ids, logprobs, choice["finish_reason"], index)
                )
            return rollouts * (params.n if greedy else 1)

        return [rollout for group in self._map(sample, range(len(prompts))) for rollout in group]

    def _check_processed(self, prompt: Sequence[int]) -> None:
        """Refuse raw log-probs, which do not change with the temperature: at 2 the two best must come closer."""
        with self._lock:
            if self._processed is None:
                best = []
                for temperature in (1.0, 2.0):
                    settings = plain_sampling(temperature=temperature, max_tokens=1, logprobs=2)
                    (choice,) = self._complete(prompt, **settings)
                    best.append(sorted(choice["logprobs"]["top_logprobs"][0].values())[-2:])
                self._processed = max(abs(a - b) for a, b in zip(*best, strict=True)) > 1e-3
        if not self._processed:
            raise ServerError(
                f"The server at {self.url} returns log-probs before temperature and top_p, which are not those that it "
                "samples from; start it with --logprobs-mode processed_logprobs, or sample at temperature 1 and top_p 1."
            )


class ServerScorer(Server):
    """Teacher scores of a running vLLM server (``scorer.Scorer``). See ``Server`` for the arguments."""

    section = "[teacher]"

    def score(
        self,
        rollouts: Sequence[Rollout],
        support_size: int | Literal["full"],
        prompts: Sequence[Sequence[int]] | None = None,
    ) -> list[TeacherScores]:
        """One ``TeacherScores`` per rollout, in order.

        Args:
            rollouts: what to score, each on its own tokens.
            support_size: K; 0 for the sampled token alone, "full" for the whole vocabulary (K = V).
            prompts: token ids that the teacher reads in the place of each rollout's own prompt.

        Raises:
            ServerError: the server is gone, or K is above its --max-logprobs.
            ValueError: K above the vocabulary, or a sequence too long for the server.
        """
        if self.vocab_size is not None:
            limit = self.vocab_size if self.max_logprobs in (None, -1) else self.max_logprobs
            k = check_support_size(
                support_size, self.vocab_size, limit, "the server's --max-logprobs"
            )
        elif support_size == "full":
            raise ServerError(
                f"The size of the vocabulary of {self.model} is not known here, so K cannot be 'full'; set k to a number."
            )
        else:
            k = support_size
        scored = sequences_to_score(rollouts, prompts)
        if self.max_model_len is not None:
            check_lengths([s.token_ids for s in scored], 1, self.max_model_len)

        def score(index: int) -> TeacherScores:
            s = scored[index]
            (choice,) = self._complete(
                s.token_ids, **plain_sampling(temperature=0.0, max_tokens=1, prompt_logprobs=k)
            )
            own, ids, logprobs = parse_entries(choice["prompt_logprobs"], s.token_ids, s.start, k)
            return place(len(rollouts[index].token_ids), s, own, ids, logprobs)

        return self._map(score, range(len(scored)))


def plain_sampling(**settings: Any) -> dict[str, Any]:
    """Sampling settings with everything named, so that none of the model's own generation config slips in (top_k!)."""
    neutral = {
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
    }
    return neutral | {"frequency_penalty": 0.0} | settings


def parse_entries(
    entries: list[dict[str, dict[str, Any]] | None], token_ids: list[int], start: int, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The tokens' own log-probs [n], and ids and log-probs [n, k] of the top K, most probable first.

    Entry t is None at 0, and else maps K or K + 1 ids to their log-probs: the top K, and token t itself, which may be
    one of them. Its rank cannot tell (a tie shares one), so where there are K + 1, token t is the odd one.
    """
    if len(entries) != len(token_ids):
        raise ServerError(
            f"The server scored {len(entries)} tokens of {len(token_ids)}; use a server of vLLM 0.10 or later."
        )
    own, ids, logprobs = [], [], []
    for entry, token in zip(entries[start:], token_ids[start:], strict=True):
        values = {int(index): value["logprob"] for index, value in entry.items()}
        own.append(values[token])
        if len(values) == k + 1:
            del values[token]
        if len(values) != k and k > 0:
            raise ServerError(
                f"The server answered {len(values)} log-probs for K = {k}; use a server of vLLM 0.10 or later."
            )
        top = sorted(values.items(), key=lambda item: -item[1])[:k]
        ids.append([index for index, _ in top])
        logprobs.append([value for _, value in top])
    n = len(token_ids) - start
    return (
        torch.tensor(own, dtype=torch.float32),
        torch.tensor(ids, dtype=torch.int64).reshape(n, k),
        torch.tensor(logprobs, dtype=torch.float32).reshape(n, k),
    )


def read_vocab_size(model: str) -> int | None:
    """The vocabulary of a model in a directory that this machine sees; None for any other."""
    import json

    path = Path(model) / "config.json"
    if not path.is_file():
        return None
    config = json.loads(path.read_text())
    return config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
