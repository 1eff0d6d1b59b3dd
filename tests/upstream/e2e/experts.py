"""Choose the experts of a Qwen3-MoE model of transformers. Imports nothing of this package."""

import collections
import functools
import re

import torch

PART = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def in_one_tensor(state):
    """Return weights with all experts of a layer in one tensor, as transformers computes."""
    whole, layers = {}, collections.defaultdict(dict)
    for name, tensor in state.items():
        part = PART.fullmatch(name)
        if part is None:
            whole[name] = tensor
        else:
            layers[part[1]][int(part[2]), part[3]] = tensor
    for layer, parts in layers.items():
        numbers = range(len(parts) // 3)
        both = [torch.cat([parts[n, "gate"], parts[n, "up"]]) for n in numbers]
        whole[f"{layer}.gate_up_proj"] = torch.stack(both)
        whole[f"{layer}.down_proj"] = torch.stack([parts[n, "down"] for n in numbers])
    return whole


class Routing:
    """Replaces the choice of all routers of a model.

    Args:
        model: a ``Qwen3MoeForCausalLM``.

    Attributes:
        given: the experts of each token, [tokens, layers, k]. None: each router's least probable.
        used: the experts of the last forward, [tokens, layers, k].
    """

    def __init__(self, model):
        self.given = None
        self._used = [None] * len(model.model.layers)
        for number, layer in enumerate(model.model.layers):
            layer.mlp.gate.forward = functools.partial(self._route, layer.mlp.gate, number)

    @property
    def used(self):
        return torch.stack(self._used, dim=1)

    def _route(self, router, layer, hidden):
        logits = hidden.reshape(-1, router.hidden_dim) @ router.weight.T
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
        if self.given is None:
            experts = scores.topk(router.top_k, largest=False).indices
        else:
            experts = self.given[:, layer]
        self._used[layer] = experts
        weights = scores.gather(1, experts)
        weights = weights / weights.sum(dim=1, keepdim=True)
        return logits, weights.to(logits.dtype), experts
