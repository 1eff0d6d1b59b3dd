"""Student rollouts and teacher scores of running vLLM servers, by ``/v1/completions``.

Start the servers so (GPU). On a CPU machine replace ``vllm serve DIR`` by
``python -m prime_composer.backends.vllm_serve --model DIR``, with
``--kv-cache-memory-bytes 1073741824`` and one ``VLLM_CPU_OMP_THREADS_BIND`` core each:

    teacher:  vllm serve TEACHER --port 8001 --max-logprobs 64
    student:  VLLM_SERVER_DEV_MODE=1 vllm serve STUDENT --port 8000 \\
                  --logprobs-mode processed_logprobs

``--max-logprobs`` must be at least the loss's K (vLLM's default is 20). ``--logprobs-mode
processed_logprobs`` makes mu the distribution that was sampled from; it matters at temperature != 1
or top_p < 1. ``VLLM_SERVER_DEV_MODE=1`` opens the endpoints that reload weights and reset the
prefix cache. Weights are passed in a directory that both sides can read.

A server answers in JSON, about 1 MB for 256 tokens at K = 64: several times slower than an engine
in this process.

A teacher served in bfloat16 also computes its logits in bfloat16, rounded to 8 significant bits: up
to 0.016 nat off for logits of 4 to 8, 0.06 for 16 to 32, and likewise its log-probs. Start it with
``--hf-overrides '{"head_dtype": "float32"}'`` to multiply with the head in float32. Run with vLLM
0.32 on a CPU with ``dtype="bfloat16"``: without the option every logit is a bfloat16 number, with
it they are float32 numbers within half a unit in the last place of those. Weights and hidden states
stay bfloat16.
"""

import json
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
    SequenceToScore,
    check_lengths,
    check_support_size,
    make_rollout,
    sequences_to_score,
)
from prime_composer.backends.protocols import Limits, Rollout, SamplingParams, TeacherScores
from prime_composer.backends.vllm_logprobs import read_answer, top_k_of

T = TypeVar("T")

ATTEMPTS = 4
"""Attempts per request. vLLM drops a connection that was idle for 5 s, even during a request."""


class ServerError(ValueError):
    """The server cannot be reached or does not fit the recipe; the message names the remedy."""


class Server:
    """A running vLLM server: what sampler and scorer share.

    Args:
        url: base URL, with or without ``/v1``.
        model: the model that the server should serve (its path, hub id or served name). None
            accepts any model.
        section: the recipe's table that describes this server, for messages.
        max_logprobs: the server's --max-logprobs, where known; otherwise the server refuses a
            larger K.
        concurrency: requests sent at once.
        timeout: seconds that one request may take.
        api_key: sent as a bearer token.

    Raises:
        ServerError: nothing answers at the URL, or it serves another model.
        ImportError: httpx is not installed.
    """

    def __init__(
        self,
        url: str,
        model: str | Path | None = None,
        *,
        section: str,
        max_logprobs: int | None = None,
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
        self.section = section
        self._client = httpx.Client(
            base_url=self.url,
            timeout=httpx.Timeout(timeout, connect=10.0),
            limits=httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        )
        self._has_key = bool(api_key)
        self._pool = ThreadPoolExecutor(max_workers=concurrency)
        try:
            card = self._find(None if model is None else str(model))
        except BaseException:
            self.close()
            raise
        self.model: str = card["id"]
        self.limits = Limits(
            max_model_len=card.get("max_model_len"),
            vocab_size=read_vocab_size(card.get("root") or self.model),
            max_logprobs=max_logprobs,
        )

    def _find(self, model: str | None) -> dict[str, Any]:
        """Return the server's own description of the model that it should serve."""
        served = self._request("GET", "/v1/models").json()["data"]
        if model is None:
            return served[0]
        cards = {
            str(name): card for card in served for name in (card["id"], card.get("root")) if name
        }
        if model not in cards:
            raise ServerError(
                f"The server at {self.url} serves {', '.join(sorted(cards))}, and the recipe names "
                f"{model}; set model in {self.section} to what it serves, or start it with that "
                "model."
            )
        return cards[model]

    def close(self) -> None:
        """Close the connections. Closing twice is harmless."""
        self._pool.shutdown(cancel_futures=True)
        self._client.close()

    def _map(self, function: Callable[..., T], items: Sequence[Any]) -> list[T]:
        """Return ``function`` of each item, run concurrently, in order. An error stops the rest."""
        futures = [self._pool.submit(function, item) for item in items]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()

    def _complete(self, prompt: Sequence[int], **settings: Any) -> Any:
        body = {"model": self.model, "prompt": list(prompt), "return_token_ids": True, **settings}
        return self._request("POST", "/v1/completions", body)

    def _request(self, method: str, path: str, body: Any = None) -> Any:
        """Send one request, again where the connection was dropped, and return the response.

        Raises:
            ServerError: unreachable, timed out, or refused; the message quotes the server.
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
                        f"No vLLM server answers at {self.url} ({error}); start one, `vllm serve "
                        f"MODEL --port ...`, or correct the url in {self.section}."
                    ) from error
                time.sleep(0.1 * 2**attempt)
        if response.is_success:
            return response
        try:
            reason = response.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            reason = response.text[:300]
        if "prompt logprobs" in reason and "max allowed" in reason:
            raise ServerError(
                f"The server at {self.url} refuses that K ({reason}); start it with a larger "
                "--max-logprobs, or lower the loss's k."
            )
        if response.status_code == 401:
            raise ServerError(
                f"The server at {self.url} asks for an API key and got "
                f"{'another' if self._has_key else 'none'}: put it into the environment variable "
                f"that api_key_var in {self.section} names (VLLM_API_KEY where it names none)."
            )
        raise ServerError(
            f"The server at {self.url} answered {response.status_code} to {path}: {reason}"
        )


class ServerSampler(Server):
    """Rollouts of a running vLLM server (``protocols.Sampler``), with ``Server``'s arguments.

    Args:
        weights_dir: a directory that this process can write and the server can read, for
            ``update_weights``. None is the system's temporary directory, for a server on this
            machine.
        eos_token_ids: ids that end a completion, in addition to the server's own EOS and
            ``SamplingParams.stop_token_ids``.
        seeded: send a seed with each request, which makes rollouts reproducible. A CPU server needs
            ``--no-enable-chunked-prefill`` for that (``vllm_serve`` sets it), or its engine
            crashes.
    """

    def __init__(
        self,
        url: str,
        model: str | Path | None = None,
        *,
        section: str = "[rollout]",
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
            section=section,
            concurrency=concurrency,
            timeout=timeout,
            api_key=api_key,
        )
        self.weights_dir = weights_dir
        self.eos_token_ids = tuple(eos_token_ids)
        self.seeded = seeded
        self._processed: bool | None = None
        self._lock = threading.Lock()

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seed: int
    ) -> list[Rollout]:
        """Return ``params.n`` rollouts per prompt, in prompt order; reproducible where seeded.

        mu is the distribution that each token was drawn from. Greedy tokens have log mu = 0.

        Raises:
            ServerError: the server is gone, or returns raw log-probs where they are not log mu.
            ValueError: a prompt and ``max_tokens`` do not fit into ``limits.max_model_len``, or a
                prompt is empty.
        """
        check_lengths(prompts, params.max_tokens, self.limits.max_model_len)
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
            for choice in self._choices(prompts[index], settings):
                ids = choice["token_ids"]
                logprobs = [0.0] * len(ids) if greedy else choice["logprobs"]["token_logprobs"]
                rollouts.append(
                    make_rollout(prompts[index], ids, logprobs, choice["finish_reason"], index)
                )
            return rollouts * (params.n if greedy else 1)

        return [rollout for group in self._map(sample, range(len(prompts))) for rollout in group]

    def update_weights(self, model: nn.Module) -> None:
        """Write the weights to a directory, reload them in the server, and reset its prefix cache.

        Writes every entry of ``state_dict()``, including a tied ``lm_head.weight``.
        ``save_pretrained`` would leave it out, and the CPU engine would silently keep its old head.

        Raises:
            ServerError: the server has no reload endpoint (start it with VLLM_SERVER_DEV_MODE=1),
                or cannot read the directory.
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
        """Reset the server's prefix cache.

        Raises:
            ServerError: other requests are running on the server, or it has no such endpoint.
        """
        if not self._dev_request("/reset_prefix_cache", None).json()["success"]:
            raise ServerError(
                f"The server at {self.url} did not reset its prefix cache: other requests are "
                "running on it."
            )

    def _choices(self, prompt: Sequence[int], settings: dict[str, Any]) -> list[dict[str, Any]]:
        choices = self._complete(prompt, **settings).json()["choices"]
        return sorted(choices, key=lambda choice: choice["index"])

    def _dev_request(self, path: str, body: Any) -> Any:
        try:
            return self._request("POST", path, body)
        except ServerError as error:
            if "answered 404" not in str(error):
                raise
            raise ServerError(
                f"The server at {self.url} has no {path}, so its weights cannot be updated; start "
                "it with VLLM_SERVER_DEV_MODE=1 in its environment."
            ) from error

    def _check_processed(self, prompt: Sequence[int]) -> None:
        """Refuse raw log-probs. They ignore the temperature: at 2 the two best must come closer.

        Raises:
            ServerError: the server returns raw log-probs.
        """
        with self._lock:
            if self._processed is None:
                gaps = []
                for temperature in (1.0, 2.0):
                    settings = plain_sampling(temperature=temperature, max_tokens=1, logprobs=2)
                    (choice,) = self._choices(prompt, settings)
                    gaps.append(sorted(choice["logprobs"]["top_logprobs"][0].values())[-2:])
                self._processed = max(abs(a - b) for a, b in zip(*gaps, strict=True)) > 1e-3
        if not self._processed:
            raise ServerError(
                f"The server at {self.url} returns log-probs before temperature and top_p, which "
                "are not those that it samples from; start it with --logprobs-mode "
                "processed_logprobs, or sample at temperature 1 and top_p 1."
            )


class ServerScorer(Server):
    """Teacher scores of a running vLLM server (``protocols.Scorer``); see ``Server``."""

    def __init__(
        self,
        url: str,
        model: str | Path | None = None,
        *,
        section: str = "[teacher]",
        max_logprobs: int | None = None,
        concurrency: int = 32,
        timeout: float = 600.0,
        api_key: str | None = None,
    ):
        self._sampler: ServerSampler | None = None  # the base class may call close()
        super().__init__(
            url,
            model,
            section=section,
            max_logprobs=max_logprobs,
            concurrency=concurrency,
            timeout=timeout,
            api_key=api_key,
        )
        self._arguments: dict[str, Any] = {
            "section": section,
            "concurrency": concurrency,
            "timeout": timeout,
            "api_key": api_key,
        }

    @property
    def sampler(self) -> ServerSampler:
        """A sampler of the same server, connected on first use."""
        if self._sampler is None:
            self._sampler = ServerSampler(self.url, self.model, **self._arguments)
        return self._sampler

    def score(
        self,
        rollouts: Sequence[Rollout],
        support_size: int | Literal["full"],
        prompts: Sequence[Sequence[int]] | None = None,
    ) -> list[TeacherScores]:
        """Return one ``TeacherScores`` per rollout, in order.

        Args:
            rollouts: what to score.
            support_size: K; 0 for the sampled token only, "full" for the whole vocabulary (K = V).
            prompts: token ids that the teacher reads instead of each rollout's own prompt.

        Raises:
            ServerError: the server is gone, or K is above its --max-logprobs.
            ValueError: K above the vocabulary, a sequence too long for the server, or an answer
                that does not fit the request.
        """
        vocab_size, limit = self.limits.vocab_size, self.limits.max_logprobs
        if vocab_size is not None:
            k = check_support_size(
                support_size,
                vocab_size,
                vocab_size if limit is None or limit == -1 else limit,
                "the server's --max-logprobs",
            )
        elif support_size == "full":
            raise ServerError(
                f"The size of the vocabulary of {self.model} is not known on this machine, so K "
                "cannot be 'full'; set k to a number."
            )
        else:
            k = support_size
        sequences = sequences_to_score(rollouts, prompts)
        check_lengths([s.token_ids for s in sequences], 1, self.limits.max_model_len)

        def score_one(sequence: SequenceToScore) -> TeacherScores:
            settings = plain_sampling(temperature=0.0, max_tokens=1, prompt_logprobs=k)
            answer = self._complete(sequence.token_ids, **settings).content
            top = top_k_of(sequence.token_ids, read_answer(answer), k)
            return TeacherScores(
                torch.tensor(top.own[sequence.start :], dtype=torch.float32),
                torch.from_numpy(top.token_ids[sequence.start :]).long(),
                torch.from_numpy(top.logprobs[sequence.start :]),
            )

        return self._map(score_one, sequences)

    def close(self) -> None:
        """Close the connections, those of ``sampler`` too. Closing twice is harmless."""
        if self._sampler is not None:
            self._sampler.close()
        super().close()


def plain_sampling(**settings: Any) -> dict[str, Any]:
    """Return sampling settings that override the model's own generation config, top_k included."""
    neutral = {
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    return neutral | settings


def read_vocab_size(model: str) -> int | None:
    """Return the vocabulary size of a model directory on this machine; None for any other model."""
    path = Path(model) / "config.json"
    if not path.is_file():
        return None
    config = json.loads(path.read_text())
    return config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
