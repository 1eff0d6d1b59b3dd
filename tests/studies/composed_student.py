"""Train a copy of a real chat model that has another vocabulary, by the model itself.

    python -m tests.studies.composed_student --teacher DIR --texts FILE [--size 8000]
        [--steps 60] [--output outputs/composed_student] [--set KEY=VALUE ...]

The student has the teacher's layers. Its tokenizer is a byte-level BPE of ``--size`` tokens,
trained on ``--texts`` (GSM8K's train.jsonl: questions and answers). The embedding of a token is the
mean of those of the teacher's tokens that its text has, and the head is tied to it. Nobody has
trained the two together before the first step. ``recipes/smollm2.toml`` is the rest: the ages of
invented people are trained, their towns and the capitals of countries are only measured.

``--output`` gets the student (``student``) and a run (``run``), with ``metrics.jsonl``.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prime_composer.cli.machine import set_environment

set_environment()

import torch  # noqa: E402
from jaxtyping import Float  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from torch import Tensor  # noqa: E402

from prime_composer import distill  # noqa: E402
from prime_composer.backends.hf_model import import_transformers, load_tokenizer  # noqa: E402
from prime_composer.recipe.loading import load_recipe  # noqa: E402
from tests.cross_tokenizer.toys import trained  # noqa: E402

RECIPE = Path(__file__).parents[2] / "recipes" / "smollm2.toml"


def texts_of(file: Path) -> list[str]:
    """Return questions and answers of GSM8K's JSONL."""
    rows = (json.loads(line) for line in file.read_text().splitlines())
    return [f"{row['question']}\n{row['answer']}" for row in rows]


def composed(
    embeddings: Float[Tensor, "old d"], old: Tokenizer, new: Tokenizer
) -> Float[Tensor, "new d"]:
    """Return an embedding for each token of ``new``: the mean of those of its text's old tokens.

    Both are byte-level BPEs, whose tokens are written in one alphabet. A token that both have keeps
    its own. A byte that no old token writes, such as one of no UTF-8, gets the mean of all.
    """
    known, every = old.get_vocab(), embeddings.float().mean(0)
    rows = every.repeat(new.get_vocab_size(), 1)
    for token, index in new.get_vocab().items():
        parts = [known[token]] if token in known else [one.id for one in old.model.tokenize(token)]
        if parts:
            rows[index] = embeddings[parts].float().mean(0)
    return rows


def build(teacher: Path, texts: Sequence[str], size: int, folder: Path) -> None:
    """Write a student with the teacher's layers and a vocabulary of its own to a folder."""
    transformers: Any = import_transformers()
    tokenizer = load_tokenizer(teacher)
    special = [*dict.fromkeys([tokenizer.unk_token, tokenizer.bos_token, tokenizer.eos_token])]
    own = trained(texts, size, [token for token in special if token is not None])
    model = transformers.AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    assert model.config.tie_word_embeddings, "a teacher with a head of its own"
    rows = composed(model.get_input_embeddings().weight.data, tokenizer.backend_tokenizer, own)
    model.resize_token_embeddings(len(rows), mean_resizing=False)
    model.get_input_embeddings().weight.data.copy_(rows)
    model.tie_weights()
    ids = {
        key: own.token_to_id(token)
        for key, token in (
            ("bos_token_id", tokenizer.bos_token),
            ("eos_token_id", tokenizer.eos_token),
            ("pad_token_id", tokenizer.eos_token),
        )
        if token is not None
    }
    for config in (model.config, model.generation_config):
        for key, value in ids.items():
            setattr(config, key, value)
    model.save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=own,
        unk_token=tokenizer.unk_token,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        pad_token=tokenizer.eos_token,
        chat_template=tokenizer.chat_template,
    ).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--teacher", type=Path, required=True)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--size", type=int, default=8000)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", type=Path, default=Path("outputs/composed_student"))
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    student, folder = args.output / "student", args.output / "run"
    if not student.exists():
        build(args.teacher, texts_of(args.texts), args.size, student)
    recipe = load_recipe(
        RECIPE,
        [
            f'teacher={{model = "{args.teacher}", tokenizer = "own", on_overflow = "score_head"}}',
            f'student={{model = "{student}"}}',
            f"trainer.steps={args.steps}",
            "trainer.lr=1e-4",
            "eval.every=20",
            "eval.kl_support=32",
            "logging.tensorboard=false",
            *args.overrides,
        ],
    )
    distill(recipe, output_dir=folder)


if __name__ == "__main__":
    main()
