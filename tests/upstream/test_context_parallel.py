"""Context parallelism: two ranks over gloo, each with half of the sequence.

prime-rl's attention kernels for it need flash-attn and are not run. Our part is: sharding the ids
and gathering the log-probs.
"""

import datetime
import json
import os
import types

import pytest
import torch

from tests.fork_server import REPO, ForkServer
from tests.stand_in import free_port

V, D, K, N = 53, 8, 4, 12


def gathered_states(hidden, local, half) -> tuple[float, float]:
    """Return the errors of the hidden states of the whole sequence, and of a gradient."""
    from prime_composer.upstream.trainer.adapter import trainer_adapter

    whole = trainer_adapter().micro_batch.head.hidden
    weights = torch.arange(1.0, D + 1)
    (whole * weights).sum().backward()
    torch.distributed.destroy_process_group()
    return (
        (whole - hidden[0]).abs().max().item(),
        (local.grad - 2 * weights.expand_as(hidden[:, half])).abs().max().item(),
    )


def worker(rank: int, port: int, trained: int, states: int = 0) -> tuple[float, float]:
    """Be one of two ranks; return the largest errors of values and gradients.

    ``states``: 1 for a loss that reads hidden states instead of a support.
    """
    from prime_composer.upstream.trainer.adapter import trainer_adapter
    from prime_composer.upstream.trainer.batches import PackedMicroBatch, Questions
    from prime_composer.upstream.trainer.hooks import hook_context_parallel
    from tests.upstream.fake_prime_rl import head_module

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    limit = datetime.timedelta(seconds=60)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2, timeout=limit)
    trainer_adapter().k = K
    cp = types.ModuleType("prime_rl.utils.cp")

    def setup_cp_params(input_ids, position_ids, cp_rank, cp_world_size, cp_group, *, seq_lens):
        return [each.chunk(cp_world_size, dim=1)[cp_rank] for each in (input_ids, position_ids)]

    cp.setup_cp_params = setup_cp_params
    hook_context_parallel(cp)

    torch.manual_seed(0)
    head = head_module()(D, V, bias=False)
    hidden = torch.randn(1, N, D)
    ids = torch.randint(0, V, (1, N))
    top = torch.stack([torch.randperm(V)[:K] for _ in range(N)])
    packed = torch.stack([top.int(), torch.full((N, K), -9.0).view(torch.int32)], dim=1)[None]
    mask = torch.zeros(1, N, dtype=torch.bool)
    mask[0, trained:] = True
    batch = {
        "input_ids": ids,
        "loss_mask": mask,
        "temperatures": torch.ones(1, N),
        "routed_experts": packed,
        "env_names": ["sums"] * N,
    }
    trainer_adapter().begin(batch)
    if states:
        trainer_adapter().k = 0
        questions = Questions(types.SimpleNamespace(hidden=True), list)
        trainer_adapter().micro_batch = PackedMicroBatch(batch, 0, questions=questions)
    labels = torch.cat([ids[:, 1:], torch.zeros(1, 1, dtype=torch.long)], dim=1)
    both = torch.distributed.group.WORLD
    cp.setup_cp_params(ids, torch.arange(N)[None], rank, 2, both, seq_lens=torch.tensor([N]))
    half = slice(rank * N // 2, (rank + 1) * N // 2)
    local = hidden[:, half].clone().requires_grad_()
    head(local, labels[:, half], temperature=torch.ones(1, N // 2))
    if states:
        return gathered_states(hidden, local, half)
    gathered = trainer_adapter().micro_batch.student
    (gathered * torch.arange(1.0, K + 1)).sum().backward()
    whole = hidden.clone().requires_grad_()
    z = whole[0] @ head.weight.detach().t()
    z = z.gather(1, torch.roll(top, -1, 0)) - z.gather(1, labels[0].unsqueeze(1))
    expected = torch.cat([torch.zeros(trained, K), z[trained - 1 : -1]])
    (expected * torch.arange(1.0, K + 1)).sum().backward()
    # Every rank computes the whole loss, so the gather's backward sums two copies, as it does for
    # prime-rl's log-probs.
    torch.distributed.destroy_process_group()
    return (
        (gathered - expected).abs().max().item(),
        ((0 if local.grad is None else local.grad) - 2 * whole.grad[:, half]).abs().max().item(),
    )


RANK = """
import json, sys
from tests.upstream.test_context_parallel import worker
print("\\n" + json.dumps(worker(*map(int, sys.argv[1:]))))
"""


@pytest.mark.parametrize(
    "trained,states", [(N // 2 + 1, 0), (1, 1)]
)  # from this token on; a first shard of prompt alone trains none
def test_context_parallel_ranks_agree_with_one_rank(
    trained: int, states: int, torch_forks: ForkServer
) -> None:
    if not torch.distributed.is_available():
        pytest.skip("this torch has no distributed package")
    port = free_port()
    ranks = [
        torch_forks.start("-c", RANK, rank, port, trained, states, cwd=REPO) for rank in (0, 1)
    ]
    for rank in ranks:
        out, err = rank.communicate(timeout=120)
        assert rank.returncode == 0, err
        value, gradient = json.loads(out.splitlines()[-1])
        assert value < 1e-5 and gradient < 1e-5
