"""Losses, settings and teachers that do not fit, each named with a remedy."""

import copy

import pytest
import torch

from prime_composer.losses import LOSS_TYPES, parse_loss
from prime_composer.recipe import RecipeError
from prime_composer.teachers.compatibility import PreflightError
from prime_composer.trl.batch import rollouts_of
from prime_composer.trl.objective import read_loss
from tests.fork_server import REPO
from tests.tiny_qwen import VOCAB, make_model
from tests.vllm_process import save_tokenizer

pytestmark = pytest.mark.xdist_group("trl")

REVERSE = {"type": "topk_reverse_kl", "k": 8}
REFUSED = {
    "default": "needs advantages.*no rewards.*prime-composer rl",
    "ipo": "needs advantages.*prime-composer rl",
    "icepop": "needs advantages.*prime-composer rl",
    "sft": "expected gradient of 0.*SFTTrainer",
}
"""Types that are refused with their default knobs. All others are taken."""

KNOBS = {
    "taid": {"total_steps": 10},
    "compose": {"rl": {"weight": 0.0}, "distillation": {"a": {"loss": REVERSE, "weight": 1.0}}},
}


@pytest.mark.parametrize("name", list(LOSS_TYPES))
def test_each_loss_is_taken_or_refused_by_name(name):
    """A new loss of the package has to be in one of the two lists."""
    knobs = {**(LOSS_TYPES[name].examples[0]), **KNOBS.get(name, {})}
    table = {"type": name, **knobs}
    if name in REFUSED:
        with pytest.raises(ValueError, match=rf"\[loss\] type = '{name}'.*{REFUSED[name]}"):
            read_loss(table)
    else:
        assert read_loss(table) == parse_loss(table)


def test_refused_part_is_named_by_its_section():
    with pytest.raises(ValueError, match=r"\[loss.rl_mix.loss\] type = 'ipo' needs advantages"):
        read_loss({**REVERSE, "rl_mix": {"kd": 0.5, "loss": {"type": "ipo"}}})
    parts = {"distillation": {"a": {"loss": {"type": "sft"}, "weight": 1.0}}, "rl": {"weight": 0}}
    with pytest.raises(ValueError, match=r"\[loss.distillation.a.loss\] type = 'sft'"):
        read_loss({"type": "compose", **parts})


@pytest.mark.parametrize(
    ("recipe", "key"),
    [
        ("gsm8k_gopd", r"\[reference\]"),
        ("gsm8k_two_teachers", r"\[teachers\]"),
        ("gsm8k_opsd", r"\[teacher.policy\]"),
        ("gsm8k_gkd", "rollout.student_fraction"),
    ],
)
def test_recipe_with_more_than_its_loss_is_refused(recipe, key):
    with pytest.raises(RecipeError, match=f"{recipe}.toml: {key} is a part of this objective"):
        read_loss(REPO / "recipes" / "methods" / f"{recipe}.toml")


def test_knob_of_trls_own_loss_is_refused(make_trainer):
    with pytest.raises(ValueError, match="args.beta = 0.5 .*generalized_jsd"):
        make_trainer(REVERSE, beta=0.5)


@pytest.mark.parametrize("setting", [{"temperature": 0.7}, {"min_p": 0.1}])
def test_tempered_sampling_fits_losses_on_the_top_k_alone(make_trainer, setting):
    """A loss on the sampled token would need the probability that it was sampled with."""
    ((name, value),) = setting.items()
    with pytest.raises(ValueError, match=rf"args.{name} = {value}: .*'sampled_reverse_kl' reads"):
        make_trainer({"type": "sampled_reverse_kl"}, **setting)
    make_trainer(REVERSE, **setting)


@pytest.mark.parametrize("attribute", ["is_fsdp_enabled", "is_deepspeed_enabled"])
def test_sharded_student_is_refused(make_trainer, attribute):
    trainer = make_trainer(REVERSE)
    setattr(trainer, attribute, True)
    with pytest.raises(ValueError, match="shards the student's output head.*accelerate launch"):
        trainer._refuse_untested()


def test_teacher_with_another_tokenizer_is_refused(make_trainer, tmp_path):
    """Of another size, and of the same size with other words."""
    make_model(False, 1).save_pretrained(tmp_path)
    save_tokenizer(tmp_path, VOCAB)
    vocabulary = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(vocabulary.replace('"w7"', '"v7"'))
    with pytest.raises(PreflightError, match="different vocabularies.*one tokenizer"):
        make_trainer(REVERSE, teacher=str(tmp_path))


def test_student_with_other_logits_than_its_head_gives_is_refused(make_trainer, models):
    student = copy.deepcopy(models.student)
    student.config.final_logit_softcapping = 1.0  # which its class does not read
    with pytest.raises(ValueError, match="does more to its logits"):
        make_trainer(REVERSE, student=student)


def test_rollouts_of_a_batch_have_no_padding():
    """Padding with EOS is told by the masks, and a tool's tokens do not train."""
    batch = {
        "prompt_ids": torch.tensor([[1, 1, 5], [6, 1, 7]]),
        "prompt_mask": torch.tensor([[0, 0, 1], [1, 1, 1]]),
        "completion_ids": torch.tensor([[8, 9, 1, 1], [8, 1, 1, 1]]),
        "completion_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
        "tool_mask": torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]]),
    }
    first, second = rollouts_of(batch, eos_token_ids=[1])
    assert first.token_ids.tolist() == [5, 8, 9, 1, 1]
    assert first.loss_mask.tolist() == [False, True, False, True, True]
    assert second.token_ids.tolist() == [6, 1, 7, 8, 1]
    assert second.loss_mask.tolist() == [False, False, False, True, True]
    assert (first.finish_reason, second.finish_reason) == ("stop", "stop")
    del batch["tool_mask"]
    assert rollouts_of(batch, [3])[0].loss_mask.tolist() == [False, True, True, True, True]
    assert rollouts_of(batch, [3])[0].finish_reason == "length"
