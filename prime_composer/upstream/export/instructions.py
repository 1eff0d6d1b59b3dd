"""Tell the user what to start beside an exported file, and how."""

import shlex
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from prime_composer.recipe.urls import public_url
from prime_composer.upstream.environment import NAME
from prime_composer.upstream.export.plan import ExportPlan
from prime_composer.upstream.export.tables import needs_more_logprobs
from prime_composer.upstream.versions.toml_shapes import API_KEY_VAR

FLOAT32_HEAD = """--hf-overrides '{"head_dtype": "float32"}'"""  # vLLM computes logits in it

OF_THIS_PACKAGE = ("prime-composer-orders", NAME)  # Ids of environments installed with it

THIS_HOST = ("localhost", "127.0.0.1", "::1")


def head_comment(plan: ExportPlan, table: Mapping[str, Any], lost: Mapping[str, str]) -> list[str]:
    """Return the lines of the comment at the head of an exported file. Topics have a blank line."""
    lines = [
        f"Written by prime_composer for prime-rl's {plan.version.name} dialect. "
        "Start it with the adapter on:",
        "    prime-composer rl --config THIS_FILE --engine prime-rl",
        "which is PRIME_COMPOSER=1 in front of prime-rl's own `rl @ THIS_FILE`.",
    ]
    topics = [
        servers_to_start(plan),
        students_server(plan),
        packages(plan),
        ends(plan),
        sampling_ahead(plan, table),
        evaluation_left_out(plan),
        left_out(lost),
    ]
    for topic in map(list, topics):
        lines += ["", *topic] if topic else []
    return lines


def servers_to_start(plan: ExportPlan) -> Iterator[str]:
    """Yield how to start the servers that prime-rl does not start itself.

    The commands are prime-rl's own, because it pins a vLLM that answers its requests.
    """
    recipe, loss = plan.recipe, plan.recipe.loss
    more, k, states = needs_more_logprobs(loss), loss.support_size, loss.reads_hidden_states
    if not loss.compares_with_teacher or (not plan.teachers and recipe.rollout.url is None):
        return
    if not plan.teachers:
        also = f": start it with max_logprobs = {k}" if more else ""
        yield f"The server at rollout.url scores the rollouts as well{also}."
    elif len(plan.teachers) > 1:
        yield "The teachers' servers are yours to start, each on a GPU of its own:"
    else:
        yield "The teacher's server is yours to start, on a GPU of its own:"
    faster, keys = [], []
    for server in plan.teachers.values():
        port, host = urlsplit(server["url"]).port, ""
        if port is None:  # behind a gateway, so prime-rl's command cannot start it
            also = f", with max_logprobs = {k}" if more else ""
            also += ", started by prime-composer teacher" if states else ""
            yield f"    {server['model']} at {public_url(server['url'])}{also}"
            continue
        also = f" --vllm.max-logprobs {k}" if more else ""
        name = shlex.quote(server["model"])
        if not states:
            yield f"    inference --vllm.model {name} --server.port {port}{also}"
        if urlsplit(server["url"]).hostname not in THIS_HOST:
            host = " --host 0.0.0.0"
            keys.append(server.get("api_key_var", API_KEY_VAR))
        if k or states:
            faster.append(f"    prime-composer teacher --model {name} --port {port}{host}")
    if faster:
        why = "Several times faster, with"
        if states:
            why = 'k = "full" reads hidden states, which the trainer asks for. They need'
        yield f"{why} prime_composer's plugin in the same environment:"
        yield from faster
        if keys:
            own = " and ".join(dict.fromkeys(keys))
            yield (
                "With --host every machine of the network may ask it. A key closes it: "
                "VLLM_API_KEY of"
            )
            yield f"the server, and the same in {own} of prime-rl."
    yield "A server in bfloat16 gives bfloat16 logits, unless its head computes in float32."
    yield "prime-rl's `inference` does that by default (enable_fp32_lm_head = true). To any"
    yield "other vLLM server give vLLM's option:"
    yield f"    {FLOAT32_HEAD}"


def students_server(plan: ExportPlan) -> Iterator[str]:
    """Yield with which options a server that the user starts for the student loads its adapter."""
    lora = plan.recipe.student.lora
    if lora is not None and plan.recipe.rollout.url is not None:
        yield (
            "The server at rollout.url, prime-rl's `inference`, has to load adapters. Start it with"
        )
        yield f"    enable_lora = true, max_lora_rank = {lora.rank}"


def packages(plan: ExportPlan) -> Iterator[str]:
    """Yield which environments have to be installed beside prime-rl."""
    given = plan.recipe.environments_by_id.values()
    ids = dict.fromkeys(source.id for source in given if source.id not in OF_THIS_PACKAGE)
    if ids:
        yield "Environments that have to be installed beside prime-rl:"
        yield f"    {', '.join(ids)}"


def ends(plan: ExportPlan) -> Iterator[str]:
    """Yield what ends a rollout, which on one machine the teachers' ends do too."""
    if plan.recipe.loss.compares_with_teacher:
        yield (
            "A rollout ends where the library `renderers` and the student's generation_config.json"
        )
        yield "end it. Name the end of a chat teacher there too (eos_token_id), for a base student."


def sampling_ahead(plan: ExportPlan, table: Mapping[str, Any]) -> Iterator[str]:
    """Yield that prime-rl samples ahead of its trainer, where one machine does not."""
    if not plan.recipe.rollout.ahead and "max_off_policy_steps" not in table["orchestrator"]:
        yield "prime-rl samples ahead of its trainer, by up to 8 updates: its default of"
        yield "orchestrator.max_off_policy_steps, the recipe's rollout.ahead. One machine samples"
        yield "each batch with the newest weights."


def evaluation_left_out(plan: ExportPlan) -> Iterator[str]:
    """Yield that prime-rl evaluates nothing, where one machine would."""
    size, every = plan.recipe.eval.size, plan.recipe.eval.every
    if not plan.evaluated:
        yield "Nothing is evaluated: no environment has held-out answers with a reward."
    elif "eval" not in plan.recipe.model_fields_set:
        when = f"every {every} steps" if every else "before and after training"
        yield f"Nothing is evaluated: the recipe has no [eval]. One machine would, {when} on"
        yield (
            f"{size} problems. For the same here, write [eval] with size = {size} into the recipe."
        )


def left_out(lost: Mapping[str, str]) -> Iterator[str]:
    """Yield the keys that prime-rl has no setting for, with the reasons."""
    if lost:
        yield "Not carried to prime-rl:"
    for key, why in lost.items():
        yield f"    {key}: {why}"
