"""Tell the user what to start beside an exported file, and how."""

import shlex
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from prime_composer.extras import requirement
from prime_composer.losses import LossConfig
from prime_composer.recipe.urls import public_url
from prime_composer.upstream.environment import NAME
from prime_composer.upstream.export.plan import Plan
from prime_composer.upstream.export.tables import needs_more_logprobs
from prime_composer.upstream.versions.toml_shapes import API_KEY_VAR, WANDB

FLOAT32_HEAD = """--hf-overrides '{"head_dtype": "float32"}'"""  # vLLM computes logits in it

OF_THIS_PACKAGE = ("prime-composer-orders", NAME)  # Ids of environments installed with it

THIS_HOST = ("localhost", "127.0.0.1", "::1")


def under_slurm() -> list[str]:
    """Return what keeps this package installed in a job.

    Read in templates/*.sbatch.j2 of all versions. `uv run`, which starts processes, is harmless.
    """
    install = f"uv pip install {requirement()}"
    return [
        "Under Slurm prime-rl's job script runs `uv sync`, which removes every package that "
        "prime-rl",
        "does not depend on, this one too. slurm.pre_run_command runs after it. Let it install "
        "this",
        "package again, the same way as at first:",
        f'    pre_run_command = "{install}"',
        "Where each node has an environment of its own:",
        f"    srun --ntasks-per-node=1 {install}",
    ]


def head_comment(plan: Plan, table: Mapping[str, Any], not_carried: Mapping[str, str]) -> list[str]:
    """Return the lines of the comment at the head of an exported file."""
    lines = [
        f"Written by prime_composer for prime-rl's {plan.version.name} dialect. "
        "Start it with the adapter on:",
        "    prime-composer rl --config THIS_FILE --engine prime-rl",
        "which is PRIME_COMPOSER=1 in front of prime-rl's own `rl @ THIS_FILE`.",
        *servers(plan),
        *adapters(plan),
        *packages(plan),
        *temperatures(plan.recipe.loss, plan.recipe.rollout.temperature),
        *ends(plan),
        *sampling_ahead(plan, table),
        *evaluation_left_out(plan),
        *wandb_left_out(plan, table),
    ]
    if not_carried:
        lines += ["", "Not carried to prime-rl:"]
        lines += [f"    {key}: {why}" for key, why in not_carried.items()]
    if isinstance(table.get("slurm"), Mapping):
        lines += ["", *under_slurm()]
    return lines


def packages(plan: Plan) -> list[str]:
    """Return which environments have to be installed beside prime-rl."""
    given = plan.recipe.environments_by_id.values()
    ids = dict.fromkeys(source.id for source in given if source.id not in OF_THIS_PACKAGE)
    if not ids:
        return []
    return ["", "Environments that have to be installed beside prime-rl:", f"    {', '.join(ids)}"]


def servers(plan: Plan) -> list[str]:
    """Return how to start the servers that prime-rl does not start itself.

    The commands are prime-rl's own, because it pins a vLLM that answers its requests.
    """
    recipe = plan.recipe
    if not recipe.loss.compares_with_teacher:
        return []
    more, k = needs_more_logprobs(recipe.loss), recipe.loss.support_size
    states = recipe.loss.reads_hidden_states
    if not plan.teachers:
        if recipe.rollout.url is None:
            return []
        also = f": start it with max_logprobs = {k}" if more else ""
        scoring = f"The server at rollout.url scores the rollouts as well{also}."
        return ["", scoring, *logits_dtype(plan)]
    title = "The teacher's server is yours to start, on a GPU of its own:"
    if len(plan.teachers) > 1:
        title = "The teachers' servers are yours to start, each on a GPU of its own:"
    lines, faster, keys = ["", title], [], []
    for server in plan.teachers.values():
        port, host = urlsplit(server["url"]).port, ""
        if port is None:  # behind a gateway, so prime-rl's command cannot start it
            also = f", with max_logprobs = {k}" if more else ""
            also += ", started by prime-composer teacher" if states else ""
            lines.append(f"    {server['model']} at {public_url(server['url'])}{also}")
            continue
        also = f" --vllm.max-logprobs {k}" if more else ""
        name = shlex.quote(server["model"])
        if not states:
            lines.append(f"    inference --vllm.model {name} --server.port {port}{also}")
        if urlsplit(server["url"]).hostname not in THIS_HOST:
            host = " --host 0.0.0.0"
            keys.append(server.get("api_key_var", API_KEY_VAR))
        if k or states:
            faster.append(f"    prime-composer teacher --model {name} --port {port}{host}")
    why = "Several times faster, with"
    if states:
        why = 'k = "full" reads hidden states, which the trainer asks for. They need'
    if faster:
        lines += [f"{why} prime_composer's plugin in the same environment:"]
    if faster and keys:
        faster += [
            "With --host every machine of the network may ask it. A key closes it: VLLM_API_KEY of",
            f"the server, and the same in {' and '.join(dict.fromkeys(keys))} of prime-rl.",
        ]
    return [*lines, *faster, *logits_dtype(plan)]


def adapters(plan: Plan) -> list[str]:
    """Return with which options a server that the user starts for the student loads its adapter."""
    recipe = plan.recipe
    if recipe.student.lora is None or recipe.rollout.url is None:
        return []
    return [
        "",
        "The server at rollout.url, prime-rl's `inference`, has to load adapters. Start it with",
        f"    enable_lora = true, max_lora_rank = {recipe.student.lora.rank}",
    ]


def temperatures(loss: LossConfig, sampled: float) -> list[str]:
    """Return at which temperatures student and teacher are compared, where that is not plain."""
    if sampled == 1 or not loss.compares_with_teacher:
        return []
    lines = ["", f"rollout.temperature = {sampled:g}: prime-rl's trainer takes log-probs at it."]
    if loss.reads_hidden_states:
        return [
            *lines,
            'k = "full" compares student and teacher without it, at the temperature of the loss.',
        ]
    return [*lines, "The teacher scores at 1, so the loss compares two temperatures."]


def ends(plan: Plan) -> list[str]:
    """Return what ends a rollout, which on one machine the teachers' ends do too."""
    if not plan.recipe.loss.compares_with_teacher:
        return []
    return [
        "",
        "A rollout ends where the library `renderers` and the student's generation_config.json",
        "end it. Name the end of a chat teacher there too (eos_token_id), for a base student.",
    ]


def sampling_ahead(plan: Plan, table: Mapping[str, Any]) -> list[str]:
    """Return that prime-rl samples ahead of its trainer, where one machine does not."""
    if plan.recipe.rollout.ahead or "max_off_policy_steps" in table["orchestrator"]:
        return []
    return [
        "",
        "prime-rl samples ahead of its trainer, by up to 8 updates: its default of",
        "orchestrator.max_off_policy_steps, the recipe's rollout.ahead. One machine samples",
        "each batch with the newest weights.",
    ]


def wandb_left_out(plan: Plan, table: Mapping[str, Any]) -> list[str]:
    """Return how to log to W&B, where nothing does."""
    *parents, name = WANDB
    for parent in parents:
        table = table.get(parent, {})
    if name in table:
        return []
    keys = ".".join(WANDB)
    return [
        "",
        f'Not logged to W&B. To do so: [{keys}] project = "...", or [logging.wandb] in the',
        "recipe.",
    ]


def evaluation_left_out(plan: Plan) -> list[str]:
    """Return that prime-rl evaluates nothing, where one machine would."""
    evaluation = plan.recipe.eval
    if not plan.evaluated:
        return ["", "Nothing is evaluated: no environment has held-out answers with a reward."]
    if "eval" in plan.recipe.model_fields_set:
        return []
    every = f"every {evaluation.every} steps" if evaluation.every else "before and after training"
    return [
        "",
        f"Nothing is evaluated: the recipe has no [eval]. One machine would, {every} on",
        f"{evaluation.size} problems. For the same here, write [eval] with size = "
        f"{evaluation.size} into the recipe.",
    ]


def logits_dtype(plan: Plan) -> list[str]:
    """Return what to do so that a server in bfloat16 scores with float32 logits."""
    return [
        "A server in bfloat16 gives bfloat16 logits, unless its head computes in float32.",
        "prime-rl's `inference` does that by default (enable_fp32_lm_head = true). To any",
        "other vLLM server give vLLM's option:",
        f"    {FLOAT32_HEAD}",
    ]


def slurm_notice(table: Mapping[str, Any]) -> str | None:
    """Return what to add where a TOML goes to Slurm and nothing in it reinstalls this package."""
    slurm = table.get("slurm")
    if isinstance(slurm, Mapping) and not slurm.get("pre_run_command"):
        return f"[slurm] has no pre_run_command. {' '.join(line.strip() for line in under_slurm())}"
    return None
