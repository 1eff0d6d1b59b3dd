"""Export recipes: what each version's TOML says, what is refused, what is not carried."""

import copy
import json
import tomllib
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Literal, get_args, get_origin

import pytest
import tomli_w
from pydantic import TypeAdapter, ValidationError

from prime_composer.problems.config import DataConfig, Problem
from prime_composer.problems.loading import ProblemSet
from prime_composer.recipe.carried import marks, models_in
from prime_composer.recipe.loading import load_recipe, parse_recipe
from prime_composer.recipe.routing import Routing
from prime_composer.recipe.schema import Recipe, RecipeError
from prime_composer.upstream.environment import SETTINGS, load_split
from prime_composer.upstream.export import export_recipe
from prime_composer.upstream.export import plan as export_plan
from prime_composer.upstream.export.exporter import keys_not_carried
from prime_composer.upstream.export.toml import to_toml
from prime_composer.upstream.settings import AdapterSettings, parse_loss_table
from prime_composer.upstream.versions import records
from prime_composer.upstream.versions.records import VERSIONS
from prime_composer.upstream.versions.toml_shapes import HEADER
from tests.prime_rl_checkout import REPO
from tests.upstream.export_recipes import (
    ALL_RECIPES,
    TWO,
    export_table,
    export_two,
    load_rows_recipe,
    recipe,
    shared,
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
    if "environments" in raw:
        del raw["data"]
    return parse_recipe(raw)


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
    "rows of Python": ({"data": {"source": "rows"}}, "^data.source = 'rows'.*name it in data.path"),
    "long answers": ({"rollout": {"max_tokens": 4096, "max_model_len": None}},
                     "^rollout.max_model_len = None.*4096.*Set it"),
    "two spellings of a version": ({"prime_rl": {"v0.9": {"seq_len": 1}, "v0_9": {"seq_len": 2}}},
                                   r"v0\.9 and v0_9 are one version: keep one"),
    "a version that is a value": ({"prime_rl": {"head": 3}}, "^prime_rl.head .*write a table"),
    "a table that is a value": ({"prime_rl": {"trainer": 3}}, "^prime_rl.trainer is a value"),
    "a loss that is a list": ({"prime_rl": {"head": {"trainer": {"loss": []}}}},
                              "^prime_rl.head.trainer.loss is a value"),
    **{f"a table for {name}": ({"prime_rl": {name: {"seq_len": 1}}},
                               rf"^prime_rl\.{name} .* leave the table out")
       for name in ("v0.6", "v0_6", "v0.7", "v0_8")},
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


GATEWAY = {"url": "https://teachers.example.com"}
SERVED = {"backend": "server", "url": "http://other:1"}
WANDB_LINE = '[monitors.wandb] project = "..."'
HEAD_LINES = {
    "inference --vllm.model a/teacher --server.port 8001 --vllm.max-logprobs 64": (
        [{"loss": {"k": 64}}], [{"loss": {"k": 64}, "teacher": GATEWAY}, {}]),
    "a/teacher at https://teachers.example.com/v1, with max_logprobs = 64": (
        [{"loss": {"k": 64}, "teacher": GATEWAY}], [{"loss": {"k": 64}}]),
    "prime-composer teacher --model a/teacher --port 8001 --host 0.0.0.0": (
        [{"loss": {"k": 64}}], [{"loss": {"k": 64}, "teacher": GATEWAY}]),
    'k = "full" reads hidden states, which the trainer asks for.': (
        [{"loss": {"k": "full", "normalization": "full"}}], [{}]),
    WANDB_LINE: ([{}], [{"logging": {"wandb": {"project": "p"}}},
                        {"prime_rl": {"monitors": {"wandb": {"project": "p"}}}}]),
    "(eos_token_id), for a base student.": ([{}], [{"loss": {"type": "default"}}]),
    "orchestrator.max_off_policy_steps, the recipe's rollout.ahead.": (
        [{}], [{"rollout": {"ahead": 0}},
               {"prime_rl": {"orchestrator": {"max_off_policy_steps": 1}}}]),
    "prime-rl's `inference` does that by default (enable_fp32_lm_head = true).": ([{}], []),
    """--hf-overrides '{"head_dtype": "float32"}'""": ([{}], [{"loss": {"type": "default"}}]),
    "start it with max_logprobs = 32.": ([{**SELF, "rollout": SERVED}], [SELF]),
    "rollout.temperature = 0.7: prime-rl's trainer takes log-probs at it.": (
        [{"rollout": {"temperature": 0.7}}], [{}]),
    "without it, at the temperature of the loss.": (
        [{"rollout": {"temperature": 0.7}, "loss": {"k": "full", "normalization": "full"}}],
        [{"rollout": {"temperature": 0.7}}]),
    "the loss compares two temperatures.": (
        [{"rollout": {"temperature": 0.7}}],
        [{}, {"rollout": {"temperature": 0.7}, "loss": {"type": "default"}}]),
    "enable_lora = true, max_lora_rank = 5": (
        [{"student": {"lora": {"rank": 5}}, "rollout": SERVED}],
        [{"student": {"lora": {"rank": 5}}}]),
    "Nothing is evaluated: the recipe has no [eval].": ([{}], [{"eval": {"every": 2}}]),
    "Nothing is evaluated: no environment has held-out answers": (
        [{"eval": {"every": 2}, "data": {"metric": "none"}}], [{"eval": {"every": 2}}]),
    "Environments that have to be installed beside prime-rl:": (
        [{"environments": REV}], [{}, {"environments": {"a": {"id": "prime-composer-orders"}}}]),
}  # fmt: skip
"""What the comment at the head of a file says -> recipes for which it does, and others."""


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("line", HEAD_LINES)
def test_head_says_what_has_to_be_known(version, line):
    """In comments, and where it is true alone."""
    told, others = HEAD_LINES[line]
    for changes, there in (*((one, True) for one in told), *((one, False) for one in others)):
        export = export_recipe(changed(changes), version, MODELS)
        head = " ".join(" ".join(export.head).split())
        assert (line in head) is there, changes
        assert all(f"# {one}".rstrip() in export.text() for one in export.head)


@pytest.mark.parametrize("version", VERSIONS)
def test_export_settings_that_all_versions_share(version):
    table = export_table(version)
    assert table["max_steps"] == 7 and table["seq_len"] == 256
    assert table["model"] == {"name": "a/student"}
    assert table["orchestrator"]["batch_size"] == 8
    assert shared(table["orchestrator"], version)["group_size"] == 2
    assert table["orchestrator"]["train"]["sampling"]["max_completion_tokens"] == 64
    loss = table["trainer"]["loss"]
    assert loss["type"] == "custom" and loss["import_path"] == "prime_composer.upstream.loss_fn"
    assert loss["kwargs"] == {"type": "topk_reverse_kl", "k": 16}
    assert table["trainer"]["optim"]["lr"] == 1e-3


@pytest.mark.parametrize("version", VERSIONS)
def test_export_teacher_belongs_to_the_algorithm(version):
    teacher = {"name": "a/teacher", "base_url": "http://host:8001/v1"}
    orchestrator = export_table(version)["orchestrator"]
    assert shared(orchestrator, version)["algo"] == {"type": "opd", "teacher": teacher}
    assert ("algo" in orchestrator) is ("group_size" in orchestrator) is (version != "main")


@pytest.mark.parametrize("version", VERSIONS)
def test_export_top_p_is_in_the_request_body_or_typed(version):
    """main replays what top-p kept, so that it is typed, and for losses without a teacher."""
    raw = {**tables(rollout={"top_p": 0.9}), "loss": {"type": "default"}}
    sampling = export_recipe(parse_recipe(raw), version).table["orchestrator"]["train"]["sampling"]
    cut = {"top_p": 0.9} if version == "main" else {"extra_body": {"top_p": 0.9}}
    assert sampling == {"temperature": 1.0, "max_completion_tokens": 64, **cut}
    plain = export_table(version)["orchestrator"]["train"]["sampling"]
    assert plain == {"temperature": 1.0, "max_completion_tokens": 64}


@pytest.mark.parametrize("version", VERSIONS)
def test_export_bounds_how_far_rollouts_may_be_behind(version):
    """Without the key prime-rl's own bound stays, which is 8."""
    served = {"backend": "server", "url": "http://host:8000"}
    for steps in (0, 1, 8):
        table = export_table(version, rollout={**served, "ahead": steps})["orchestrator"]
        assert table["max_off_policy_steps"] == steps
    assert "max_off_policy_steps" not in export_table(version, rollout=served)["orchestrator"]


DIALECTS = {"head": "v0.7", "v0.9": "v0.7", "main": "main"}
"""Version -> the first one with its losses."""


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("loss", ["sampled_reverse_kl", "ipo"])
def test_export_tells_a_loss_with_dialects_which_one(version, loss):
    raw = {**tables(), "loss": {"type": loss}}
    table = export_recipe(parse_recipe(raw), version).table
    assert table["trainer"]["loss"]["kwargs"]["dialect"] == DIALECTS[version]


SUMS = {
    "default_of_mix": ({"rl_mix": {"kd": 0.5, "loss": {"type": "ipo"}}}, ["rl_mix"]),
    "channels": (
        {
            "type": "compose",
            "rl": {"loss": {"type": "ipo", "ipo_threshold": 0.2}},
            "distillation": {"a.b": {"weight": 1.0, "loss": {"type": "sampled_reverse_kl"}}},
        },
        ["rl", "distillation/a.b"],
    ),
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("sum_", "places"), SUMS.values(), ids=SUMS)
def test_export_tells_each_term_of_a_sum_its_dialect(version, sum_, places):
    """prime-rl's trainer parses the table alone, so that an inner loss has no other word on it."""
    loss = {"type": "topk_reverse_kl", **sum_}
    raw = {**tables(), "loss": loss, "rollout": {**tables()["rollout"], "group_size": 2}}
    kwargs = export_recipe(parse_recipe(raw), version).table["trainer"]["loss"]["kwargs"]
    for place in places:
        inner = kwargs
        for key in [*place.split("/"), "loss"]:
            inner = inner[key]
        assert inner["dialect"] == DIALECTS[version]
    parse_loss_table({name: kwargs[name] for name in loss})


def test_export_keeps_the_dialect_of_an_inner_loss():
    """A recipe's own word wins."""
    raw = {**tables(), "rollout": {**tables()["rollout"], "group_size": 2}}
    inner = {"type": "ipo", "dialect": "v0.7"}
    raw["loss"] = {"type": "topk_reverse_kl", "rl_mix": {"kd": 0.5, "loss": inner}}
    kwargs = export_recipe(parse_recipe(raw), "main").table["trainer"]["loss"]["kwargs"]
    assert kwargs["rl_mix"]["loss"]["dialect"] == "v0.7"


@pytest.mark.parametrize("name", [*VERSIONS, "v0_9"])
def test_every_spelling_of_a_version_is_read_everywhere(name):
    """By --dialect, by the loss, and as a table of native settings."""
    version = name.replace("_", ".")
    raw = {**tables(), "loss": {"type": "sampled_reverse_kl", "dialect": name}}
    raw["prime_rl"] = {name: {"seq_len": 9}}
    raw["environments"] = {"rev": {"prime_rl": {name: {"group_size": 3}}, "id": "x"}}
    del raw["data"]
    export = export_recipe(parse_recipe(raw), name)
    assert export.version is VERSIONS[version] and export.table["seq_len"] == 9
    assert export.table["trainer"]["loss"]["kwargs"]["dialect"] == DIALECTS[version]
    (entry,) = export.table["orchestrator"]["train"]["source"]
    assert entry["group_size"] == 3 and name not in entry
    assert parse_loss_table({"type": "ipo", "dialect": name}).dialect == DIALECTS[version]
    other = "main" if version != "main" else "head"
    assert export_recipe(parse_recipe(raw), other).table["seq_len"] == 256


@pytest.mark.parametrize("name", ["v0.6", "v0_6", "v0.7", "v0_8", "v1.0"])
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


def test_export_native_settings_win():
    """A table named after a version counts for that version alone."""
    extra = {"orchestrator": {"batch_size": 99}, "head": {"seq_len": 1}, "monitors": {"file": {}}}
    assert export_table("head", prime_rl=extra)["orchestrator"]["batch_size"] == 99
    assert export_table("head", prime_rl=extra)["seq_len"] == 1
    assert export_table("main", prime_rl=extra)["seq_len"] == 256
    assert "head" not in export_table("main", prime_rl=extra)


REWARDED = {
    "type": "compose",
    "distillation": {"top": {"weight": 0.5, "loss": {"type": "topk_reverse_kl", "k": 8}}},
}


@pytest.mark.parametrize(
    "changes,keeps",
    [
        ({"loss": REWARDED}, True),
        ({"loss": {"type": "topk_reverse_kl", "k": 8, "rl_mix": {"kd": 0.5}}}, True),
        ({"loss": {"type": "sampled_reverse_kl", "dialect": "v0.6"}}, True),
        ({"loss": REWARDED, **POLICY}, True),
        ({"loss": {"type": "topk_reverse_kl"}}, False),
        ({"loss": {"type": "default"}}, False),
    ],
)
@pytest.mark.parametrize("version", VERSIONS)
def test_export_keeps_zero_advantages_beside_a_teacher(version, changes, keeps):
    """The loss is one of rl tokens; a rollout of zero advantage is worth its distillation."""
    table = export_recipe(changed(changes), version).table
    kwargs, orchestrator = table["trainer"]["loss"]["kwargs"], table["orchestrator"]
    assert {key: kwargs[key] for key in changes["loss"]} == changes["loss"]
    pruned = orchestrator["train"].get("filter_zero_advantages")
    assert pruned is (False if keeps and version != "main" else None)
    algorithm = shared(orchestrator, version).get("algo", {}).get("type")
    assert algorithm == ("opsd" if "teacher" in changes else "opd" if keeps else algorithm)


WHOLE = {"type": "topk_reverse_kl", "k": "full", "normalization": "full"}


@pytest.mark.parametrize("version", VERSIONS)
def test_export_of_the_whole_vocabulary_names_the_server(version):
    """Its scores need the plugin, which prime-rl's own server command does not start."""
    export = export_recipe(recipe(loss=WHOLE, teacher={"head_on": "cpu"}), version)
    kwargs = export.table["trainer"]["loss"]["kwargs"]
    assert kwargs == {**WHOLE, "head_on": "cpu"}
    head = "\n".join(export.head)
    assert "prime-composer teacher --model a/teacher --port 8001" in head
    assert "    inference " not in head and "max-logprobs" not in head


@pytest.mark.parametrize("version", VERSIONS)
def test_export_names_the_data_set(version):
    """Also the default one, which the environment would know by itself."""
    text = export_recipe(recipe(data={"source": "hub"}), version).text()
    assert 'hub_id = "openai/gsm8k"' in text and 'hub_name = "main"' in text
    assert "hub_id" not in export_recipe(recipe(data={"source": "generated"}), version).text()


def test_export_writes_who_asks_the_teachers():
    teachers = {name: {**table, "asked_by": "trainer"} for name, table in TWO.items()}
    table = export_two("head", teachers=teachers)
    assert table["trainer"]["loss"]["kwargs"]["asked_by"] == "trainer"
    teachers["a"]["asked_by"] = "orchestrator"
    with pytest.raises(RecipeError, match="asked_by is 'orchestrator' and 'trainer'"):
        export_two("head", teachers=teachers)


@pytest.mark.parametrize(
    "hint,algorithm",
    [
        ("reference", {"demo_key": "answer"}),
        ("sibling", {"demo_key": "prime_composer:sibling"}),
        ("feedback", {"demo_key": "prime_composer:feedback", "template": "{demonstration}"}),
    ],
)
@pytest.mark.parametrize("version", VERSIONS)
def test_export_self_distillation_is_opsd(version, hint, algorithm):
    """The adapter writes what the last two keys name."""
    table = export_recipe(
        changed({"teacher": {"policy": {"update": "live", "hint": hint}}}), version
    ).table
    assert shared(table["orchestrator"], version)["algo"] == {"type": "opsd", **algorithm}


@pytest.mark.parametrize("version", VERSIONS)
def test_export_self_distillation_renders_the_hint_as_the_policy(version):
    """prime-rl has a renderer for each."""
    raw = {**tables(), "teacher": {"policy": {"update": "live"}}}
    raw["rollout"]["renderer"] = {"name": "default", "tool_parser": "qwen3"}
    orchestrator = export_recipe(parse_recipe(raw), version).table["orchestrator"]
    assert orchestrator["renderer"] == raw["rollout"]["renderer"]
    assert shared(orchestrator, version)["algo"]["renderer"] == raw["rollout"]["renderer"]


def test_export_prepared_model_has_to_be_built_first():
    parsed = load_recipe(REPO / "recipes" / "gsm8k_opd.toml")
    with pytest.raises(RecipeError, match="prime-composer prepare") as caught:
        export_recipe(parsed, "head")
    assert "--set student.model=DIR --set teacher.model=DIR" in str(caught.value)
    with pytest.raises(RecipeError, match=r"^\[teacher\.prepare\]:"):
        export_recipe(parsed, "head", {"student": "/s"})
    assert export_recipe(parsed, "head", MODELS).table["model"]["name"] == "/s"


def test_export_mixture_is_in_the_teachers_header():
    mixture = [{**A, "weight": 0.25}, {**B, "weight": 0.75}]
    for version in VERSIONS:
        table = export_two(version)
        teacher = shared(table["orchestrator"], version)["algo"]["teacher"]
        assert json.loads(teacher["headers"][HEADER]) == mixture
        assert table["trainer"]["loss"]["kwargs"]["adapter"] is True


@pytest.mark.parametrize("version", VERSIONS)
def test_export_each_server_has_its_own_api_key(version):
    def teacher_of(orchestrator):
        return shared(orchestrator, version)["algo"]["teacher"]

    policy = {"backend": "server", "url": "http://policy:8000", "api_key_var": "POLICY_KEY"}
    table = export_table(version, teacher={"api_key_var": "MATH_KEY"}, rollout=policy)
    client = table["orchestrator"]["model"]["client"]
    assert teacher_of(table["orchestrator"])["api_key_var"] == "MATH_KEY"
    assert client["api_key_var"] == "POLICY_KEY"
    teachers = {"a": TWO["a"], "b": {**TWO["b"], "api_key_var": "B_KEY"}}
    teacher = teacher_of(export_two(version, teachers=teachers)["orchestrator"])
    assert json.loads(teacher["headers"][HEADER]) == [
        {**A, "weight": 0.25},
        {**B, "weight": 0.75, "api_key_var": "B_KEY"},
    ]
    assert "api_key_var" not in teacher  # prime-rl's default


ROUTED = {"sums": {"teacher": "a"}, "code": {"teacher": "b", "ratio": 2.0, "seed": 1}}


@pytest.mark.parametrize("version", VERSIONS)
def test_export_environment_has_its_own_teacher(version):
    """prime-rl routes by itself: no adapter, no header."""
    table = export_two(version, environments=ROUTED)
    orchestrator = table["orchestrator"]
    entries = {entry["name"]: entry for entry in orchestrator["train"]["source"]}
    ratios = {name: entry["ratio"] for name, entry in entries.items()}
    assert ratios == {"sums": 1.0, "code": 2.0}
    assert "algo" not in orchestrator and "adapter" not in table["trainer"]["loss"]["kwargs"]
    for name, expected in (("sums", A), ("code", B)):
        teacher = entries[name]["algo"]["teacher"]
        assert teacher == {"name": expected["model"], "base_url": expected["url"]}


def test_export_rows_by_teacher_become_environments(tmp_path):
    table = export_recipe(load_rows_recipe(tmp_path), "head").table
    entries = {entry["name"]: entry for entry in table["orchestrator"]["train"]["source"]}
    assert set(entries) == {"sums", "rows-a", "rows-b", "rows-others"}
    assert sum(entries[name]["ratio"] for name in entries if name != "sums") == pytest.approx(1.0)
    assert entries["rows-b"]["env"]["taskset"]["rows_of"] == "b"
    assert entries["rows-b"]["algo"]["teacher"]["name"] == "a/second"
    mixture = json.loads(entries["rows-others"]["algo"]["teacher"]["headers"][HEADER])
    assert mixture[1] == {**B, "weight": 0.75}


def test_export_reads_the_data_at_most_once(tmp_path, monkeypatch):
    """It is read where rows name teachers, and not at all where the caller has it."""
    parsed, loads = load_rows_recipe(tmp_path), []
    load = export_plan.load_problem_set

    def count(sources):
        loads.append(list(sources))
        return load(sources)

    monkeypatch.setattr(export_plan, "load_problem_set", count)
    expected = export_recipe(parsed, "head")
    assert loads == [["rows"]]
    assert export_recipe(parsed, "head", problems=load(parsed.sources)) == expected
    export_recipe(recipe(), "head")
    assert loads == [["rows"]]


@pytest.mark.parametrize("name,more", [("others", {}), ("b", {"rows-b": {"seed": 1}})])
def test_export_refuses_two_environments_of_one_name(tmp_path, name, more):
    rows = [
        {"question": f"{i}?", "answer": f"#### {i}", "by": name if i % 2 else None}
        for i in range(1, 41)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    path = str(tmp_path / "rows.jsonl")
    data = {"source": "jsonl", "path": path, "teacher_key": "by", "teacher": "a"}
    teachers = {"a": TWO["a"], name: TWO["b"]}
    with pytest.raises(RecipeError, match=f"would be called 'rows-{name}'.*Rename"):
        export_two("head", teachers=teachers, environments={"rows": data, **more})


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


def test_export_teachers_without_url_get_consecutive_ports():
    teachers = {name: {"model": f"a/{name}"} for name in ("a", "b")}
    teacher = export_two("head", teachers=teachers)["orchestrator"]["algo"]["teacher"]
    urls = [entry["url"] for entry in json.loads(teacher["headers"][HEADER])]
    assert urls == ["http://localhost:8001/v1", "http://localhost:8002/v1"]


@pytest.mark.parametrize("key", ["VLLM_API_KEY", "MY_KEY"])
@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]", "gpu7", "10.0.0.7"])
def test_head_opens_a_teacher_to_the_network_if_it_is_elsewhere(host, key):
    """With --host alone every machine of the network may ask it: the key is named."""
    teacher = {"url": f"http://{host}:8001", "api_key_var": key}
    head = export_recipe(recipe(loss={"k": 64}, teacher=teacher), "head").head
    (command,) = (line for line in head if "prime-composer teacher" in line)
    elsewhere = host in ("gpu7", "10.0.0.7")
    assert command.endswith(" --host 0.0.0.0") is elsewhere
    assert any(f"the same in {key} of prime-rl" in line for line in head) is elsewhere


def test_to_toml_round_trip():
    table = {
        **{"a": 1, "b": 1e-7, "c": True, "d": 'quote " and \\ and é and \n', "e": [1, 2]},
        **{"f": [], "g": {"h": {"i": "x"}}, "odd key": {"j": 1}, "empty": {}},
        **{"k": [{"l": 1, "m": {"n": 2}}, {"l": 2}], "o": {"p": [{"q": 1}]}},
    }
    assert tomllib.loads(to_toml(table)) == table


def test_to_toml_without_tomli_w_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tomli_w", None)
    with pytest.raises(RecipeError, match="pip install tomli-w"):
        export_recipe(recipe(), "head").text()


@pytest.mark.parametrize("path", ALL_RECIPES, ids=lambda path: path.stem)
@pytest.mark.parametrize("version", VERSIONS)
def test_every_shipped_recipe_is_exported_or_refused(version, path):
    """A refusal names --engine local as a way out, and nothing is half exported."""
    loaded = load_recipe(path)
    names = {teacher.table for teacher in Routing.of_recipe(loaded).teachers}
    models = dict.fromkeys(["student", *names], "/model")
    try:
        export = export_recipe(loaded, version, models)
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
    "teacher.base": True,
    "loss": {"type": "topk_reverse_kl", "k": 17},
    "prime_rl": {"seq_len": 7},
    "student.prepare": {},
    "teacher.prepare": {},
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
    "rollout.stop": (5, "<|im_end|>"),
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
    "teacher.tape_gb": {"teacher": {"tape": "tape"}},
    "data.path": {"data": {"path": "other.jsonl"}},
    "data.messages_key": {"data": {"path": "other.jsonl"}},
    "data.system_key": {"data": {"path": "other.jsonl"}},
    "data.kind": {"data": {"metric": "rougeL"}},
    "data.topics": {"data": {"kind": "facts", "metric": "short_answer"}},
    **dict.fromkeys(
        ("student.lora.rank", "student.lora.alpha", "student.lora.targets", "student.lora.start"),
        {"student": {"lora": {}}},
    ),
    "teacher.base": {"student": {"lora": {}}},
    "logging.wandb.name": {"logging": {"wandb": {"project": "p"}}},
}
"""Key -> what a recipe that sets it has to set as well."""
WRITTEN = {"teacher.weight": "teachers.a.weight", "environment.": "environments.rev."}
"""Beginning of a key -> how the recipe writes it, where that is another."""


MARKS = marks(Recipe)


def kinds(export):
    """Keys of a recipe that its marks treat in one way."""
    return sorted(key for key, mark in MARKS.items() if mark.export == export)


def another_value(key):
    """Return a value that the key does not have by itself, and with which something is lost."""
    if key in OTHER_VALUES:
        return OTHER_VALUES[key]
    mark, field = MARKS[key], field_of(key)
    usual = mark.harmless if mark.export == "not carried" else (field.default,)
    read = TypeAdapter(Annotated[field.annotation, None, *field.metadata])
    for value in (*literals(field.annotation), *COMMON_VALUES):
        with suppress(ValidationError):
            if value is not None and read.validate_python(value) not in usual:
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
    if key.endswith(".prepare"):
        del raw[key.split(".")[0]]["model"]
    if key == "teacher.base":
        raw["teacher"] = {"model": "a/teacher"}
    without = copy.deepcopy(raw)
    *path, name = written(key).split(".")
    table = raw
    for part in path:
        table = table.setdefault(part, {})
    table[name] = value
    if key == "teacher.base":
        del raw["teacher"]["model"]
    return without, raw


def test_environment_settings_are_the_carried_keys_of_data():
    """``ratio`` and ``teacher`` are written beside it, ``template_args`` in the renderer."""
    data_keys = {key for key in kinds("carried") if key.startswith("data.")}
    assert {f"data.{key}" for key in (*SETTINGS, "ratio", "teacher", "template_args")} == data_keys


@pytest.mark.parametrize("key", kinds("carried"))
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
    if key.endswith(".prepare"):  # without it the recipe has no model
        return
    assert table != export_recipe(parse_recipe(without), "head", MODELS).table


UNTIL = ["trainer.until.metric", "trainer.until.plateau"]
"""Keys that a recipe has together, or not at all."""


def test_end_before_the_last_step_is_not_carried(capsys):
    """Both keys are named, and prime-rl's file is that of all steps."""
    raw = tables()
    raw["trainer"]["steps"], raw["eval"] = 9, {"every": 1}
    without = export_recipe(parse_recipe(raw), "head").table
    raw["trainer"]["until"] = {"metric": "eval/accuracy", "plateau": 2}
    export = export_recipe(parse_recipe(raw), "head")
    export.warn()
    assert export.table == without
    why = "prime-rl trains all steps of a run"
    assert {key: export.not_carried[key] for key in UNTIL} == dict.fromkeys(UNTIL, why)
    said = capsys.readouterr().err
    assert all(key in said for key in UNTIL) and why in said


@pytest.mark.parametrize("key", [key for key in kinds("not carried") if key not in UNTIL])
def test_key_that_is_not_carried_is_in_head_and_on_stderr(key, capsys):
    """It changes nothing else."""
    raw = tables()
    if key != "teacher.head":
        del raw["teacher"]["url"]  # a recipe with `url` has no other backend
    if key == "checkpoint.merge":
        raw["student"]["lora"] = {}
    *path, name = key.split(".")
    table = raw
    for part in path:
        table = table.setdefault(part, {})
    without = export_recipe(parse_recipe(raw), "head").table
    table[name] = another_value(key)
    export = export_recipe(parse_recipe(raw), "head")
    export.warn()
    inference = export.table.pop("inference"), without.pop("inference")
    assert export.table == without and (inference[0] == inference[1] or key == "trainer.seed")
    why = MARKS[key].why
    assert f"    {key}: {why}" in export.head and f"#     {key}: {why}\n" in export.text()
    assert export.not_carried == {key: why}
    assert capsys.readouterr().err == f"not carried to prime-rl: {key} ({why})\n"


def test_value_that_prime_rl_has_anyway_loses_nothing(capsys):
    raw = tables()
    raw["trainer"]["dtype"] = "bfloat16"
    raw["rollout"]["backend"] = "vllm"
    raw["data"]["chat_template"] = True
    raw["logging"] = {"tensorboard": False}
    export = export_recipe(parse_recipe(raw), "head")
    export.warn()
    assert export.not_carried == {} and "Not carried" not in export.text()
    assert not capsys.readouterr().err


def test_not_carried_key_of_several_has_its_own_name():
    raw = tables()
    del raw["teacher"], raw["data"]
    raw["teachers"] = copy.deepcopy(TWO)
    raw["teachers"]["b"]["dtype"] = "float16"
    raw["environments"] = {"sums": {"chat_template": False}}
    expected = ["teachers.b.dtype", "environments.sums.chat_template"]
    assert list(keys_not_carried(parse_recipe(raw))) == expected


def test_slurm_run_is_told_how_to_keep_the_package(capsys):
    remedy = f'pre_run_command = "uv pip install -e {REPO}"'

    def slurm(**prime_rl):
        export = export_recipe(recipe(prime_rl=prime_rl), "head")
        export.warn()
        return export.text(), capsys.readouterr().err

    text, _ = slurm()
    assert "slurm" not in text.lower()
    text, warning = slurm(slurm={"job_name": "x"})
    assert f"#     {remedy}\n" in text and remedy in warning
    text, warning = slurm(slurm={"pre_run_command": "make it so"})
    assert f"#     {remedy}\n" in text and not warning
    text, warning = slurm(**{"v0.9": {"slurm": {"job_name": "x"}}})
    assert remedy not in text and not warning


def add_v1_1(monkeypatch):
    """Add an invented version: another place of the algorithm, another key of the pruning."""
    record = replace(
        VERSIONS["head"],
        name="v1.1",
        surface=("orchestrator.objective",),
        places=VERSIONS["head"].places._replace(algo="objective"),
        zero_advantages="train.prune",
    )
    monkeypatch.setitem(records.VERSIONS, "v1.1", record)
    return record


def test_next_version_is_one_record(monkeypatch):
    """Nothing but the record changes: probing and export follow, older versions stay."""
    path = REPO / "recipes" / "gsm8k_opd_qwen3.toml"
    before = {name: export_recipe(load_recipe(path), name).text() for name in VERSIONS}
    record = add_v1_1(monkeypatch)
    assert records.match_version({"orchestrator.objective", *record.surface}) is record
    assert records.match_version(VERSIONS["head"].surface) is VERSIONS["head"]
    export = export_recipe(load_recipe(path, ["loss.rl_mix.kd=0.5"]), "v1_1")
    orchestrator = tomllib.loads(export.text())["orchestrator"]
    teacher = load_recipe(path).teacher
    assert orchestrator["objective"]["teacher"]["name"] == teacher.model
    assert orchestrator["train"]["prune"] is False and "algo" not in orchestrator
    assert tomli_w.dumps(export.table) in export.text()
    with pytest.raises(RecipeError, match="v0.9, main, v1.1"):
        export_recipe(recipe(), "v1.0")
    assert {name: export_recipe(load_recipe(path), name).text() for name in before} == before


HUBER = {"type": "my_loss:huber", "delta": 0.5}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "loss",
    [
        HUBER,
        {
            "type": "compose",
            "rl": {"weight": 0.0},
            "distillation": {
                "near": {"weight": 0.5, "loss": HUBER},
                "top": {"weight": 1.0, "loss": {"type": "topk_reverse_kl", "k": 8}},
            },
        },
    ],
)
def test_loss_from_outside_is_exported_and_read_again(monkeypatch, version, loss):
    """The trainer and the launcher read the same loss, and the same K, from what is exported."""
    monkeypatch.syspath_prepend(str(REPO / "tests" / "examples"))
    given = parse_recipe({**tables(), "loss": loss})
    table = export_recipe(given, version).table["trainer"]["loss"]["kwargs"]
    read = parse_loss_table(tomllib.loads(to_toml(table)))
    assert read == given.loss
    monkeypatch.setenv("PRIME_COMPOSER", json.dumps({"loss": table}))
    assert AdapterSettings.from_env().support_size() == (0 if loss is HUBER else 8)


@pytest.mark.parametrize("version", VERSIONS)
def test_export_evaluates_what_has_a_reward(version):
    """One machine evaluates by default, an export where the recipe says so."""
    for changes, every in (
        ({}, None),
        ({"eval": {"every": 2}}, 2),
        ({"eval": {"every": 2}, "data": {"metric": "none"}}, None),
    ):
        orchestrator = export_recipe(changed(changes), version).table["orchestrator"]
        assert orchestrator.get("eval", {}).get("interval") == every


def test_context_that_is_unset_is_the_usual_one_or_the_window(tmp_path):
    raw = tables()
    del raw["rollout"]["max_model_len"]
    assert export_recipe(parse_recipe(raw), "head").table["seq_len"] == 2048
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 1024}')
    raw["student"] = {"model": str(tmp_path)}
    assert export_recipe(parse_recipe(raw), "head").table["seq_len"] == 1024
