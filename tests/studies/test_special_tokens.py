"""The teachers of the special-token study are the distributions that they claim to be."""

import math

import torch

from prime_composer.backends.protocols import Limits, Rollout
from prime_composer.contract import Scores
from tests.studies.special_tokens import PlantedScorer

Q = torch.tensor([[0.5, 0.3, 0.1, 0.06, 0.04], [0.2, 0.7, 0.05, 0.03, 0.02]], dtype=torch.float64)
END = 1
REST = 1 - math.exp(-20)


class FullScorer:
    limits = Limits()
    sampler = None
    gives_any_ids = True

    def score(self, rollouts, support_size, prompts=None, **_):
        k = Q.shape[1] if support_size == "full" else support_size
        logprobs, ids = Q.log().sort(dim=-1, descending=True)
        ref = Q.log().gather(1, rollouts[0].token_ids[:, None])[:, 0]
        return [Scores(ref, ids[:, :k], logprobs[:, :k])]


def scored(last: int, k: int | str, other: int | None = None) -> Scores:
    """Return the scores of an end and another token, by the true teacher's whole rows."""
    rollout = Rollout(torch.tensor([END, last]), torch.ones(2).bool(), torch.zeros(2), "stop", 0)
    (scores,) = PlantedScorer(FullScorer(), END, other).score([rollout], k)
    return scores


def test_planted_teacher_keeps_the_proportions_of_others() -> None:
    """The whole rows, which measure the KL, stay the true ones."""
    planted = scored(3, 3)
    assert planted.token_ids.tolist() == [[0, 2, 3], [0, 2, 3]]
    kept = torch.tensor([[0.5, 0.1, 0.06], [0.2, 0.05, 0.03]], dtype=torch.float64)
    kept *= REST / torch.tensor([[0.7], [0.3]])
    torch.testing.assert_close(planted.teacher_logprobs.exp(), kept, rtol=1e-6, atol=0)
    own = torch.tensor([math.exp(-20), 0.03 / 0.3 * REST], dtype=torch.float64)
    torch.testing.assert_close(planted.ref_logprobs.exp(), own, rtol=1e-6, atol=0)
    true = scored(3, "full")
    assert true.teacher_logprobs.exp().sum(-1).allclose(torch.ones(2).double())
    assert true.ref_logprobs[0].exp() == 0.3


def test_moved_end_is_another_token_with_its_probability() -> None:
    """In the top K and as the sampled token; the others keep theirs."""
    moved = scored(4, 3, other=4)
    assert moved.token_ids.tolist() == [[0, 4, 2], [4, 0, 2]]
    expected = torch.tensor([[0.5, 0.3, 0.1], [0.7, 0.2, 0.05]], dtype=torch.float64)
    torch.testing.assert_close(moved.teacher_logprobs.exp(), expected)
    own = torch.tensor([math.exp(-20), 0.7], dtype=torch.float64)
    torch.testing.assert_close(moved.ref_logprobs.exp(), own)
