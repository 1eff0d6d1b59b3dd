"""Compare what is compiled on a GPU with float64, and print the largest errors as a JSON object.

    python -m tests.gpu.compiled DEVICE TOKENS WIDTH VOCABULARY

Tests switch compilation off, so this is a program of its own. An error is that of a value, or that
of a gradient over the largest entry of its float64 counterpart.
"""

import json
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from prime_composer.contract import Logits, TwoHeads
from prime_composer.full_vocabulary import compare
from prime_composer.fused import COMPILED
from prime_composer.lm_head import selected_logprobs
from tests.benchmarks.heads import DIVERGENCES

MORE = 100  # ids that only the teacher has


def errors(work: Callable[..., Tensor], leaves: list[Tensor]) -> list[float]:
    """Return the error of values, and those of gradients, of ``work`` on some leaves."""
    values, grads = [], []
    for dtype, device in ((leaves[0].dtype, leaves[0].device), (torch.float64, "cpu")):
        own = [x.detach().to(device, dtype).requires_grad_() for x in leaves]
        values.append(work(*own))
        # The same rounding of what comes in
        incoming = torch.linspace(0.5, 1.5, values[-1].numel(), dtype=torch.float32)
        incoming = incoming.view(values[-1].shape).to(values[-1])
        grads.append(torch.autograd.grad(values[-1], own, incoming))
    found = [(values[0].cpu().double() - values[1]).abs().max().item()]
    for one, other in zip(*grads, strict=True):
        found.append(((one.cpu().double() - other).abs().max() / other.abs().max()).item())
    return found


def main() -> None:
    device, tokens, width, vocab = sys.argv[1], *map(int, sys.argv[2:])
    COMPILED.add(device)
    g = torch.Generator().manual_seed(0)
    result = {}
    for dtype in (torch.bfloat16, torch.float32):
        hidden, other = (torch.randn(tokens, width, generator=g).to(device, dtype) for _ in "ab")
        weight, head = (
            (torch.randn(size, width, generator=g) * 2 * width**-0.5).to(device, dtype)
            for size in (vocab, vocab + MORE)
        )
        ids = torch.randint(0, vocab, (tokens, 9), generator=g)
        for name, (divergence, knobs) in DIVERGENCES.items():
            for bucket, size in (("", vocab), (", bucket", vocab + MORE)):
                teacher = other, head[:size]

                def of(h: Tensor, w: Tensor, f=divergence, k=knobs, t=teacher) -> Tensor:
                    side = Logits(*(x.to(h) for x in t))
                    return compare(TwoHeads(Logits(h, w), (side,)), f, **k)

                result[f"{name}{bucket}, {dtype}"] = errors(of, [hidden, weight])
        result[f"log-probs, {dtype}"] = errors(
            lambda h, w, i=ids: selected_logprobs(h, w, i.to(h.device)), [hidden, weight]
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
