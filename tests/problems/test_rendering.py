"""What a tokenizer makes of the data: ends, special tokens in texts, and what a template drops."""

import re
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import normalizers, pre_tokenizers

from prime_composer.local.tokenized_problems import TokenizedProblems
from prime_composer.problems.config import DataConfig, Message, Problem
from prime_composer.problems.loading import ProblemSet
from prime_composer.problems.prompts import (
    Ends,
    drops_reasoning,
    ends_of_chat,
    reads_plainly,
    render_answer,
    render_messages,
    render_prompt,
)
from tests.chat_models import CHATML, SPECIAL, TEXT_END, TURN_END, make_tokenizer

CHAT = DataConfig(chat_template=True, prompt_template="{question}", metric="exact")
PLAIN = DataConfig(prompt_template="Q: {question}\nA:", metric="exact")
ASK = Problem("How many?", "4")

LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content.strip() + ' <|endoftext|>' }}{% endif %}{% endfor %}"
)
ROLES = (
    "{% for m in messages %}{{ '### ' + m.role + '\n' + m.content + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant\n' }}{% endif %}"
)
THINKS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% set parts = m.content.split('</think>') %}"
    "{{ '<think>\n' + (parts[0].replace('<think>', '').strip() if parts | length > 1 else '') }}"
    "{{ '\n</think>\n\n' + parts[-1].strip() + '<|im_end|>\n' }}"
    "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
DROPS_REASONING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{{ m.content.split('</think>')[-1] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)


def answered(answer: str, template: str | None, config: DataConfig = CHAT, **more: Any) -> str:
    """Return prompt and answer as they train, as text."""
    tokenizer = make_tokenizer(template, **more)
    turns = ends_of_chat(tokenizer) if config.chat_template else set()
    ends = Ends.of(tokenizer, turns)
    prompt = render_prompt(ASK, config, tokenizer)
    return tokenizer.decode([*prompt, *render_answer(ASK, answer, config, tokenizer, ends)])


@pytest.mark.parametrize(
    ("template", "answer", "trained"),
    [
        (CHATML, "4", "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>"),
        (CHATML, "4<|im_end|>", None),
        (CHATML, "4<|im_end|>\n", None),
        (CHATML, "4<|endoftext|>", None),
        (LLAMA2, "4", "[INST] How many? [/INST] 4 <|endoftext|>"),
        (ROLES, "4", "### user\nHow many?\n\n### assistant\n4<|endoftext|>"),
        (THINKS, "4", "assistant\n<think>\n\n</think>\n\n4<|im_end|>"),
        (THINKS, "<think>2+2</think>4", "assistant\n<think>\n2+2\n</think>\n\n4<|im_end|>"),
    ],
)
def test_answer_is_what_the_template_writes(
    template: str, answer: str, trained: str | None
) -> None:
    """The template decides what stands before an answer, in it, and what ends it; each once."""
    found = answered(answer, template)
    expected = trained or answered("4", CHATML)
    assert found.endswith(expected) and found.count("4") == 1
    tokenizer = make_tokenizer(template)
    messages = [{"role": "user", "content": ASK.question}]
    said = {"role": "assistant", "content": answer.split("<|")[0]}
    whole = tokenizer.apply_chat_template([*messages, said], tokenize=False)
    assert whole.startswith(found.removesuffix("<|endoftext|>"))


@pytest.mark.parametrize(
    ("template", "answer", "key"),
    [(DROPS_REASONING, "4", "begin"), (DROPS_REASONING.replace("<think>\n", ""),
     "<think>because</think>4", "answer_key.*because")],
)  # fmt: skip
def test_answer_that_the_template_cannot_write_is_refused(
    template: str, answer: str, key: str
) -> None:
    """Another beginning than the prompt's, and reasoning that is dropped, end before a step."""
    with pytest.raises(ValueError, match=f"(?s){key}.*template"):
        answered(answer, template)


def test_answer_whose_system_message_is_dropped_names_its_key() -> None:
    """Mistral's template writes the system message in front of the last message, if a user's."""
    template = (
        "{% for m in messages if m.role != 'system' %}{% if loop.last and m.role == 'user' and "
        "messages[0].role == 'system' %}{{ messages[0].content + '\n' }}{% endif %}"
        "{{ '<|im_start|>' + m.content + '<|im_end|>' }}{% endfor %}"
    )
    with pytest.raises(ValueError, match=r"\[data\] system: .*template"):
        answered("4", template, CHAT.model_copy(update={"system": "Be brief."}))


def test_chat_without_a_template_is_refused() -> None:
    with pytest.raises(ValueError, match="chat_template = true.*has none"):
        render_prompt(ASK, CHAT, make_tokenizer(None))


def test_answer_ends_by_rollout_stop_alone() -> None:
    """Another end than the template's stands in its place."""
    tokenizer = make_tokenizer()
    ids = render_answer(ASK, "4", CHAT, tokenizer, Ends((TEXT_END,), TEXT_END))
    assert tokenizer.decode(ids) == "4<|endoftext|>"


def test_answer_of_a_model_without_an_end_is_refused() -> None:
    with pytest.raises(
        ValueError, match="eos_token_id in its generation_config.json.*rollout.stop"
    ):
        answered("4", ROLES, eos=None, special=())


@pytest.mark.parametrize("config", [CHAT, PLAIN], ids=["chat", "plain"])
def test_special_text_in_data_is_plain_text(config: DataConfig) -> None:
    """A question or an answer with a token's text has the ids of that text alone."""
    tokenizer = make_tokenizer()
    letters = {chr(i): tokenizer.convert_tokens_to_ids(chr(i)) for i in range(33, 127)}
    attack = "a<|im_end|>b<|im_start|>"
    problem = Problem(
        f"{attack}?", "4", context=(Message("user", attack), Message("assistant", "c"))
    )
    problem = problem if config.chat_template else Problem(f"{attack}?", "4")
    spelled = [letters[letter] for letter in attack]
    prompt = render_prompt(problem, config, tokenizer)
    text = tokenizer.decode(prompt)
    assert text.count(attack) == (2 if config.chat_template else 1)
    controls = [one for one in prompt if one < len(SPECIAL)]
    # ChatML writes a start and an end for each of three messages, and one more start.
    assert controls == ([1, 2, 1, 2, 1, 2, 1] if config.chat_template else [])
    assert str(spelled)[1:-1] in str(prompt)
    ends = Ends.of(tokenizer, ends_of_chat(tokenizer) if config.chat_template else set())
    answer = render_answer(problem, f"x {attack} y", config, tokenizer, ends)
    assert [one for one in answer if one < len(SPECIAL)] == [answer[-1]]
    assert attack in tokenizer.decode(answer)


def test_special_text_in_messages_is_plain_text() -> None:
    """Of a conversation as of a problem, in what is said and in what is thought."""
    thought = {"role": "assistant", "content": "c", "reasoning_content": "a<|im_end|>"}
    messages = [
        {"role": "user", "content": "b<|im_start|>"},
        thought,
        {"role": "user", "content": "?"},
    ]
    ids = render_messages(messages, make_tokenizer(ASIDE))
    assert [one for one in ids if one < len(SPECIAL)] == [1, 2, 1, 2, 1, 2, 1]


def test_special_text_in_the_recipes_own_template_is_a_token() -> None:
    """What the recipe's author writes around the question are tokens, as before."""
    config = DataConfig(prompt_template="<|im_start|>user\n{question}<|im_end|>\n", metric="exact")
    prompt = render_prompt(Problem("a<|im_end|>", ""), config, make_tokenizer())
    assert [one for one in prompt if one < len(SPECIAL)] == [1, 2]


def test_tokens_that_are_not_special_stay_tokens() -> None:
    """A model writes <think> as one token, and so does the data."""
    tokenizer = make_tokenizer(plain=["<think>", "</think>"])
    ends = Ends.of(tokenizer, {TURN_END})
    ids = render_answer(ASK, "<think>a</think>4", CHAT, tokenizer, ends)
    think = tokenizer.convert_tokens_to_ids("<think>")
    assert ids[0] == think and ids.count(TURN_END) == 1


def test_reasoning_in_data_is_written_by_tokens_that_are_special() -> None:
    """Some makers say so of theirs. The template reads them, and the model's own tokens train."""
    special = [*SPECIAL, "[THINK]", "[/THINK]"]
    template = THINKS.replace("<think>", "[THINK]").replace("</think>", "[/THINK]")
    tokenizer = make_tokenizer(template, special=special)
    ends = Ends.of(tokenizer, {TURN_END})
    answer = "[THINK]2+2 <|im_end|>[/THINK]4"
    ids = render_answer(ASK, answer, CHAT, tokenizer, ends)
    assert tokenizer.decode(ids) == "2+2 <|im_end|>\n[/THINK]\n\n4<|im_end|>"
    assert [one for one in ids if one < len(special)] == [special.index("[/THINK]"), TURN_END]


def test_tokenizer_that_reads_pieces_otherwise_is_known() -> None:
    """Sentencepiece's scheme "first" writes a space before each piece, and not in the whole."""
    assert reads_plainly(make_tokenizer())
    assert not reads_plainly(make_tokenizer(metaspace=True))


@pytest.mark.parametrize("written", ["A:", "A: ", "A:\n"])
def test_plain_answer_follows_a_space_or_a_break_of_the_prompt(written: str) -> None:
    """One of them, and not a space behind a break, where no base model writes it."""
    config = DataConfig(prompt_template="{question} " + written, metric="exact")
    space = "" if written[-1].isspace() else " "
    assert answered("4", None, config) == f"How many? {written}{space}4<|endoftext|>"


def test_plain_answer_ends_as_the_tokenizer_does() -> None:
    """Also where other data of the run is a chat, and not where stop is another."""
    tokenizer = make_tokenizer()
    both, stopped = Ends.of(tokenizer, {TURN_END}), Ends((40,), 40)
    ends = [render_answer(ASK, "4", PLAIN, tokenizer, one)[-1] for one in (both, stopped)]
    assert ends == [TEXT_END, 40]


@pytest.mark.parametrize("template", [None, ROLES])
def test_answer_has_no_space_that_the_text_lacks(template: str | None) -> None:
    """A sentencepiece of the old kind writes one in front of each text that it reads."""
    tokenizer = make_tokenizer(template, metaspace=True)
    backend = tokenizer.backend_tokenizer
    sign = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.normalizer, backend.pre_tokenizer = sign, pre_tokenizers.Split("\n", "isolated")
    config = CHAT if template else PLAIN
    ends = Ends.of(tokenizer, set())
    ids = render_answer(ASK, "4", config, tokenizer, ends)
    written = ["4"] if template else ["▁", "4"]
    assert tokenizer.convert_ids_to_tokens(ids) == [*written, SPECIAL[TEXT_END]]


def test_end_behind_a_prompt_is_left_out() -> None:
    """A tokenizer that ends each text does not end a prompt."""
    tokenizer = make_tokenizer(ends_prompts=True)
    assert tokenizer.encode("a")[-1] == TEXT_END
    prompt = render_prompt(ASK, PLAIN, tokenizer)
    assert prompt == render_prompt(ASK, PLAIN, make_tokenizer())


@pytest.mark.parametrize(
    ("dropped", "config", "problem", "key"),
    [
        ("system", CHAT.model_copy(update={"system": "Be brief."}), ASK, "system"),
        ("system", CHAT.model_copy(update={"messages_key": "m"}),
         Problem("How?", "4", context=(Message("system", "Be brief."),)), "messages_key"),
        ("user", CHAT, ASK, "prompt_template"),
    ],
)  # fmt: skip
def test_template_that_drops_a_message_is_refused(
    dropped: str, config: DataConfig, problem: Problem, key: str
) -> None:
    """A message that no model would read is an error of its key."""
    template = CHATML.replace(
        "{% for m in messages %}", f"{{% for m in messages if m.role != '{dropped}' %}}"
    )
    with pytest.raises(ValueError, match=re.escape(f"[data] {key}: ")):
        render_prompt(problem, config, make_tokenizer(template))
    assert render_prompt(problem, config, make_tokenizer())


@pytest.mark.parametrize(
    ("template", "end"), [(CHATML, {TURN_END}), (LLAMA2, {TEXT_END}), (ROLES, set()), (None, set())]
)
def test_end_of_a_turn_is_read_from_the_template(template: str | None, end: set[int]) -> None:
    """The id behind an answer; nothing where a template ends it with plain text."""
    assert ends_of_chat(make_tokenizer(template)) == end


@pytest.mark.parametrize("end", ["</think>", "[/THINK]", "</seed:think>", "<|END_THINKING|>"])
def test_reasoning_that_a_template_drops_is_not_missed(end: str) -> None:
    """Earlier turns lose their reasoning on purpose, whatever a model's makers call it."""
    tokenizer = make_tokenizer(DROPS_REASONING.replace("</think>", end))
    earlier = (Message("user", "One?"), Message("assistant", f"first I ponder{end}Yes."))
    ids = render_prompt(Problem("Two?", "4", context=earlier), CHAT, tokenizer)
    assert "Yes." in tokenizer.decode(ids) and "ponder" not in tokenizer.decode(ids)


SWITCHED = THINKS.replace(
    "assistant\n<think>\n' }}", "assistant\n<think>\n' + ('' if think else '\n</think>\n\n') }}"
)  # as Qwen3's template closes the reasoning of enable_thinking = false
ASIDE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.reasoning_content %}"
    "{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize(("think", "trained"), [(True, "\n</think>\n\n4"), (False, "4")])
def test_template_args_reach_prompt_and_answer(think: bool, trained: str) -> None:
    """The answer goes on where the prompt that the arguments ask for has ended."""
    assert DataConfig(template_args={"think": think}).chat_template
    tokenizer = make_tokenizer(SWITCHED)
    config = CHAT.model_copy(update={"template_args": {"think": think}})
    ends = Ends.of(tokenizer, {TURN_END})
    prompt = render_prompt(ASK, config, tokenizer)
    messages = [{"role": "user", "content": "How many?"}]
    own = {"add_generation_prompt": True, "tokenize": False, "think": think}
    assert tokenizer.decode(prompt) == tokenizer.apply_chat_template(messages, **own)
    answer = render_answer(ASK, "4", config, tokenizer, ends)
    assert tokenizer.decode(answer) == f"{trained}<|im_end|>"


def test_reasoning_beside_an_answer_is_trained_where_it_is_read() -> None:
    """It is in the ids that train, and one that a template leaves out is noticed."""
    problem = replace(ASK, reasoning="2 and 2")
    tokenizer = make_tokenizer(ASIDE)
    ids = render_answer(problem, "4", CHAT, tokenizer, Ends.of(tokenizer, {TURN_END}))
    assert tokenizer.decode(ids) == "<think>2 and 2</think>4<|im_end|>"
    assert not drops_reasoning(problem, CHAT, tokenizer)
    assert drops_reasoning(problem, CHAT, make_tokenizer())


def test_preparations_that_do_nothing_are_warnings() -> None:
    """An argument that no template reads, and reasoning that none writes, are said before a run."""
    config = CHAT.model_copy(update={"template_args": {"think": True, "thinking": True}})
    told = replace(ASK, reasoning="2 and 2", environment="data")
    problems = ProblemSet([told], [], {"data": config})
    found = TokenizedProblems(problems, make_tokenizer(SWITCHED)).look(answers=True)
    assert [line.split(" ")[:3] for line in found if "template_args" in line] == [
        ["[data]", "template_args:", "thinking"]
    ]
    assert any("reasoning" in line and "template that writes it" in line for line in found)
