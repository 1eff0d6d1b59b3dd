"""Entries of a support that belong to the tail change no loss on a support."""

import dataclasses

import pytest
import torch

from prime_composer.contract import LossInputs, Support
from prime_composer.losses import LOSS_TYPES, LossConfig, setup_loss_fn
from prime_composer.scoring.shared_vocabulary import IN_TAIL
from tests.builders import VOCAB, packed_inputs, student_leaves

PLACES = (0, 3)
"""Columns of the support that are in the tail: the most probable one, and a later one."""

OF_THE_SUPPORT = "topk_overlap_min"
"""A share of the K ids: those of the tail are not among the student's own most probable ones."""


def with_entries_in_the_tail(inputs: LossInputs) -> LossInputs:
    """Return the inputs with two entries more in each row of the support."""
    support = inputs.support
    columns = [support.token_ids, support.teacher_logprobs, support.student_logprobs]
    for place in PLACES:
        for i, value in enumerate((VOCAB + place, IN_TAIL, IN_TAIL)):
            entry = torch.full_like(columns[i][:, :1], value)
            columns[i] = torch.cat([columns[i][:, :place], entry, columns[i][:, place:]], dim=1)
    return dataclasses.replace(inputs, support=Support(*columns))


def on_a_support() -> list[LossConfig]:
    """Return every example of a loss that reads the teacher's top K, with K = 4 where it may be."""
    configs = []
    for name, cls in LOSS_TYPES.items():
        for knobs in cls.examples if ":" not in name else ():
            config = cls(**knobs)
            own = {"k": 4} if isinstance(getattr(config, "k", None), int) else {}
            config = cls(**{**knobs, **own})
            if own and config.support_size == 4:
                configs.append(config)
    return configs


def config_id(config: LossConfig) -> str:
    return f"{config.type} {getattr(config, 'normalization', '')}"


@pytest.mark.parametrize("config", on_a_support(), ids=config_id)
def test_entries_in_the_tail_change_no_loss(config: LossConfig) -> None:
    """Value, gradients and metrics are those of the support without them."""
    wide = type(config)(**{**config.model_dump(exclude_unset=True), "k": 4 + len(PLACES)})
    plain, again = packed_inputs(config, seed=3), packed_inputs(config, seed=3)
    expected = setup_loss_fn(config)(plain)
    out = setup_loss_fn(wide)(with_entries_in_the_tail(again))
    torch.testing.assert_close(out.loss, expected.loss)
    for name, value in expected.metrics.items():
        if OF_THE_SUPPORT not in name:
            torch.testing.assert_close(out.metrics[name], value, msg=name)
    expected.loss.backward()
    out.loss.backward()
    for own, theirs in zip(student_leaves(again), student_leaves(plain), strict=True):
        torch.testing.assert_close(own.grad, theirs.grad)
