"""The adapter in prime-rl's orchestrator: ask teachers for their top-K, and send it on."""
