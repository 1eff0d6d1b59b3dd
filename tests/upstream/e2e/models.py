"""Write three tiny models of Qwen3's architecture, and a byte-level tokenizer, to disk.

The tokenizer has Qwen3's special tokens. With --experts the student has four experts per layer, of
which a token uses two.

usage: models.py TARGET [--tied] [--experts]
"""

import json
import string
import sys
from pathlib import Path

SPECIAL = (
    "<|endoftext|> <|im_start|> <|im_end|> <think> </think> <tool_call> </tool_call> "
    "<tool_response> </tool_response> <tools> </tools>"
).split()
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}


def tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.add_special_tokens({"additional_special_tokens": SPECIAL[:3]})
    fast.add_tokens(SPECIAL[3:])
    fast.chat_template = TEMPLATE
    return fast


def tokenizer_apart():
    """Return a tokenizer with pairs of letters, and another template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(a, chr(97 + (7 * i + 3) % 26)) for i, a in enumerate(string.ascii_lowercase)]
    tokens = [*alphabet, *(a + b for a, b in merges)]
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>")
    fast.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<end>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return fast


def main(target, tied, experts, apart):
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    tok, tok_apart = tokenizer(), tokenizer_apart()
    eos = tok.convert_tokens_to_ids("<|im_end|>")
    for name, layers, seed in (("student", 2, 0), ("teacher", 3, 1), ("other", 2, 2)):
        torch.manual_seed(seed)
        shape = dict(
            vocab_size=288,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=512,
            tie_word_embeddings=tied,
            initializer_range=0.15,
            eos_token_id=tok_apart.eos_token_id if apart and name == "teacher" else eos,
            bos_token_id=None,
            pad_token_id=0,
            dtype=torch.bfloat16,
        )
        if experts and name == "student":
            model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **EXPERTS))
            model.lm_head.weight.data *= 3  # so that the choice of experts matters
            for layer in model.model.layers:
                layer.mlp.experts.down_proj.data *= 8
        else:
            model = Qwen3ForCausalLM(Qwen3Config(**shape))
        model.to(torch.bfloat16).save_pretrained(target / name)
        (tok_apart if apart and name == "teacher" else tok).save_pretrained(target / name)
        if experts and name == "student":  # the name of published checkpoints, which prime-rl reads
            file = target / name / "config.json"
            config = json.loads(file.read_text())
            file.write_text(json.dumps({**config, "num_experts": EXPERTS["num_experts"]}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *(f"--{name}" in sys.argv for name in ("tied", "experts", "apart")))
