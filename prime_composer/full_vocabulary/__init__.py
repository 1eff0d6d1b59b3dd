"""Divergences between student and teacher over the whole vocabulary, from hidden states and heads.

For student logits a = h_s W_s^T and teacher logits b = h_t W_t^T, ``compare`` returns a divergence
of softmax(a) and softmax(b) per token, with its gradient for the student. No tensor of [n, V]
exists. The backward computes logits again, which takes six matrix products in all, two of them with
the teacher's head.

The KLs and TAID are sums over the vocabulary, which ``kernel`` adds up chunk by chunk with a
gradient written by hand. Any other divergence is a function of log p and log q, which
``token_blocks`` calls with the whole vocabulary of a few tokens, and ``sums`` in the backward with
a part of it, if each id has a term of its own. Left out: heads in shards, and second derivatives.

What "exact" means. Half-precision products are summed in float32, and the logits stay float32.
vLLM's bfloat16 head rounds each logit, up to 0.03 at a logit of 10. For its distribution, set
``Logits.rounded_to``. Elementwise work has float32, or float64 for a float64 student. The kernel's
sums over chunks have float64.
"""

from prime_composer.full_vocabulary.compare import (
    WholeVocabulary,
    compare,
    on_support,
    teacher_logprobs,
)

__all__ = ["WholeVocabulary", "compare", "on_support", "teacher_logprobs"]
