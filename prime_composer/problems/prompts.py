"""Write prompts and answers as text and as token ids.

What a problem says is data. Where it contains the text of a special token, such as ``<|im_end|>``,
that becomes the tokens of a plain text, and not the token that ends a turn.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from prime_composer.problems.config import CHAT_KEYS, DataConfig, Message, Problem, Tokenizer

FIRST_MARK = 0xE000  # Private use: stands for a special token's text while data is rendered

TRIED_TOKENS = 64  # Special tokens with which a tokenizer is tried

WORD = re.compile(r"\w+")  # What a chat template has to write of a message

REASONING = re.compile("(?i)think|thought|reasoning")
"""Is in the tokens before and behind reasoning."""

REASONED = re.compile(r"(?i)(?:/|END_)[\w:]*(?:think|thinking|thought|reasoning)(?:\|?>|\])")
"""Ends reasoning, as models of different makers write it: ``</think>``, ``[/THINK]``."""

LEADING = 32  # Characters of a text in front of which a tokenizer shows what it writes there

SPECIMEN = "Forty-two"  # An answer, to see what a chat template writes around one


@dataclass(frozen=True)
class Ends:
    """What ends a text of a run."""

    ids: tuple[int, ...]  # every id that ends one, in ascending order
    answer: int | None  # of an answer whose chat template writes none of ``ids``

    @classmethod
    def of(cls, tokenizer: Any, turns: Set[int], others: Set[int] = frozenset()) -> "Ends":
        """Return those of a tokenizer, of what chat templates write, and others."""
        eos = getattr(tokenizer, "eos_token_id", None)
        own = [] if eos is None else [eos]
        preferred = [*sorted(turns), *own, *sorted(others)]
        return cls(tuple(sorted({*preferred})), next(iter(preferred), None))


def prompt_text(problem: Problem, config: DataConfig) -> str:
    """Return the prompt as text, before any chat template. Only ``{question}`` is replaced."""
    return config.prompt_template.replace("{question}", problem.question)


def answer_text(answer: str, config: DataConfig) -> str:
    """Return an answer behind a prompt: after a space, except in chats and after a line break."""
    follows = config.chat_template or config.prompt_template[-1:].isspace()
    return answer if follows else f" {answer}"


def prompt_messages(problem: Problem, config: DataConfig) -> list[dict[str, str]]:
    """Return the prompt as messages, before any chat template."""
    turns = [*problem.context, Message("user", prompt_text(problem, config))]
    if config.system is not None and turns[0].role != "system":
        turns.insert(0, Message("system", config.system))
    return [message_of(*turn) for turn in turns]


def message_of(role: str, content: str, reasoning: str = "") -> dict[str, str]:
    """Return a message under the names that chat templates read."""
    thought = {"reasoning_content": reasoning} if reasoning else {}
    return {"role": role, **thought, "content": content}


def asked_texts(problem: Problem) -> list[str]:
    """Return the texts of the data that are asked."""
    turns = (text for turn in problem.context for text in (turn.content, turn.reasoning))
    return [problem.question, *turns]


def render_prompt(problem: Problem, config: DataConfig, tokenizer: Tokenizer) -> list[int]:
    """Return the prompt's token ids."""
    marks = marks_of(tokenizer, asked_texts(problem))
    if config.chat_template:
        text = chat_text(problem, config, tokenizer, marks)
        _check_written(problem, config, _restore(text, marks))
        return encode(tokenizer, text, marks)
    lead = _lead(tokenizer, prompt_text(problem, config))
    marked = replace(problem, question=_replace(problem.question, marks))
    return [*lead, *encode(tokenizer, prompt_text(marked, config), marks)]


def render_answer(
    problem: Problem, answer: str, config: DataConfig, tokenizer: Any, ends: Ends
) -> list[int]:
    """Return an answer's token ids as they follow those of the prompt, with the id that ends it."""
    if ends.answer is None:
        raise ValueError(
            "the student has no end of text, and the data's answers need one: set eos_token_id in "
            "its generation_config.json, or rollout.stop"
        )
    answer = _without_end(answer, tokenizer, ends)
    marks = marks_of(tokenizer, [answer, problem.reasoning, *asked_texts(problem)])
    if not config.chat_template:
        marked = replace(problem, question=_replace(problem.question, marks))
        prompt = prompt_text(marked, config)
        whole = prompt + _replace(answer_text(answer, config), marks)
        eos = tokenizer.eos_token_id  # also beside data that goes through the chat template
        last = eos if eos in ends.ids else ends.answer
        return [*_behind(prompt, whole, tokenizer, marks), last]
    prompt = chat_text(problem, config, tokenizer, marks)
    whole = chat_text(problem, config, tokenizer, marks, answer)
    _check_written(problem, config, _restore(whole, marks), answer)
    if not whole.startswith(prompt):
        raise ValueError(
            f"the tokenizer's chat template asks with {prompt[-60:]!r} and writes the answered "
            f"question as {whole[-len(answer) - 60 :]!r}, which does not begin so: write the "
            "data's answers as the template reads them (with their reasoning, for a model that "
            "reasons), or give the student a template that keeps its own prompt"
        )
    ids = _behind(prompt, whole, tokenizer, marks)
    end = next((place for place, one in enumerate(ids) if one in ends.ids), None)
    if end is not None:
        return ids[: end + 1]
    _, turn = around_answer(problem, config, tokenizer)
    if turn in ids:  # rollout.stop is in the place of the template's end
        return [*ids[: ids.index(turn)], ends.answer]
    return [*_behind(prompt, whole.rstrip(), tokenizer, marks), ends.answer]


def _behind(prompt: str, whole: str, tokenizer: Any, marks: Mapping[str, str]) -> list[int]:
    """Return the ids of what a text has behind a prompt that it begins with.

    Some tokenizers would write a space in front of it if it stood alone.
    """
    before, ids = (encode(tokenizer, text, marks) for text in (prompt, whole))
    if ids[: len(before)] == before:
        return ids[len(before) :]
    # A token reaches from the one into the other, which no sampled answer has.
    return encode(tokenizer, whole[len(prompt) :], marks)


def chat_text(
    problem: Problem,
    config: DataConfig,
    tokenizer: Any,
    marks: Mapping[str, str],
    answer: str | None = None,
) -> str:
    """Return a problem as the tokenizer's chat template writes it, with or without an answer."""
    if getattr(tokenizer, "chat_template", None) is None:
        because = next((key for key in CHAT_KEYS if getattr(config, key) is not None), None)
        remedy = "set it to false" if because is None else f"{because} needs one"
        raise ValueError(
            f"[data] chat_template = true, but this model's tokenizer has none; {remedy}"
        )
    messages = prompt_messages(problem, config)
    if answer is not None:
        messages.append(message_of("assistant", answer, problem.reasoning))
    return _as_template_writes(messages, tokenizer, marks, config.template_args, answer is None)


def render_messages(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    template_args: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[int]:
    """Return the token ids of a conversation, and of what an answer to it begins with."""
    marks = marks_of(tokenizer, (text for one in messages for text in _said(one).values()))
    args = {**(template_args or {}), **({"tools": tools} if tools else {})}
    return encode(tokenizer, _as_template_writes(messages, tokenizer, marks, args), marks)


def _as_template_writes(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    marks: Mapping[str, str],
    args: Mapping[str, Any] | None,
    answers: bool = True,
) -> str:
    """Return messages, with marks in their data, as the chat template writes them.

    ``answers``: whether it writes what an answer begins with behind them.
    """
    marked = [
        {**one, **{key: _replace(text, marks) for key, text in _said(one).items()}}
        for one in messages
    ]
    try:
        text: str = tokenizer.apply_chat_template(
            marked, add_generation_prompt=answers, tokenize=False, **(args or {})
        )
    except Exception as error:  # templates are programs, and raise what they like
        roles = [str(message.get("role")) for message in messages]
        asked = [one.get("content") for one in messages if one.get("role") == "user"][-1:]
        raise ValueError(
            f"the tokenizer's chat template refuses the messages ({', '.join(roles)}) of the "
            f"question {str(*asked)[:60]!r}: {error}. Change the data, or the chat template"
        ) from error
    return text


def _said(message: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of a message that are data."""
    own = {key: message.get(key) for key in ("content", "reasoning_content")}
    return {key: text for key, text in own.items() if isinstance(text, str)}


def around_answer(
    problem: Problem, config: DataConfig, tokenizer: Any
) -> tuple[str | None, int | None]:
    """Return what the template writes between its prompt and an answer, and the id behind it."""
    try:
        prompt = chat_text(problem, config, tokenizer, {})
        whole = chat_text(problem, config, tokenizer, {}, SPECIMEN)
    except ValueError:
        return None, None
    before, specimen, after = whole.rpartition(SPECIMEN)
    if not specimen:  # it leaves answers out
        return None, None
    ids = tokenizer.encode(after, add_special_tokens=False)
    end = next((one for one in ids if one in _added(tokenizer)), None)
    return before.removeprefix(prompt) if before.startswith(prompt) else None, end


def idle_arguments(problem: Problem, config: DataConfig, tokenizer: Any) -> list[str]:
    """Return those of ``template_args`` without which the chat template writes the same."""
    args, idle = config.template_args or {}, []
    for name in args:
        others = {key: value for key, value in args.items() if key != name}
        without = config.model_copy(update={"template_args": others})
        both = (
            [chat_text(problem, one, tokenizer, {}, answer) for answer in (None, SPECIMEN)]
            for one in (config, without)
        )
        if next(both) == next(both):
            idle.append(name)
    return idle


def drops_reasoning(problem: Problem, config: DataConfig, tokenizer: Any) -> bool:
    """Return whether the chat template leaves out the reasoning beside an answer."""
    if not problem.reasoning:
        return False
    return problem.reasoning.strip() not in chat_text(
        problem, config, tokenizer, {}, problem.answer
    )


def ends_of_chat(tokenizer: Any) -> set[int]:
    """Return the id with which a chat template ends an answer to one message, if it has one."""
    chat = DataConfig(chat_template=True, prompt_template="{question}")
    _, end = around_answer(Problem("Why?", ""), chat, tokenizer)
    return set() if end is None else {end}


def marks_of(tokenizer: Any, data: Iterable[str]) -> dict[str, str]:
    """Return the special tokens whose texts stand in some data, the longest first, with marks."""
    special, text = control_tokens(tokenizer), "\n".join(data)
    if not any(first in text for first in _firsts(tokenizer)):
        return {}
    found = {*tokenizer.encode(text, add_special_tokens=False)} & special.keys()
    tokens = sorted({special[one] for one in found if special[one] in text}, key=len, reverse=True)
    free = (chr(code) for code in range(FIRST_MARK, FIRST_MARK + 6400) if chr(code) not in text)
    return dict(zip(tokens, free, strict=False))


def encode(tokenizer: Any, text: str, marks: Mapping[str, str]) -> list[int]:
    """Return the ids of a text, in which ``marks`` stand for texts of its data."""
    if marks and reads_plainly(tokenizer):
        return _pieces(tokenizer, text, marks)
    return list(tokenizer.encode(_restore(text, marks), add_special_tokens=False))


@lru_cache(maxsize=8)
def reads_plainly(tokenizer: Any) -> bool:
    """Return whether a tokenizer reads what stands between special tokens as it reads it alone."""
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        return False
    tokens = [*control_tokens(tokenizer).values()][:TRIED_TOKENS]
    texts = [f"a {token}b c{token} d\n{token}\nE 1" for token in tokens]
    own = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    return own == [_pieces(tokenizer, text, {}) for text in texts]


def _pieces(tokenizer: Any, text: str, marks: Mapping[str, str]) -> list[int]:
    """Return the ids of a text, encoded between its special tokens."""
    added, plain = _added(tokenizer), _plain(tokenizer)
    ids: list[int] = []
    for one in tokenizer.encode(text, add_special_tokens=False):
        token, special = added.get(one, ("", False))
        if special and token in text:
            piece, _, text = text.partition(token)
            ids += [*plain.encode(_restore(piece, marks), add_special_tokens=False).ids, one]
    return ids + plain.encode(_restore(text, marks), add_special_tokens=False).ids


@lru_cache(maxsize=8)
def _plain(tokenizer: Any) -> Any:
    """Return the tokenizer of the library `tokenizers` that reads special tokens as plain text."""
    from tokenizers import Tokenizer

    plain = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    plain.encode_special_tokens = True
    return plain


@lru_cache(maxsize=8)
def control_tokens(tokenizer: Any) -> Mapping[int, str]:
    """Return the tokens that control a model, by id. They have no other meaning in a text.

    Those around reasoning are not among them, which some makers call special: data has them, too.
    """
    added = _added(tokenizer).items()
    return {one: text for one, (text, special) in added if special and not REASONING.search(text)}


@lru_cache(maxsize=8)
def _firsts(tokenizer: Any) -> set[str]:
    """Return the characters with which special tokens begin. Most data has none of them."""
    return {text[0] for text in control_tokens(tokenizer).values() if text}


@lru_cache(maxsize=8)
def _added(tokenizer: Any) -> dict[int, tuple[str, bool]]:
    """Return the tokens that were added to a vocabulary, by id, and whether each is special."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {one: (token.content, token.special) for one, token in added.items()}


def _lead(tokenizer: Any, text: str) -> list[int]:
    """Return what the tokenizer writes in front of a text. Some write an end behind it, too."""
    head = text.lstrip()[:LEADING]  # all that it takes to see, and a long text takes long
    bare, whole = (tokenizer.encode(head, add_special_tokens=own) for own in (False, True))
    spans = range(len(whole) - len(bare) + 1)
    start = next((at for at in spans if whole[at : at + len(bare)] == bare), 0)
    return list(whole[:start])


def _without_end(answer: str, tokenizer: Any, ends: Ends) -> str:
    """Return an answer without the text of an end that the data has written itself."""
    tokens = [text for one in ends.ids if (text := _added(tokenizer).get(one, ("",))[0])]
    stripped = answer.rstrip()
    end = next((token for token in tokens if stripped.endswith(token)), None)
    return answer if end is None else _without_end(stripped.removesuffix(end), tokenizer, ends)


def _check_written(problem: Problem, config: DataConfig, text: str, answer: str = "") -> None:
    """Refuse a chat template that leaves out words of a message. Templates trim and escape, and
    leave out the reasoning of earlier turns on purpose."""
    messages = [*prompt_messages(problem, config), message_of("answer", answer)]
    parts = [(message["role"], message["content"]) for message in messages]
    words = [
        WORD.findall(content if role == "answer" else REASONED.split(content)[-1])
        for role, content in parts
    ]
    counts, written = Counter(word for own in words for word in own), Counter(WORD.findall(text))
    # A word may stand inside one of the template's. Only few are looked for in the whole text.
    missing = {
        word for word, count in counts.items() if written[word] < count and text.count(word) < count
    }
    if missing:
        lost = [sum(word in missing for word in own) for own in words]
        role, content = parts[lost.index(max(lost))]
        keys = {
            "system": ("system", "system_key", "messages_key"),
            "answer": ("messages_key", "answer_key"),
        }.get(role, ("messages_key", "prompt_template"))
        key = next(key for key in keys if getattr(config, key) is not None)
        raise ValueError(
            f"[data] {key}: the tokenizer's chat template leaves out some of {content[:60]!r}, "
            f"which is of the {role}; leave it out, or give the tokenizer a template that writes it"
        )


def _replace(text: str, marks: Mapping[str, str]) -> str:
    for token, mark in marks.items():
        text = text.replace(token, mark)
    return text


def _restore(text: str, marks: Mapping[str, str]) -> str:
    return _replace(text, {mark: token for token, mark in marks.items()})
