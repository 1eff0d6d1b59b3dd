"""Write prompts and answers as text and as token ids."""

from prime_composer.problems.config import CHAT_KEYS, DataConfig, Problem, Tokenizer


def prompt_text(problem: Problem, config: DataConfig) -> str:
    """Return the prompt as text, before any chat template. Only ``{question}`` is replaced."""
    return config.prompt_template.replace("{question}", problem.question)


def answer_text(answer: str, config: DataConfig) -> str:
    """Return an answer as appended to the prompt: with a leading space, but not with a chat
    template."""
    return answer if config.chat_template else f" {answer}"


def prompt_messages(problem: Problem, config: DataConfig) -> list[dict[str, str]]:
    """Return the prompt as messages, before any chat template."""
    turns = [*problem.context, ("user", prompt_text(problem, config))]
    if config.system is not None and turns[0][0] != "system":
        turns.insert(0, ("system", config.system))
    return [{"role": role, "content": content} for role, content in turns]


def render_prompt(problem: Problem, config: DataConfig, tokenizer: Tokenizer) -> list[int]:
    """Return the prompt's token ids.

    Raises:
        ValueError: ``chat_template`` is set and the tokenizer has none, or its template refuses
            the messages.
    """
    if not config.chat_template:
        return list(tokenizer.encode(prompt_text(problem, config)))
    if getattr(tokenizer, "chat_template", None) is None:
        because = next((key for key in CHAT_KEYS if getattr(config, key) is not None), None)
        remedy = "set it to false" if because is None else f"{because} needs one"
        raise ValueError(
            f"[data] chat_template = true, but this model's tokenizer has none; {remedy}"
        )
    messages = prompt_messages(problem, config)
    try:
        token_ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except Exception as error:  # templates are programs, and raise what they like
        roles = ", ".join(message["role"] for message in messages)
        raise ValueError(
            f"the tokenizer's chat template refuses the messages ({roles}) of the question "
            f"{problem.question[:60]!r}: {error}. Change the data, or the chat template"
        ) from error
    return list(token_ids)
