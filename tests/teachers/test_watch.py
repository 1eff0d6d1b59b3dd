"""How far two scorings of one request are apart."""

import math

import torch

from prime_composer.contract import Scores
from prime_composer.teachers.watch import differences, largest_difference

OWN = torch.tensor([-1.0, -2.0])
IDS = torch.tensor([[3, 5], [4, 6]])
LOGPROBS = torch.tensor([[-0.5, -1.5], [-0.25, -3.0]])


def scores(logprobs=LOGPROBS, ids=IDS, known=None):
    return Scores(OWN, ids, logprobs, known=None if known is None else torch.tensor(known))


def test_differences_are_of_the_same_ids():
    """Whatever their order; an id that the other lacks is compared with the other's last one."""
    swapped = scores(LOGPROBS.flip(1), IDS.flip(1))
    assert differences(scores(), swapped).tolist() == [0.0, 0.0]
    lower = LOGPROBS - torch.tensor([[0.0, 0.25], [0.0, 0.0]])
    assert differences(scores(), scores(lower)).tolist() == [0.25, 0.0]
    other_ids = scores(ids=torch.tensor([[3, 5], [4, 7]]))
    assert differences(scores(), other_ids).tolist() == [0.0, 0.0]
    above = scores(LOGPROBS + torch.tensor([[0.0, 0.0], [0.0, 1.0]]), other_ids.token_ids)
    assert differences(scores(), above).tolist() == [0.0, 1.0]


def test_differences_leave_out_ids_that_are_not_known():
    nothing = LOGPROBS.clone()
    nothing[0, 1], nothing[1] = math.nan, 7.0
    known = [[True, False], [False, False]]
    assert largest_difference(scores(nothing, known=known), scores(nothing, known=known)) == 0
    assert largest_difference(scores(), scores(nothing, known=known)) == 0
    moved = scores(nothing - 0.5, known=known)
    assert differences(scores(nothing, known=known), moved).tolist() == [0.5, 0.0]
    assert math.isnan(largest_difference(scores(), scores(nothing)))


def test_one_support_alone_is_infinitely_far_away():
    """So is another number of tokens."""
    empty = Scores(OWN, torch.empty(2, 0).long(), torch.empty(2, 0))
    assert largest_difference(scores(), empty) == math.inf
    assert largest_difference(scores(), scores().rows(slice(1))) == math.inf
