"""A tokenizer with tool turns, and a sampler that answers by script, for tests of environments."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from prime_composer.backends.hf_model import import_transformers
from prime_composer.backends.protocols import Limits, Rollout, SamplingParams

ENVIRONMENTS = Path(__file__).parent / "tiny"

WARNINGS = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
"""verifiers and its servers leave sockets and loops to the garbage collector."""

SPECIAL = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]

TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for t in tools %}{{ t.function.name }}{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}<tool_call>{"name": {{ c.function.name | tojson }}, \
"arguments": {{ c.function.arguments | tojson }}}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Keeps every answer token for token, tool calls in this spelling included."""

STRIPPING = TEMPLATE.replace("m.content or ''", "(m.content or '') | trim")
"""Strips spaces off earlier answers."""

SUMMARY = [{"messages": [{"role": "user", "content": "so far: " + 92 * "a"}]}]
"""A script of tiny-talk: after the first answer the conversation begins anew, with 119 tokens."""


def save_tokenizer(folder: Path, template: str = TEMPLATE) -> Any:
    """Save a tokenizer of single bytes with a chat template, and return it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = import_transformers().PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", additional_special_tokens=SPECIAL
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_student(folder: Path, seed: int, **changes: Any) -> Path:
    """Save a random model with this tokenizer, and return its folder."""
    tokenizer = save_tokenizer(folder)
    torch.manual_seed(seed)
    transformers = import_transformers()
    settings = {
        "vocab_size": len(tokenizer),
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 32,  # vLLM's smallest
        "max_position_embeddings": 512,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    config = transformers.LlamaConfig(**settings | changes)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


class Scripted:
    """A sampler whose answers a function of the prompt's text decides."""

    def __init__(self, tokenizer: Any, reply: Callable[[str], str], room: int = 4096):
        self.tokenizer, self.reply = tokenizer, reply
        self.limits = Limits(max_model_len=room, vocab_size=len(tokenizer))
        self.calls: list[list[str]] = []  # texts of the prompts of each call
        self.seeds: list[int] = []  # of each call
        self.sampled: list[Rollout] = []  # in order

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seed: int
    ) -> list[Rollout]:
        texts = [self.tokenizer.decode(list(prompt)) for prompt in prompts]
        self.calls.append(texts)
        self.seeds.append(seed)
        rollouts = []
        for index, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            ids = self.tokenizer.encode(self.reply(text), add_special_tokens=False)
            ids.append(self.tokenizer.eos_token_id)
            reason = "length" if len(ids) > params.max_tokens else "stop"
            ids = ids[: params.max_tokens]
            mask = torch.tensor([False] * len(prompt) + [True] * len(ids))
            # A log mu of its own for each token, so that a shift by one shows.
            logprobs = torch.full(mask.shape, torch.nan)
            first = 1 + sum(len(one.token_ids) for one in self.sampled)
            logprobs[mask] = -torch.arange(first, first + len(ids)) / 1000
            rollouts.append(Rollout(torch.tensor([*prompt, *ids]), mask, logprobs, reason, index))
            self.sampled.append(rollouts[-1])
        return rollouts

    def update_weights(self, model: object) -> None: ...

    def close(self) -> None: ...
