"""Tiny models with chat templates: base and chat models of one family, as people distill them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prime_composer.cli.commands import main
from prime_composer.local.engine import Engine
from prime_composer.local.opening import open_engine
from prime_composer.local.sources import load_sources
from prime_composer.recipe.loading import parse_recipe
from tests.tiny_qwen import make_model

TEXT_END, TURN_START, TURN_END = 0, 1, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer(
    template: str | None = CHATML,
    eos: str | None = "<|endoftext|>",
    special: Sequence[str] = SPECIAL,
    plain: Sequence[str] = (),
    metaspace: bool = False,
    ends_prompts: bool = False,
) -> Any:
    """Return a tokenizer of bytes, whose special tokens have the first ids.

    ``plain`` tokens are added, and not special. With ``metaspace`` a space is in front of a text,
    and none in front of what follows a special token, as in sentencepiece's tokenizers. With
    ``ends_prompts`` the end is behind each text (``add_eos_token``).
    """
    import tokenizers as library

    from prime_composer.backends.hf_model import import_transformers

    if metaspace:
        space = library.pre_tokenizers.Metaspace(prepend_scheme="first")
        letters = ["▁", *map(chr, range(33, 127)), "\n", *map(chr, range(0xE000, 0xE004))]
    else:
        space = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        letters = sorted(library.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: place for place, token in enumerate([*special, *plain, *letters])}
    made = library.Tokenizer(library.models.BPE(vocabulary, []))
    made.pre_tokenizer = space
    decoders = library.decoders
    made.decoder = decoders.Metaspace() if metaspace else decoders.ByteLevel()
    if ends_prompts:
        made.post_processor = library.processors.TemplateProcessing(
            single=f"$A {eos}", special_tokens=[(eos, vocabulary[eos])]
        )
    tokenizer = import_transformers().PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=eos, extra_special_tokens=[*special]
    )
    tokenizer.add_tokens([*plain])
    tokenizer.chat_template = template
    return tokenizer


def save_model(
    folder: Path, tokenizer: Any, ends: int | list[int] | None = TEXT_END, seed: int = 0
) -> str:
    """Save a random model with a tokenizer, whose generation config has these ends."""
    end = ends[0] if isinstance(ends, list) else ends
    model = make_model(True, seed, vocab_size=len(tokenizer), eos_token_id=end, pad_token_id=None)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return str(folder)


def recipe_of(student: str, teacher: str, data: Path, **tables: Any) -> dict[str, Any]:
    """Return a small recipe of a student and a teacher on transformers, with more in its tables."""
    recipe: dict[str, Any] = {
        "student": {"model": student},
        "teacher": {"model": teacher},
        "loss": {"type": "topk_reverse_kl", "k": 8},
        "rollout": {"backend": "transformers", "max_tokens": 24, "max_model_len": 160},
        "data": {"path": str(data), "metric": "exact", "chat_template": True},
        "trainer": {"steps": 1, "batch_size": 8},
        "eval": {"every": 0, "size": 4, "kl_size": 4},
        "logging": {"tensorboard": False},
    }
    return recipe | {name: recipe.get(name, {}) | table for name, table in tables.items()}


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write rows to a JSONL file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def opened(recipe: dict[str, Any], report: Callable[[str], None] = lambda _: None) -> Engine:
    """Return a recipe's open models. What opening them says goes to ``report``."""
    parsed = parse_recipe(recipe)
    return open_engine(parsed, load_sources(parsed), {}, report)


def run(tmp_path: Path, recipe: dict[str, Any], *words: str) -> int:
    """Run a recipe by the command."""
    import tomli_w

    file = tmp_path / "recipe.toml"
    file.write_text(tomli_w.dumps(recipe))
    out = ["--output-dir", str(tmp_path / "out")]
    return main(["rl", "--engine", "local", "--config", str(file), *out, *words])
