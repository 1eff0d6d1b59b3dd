"""Import vLLM as an engine of the package does: a module for ``ForkServer``."""

from prime_composer.backends.cpu_guard import import_vllm

import_vllm()
