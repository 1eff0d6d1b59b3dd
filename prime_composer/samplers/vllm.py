"""Rollouts from a vLLM engine in this process."""

from prime_composer.backends.vllm import VLLMEngine


class VLLMSampler(VLLMEngine):
    """Rollouts from a vLLM engine in this process (``protocols.Sampler``): log mu is processed.

    See ``VLLMEngine`` for the arguments.
    """

    logprobs_mode = "processed_logprobs"
