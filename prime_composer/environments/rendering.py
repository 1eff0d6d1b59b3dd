"""Check that a tokenizer can render the messages of environments, turn after turn."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from prime_composer.environments.opening import LoadedEnvironment, as_recipe_error
from prime_composer.recipe.schema import RecipeError

ANSWERS = ("7", " 7", "7 \n")  # Tried with the chat template; the student may write any


def breaks_at(renderer: Any, tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> str | None:
    """Return an answer after which the next turn's prompt does not begin with this turn's tokens.

    None: all of ``ANSWERS`` survive.
    """
    prompt = list(renderer.render(list(messages), add_generation_prompt=True).token_ids)
    (stop, *_) = renderer.get_stop_token_ids()
    user = {"role": "user", "content": "8"}
    for text in ANSWERS:
        answer = [*tokenizer.encode(text, add_special_tokens=False), stop]
        bridged = renderer.bridge_to_next_turn(prompt, answer, [user])
        if bridged is None:
            said = {"role": "assistant", "content": renderer.parse_response(answer).content}
            bridged = renderer.render([*messages, said, user], add_generation_prompt=True)
        if list(bridged.token_ids)[: len(prompt) + len(answer)] != [*prompt, *answer]:
            return text
    return None


def check_rendering(
    environments: Mapping[str, LoadedEnvironment], model: str, renderer: Mapping[str, Any]
) -> list[str]:
    """Refuse a tokenizer that cannot render environments' messages; return warnings."""
    from renderers import create_renderer
    from renderers.base import load_tokenizer

    with as_recipe_error("[rollout] renderer"):
        tokenizer = load_tokenizer(model)
        config = client_config("http://127.0.0.1", model, renderer).renderer
        made = create_renderer(tokenizer, config)
    warnings = []
    for name, environment in environments.items():
        where = f"[environments.{name}] id = {environment.config.id!r}"
        if environment.has_tools and not getattr(made, "supports_tools", True):
            raise RecipeError(
                f"{where} has tools, and the renderer of {model} reads no tool calls: name one "
                "in [rollout] renderer, for example { name = 'qwen3' }, or { name = 'default', "
                "tool_parser = 'qwen3' } for a chat template with <tool_call>"
            )
        messages = json.loads(environment.problems[0].messages)
        with as_recipe_error(f"{where}: the chat template of {model} cannot render its messages"):
            broken = environment.config.max_turns != 1 and breaks_at(made, tokenizer, messages)
        if broken:
            warnings.append(
                f"{where}: the chat template does not keep an answer such as "
                f"{broken!r} token for token. After such a turn the conversation goes on in a "
                "sample of its own (rollout/samples counts them)"
            )
    return warnings


def client_config(url: str, model: str, renderer: Mapping[str, Any]) -> Any:
    """Return how verifiers' client for training asks the endpoint at a URL."""
    import verifiers.v1 as vf

    return vf.TrainClientConfig.model_validate(
        {
            "base_url": url,
            # Any name but the default, which would read a configuration of the Prime CLI.
            "api_key_var": "PRIME_COMPOSER_NO_API_KEY",
            "renderer": dict(renderer) or None,
            "renderer_model_name": model,
        }
    )
