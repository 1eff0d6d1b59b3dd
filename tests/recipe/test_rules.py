"""What does not go together: the rules' rows in the guide, their other sentences, other commands.

A case is tables that replace those of a small recipe (None: the table is left out).
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from docs import reference
from prime_composer.backends.hf_model import ModelUnavailable
from prime_composer.backends.lora.adapter import layers_to_adapt
from prime_composer.cli.tape import tape_make
from prime_composer.local.probe.run import probe
from prime_composer.problems.config import Problem
from prime_composer.problems.loading import load_problem_set
from prime_composer.recipe import rules
from prime_composer.recipe.diloco import DilocoConfig
from prime_composer.recipe.loading import apply_override, parse_recipe
from prime_composer.recipe.routing import REFERENCE, Routing, TeacherId
from prime_composer.recipe.schema import RecipeError
from prime_composer.trl.objective import read_loss
from prime_composer.upstream.export import export_recipe
from tests.command import toml
from tests.recipe.helpers import refusal
from tests.tiny_qwen import make_model
from tests.upstream.export_recipes import tables

GUIDE = Path(__file__).parents[2] / "recipes" / "README.md"

Case = dict[str, Any]

TAPED = {"model": "t", "tape": "a folder"}
ALONE = {"tape": "a folder", "tape_only": True}
OWN = {"model": "t", "tokenizer": "own"}
BASE = {"base": True}
POLICY: Case = {"teacher": {"policy": {}}}
SAMPLED = {"type": "sampled_reverse_kl"}
STOPPED = {**SAMPLED, "stops": {"ids": [1]}}
TOP: dict[str, Any] = {"type": "topk_reverse_kl", "k": 4}
COVERING = {"type": "generalized_jsd", "k": 4}
SFT: Case = {"loss": {"type": "sft"}, "rollout": {"student_fraction": 0.0}}
REWARDED: Case = {"loss": {"type": "default"}, "rollout": {"group_size": 2}}
END: Case = {"checks": {"collapse": {"end": 0.01}}}
AHEAD = {"backend": "server", "url": "http://a:1", "ahead": 1}
SAMPLES = {"other_source": "teacher", "student_fraction": 0.5, "group_size": 2}
BALANCED: Case = {"loss": {**SAMPLED, "balance": {"by": "sequence"}}}
NF4 = {"model": "s", "load": "nf4"}
QUANTIZED = {"model": "s", "quantize": {"bits": 4, "group": 32}}
ROUNDED = {**QUANTIZED, "model": None, "prepare": {**QUANTIZED, "from": "s"}}
del ROUNDED["model"], ROUNDED["prepare"]["model"]
LORA: Case = {"student": {"model": "s", "lora": {}}}
BEGUN: Case = {"student": {"model": "s", "lora": {"start": "an adapter"}}}
START: Case = {"reference": {"start": True}, "loss": SAMPLED}
ISLANDS: Case = {"diloco": {"replicas": 2}, "trainer": {"steps": 100}}
BY_ID: Case = {"environments": {"rev": {"id": "reverse-text"}}, "data": None}
TWO = {"a": {"model": "t"}, "b": {"model": "u"}}
SEVERAL: Case = {"teacher": None, "teachers": TWO}
MADE = {"layers": 1, "hidden_size": 16, "sft_steps": 1}
SUMS: Case = {"data": None, "environments": {"sums": {}, "chains": {"seed": 1}}}


def recipe(case: Case) -> dict[str, Any]:
    return {name: table for name, table in (tables() | case).items() if table is not None}


def policy(**keys: Any) -> Case:
    return {"teacher": {"policy": keys}}


ROWS: dict[str, list[Case]] = {
    "`student_fraction` below 1, `environments` by id": [
        {**BY_ID, "loss": COVERING, "rollout": {"student_fraction": 0.5}},
    ],
    "`student_fraction` below 1, a loss that reads the sampler's probabilities": [
        {"loss": SAMPLED, "rollout": {"student_fraction": 0.5}},
        {"loss": SAMPLED, "rollout": SAMPLES},
        {"loss": {"type": "compose", "rl": {"weight": 0.0}, "distillation": {
            "near": {"weight": 1.0, "loss": COVERING},
            "sampled": {"weight": 1.0, "loss": SAMPLED}}}, "rollout": SAMPLES},
    ],
    "`lora`, `quantize`": [{"student": {**QUANTIZED, "lora": {}}}],
    "`student.lora.start`, `[reference] start = true`": [{**BEGUN, **START}],
    "`base = true`, `policy.update = 'base'` or `checkpoint.merge` without `[student.lora]`": [
        {"teacher": BASE}, policy(update="base"), {"checkpoint": {"merge": True}},
    ],
    "`student.load = 'nf4'` without an adapter alone, or `checkpoint.merge`": [
        {"student": NF4}, {"student": {**NF4, "lora": {}}, "checkpoint": {"merge": True}},
        {"student": {**NF4, "lora": {}}, **policy(update="ema")},
    ],
    "`other_source = 'teacher'`, `[teacher.policy]` or `on_overflow`": [
        {**POLICY, "rollout": SAMPLES},
        {"teacher": {"model": "t", "on_overflow": "drop"}, "rollout": SAMPLES},
    ],
    '`tokenizer = "own"`, `k = "full"` or `kl_support = "full"`': [
        {"teacher": OWN, "loss": {**TOP, "k": "full"}},
        {"teacher": OWN, "eval": {"kl_support": "full"}},
    ],
    '`tokenizer = "own"`, `chosen_by = "student"`': [
        {"teacher": OWN, "loss": {**TOP, "chosen_by": "student"}},
    ],
    '`tokenizer = "own"`, a mixture of teachers': [
        {"teacher": None, "teachers": {"a": OWN, "b": {"model": "u"}}},
    ],
    '`tokenizer = "own"`, `[teacher.policy]` or `[reference]`': [
        {"teacher": {"policy": {}, "tokenizer": "own"}},
        {"teacher": OWN, "reference": {"model": "r"}, "loss": SAMPLED},
    ],
    "`[teacher.prompt]`, `[teacher.policy]`": [
        {"teacher": {"policy": {}, "prompt": {"system": "Be kind."}}},
    ],
    "`[teacher.prompt] prompt_template`, `environments` by id": [
        {**BY_ID, "teacher": {"model": "t", "prompt": {"prompt_template": "{question}"}}},
        {**BY_ID, "teacher": {"model": "t", "prompt": {"chat_template": False}}},
    ],
    "`tape` of two tables": [
        {"teacher": TAPED, "reference": {"start": True, "tape": "a folder"}, "loss": SAMPLED},
    ],
    "`rollout.ahead`, a sampler or teacher that takes turns with training": [
        {"rollout": {"ahead": 1}},
        {**POLICY, "rollout": AHEAD},
        {"rollout": AHEAD, "teacher": {"model": "t", "backend": "vllm"}},
    ],
    "`checks.collapse.end`, `[reference]` or a loss without a teacher": [
        {**START, **END}, {**SFT, **END},
    ],
    "`[reference]` without a `[teacher]` of its own": [{**POLICY, **START}],
    "`[reference] start = true`, `student.quantize`": [{**START, "student": QUANTIZED}],
    "`[reference]`, a loss that reads more than the sampled token": [
        *[{"reference": {"model": "r"}, "loss": loss}
          for loss in (TOP, STOPPED, {**STOPPED, "k": "full"})],
        {"reference": {"model": "r"}, **SFT},
    ],
    "`hint = 'sibling'`, a loss that reads rewards": [
        {**policy(hint="sibling"), "loss": {**TOP, "rl_mix": {"kd": 0.5}}},
    ],
    "`[diloco]`, what one run decides: `[trainer.until]`, `rollout.ahead`, `tape`, "
    "a `[teacher.policy]` that moves": [
        {**POLICY, **ISLANDS},
        {**ISLANDS, "trainer": {"steps": 100, "until": {"metric": "eval/accuracy", "plateau": 2}}},
        {"rollout": AHEAD, **ISLANDS},
        {"teacher": TAPED, **ISLANDS},
    ],
    "`[diloco]`, weights that have no mean: `student.lora`, `student.quantize`": [
        {**LORA, **ISLANDS}, {"student": QUANTIZED, **ISLANDS},
    ],
    'a graded metric, `hint = "feedback"`': [
        {**policy(hint="feedback"), "data": {"metric": "rougeL"}},
    ],
    '`metric = "none"`, a loss or hint that reads rewards': [
        {**case, "data": {"metric": "none"}} for case in (REWARDED, policy())
    ],
}  # fmt: skip


def test_table_of_the_guide_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert reference.main(["--check", str(GUIDE)]) == 0, capsys.readouterr().err
    assert list(rules.PAIRS) == list(ROWS) and len(ROWS) <= 25


VERBS = "add|choose|keep|leave|let|name|open|round|route|set|start|use|write|at least"
REMEDY = re.compile(rf"[:;,.] .*\b({VERBS})\b|goes with")


@pytest.mark.parametrize("row", ROWS)
def test_refused_pair_names_keys_and_remedy(row: str) -> None:
    """Whatever the row has in code is in a message, and each has a remedy of its own."""
    messages = [refusal(recipe(case)) for case in ROWS[row]]
    words = set(re.findall("`(.+?)`", f"{row} {rules.PAIRS[row]}"))
    assert not {word for word in words if not any(word in message for message in messages)}
    assert all(REMEDY.search(message.removeprefix("r.toml: ")) for message in messages), messages


OTHERS: list[tuple[Case, str]] = [
    ({"teachers": TWO}, "[teacher] and [teachers.*]: keep one of them"),
    (SUMS | {"data": {}}, "[data] and [environments.*]: keep one of them"),
    ({"data": None}, "data is missing: add a [data] table, or several [environments.*]"),
    ({"teacher": None, "teachers": {"a b": {"model": "t"}}}, "[teachers.'a b']: a name is made"),
    ({"data": {"teacher": "a"}}, "data.teacher names 'a'; [teachers] has none"),
    ({"data": {"path": "d", "teacher_key": "a"}}, "data.teacher_key chooses among [teachers.*]"),
    ({**SEVERAL, "data": {"teacher": "c"}}, "data.teacher names 'c'; [teachers] has a, b"),
    ({"data": {"use": "eval"}}, "data: use = 'eval', and none is left to train on; set it"),
    ({"data": {"id": "reverse-text"}}, "an environment by id is a table [environments.NAME]"),
    ({"student": {"prepare": {**MADE, "environments": ["x"]}}}, "[environments] has none"),
    ({"teacher": None}, "[loss] type = 'topk_reverse_kl' needs support, which this recipe does "
     "not provide. Remedy: add a [teacher] table, or several [teachers.*]."),
    ({"loss": {"type": "default"}, "rollout": {}}, "set rollout.group_size to 2 or more"),
    ({"loss": {"type": "compose"}, "rollout": {}},
     "[loss.rl.loss] type = 'default' needs advantages"),
    (SUMS | {"loss": {**TOP, "balance": {"weights": {"sum": 2.0}}}}, "names sum, and the env"),
    (SUMS | {"environments": {"a": {}, "b": {"seed": 1, "use": "eval"}},
             "loss": {**TOP, "balance": {"weights": {"b": 2.0}}}}, "that train are a: name one"),
    ({"loss": {"type": "compose",
               "distillation": {"a": {"weight": 1, "loss": {**COVERING, "balance": {}}}}}},
     "[loss.distillation.a.loss.balance]: a step has one balance"),
    ({"rollout": SAMPLES, "teacher": None, "loss": {"type": "sft"}}, "there is none; add a"),
    ({**policy(hint="sibling"), "rollout": {}}, "set rollout.group_size to 2 or more"),
    ({"rollout": {"group_size": 3}}, "trainer.batch_size = 8 is not a multiple of rollout.group"),
    ({"rollout": {"max_tokens": 64, "max_model_len": 64}}, "leaves no room for a prompt"),
    *[({**ISLANDS, "diloco": {"replicas": 2, "every": 7}, "trainer": {"steps": 70},
        "eval": {"every": 0}, "checkpoint": {"every": 0}, **change},
       f"is no multiple of diloco.every = 7, and only outer steps are evaluated and saved: the "
       f"next one is {following}")
      for change, following in (({"trainer": {"steps": 95}}, 98), ({"eval": {"every": 1}}, 7),
                                ({"checkpoint": {"every": 13}}, 14))],
    # What a table of teachers refuses by itself.
    ({"student": {"model": "s", "prepare": {}}}, "exactly one of `model` and the table `prepare`"),
    ({"teacher": {"policy": {}, "tape": "a folder"}}, "leave `tape` out"),
    ({"teacher": {"model": "t", "tape_only": True}}, "name its folder in `tape`"),
    ({"teacher": {**ALONE, "tokenizer": "own"}}, "that has it in `model`"),
    ({"teacher": {"policy": {}, "url": "http://a:1"}}, "leave one of them out"),
    ({"teacher": None, "teachers": {"a": {"policy": {}}}}, "use [teacher.policy]"),
    ({"teacher": {**BASE, "policy": {}}, **LORA}, "policy.update = 'base'"),
    ({"teacher": {**BASE, "model": "m"}, **LORA}, "not model and base"),
    *[({"teacher": {**BASE, key: value}, **LORA}, f"`{key}` is of a model of its own") for
      key, value in (("url", "http://a:1"), ("dtype", "bfloat16"))],
    *[({"student": {"model": "s", "lora": lora}}, f"student.lora.{next(iter(lora))}") for lora in
      ({"targets": []}, {"targets": ["mlp.up_proj"]}, {"dropout": 0.1})],
    ({**START, "student": {**ROUNDED, "quantize": {"bits": 3, "group": 32}}}, "the same `quant"),
    *[({"reference": reference, "loss": SAMPLED, **LORA}, why) for reference, why in (
        ({}, "exactly one of `model`, the table `prepare` and `start = true`"),
        ({"model": "r", "start": True}, "not model and start"),
        ({"model": "r", "policy": {}}, "use [teacher.policy]"),
        ({**BASE, "start": True}, "`base` is a teacher's"),
        ({"start": True, "url": "http://r:1"}, "`start = true` opens the student's weights"),
        ({"model": "r", "on_overflow": "drop"}, "on_overflow = 'drop' is the teacher's key"),
    )],
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(OTHERS)), ids=lambda case: OTHERS[case][1][:40])
def test_refusal_names_key_and_remedy(case: int) -> None:
    assert OTHERS[case][1] in refusal(recipe(OTHERS[case][0]))


ACCEPTED: dict[str, Case] = {
    "reference": {"teacher": TAPED, "reference": {"start": True, "tape": "another"},
                  "loss": {**SAMPLED, "position_weights": {}}},
    "reference and several": {**SEVERAL, "reference": {"model": "r", "url": "http://r:1"},
                              "loss": SAMPLED},
    "reference of a sum": {"reference": {"start": True, "reward_scale": 0.5},
                           "loss": {"type": "compose",
                                    "distillation": {"d": {"weight": 1, "loss": SAMPLED}}}},
    "own": {"teacher": {**ALONE, **OWN}, "loss": {**TOP, "position_weights": {}}, **END},
    "several": {"teacher": None, "teachers": {"a": {**ALONE}, "b": {"model": "t"}}, **END},
    "quantized": {"teacher": ALONE, **END, "student": QUANTIZED},
    "rounded and reference": {**START, "student": ROUNDED},
    "ahead": {"rollout": {**AHEAD, "group_size": 2},
              "teacher": {**TAPED, "backend": "transformers"},
              "loss": {**SAMPLED, "position_weights": {}},
              "reference": {"start": True, "backend": "transformers"}},
    "lora": {"teacher": {"base": True, "tape": "a folder"}, **LORA, **END,
             "checkpoint": {"merge": True},
             "loss": {**TOP, "k": "full", "normalization": "full"}},
    "lora and several": {"teacher": None, **LORA, "teachers": {"a": BASE, "b": {"model": "t"}}},
    "lora and hints": {**policy(update="base"), **LORA},
    "islands": {"teacher": ALONE, **END, **ISLANDS},
    "islands and live": {**policy(update="live"), **ISLANDS},
    "a teacher that samples all": {"rollout": {**SAMPLES, "student_fraction": 0.0}},
    "balance of what trains": {**SUMS, "loss": {**TOP, "balance": {"weights": {"chains": 2.0}}}},
    "no rewards and no metric": {"data": {"metric": "none"}},
    "steps of islands": {**ISLANDS, "trainer": {"steps": 98},
                         "diloco": {"replicas": 2, "every": 7},
                         "eval": {"every": 7}, "checkpoint": {"every": 14}},
}  # fmt: skip


@pytest.mark.parametrize("name", ACCEPTED)
def test_other_pairs_are_a_recipe(name: str) -> None:
    parse_recipe(recipe(ACCEPTED[name]))


# What other commands refuse of a recipe.


def made(raw: dict[str, Any], folder: Path) -> object:
    (folder / "r.toml").write_text(toml(raw))
    return tape_make(None, str(folder / "r.toml"), [])


def exported(raw: dict[str, Any], folder: Path) -> object:
    return export_recipe(parse_recipe(raw), "head")


def probed(raw: dict[str, Any], folder: Path) -> object:
    of_raw = parse_recipe(raw)
    problems = load_problem_set(of_raw.sources)
    (finding,) = probe(of_raw, problems, {}, lambda text: None).findings
    assert finding.state == "failed"
    raise RecipeError(finding.text)


def for_trl(raw: dict[str, Any], folder: Path) -> object:
    (folder / "r.toml").write_text(toml(raw))
    return read_loss(folder / "r.toml")


def planned(raw: dict[str, Any], folder: Path) -> object:
    return layers_to_adapt(make_model(tied=True, seed=0, layers=1), ("lm_head",))


LOCAL = "--engine local"
COMMANDS: list[tuple[Callable[[dict[str, Any], Path], object], Case, list[str]]] = [
    (made, {}, ["tape"]),
    (made, {"teacher": ALONE}, ["tape_only"]),
    (made, {"teacher": TAPED, **SFT}, ["sft"]),
    (made, {"teacher": TAPED, "loss": {**TOP, "chosen_by": "student"}}, ['chosen_by = "teacher"']),
    (made, {"teacher": TAPED, **BY_ID}, ["environments"]),
    (made, {"teacher": TAPED}, ["student_fraction = 1"]),
    (made, {"teacher": TAPED, "rollout": SAMPLES}, ['other_source = "data"']),
    (exported, {"teacher": ALONE}, ["tape_only", LOCAL]),
    (exported, {"teacher": {"model": "t", "tokenizer": "own", "asked_by": "trainer"}},
     ['tokenizer = "own"', "asked_by"]),
    (exported, {"data": {"template_args": {"enable_thinking": False}}}, ["rollout.renderer"]),
    (exported, BALANCED, ["balance", LOCAL]),
    (exported, {"loss": {**TOP, "rl_mix": {"kd": 0.5}, "balance": {"by": "sequence"}}},
     ["balance", LOCAL]),
    (exported, BEGUN, ["student.lora.start", "checkpoint.merge", LOCAL]),
    (exported, {"teacher": {"model": "t"}, **ISLANDS}, ["[diloco]", LOCAL]),
    (probed, {"teacher": ALONE}, ["--set teacher.tape_only=false"]),
    (probed, {**BEGUN, "rollout": {"backend": "server", "url": "http://a:1"}},
     ["student.lora.start", "rollout.backend"]),
    (probed, {"student": QUANTIZED, "rollout": {"backend": "server", "url": "http://a:1"}},
     ["student.quantize", "rollout.backend"]),
    (for_trl, BALANCED, ["balance", "prime-composer rl"]),
    (for_trl, {"rollout": AHEAD}, ["rollout.ahead", "its [loss] table alone"]),
    (for_trl, ISLANDS, ["[diloco]", "its [loss] table alone"]),
    (planned, {}, ["targets", "choose among"]),
]  # fmt: skip


@pytest.mark.parametrize("row", range(len(COMMANDS)))
def test_command_refuses_with_the_remedy(row: int, tmp_path: Path) -> None:
    command, case, words = COMMANDS[row]
    with pytest.raises((RecipeError, ModelUnavailable, ValueError)) as error:
        command(recipe(case), tmp_path)
    assert not [word for word in words if word not in str(error.value)], error.value


def test_reference_scores_all_problems_and_weighs_nothing() -> None:
    """It is opened as the teachers are, and takes no part in their mixture."""
    routing, problem = (
        Routing.of_recipe(parse_recipe(recipe({**SEVERAL, **START}))),
        Problem("?", "#### 1"),
    )
    assert list(routing.teachers) == [TeacherId("a"), TeacherId("b"), REFERENCE]
    assert routing.teachers[REFERENCE].model == "a/student"
    assert routing.of(problem) == {TeacherId("a"): 0.5, TeacherId("b"): 0.5}
    assert routing.readers(problem) == [TeacherId("a"), TeacherId("b"), REFERENCE]
    assert (REFERENCE.table, REFERENCE.display) == ("reference", "reference")
    plain = Routing.of_recipe(parse_recipe(tables()))
    assert REFERENCE not in plain.teachers and plain.readers(problem) == [TeacherId()]


def test_a_model_from_the_command_line_replaces_start() -> None:
    raw = recipe(START)
    apply_override(raw, "reference.model=r")
    reference = parse_recipe(raw).reference
    assert reference is not None and reference.model == "r"


def test_base_is_the_student_s_model_in_float32_on_this_machine() -> None:
    """Whatever runs the rollouts; with a tape, the tape is that of the student's model."""
    lora = {"student": {"model": "a/student", "lora": {"targets": ["q_proj"]}}}
    served = {"backend": "server", "url": "http://a:1", "group_size": 2}
    of_raw = parse_recipe(recipe({**lora, "teacher": {**BASE, "tape": "t"}, "rollout": served}))
    teacher = Routing.of_recipe(of_raw).opened[TeacherId()]
    assert (teacher.model, teacher.runs_on("server")) == ("a/student", "transformers")
    assert of_raw.student.lora is not None and of_raw.student.lora.targets == ("q_proj",)


@pytest.mark.parametrize(("islands", "fewest"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3), (64, 33)])
def test_majority_of_the_islands_takes_an_outer_step(islands: int, fewest: int) -> None:
    assert DilocoConfig(replicas=islands).fewest == fewest
