"""Names that the adapter reads in prime-rl's config and in the environment."""

SWITCH = "PRIME_COMPOSER"
"""Environment variable of the whole-run adapter."""

SECTION = "trainer.loss.kwargs"
"""Table of prime-rl's config that holds our loss table."""

IMPORT_PATH = "prime_composer.upstream.loss_fn"
"""Value of ``[trainer.loss] import_path`` that names our loss."""

TOKENIZERS_KEY, PROMPTS_KEY = "teacher_tokenizers", "teacher_prompts"
"""Further keys of that table."""
