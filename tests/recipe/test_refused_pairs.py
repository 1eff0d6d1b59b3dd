"""The guide's table of pairs that are refused, row by row."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prime_composer.backends.hf_model import ModelUnavailable
from prime_composer.backends.lora.adapter import layers_to_adapt
from prime_composer.cli.tape import tape_make
from prime_composer.local.probe.run import probe
from prime_composer.problems.loading import load_problem_set
from prime_composer.recipe.loading import parse_recipe
from prime_composer.recipe.schema import RecipeError
from prime_composer.trl.objective import read_loss
from prime_composer.upstream.export import export_recipe
from tests.command import toml
from tests.tiny_qwen import make_model
from tests.upstream.export_recipes import tables

GUIDE = Path(__file__).parents[2] / "recipes" / "README.md"
COMMANDS = {"tape make", "prime-rl export", "prime-rl probe"}
TAPED = {"model": "t", "tape": "a folder"}
ALONE = {"tape": "a folder", "tape_only": True}
SAMPLED = {"type": "sampled_reverse_kl"}
SFT = {"loss": {"type": "sft"}, "rollout": {"student_fraction": 0.0}}
END = {"checks": {"collapse": {"end": 0.01}}}
AHEAD = {"backend": "server", "url": "http://a:1", "ahead": 1}
DPO = {"weight": 1.0, "loss": {"type": "dpo"}}
BALANCED = {"loss": {**SAMPLED, "balance": {"by": "sequence"}}}
LORA: dict[str, Any] = {"student": {"model": "s", "lora": {}}}
BEGUN: dict[str, Any] = {"student": {"model": "s", "lora": {"start": "an adapter"}}}
ISLANDS: dict[str, Any] = {"diloco": {"replicas": 2}, "trainer": {"steps": 100}}
BY_ID = {"environments": {"rev": {"id": "reverse-text"}}, "data": None}


def parsed(raw: dict[str, Any], folder: Path) -> str:
    with pytest.raises(RecipeError) as error:
        parse_recipe(raw)
    return str(error.value)


def made(raw: dict[str, Any], folder: Path) -> str:
    (folder / "r.toml").write_text(toml(raw))
    with pytest.raises(RecipeError) as error:
        tape_make(None, str(folder / "r.toml"), [])
    return str(error.value)


def exported(raw: dict[str, Any], folder: Path) -> str:
    with pytest.raises(RecipeError) as error:
        export_recipe(parse_recipe(raw), "head")
    return str(error.value)


def probed(raw: dict[str, Any], folder: Path) -> str:
    recipe = parse_recipe(raw)
    problems = load_problem_set(recipe.sources)
    (finding,) = probe(recipe, problems, {}, lambda text: None).findings
    assert finding.state == "failed"
    return finding.text


def for_trl(raw: dict[str, Any], folder: Path) -> str:
    (folder / "r.toml").write_text(toml(raw))
    with pytest.raises(ValueError) as error:
        read_loss(folder / "r.toml")
    return str(error.value)


def planned(raw: dict[str, Any], folder: Path) -> str:
    targets = ("lm_head",)
    model = make_model(tied=True, seed=0, layers=1)
    with pytest.raises(ModelUnavailable) as error:
        layers_to_adapt(model, targets)
    return str(error.value)


Refusal = Callable[[dict[str, Any], Path], str]

ROWS: dict[str, tuple[Refusal, dict[str, Any]]] = {
    "`tape`, `[teacher.policy]`": (parsed, {"teacher": {"policy": {}, "tape": "a folder"}}),
    "`tape` in two tables": (
        parsed, {"teacher": TAPED, "reference": {"start": True, "tape": "a folder"},
                 "loss": SAMPLED},
    ),
    "`tape_only` without `tape`": (parsed, {"teacher": {"model": "t", "tape_only": True}}),
    '`tape_only`, `tokenizer = "own"`': (parsed, {"teacher": {**ALONE, "tokenizer": "own"}}),
    "`[teacher.prompt]`, `[teacher.policy]`": (
        parsed, {"teacher": {"policy": {}, "prompt": {"system": "Be kind."}}}
    ),
    "`[teacher.prompt]`, `asked_by`, `prime-rl export`": (
        exported, {"teacher": {"model": "t", "prompt": {"system": "x"}, "asked_by": "trainer"}}
    ),
    "`data.template_args`, `prime-rl export`": (
        exported, {"data": {"template_args": {"enable_thinking": False}}}
    ),
    "`checks.collapse.end`, `[reference]`": (
        parsed, {"reference": {"start": True}, "loss": SAMPLED, **END}
    ),
    "`checks.collapse.end`, `sft`": (parsed, {**SFT, **END}),
    "`tape make` without `tape`": (made, {}),
    "`tape make`, `tape_only`": (made, {"teacher": ALONE}),
    "`tape make`, `sft`": (made, {"teacher": TAPED, **SFT}),
    '`tape make`, `chosen_by = "student"`': (
        made, {"teacher": TAPED, "loss": {"type": "topk_reverse_kl", "k": 4,
                                          "chosen_by": "student"}},
    ),
    "`tape make`, `environments` by id": (made, {"teacher": TAPED, **BY_ID}),
    "`tape make`, `student_fraction = 1`": (made, {"teacher": TAPED}),
    '`tape make`, `other_source = "teacher"`': (
        made, {"teacher": TAPED, "rollout": {"student_fraction": 0.5, "other_source": "teacher"}}
    ),
    "`tape_only`, `prime-rl export`": (exported, {"teacher": ALONE}),
    "`tape_only`, `prime-rl probe`": (probed, {"teacher": ALONE}),
    "`balance`, `prime-rl export`": (exported, BALANCED),
    "`balance`, a recipe for TRL": (for_trl, BALANCED),
    "`rollout.ahead`, a sampler in this process": (parsed, {"rollout": {"ahead": 1}}),
    "`rollout.ahead`, `[teacher.policy]`": (
        parsed, {"rollout": AHEAD, "teacher": {"policy": {}}}
    ),
    "`rollout.ahead`, a teacher with vLLM in this process": (
        parsed, {"rollout": AHEAD, "teacher": {"model": "t", "backend": "vllm"}}
    ),
    "`rollout.ahead`, a recipe for TRL": (for_trl, {"rollout": AHEAD}),
    "`lora`, `quantize`": (
        parsed, {"student": {"model": "s", "lora": {}, "quantize": {"bits": 4, "group": 32}}}
    ),
    "`lora`, `targets` of the output head": (planned, {}),
    "`base = true`, `policy`": (parsed, {"teacher": {"base": True, "policy": {}}, **LORA}),
    "`base = true`, `url`": (parsed, {"teacher": {"base": True, "url": "http://a:1"}, **LORA}),
    "`teacher.base` without `[student.lora]`": (parsed, {"teacher": {"base": True}}),
    "`teacher.policy.update = 'base'` without `[student.lora]`": (
        parsed, {"teacher": {"policy": {"update": "base"}}}
    ),
    "`checkpoint.merge` without `[student.lora]`": (parsed, {"checkpoint": {"merge": True}}),
    "`student.lora.start`, `[reference] start = true`": (
        parsed, {**BEGUN, "reference": {"start": True}, "loss": SAMPLED}
    ),
    "`student.lora.start`, `prime-rl export`": (exported, BEGUN),
    "`student.lora.start`, `prime-rl probe` of a server": (
        probed, {**BEGUN, "rollout": {"backend": "server", "url": "http://a:1"}}
    ),
    "`[diloco]`, `prime-rl export`": (exported, {"teacher": {"model": "t"}, **ISLANDS}),
    "`[diloco]`, a recipe for TRL": (for_trl, ISLANDS),
    "`[diloco]`, `[teacher.policy]` that moves": (parsed, {"teacher": {"policy": {}}, **ISLANDS}),
    "`[diloco]`, `student.quantize`": (
        parsed, {"student": {"model": "s", "quantize": {"bits": 4, "group": 32}}, **ISLANDS}
    ),
    "`[diloco]`, `[replay]`": (
        parsed, {"loss": {"type": "compose", "replay": DPO,
                          "distillation": {"teacher": {"weight": 1.0, "loss": SAMPLED}}},
                 "rollout": {"group_size": 2}, **ISLANDS}
    ),
    "`[diloco]`, `[trainer.until]`": (
        parsed, {**ISLANDS, "trainer": {"steps": 100, "until": {"metric": "eval/accuracy",
                                                                "plateau": 2}}}
    ),
    "`[diloco]`, `rollout.ahead`": (parsed, {"rollout": AHEAD, **ISLANDS}),
    "`[diloco]`, `student.lora`": (parsed, {**LORA, **ISLANDS}),
    "`[diloco]`, `tape`": (parsed, {"teacher": TAPED, **ISLANDS}),
    "`[diloco]`, `checkpoint.keep = 1`": (parsed, {**ISLANDS, "checkpoint": {"keep": 1}}),
    "`trainer.steps` that are no multiple of `diloco.every`": (
        parsed, {**ISLANDS, "trainer": {"steps": 95}}
    ),
}  # fmt: skip


def rows() -> list[list[str]]:
    """Return the cells of the guide's table."""
    section = GUIDE.read_text().split("### Which pairs are refused")[1]
    lines = [line for line in section.split("\n## ")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_table_of_refused_pairs_has_the_tested_ones() -> None:
    assert [row[0] for row in rows()] == [*ROWS]


@pytest.mark.parametrize("row", rows(), ids=lambda row: str(row[0]))
def test_refused_pair_names_keys_and_remedy(row: list[str], tmp_path: Path) -> None:
    """Whatever the table has in code is in the message, except for the command itself."""
    refused, changes = ROWS[row[0]]
    raw = {name: table for name, table in (tables() | changes).items() if table is not None}
    message = refused(raw, tmp_path)
    words = {word for cell in (row[0], row[2]) for word in re.findall("`(.+?)`", cell)}
    missing = {word for word in words - COMMANDS if word not in message}
    assert not missing, message


TOGETHER: dict[str, dict[str, Any]] = {
    "reference": {"teacher": TAPED, "reference": {"start": True, "tape": "another"},
                  "loss": {**SAMPLED, "repetition": {}}},
    "own": {"teacher": {**ALONE, "model": "t", "tokenizer": "own"},
            "loss": {"type": "topk_reverse_kl", "k": 4, "repetition": {}}, **END},
    "several": {"teacher": None, "teachers": {"a": {**ALONE}, "b": {"model": "t"}}, **END},
    "quantized": {"teacher": ALONE, **END,
                  "student": {"model": "s", "quantize": {"bits": 4, "group": 32}}},
    "replay": {"teacher": TAPED, **END, "loss": {
        "type": "compose", "distillation": {"teacher": {"weight": 1.0, "loss": SAMPLED}},
        "replay": {"weight": 1.0, "loss": {"type": "dpo", "repetition": {}}},
    }},
    "lengths": {"teacher": TAPED, "reference": {"start": True},
                "checks": {"collapse": {"truncated": 0.5, "longer": 2.0}},
                "loss": {**SAMPLED, "repetition": {}}},
    "ahead": {"rollout": {**AHEAD, "group_size": 2},
              "teacher": {**TAPED, "backend": "transformers"},
              "loss": {**SAMPLED, "repetition": {}}, "reference": {"start": True,
                                                                   "backend": "transformers"}},
    "lora": {"teacher": {"base": True, "tape": "a folder"}, **LORA, **END,
             "checkpoint": {"merge": True}, "loss": {"type": "topk_reverse_kl", "k": "full",
                                                     "normalization": "full"}},
    "lora and several": {"teacher": None, **LORA,
                         "teachers": {"a": {"base": True}, "b": {"model": "t"}}},
    "lora and reference": {"teacher": {"model": "t"}, **LORA, "reference": {"start": True},
                           "loss": SAMPLED},
    "lora and hints": {"teacher": {"policy": {"update": "base"}}, **LORA},
    "islands": {"teacher": ALONE, **END, **ISLANDS},
    "islands and own": {"teacher": {"model": "t", "tokenizer": "own"}, **ISLANDS},
    "islands and live": {"teacher": {"policy": {"update": "live"}}, **ISLANDS},
}  # fmt: skip


@pytest.mark.parametrize("name", TOGETHER)
def test_other_pairs_are_a_recipe(name: str) -> None:
    raw = tables() | TOGETHER[name]
    parse_recipe({key: table for key, table in raw.items() if table is not None})
