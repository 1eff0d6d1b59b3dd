"""Rollouts of a running vLLM server."""

import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from torch import nn

from prime_composer.backends.alignment import check_sequence_lengths, make_rollout
from prime_composer.backends.answers import check_choices
from prime_composer.backends.errors import naming_file
from prime_composer.backends.http import RETRIED, RequestRefused, ServerError
from prime_composer.backends.lora.views import weights_to_load
from prime_composer.backends.protocols import Rollout, SamplingParams
from prime_composer.backends.scratch import scratch_folder
from prime_composer.backends.server import Server, plain_sampling
from prime_composer.backends.vllm_logprobs import answer_bytes, read_completions
from prime_composer.recipe.backends import Served

SLOW_COMPLETION = 10  # Tokens per second of one completion on a slow server

SLOW_SERVER = 200  # Tokens per second of a slow server, all completions together

VERSION_PATH = "/update_weight_version"  # vLLM 0.32; in memory, so that a restart changes it

START = re.compile(rb"^process_start_time_seconds (\S+)", re.MULTILINE)  # Of one API process

METRICS_BYTES = 2**24

ROUNDS = 3  # How often weights or rollouts go again when the server was lost meanwhile


class Reset(msgspec.Struct):
    """An answer of ``/reset_prefix_cache``."""

    success: bool


class WeightInfo(msgspec.Struct):
    """An answer of ``/weight_info``."""

    weight_version: str


class TopLogprobs(msgspec.Struct):
    """Log-probs of the most probable tokens at each position of a completion."""

    top_logprobs: Annotated[list[dict[str, float]], msgspec.Meta(min_length=1)]


class TopChoice(msgspec.Struct):
    """A completion with the most probable tokens."""

    logprobs: TopLogprobs


class TopChoices(msgspec.Struct):
    """An answer of ``/v1/completions`` with the most probable tokens."""

    choices: Annotated[list[TopChoice], msgspec.Meta(min_length=1, max_length=1)]


class ServerSampler(Server):
    """Rollouts of a running vLLM server (``protocols.Sampler``), with ``Server``'s arguments.

    A CPU server that gets seeds needs ``--no-enable-chunked-prefill``, or its engine crashes;
    ``vllm_serve`` sets it.
    """

    def __init__(
        self,
        served: Served | str,
        model: str | Path | None = None,
        *,
        section: str = "[rollout]",
        weights_dir: str | Path | None = None,  # both sides read it; None: the temporary one
        eos_token_ids: Sequence[int] | None = None,  # beside a call's own; None: the server's
        seeded: bool = True,  # with a seed per request, so that rollouts are reproducible
        **connection: Any,
    ):
        super().__init__(served, model, section=section, **connection)
        self.weights_dir = weights_dir
        self.eos_token_ids = eos_token_ids
        self.seeded = seeded
        self.starts = 1
        self._student: nn.Module | None = None
        self._sign: str | None = None
        self._has_versions = True
        self._outages = 0
        self._processed_at: tuple[int, int] | None = None

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seed: int
    ) -> list[Rollout]:
        """Return ``params.n`` rollouts per prompt, in prompt order; reproducible where seeded.

        Greedy tokens have log mu = 0. A server that lost the weights of ``update_weights`` gets
        them again, as the model has them now, and samples again.
        """
        check_sequence_lengths(prompts, params.max_tokens, self.limits.max_model_len)
        for _ in range(ROUNDS):
            rollouts = self._sample(prompts, params, seed)
            # Asked afterwards: a server that was restarted before or meanwhile shows it now.
            if not self._has_lost_weights():
                return rollouts
            self.starts += 1
            self._connection.show(
                f"{self._connection.name} came back without the run's weights; they are sent again"
            )
            self._send_weights()
        raise self._unsteady("sampling")

    def update_weights(self, model: nn.Module) -> None:
        """Write the weights to a directory, reload them in the server, and reset its prefix cache.

        ``save_pretrained`` would leave a tied ``lm_head.weight`` out, and the CPU engine would
        silently keep its old head. The model is kept, for a server that is restarted later.
        """
        self._student = model
        self._send_weights()

    def forget_prefixes(self) -> None:
        """Reset the server's prefix cache."""
        content = self._dev_request("/reset_prefix_cache", None)
        if not self._decode(content, Reset, "success or failure", "/reset_prefix_cache").success:
            raise self._connection.error(
                f"{self._connection.name} did not reset its prefix cache: other requests are "
                "running on it."
            )

    def _sample(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seed: int
    ) -> list[Rollout]:
        greedy = params.temperature == 0
        count = 1 if greedy else params.n
        at_once = count * min(len(prompts), self._connection.concurrency)
        if not greedy and (params.temperature != 1 or params.top_p < 1):
            self._check_processed(prompts[0])

        async def sample(index: int) -> list[Rollout]:
            prompt = prompts[index]
            settings = plain_sampling(
                n=count,
                temperature=params.temperature,
                top_p=params.top_p,
                max_tokens=params.max_tokens,
                stop_token_ids=sorted({*(self.eos_token_ids or ()), *params.stop_token_ids}),
                ignore_eos=self.eos_token_ids is not None,
                logprobs=0,
            )
            if self.seeded and not greedy:
                # One stream per prompt; vLLM adds 1 for each further completion of a group.
                settings["seed"] = (seed * 2_654_435_761 + index * 65_537) % 2**31
            content = await self._complete(
                prompt,
                max_bytes=answer_bytes(count * (len(prompt) + params.max_tokens), 1),
                seconds=sampling_seconds(at_once, params.max_tokens),
                **settings,
            )
            choices = read_completions(bytes(content), self.origin)
            check_choices(
                len({choice.index for choice in choices} & {*range(count)}),
                count,
                origin=self.origin,
                prompt=index,
            )
            check_choices(len(choices), count, origin=self.origin, prompt=index)
            rollouts = []
            for choice in choices:
                logprobs = [] if choice.logprobs is None else choice.logprobs.token_logprobs
                rollouts.append(
                    make_rollout(
                        prompt,
                        choice.token_ids,
                        [0.0] * len(choice.token_ids) if greedy else logprobs,
                        choice.finish_reason,
                        index,
                        max_tokens=params.max_tokens,
                        vocab_size=self.limits.vocab_size,
                        origin=self.origin,
                    )
                )
            return rollouts * (params.n if greedy else 1)

        groups = self._connection.map(sample, range(len(prompts)))
        return [rollout for group in groups for rollout in group]

    def _has_lost_weights(self) -> bool:
        """Return whether the server is another process than the one that got the weights."""
        if self._student is None:
            return False
        if self._sign is None:
            return self._connection.outages != self._outages
        return self.sign() != self._sign

    def _send_weights(self) -> None:
        """Send the student's weights, again where the server was lost before it had them all."""
        assert self._student is not None
        for _ in range(ROUNDS):
            # Before the weights: a server that is restarted behind this has another sign.
            self._sign = self._give_version() or self.sign()
            self._reload(self._student)
            self._outages = self._connection.outages
            self.forget_prefixes()
            if not self._has_lost_weights():
                return
        raise self._unsteady("a weight update")

    def _give_version(self) -> str | None:
        """Name the weights that are sent next; None where vLLM has no versions."""
        version = f"prime_composer_{secrets.token_hex(8)}"
        request = self._connection.request("POST", VERSION_PATH, {"new_version": version})
        try:
            self._connection.run(request)
        except RequestRefused as refusal:
            if refusal.status not in (404, 405):
                raise self._refusal(refusal, VERSION_PATH) from refusal
            self._has_versions = False
            return None
        self._has_versions = True
        return version

    def sign(self) -> str | None:
        """Return the version of the server's weights, or its start; None: it says neither."""
        if not self._has_versions:
            return self.started()
        path = "/weight_info"
        content = self._asked(path)
        if content is None:
            return None
        return self._decode(content, WeightInfo, "the weights' version", path).weight_version

    def started(self) -> str | None:
        """Return when the server was started, in seconds; None: it does not say."""
        found = START.search(self._asked("/metrics") or b"")
        return None if found is None else found[1].decode()

    def _asked(self, path: str) -> memoryview | None:
        """Return what a server says at a path; None where it refuses."""
        request = self._connection.request("GET", path, max_bytes=METRICS_BYTES)
        try:
            return self._connection.run(request)
        except RequestRefused:
            return None

    def _reload(self, model: nn.Module) -> None:
        from safetensors.torch import save_file

        parent = None if self.weights_dir is None else Path(self.weights_dir)
        with scratch_folder("prime_composer_weights_", parent) as directory:
            directory.chmod(0o755)
            weights = {
                name: value.detach().cpu().contiguous().clone()
                for name, value in weights_to_load(model)
            }
            file = directory / "model.safetensors"
            with naming_file(file):
                save_file(weights, file, metadata={"format": "pt"})
            file.chmod(0o644)  # safetensors 0.8 writes for us alone
            call = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
            self._dev_request("/collective_rpc", call)

    def _dev_request(self, path: str, body: Any) -> memoryview:
        # vLLM answers 500 where it cannot read the weights, which waiting does not change.
        request = self._connection.request("POST", path, body, retried=RETRIED - {500})
        try:
            return self._connection.run(request)
        except RequestRefused as refusal:
            if refusal.status == 404:
                raise self._connection.error(
                    f"{self._connection.name} has no {path}, so its weights cannot be updated; "
                    "start it with VLLM_SERVER_DEV_MODE=1 in its environment."
                ) from refusal
            raise self._refusal(refusal, path) from refusal

    def _check_processed(self, prompt: Sequence[int]) -> None:
        """Refuse raw log-probs. They ignore the temperature: at 2 the two best must come closer."""
        seen = self.starts, self._connection.outages
        if seen == self._processed_at:
            return
        gaps = []
        for temperature in (1.0, 2.0):
            settings = plain_sampling(temperature=temperature, max_tokens=1, logprobs=2)
            work = self._complete(prompt, answer_bytes(len(prompt) + 1, 3), **settings)
            content, path = self._connection.run(work), "/v1/completions"
            answer = self._decode(content, TopChoices, "a completion with log-probs", path)
            gaps.append(sorted(answer.choices[0].logprobs.top_logprobs[0].values())[-2:])
        if max(abs(a - b) for a, b in zip(*gaps, strict=True)) <= 1e-3:
            raise self._connection.error(
                f"{self._connection.name} returns log-probs before temperature and top_p, which "
                "are not those that it samples from; start it with --logprobs-mode "
                "processed_logprobs, or sample at temperature 1 and top_p 1."
            )
        self._processed_at = seen

    def _unsteady(self, work: str) -> ServerError:
        return self._connection.error(
            f"{self._connection.name} was lost {ROUNDS} times during {work}; it does not stay up "
            "long enough. Its own log should say why."
        )


def sampling_seconds(completions: int, max_tokens: int) -> float:
    """Return how long a slow server may sample completions, beyond the time-out of a request."""
    return max(max_tokens / SLOW_COMPLETION, completions * max_tokens / SLOW_SERVER)
