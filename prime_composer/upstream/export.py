"""A recipe as a native prime-rl TOML, in the words of one of four dialects.

What the recipe says is written where that version wants it; ``[prime_rl]`` of the recipe, native settings that only
prime-rl knows, is merged on top and wins; its sub-tables named after a dialect (``[prime_rl.head]``) count for that
dialect alone. Each key is one of these:

- carried: written in prime-rl's words (``CARRIED``);
- refused: it asks for what this version cannot do, and the error names it (``refuse``; ``UNREAD`` are keys that only a
  refused setting would read);
- not carried: prime-rl has no such setting, and the run can do without (``NOT_CARRIED``). Where the recipe sets one, the
  head of the TOML and a line on stderr say so and why.

    meaning              v0.6                          v0.7                       v0.8                  head
    distillation         training_mode = "opd"         [orchestrator.algo] type = "opd"                 =
    teacher              [orchestrator.teacher.*]      [orchestrator.algo.teacher], base_url a list     a string
    environment          [[orchestrator.train.env]]    =  (taskset, harness)      [[...train.source]]   =
    its own teacher      a header of the one client    [orchestrator.train.env.algo.teacher]            =
    several mixed        the same header               a header of that teacher's client                =
    zero advantages      filter off                    never fires                =                     no filter
    evaluation           [[orchestrator.eval.env]]     =                          [[...eval.source]]    =
    vLLM's arguments     [inference], vllm_extra       =                          =                     [inference.vllm]
    W&B                  [wandb]                       =                          =                     [monitors.wandb]
"""

import json
import math
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from pydantic import BaseModel

from prime_composer.problems.config import DataConfig
from prime_composer.problems.loading import load_problems
from prime_composer.recipe.schema import Recipe, RecipeError, RolloutConfig, TeacherConfig
from prime_composer.upstream.environment import EXPORTED, NAME, data_settings
from prime_composer.upstream.orchestrator import API_KEY_VAR, HEADER
from prime_composer.upstream.versions import VERSIONS as DIALECTS

IMPORT_PATH = "prime_composer.upstream.loss_fn"


def export_recipe(recipe: Recipe, dialect: str, models: Mapping[str, Any] | None = None) -> str:
    """The recipe as TOML for prime-rl's `rl @ FILE`; its head says what a reader has to know, stderr what is not carried.

    Args:
        recipe: the recipe.
        dialect: "v0.6", "v0.7", "v0.8" or "head".
        models: directories of the models under ``[student.prepare]`` and ``[teacher.prepare]``, by role.

    Raises:
        RecipeError: the dialect is unknown; the recipe asks for something that this dialect cannot do.
    """
    table = export_tables(recipe, dialect, models)
    keep = {key: value for key, value in recipe.prime_rl.items() if key not in DIALECTS}
    merge(table, keep)
    merge(table, recipe.prime_rl.get(dialect, {}))
    head = [
        f"Written by prime_composer for prime-rl's {dialect} dialect. Start it with the adapter on:",
        "    prime-rl rl --config THIS_FILE --engine prime-rl",
        "which is PRIME_COMPOSER=1 in front of prime-rl's own `rl @ THIS_FILE`.",
        *servers(recipe, dialect, {} if models is None else models),
    ]
    lost = not_carried(recipe)
    if lost:
        head += [
            "",
            "Not carried to prime-rl:",
            *(f"    {key}: {why}" for key, why in lost.items()),
        ]
        print(
            f"not carried to prime-rl: {', '.join(f'{key} ({why})' for key, why in lost.items())}",
            file=sys.stderr,
        )
    if isinstance(table.get("slurm"), Mapping):
        head += ["", *SLURM]
    check_slurm(table)
    return "".join(f"# {line}".rstrip() + "\n" for line in head) + to_toml(table)


SLURM = (
    "Under Slurm prime-rl's job script runs `uv sync`, which removes every package that prime-rl does not ask for, this one",
    "too. Let slurm.pre_run_command, which runs after it, put the package back, the way it was installed at first:",
    '    pre_run_command = "uv pip install prime-composer"',
    "(where each node has an environment of its own: srun --ntasks-per-node=1 uv pip install prime-composer)",
)
"""Seen in templates/*.sbatch.j2 of all four versions; `uv run`, which starts each process, removes nothing."""


def check_slurm(native: Mapping[str, Any]) -> None:
    """Say on stderr what to do where a native file goes to Slurm and nothing in it would put this package back."""
    slurm = native.get("slurm")
    if isinstance(slurm, Mapping) and not slurm.get("pre_run_command"):
        print(
            f"[slurm] has no pre_run_command. {' '.join(line.strip() for line in SLURM)}",
            file=sys.stderr,
        )


VLLM_LOGPROBS = 20
"""vLLM's default max_logprobs: it refuses a request for more."""


def servers(recipe: Recipe, dialect: str, models: Mapping[str, Any]) -> list[str]:
    """The servers that are the user's to start, with prime-rl's own command; it pins a vLLM that answers its requests."""
    if not {"ref_logprobs", "support"} & recipe.loss.needs:
        return []
    k = recipe.loss.support_size
    more = isinstance(k, int) and k > VLLM_LOGPROBS
    if not recipe.scored_by:
        if recipe.rollout.url is None or not more:
            return []
        return [
            "",
            f"The server at rollout.url scores the rollouts as well: start it with max_logprobs = {k}.",
        ]
    lines = ["", "The teacher's server is yours to start, on a GPU of its own:"]
    if len(recipe.scored_by) > 1:
        lines[1] = "The teachers' servers are yours to start, each on a GPU of its own:"
    for client in teacher_clients(recipe, models).values():
        name, extra = ("model.name", "vllm-extra") if dialect != "head" else ("vllm.model", "vllm")
        port = urlsplit(client["url"]).port
        if port is None:  # behind a gateway, not prime-rl's to start
            lines.append(
                f"    {client['model']} at {client['url']}{f', with max_logprobs = {k}' if more else ''}"
            )
            continue
        command = f"inference --{name} {shlex.quote(client['model'])} --server.port {port}"
        lines.append(f"    {command}{f' --{extra}.max-logprobs {k}' if more else ''}")
    return lines


CARRIED = frozenset(
    {"loss", "output_dir", "prime_rl"}
    | {f"student.{key}" for key in ("model", "prepare")}
    | {
        f"teacher.{key}"
        for key in (
            "model",
            "prepare",
            "url",
            "api_key_var",
            "weight",
            "policy.hint",
            "policy.update",
            "policy.template",
        )
    }
    | {f"data.{key}" for key in (*EXPORTED, "ratio", "teacher")}
    | {
        f"rollout.{key}"
        for key in (
            "url",
            "api_key_var",
            "group_size",
            "temperature",
            "top_p",
            "max_tokens",
            "max_model_len",
        )
    }
    | {f"rollout.{key}" for key in ("student_fraction", "gpu_memory_utilization")}
    | {
        f"trainer.{key}"
        for key in ("steps", "batch_size", "lr", "betas", "weight_decay", "max_grad_norm")
    }
    | {f"trainer.{key}" for key in ("warmup_steps", "schedule", "gradient_checkpointing")}
    | {
        "eval.every",
        "eval.size",
        "logging.wandb.project",
        "logging.wandb.name",
        "checkpoint.every",
        "checkpoint.keep",
    }
)
"""Keys of a recipe that reach prime-rl, or are refused where it cannot do what they say. ``teachers.NAME`` counts as
``teacher``, ``environments.NAME`` as ``data``; what lies under ``loss``, ``prepare`` and ``prime_rl`` goes with its table."""

UNREAD = frozenset(
    {
        "teacher.policy.ema_rate",
        "teacher.policy.sync_every",
        "replay.source",
        "replay.path",
        "replay.pairs_per_step",
    }
)
"""Keys that nothing reads in a recipe that is not refused."""


class NotCarried(NamedTuple):
    """Why a key is not carried, and the values with which nothing is lost."""

    why: str
    harmless: tuple[Any, ...] = ()


NOT_CARRIED = {
    "teacher.backend": NotCarried("prime-rl asks a server, which is yours to start", ("server",)),
    "teacher.dtype": NotCarried("the teacher's server is yours to start"),
    "teacher.gpu_memory_utilization": NotCarried("the teacher's server is yours to start"),
    "rollout.backend": NotCarried("prime-rl samples with vLLM", ("vllm", "server")),
    "rollout.weights_dir": NotCarried("prime-rl brings new weights to the sampler its own way"),
    "data.chat_template": NotCarried("prime-rl always renders a chat", (True,)),
    "trainer.micro_batch_tokens": NotCarried(
        "prime-rl packs sequences of rollout.max_model_len tokens"
    ),
    "trainer.dtype": NotCarried("prime-rl's trainer computes in bfloat16", ("bfloat16",)),
    "trainer.seed": NotCarried(
        "prime-rl orders prompts by seeds of its own; only its vLLM takes this one"
    ),
    "eval.kl_size": NotCarried("prime-rl evaluates accuracy alone", (0,)),
    "eval.kl_support": NotCarried("prime-rl evaluates accuracy alone"),
    "logging.tensorboard": NotCarried("prime-rl writes no TensorBoard files", (False,)),
}


def not_carried(recipe: Recipe) -> dict[str, str]:
    """What the recipe sets and prime-rl is not told: the key as the recipe writes it, and why."""
    lost = {}
    for key, kind, value in keys_set(recipe):
        entry = NOT_CARRIED.get(kind)
        if entry is not None and value not in entry.harmless:
            lost[key] = entry.why
    return lost


def keys_set(section: BaseModel, key: str = "", kind: str = "") -> Iterator[tuple[str, str, Any]]:
    """Each key that a recipe sets: as it is written, as ``CARRIED`` and ``NOT_CARRIED`` name it, and its value."""
    for name in type(section).model_fields:
        if name not in section.model_fields_set:
            continue
        value, here, what = getattr(section, name), f"{key}{name}", f"{kind}{name}"
        if name in ("teachers", "environments"):
            for child, table in value.items():
                yield from keys_set(
                    table, f"{here}.{child}.", "teacher." if name == "teachers" else "data."
                )
        elif isinstance(value, BaseModel) and name not in ("loss", "prepare"):
            yield from keys_set(value, f"{here}.", f"{what}.")
        else:
            yield here, what, value


def export_tables(
    recipe: Recipe, dialect: str, models: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """``export_recipe`` as nested tables, before ``[prime_rl]`` is merged in."""
    if dialect not in DIALECTS:
        raise RecipeError(f"unknown dialect {dialect!r}: choose one of {', '.join(DIALECTS)}")
    refuse(recipe, dialect)
    models = {} if models is None else models
    student = model_name(recipe.student.model, models, "student")
    distils = bool({"ref_logprobs", "support"} & recipe.loss.needs)

    parts = environments(recipe, distils)
    orchestrator: dict[str, Any] = {
        "batch_size": recipe.trainer.batch_size,
        "group_size": recipe.rollout.group_size,
        "train": {
            "sampling": sampling(recipe),
            ENVIRONMENT_KEY[dialect]: [environment(part, dialect) for part in parts],
        },
    }
    if distils and recipe.teacher is not None and recipe.teacher.policy is not None:
        # The policy told the reference solution: prime-rl reads it from the task, as our environment names it.
        orchestrator["algo"] = {"type": "opsd", "demo_key": "answer"}
    elif distils:
        add_teachers(orchestrator, dialect, parts, teacher_clients(recipe, models))
    if recipe.rollout.url is not None:
        url = v1_url(recipe.rollout.url)
        client = {"base_url": url if dialect == "head" else [url]} | key_of(recipe.rollout)
        key = "student" if dialect == "v0.6" else "model"
        orchestrator.setdefault(key, {})["client"] = client
    table: dict[str, Any] = {
        "max_steps": recipe.trainer.steps,
        "seq_len": recipe.rollout.max_model_len,
        "model": {"name": student},
        "orchestrator": orchestrator,
        "trainer": {
            "loss": {
                "type": "custom",
                "import_path": IMPORT_PATH,
                "kwargs": loss_table(recipe, dialect),
            },
            "optim": {
                "type": "adamw",
                "lr": recipe.trainer.lr,
                "weight_decay": recipe.trainer.weight_decay,
                "betas1": recipe.trainer.betas[0],
                "betas2": recipe.trainer.betas[1],
                "max_norm": recipe.trainer.max_grad_norm,
            },
            "scheduler": scheduler(recipe),
        },
        # Without [ckpt] prime-rl keeps nothing, not even the last weights; without an interval, these alone.
        "ckpt": {"keep_last": recipe.checkpoint.keep},
    }
    if recipe.checkpoint.every:
        table["ckpt"]["interval"] = recipe.checkpoint.every
    checkpointing = activation_checkpointing(recipe)
    if checkpointing:
        table["trainer"]["model"] = checkpointing
    if "eval" in recipe.model_fields_set:
        orchestrator["eval"] = evaluation(recipe, dialect)
    if recipe.output_dir is not None:
        run_dir = Path(recipe.output_dir)
        if dialect == "head":  # it would put a generated name below output_dir otherwise
            table |= {"output_dir": str(run_dir.parent), "run": {"name": run_dir.name}}
        else:
            table["output_dir"] = str(run_dir)
    if recipe.logging.wandb is not None:
        wandb = {"project": recipe.logging.wandb.project}
        if recipe.logging.wandb.name is not None:
            wandb["name"] = recipe.logging.wandb.name
        table |= {"monitors": {"wandb": wandb}} if dialect == "head" else {"wandb": wandb}
    if recipe.rollout.url is None:
        table["inference"] = inference(recipe, dialect)
    return table


ENVIRONMENT_KEY = {"v0.6": "env", "v0.7": "env", "v0.8": "source", "head": "source"}
FIRST_TEACHER_PORT = 8001


def refuse(recipe: Recipe, dialect: str) -> None:
    """What no field of prime-rl's config can say.

    Raises:
        RecipeError: names the key and what to do.
    """
    if recipe.rollout.student_fraction != 1:
        raise RecipeError(
            f"rollout.student_fraction = {recipe.rollout.student_fraction}: prime-rl samples every sequence from the "
            "student. Set it to 1, or run the recipe with --engine local."
        )
    if recipe.loss.support_size == "full":
        raise RecipeError(
            f'loss.k = "full": prime-rl\'s wire carries a top-K support. Give [loss] type = {recipe.loss.type!r} a '
            "number k, or run the recipe with --engine local."
        )
    refuse_told_policy(recipe, dialect)
    pairs = sorted(set(recipe.loss.needs) & {"replay", "segment_ids"})
    if pairs:
        raise RecipeError(
            f"[loss] type = {recipe.loss.type!r} needs {' and '.join(pairs)}: preference pairs, and prime-rl hands a loss "
            "one sequence at a time. Set the replay channel's weight to 0, or run the recipe with --engine local."
        )
    if (
        {"ref_logprobs", "support"} & recipe.loss.needs
        and "advantages" in recipe.loss.needs
        and dialect != "v0.6"
    ):
        raise RecipeError(
            f"[loss] type = {recipe.loss.type!r} needs advantages and a teacher for the same tokens; prime-rl "
            f"{dialect} assigns no advantages to distillation tokens. Use dialect v0.6, or --engine local."
        )


def refuse_told_policy(recipe: Recipe, dialect: str) -> None:
    """Self-distillation as far as prime-rl's ``opsd`` has it: the live policy, with the data's solution in front.

    Raises:
        RecipeError: names the key that asks for more.
    """
    policy = None if recipe.teacher is None else recipe.teacher.policy
    if policy is None:
        return
    if dialect == "v0.6":
        raise RecipeError(
            "teacher.policy: prime-rl v0.6 has no self-distillation. Use v0.7 or newer, or --engine local."
        )
    asked = {
        "hint": (
            policy.hint,
            "reference",
            "its opsd knows the data's demonstration alone, not a verdict or a sibling",
        ),
        "update": (policy.update, "live", "its opsd scores with the policy's current weights"),
        "template": (
            policy.template,
            None,
            "its opsd puts the hint into a system message before the question",
        ),
    }
    for key, (value, possible, why) in asked.items():
        if value != possible:
            remedy = "Leave it out" if possible is None else f"Set it to {possible!r}"
            raise RecipeError(
                f"teacher.policy.{key} = {value!r}: prime-rl cannot do that ({why}). {remedy}, or run the recipe with "
                "--engine local."
            )


def model_name(name: str | None, models: Mapping[str, Any], role: str) -> str:
    if name is not None:
        return name
    if role not in models:
        raise RecipeError(
            f"[{role}.prepare] builds a small model first: run `prime-rl prepare --config FILE`, then export again, or "
            f"name an existing model with --set {role}.model=DIR"
        )
    return str(models[role])


def v1_url(url: str) -> str:
    """prime-rl's clients want the OpenAI base URL."""
    url = url.rstrip("/")
    return url if url.endswith("/v1") else f"{url}/v1"


class Part(NamedTuple):
    """An environment of prime-rl's: one of the recipe's, or those of its rows that name the same teacher.

    Attributes:
        name: prime-rl's name for it.
        data: the recipe's [data] or [environments.NAME].
        ratio: its share of the prompts, relative to the others'.
        mixture: shares of the teachers that score its rollouts, by role.
        rows: the teacher that its rows name: "" for rows that name none, None for all rows.
    """

    name: str
    data: DataConfig
    ratio: float
    mixture: Mapping[str, float]
    rows: str | None = None


def environments(recipe: Recipe, distils: bool) -> list[Part]:
    """The recipe's environments, split where rows name their own teachers: prime-rl knows a teacher by its environment.

    Raises:
        RecipeError: a row names a teacher that the recipe does not have; two environments would have one name.
        ValueError: the data, which is read only where rows name teachers, cannot be read.
    """
    parts = []
    for name, data in recipe.sources.items():
        if data.teacher_key is None or not distils:
            parts.append(Part(name, data, data.ratio, recipe.mixture_of(name) if distils else {}))
            continue
        problems = [replace(problem, environment=name) for problem in load_problems(data)[0]]
        counted = Counter(problem.teacher or "" for problem in problems)
        mixtures = {problem.teacher or "": recipe.mixture(problem) for problem in problems}
        for rows in sorted(counted):
            label = f"{name}-{rows or 'others'}"
            parts.append(
                Part(label, data, data.ratio * counted[rows] / len(problems), mixtures[rows], rows)
            )
    for name, count in Counter(part.name for part in parts).items():
        if count > 1:
            raise RecipeError(
                f"{count} environments of prime-rl's would be called {name!r}: where rows name their teachers each gets one, "
                "ENVIRONMENT-TEACHER, and rows without a teacher ENVIRONMENT-others. Rename [environments] or [teachers]."
            )
    return parts


def key_of(server: TeacherConfig | RolloutConfig) -> dict[str, str]:
    """Where the API key of a server is, unless prime-rl looks there by itself."""
    return {} if server.api_key_var == API_KEY_VAR else {"api_key_var": server.api_key_var}


def teacher_clients(recipe: Recipe, models: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Served name and URL of each teacher, by role. Where the recipe has no URL: this host, port 8001 and upwards, in the
    recipe's order."""
    clients = {}
    for port, (role, teacher) in enumerate(recipe.scored_by.items(), start=FIRST_TEACHER_PORT):
        name = model_name(teacher.model, models, role)
        clients[role] = {
            "url": v1_url(teacher.url or f"http://localhost:{port}"),
            "model": name,
        } | key_of(teacher)
    return clients


def add_teachers(
    orchestrator: dict[str, Any],
    dialect: str,
    parts: Sequence[Part],
    clients: Mapping[str, Mapping[str, str]],
) -> None:
    """Distillation from each environment's teachers."""
    listed = {
        part.name: [{**clients[role], "weight": weight} for role, weight in part.mixture.items()]
        for part in parts
    }
    first = listed[parts[0].name]
    alike = all(mixture == first for mixture in listed.values())

    def key(teacher: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in teacher.items() if name == "api_key_var"}

    if dialect == "v0.6":
        client: dict[str, Any] = {"base_url": [first[0]["url"]]} | key(first[0])
        if not alike or len(first) > 1:
            client["headers"] = {HEADER: json.dumps(first if alike else listed)}
        orchestrator["training_mode"] = "opd"
        orchestrator["teacher"] = {"model": {"name": first[0]["model"]}, "client": client}
        # The default list also enforces a zero-advantage filter, which would drop every group whose rollouts earn the
        # same reward: distillation learns from those as from any other.
        orchestrator["post_batch_filters"] = [{"type": "gibberish"}, {"type": "repetition"}]
        return
    algorithms = {}
    for name, mixture in listed.items():
        url = mixture[0]["url"]
        teacher = {
            "name": mixture[0]["model"],
            "base_url": url if dialect == "head" else [url],
        } | key(mixture[0])
        if len(mixture) > 1:
            teacher["headers"] = {HEADER: json.dumps(mixture)}
        algorithms[name] = {"type": "opd", "teacher": teacher}
    if alike:
        orchestrator["algo"] = algorithms[parts[0].name]
        return
    for entry in orchestrator["train"][ENVIRONMENT_KEY[dialect]]:
        entry["algo"] = algorithms[entry["name"]]


def needs_adapter(recipe: Recipe, dialect: str) -> bool:
    """Whether the teachers are reached through our hook alone, whatever the loss reads."""
    if not recipe.teachers:
        return False
    mixtures = [part.mixture for part in environments(recipe, distils=True)]
    several = any(len(mixture) > 1 for mixture in mixtures)
    return several or (dialect == "v0.6" and any(mixture != mixtures[0] for mixture in mixtures))


def sampling(recipe: Recipe) -> dict[str, Any]:
    out: dict[str, Any] = {
        "temperature": recipe.rollout.temperature,
        "max_completion_tokens": recipe.rollout.max_tokens,
    }
    if (
        recipe.rollout.top_p != 1
    ):  # prime-rl hard-codes top_p = 1 and lets the request body say otherwise
        out["extra_body"] = {"top_p": recipe.rollout.top_p}
    return out


def inference(recipe: Recipe, dialect: str) -> dict[str, Any]:
    """Arguments of the vLLM server that prime-rl starts for the student."""
    arguments: dict[str, Any] = {}
    if "gpu_memory_utilization" in recipe.rollout.model_fields_set:
        arguments["gpu_memory_utilization"] = recipe.rollout.gpu_memory_utilization
    if "seed" in recipe.trainer.model_fields_set:
        arguments["seed"] = recipe.trainer.seed
    if "dtype" in recipe.trainer.model_fields_set and recipe.trainer.dtype == "bfloat16":
        arguments["dtype"] = "bfloat16"  # prime-rl's own "auto" makes float16 of a float32 model
    k = recipe.loss.support_size
    if (
        recipe.teacher is not None
        and recipe.teacher.policy is not None
        and isinstance(k, int)
        and k > VLLM_LOGPROBS
    ):
        arguments["max_logprobs"] = k  # the policy is its own teacher: this server scores as well
    if dialect == "head":
        return {"vllm": arguments} if arguments else {}
    table = {
        key: value for key, value in arguments.items() if key in ("gpu_memory_utilization", "seed")
    }
    if "dtype" in arguments:
        table["model"] = {"dtype": arguments["dtype"]}
    if "max_logprobs" in arguments:
        table["vllm_extra"] = {"max_logprobs": arguments["max_logprobs"]}
    return table


def activation_checkpointing(recipe: Recipe) -> dict[str, Any]:
    """trainer.gradient_checkpointing where the recipe sets it; prime-rl's own default is off in v0.6 and on later."""
    if "gradient_checkpointing" not in recipe.trainer.model_fields_set:
        return {}
    if recipe.trainer.gradient_checkpointing:
        return {"ac": {"mode": "full"}}
    # Offloading, which later versions turn on as well, would turn checkpointing on again.
    return {"ac": "None", "ac_offloading": "None"}


def evaluation(recipe: Recipe, dialect: str) -> dict[str, Any]:
    """[eval]: greedy accuracy on the held-out problems, before the first step and at each multiple of an interval."""
    # prime-rl looks after it has sent a batch. v0.6 has counted the batches sent, later ones the next one.
    last = recipe.trainer.steps + (dialect != "v0.6")
    sources = [Part(name, data, data.ratio, {}) for name, data in recipe.sources.items()]
    return {
        "interval": recipe.eval.every or last,
        "num_examples": math.ceil(recipe.eval.size / len(sources)),
        "sampling": {"temperature": 0.0, "max_completion_tokens": recipe.rollout.max_tokens},
        ENVIRONMENT_KEY[dialect]: [
            environment(source, dialect, split="test") for source in sources
        ],
    }


def scheduler(recipe: Recipe) -> dict[str, Any]:
    kind, warmup = recipe.trainer.schedule, recipe.trainer.warmup_steps
    decay = recipe.trainer.steps - warmup
    if (
        kind == "constant" or decay <= 1
    ):  # a single step of a decay is at its peak, and prime-rl would divide by decay - 1
        return (
            {"type": "constant"}
            if not warmup
            else {"type": "linear", "warmup_steps": warmup, "decay_steps": 0}
        )
    if kind == "linear":
        return {"type": "linear", "warmup_steps": warmup, "decay_steps": decay}
    return {"type": "cosine", "warmup_steps": warmup}


def loss_table(recipe: Recipe, dialect: str) -> dict[str, Any]:
    """The loss with what was set in the recipe, and prime-rl's era where the loss asks for one."""
    table = {
        "type": recipe.loss.type,
        **plain(recipe.loss.model_dump(exclude_unset=True, exclude_none=True)),
    }
    if {"ref_logprobs", "support"} & recipe.loss.needs and needs_adapter(recipe, dialect):
        table["adapter"] = True  # prime-rl alone would ask a wrong teacher, and nobody would see it
    if (
        "dialect" in type(recipe.loss).model_fields
        and "dialect" not in recipe.loss.model_fields_set
    ):
        table["dialect"] = "v0_6" if dialect == "v0.6" else "v0_7"
    return table


def environment(part: Part, dialect: str, split: str = "train") -> dict[str, Any]:
    """Some of the recipe's problems, served by ``prime_composer_problems``."""
    settings = data_settings(part.data)
    if split != "train":
        settings["split"] = split
    if part.rows is not None:
        settings["rows_of"] = part.rows
    entry: dict[str, Any] = {"name": part.name, "ratio": part.ratio}
    if dialect == "v0.6":
        return {"id": NAME, "args": settings, **entry}
    taskset = {"id": NAME, **settings}
    if dialect == "v0.7":
        return {
            **entry,
            "taskset": taskset,
            "harness": {"id": "null", "runtime": {"type": "subprocess"}},
        }
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    return {**entry, "env": {"taskset": taskset, "agent": agent}}


def plain(value: Any) -> Any:
    """Tuples and sets as lists, recursively: what TOML knows."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return value


def merge(into: dict[str, Any], more: Mapping[str, Any]) -> None:
    """``more`` on top of ``into``, table by table; lists and values are replaced."""
    for key, value in more.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            merge(into[key], value)
        else:
            into[key] = plain(value)


def to_toml(table: Mapping[str, Any], path: tuple[str, ...] = ()) -> str:
    """A TOML document: values first, then tables, then arrays of tables."""
    lines, tables, arrays = [], [], []
    for key, value in table.items():
        if isinstance(value, Mapping):
            tables.append((key, value))
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            arrays.append((key, value))
        else:
            lines.append(f"{toml_key(key)} = {toml_value(value)}")
    text = "".join(f"{line}\n" for line in lines)
    for key, value in tables:
        here = (*path, key)
        inner = to_toml(value, here)
        only_tables = value and all(isinstance(item, Mapping) for item in value.values())
        text += ("" if only_tables else f"\n[{dotted(here)}]\n") + inner
    for key, items in arrays:
        here = (*path, key)
        for item in items:
            text += f"\n[[{dotted(here)}]]\n" + to_toml(item, here)
    return text


def dotted(path: tuple[str, ...]) -> str:
    return ".".join(toml_key(part) for part in path)


def toml_key(key: str) -> str:
    return (
        key
        if key and all(c.isalnum() and c.isascii() or c in "-_" for c in key)
        else json.dumps(key)
    )


def toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        if math.isinf(value) or math.isnan(value):
            return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
        return repr(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, list):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    if isinstance(value, Mapping):
        return (
            "{"
            + ", ".join(f"{toml_key(key)} = {toml_value(item)}" for key, item in value.items())
            + "}"
        )
    # JSON's escapes are TOML's, except for characters outside the basic plane, which TOML takes as they are.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
