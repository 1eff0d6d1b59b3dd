"""Give exported recipes to prime-rl's own code: parser, launcher, evaluation, scheduler, Slurm."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from prime_composer.recipe.loading import load_recipe, parse_recipe
from prime_composer.recipe.routing import Routing
from prime_composer.recipe.schema import RecipeError
from prime_composer.upstream.export import export_recipe
from tests.prime_rl_checkout import REPO
from tests.upstream.export_recipes import (
    ALL_RECIPES,
    export_table,
    tables,
    write_rows_recipe,
)
from tests.upstream.in_prime_rl import MARK, environment_of, interpreters
from tests.upstream.make_venvs import python_of

# It starts no server: the whole runs need not wait for it.
pytestmark = [pytest.mark.upstream, pytest.mark.xdist_group("prime-rl's parser")]

E2E = Path(__file__).parent / "e2e"
QWEN3 = REPO / "recipes" / "gsm8k_opd_qwen3.toml"
AGENT = REPO / "recipes" / "agent_opd.toml"


@pytest.fixture(scope="module")
def prime_rl(trees, tmp_path_factory):
    """Return one interpreter beside prime-rl, for all tests of this file."""
    with interpreters(trees, tmp_path_factory) as get:
        yield get("head")


def test_prime_rls_dry_run_takes_every_recipe(trees, tmp_path):
    """Its parser, and its launcher up to the point where it would start processes."""
    files, refused = [], {}
    for path in [*ALL_RECIPES, write_rows_recipe(tmp_path)]:
        loaded = load_recipe(path)
        models = {teacher.table: "Qwen/Qwen3-4B" for teacher in Routing.of_recipe(loaded).teachers}
        try:
            export = export_recipe(loaded, "head", {"student": "Qwen/Qwen3-0.6B", **models})
        except RecipeError as error:
            refused[path.stem] = str(error)
            continue
        target = tmp_path / f"{path.stem}.toml"
        target.write_text(export.text())
        files.append(str(target))
    assert files and all("--engine local" in reason for reason in refused.values())
    env = environment_of("head", trees, tmp_path, PRIME_COMPOSER="1")
    command = [str(python_of("head")), str(E2E / "dry_run.py"), *files]
    done = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    assert lines, done.stdout[-2000:] + done.stderr[-3000:]
    results = json.loads(lines[-1].removeprefix(MARK))
    bad = {Path(file).stem: result for file, result in results.items() if result != "ok"}
    assert not bad, f"{bad}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"


READ = """
import sys
from prime_rl.configs.inference import InferenceConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.utils.config import cli

result = []
for words in commands:
    sys.argv = words
    config = cli(RLConfig if words[0] == "rl" else InferenceConfig)
    inference = config.inference if words[0] == "rl" else config
    arguments = inference.to_namespace()
    names = ("model", "port", "dtype", "seed", "max_logprobs", "gpu_memory_utilization")
    names += ("tool_call_parser", "enable_auto_tool_choice")
    vllm = {key: getattr(arguments, key, None) for key in names}
    result.append({"config": config.model_dump(mode="json"), "vllm": vllm})
"""


def rl(folder, name, raw):
    """Return prime-rl's command for a recipe's export."""
    path = folder / f"{name}.toml"
    path.write_text(export_recipe(parse_recipe(raw), "head").text())
    return ["rl", "@", str(path)]


def qwen3_tables(**changes):
    """Return the tests' recipe with a student for which prime-rl has a renderer."""
    return tables(student={"model": "Qwen/Qwen3-0.6B"}, **changes)


def test_prime_rl_reads_what_the_recipe_says(prime_rl, tmp_path):
    """Checkpoints, activation checkpointing, evaluation, the sampler's server."""
    raw = qwen3_tables(checkpoint={"every": 0, "keep": 3}, eval={"every": 2, "size": 50})
    raw["trainer"] |= {"gradient_checkpointing": True, "dtype": "bfloat16", "seed": 5}
    raw["rollout"]["gpu_memory_utilization"] = 0.5
    commands = [rl(tmp_path, "on", raw)]
    raw["trainer"]["gradient_checkpointing"] = False
    commands.append(rl(tmp_path, "off", raw))
    on, off = prime_rl.run(READ, commands=commands)
    trainer = on["config"]["trainer"]
    # Its trainer writes the last weights where it has a ckpt table, earlier ones by the interval.
    assert trainer["ckpt"]["interval"] is None and trainer["ckpt"]["keep_last"] == 3
    assert trainer["model"]["ac"]["mode"] == "full"
    assert on["vllm"]["dtype"] == "bfloat16" and on["vllm"]["seed"] == 5
    assert on["vllm"]["gpu_memory_utilization"] == 0.5
    (source,) = on["config"]["orchestrator"]["eval"]["source"]
    assert (source["interval"], source["num_examples"], source["group_size"]) == (2, 50, 1)
    assert source["sampling"]["temperature"] == 0.0
    assert source["sampling"]["max_completion_tokens"] == 64
    assert source["env"]["taskset"]["split"] == "test"
    model = off["config"]["trainer"]["model"]
    assert model["ac"] is None and model["ac_offloading"] is None


def test_prime_rl_reads_the_adapter(prime_rl, tmp_path):
    """Trainer, orchestrator and the student's server; the base teacher is the student's model."""
    lora = {"rank": 8, "alpha": 24, "targets": ["q_proj", "down_proj"]}
    raw = qwen3_tables(trainer={"gradient_checkpointing": True})
    raw["student"]["lora"], raw["teacher"] = lora, {"base": True}
    commands = [rl(tmp_path, "named", raw)]
    raw["student"]["lora"] = {"rank": 8, "alpha": 24}
    commands.append(rl(tmp_path, "all", raw))
    named, every = (one["config"] for one in prime_rl.run(READ, commands=commands))
    for config in (named, every):
        trainer, student = config["trainer"], config["orchestrator"]
        own = trainer["model"]["lora"]
        assert (own["rank"], own["alpha"], own["dropout"]) == (8, 24.0, 0.0)
        assert trainer["model"]["ac"]["mode"] == "full"
        assert student["model"]["lora"] == {"name": "r8-a24.0", "rank": 8, "alpha": 24.0}
        inference = config["inference"]
        vllm = inference.get("vllm", inference)
        assert vllm["enable_lora"] and vllm["max_lora_rank"] == 8
    assert named["trainer"]["model"]["lora"]["target_modules"] == lora["targets"]
    usual = every["trainer"]["model"]["lora"]["target_modules"]
    assert {f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")} <= {*usual}


TRIGGERS = """
import types
from prime_rl.orchestrator.eval_source import EvalSource

config = types.SimpleNamespace(skip_first_step=False, **table)
environment = types.SimpleNamespace(name="e", examples=[], config=config)
source = EvalSource([environment], config)
result = [bool(source.trigger(step)) for step in steps]
"""


def test_evaluation_every_0_is_before_and_after_the_run(prime_rl):
    """The orchestrator asks at its start and after each batch."""
    steps = 7
    table = export_table("head", eval={"every": 0})["orchestrator"]["eval"]
    asked = list(range(1, steps + 2))
    triggers = prime_rl.run(TRIGGERS, table=table, steps=asked)
    assert triggers == [True] + [False] * (steps - 1) + [True]


def test_policy_that_scores_itself_has_a_server_for_k(prime_rl, tmp_path):
    """vLLM's default of 20 log-probs is enough for k = 8."""
    raw = {**qwen3_tables(), "teacher": {"policy": {"update": "live"}}}
    raw["loss"] = {"type": "self_distillation"}  # with k = 32
    commands = [rl(tmp_path, "default", raw)]
    raw["loss"]["k"] = 8
    commands.append(rl(tmp_path, "small", raw))
    answers = prime_rl.run(READ, commands=commands)
    assert [answer["vllm"]["max_logprobs"] for answer in answers] == [32, None]


def test_prime_rl_parses_tool_calls_of_a_model_in_a_directory(prime_rl, tmp_path):
    """By the renderer in training, by its server in evaluation. A name would tell it neither."""
    models = {"student": str(tmp_path / "student"), "teacher": str(tmp_path / "teacher")}
    path = tmp_path / "run.toml"
    path.write_text(export_recipe(load_recipe(AGENT), "head", models).text())
    (answer,) = prime_rl.run(READ, commands=[["rl", "@", str(path)]])
    assert answer["vllm"]["tool_call_parser"] == "hermes"
    assert answer["vllm"]["enable_auto_tool_choice"] is True
    renderer = answer["config"]["orchestrator"]["renderer"]
    assert (renderer["name"], renderer["tool_parser"]) == ("default", "qwen3")


def commands_of(path):
    """Yield the commands in the comments of a recipe, each as a list of words."""
    comments = [line for line in path.read_text().splitlines(keepends=True) if line[:1] == "#"]
    text = "".join(comments).replace("\\\n", " ")
    for line in re.findall(r"^# {5,}CUDA_VISIBLE_DEVICES=\S+ (.*)$", text, re.MULTILINE):
        yield shlex.split(line.replace("#", " "))


def test_prime_rls_inference_takes_the_teachers_command(prime_rl):
    """The command in the export's head, and those in the recipe's own comment."""
    head = "\n".join(export_recipe(load_recipe(QWEN3), "head").head)
    exported = shlex.split(re.search(r"^ +inference (--.*)$", head, re.MULTILINE)[1])
    commands = [words for words in commands_of(QWEN3) if words[0] == "inference"]
    assert commands[0] == ["inference", *exported]
    answers = prime_rl.run(READ, commands=commands)
    expected = (("Qwen/Qwen3-8B", 0.9), ("Qwen/Qwen3-4B", 0.45))
    usual = {"port": 8001, "dtype": "auto", "seed": 0, "max_logprobs": 32}
    for answer, (model, share) in zip(answers, expected, strict=True):
        of_command = {**usual, "model": model, "gpu_memory_utilization": share}
        assert of_command.items() <= answer["vllm"].items()
        assert answer["config"]["enable_fp32_lm_head"] is True  # as the export's head says


SCHEDULES = """
import types
import torch
from prime_rl.trainer.scheduler import setup_scheduler

result = []
for steps, table in cases:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    config = types.SimpleNamespace(**{"min_lr": 0.0, **table})
    schedule = setup_scheduler(optimizer, config, steps, 1.0)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    result.append(rates)
"""


def test_prime_rls_scheduler_runs_every_schedule(prime_rl):
    """The first step after the warm-up is at the peak, as in the local engine."""
    cases = [
        {"steps": steps, "warmup_steps": warmup, "schedule": kind}
        for kind in ("constant", "linear", "cosine")
        for steps in (1, 2, 3, 8)
        for warmup in range(steps + 2)
    ]
    schedules = [export_table("head", trainer=case)["trainer"]["scheduler"] for case in cases]
    pairs = [[case["steps"], table] for case, table in zip(cases, schedules, strict=True)]
    for case, rates in zip(cases, prime_rl.run(SCHEDULES, cases=pairs), strict=True):
        steps, warmup = case["steps"], case["warmup_steps"]
        if warmup < steps:
            assert rates[warmup] == pytest.approx(1.0), case
        if case["schedule"] == "constant" or steps - warmup <= 1:
            flat = [1.0] * (steps - warmup if warmup < steps else 0)
            assert rates[warmup:] == pytest.approx(flat), case
        else:
            assert rates[-1] < rates[warmup], case
