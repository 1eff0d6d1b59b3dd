"""A LoRA student: what trains, what is sampled from, what is stored, and the base as a teacher."""

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from prime_composer.backends.hf_model import (
    ModelUnavailable,
    import_transformers,
    linear_layers,
    load_model,
    sequence_logprobs,
)
from prime_composer.backends.lora.adapter import LoraAdapter, import_peft
from prime_composer.backends.lora.views import base_of, weights_of
from prime_composer.local.checkpoint import list_checkpoints
from prime_composer.local.engine import Engine
from prime_composer.local.requirements import check_models
from prime_composer.local.run import checkpoint_bytes
from prime_composer.local.student import ExplodedWeights, Student
from prime_composer.recipe.loading import parse_recipe
from prime_composer.recipe.schema import Recipe, RecipeError
from prime_composer.step.batch import Batch
from prime_composer.step.gradients import accumulate_gradients
from prime_composer.teachers.transformers import TransformersScorer
from tests.conftest import TINY_RECIPE, changed
from tests.local.helpers import collect, copy_first_half, opened, planned, probed, run, tiny_models

Raw = Callable[..., dict[str, Any]]

LORA = {"rank": 3, "alpha": 7, "targets": ["q_proj", "down_proj"]}
SCALE = 7 / 3
UNTIED = {**TINY_RECIPE["student"]["prepare"], "tie_word_embeddings": False}
FULL = {"type": "topk_reverse_kl", "k": "full", "normalization": "full"}


@pytest.fixture
def raw(tiny_recipe: Raw) -> dict[str, Any]:
    """Return a recipe of a student with an adapter on two of its seven layers."""
    return tiny_recipe(student__lora=dict(LORA), trainer={"steps": 4, "batch_size": 6, "lr": 1e-2})


@pytest.fixture
def moved(raw: dict[str, Any]) -> Iterator[Engine]:
    """Yield open models whose adapter is not zero."""
    with opened(raw) as engine:
        move(engine.model)
        yield engine


@torch.no_grad()
def move(model: nn.Module) -> None:
    """Give B values of the size that A has."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


def pairs_of(model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A and B by the name of their layer."""
    found = dict(model.named_parameters())
    names = [name.removesuffix(".lora_A.default.weight") for name in found if "lora_A" in name]
    return {
        name: (found[f"{name}.lora_A.default.weight"], found[f"{name}.lora_B.default.weight"])
        for name in names
    }


def merged_by_hand(raw: dict[str, Any], model: nn.Module) -> nn.Module:
    """Return the student's directory in float64, with W + 7/3 B A in the adapted layers."""
    plain = load_model(tiny_models(raw)["student"]).double()
    with torch.no_grad():
        for name, (a, b) in pairs_of(model).items():
            plain.get_submodule(name).weight += SCALE * (b.double() @ a.double())
    return plain


def step_of(raw: dict[str, Any], engine: Engine) -> tuple[Recipe, Student, Batch]:
    """Return recipe, student and the batch of the first step."""
    recipe = parse_recipe(raw)
    return recipe, Student(recipe, engine), collect(engine, recipe, 1)[0]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"student__prepare": UNTIED, "loss": FULL},
        {"trainer__gradient_checkpointing": True},
    ],
    ids=["top-k", "untied", "recomputed"],
)
def test_gradients_are_those_of_the_chain_rule(
    changes: dict[str, Any], raw: dict[str, Any]
) -> None:
    """dA = s B^T dW and dB = s dW A^T, from the gradient of the dense weights in float64."""
    raw = changed(raw, **changes)
    with opened(raw) as engine:
        move(engine.model)
        engine.sampler.update_weights(engine.model)
        recipe, student, batch = step_of(raw, engine)
        accumulate_gradients(engine.model, student.loss, batch, recipe.trainer, 1)
        dense = merged_by_hand(raw, engine.model)
        accumulate_gradients(dense, student.loss, batch, recipe.trainer, 1)
        pairs = pairs_of(engine.model)
        assert len(pairs) == 2
        for name, (a, b) in pairs.items():
            of_weight = dense.get_submodule(name).weight.grad
            for own, expected in (
                (a, SCALE * b.detach().double().T @ of_weight),
                (b, SCALE * of_weight @ a.detach().double().T),
            ):
                scale = float(expected.abs().max())
                assert scale > 1e-4
                torch.testing.assert_close(own.grad.double(), expected, atol=1e-4 * scale, rtol=0)
        others = {n for n, p in engine.model.named_parameters() if p.grad is not None}
        assert len(others) == 4


def test_step_0_is_the_base_bit_for_bit(raw: dict[str, Any]) -> None:
    """In trainer and sampler."""
    base = load_model(tiny_models(raw)["student"])
    tokens = [[5, 6, 7, 8, 9, 10, 11, 12]]
    (expected,) = sequence_logprobs(base, tokens)
    with opened(raw) as engine:
        sampler: Any = engine.sampler
        for model in (engine.model, sampler.model, base_of(engine.model)):
            (own,) = sequence_logprobs(model, tokens)
            assert torch.equal(own[1:], expected[1:])


def logits_of(model: Any) -> Tensor:
    """Return a model's logits of eight tokens."""
    ids = torch.arange(5, 13)[None]
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits


def test_checkpoint_is_an_adapter_that_peft_and_transformers_load(
    raw: dict[str, Any], moved: Engine, tmp_path: Path
) -> None:
    """Both give the student's logits; the base is named by its full path."""
    assert moved.adapter is not None
    moved.adapter.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors",
    ]  # fmt: skip
    described = json.loads((tmp_path / "adapter_config.json").read_text())
    base = tiny_models(raw)["student"]
    assert described["base_model_name_or_path"] == str(base.resolve())
    assert described["target_modules"] == ["down_proj", "q_proj"]
    expected = logits_of(moved.model)
    assert not torch.allclose(expected, logits_of(base_of(moved.model)), atol=1e-3)
    import_transformers()
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    by_peft = PeftModel.from_pretrained(load_model(base), str(tmp_path))
    by_transformers = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for loaded in (by_peft, by_transformers):
        torch.testing.assert_close(logits_of(loaded.eval()), expected, atol=1e-5, rtol=1e-5)
    merged = logits_of(by_peft.merge_and_unload())
    torch.testing.assert_close(merged, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("prepare", [TINY_RECIPE["student"]["prepare"], UNTIED])
def test_merged_checkpoint_is_a_whole_model_beside_its_adapter(
    prepare: dict[str, Any], raw: dict[str, Any], tmp_path: Path
) -> None:
    raw["student"]["prepare"], raw["checkpoint"]["merge"] = prepare, True
    with opened(raw) as engine:
        move(engine.model)
        assert engine.adapter is not None
        engine.adapter.save_pretrained(tmp_path)
        model, expected = load_model(tmp_path), merged_by_hand(raw, engine.model).state_dict()
        state = model.state_dict()
        assert state.keys() == expected.keys()
        for name in state:
            torch.testing.assert_close(state[name].double(), expected[name], atol=1e-6, rtol=1e-6)
        own = logits_of(engine.model)
        torch.testing.assert_close(logits_of(model), own, atol=1e-5, rtol=1e-5)
        copied = copy.deepcopy(engine.adapter.weights)
        with torch.no_grad():
            for value in engine.adapter.weights.values():
                value.zero_()
        engine.adapter.load(tmp_path)
        now = engine.adapter.weights
        assert all(torch.equal(now[name], copied[name]) for name in copied)


def files_of(run_dir: Path) -> dict[str, dict[str, Any]]:
    """Return tensors and state of the newest checkpoint."""
    from safetensors.torch import load_file

    path = list_checkpoints(run_dir)[-1].path
    inner = path / "adapter"
    folder = inner if inner.is_dir() else path
    state = torch.load(path / "trainer.pt", weights_only=True)
    moments = state["optimizer"]["state"]
    return {
        "adapter": load_file(folder / "adapter_model.safetensors"),
        "moments": {f"{i} {key}": one[key] for i, one in moments.items() for key in one},
    }


def test_resumed_run_ends_with_the_same_adapter_and_optimizer(
    raw: dict[str, Any], tmp_path: Path
) -> None:
    """Bit for bit, after a cut behind step 2; also where it goes on with merged checkpoints."""
    run(raw, tmp_path / "whole")
    expected = files_of(tmp_path / "whole")
    assert all(bool(value.any()) for value in expected["adapter"].values())
    assert len(expected["adapter"]) == 4 and len(expected["moments"]) == 12
    copy_first_half(tmp_path / "whole", tmp_path / "cut")
    raw["checkpoint"]["merge"] = True
    run(raw, tmp_path / "cut", resume=True)
    resumed = files_of(tmp_path / "cut")
    for part in ("adapter", "moments"):
        assert resumed[part].keys() == expected[part].keys()
        for name, value in expected[part].items():
            assert torch.equal(resumed[part][name], value), name
    adapters = [one.path for one in list_checkpoints(tmp_path / "cut")]
    assert [(path / "model.safetensors").exists() for path in adapters] == [False, True]
    lines = [
        (tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("whole", "cut")
    ]
    losses = [[json.loads(line).get("loss") for line in own] for own in lines]
    assert losses[0] == losses[1]


def test_size_of_a_checkpoint_is_known_before_the_run(raw: dict[str, Any], tmp_path: Path) -> None:
    """The adapter's is smaller than the model's, whose size the merged one has."""
    sizes = []
    for merge in (False, True):
        raw["checkpoint"]["merge"], raw["trainer"]["steps"] = merge, 1
        with opened(raw) as engine:
            expected = checkpoint_bytes(engine)
        run(raw, tmp_path / str(merge))
        files = list_checkpoints(tmp_path / str(merge))[-1].path.rglob("*.*")
        size = sum(file.stat().st_size for file in files if file.suffix in (".safetensors", ".pt"))
        assert expected <= size < expected + 20_000  # names, shapes and the step
        sizes.append(expected)
    assert sizes[0] < sizes[1]


def test_start_of_another_shape_is_refused(
    raw: dict[str, Any], moved: Engine, tmp_path: Path
) -> None:
    """peft would scale or leave out what it reads."""
    assert moved.adapter is not None
    moved.adapter.save_pretrained(tmp_path)
    for key, value in (("rank", 4), ("alpha", 8), ("targets", ["q_proj"])):
        other = changed(raw, student__lora={**LORA, "start": str(tmp_path), key: value})
        with pytest.raises(ModelUnavailable, match=f"`{key}`"):
            opened(other)


def test_adapter_in_the_wrong_place_is_refused(
    raw: dict[str, Any], moved: Engine, tmp_path: Path
) -> None:
    """transformers would add it to the model that it is beside, and vLLM would not."""
    assert moved.adapter is not None
    moved.adapter.save_pretrained(tmp_path)
    recipe = parse_recipe(raw | {"student": {"model": str(tmp_path)}})
    with pytest.raises(RecipeError, match="is a LoRA adapter, and no whole model: name its"):
        check_models(recipe)
    shutil.copytree(tiny_models(TINY_RECIPE)["student"], tmp_path, dirs_exist_ok=True)
    with pytest.raises(RecipeError, match=r"adapter_config\.json.*move the adapter's files"):
        check_models(recipe)


def test_start_with_a_config_that_says_more_is_refused(
    raw: dict[str, Any], moved: Engine, tmp_path: Path
) -> None:
    """Whatever it is: what is no plain adapter is named by its key."""
    assert moved.adapter is not None
    moved.adapter.save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    described = json.loads(file.read_text())
    raw["student"]["lora"]["start"] = str(tmp_path)
    more = {"use_rslora": True, "modules_to_save": ["lm_head"], "a_key_of_a_later_version": 1}
    for key, value in more.items():
        file.write_text(json.dumps(described | {key: value}))
        with pytest.raises(RecipeError, match=f"{key} = .* leave `start` out"):
            check_models(parse_recipe(raw))


@pytest.mark.parametrize("init", ["gaussian", "pissa"])
def test_start_is_pefts_own_adapter_or_is_refused(
    init: Any, raw: dict[str, Any], tmp_path: Path
) -> None:
    """The student computes what peft's model does, and PiSSA changes the base too."""
    peft = import_peft()
    base = load_model(tiny_models(TINY_RECIPE)["student"])
    tokens = torch.tensor([list(range(5, 25))])
    before = base(tokens).logits.detach()
    settings = peft.LoraConfig(
        r=4, lora_alpha=7, target_modules=["q_proj", "down_proj"], init_lora_weights=init,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    torch.manual_seed(3)
    model = peft.get_peft_model(base, settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.1)
    expected = model(tokens).logits.detach()
    assert (expected - before).abs().max() > 0.01
    model.save_pretrained(tmp_path)
    raw["student"]["lora"] |= {"rank": 4, "start": str(tmp_path)}
    if init == "pissa":
        with pytest.raises(RecipeError, match="init_lora_weights = .* leave `start` out"):
            check_models(parse_recipe(raw))
        return
    check_models(parse_recipe(raw))
    with opened(raw) as engine:
        torch.testing.assert_close(engine.model(tokens).logits, expected, atol=1e-5, rtol=1e-5)


def test_base_as_the_teacher_scores_as_the_model_loaded_alone(raw: dict[str, Any]) -> None:
    """Bit for bit, whatever the adapter is, by K and by hidden states; it has no second weight."""
    raw |= {"teacher": {"base": True}, "loss": FULL}
    with opened(raw) as engine:
        _, student, batch = step_of(raw, engine)
        student.update(batch, 1)
        assert engine.teachers is not None
        (scorer,) = engine.teachers.scorers.values()
        alone = TransformersScorer(tiny_models(raw)["student"])
        rollouts = [sample.rollout for sample in batch.samples]
        for size, hidden in ((8, False), (0, True)):
            scores = (one.score(rollouts, size, hidden=hidden) for one in (scorer, alone))
            for own, other in zip(*scores, strict=True):
                for name in ("ref_logprobs", "token_ids", "teacher_logprobs"):
                    assert torch.equal(getattr(own, name), getattr(other, name))
                for mine, its in zip(own.hidden, other.hidden, strict=True):
                    assert torch.equal(mine.states, its.states)
        model: Any = scorer
        own_weights = {one.data_ptr() for one in engine.model.parameters()}
        assert {one.data_ptr() for one in model.model.parameters()} <= own_weights


@pytest.mark.parametrize(
    ("update", "share"), [("live", 1.0), ("ema", 0.25), ("sync", 0.0), ("base", 0.0)]
)
def test_policy_teacher_of_an_adapted_student(
    update: str, share: float, raw: dict[str, Any]
) -> None:
    """Its weights are the merged ones, their average, a copy, or the base's."""
    raw["teacher"] = {"policy": {"update": update, "ema_rate": 0.25, "sync_every": 2}}
    raw["rollout"]["max_model_len"] = 256
    with opened(raw) as engine:
        teacher = engine.policy_teacher
        assert teacher is not None
        base = {name: one.clone() for name, one in weights_of(engine.model)}
        move(engine.model)
        teacher.end_step(1)
        merged, own = dict(weights_of(engine.model)), dict(weights_of(teacher.model))
        assert sum(not torch.equal(merged[name], base[name]) for name in merged) == 2
        for name in merged:
            expected = (1 - share) * base[name] + share * merged[name]
            torch.testing.assert_close(own[name], expected, atol=1e-6, rtol=1e-6)
        teacher.end_step(2)
        own = dict(weights_of(teacher.model))
        if update == "sync":
            assert all(torch.equal(own[name], merged[name]) for name in merged)
        saved = copy.deepcopy(teacher.state_dict())
        assert bool(saved) == (update in ("ema", "sync"))
        teacher.load_state_dict(saved)
        assert not any("lora" in name for name in saved)


@pytest.mark.parametrize(
    ("targets", "why"),
    [
        (["q_proj", "qproj"], "'qproj', which is no linear layer"),
        (["lm_head"], "'lm_head', which is the output head or the embeddings"),
    ],
)
def test_targets_that_get_no_adapter_are_refused(
    targets: list[str], why: str, raw: dict[str, Any]
) -> None:
    """By a dry run as well, with the names that there are."""
    raw["student"]["lora"]["targets"] = targets
    tiny_models(raw)
    for refuse in (opened, planned):
        with pytest.raises(ModelUnavailable, match=f"{why}.*choose among down_proj, gate_proj, k"):
            refuse(raw)


def test_probe_and_tape_take_the_base_as_a_teacher(raw: dict[str, Any], tmp_path: Path) -> None:
    raw["teacher"] = {"base": True, "tape": str(tmp_path / "tape")}
    assert [one for one in probed(raw).findings if one.state == "failed"] == []
    raw["trainer"]["steps"] = 1
    run(raw, tmp_path / "first")
    raw["teacher"] = {"tape": str(tmp_path / "tape"), "tape_only": True}
    run(raw, tmp_path / "second")
    first, second = (files_of(tmp_path / name)["adapter"] for name in ("first", "second"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_layers_of_a_quantized_model_are_refused(student: tuple[nn.Module, Any]) -> None:
    """A merged weight needs a float32 one."""
    model = copy.deepcopy(student[0])
    config = parse_recipe({**TINY_RECIPE, "student": {"model": "m", "lora": {}}}).student.lora
    assert config is not None
    name, layer = next(iter(linear_layers(model)))
    layer.to(torch.bfloat16)
    with pytest.raises(ModelUnavailable, match=rf"{name} .* is quantized .*unquantized.*nf4"):
        LoraAdapter.of_model(model, config, "m", seed=0)


MODES: dict[str, dict[str, Any]] = {
    "bfloat16": {"trainer__dtype": "bfloat16"},
    "a hinted base": {
        "teacher": {"policy": {"update": "base"}},
        "rollout__max_model_len": 256,
    },
    "a base that samples": {
        "teacher": {"base": True},
        "rollout__student_fraction": 0.5,
        "rollout__other_source": "teacher",
    },
}


@pytest.mark.parametrize("mode", MODES)
def test_run_of_every_mode_trains_the_adapter(
    mode: str, raw: dict[str, Any], tmp_path: Path
) -> None:
    """Preflight and each step compare sampler and trainer; two steps move A and B."""
    raw = changed(raw, **MODES[mode])
    raw["trainer"]["steps"] = 2
    run(raw, tmp_path / "run")
    stored = files_of(tmp_path / "run")["adapter"]
    assert all(bool(value.any()) for value in stored.values())
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["grad_norm"] > 0


def test_exploded_adapter_is_not_saved(raw: dict[str, Any], moved: Engine) -> None:
    raw["trainer"] |= {"lr": 1e6, "warmup_steps": 0}
    moved.sampler.update_weights(moved.model)
    _, student, batch = step_of(raw, moved)
    with pytest.raises(ExplodedWeights, match=r"the weights of model\.layers.*lora_[AB]"):
        student.update(batch, 1)
