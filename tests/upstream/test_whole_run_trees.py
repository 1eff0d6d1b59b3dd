"""Real trees with parts of the next contract: whole runs, or the half that a CPU can carry.

Each is a branch of prime-rl that a full clone has (``BRANCHES``). None of them is a release.
"""

import pytest

from tests.prime_rl_checkout import BRANCHES
from tests.upstream.in_prime_rl import Interpreter
from tests.upstream.test_whole_run import TOP_K, check_top_k, models, other, run

__all__ = ["models"]


@other
@pytest.mark.parametrize("tree", ["orchestrator clients", "inline images"])
def test_whole_run_of_a_branch_distils_on_the_top_k(trees, models, tmp_path, tree):
    """Launcher, orchestrator, env server and trainer of the branch, with head's TOML.

    The other two need a verifiers of their own, which is no release.
    """
    check_top_k(run(trees, models, tmp_path, TOP_K, tree=tree))


TRAIN = """
import inspect, torch
from prime_rl.trainer.models.layers.lm_head import FusedOutputLinear, VanillaOutputLinear
from prime_rl.trainer.rl import loss as losses
from prime_composer.upstream.trainer.adapter import trainer_adapter
from prime_composer.contract import Scores
from prime_composer.upstream.wire import pack

V, D, N, K = 23, 8, 12, 3
torch.manual_seed(0)
state = trainer_adapter()
ids, mask = torch.randint(0, V, (1, N)), torch.arange(N)[None] > 3
teacher = torch.randn(N, V).log_softmax(-1)
log_q, top = teacher.topk(K)
batch = {
    "input_ids": ids, "loss_mask": mask, "temperatures": torch.ones(1, N),
    "routed_experts": torch.from_numpy(pack(Scores(torch.zeros(N), top, log_q)))[None],
    "ref_kl_weights": mask.float(), "rl_weights": torch.zeros(1, N),
    "sequence_lengths": [5, 7], "env_names": ["sums"] * N,
}
labels, states = torch.roll(ids, -1, 1), torch.randn(1, N, D)
head = FusedOutputLinear(D, V, 4) if fused else VanillaOutputLinear(D, V)
more = {}
if "extra_gather_ids" in inspect.signature(type(head).forward).parameters:
    more["extra_gather_ids"] = torch.randint(0, V, (1, N, 2))
state.ask_for_batch()
for tensors in state.batch_came([batch]):
    out = head(states, labels=labels, temperature=tensors["temperatures"], **more)
    own = out.get("logprobs")
    if own is None:
        own = out["logits"].log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    own = torch.cat([torch.full((1,), -3.0), own[0, :-1]])

    def split(row):
        return list(row.split(tensors["sequence_lengths"]))

    zeros = split(torch.zeros(N))
    value, metrics = losses.compute_loss(
        trainer_logprobs=split(own), inference_logprobs=split(own.detach()),
        ref_logprobs=split(teacher.gather(1, ids[0, :, None])[:, 0]), advantages=zeros,
        loss_mask=split(mask[0]), rl_weights=zeros, ce_weights=None,
        ref_kl_weights=split(mask[0].float()), rl_loss_fn=None, rl_scale=1, ce_scale=1,
        ref_kl_scale=1,
    )
table = (states[0].double() @ head.weight.detach().double().t()).log_softmax(-1)
p = torch.cat([torch.zeros(1, K).double(), table[:-1].gather(1, top[1:])])
q = log_q.double()
tail_p, tail_q = torch.log1p(-p.exp().sum(-1)), torch.log1p(-q.exp().sum(-1))
kl = (p.exp() * (p - q)).sum(-1) + tail_p.exp() * (tail_p - tail_q)
result = {"loss": value.item(), "expected": kl[mask[0]].sum().item()}
result["calls"] = state.calls
if more and fused:
    extra = table.gather(1, more["extra_gather_ids"][0])
    (name,) = set(out) - {"logprobs", "entropy", "prime_composer_support"}
    result["extra"] = (out[name][0] - extra).abs().max().item()
"""


@pytest.fixture(scope="module", params=BRANCHES)
def branch(request, trees, tmp_path_factory):
    """A process with a branch's trainer, hooked."""
    folder = tmp_path_factory.mktemp("branch")
    switch = '{"loss": {"type": "topk_reverse_kl", "k": 3}}'
    tree = request.param
    process = Interpreter("head", lambda _: trees(tree), folder, PRIME_COMPOSER=switch)
    yield process
    process.close()


@pytest.mark.slow
@pytest.mark.parametrize("fused", [True, False])
def test_trainer_of_a_branch_computes_the_divergence(branch, fused):
    """Its own head and compute_loss, with what they have more, against plain float64."""
    done = branch.run(TRAIN, fork=True, fused=fused)
    assert done["loss"] == pytest.approx(done["expected"], rel=1e-5) and done["calls"] == 2
    assert done.get("extra", 0.0) < 1e-5


def test_branches_are_full_hashes():
    """A short one could name another commit one day."""
    assert all(len(commit) == 40 for commit in BRANCHES.values())
