"""Recipes in prime-rl's words: what is written, what is refused, and that prime-rl's own parser takes it."""

import copy
import json
import re
import shlex
import subprocess
import tomllib
import types
from pathlib import Path
from typing import get_args

import pytest
import torch
from pydantic import BaseModel

from prime_composer.problems.config import DataConfig, Problem
from prime_composer.recipe.loading import load_recipe, parse_recipe
from prime_composer.recipe.routing import Routing
from prime_composer.recipe.schema import Recipe, RecipeError
from prime_composer.upstream import export
from prime_composer.upstream.environment import load_split
from prime_composer.upstream.export import (
    CARRIED,
    NOT_CARRIED,
    UNREAD,
    export_recipe,
    not_carried,
    to_toml,
)
from prime_composer.upstream.launch import comment_at_head
from prime_composer.upstream.orchestrator import HEADER
from prime_composer.upstream.versions import VERSIONS as DIALECTS
from tests.prime_rl_checkout import REPO, VERSIONS
from tests.upstream.make_venvs import python_of, verifiers_of

E2E = Path(__file__).parent / "e2e"

from tests.upstream.e2e import cpu_recipe, launch_run

RECIPES = sorted(
    path for path in (REPO / "recipes").rglob("*.toml") if path.parent.name != "studies"
)


def recipe(**changes):
    raw = {
        "student": {"model": "a/student"},
        "teacher": {"model": "a/teacher", "url": "http://host:8001"},
        "loss": {"type": "topk_reverse_kl", "k": 16},
        "rollout": {"group_size": 2, "max_tokens": 64, "max_model_len": 256},
        "data": {},
        "trainer": {"steps": 7, "batch_size": 8, "lr": 1e-3},
    }
    for name, table in changes.items():
        raw[name] = {**raw.get(name, {}), **table}
    return parse_recipe(raw)


def native(dialect, **changes):
    return tomllib.loads(export_recipe(recipe(**changes), dialect))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_every_dialect_says_the_same_way(dialect):
    table = native(dialect)
    assert (
        table["max_steps"] == 7
        and table["seq_len"] == 256
        and table["model"] == {"name": "a/student"}
    )
    assert table["orchestrator"]["batch_size"] == 8 and table["orchestrator"]["group_size"] == 2
    assert table["orchestrator"]["train"]["sampling"]["max_completion_tokens"] == 64
    loss = table["trainer"]["loss"]
    assert loss["type"] == "custom" and loss["import_path"] == "prime_composer.upstream.loss_fn"
    assert loss["kwargs"] == {"type": "topk_reverse_kl", "k": 16}
    assert table["trainer"]["optim"]["lr"] == 1e-3


def test_the_teacher_stands_where_each_version_looks_for_it():
    old = native("v0.6")["orchestrator"]
    assert old["training_mode"] == "opd"
    assert old["teacher"] == {
        "model": {"name": "a/teacher"},
        "client": {"base_url": ["http://host:8001/v1"]},
    }
    for dialect, url in (
        ("v0.7", ["http://host:8001/v1"]),
        ("v0.8", ["http://host:8001/v1"]),
        ("head", "http://host:8001/v1"),
    ):
        assert native(dialect)["orchestrator"]["algo"] == {
            "type": "opd", "teacher": {"name": "a/teacher", "base_url": url}
        }  # fmt: skip


def test_v0_6_does_not_drop_groups_that_earn_the_same_reward():
    kinds = [entry["type"] for entry in native("v0.6")["orchestrator"]["post_batch_filters"]]
    assert kinds == ["gibberish", "repetition"]
    assert "post_batch_filters" not in native("head")["orchestrator"]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_top_p_goes_through_the_request_body(dialect):
    assert native(dialect, rollout={"top_p": 0.9})["orchestrator"]["train"]["sampling"][
        "extra_body"
    ] == {"top_p": 0.9}
    assert "extra_body" not in native(dialect)["orchestrator"]["train"]["sampling"]


def test_a_loss_with_two_eras_is_told_which_one_it_is_in():
    loss = {"type": "sampled_reverse_kl", "k": None}
    loss.pop("k")
    for dialect, era in (("v0.6", "v0_6"), ("v0.7", "v0_7"), ("head", "v0_7")):
        text = export_recipe(
            parse_recipe({**recipe().model_dump(exclude_unset=True), "loss": loss}), dialect
        )
        assert tomllib.loads(text)["trainer"]["loss"]["kwargs"]["dialect"] == era


def test_native_settings_win_and_a_dialects_own_table_counts_for_it_alone():
    extra = {"orchestrator": {"batch_size": 99}, "head": {"seq_len": 1}, "wandb": {"project": "p"}}
    assert native("head", prime_rl=extra)["orchestrator"]["batch_size"] == 99
    assert native("head", prime_rl=extra)["seq_len"] == 1
    assert native("v0.6", prime_rl=extra)["seq_len"] == 256
    assert "head" not in native("v0.6", prime_rl=extra)


@pytest.mark.parametrize(
    "changes,said",
    [
        ({"rollout": {"student_fraction": 0.5}}, "rollout.student_fraction"),
        ({"loss": {"k": "full"}}, 'loss.k = "full"'),
    ],
)
def test_what_prime_rl_cannot_do_is_named(changes, said):
    with pytest.raises(RecipeError, match=said):
        export_recipe(recipe(**changes), "head")


def told(**policy):
    return parse_recipe({**recipe().model_dump(exclude_unset=True), "teacher": {"policy": policy}})


def test_self_distillation_is_prime_rls_opsd_with_the_datas_solution_as_the_hint():
    for dialect in ("v0.7", "v0.8", "head"):
        table = tomllib.loads(export_recipe(told(update="live"), dialect))
        assert table["orchestrator"]["algo"] == {"type": "opsd", "demo_key": "answer"}


@pytest.mark.parametrize(
    "policy,key",
    [
        ({"update": "live", "hint": "feedback"}, "teacher.policy.hint"),
        ({"update": "ema"}, "teacher.policy.update"),
        ({"update": "live", "template": "{question} {hint}"}, "teacher.policy.template"),
    ],
)
def test_what_opsd_cannot_do_is_refused_by_name(policy, key):
    with pytest.raises(RecipeError, match=key):
        export_recipe(told(**policy), "head")


def test_v0_6_has_no_self_distillation():
    with pytest.raises(RecipeError, match="v0.6 has no self-distillation"):
        export_recipe(told(update="live"), "v0.6")


def test_a_prepared_model_has_to_be_built_first():
    raw = tomllib.loads((REPO / "recipes" / "gsm8k_opd.toml").read_text())
    parsed = parse_recipe(raw)
    with pytest.raises(RecipeError, match="prime-rl prepare"):
        export_recipe(parsed, "head")
    text = export_recipe(parsed, "head", {"student": "/s", "teacher": "/t"})
    assert tomllib.loads(text)["model"]["name"] == "/s"


TWO = {
    "a": {"model": "a/first", "url": "http://a:8001"},
    "b": {"model": "a/second", "url": "http://b:8001", "weight": 3.0},
}
A = {"url": "http://a:8001/v1", "model": "a/first"}
B = {"url": "http://b:8001/v1", "model": "a/second"}
ENTRIES = {"v0.6": "env", "v0.7": "env", "v0.8": "source", "head": "source"}


def several(dialect, **changes):
    raw = {**recipe().model_dump(exclude_unset=True), "teachers": TWO, **changes}
    del raw["teacher"]
    if "environments" in raw:
        del raw["data"]
    return tomllib.loads(export_recipe(parse_recipe(raw), dialect))


def mixed_and_routed(folder):
    """A recipe with two environments, one of which has rows that name their teachers."""
    rows = [
        {"question": f"{i}?", "answer": f"#### {i}", **({"by": "ab"[i % 2]} if i % 4 else {})}
        for i in range(1, 13)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    environments = {
        "sums": {"teacher": "a"},
        "rows": {"source": "jsonl", "path": str(folder / "rows.jsonl"), "teacher_key": "by"},
    }
    raw = {**recipe().model_dump(exclude_unset=True), "teachers": TWO, "environments": environments}
    raw["teachers"] = {"a": {**TWO["a"], "api_key_var": "A_KEY"}, "b": TWO["b"]}
    raw["student"] = {"model": "Qwen/Qwen3-0.6B"}  # a name that prime-rl has a renderer for
    path = folder / "mixed_and_routed.recipe.toml"
    path.write_text(
        to_toml({key: value for key, value in raw.items() if key not in ("teacher", "data")})
    )
    return path


def test_a_mixture_for_all_travels_in_the_header_of_the_teachers_client():
    told = [{**A, "weight": 0.25}, {**B, "weight": 0.75}]
    client = several("v0.6")["orchestrator"]["teacher"]["client"]
    assert json.loads(client["headers"][HEADER]) == told
    for dialect in ("v0.7", "v0.8", "head"):
        table = several(dialect)
        assert json.loads(table["orchestrator"]["algo"]["teacher"]["headers"][HEADER]) == told
        assert table["trainer"]["loss"]["kwargs"]["adapter"] is True


def test_each_server_has_its_own_api_key():
    policy = {"backend": "server", "url": "http://policy:8000", "api_key_var": "POLICY_KEY"}
    for dialect in DIALECTS:
        orchestrator = native(dialect, teacher={"api_key_var": "MATH_KEY"}, rollout=policy)[
            "orchestrator"
        ]
        teacher = (
            orchestrator["teacher"]["client"]
            if dialect == "v0.6"
            else orchestrator["algo"]["teacher"]
        )
        client = orchestrator["student" if dialect == "v0.6" else "model"]["client"]
        assert (teacher["api_key_var"], client["api_key_var"]) == ("MATH_KEY", "POLICY_KEY")
        mixed = several(
            dialect, teachers={"a": TWO["a"], "b": {**TWO["b"], "api_key_var": "B_KEY"}}
        )["orchestrator"]
        teacher = mixed["teacher"]["client"] if dialect == "v0.6" else mixed["algo"]["teacher"]
        assert json.loads(teacher["headers"][HEADER]) == [
            {**A, "weight": 0.25},
            {**B, "weight": 0.75, "api_key_var": "B_KEY"},
        ]
        assert "api_key_var" not in teacher  # prime-rl's default


def test_each_environment_has_its_own_teacher():
    environments = {"sums": {"teacher": "a"}, "code": {"teacher": "b", "ratio": 2.0, "seed": 1}}
    for dialect in DIALECTS:
        table = several(dialect, environments=environments)
        orchestrator = table["orchestrator"]
        entries = {entry["name"]: entry for entry in orchestrator["train"][ENTRIES[dialect]]}
        assert {name: entry["ratio"] for name, entry in entries.items()} == {
            "sums": 1.0,
            "code": 2.0,
        }
        if dialect == "v0.6":  # one client; the header tells the environments apart
            told = json.loads(orchestrator["teacher"]["client"]["headers"][HEADER])
            assert told == {"sums": [{**A, "weight": 1.0}], "code": [{**B, "weight": 1.0}]}
            assert table["trainer"]["loss"]["kwargs"]["adapter"] is True
        else:  # prime-rl's own routing, without us
            assert (
                "algo" not in orchestrator and "adapter" not in table["trainer"]["loss"]["kwargs"]
            )
            for name, teacher in (("sums", A), ("code", B)):
                found = entries[name]["algo"]["teacher"]
                assert found["name"] == teacher["model"] and teacher["url"] in (
                    found["base_url"],
                    *found["base_url"],
                )
                assert "headers" not in found


def test_rows_that_name_their_teacher_become_an_environment_for_each(tmp_path):
    table = tomllib.loads(export_recipe(load_recipe(mixed_and_routed(tmp_path)), "head"))
    entries = {entry["name"]: entry for entry in table["orchestrator"]["train"]["source"]}
    assert set(entries) == {"sums", "rows-a", "rows-b", "rows-others"}
    assert sum(entries[name]["ratio"] for name in entries if name != "sums") == pytest.approx(1.0)
    assert entries["rows-b"]["env"]["taskset"]["rows_of"] == "b"
    assert entries["rows-b"]["algo"]["teacher"]["name"] == "a/second"
    assert json.loads(entries["rows-others"]["algo"]["teacher"]["headers"][HEADER])[1] == {
        **B,
        "weight": 0.75,
    }


@pytest.mark.parametrize("name,more", [("others", {}), ("b", {"rows-b": {"seed": 1}})])
def test_environments_that_would_have_one_name_are_refused(tmp_path, name, more):
    rows = [
        {"question": f"{i}?", "answer": f"#### {i}", "by": name if i % 2 else None}
        for i in range(1, 41)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    environments = {
        "rows": {
            "source": "jsonl",
            "path": str(tmp_path / "rows.jsonl"),
            "teacher_key": "by",
            "teacher": "a",
        }
    }
    with pytest.raises(RecipeError, match=f"would be called 'rows-{name}'.*Rename"):
        several(
            "head", teachers={"a": TWO["a"], name: TWO["b"]}, environments={**environments, **more}
        )


def test_the_rows_of_an_environment_are_those_that_name_its_teacher(tmp_path):
    mixed_and_routed(tmp_path)
    data = DataConfig(source="jsonl", path=tmp_path / "rows.jsonl", teacher_key="by", hold_out=0.3)
    parts = {
        name: load_split(data, "train", name) + load_split(data, "test", name)
        for name in ("a", "b", "")
    }
    assert {name: sorted(int(p.final) for p in found) for name, found in parts.items()} == {
        "a": [2, 6, 10], "b": [1, 3, 5, 7, 9, 11], "": [4, 8, 12]
    }  # fmt: skip
    assert len(load_split(data, "train", None)) == sum(
        len(load_split(data, "train", name)) for name in parts
    )


def test_teachers_without_a_url_are_looked_for_on_this_host_one_port_after_another():
    teachers = {name: {"model": f"a/{name}"} for name in ("a", "b")}
    told = json.loads(
        several("head", teachers=teachers)["orchestrator"]["algo"]["teacher"]["headers"][HEADER]
    )
    assert [entry["url"] for entry in told] == [
        "http://localhost:8001/v1",
        "http://localhost:8002/v1",
    ]


def test_a_teacher_behind_a_gateway_is_not_prime_rls_to_start():
    here = export_recipe(recipe(loss={"k": 64}), "head")
    assert (
        "#     inference --vllm.model a/teacher --server.port 8001 --vllm.max-logprobs 64" in here
    )
    there = export_recipe(
        recipe(loss={"k": 64}, teacher={"url": "https://teachers.example.com"}), "head"
    )
    assert (
        "#     a/teacher at https://teachers.example.com/v1, with max_logprobs = 64" in there
        and "inference --" not in there
    )


def test_an_unknown_dialect_lists_the_known_ones():
    with pytest.raises(RecipeError, match="v0.6, v0.7, v0.8, head"):
        export_recipe(recipe(), "v0.9")


def test_toml_survives_a_round_trip():
    table = {
        "a": 1, "b": 1e-7, "c": True, "d": 'quote " and \\ and é and \n', "e": [1, 2], "f": [], "g": {"h": {"i": "x"}},
        "odd key": {"j": 1}, "k": [{"l": 1, "m": {"n": 2}}, {"l": 2}], "o": {"p": [{"q": 1}]}, "empty": {},
    }  # fmt: skip
    assert tomllib.loads(to_toml(table)) == table


@pytest.mark.parametrize("version", VERSIONS)
def test_prime_rls_own_parser_and_dry_run_take_every_recipe(trees, tmp_path, version):
    python = python_of("v0.6" if version == "v0.6.0" else "newest")
    if not python.exists():
        pytest.skip("no environment for it (python tests/upstream/make_venvs.py)")
    tree = trees(version)
    dialect = cpu_recipe.DIALECT[version]
    files, refused = [], {}
    for path in [*RECIPES, mixed_and_routed(tmp_path)]:
        try:
            loaded = load_recipe(path)
            models = {
                "student": "Qwen/Qwen3-0.6B",
                **{
                    teacher.table: "Qwen/Qwen3-4B"
                    for teacher in Routing.of_recipe(loaded).teachers
                },
            }
            text = export_recipe(loaded, dialect, models)
        except RecipeError as error:
            refused[path.stem] = str(error)
            continue
        target = tmp_path / f"{path.stem}.toml"
        target.write_text(text)
        files.append(str(target))
    assert files
    env = launch_run.environment(str(python), tree, tmp_path, PRIME_COMPOSER="1")
    del env["PRIME_CPU_RIG"]
    other = verifiers_of(version)
    if other is not None:
        if not other.exists():
            pytest.skip(f"no verifiers for {version} (python tests/upstream/make_venvs.py newest)")
        env["PYTHONPATH"] = f"{other}{launch_run.os.pathsep}{env['PYTHONPATH']}"
    command = [str(python), str(E2E / "dry_run.py"), *files]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-2000:] + done.stderr[-3000:]
    results = json.loads(lines[-1].removeprefix("RESULT "))
    bad = {Path(file).stem: result for file, result in results.items() if result != "ok"}
    assert not bad, f"{bad}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    # A recipe may ask for what prime-rl cannot do; it then says so by name, and never half of it is exported.
    for stem, reason in refused.items():
        assert "--engine local" in reason, (stem, reason)


# ------------------------------------------------------------------------------------- what each key of a recipe becomes


def keys_of(section, prefix=""):
    """Every key that a recipe may have, by its types; tables of several are named like those of one."""
    for name, field in section.model_fields.items():
        found = [field.annotation, *get_args(field.annotation)]
        tables = [
            option for option in found if isinstance(option, type) and issubclass(option, BaseModel)
        ]
        if name in ("loss", "prepare"):
            yield prefix + name
        elif name in ("teachers", "environments"):
            yield from keys_of(tables[0], "teacher." if name == "teachers" else "data.")
        elif tables:
            yield from keys_of(tables[0], f"{prefix}{name}.")
        else:
            yield prefix + name


def test_every_key_of_a_recipe_is_carried_or_refused_or_said_not_to_be():
    classes = [CARRIED, UNREAD, frozenset(NOT_CARRIED)]
    known = frozenset().union(*classes)
    assert set(keys_of(Recipe)) == known
    assert len(known) == sum(map(len, classes))


OTHER_VALUES = {
    "student.model": "b/student", "student.prepare": {}, "teacher.model": "b/teacher", "teacher.prepare": {},
    "teacher.url": "http://other:1", "teacher.api_key_var": "A_KEY", "rollout.api_key_var": "A_KEY",
    "teacher.weight": 2.0, "teacher.policy.hint": "feedback", "teacher.policy.update": "ema",
    "teacher.policy.template": "{question}{hint}", "loss": {"type": "topk_reverse_kl", "k": 17}, "output_dir": "elsewhere",
    "prime_rl": {"seq_len": 7}, "data.source": "hub", "data.path": "rows.jsonl", "data.hub_id": "a/b", "data.hub_name": "c",
    "data.size": 20, "data.seed": 1, "data.operations": (1,), "data.hold_out": 0.2, "data.calculator_annotations": True,
    "data.prompt_template": "{question}", "data.answer_check": "math_verify", "data.teacher_key": "by", "data.ratio": 2.0,
    "data.teacher": "b", "rollout.url": "http://student:1", "rollout.group_size": 4, "rollout.temperature": 0.5,
    "rollout.top_p": 0.5, "rollout.max_tokens": 65, "rollout.max_model_len": 257, "rollout.student_fraction": 0.5,
    "rollout.gpu_memory_utilization": 0.5, "trainer.steps": 8, "trainer.batch_size": 16, "trainer.lr": 1e-4,
    "trainer.betas": (0.5, 0.5), "trainer.weight_decay": 0.1, "trainer.max_grad_norm": 2.0, "trainer.warmup_steps": 2,
    "trainer.schedule": "cosine", "trainer.gradient_checkpointing": True, "eval.every": 3, "eval.size": 9,
    "logging.wandb.project": "p", "logging.wandb.name": "n", "checkpoint.every": 3, "checkpoint.keep": 5,
}  # fmt: skip
COMPANIONS = {
    "rollout.url": {"rollout": {"backend": "server", "url": "http://other:1"}},
    "rollout.api_key_var": {"rollout": {"backend": "server", "url": "http://other:1"}},
    "data.path": {"data": {"source": "jsonl", "path": "other.jsonl"}},
    "logging.wandb.name": {"logging": {"wandb": {"project": "p"}}},
}


def with_key(key, value):
    """The recipe of these tests with one key set, and what that key needs beside it."""
    raw = recipe().model_dump(exclude_unset=True)
    if key in ("teacher.weight", "data.teacher", "data.teacher_key"):
        raw = {**{k: v for k, v in raw.items() if k != "teacher"}, "teachers": copy.deepcopy(TWO)}
    if key == "data.teacher_key":
        raw["data"]["source"] = "hub"
    if key.startswith("teacher.policy"):
        raw["teacher"] = {"policy": {"update": "live"}}
    for section, table in COMPANIONS.get(key, {}).items():
        raw.setdefault(section, {}).update(copy.deepcopy(table))
    if key.endswith(".prepare"):
        del raw[key.split(".")[0]]["model"]
    plain = copy.deepcopy(raw)
    names = key.replace("teacher.weight", "teachers.a.weight").split(".")
    here = raw
    for name in names[:-1]:
        here = here.setdefault(name, {})
    here[names[-1]] = value
    return plain, raw


def test_a_carried_key_changes_the_export_or_is_refused_by_its_name(monkeypatch):
    monkeypatch.setattr(
        export, "load_problems", lambda data: ([Problem("q", "#### 1", teacher="a")] * 2, [])
    )
    assert set(OTHER_VALUES) == CARRIED
    for key, value in OTHER_VALUES.items():
        plain, changed = with_key(key, value)
        models = {"student": "/s", "teacher": "/t"}
        try:
            text = export_recipe(parse_recipe(changed), "head", models)
        except RecipeError as error:
            assert str(error).startswith(f"{key} = "), (key, error)
            continue
        try:
            before = export_recipe(parse_recipe(plain), "head", models)
        except RecipeError:
            assert key.endswith(".prepare"), key  # a model needs one origin
            continue
        assert tomllib.loads(text) != tomllib.loads(before), key


LOSSY = {
    "teacher.backend": "vllm", "teacher.dtype": "float16", "teacher.gpu_memory_utilization": 0.5,
    "rollout.backend": "transformers", "rollout.weights_dir": "there", "data.chat_template": False,
    "trainer.micro_batch_tokens": 99, "trainer.dtype": "float32", "trainer.seed": 1, "eval.kl_size": 3, "eval.kl_support": 8,
    "logging.tensorboard": True,
}  # fmt: skip


@pytest.mark.parametrize("key", LOSSY)
def test_a_key_that_is_not_carried_is_named_at_the_head_and_on_stderr(key, capsys):
    assert set(LOSSY) == set(NOT_CARRIED)
    raw = recipe().model_dump(exclude_unset=True)
    del raw["teacher"]["url"]  # a recipe's `url` and another backend contradict each other
    section, name = key.split(".")
    raw.setdefault(section, {})[name] = LOSSY[key]
    text = export_recipe(parse_recipe(raw), "head")
    head = comment_at_head(text)
    said = capsys.readouterr().err
    assert f"#     {key}: {NOT_CARRIED[key].why}\n" in head
    assert said == f"not carried to prime-rl: {key} ({NOT_CARRIED[key].why})\n"


def test_what_prime_rl_does_anyway_is_no_loss(capsys):
    raw = recipe().model_dump(exclude_unset=True)
    raw["trainer"]["dtype"], raw["rollout"]["backend"], raw["data"]["chat_template"] = (
        "bfloat16",
        "vllm",
        True,
    )
    raw["logging"] = {"tensorboard": False}
    assert (
        "Not carried" not in export_recipe(parse_recipe(raw), "head")
        and not capsys.readouterr().err
    )


def test_a_key_of_several_is_named_as_the_recipe_writes_it():
    teachers = copy.deepcopy(TWO)
    teachers["b"]["dtype"] = "float16"
    raw = {**recipe().model_dump(exclude_unset=True), "teachers": teachers}
    raw["environments"] = {"sums": {"chat_template": False}}
    del raw["teacher"], raw["data"]
    assert list(not_carried(parse_recipe(raw))) == [
        "teachers.b.dtype",
        "environments.sums.chat_template",
    ]


# ------------------------------------------------------------------------ what prime-rl's own code makes of these settings

READ = """
import json, sys
from prime_rl.configs.inference import InferenceConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.utils.config import cli
found = []
for words in json.loads(sys.argv[1]):
    sys.argv = words
    config = cli(RLConfig if words[0] == "rl" else InferenceConfig)
    inference = config.inference if words[0] == "rl" else config
    arguments = inference.to_namespace() if hasattr(inference, "to_namespace") else inference.to_vllm()
    for key, value in (getattr(inference, "vllm_extra", None) or {}).items():  # as its server() does
        setattr(arguments, key, value)
    names = ("model", "port", "dtype", "seed", "max_logprobs", "gpu_memory_utilization")
    vllm = {key: getattr(arguments, key, None) for key in names}
    found.append({"config": config.model_dump(mode="json"), "vllm": vllm})
print("RESULT " + json.dumps(found))
"""


@pytest.fixture
def read(trees, tmp_path):
    """What prime-rl's parser makes of command lines: the config, and the arguments that vLLM is started with."""

    def parse(version, *commands):
        python = python_of("v0.6" if version == "v0.6.0" else "newest")
        other = verifiers_of(version)
        if not python.exists() or (other is not None and not other.exists()):
            pytest.skip("no environment for it (python tests/upstream/make_venvs.py)")
        env = launch_run.environment(str(python), trees(version), tmp_path)
        del env["PRIME_CPU_RIG"]
        if other is not None:
            env["PYTHONPATH"] = f"{other}{launch_run.os.pathsep}{env['PYTHONPATH']}"
        command = [str(python), "-c", READ, json.dumps(commands)]
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        assert lines, done.stdout[-2000:] + done.stderr[-2000:]
        return json.loads(lines[-1].removeprefix("RESULT "))

    return parse


def rl(folder, name, dialect, raw):
    """prime-rl's command for a recipe's export."""
    path = folder / f"{name}.toml"
    path.write_text(export_recipe(parse_recipe(raw), dialect))
    return ["rl", "@", str(path)]


@pytest.mark.parametrize("version", VERSIONS)
def test_prime_rl_is_told_to_checkpoint_recompute_evaluate_and_sample_as_the_recipe_says(
    read, tmp_path, version
):
    dialect = cpu_recipe.DIALECT[version]
    raw = {**recipe().model_dump(exclude_unset=True), "student": {"model": "Qwen/Qwen3-0.6B"}}
    raw |= {"checkpoint": {"every": 0, "keep": 3}, "eval": {"every": 2, "size": 50}}
    raw["trainer"] |= {"gradient_checkpointing": True, "dtype": "bfloat16", "seed": 5}
    raw["rollout"]["gpu_memory_utilization"] = 0.5
    first = rl(tmp_path, "first", dialect, raw)
    raw["trainer"]["gradient_checkpointing"] = False
    found, other = read(version, first, rl(tmp_path, "other", dialect, raw))
    config, trainer = found["config"], found["config"]["trainer"]
    # Its trainer writes the last weights where it has a ckpt table; without an interval, nothing before.
    assert trainer["ckpt"]["interval"] is None and trainer["ckpt"]["keep_last"] == 3
    assert trainer["model"]["ac"]["mode"] == "full"
    assert found["vllm"]["dtype"] == "bfloat16" and found["vllm"]["seed"] == 5
    assert found["vllm"]["gpu_memory_utilization"] == 0.5
    evaluation = config["orchestrator"]["eval"]
    (source,) = evaluation[ENTRIES[dialect]]
    assert (source["interval"], source["num_examples"], source["group_size"]) == (2, 50, 1)
    assert (
        source["sampling"]["temperature"] == 0.0
        and source["sampling"]["max_completion_tokens"] == 64
    )
    settings = (
        source["args"]
        if dialect == "v0.6"
        else (source if dialect == "v0.7" else source["env"])["taskset"]
    )
    assert settings["split"] == "test"
    model = other["config"]["trainer"]["model"]
    assert model["ac"] is None and model["ac_offloading"] is None


@pytest.mark.parametrize("version", VERSIONS)
def test_evaluation_0_is_before_the_first_batch_and_after_the_last(trees, version):
    source = (trees(version) / "src" / "prime_rl" / "orchestrator" / "eval_source.py").read_text()
    code = "\n".join(
        line
        for line in source.splitlines()
        if not line.startswith(("from prime_rl", "import verifiers"))
    )
    names = {}
    exec(compile(code, "eval_source.py", "exec"), names)  # noqa: S102
    dialect, steps = cpu_recipe.DIALECT[version], 7
    table = native(dialect, eval={"every": 0})["orchestrator"]["eval"]
    config = types.SimpleNamespace(skip_first_step=False, **table)
    wrapped = names["EvalSource"](
        [types.SimpleNamespace(name="e", examples=[], config=config)], config
    )
    # The orchestrator asks at its start and after each batch that it sent, when it has counted on; v0.6 counts from 0.
    start = 0 if version == "v0.6.0" else 1
    assert [bool(wrapped.trigger(start + sent)) for sent in range(steps + 1)] == [True] + [
        False
    ] * (steps - 1) + [True]


@pytest.mark.parametrize("version", ["v0.7.0", "v0.8.0", "newest"])
def test_a_policy_that_scores_itself_has_a_server_that_answers_for_k(read, tmp_path, version):
    dialect = cpu_recipe.DIALECT[version]
    raw = {**recipe().model_dump(exclude_unset=True), "student": {"model": "Qwen/Qwen3-0.6B"}}
    raw |= {
        "teacher": {"policy": {"update": "live"}},
        "loss": {"type": "self_distillation"},
    }  # whose k is 32
    first = rl(tmp_path, "first", dialect, raw)
    raw["loss"]["k"] = 8  # vLLM's own 20 are enough
    found = read(version, first, rl(tmp_path, "small", dialect, raw))
    assert [one["vllm"]["max_logprobs"] for one in found] == [32, None]


def test_a_students_server_of_ones_own_that_scores_is_told_so():
    raw = {
        **recipe().model_dump(exclude_unset=True),
        "teacher": {"policy": {"update": "live"}},
        "loss": {"type": "self_distillation"},
    }
    raw["rollout"] |= {"backend": "server", "url": "http://host:8000"}
    assert "start it with max_logprobs = 32" in comment_at_head(
        export_recipe(parse_recipe(raw), "head")
    )


def commands_of(path):
    """The commands in the head of a recipe, a list of words each, with the variables in front in a dict."""
    text = comment_at_head(path.read_text()).replace("\\\n", " ")
    lines = re.findall(r"^# {5,}(CUDA_VISIBLE_DEVICES=.*)$", text, re.MULTILINE)
    for line in lines:
        first, *words = shlex.split(line.replace("#", " "))
        yield [int(device) for device in first.partition("=")[2].split(",")], words


@pytest.mark.parametrize("version", VERSIONS)
def test_the_command_for_a_teachers_server_is_one_that_prime_rls_inference_takes(read, version):
    loaded = load_recipe(REPO / "recipes" / "gsm8k_opd_qwen3.toml")
    head = comment_at_head(export_recipe(loaded, cpu_recipe.DIALECT[version]))
    written_down = shlex.split(re.search(r"^# +inference (--.*)$", head, re.MULTILINE)[1])
    recipes_own = [
        words
        for _, words in commands_of(REPO / "recipes" / "gsm8k_opd_qwen3.toml")
        if words[0] == "inference"
    ]
    name = "--vllm.model" if version == "newest" else "--model.name"
    recipes_own = [words for words in recipes_own if words[1] == name]
    assert recipes_own[0] == ["inference", *written_down]
    found = read(version, *recipes_own)
    for one, model, share in zip(
        found, ("Qwen/Qwen3-8B", "Qwen/Qwen3-4B"), (0.9, 0.45), strict=True
    ):
        assert one["vllm"] == {
            "model": model, "port": 8001, "dtype": "auto", "seed": 0, "max_logprobs": 32, "gpu_memory_utilization": share
        }  # fmt: skip


def test_the_gpus_in_the_qwen3_recipes_commands_add_up():
    path = REPO / "recipes" / "gsm8k_opd_qwen3.toml"
    commands = list(commands_of(path))
    runs = [(gpus, words) for gpus, words in commands if words[0] == "prime-rl"]
    teachers = [gpus for gpus, words in commands if words[0] == "inference"]
    assert len(runs) == 2 and teachers == [[0]] * 4
    for gpus, words in runs:
        overrides = [
            value for word, value in zip(words, words[1:], strict=False) if word == "--set"
        ]
        loaded = load_recipe(path, overrides)
        deployment = loaded.prime_rl["deployment"]
        assert deployment["num_infer_gpus"] + deployment["num_train_gpus"] == len(gpus)
        # prime-rl hands out what it sees in order, inference first; the teacher is on GPU 0.
        shared = set(gpus[: deployment["num_infer_gpus"]]) & {0}
        assert loaded.rollout.gpu_memory_utilization + (0.45 if shared else 0) <= 0.9
        assert 0 not in gpus[deployment["num_infer_gpus"] :]


@pytest.mark.parametrize("version", VERSIONS)
def test_prime_rls_scheduler_runs_every_schedule_that_is_exported(trees, version):
    source = (trees(version) / "src" / "prime_rl" / "trainer" / "scheduler.py").read_text()
    names = {
        "SchedulerConfig": object,
        "OptimizerLike": object,
        "OffloadOptimizer": (),
        "CPUOffloadOptimizer": (),
    }
    code = "\n".join(line for line in source.splitlines() if not line.startswith("from prime_rl"))
    exec(compile(code, "scheduler.py", "exec", dont_inherit=True), names)  # noqa: S102
    for kind in ("constant", "linear", "cosine"):
        for steps in (1, 2, 3, 8):
            for warmup in range(steps + 2):
                changes = {"steps": steps, "warmup_steps": warmup, "schedule": kind}
                table = native("head", trainer=changes)["trainer"]["scheduler"]
                optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
                config = types.SimpleNamespace(**{"min_lr": 0.0, **table})
                schedule = names["setup_scheduler"](optimizer, config, steps, 1.0)
                rates = []
                for _ in range(steps):
                    rates.append(optimizer.param_groups[0]["lr"])
                    optimizer.step()
                    schedule.step()
                case = (kind, steps, warmup, rates)
                if (
                    warmup < steps
                ):  # the first step after the warm-up is at the peak, as in the local engine
                    assert rates[warmup] == pytest.approx(1.0), case
                if kind == "constant" or steps - warmup <= 1:
                    assert rates[warmup:] == pytest.approx(
                        [1.0] * (steps - warmup if warmup < steps else 0)
                    ), case
                else:
                    assert rates[-1] < rates[warmup], case


# ---------------------------------------------------------------------------------------------------------------- Slurm


@pytest.mark.parametrize("version", VERSIONS)
def test_in_prime_rls_job_scripts_the_command_before_the_run_comes_after_the_sync(trees, version):
    templates = trees(version) / "src" / "prime_rl" / "templates"
    for name in ("single_node_rl", "multi_node_rl"):
        text = (templates / f"{name}.sbatch.j2").read_text()
        places = [
            text.index("source .venv/bin/activate"),
            text.index("uv sync"),
            text.index("{{ pre_run_command }}"),
            text.index("uv run"),
        ]
        assert places == sorted(places)


def test_a_run_under_slurm_is_told_how_to_keep_the_package(capsys):
    remedy = 'pre_run_command = "uv pip install prime-composer"'
    assert "slurm" not in export_recipe(recipe(), "head").lower()
    text = export_recipe(recipe(prime_rl={"slurm": {"job_name": "x"}}), "head")
    assert f"#     {remedy}\n" in comment_at_head(text) and remedy in capsys.readouterr().err
    done = export_recipe(recipe(prime_rl={"slurm": {"pre_run_command": "make it so"}}), "head")
    assert remedy in comment_at_head(done) and not capsys.readouterr().err
    other = export_recipe(recipe(prime_rl={"v0.6": {"slurm": {"job_name": "x"}}}), "head")
    assert remedy not in other and not capsys.readouterr().err
