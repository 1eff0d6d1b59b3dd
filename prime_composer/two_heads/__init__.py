"""Divergences between student and teacher over the whole vocabulary, from hidden states and heads.

For student logits a = h_s W_s^T and teacher logits b = h_t W_t^T, per token, with A and B their
logsumexp, log p_v = a_v - A and log q_v = b_v - B,

    D = sum_v f(log p_v, log q_v)
    dD / da_v = f'_v - p_v sum_u f'_u,    f' = the derivative of f with respect to log p_v

``Divergence`` is such an f with its derivative. The vocabulary is processed in chunks. A first pass
computes A and B (online softmax, as in ``prime_composer.lm_head``), a second one the sums of f and
f'. The backward computes each chunk's logits again. These are eight matrix products. No tensor of
[n, V] exists.

The two KLs and TAID's target need no second pass, and six products. With log r_v = c_v - C the
target, c = b for a KL and c = (1 - t) a + t b for TAID (where r has no gradient),

    KL(p || q) = E_p[a - b] - (A - B)    gradient p_v (log p_v - log q_v - KL(p || q))
    KL(r || p) = E_r[c - a] - (C - A)    gradient p_v - r_v

All other objectives of a distribution per token go through f. One whose f contains another sum over
the vocabulary takes that sum as a parameter per token, from a call before, with its gradient.

What needs the teacher's vocabulary in order, the weight of ``adaptive_kl``, finds the last of its
top ids instead, in passes over the teacher's head (``top_mass``). AKL takes 12 products.

Only the student has a gradient. Left out: heads in shards, and second derivatives.

What "exact" means. Half-precision products are summed in float32, and the logits stay float32. This
is a server with a float32 head over half-precision states (prime-rl's own), not one with a
half-precision head: vLLM's bfloat16 head rounds each logit, up to 0.03 at a logit of 10. For its
distribution, set ``Logits.rounded_to``. Elementwise work has float32, or float64 for a float64
student. Sums over chunks have float64.
"""

from prime_composer.two_heads.compare import (
    Comparison,
    adaptive_kl,
    compare,
    forward_kl,
    generalized_jsd,
    reverse_kl,
    taid,
)
from prime_composer.two_heads.divergence import (
    Divergence,
    ForwardKL,
    GeneralizedJSD,
    ReverseKL,
    Terms,
)
from prime_composer.two_heads.heads import Logits, TwoHeads

__all__ = [
    "Comparison",
    "Divergence",
    "ForwardKL",
    "GeneralizedJSD",
    "Logits",
    "ReverseKL",
    "Terms",
    "TwoHeads",
    "adaptive_kl",
    "compare",
    "forward_kl",
    "generalized_jsd",
    "reverse_kl",
    "taid",
]
