"""Write prompts and answers as text and as token ids."""

from prime_composer.problems.config import DataConfig, Problem, Tokenizer


def prompt_text(problem: Problem, config: DataConfig) -> str:
    """Return the prompt as text, before any chat template. Only ``{question}`` is replaced."""
    return config.prompt_template.replace("{question}", problem.question)


def answer_text(answer: str, config: DataConfig) -> str:
    """Return an answer as appended to the prompt: with a leading space, but not with a chat
    template."""
    return answer if config.chat_template else f" {answer}"


def render_prompt(problem: Problem, config: DataConfig, tokenizer: Tokenizer) -> list[int]:
    """Return the prompt's token ids.

    Raises:
        ValueError: ``chat_template`` is set and the tokenizer has none.
    """
    text = prompt_text(problem, config)
    if not config.chat_template:
        return list(tokenizer.encode(text))
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError(
            "[data] chat_template = true, but this model's tokenizer has none; set it to false"
        )
    message = [{"role": "user", "content": text}]
    return list(
        tokenizer.apply_chat_template(
            message, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    )
