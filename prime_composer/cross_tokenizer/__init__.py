"""A teacher's probabilities of the student's own tokens, where both have tokenizers of their own.

The target is Q(v | tau), the probability that the teacher's text, encoded by the student, goes on
with v after tau.
"""
