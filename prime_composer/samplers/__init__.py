"""Who writes rollouts: vLLM in this process, a vLLM server, transformers."""
