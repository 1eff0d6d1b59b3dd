"""Student rollouts and teacher scores from vLLM engines inside this process.

Which log-probs. The sampler runs the engine with ``logprobs_mode="processed_logprobs"``: mu is the distribution a token
was truly drawn from, after temperature and after top-p cut the tail *and the rest was renormalised*. At temperature 1
and top_p 1 that is the policy itself. A greedy rollout (temperature 0) is drawn from a point mass, so its log mu is 0.
The scorer's numbers are always those of the full vocabulary at temperature 1, whatever the rollout was sampled with.

On a CPU build the engine is eager, and its key-value cache has a fixed size. On a CUDA build vLLM's own defaults hold,
except for the share of GPU memory: written from vLLM's documentation, not run here, where no GPU is at hand.
"""

import gc
import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from prime_composer.backends.alignment import (
    Scored,
    check_lengths,
    check_support_size,
    make_rollout,
    place,
    sequences_to_score,
    top_k,
)
from prime_composer.backends.cpu_guard import built_for_cpu, import_vllm, preserved_rng
from prime_composer.backends.protocols import Rollout, SamplingParams, TeacherScores

GPU_MEMORY_SHARE = 0.3
"""Share of the GPU's memory per engine: sampler, scorer and trainer live on one GPU."""


class Engine:
    """A vLLM engine in this process: what sampler and scorer share.

    Args:
        model: a directory or a hub id.
        dtype: of weights and activations; float32 agrees with a float32 trainer to 1e-4, bfloat16 to about 0.1 nat.
        max_model_len: the longest sequence, prompt and completion together, plus one. None reads the model's limit.
        max_logprobs: the largest K that a request may ask for; "full" for the whole vocabulary.
        kv_cache_memory_bytes: size of the key-value cache. None: on a CPU build room for up to 256 sequences within
            1 GiB, on a GPU what ``gpu_memory_utilization`` leaves.
        gpu_memory_utilization: share of the GPU's memory for this engine; without meaning on a CPU build.
        enforce_eager: None is True on a CPU build and False (compiled, CUDA graphs) on a GPU.
        seed: seed of the engine's start. Sampling is seeded per call.
        eos_token_ids: where a completion ends, beside ``SamplingParams.stop_token_ids``. None reads them from the
            model's generation config, config and tokenizer.
        engine_args: anything else that ``vllm.LLM`` takes, for example ``{"max_num_seqs": 64}``.

    Raises:
        ImportError: vLLM is not installed.
        ValueError: vLLM refused the configuration; the message is vLLM's.
    """

    logprobs_mode = "raw_logprobs"

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str = "float32",
        max_model_len: int | None = None,
        max_logprobs: int | Literal["full"] = 20,
        kv_cache_memory_bytes: int | None = None,
        gpu_memory_utilization: float = GPU_MEMORY_SHARE,
        enforce_eager: bool | None = None,
        seed: int = 0,
        eos_token_ids: Sequence[int] | None = None,
        engine_args: dict[str, Any] | None = None,
    ):
        vllm = import_vllm()
        self._vllm = vllm
        cpu = built_for_cpu()
        self.model = str(model)
        arguments: dict[str, Any] = {
            "model": self.model,
            "dtype": dtype,
            "max_model_len": max_model_len,
            "max_logprobs": -1 if max_logprobs == "full" else max_logprobs,
            "logprobs_mode": self.logprobs_mode,
            "enforce_eager": cpu if enforce_eager is None else enforce_eager,
            "seed": seed,
            # Token ids go in and come out, so the engine needs no tokenizer and no default sampling settings.
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
        }
        if cpu:
            if kv_cache_memory_bytes is None:
                kv_cache_memory_bytes = default_kv_cache_bytes(self.model, dtype, max_model_len)
        else:
            arguments["gpu_memory_utilization"] = gpu_memory_utilization
        if kv_cache_memory_bytes is not None:
            arguments["kv_cache_memory_bytes"] = kv_cache_memory_bytes
        arguments |= engine_args or {}
        with preserved_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._llm = vllm.LLM(**arguments)
        config = self._llm.model_config
        self.max_model_len: int = config.max_model_len
        self.vocab_size: int = config.get_vocab_size()
        if eos_token_ids is None:
            from prime_composer.backends.hf_model import read_eos_token_ids

            eos_token_ids = read_eos_token_ids(self.model)
        self.eos_token_ids = tuple(eos_token_ids)
        self.max_logprobs: int = (
            self.vocab_size if config.max_logprobs == -1 else config.max_logprobs
        )

    @property
    def llm(self):
        """The ``vllm.LLM`` itself."""
        if self._llm is None:
            raise ValueError(f"The engine of {self.model} is closed; make a new one.")
        return self._llm

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seed: int
    ) -> list[Rollout]:
        """``params.n`` rollouts per prompt, in prompt order; the same seed and weights give the same rollouts.

        A scorer's engine generates too (a teacher's accuracy), but its log mu is the raw one, right at T = 1 and top-p 1.

        The engine draws from torch's global generator, which is seeded for the call and put back after it. (A seed per
        request would be vLLM's own way; its CPU build cannot use it beside a partially prefilled prompt.)

        Raises:
            ValueError: a prompt and ``max_tokens`` together do not fit into ``max_model_len``, or a prompt is empty.
        """
        prompts = [list(ids) for ids in prompts]
        check_lengths(prompts, params.max_tokens, self.max_model_len)
        greedy = params.temperature == 0
        request = self._vllm.SamplingParams(
            n=1
            if greedy
            else params.n,  # n greedy completions are n times the same one; vLLM refuses to compute them
            temperature=params.temperature,
            top_p=params.top_p,
            max_tokens=params.max_tokens,
            stop_token_ids=sorted({*self.eos_token_ids, *params.stop_token_ids}),
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
        )
        # What an earlier call cached must not change this call's batches, and with them its numbers.
        self.forget_prefixes()
        with preserved_rng():
            torch.manual_seed(seed)
            random.seed(seed)
            outputs = self._run(prompts, request)
        rollouts = []
        for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            for completion in sorted(output.outputs, key=lambda completion: completion.index):
                logprobs = (
                    [0.0] * len(completion.token_ids) if greedy else completion.logprobs.logprobs
                )
                rollout = make_rollout(
                    prompt, completion.token_ids, logprobs, completion.finish_reason, index
                )
                rollouts.extend([rollout] * (params.n if greedy else 1))
        return rollouts

    def update_weights(self, model: nn.Module) -> None:
        """Load the model's weights in place, and forget every cached prefix computed with the old ones.

        The names come from ``state_dict()``: unlike ``named_parameters()`` it lists ``lm_head.weight`` when it is tied
        to the embeddings, and without it the CPU engine goes on with the old, repacked head and says nothing.
        """
        weights = iter(model.state_dict().items())
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self.forget_prefixes()

    def forget_prefixes(self) -> None:
        if not self.llm.reset_prefix_cache():
            raise RuntimeError(
                "vLLM did not reset its prefix cache: a request is still running on this engine."
            )

    def close(self) -> None:
        """Free the engine's memory. Closing twice is harmless."""
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _run(self, prompts: list[list[int]], params) -> list:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.llm.generate(
                [{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False
            )


class VLLMSampler(Engine):
    """Rollouts from a vLLM engine in this process (``rollout.Sampler``): an ``Engine`` whose log mu is processed."""

    logprobs_mode = "processed_logprobs"


class VLLMScorer(Engine):
    """Teacher scores from a vLLM engine in this process (``scorer.Scorer``). See ``Engine`` for the arguments.

    ``max_logprobs`` has to be at least the K that is asked for. ``update_weights`` is there for a teacher that moves:
    the policy itself, or its average.
    """

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
            ValueError: K above the engine's limit or the vocabulary, or a sequence too long for the engine.
        """
        k = check_support_size(support_size, self.vocab_size, self.max_logprobs, "max_logprobs")
        scored = sequences_to_score(rollouts, prompts)
        if not scored:
            return []
        check_lengths([s.token_ids for s in scored], 1, self.max_model_len)
        request = self._vllm.SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=k, flat_logprobs=True, detokenize=False
        )
        with lean_prompt_logprobs(scored):
            outputs = self._run([s.token_ids for s in scored], request)
        results = []
        for rollout, s, output in zip(rollouts, scored, outputs, strict=True):
            ids, logprobs = parse_prompt_logprobs(output.prompt_logprobs, s.token_ids, s.start, k)
            results.append(
                place(len(rollout.token_ids), s, logprobs[:, 0], ids[:, 1:], logprobs[:, 1:])
            )
        return results


@contextmanager
def lean_prompt_logprobs(scored: Sequence[Scored]) -> Iterator[None]:
    """Let the engine find the top K at the tokens of interest alone, and hand over tensors.

    On its own vLLM also ranks the tokens of the prompt, and unpacks every entry into a Python number: at K = 32 that
    costs a small model more than half of its own time again. What cannot be recognised (a prompt prefilled in pieces, a
    vLLM that is built otherwise) goes vLLM's own way, and ``parse_prompt_logprobs`` reads either.

    Can go once vLLM takes ``prompt_logprob_start`` for a top K on every platform and returns arrays.
    """
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.sample.sampler import Sampler

    gather, unpack = Sampler.gather_logprobs, LogprobsProcessor._update_prompt_logprobs
    starts: dict[tuple[int, ...], int] = {}
    for s in scored:
        tokens = tuple(s.token_ids[1:])
        starts[tokens] = min(s.start - 1, starts.get(tokens, s.start - 1))

    def gather_where_it_counts(logprobs: Tensor, num_logprobs: int, token_ids: Tensor):
        first = starts.get(tuple(token_ids.tolist()))
        if first is None:
            return gather(logprobs, num_logprobs, token_ids)
        ids = token_ids.new_zeros((len(token_ids), num_logprobs + 1))
        values = logprobs.new_zeros(ids.shape)
        ids[:, 0] = token_ids
        values[:, :1] = logprobs.gather(1, token_ids.unsqueeze(1))
        values[first:, 1:], ids[first:, 1:] = top_k(logprobs[first:], num_logprobs)
        return LogprobsTensors(ids.int(), values, token_ids.new_zeros(len(token_ids)))

    def keep(self, tensors) -> None:
        self.prompt_logprobs = [tensors]

    Sampler.gather_logprobs = staticmethod(gather_where_it_counts)
    LogprobsProcessor._update_prompt_logprobs = keep
    try:
        yield
    finally:
        Sampler.gather_logprobs = staticmethod(gather)
        LogprobsProcessor._update_prompt_logprobs = unpack


def parse_prompt_logprobs(
    answer, token_ids: list[int], start: int, k: int
) -> tuple[Int[Tensor, "scored k_1"], Float[Tensor, "scored k_1"]]:
    """Ids and log-probs of the tokens [start, end): the token itself, then the top K, most probable first.

    Row i of vLLM's answer speaks about token i + 1, for token 0 has no context, and starts with that token's own id,
    which proves the alignment.

    Args:
        answer: vLLM's tensors (``lean_prompt_logprobs``), or its flat lists.
        token_ids: what was scored.
        start: the first token of interest.
        k: the K that was asked for.
    """
    if isinstance(answer, list) and len(answer) == 1:
        ids, logprobs = answer[0].logprob_token_ids, answer[0].logprobs
    else:
        ids = torch.from_numpy(np.array(answer.token_ids, dtype=np.int64))
        logprobs = torch.from_numpy(np.array(answer.logprobs, dtype=np.float32))
    if ids.numel() != (len(token_ids) - 1) * (k + 1):
        raise RuntimeError(
            f"vLLM answered {ids.numel()} prompt log-probs for {len(token_ids)} tokens at K = {k}, not "
            f"{(len(token_ids) - 1) * (k + 1)}: this version lays them out differently from 0.32."
        )
    ids, logprobs = ids.view(-1, k + 1)[start - 1 :].long(), logprobs.view(-1, k + 1)[start - 1 :]
    if ids[:, 0].tolist() != token_ids[start:]:
        raise RuntimeError(
            "vLLM's prompt log-probs do not belong to the tokens sent: their alignment changed."
        )
    return ids, logprobs


def default_kv_cache_bytes(model: str, dtype: str, max_model_len: int | None) -> int:
    """Room for 256 sequences within 64 MiB to 1 GiB, and for two sequences in any case."""
    from prime_composer.backends.hf_model import read_config

    config = read_config(model)
    length = max_model_len or config.max_position_embeddings
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = 4 if dtype == "float32" else 2
    # One block of 128 tokens is the smallest unit that the CPU build hands out.
    per_sequence = (
        2 * config.num_hidden_layers * heads * head_dim * size * (-(-length // 128) * 128)
    )
    return max(2 * per_sequence, min(max(256 * per_sequence, 64 * 2**20), 2**30))
