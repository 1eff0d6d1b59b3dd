"""The recipe of the whole-run tests: exported like a user's, with CPU settings in [prime_rl].

v0.6 has no export: its TOML is written here.
"""

from pathlib import Path

from prime_composer.recipe.loading import parse_recipe
from prime_composer.upstream.export import export_recipe
from prime_composer.upstream.export.toml import to_toml
from prime_composer.upstream.versions.toml_shapes import resume_table
from tests.upstream.e2e.launch_run import free_port

HERE = Path(__file__).resolve().parent
# prime-rl ends without waiting for its last broadcasts. It holds the third batch until policy v1 is
# there, so that a server has always taken new weights before the end of three steps.
STEPS, BATCH = 3, 8
MIXTURES = {"one": {"teacher": 0.5, "other": 0.5}, "more": {"teacher": 0.2, "other": 0.8}}


def native(
    student,
    teacher,
    models,
    loss,
    ranks=1,
    fused=True,
    seq_len=128,
    steps=STEPS,
    hint=None,
    other=None,
    resume=None,
    rl=False,
    group_size=1,
    taskset="tiny-taskset",
    asked_by=None,
    environments=None,
    rollout=None,
    lr=1e-2,
    replay=False,
    apart=False,
    prompt=None,
    lora=False,
    batch=BATCH,
):
    """Return head's native TOML: a tiny student and teacher, eight sums, three steps.

    Args:
        hint: the policy is its own teacher, with this hint.
        other: URL of a second teacher. The environments are then the recipe's own "one" and "more",
            each with its own mixture of the two.
        resume: False keeps a checkpoint of each step, True also resumes from the newest one.
        asked_by: who asks the teacher; None: what follows from the loss.
        environments: tables of the recipe's [environments], in the place of the sums.
        rollout: more keys of the recipe's [rollout]. A renderer there is used in the place of
            Qwen3's.
        prompt: the recipe's [teacher.prompt].
        replay: the trainer uses the experts that the student's server has used.
        rl: adds an environment with prime-rl's own rl loss. Our loss is not in the file
            then, but in PRIME_COMPOSER.
    """
    recipe = {
        "student": {"model": str(models / "student")},
        "teacher": {"model": str(models / "teacher"), "url": teacher},
        "loss": loss,
        "rollout": {
            "backend": "server",
            "url": student,
            "max_tokens": 12,
            "max_model_len": seq_len,
            "group_size": group_size,
            **(rollout or {}),
        },
        "data": {},
        "trainer": {"steps": steps, "batch_size": batch, "lr": lr},
        "checkpoint": {"every": 0 if resume is None else 1},
        "output_dir": "outputs",
    }
    if lora:
        recipe["student"]["lora"] = {"rank": 8, "alpha": 32}
    if apart:
        recipe["teacher"]["tokenizer"] = "own"
    if prompt is not None:
        recipe["teacher"]["prompt"] = prompt
    if asked_by is not None:
        recipe["teacher"]["asked_by"] = asked_by
    model = {
        "attn": "flash_attention_2",
        "impl": "custom",
        "fused_lm_head_token_chunk_size": 64 if fused else "disabled",
        "ac": "None",
        "ac_offloading": "None",
        "compile": "None",
        "optim_cpu_offload": False,
    }
    agent = {"harness": {"id": "tiny-harness"}, "runtime": {"type": "subprocess"}}
    sums = {"taskset": {"id": taskset}, "agent": agent}
    prime_rl = {
        "deployment": {"num_train_gpus": ranks, "num_infer_gpus": 1},
        "trainer": {"model": model, "enable_router_replay": replay},
        "weight_broadcast": {"type": "filesystem"},
        "rollout_transport": {"type": "filesystem"},
        "monitors": {"file": {}},
        "orchestrator": {
            "train": {"source": [{"name": "sums", "env": sums}]},
            # Two runs on one machine would meet at its default port.
            "env_server_base_port": free_port(),
            # A server with real metrics lets it grow to hundreds of rollouts in flight, and as many
            # worker processes.
            "concurrency": {"max_inflight": BATCH},
        },
    }
    if "renderer" not in recipe["rollout"]:
        prime_rl["orchestrator"]["renderer"] = {"name": "qwen3"}
    if hint is not None:
        recipe["teacher"] = {"policy": {"update": "live", "hint": hint}}
        prime_rl["orchestrator"]["algo"] = {"renderer": {"name": "qwen3"}}
    if other is not None:
        recipe["teachers"] = {
            "teacher": recipe.pop("teacher"),
            "other": {"model": str(models / "other"), "url": other},
        }
        recipe["environments"] = {
            "one": {"size": 20, "operations": [1], "prompt_template": "one {question}"},
            "more": {"size": 20, "operations": [2], "prompt_template": "more {question}"},
        }
        for name, mixture in MIXTURES.items():
            recipe["environments"][name]["teacher"] = mixture
        del recipe["data"], prime_rl["orchestrator"]["train"]
    if environments is not None:
        recipe["environments"] = environments
        del recipe["data"], prime_rl["orchestrator"]["train"]
    recipe["prime_rl"] = prime_rl
    table = export_recipe(parse_recipe(recipe), "head").table
    if resume:
        resume_table(table)
    if rl:
        del table["trainer"]["loss"]
        orchestrator = table["orchestrator"]
        orchestrator["group_size"] = 4
        dice = {"taskset": {"id": "tiny-dice"}, "agent": agent}
        orchestrator["train"]["source"][0]["algo"] = orchestrator.pop("algo")
        orchestrator["train"]["source"].append(
            {"name": "dice", "env": dice, "algo": {"type": "grpo"}}
        )
    text = to_toml(table)
    return text.replace(
        'id = "null"', 'id = "tiny-harness"'
    )  # upstream's own wants PyPI at run time


def five_lines(student, teacher, models, loss):
    """Return v0.6's native TOML: the same models, sums and steps; [trainer.loss] has ours."""
    table = {
        "max_steps": STEPS,
        "seq_len": 128,
        "output_dir": "outputs",
        "model": {"name": str(models / "student")},
        "orchestrator": {
            "batch_size": BATCH,
            "group_size": 1,
            "training_mode": "opd",
            # Groups of equal rewards have no advantage, and its filter would drop them.
            "post_batch_filters": [{"type": "gibberish"}, {"type": "repetition"}],
            "collect_inference_metrics": False,
            "train": {
                "env": [{"id": "tiny-env", "name": "sums"}],
                "sampling": {"temperature": 1.0, "max_completion_tokens": 12},
            },
            "teacher": {
                "model": {"name": str(models / "teacher")},
                "client": {"base_url": [teacher]},
            },
            "student": {"client": {"base_url": [student]}},
            "renderer": {"name": "qwen3"},
        },
        "trainer": {
            "loss": {
                "type": "custom",
                "import_path": "prime_composer.upstream.loss_fn",
                "kwargs": loss,
            },
            "optim": {"type": "adamw", "lr": 1e-2, "weight_decay": 0.0},
            "model": {"attn": "sdpa", "impl": "hf", "fused_lm_head_token_chunk_size": 64},
        },
        "deployment": {"num_train_gpus": 1, "num_infer_gpus": 1},
        "weight_broadcast": {"type": "filesystem"},
    }
    for part in ("trainer", "orchestrator"):
        table[part]["wandb"] = {"project": "test", "name": part, "offline": True}
    return to_toml(table)
