"""Load a tiny model once, where forks begin: half of a tiny run's time would go into that.

transformers compiles hundreds of patterns when it loads its first model, and keeps them.
"""

import tempfile

from prime_composer.backends.cpu_guard import hide_cuda_packages
from prime_composer.backends.hf_model import load_model, without_progress_bars

hide_cuda_packages()


def warm() -> None:
    """Save a model of Qwen3's architecture, and load it."""
    import httpx
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
    )
    with tempfile.TemporaryDirectory() as folder, without_progress_bars():
        Qwen3ForCausalLM(config).save_pretrained(folder)
        load_model(folder)
    httpx.AsyncClient()


warm()
