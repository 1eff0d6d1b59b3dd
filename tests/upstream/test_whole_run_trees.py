"""Real trees with parts of the next contract: whole runs, or the half that a CPU can carry.

Each is a branch of prime-rl that a full clone has (``BRANCHES``). None of them is a release.
"""

import pytest

from tests.prime_rl_checkout import BRANCHES
from tests.upstream.in_prime_rl import Interpreter
from tests.upstream.test_whole_run import TOP_K, check_top_k, models, newest, other, run

__all__ = ["models"]


@pytest.mark.parametrize(
    "tree,version",
    [
        pytest.param("orchestrator clients", "head", marks=newest),
        pytest.param("inline images", "head", marks=other),
        pytest.param("two more fields", "v0.7", marks=other),
    ],
)
def test_whole_run_of_a_branch_distils_on_the_top_k(trees, models, tmp_path, tree, version):
    """Launcher, orchestrator, env server and trainer of the branch, with its version's TOML."""
    check_top_k(run(version, trees, models, tmp_path, TOP_K, tree=tree), version)


KEPT = """
import json, torch
from prime_rl.trainer.models.layers.lm_head import FusedOutputLinear, VanillaOutputLinear
from prime_composer.upstream.trainer.adapter import adapter
from prime_composer.upstream.wire import pack

V, D, N, K = 23, 8, 12, 3
torch.manual_seed(0)
state = adapter()
state.k = k
ids = torch.randint(0, V, (1, N))
log_q, top = torch.randn(N, V).log_softmax(-1).topk(K)
packed = torch.from_numpy(pack(top.numpy(), log_q.numpy()))
batch = {"input_ids": ids, "loss_mask": torch.ones(1, N, dtype=torch.bool),
         "temperatures": torch.ones(1, N), "routed_experts": packed[None],
         "ref_kl_weights": torch.ones(1, N), "rl_weights": None}
labels = torch.roll(ids, -1, 1)
kept = torch.stack([labels[0], (labels[0] + 1) % V], dim=1)[None].int()
states = torch.randn(1, N, D)
head = FusedOutputLinear(D, V, 4) if fused else VanillaOutputLinear(D, V)
state.begin(batch)
given = {"labels": labels, "temperature": torch.ones(1, N), "kept_tokens": kept if masked else None}
try:
    out = head(states, **given)
    logits = states[0] @ head.weight.t()
    result = {"out": sorted(name for name, value in out.items() if value is not None)}
    if fused:
        own = out["logprobs"][0]
        whole = logits.log_softmax(-1).gather(1, labels[0, :, None])[:, 0]
        pair = logits.gather(1, kept[0].long()).log_softmax(-1)[:, 0]
        result["whole"] = (own - whole).abs().max().item()
        result["kept"] = (own - pair).abs().max().item()
    if k:
        student = state.micro_batch.student[1:] + whole[:-1, None] if fused else None
        expected = logits.log_softmax(-1)[:-1].gather(1, top[1:])
        result["support"] = (student - expected).abs().max().item() if fused else 0.0
except ValueError as error:
    result = {"refused": str(error)}
"""


@pytest.fixture(scope="module")
def kept_tokens(trees, tmp_path_factory):
    """A process with the trainer of the branch whose heads take ``kept_tokens``, hooked."""
    folder = tmp_path_factory.mktemp("kept")
    switch = '{"loss": {"type": "topk_reverse_kl", "k": 3}}'
    process = Interpreter("head", lambda _: trees("kept tokens"), folder, PRIME_COMPOSER=switch)
    yield process
    process.close()


@pytest.mark.slow
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("k,masked", [(3, True), (3, False), (0, True)])
def test_head_of_a_branch_renormalizes_and_is_guarded(kept_tokens, fused, k, masked):
    """Its log-probs are over the kept ids: right for the sampled token, refused with a support."""
    done = kept_tokens.run(KEPT, fused=fused, k=k, masked=masked)
    if k and masked:
        assert "The batch carries kept_tokens" in done["refused"]
        return
    assert "logprobs" in done["out"] if fused else "logits" in done["out"]
    if fused:
        assert done["kept" if masked else "whole"] < 1e-5 < done["whole" if masked else "kept"]
    assert done.get("support", 0.0) < 1e-5


def test_branches_are_full_hashes():
    """A short one could name another commit one day."""
    assert all(len(commit) == 40 for commit in BRANCHES.values())
