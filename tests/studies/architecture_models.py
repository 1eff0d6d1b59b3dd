"""Random tiny models of many architectures, with one tokenizer of single bytes.

Every model has two layers, 258 entries in its head, and what is special of its architecture: caps,
scales, biases, experts, states of a recurrence, windows, heads that are narrower than the model.
"""

from pathlib import Path
from typing import Any

import torch

VOCAB = 258
"""Two special tokens and every byte."""

PLAIN = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(16)],
    "long_factor": [2.0 + 0.5 * i for i in range(16)],
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
GPT = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 512}
MLA = {
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": 2,
}
SSM = {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}

MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
VISION = {
    "hidden_size": 32,
    "embed_dim": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_attention_heads": 2,
    "num_heads": 2,
    "head_dim": 16,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0],
    "image_size": 28,
    "patch_size": 14,
}
IMAGE_IDS = ("image_token_id", "image_token_index", "video_token_id", "boi_token_index")

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", {}),
    "Qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "Qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "Mistral": ("mistral", {"sliding_window": None}),
    "Phi-3": ("phi3", {"num_key_value_heads": 2}),
    "Phi-3, longrope": ("phi3", {"num_key_value_heads": 2, "rope_parameters": LONGROPE}),
    "Gemma": ("gemma", {"tie_word_embeddings": True}),
    "Gemma-2": (
        "gemma2",
        {"query_pre_attn_scalar": 32, "sliding_window": 64, "tie_word_embeddings": True},
    ),
    "Gemma-3, text": (
        "gemma3_text",
        {"query_pre_attn_scalar": 32, "sliding_window": 64, "tie_word_embeddings": True},
    ),
    "OPT": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64, "tie_word_embeddings": True}),
    "OPT-350m's form": (
        "opt",
        {
            "ffn_dim": 96,
            "word_embed_proj_dim": 32,
            "do_layer_norm_before": False,
            "tie_word_embeddings": True,
        },
    ),
    "SmolLM3": ("smollm3", {}),
    "LFM2": (
        "lfm2",
        {
            "layer_types": ["conv", "full_attention"],
            "block_auto_adjust_ff_dim": False,
            "conv_dim": 64,
            "block_dim": 64,
            "block_ff_dim": 96,
            "tie_word_embeddings": True,
        },
    ),
    "StableLM": ("stablelm", {"num_key_value_heads": 2}),
    "Qwen2-MoE": (
        "qwen2_moe",
        {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32},
    ),
    "Qwen3-MoE": ("qwen3_moe", {**EXPERTS, "num_experts": 4}),
    "Mixtral": ("mixtral", {"num_local_experts": 4, "sliding_window": None}),
    "OLMoE": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}),
    "Granite-MoE": ("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt-oss": (
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 64,
            "rope_parameters": YARN,
        },
    ),
    "Falcon-H1": ("falcon_h1", {**SSM, "mamba_d_state": 16, "mamba_chunk_size": 16}),
    "Qwen3-Next": (
        "qwen3_next",
        {
            **EXPERTS,
            **LINEAR,
            "num_experts": 4,
            "shared_expert_intermediate_size": 32,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "DeepSeek-V3": (
        "deepseek_v3",
        {
            **EXPERTS,
            **MLA,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "first_k_dense_replace": 1,
            "head_dim": 32,
        },
    ),
    "OLMo-2": ("olmo2", {"num_key_value_heads": 2}),
    "GPT-NeoX": ("gpt_neox", {}),
    "Bloom": ("bloom", {"n_layer": 2, "n_head": 2, "tie_word_embeddings": True}),
    "MPT": (
        "mpt",
        {
            "d_model": 64,
            "n_heads": 2,
            "n_layers": 2,
            "max_seq_len": 512,
            "tie_word_embeddings": True,
        },
    ),
    "GPT-2": ("gpt2", {**GPT, "tie_word_embeddings": True}),
    "GPT-J": ("gptj", {**GPT, "rotary_dim": 16}),
    "Phi": ("phi", {"num_key_value_heads": 2}),
    "Falcon": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 1}),
    "StarCoder2": ("starcoder2", {"sliding_window": None, "tie_word_embeddings": True}),
    "Mamba": ("mamba", {"state_size": 16, "tie_word_embeddings": True}),
    "Mamba-2": (
        "mamba2",
        {"state_size": 16, "num_heads": 4, "head_dim": 32, "n_groups": 1, "chunk_size": 16},
    ),
    "Granite": (
        "granite",
        {"logits_scaling": 0.5, "embedding_multiplier": 2.0, "residual_multiplier": 0.5},
    ),
    "Cohere": ("cohere", {"logit_scale": 2.0, "tie_word_embeddings": True}),
    "Nemotron": ("nemotron", {}),
    "GLM-4": ("glm4", {}),
    "GPT-Neo": (
        "gpt_neo",
        {
            "num_layers": 2,
            "num_heads": 2,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 64,
            "tie_word_embeddings": True,
        },
    ),
    "Qwen2.5-VL": ("qwen2_5_vl", {"rope_parameters": MROPE}),
    "Qwen3-VL": ("qwen3_vl", {"rope_parameters": MROPE}),
    "Qwen3.5": ("qwen3_5", {**LINEAR, "layer_types": ["linear_attention", "full_attention"]}),
    "Gemma-3, images": (
        "gemma3",
        {"query_pre_attn_scalar": 32, "sliding_window": 64, "tie_word_embeddings": True},
    ),
    "Mistral-3": ("mistral3", {"sliding_window": None}),
    "Llava": ("llava", {}),
    "InternVL": ("internvl", {}),
    "SmolVLM": ("smolvlm", {}),
}
"""Name -> transformers' name of the architecture, and what differs from ``PLAIN``, of its text."""

READ_IMAGES = [*ARCHITECTURES][[*ARCHITECTURES].index("Qwen2.5-VL") :]


def known(settings: dict[str, Any], config: Any) -> dict[str, Any]:
    """Return the settings that a config has: another would be there all the same, and be read."""
    return {key: value for key, value in settings.items() if hasattr(config, key)}


def make_tokenizer() -> Any:
    """Return a tokenizer of single bytes, with ``<pad>`` and ``<|endoftext|>`` before them."""
    from tests import chat_models

    tokenizer = chat_models.make_tokenizer(template=None, special=["<pad>", "<|endoftext|>"])
    tokenizer.pad_token = "<pad>"
    return tokenizer


def make_model(architecture: str, seed: int) -> Any:
    """Return a random model of an architecture in float32, with small towers where it has some.

    Its matrices are large enough that no distribution is near the uniform one, and its biases and
    gains are not those of a new model, so that one that is left out is seen.
    """
    from prime_composer.backends.hf_model import auto_class, import_transformers

    transformers = import_transformers()
    name, changes = ARCHITECTURES[architecture]
    ids = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    config_class = transformers.CONFIG_MAPPING[name]
    default = config_class()
    text = default.get_text_config()
    settings = known(PLAIN, text) | ids | changes
    if isinstance(getattr(config_class, "head_dim", None), property):
        del settings["head_dim"]
    if text is not default:
        vision = default.vision_config
        settings = {
            "text_config": {"model_type": text.model_type, **settings},
            "vision_config": {"model_type": vision.model_type, **known(VISION, vision)},
            "tie_word_embeddings": settings.get("tie_word_embeddings", False),
            **known({key: VOCAB - 1 for key in IMAGE_IDS}, default),
        }
    config = config_class(**settings)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = auto_class(config).from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim >= 2:
                    parameter.normal_(std=1.5 / parameter.shape[-1] ** 0.5)
                else:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return model.float().eval()


def write_model(architecture: str, folder: Path, seed: int = 0) -> Path:
    """Write a model with its tokenizer, and return the folder."""
    if not (folder / "tokenizer_config.json").exists():
        make_model(architecture, seed).save_pretrained(folder)
        make_tokenizer().save_pretrained(folder)
    return folder
