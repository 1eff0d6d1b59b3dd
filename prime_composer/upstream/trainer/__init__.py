"""The adapter in prime-rl's trainer process.

adapter   the one ``Adapter`` of the process: loss, micro-batch in flight, step count, journal
hooks     prime-rl's loss module, data loader, model and context parallelism
head      prime-rl's output heads: student log-probs on the teacher's support, and hidden states
logits    the maths of log-probs on a support
teachers  the trainer's own questions to the teachers
batches   one micro-batch with its support, or with the trainer's answers
binding   a loss in prime-rl's terms
journal   a loss's state across prime-rl's own resume
"""
