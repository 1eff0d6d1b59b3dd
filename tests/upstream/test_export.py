"""Export recipes: what each version's TOML says, what is refused, what is not carried."""

import copy
import json
import tomllib
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Literal, get_args, get_origin

import pytest
from pydantic import TypeAdapter, ValidationError

from prime_composer.problems.config import DataConfig, Problem
from prime_composer.problems.loading import ProblemSet
from prime_composer.recipe.carried import models_in
from prime_composer.recipe.loading import load_recipe, parse_recipe
from prime_composer.recipe.routing import Routing
from prime_composer.recipe.schema import Recipe, RecipeError
from prime_composer.upstream.environment import load_split
from prime_composer.upstream.export import export_recipe
from prime_composer.upstream.export import plan as export_plan
from prime_composer.upstream.settings import parse_loss_table
from prime_composer.upstream.versions.records import VERSIONS
from prime_composer.upstream.versions.toml_shapes import HEADER
from tests.prime_rl_checkout import REPO
from tests.recipe.marks import export_of, marks
from tests.upstream.export_recipes import (
    ALL_RECIPES,
    TWO,
    load_rows_recipe,
    recipe,
    tables,
)

MODELS = {"student": "/s", "teacher": "/t", "teachers.sums": "/a", "teachers.pairs": "/b"}
A = {"url": "http://a:8001/v1", "model": "a/first"}
B = {"url": "http://b:8001/v1", "model": "a/second"}


def changed(changes):
    """Return the tests' recipe with changes by section. A loss or a policy replaces its section."""
    raw = tables(**changes)
    if "policy" in raw.get("teacher", {}):
        raw["teacher"] = changes["teacher"]
    if "type" in changes.get("loss", {}):
        raw["loss"] = changes["loss"]
    for section, other in (("environments", "data"), ("teachers", "teacher")):
        if section in raw:
            del raw[other]
    return parse_recipe(raw)


def asked(by):
    """Return two teachers whom one process asks."""
    return {name: {**table, "asked_by": by} for name, table in TWO.items()}


POLICY = {"teacher": {"policy": {"update": "live"}}}
SELF = {**POLICY, "loss": {"type": "self_distillation"}}
REV = {"rev": {"id": "x"}}
LOCALLY = ".*--engine local"
REFUSED = {
    "samples of the data": ({"rollout": {"student_fraction": 0.5}},
                            rf"^rollout.student_fraction = 0.5: .*data's solutions{LOCALLY}"),
    "samples of a teacher": (
        {"rollout": {"other_source": "teacher", "student_fraction": 0.5}},
        rf"^rollout.student_fraction = 0.5: .*apart from the student's \(algo.type{LOCALLY}"),
    "a reference": ({"loss": {"type": "sampled_reverse_kl"}, "reference": {"start": True}},
                    rf"^\[reference\]: .*asks the teacher alone{LOCALLY}"),
    "a moving average": (
        {"teacher": {"policy": {"update": "ema"}}}, "^teacher.policy.update = .*'live'"),
    "a template": ({"teacher": {"policy": {"update": "live", "template": "{question} {hint}"}}},
                   "^teacher.policy.template = "),
    "a verdict on an environment by id": (
        {"teacher": {"policy": {"update": "live", "hint": "feedback"}}, "environments": REV},
        "^teacher.policy.hint = 'feedback': .* environments.rev has an id.*'sibling'"),
    "a system message beside a hint": ({**SELF, "data": {"system": "Be brief."}},
                                       rf"^data.system = 'Be brief.': .*system message{LOCALLY}"),
    "two prompts of one name": (
        {"teachers": {"a": {**TWO["a"], "prompt": {"system": "x"}}, "b": {**TWO["a"]}}},
        rf"^\[teachers.b.prompt\]: .*same and other prompts: name one of them{LOCALLY}"),
    "rows of Python": ({"data": {"source": "rows"}}, "^data.source = 'rows'.*name it in data.path"),
    "long answers": ({"rollout": {"max_tokens": 4096, "max_model_len": None}},
                     "^rollout.max_model_len = None.*4096.*Set it"),
    "two spellings of a version": ({"prime_rl": {"v0.9": {"seq_len": 1}, "v0_9": {"seq_len": 2}}},
                                   r"v0\.9 and v0_9 are one version: keep one"),
    "a table that is a value": ({"prime_rl": {"trainer": 3}}, "^prime_rl.trainer is a value"),
    "who asks, of two words": (
        {"teachers": {**asked("trainer"), "b": {**TWO["b"], "asked_by": "orchestrator"}}},
        "asked_by is 'orchestrator' and 'trainer'"),
    "a table for v0.6": ({"prime_rl": {"v0_6": {"seq_len": 1}}},
                         r"^prime_rl\.v0_6 .* leave the table out"),
    "an environment's table for v0_8": (
        {"environments": {"rev": {"id": "x", "prime_rl": {"v0_8": {"max_retries": 1}}}}},
        r"prime_rl\.v0_8 .* leave the table out"),
}  # fmt: skip
"""What no key of prime-rl's config can say, and what a message has: the key, and what to do."""


@pytest.mark.parametrize("name", REFUSED)
def test_recipe_that_prime_rl_has_no_key_for_is_refused(name):
    changes, words = REFUSED[name]
    with pytest.raises(RecipeError, match=words):
        export_recipe(changed(changes), "head", MODELS)


TEACHER = {"name": "a/teacher", "base_url": "http://host:8001/v1"}
LOSS, SAMPLING, SHARED = "trainer.loss.kwargs", "orchestrator.train.sampling", "SHARED"
PRUNES = "orchestrator.train.filter_zero_advantages"
TASKSET = "orchestrator.train.source.0.env.taskset"
SERVED = {"backend": "server", "url": "http://other:1"}
WHOLE = {"type": "topk_reverse_kl", "k": "full", "normalization": "full"}
DIALECTS = {"head": "v0.7", "v0.9": "v0.7", "main": "main"}
"""Version -> the first one with its losses."""
CHANNELS = {
    "type": "compose",
    "rl": {"loss": {"type": "ipo", "ipo_threshold": 0.2}},
    "distillation": {"ab": {"weight": 1.0, "loss": {"type": "sampled_reverse_kl"}}},
}
REWARDED = {
    "type": "compose",
    "distillation": {"top": {"weight": 0.5, "loss": {"type": "topk_reverse_kl", "k": 8}}},
}
MIX = {"type": "topk_reverse_kl", "rl_mix": {"kd": 0.5, "loss": {"type": "ipo"}}}
KEPT = {"head": False, "v0.9": False, "main": None}
RENDERER = {"name": "default", "tool_parser": "qwen3"}
NATIVE = {"orchestrator": {"batch_size": 99}, "head": {"seq_len": 1}}
SOURCE, SOURCES = "orchestrator.train.source.0", "orchestrator.train.source.*"
EVALUATED = "orchestrator.eval.source"
AGENT = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
BY_ID = {"name": "rev", "ratio": 2.0, "env": {"taskset": {"id": "x"}, "agent": AGENT}}
USES = {
    "a": {"id": "x", "args": {"split": "train"}, "use": "train"},
    "b": {"id": "x", "args": {"split": "test"}, "use": "eval"},
    "c": {"id": "y", "prime_rl": {"group_size": 2}},
    "sums": {"size": 40},
}
ROUTED = {
    "rev": {"id": "x", "teacher": "a"},
    "code": {"teacher": "b", "ratio": 2.0, "seed": 1},
    "test": {"id": "x", "use": "eval", "teacher": "b"},
}


def header(**of_b):
    """Return the header of a mixture of two teachers."""
    return {HEADER: json.dumps([{**A, "weight": 0.25}, {**B, **of_b, "weight": 0.75}])}


EXPORTED = {
    "a recipe": ({}, {
        "max_steps": 7, "seq_len": 256, "model.name": "a/student", "orchestrator.batch_size": 8,
        "trainer.loss.import_path": "prime_composer.upstream.loss_fn",
        "trainer.loss.type": "custom",
        LOSS: {"type": "topk_reverse_kl", "k": 16}, "trainer.optim.lr": 1e-3,
        f"{SHARED}.group_size": 2, f"{SHARED}.algo": {"type": "opd", "teacher": TEACHER},
        SAMPLING: {"temperature": 1.0, "max_completion_tokens": 64}, PRUNES: None,
        "orchestrator.max_off_policy_steps": None, "orchestrator.eval": None}),
    "top-p": ({"loss": {"type": "default"}, "rollout": {"top_p": 0.9}}, {
        f"{SAMPLING}.extra_body.top_p": {"head": 0.9, "v0.9": 0.9, "main": None},
        f"{SAMPLING}.top_p": {"head": None, "v0.9": None, "main": 0.9}}),
    **{f"{steps} ahead": ({"rollout": {**SERVED, "ahead": steps}},
                          {"orchestrator.max_off_policy_steps": steps}) for steps in (0, 8)},
    "a student's server": ({"rollout": {**SERVED, "api_key_var": "POLICY_KEY"}}, {
        "orchestrator.model.client": {"base_url": "http://other:1/v1", "api_key_var": "POLICY_KEY"},
        "inference": None}),
    "a teacher's key": ({"teacher": {"api_key_var": "MATH_KEY"}},
                        {f"{SHARED}.algo.teacher": {**TEACHER, "api_key_var": "MATH_KEY"}}),
    "the dialect of ipo": ({"loss": {"type": "ipo"}}, {f"{LOSS}.dialect": DIALECTS}),
    "dialects of a sum": ({"loss": CHANNELS}, {f"{LOSS}.rl.loss.dialect": DIALECTS,
                                               f"{LOSS}.distillation.ab.loss.dialect": DIALECTS}),
    "the dialect of a mix": ({"loss": MIX}, {f"{LOSS}.rl_mix.loss.dialect": DIALECTS}),
    "a recipe's own dialect": (
        {"loss": {**MIX, "rl_mix": {"kd": 0.5, "loss": {"type": "ipo", "dialect": "v0.7"}}}},
        {f"{LOSS}.rl_mix.loss.dialect": "v0.7"}),
    "the whole vocabulary": ({"loss": WHOLE, "teacher": {"head_on": "cpu"}},
                             {LOSS: {**WHOLE, "head_on": "cpu"}}),
    "a hint": (POLICY, {f"{SHARED}.algo": {"type": "opsd", "demo_key": "answer"}}),
    "a sibling": ({"teacher": {"policy": {"update": "live", "hint": "sibling"}}}, {
        f"{SHARED}.algo": {"type": "opsd", "demo_key": "prime_composer:sibling"}}),
    "a verdict": ({"teacher": {"policy": {"update": "live", "hint": "feedback"}}}, {
        f"{SHARED}.algo": {"type": "opsd", "demo_key": "prime_composer:feedback",
                           "template": "{demonstration}"}}),
    "a hint as the policy is rendered": ({**POLICY, "rollout": {"renderer": RENDERER}}, {
        "orchestrator.renderer": RENDERER, f"{SHARED}.algo.renderer": RENDERER,
        "inference.vllm.tool_call_parser": "hermes"}),
    "rewards and a teacher": ({"loss": REWARDED}, {
        LOSS: REWARDED, PRUNES: KEPT, f"{SHARED}.algo.type": "opd"}),
    "advantages of v0.6": ({"loss": {"type": "sampled_reverse_kl", "dialect": "v0.6"}}, {
        PRUNES: KEPT, f"{LOSS}.dialect": "v0.6"}),
    "rewards": ({"loss": {"type": "default"}}, {PRUNES: None, f"{SHARED}.algo": None}),
    "an evaluation": ({"eval": {"every": 2}}, {"orchestrator.eval.interval": 2}),
    "no reward to evaluate": ({"eval": {"every": 2}, "data": {"metric": "none"}},
                              {"orchestrator.eval": None}),
    "a data set": ({"data": {"source": "hub"}}, {
        f"{TASKSET}.hub_id": "openai/gsm8k", f"{TASKSET}.hub_name": "main"}),
    "generated problems": ({"data": {"source": "generated"}}, {f"{TASKSET}.hub_id": None}),
    "native settings": ({"prime_rl": NATIVE}, {
        "orchestrator.batch_size": 99, "seq_len": {"head": 1, "v0.9": 256, "main": 256},
        "head": None}),
    "a mixture": ({"teachers": TWO}, {
        f"{SHARED}.algo.teacher.headers": header(), f"{LOSS}.adapter": True}),
    "a key of a mixture's": ({"teachers": {**TWO, "b": {**TWO["b"], "api_key_var": "B_KEY"}}}, {
        f"{SHARED}.algo.teacher.headers": header(api_key_var="B_KEY"),
        f"{SHARED}.algo.teacher.api_key_var": None}),
    "teachers without a url": ({"teachers": {name: {"model": f"a/{name}"} for name in "ab"}}, {
        f"{SHARED}.algo.teacher.headers": {HEADER: json.dumps([
            {"url": f"http://localhost:800{i}/v1", "model": f"a/{name}", "weight": 0.5}
            for i, name in enumerate("ab", 1)])}}),
    "a teacher of each environment": (
        {"teachers": TWO, "environments": ROUTED, "eval": {"every": 1}}, {
            f"{SOURCES}.name": ["rev", "code"], f"{SOURCES}.ratio": [1.0, 2.0],
            f"{SOURCES}.algo.teacher": [
                {"name": one["model"], "base_url": one["url"]} for one in (A, B)],
            f"{EVALUATED}.*.algo": [None] * 3, f"{SHARED}.algo": None, f"{LOSS}.adapter": None}),
    "who asks": ({"teachers": asked("trainer")}, {f"{LOSS}.asked_by": "trainer"}),
    "a tokenizer of its own": ({"teacher": {"tokenizer": "own"}}, {
        f"{LOSS}.teacher_tokenizers": {"a/teacher": "a/teacher"}}),
    "a prompt of its own": ({"teacher": {"prompt": {"chat_template": True, "system": "x"}}}, {
        f"{LOSS}.teacher_prompts": {
            "a/teacher": {"tokenizer": "a/teacher", "chat_template": True, "system": "x"}}}),
    "arguments of a template": (
        {"data": {"template_args": {"enable_thinking": False}},
         "rollout": {"renderer": {"name": "qwen3"}}},
        {"orchestrator.renderer": {"name": "qwen3", "enable_thinking": False}}),
    "an environment by id": ({"environments": {"rev": {"id": "x", "args": {"size": 100}}}}, {
        "orchestrator.train.source": [{
            "name": "rev", "ratio": 1.0,
            "env": {"taskset": {"id": "x", "size": 100}, "agent": AGENT}}]}),
    "limits of a rollout": (
        {"environments": {"rev": {"id": "x", "timeout": 60, "max_turns": 4}}},
        {f"{SOURCE}.env.agent": {**AGENT, "max_turns": 4, "timeout": {"rollout": 60.0}}}),
    "native settings of an environment": (
        {"environments": {"rev": {"id": "x", "ratio": 2.0, "prime_rl": {
            "group_size": 3, "v0_9": {"max_retries": 1}, "head": {"serve": {"max": 2}}}}}},
        {SOURCE: {"head": {**BY_ID, "group_size": 3, "serve": {"max": 2}},
                  "v0.9": {**BY_ID, "group_size": 3, "max_retries": 1},
                  "main": {**BY_ID, "group_size": 3}}}),
    "a native harness": (
        {"environments": {"rev": {
            "id": "x", "prime_rl": {"env": {"agent": {"harness": {"id": "bash"}}}}}}},
        {f"{SOURCE}.env.agent": {**AGENT, "harness": {"id": "bash"}},
         f"{SOURCE}.env.taskset": {"id": "x"}}),
    "uses of environments": ({"environments": USES, "eval": {"every": 2, "size": 90}}, {
        f"{SOURCES}.name": ["a", "c", "sums"], f"{EVALUATED}.*.name": ["b", "c", "sums"],
        "orchestrator.eval.num_examples": {"head": 30, "v0.9": 30, "main": None},
        "orchestrator.eval.select": {"head": None, "v0.9": None, "main": {"limit": 30}},
        f"{EVALUATED}.1.group_size": 2, f"{EVALUATED}.0.env.taskset.split": "test"}),
    "the usual context": ({"rollout": {"max_model_len": None}}, {"seq_len": 2048}),
}  # fmt: skip
"""Name -> changes of a recipe, and values in its export, maybe by version; None: no key."""


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", EXPORTED)
def test_export_writes_what_the_recipe_says(version, name):
    """Of the algorithm and of group_size main has the place below train."""
    changes, expected = EXPORTED[name]
    table = export_recipe(changed(changes), version, MODELS).table
    assert ("algo" in table["orchestrator"]) is False or version != "main"
    for path, value in expected.items():
        path = path.replace(SHARED, "orchestrator.train" if version == "main" else "orchestrator")
        if isinstance(value, dict) and value.keys() == DIALECTS.keys():
            value = value[version]
        assert value_at(table, path) == value, path
    if "type" in changes.get("loss", {}):
        own = changes["loss"].keys() | ({"dialect"} & table["trainer"]["loss"]["kwargs"].keys())
        parse_loss_table({key: value_at(table, f"{LOSS}.{key}") for key in own})


def value_at(table, path):
    """Return the value at a dotted path of keys and indices, None where there is none.

    ``*`` stands for all entries of a list.
    """
    before, each, rest = path.partition(".*.")
    if each:
        return [value_at(one, rest) for one in value_at(table, before)]
    for key in path.split("."):
        table = table[int(key)] if key.isdigit() else table.get(key) if table else None
    return table


def test_context_that_is_unset_is_at_most_the_students_window(tmp_path):
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 1024}')
    raw = {"student": {"model": str(tmp_path)}, "rollout": {"max_model_len": None}}
    assert export_recipe(changed(raw), "head").table["seq_len"] == 1024


GATEWAY = {"url": "https://teachers.example.com"}
HEAD_LINES = {
    "inference --vllm.model a/teacher --server.port 8001 --vllm.max-logprobs 64": (
        [{"loss": {"k": 64}}], [{"loss": {"k": 64}, "teacher": GATEWAY}, {}]),
    "a/teacher at https://teachers.example.com/v1, with max_logprobs = 64": (
        [{"loss": {"k": 64}, "teacher": GATEWAY}], [{"loss": {"k": 64}}]),
    "prime-composer teacher --model a/teacher --port 8001 --host 0.0.0.0": (
        [{"loss": {"k": 64}}], [{"loss": {"k": 64}, "teacher": GATEWAY}]),
    """--hf-overrides '{"head_dtype": "float32"}'""": ([{}], [{"loss": {"type": "default"}}]),
    "start it with max_logprobs = 32.": ([{**SELF, "rollout": SERVED}], [SELF]),
    "enable_lora = true, max_lora_rank = 5": (
        [{"student": {"lora": {"rank": 5}}, "rollout": SERVED}],
        [{"student": {"lora": {"rank": 5}}}]),
    "Nothing is evaluated: no environment has held-out answers": (
        [{"eval": {"every": 2}, "data": {"metric": "none"}}], [{"eval": {"every": 2}}]),
    "Environments that have to be installed beside prime-rl: x, y": (
        [{"environments": USES}], [{}, {"environments": {"a": {"id": "prime-composer-orders"}}}]),
}  # fmt: skip
"""What the comment at the head of a file says -> recipes for which it does, and others."""


@pytest.mark.parametrize("line", HEAD_LINES)
def test_head_says_what_has_to_be_known(line):
    """In comments, and where it is true alone."""
    told, others = HEAD_LINES[line]
    for changes, there in (*((one, True) for one in told), *((one, False) for one in others)):
        export = export_recipe(changed(changes), "head", MODELS)
        head = " ".join(" ".join(export.head).split())
        assert (line in head) is there, changes
        assert all(f"# {one}".rstrip() in export.text() for one in export.head)


@pytest.mark.parametrize("name", ["v0.6", "v0_8", "v1.0"])
def test_export_for_an_unknown_version_says_what_to_do(name):
    """Of an old one also where it still is; the losses' own dialects stay."""
    old = name != "v1.0"
    message = "559b4477.* at its commit 5218d7f" if old else "choose one of head, v0.9, main"
    with pytest.raises(RecipeError, match=message) as refused:
        export_recipe(recipe(), name)
    assert name.replace("_", ".") in str(refused.value)
    if old:
        assert parse_loss_table({"type": "ipo", "dialect": name}).dialect in ("v0.6", "v0.7")
        return
    with pytest.raises(ValueError, match="dialect: Input should be 'v0.6', 'v0.7' or 'main'"):
        parse_loss_table({"type": "sampled_reverse_kl", "dialect": name})


def test_export_prepared_model_has_to_be_built_first():
    parsed = load_recipe(REPO / "recipes" / "gsm8k_opd.toml")
    with pytest.raises(RecipeError, match="prime-composer prepare") as caught:
        export_recipe(parsed, "head")
    assert "--set student.model=DIR --set teacher.model=DIR" in str(caught.value)
    with pytest.raises(RecipeError, match=r"^\[teacher\.prepare\]:"):
        export_recipe(parsed, "head", {"student": "/s"})
    assert export_recipe(parsed, "head", MODELS).table["model"]["name"] == "/s"


def test_export_rows_by_teacher_become_environments(tmp_path):
    table = export_recipe(load_rows_recipe(tmp_path), "head").table
    entries = {entry["name"]: entry for entry in table["orchestrator"]["train"]["source"]}
    assert set(entries) == {"sums", "rows-a", "rows-b", "rows-others"}
    assert sum(entries[name]["ratio"] for name in entries if name != "sums") == pytest.approx(1.0)
    assert entries["rows-b"]["env"]["taskset"]["rows_of"] == "b"
    assert entries["rows-b"]["algo"]["teacher"]["name"] == "a/second"
    mixture = json.loads(entries["rows-others"]["algo"]["teacher"]["headers"][HEADER])
    assert mixture[1] == {**B, "weight": 0.75}


def test_export_refuses_two_environments_of_one_name(tmp_path):
    loaded = load_rows_recipe(tmp_path)
    more = {"rows-b": loaded.environments["sums"]}
    both = loaded.model_copy(update={"environments": loaded.environments | more})
    with pytest.raises(RecipeError, match="would be called 'rows-b'.*Rename"):
        export_recipe(both, "head")


def test_load_split_rows_of_a_teacher(tmp_path):
    load_rows_recipe(tmp_path)
    data = DataConfig(source="jsonl", path=tmp_path / "rows.jsonl", teacher_key="by", hold_out=0.3)
    numbers = {
        name: sorted(
            int(problem.final)
            for split in ("train", "test")
            for problem in load_split(data, split, name)
        )
        for name in ("a", "b", "")
    }
    assert numbers == {"a": [2, 6, 10], "b": [1, 3, 5, 7, 9, 11], "": [4, 8, 12]}
    by_teacher = sum(len(load_split(data, "train", name)) for name in numbers)
    assert len(load_split(data, "train", None)) == by_teacher


@pytest.mark.parametrize("host", ["localhost", "[::1]", "gpu7"])
def test_head_opens_a_teacher_to_the_network_if_it_is_elsewhere(host):
    """With --host alone every machine of the network may ask it: the key is named."""
    teacher = {"url": f"http://{host}:8001", "api_key_var": "MY_KEY"}
    head = export_recipe(recipe(loss={"k": 64}, teacher=teacher), "head").head
    (command,) = (line for line in head if "prime-composer teacher" in line)
    assert command.endswith(" --host 0.0.0.0") is (host == "gpu7")
    assert any("the same in MY_KEY of prime-rl" in line for line in head) is (host == "gpu7")


@pytest.mark.parametrize("path", ALL_RECIPES, ids=lambda path: path.stem)
def test_every_shipped_recipe_is_exported_or_refused(path):
    """A refusal names --engine local as a way out."""
    loaded = load_recipe(path)
    names = {teacher.table for teacher in Routing.of_recipe(loaded).teachers}
    models = dict.fromkeys(["student", *names], "/model")
    try:
        export = export_recipe(loaded, "head", models)
    except RecipeError as error:
        assert "--engine local" in str(error)
        return
    table = tomllib.loads(export.text())
    assert table == json.loads(json.dumps(export.table))
    assert table["trainer"]["loss"]["kwargs"]["type"] == loaded.loss.type


OTHER_VALUES = {
    "teacher.prompt.prompt_template": "{question}",
    "teacher.tokenizer": "own",
    "student.quantize": {"bits": 3, "group": 32},
    "student.lora.targets": ("q_proj",),
    "student.lora.start": "an adapter",
    "loss": {"type": "topk_reverse_kl", "k": 17},
    "prime_rl": {"seq_len": 7},
    "teacher.policy.update": "ema",
    "teacher.policy.template": "{question}{hint}",
    "data.source": "hub",
    "data.messages_key": "messages",
    "data.system_key": "system",
    "data.operations": (1,),
    "data.topics": ("jobs", "ages"),
    "data.prompt_template": "{question}",
    "data.teacher": "b",
    "environment.teacher": "b",
    "environment.use": "eval",
    "rollout.group_size": 4,
    "rollout.ahead": 2,
    "rollout.max_model_len": 257,
    "trainer.batch_size": 16,
    "trainer.warmup_steps": 2,
}
"""Another value for each key that is bound to other keys, or to a form."""
COMMON_VALUES = (
    *(21, 0.5, True, False, (0.5,), (0.5, 0.5)),
    *("other", "http://host:1", "transformers", {"name": "other"}),
)
COMPANIONS = {
    "rollout.ahead": {"rollout": {"backend": "server", "url": "http://other:1"}},
    "rollout.url": {"rollout": {"backend": "server", "url": "http://other:1"}},
    "rollout.api_key_var": {"rollout": {"backend": "server", "url": "http://other:1"}},
    "teacher.tape_only": {"teacher": {"tape": "tape"}},
    "data.path": {"data": {"path": "other.jsonl"}},
    "data.messages_key": {"data": {"path": "other.jsonl"}},
    "data.system_key": {"data": {"path": "other.jsonl"}},
    "data.kind": {"data": {"metric": "rougeL"}},
    "data.topics": {"data": {"kind": "facts", "metric": "short_answer"}},
    **dict.fromkeys(
        ("student.lora.rank", "student.lora.alpha", "student.lora.targets", "student.lora.start"),
        {"student": {"lora": {}}},
    ),
    "student.load": {"student": {"lora": {}}},
    "logging.wandb.name": {"logging": {"wandb": {"project": "p"}}},
}
"""Key -> what a recipe that sets it has to set as well."""
WRITTEN = {"teacher.weight": "teachers.a.weight", "environment.": "environments.rev."}
"""Beginning of a key -> how the recipe writes it, where that is another."""


MARKS = marks(Recipe)


NAME_MODELS = {"student.prepare", "teacher.prepare", "teacher.base"}
"""Keys without which such a recipe has no model to compare with."""
CARRIED = {key for key, mark in MARKS.items() if export_of(key, mark) == "carried"} - NAME_MODELS


def another_value(key):
    """Return a value that the key does not have by itself."""
    if key in OTHER_VALUES:
        return OTHER_VALUES[key]
    field = field_of(key)
    read = TypeAdapter(Annotated[field.annotation, None, *field.metadata])
    for value in (*literals(field.annotation), *COMMON_VALUES):
        with suppress(ValidationError):
            if value is not None and read.validate_python(value) != field.default:
                return value
    raise AssertionError(f"{key} needs a value in OTHER_VALUES")


def field_of(key):
    """Return the field that a key of ``MARKS`` names."""
    tables = [Recipe]
    for name in key.split("."):
        fields = [
            table.model_fields[one]
            for one in (name, f"{name}s")
            for table in tables
            if one in table.model_fields
        ]
        tables = [table for field in fields for table in models_in(field.annotation)]
    return fields[0]


def literals(annotation):
    """Return the values that a Literal in an annotation names."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return [value for part in get_args(annotation) for value in literals(part)]


def written(key):
    """Return a key as the recipe of ``with_key`` has it."""
    for start, replacement in WRITTEN.items():
        if key.startswith(start):
            return replacement + key.removeprefix(start)
    return key


def with_key(key, value):
    """Return the tests' recipe without and with one key, each with what that key needs."""
    raw = tables()
    if key in ("teacher.weight", "data.teacher", "data.teacher_key", "environment.teacher"):
        del raw["teacher"]
        raw["teachers"] = copy.deepcopy(TWO)
    if key == "data.teacher_key":
        raw["data"]["source"] = "hub"
    if key.startswith("teacher.policy"):
        raw["teacher"] = {"policy": {"update": "live"}}
    if key.startswith("environment."):
        del raw["data"]
        raw["environments"] = {"rev": {"id": "reverse-text"}, "sums": {}}
    for section, table in COMPANIONS.get(key, {}).items():
        raw.setdefault(section, {}).update(copy.deepcopy(table))
    without = copy.deepcopy(raw)
    *path, name = written(key).split(".")
    table = raw
    for part in path:
        table = table.setdefault(part, {})
    table[name] = value
    return without, raw


@pytest.mark.parametrize("key", sorted(CARRIED))
def test_carried_key_changes_the_export_or_is_refused(key, monkeypatch):
    """A refusal starts with the key."""
    rows = [Problem("q", "#### 1", teacher="a")] * 2

    def load(sources):
        practice = [replace(row, environment=name) for name in sources for row in rows]
        return ProblemSet(practice, [], sources)

    monkeypatch.setattr(export_plan, "load_problem_set", load)
    without, changed = with_key(key, another_value(key))
    try:
        table = export_recipe(parse_recipe(changed), "head", MODELS).table
    except RecipeError as error:
        assert str(error).startswith(f"{written(key)} = ")
        return
    assert table != export_recipe(parse_recipe(without), "head", MODELS).table


def test_key_that_is_not_carried_is_in_head_and_on_stderr(capsys):
    """It changes nothing else."""
    raw = tables()
    raw["trainer"]["steps"], raw["eval"] = 9, {"every": 1}
    without = export_recipe(parse_recipe(raw), "head").table
    raw["trainer"]["until"] = {"metric": "eval/accuracy", "plateau": 2}
    export = export_recipe(parse_recipe(raw), "head")
    export.warn()
    assert export.table == without
    said = capsys.readouterr().err
    for key in ("trainer.until.metric", "trainer.until.plateau"):
        why = MARKS[key].why
        assert f"#     {key}: {why}\n" in export.text() and f"{key} ({why})" in said


def test_loss_from_outside_is_exported_and_read_again(monkeypatch):
    """The trainer and the launcher read the same loss from what is exported."""
    monkeypatch.syspath_prepend(str(REPO / "tests" / "examples"))
    given = parse_recipe({**tables(), "loss": {"type": "my_loss:huber", "delta": 0.5}})
    table = export_recipe(given, "head").table["trainer"]["loss"]["kwargs"]
    assert parse_loss_table(table) == given.loss
