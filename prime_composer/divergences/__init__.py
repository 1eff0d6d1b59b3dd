"""Divergences between student p and teacher q on a support, and estimators on the sampled token.

Arguments are log-probs, student first and teacher second, normalized over the *full vocabulary*,
with the K ids of the support S along the last axis. Results are per position (that axis is
reduced), in nats, and in float32 for half precision. The teacher is detached: no function sends a
gradient into it. Either argument may contain ``log 0 = -inf`` (0 log 0 = 0).

Letters: P = sum_S p and Q = sum_S q are the masses on the support, p^ = p/P and q^ = q/Q the
renormalized distributions, p_tail = 1 - P and q_tail = 1 - Q the masses outside, sg the
stop-gradient, z the student's logits, and L the value.

Reverse KL is KL(student || teacher) and seeks modes. Forward KL is KL(teacher || student) and
covers them. A top-K support hides the rest of the vocabulary. The normalization decides what is
learned about it:

=============  ======================  ==============================================  ==========
normalization  reverse KL              its gradient for z_j                            p = q on S
                                                                                       stationary
=============  ======================  ==============================================  ==========
full (K = V)   sum p log p/q           p_j (log p_j/q_j - L)                           yes
tail           sum_S p log p/q         S: p_j (log p_j/q_j - L)                        iff P = Q
               + p_tail log            off S: p_j (log p_tail/q_tail - L)
               p_tail/q_tail
renorm         sum_S p^ log p^/q^      S: p^_j (log p^_j/q^_j - L), off S: exactly 0   any P
generalized    sum_S p log p/q         1_S p_j log p_j/q_j - p_j sum_S p log p/q       yes
               - p + q
=============  ======================  ==============================================  ==========

``tail`` treats everything outside S as one outcome. It is a lower bound of the full KL, equal to
P renorm + KL(Bernoulli P || Bernoulli Q). It is the only row on K < V in which the teacher's mass
outside S is a target. ``renorm`` (arXiv 2603.25562) leaves the mass outside S free.
``generalized`` is Eq. 5 of MOPD (arXiv 2606.30406). Without its - p + q, the gradient of a sum over
S is that of P itself at p = q.
"""

from prime_composer.divergences.alpha_beta import alpha_beta_divergence, total_variation
from prime_composer.divergences.base import (
    MAX_LOG_MASS,
    Normalization,
    kl_terms,
    log1mexp,
    log_tail_mass,
    outcomes,
    renormalized,
    upcast,
    with_tail,
)
from prime_composer.divergences.estimators import k1, k2, k3, weighted_k1
from prime_composer.divergences.kl import (
    entropy,
    forward_kl,
    generalized_jsd,
    kls_and_entropy,
    reverse_kl,
    taid,
    taid_target,
    todi,
)
from prime_composer.divergences.skewed import (
    skewed_forward_kl,
    skewed_reverse_kl,
)

__all__ = [
    "MAX_LOG_MASS",
    "Normalization",
    "alpha_beta_divergence",
    "entropy",
    "forward_kl",
    "generalized_jsd",
    "k1",
    "k2",
    "k3",
    "kl_terms",
    "kls_and_entropy",
    "log1mexp",
    "log_tail_mass",
    "outcomes",
    "renormalized",
    "reverse_kl",
    "skewed_forward_kl",
    "skewed_reverse_kl",
    "taid",
    "taid_target",
    "todi",
    "total_variation",
    "upcast",
    "weighted_k1",
    "with_tail",
]
