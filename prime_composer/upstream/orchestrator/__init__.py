"""The adapter in prime-rl's orchestrator: ask teachers for their top-K, and send it to the trainer.

client    one request for scores, and how many of them at a time
teachers  several teachers in the place of one, and their mixture
own_tokenizer  a teacher that reads messages, with a tokenizer of its own
hints     more hints of self-distillation
hooks     where prime-rl scores, and where its samples carry the support
"""
