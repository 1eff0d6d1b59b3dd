"""Turn solved rollouts of environments into text and examples for small models.

Each role is one token, and so is each end of a tool call. What lies between two such tokens is
tokenized by itself, so a turn that was sampled and the same turn in a later prompt have the same
tokens. Tools are not listed: the model has learned them.
"""

import json
import re
from typing import Any

END_OF_TEXT = "<|endoftext|>"

MARKS = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<tool_call>", "</tool_call>")
"""Special tokens of a model that learns from rollouts."""

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>"
    '{"name": {{ call.function.name | tojson }}, '
    '"arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Writes tool calls as Qwen3 does, in one line of JSON."""

Example = tuple[list[int], list[bool]]  # Token ids, and which of them are learned


def messages_of(transcript: str) -> list[dict[str, Any]]:
    """Return the messages of a transcript as the template reads them: arguments are objects."""
    messages = json.loads(transcript)
    for message in messages:
        for call in message.get("tool_calls") or ():
            function = call["function"]
            if isinstance(function["arguments"], str):
                function["arguments"] = json.loads(function["arguments"])
    return messages


def transcript_texts(transcript: str, tokenizer: Any) -> list[str]:
    """Return the texts of a transcript, messages as JSON, that are tokenized by themselves."""
    text = tokenizer.apply_chat_template(messages_of(transcript), tokenize=False)
    return [
        part for part in re.split("|".join(map(re.escape, (END_OF_TEXT, *MARKS))), text) if part
    ]


def example_of(transcript: str, tokenizer: Any) -> Example:
    """Return the tokens of a transcript. Those that the assistant would sample are learned."""
    messages = messages_of(transcript)
    token_ids: list[int] = []
    learned: list[bool] = []

    def extend(messages: list[dict[str, Any]], prompts: bool, is_learned: bool) -> None:
        rendered = tokenizer.apply_chat_template(
            messages, add_generation_prompt=prompts, tokenize=True, return_dict=False
        )
        assert rendered[: len(token_ids)] == token_ids, "the chat template keeps every turn"
        learned.extend([is_learned] * (len(rendered) - len(token_ids)))
        token_ids[:] = rendered

    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            extend(messages[:index], True, False)
            extend(messages[: index + 1], False, True)
    if not token_ids:
        raise ValueError("a solved task has no message of the assistant")
    return token_ids, learned
