"""The chat loop with tools that one machine has; prime-rl's `null` harness needs PyPI at run time.

verifiers finds a harness by the name of a module.
"""

from prime_composer.environments.chat_harness import ChatHarness

__all__ = ["ChatHarness"]
