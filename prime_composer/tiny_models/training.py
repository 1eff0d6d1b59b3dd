"""Train a small model on the spot: tokenizer, supervised fine-tuning, one-shot magnitude pruning, a Hugging Face folder.

``prime_composer.tiny_models.cache.prepare_model`` calls this and caches what it writes.
"""

import math
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn import functional as F

from prime_composer.backends.cpu_guard import hide_cuda_packages, preserved_rng
from prime_composer.backends.hf_model import without_progress_bars
from prime_composer.problems.config import DataConfig, Problem
from prime_composer.problems.order import prompt_batches
from prime_composer.problems.prompts import answer_text, prompt_text
from prime_composer.recipe.prepare import PrepareConfig
from prime_composer.tiny_models.cache import Progress

hide_cuda_packages()
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM  # noqa: E402

END_OF_TEXT = "<|endoftext|>"
LENGTH_GROUPS = 4


def build_model(
    config: PrepareConfig,
    sources: Mapping[str, DataConfig],
    problems: Sequence[Problem],
    folder: Path,
    progress: Progress,
) -> float:
    """Write tokenizer, model and generation config into ``folder``. The same arguments give the same bytes.

    ``config.prune`` is not applied: see ``prune_model``.

    Returns:
        The training loss per token, a mean over the last steps.

    Raises:
        ValueError: an example is longer than the model's context.
    """
    tokenizer = train_tokenizer(problems, sources, config.vocab_size)
    if config.environments is not None:
        problems = [problem for problem in problems if problem.environment in config.environments]
    examples = [_tokenized(problem, sources, tokenizer) for problem in with_hints(problems, config)]
    longest = max(len(prompt) + len(answer) for prompt, answer in examples)
    if longest > config.max_position_embeddings:
        raise ValueError(
            f"the longest training example has {longest} tokens and max_position_embeddings is "
            f"{config.max_position_embeddings}; raise it to at least {longest}"
        )
    threads = torch.get_num_threads()
    # One thread: sums then have one order, and other work on the machine cannot slow the step tenfold.
    torch.set_num_threads(1)
    try:
        with preserved_rng():
            torch.manual_seed(config.seed)
            model = Qwen3ForCausalLM(
                model_config(config, len(tokenizer), tokenizer.eos_token_id)
            ).float()
            loss = fine_tune(model, examples, config, progress)
    finally:
        torch.set_num_threads(threads)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=False
    )
    with without_progress_bars():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return loss


def prune_model(whole: Path, fraction: float, folder: Path) -> None:
    """Write the model and tokenizer at ``whole`` into ``folder``, with ``fraction`` of its matrices set to zero."""
    with without_progress_bars():
        model = Qwen3ForCausalLM.from_pretrained(whole, dtype=torch.float32)
        prune_by_magnitude(layer_matrices(model), fraction)
        model.save_pretrained(folder)
    PreTrainedTokenizerFast.from_pretrained(whole).save_pretrained(folder)


def train_tokenizer(
    problems: Sequence[Problem], sources: Mapping[str, DataConfig], vocab_size: int
) -> PreTrainedTokenizerFast:
    """A byte-level BPE on the problems' prompts and answers: a function of these arguments alone.

    Every digit is a token of its own, so that arithmetic is learnt digit by digit. A run of signs may take the white
    space around it along: ``" = "`` and ``"\\n#### "`` become one token each.
    """
    tokenizer = Tokenizer(models.BPE())
    pieces = Regex(r" ?\p{L}+|\p{N}|\s*[^\s\p{L}\p{N}]+\s?|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pieces, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # Prompt and answer apart, as they are tokenized: no token may span the border between them.
    texts = [text for problem in problems for text in _texts(problem, sources)]
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )


def model_config(config: PrepareConfig, vocab_size: int, eos_token_id: int) -> Qwen3Config:
    """The Qwen3 architecture in the sizes that the recipe asks for."""
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        tie_word_embeddings=config.tie_word_embeddings,
        # The usual 0.02 is meant for widths in the thousands; in a narrow model the layers would hardly start.
        initializer_range=0.4 / math.sqrt(config.hidden_size),
        max_position_embeddings=config.max_position_embeddings,
        bos_token_id=None,
        eos_token_id=eos_token_id,
        pad_token_id=eos_token_id,
        dtype="float32",
    )


def with_hints(problems: Sequence[Problem], config: PrepareConfig) -> list[Problem]:
    """The problems, a share of them with the worked answer as a hint in the question."""
    if config.hint_template is None:
        return list(problems)
    chance = random.Random(f"hints {config.seed}")
    found = []
    for problem in problems:
        if chance.random() < config.hint_share:
            text = config.hint_template.replace("{hint}", problem.answer).replace(
                "{question}", problem.question
            )
            problem = replace(problem, question=text)
        found.append(problem)
    return found


def _texts(problem: Problem, sources: Mapping[str, DataConfig]) -> tuple[str, str]:
    """Prompt and answer."""
    data = sources[problem.environment]
    return prompt_text(problem, data), answer_text(problem.answer, data)


def _tokenized(
    problem: Problem, sources: Mapping[str, DataConfig], tokenizer: PreTrainedTokenizerFast
) -> tuple[list[int], list[int]]:
    prompt, answer = _texts(problem, sources)
    return tokenizer.encode(prompt), tokenizer.encode(answer) + [tokenizer.eos_token_id]


def fine_tune(
    model: Qwen3ForCausalLM,
    examples: list[tuple[list[int], list[int]]],
    config: PrepareConfig,
    progress: Progress,
) -> float:
    """Cross-entropy on the answers' tokens (with the end of text), mean over the batch's tokens.

    Muon on the decoder layers' matrices, AdamW on embeddings and norms (Jordan et al., "Muon: An optimizer for hidden
    layers in neural networks", 2024, https://kellerjordan.github.io/posts/muon/): for these models it needs about half
    the steps of AdamW alone.
    """
    matrices = layer_matrices(model)
    in_matrices = {id(weight) for weight in matrices}
    others = [weight for weight in model.parameters() if id(weight) not in in_matrices]
    muon = torch.optim.Muon(
        matrices, lr=config.matrix_learning_rate, momentum=0.95, weight_decay=0.0
    )
    adamw = torch.optim.AdamW(others, lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    optimizers = ((muon, config.matrix_learning_rate), (adamw, config.learning_rate))
    warmup = max(1, config.sft_steps // 20)
    losses = deque(maxlen=20)
    model.train()
    for step in range(config.sft_steps):
        factor = _warmup_cosine(step, warmup, config.sft_steps)
        for optimizer, peak in optimizers:
            optimizer.param_groups[0]["lr"] = peak * factor
        token_ids, targets = _padded(_batch_of_similar_lengths(examples, config, step))
        hidden = model.model(input_ids=token_ids).last_hidden_state
        trained = targets >= 0
        logits = model.lm_head(hidden[trained])
        loss = F.cross_entropy(logits, targets[trained], label_smoothing=config.label_smoothing)
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, _ in optimizers:
            optimizer.step()
        losses.append(loss.item())
        progress(step + 1, config.sft_steps, losses[-1])
    model.eval()
    return sum(losses) / max(1, len(losses))


def _warmup_cosine(step: int, warmup: int, steps: int) -> float:
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


def _batch_of_similar_lengths(
    examples: list[tuple[list[int], list[int]]], config: PrepareConfig, step: int
) -> list[tuple[list[int], list[int]]]:
    """The examples of a step. Every ``LENGTH_GROUPS`` steps share their examples out by length, which saves a quarter
    to a third of the padding; which of these steps gets the short ones is drawn anew each time."""
    group, turn = divmod(step, LENGTH_GROUPS)
    indices = prompt_batches(len(examples), LENGTH_GROUPS * config.batch_size, config.seed, group)
    indices.sort(key=lambda i: len(examples[i][0]) + len(examples[i][1]))
    share = random.Random(f"lengths {config.seed} {group}").sample(
        range(LENGTH_GROUPS), LENGTH_GROUPS
    )[turn]
    return [
        examples[i] for i in indices[share * config.batch_size : (share + 1) * config.batch_size]
    ]


def _padded(
    batch: list[tuple[list[int], list[int]]],
) -> tuple[Int[Tensor, "batch seq"], Int[Tensor, "batch seq"]]:
    """Token ids, and at each position the answer token that comes next, or -1. Padding stands at the right, where
    causal attention cannot see it from any trained position."""
    width = max(len(prompt) + len(answer) for prompt, answer in batch) - 1
    token_ids = torch.zeros(len(batch), width, dtype=torch.long)
    targets = torch.full((len(batch), width), -1)
    for row, (prompt, answer) in enumerate(batch):
        tokens = torch.tensor(prompt + answer)
        token_ids[row, : len(tokens) - 1] = tokens[:-1]
        targets[row, len(prompt) - 1 : len(tokens) - 1] = tokens[len(prompt) :]
    return token_ids, targets


def layer_matrices(model: Qwen3ForCausalLM) -> list[torch.nn.Parameter]:
    """The matrices of the decoder layers: attention and MLP, without embeddings and norms."""
    return [weight for weight in model.model.layers.parameters() if weight.ndim == 2]


@torch.no_grad()
def prune_by_magnitude(weights: Sequence[torch.nn.Parameter], fraction: float) -> None:
    """Set exactly ``round(fraction * n)`` of each matrix's n entries to zero, those of the smallest magnitude.

    Magnitude pruning: Han et al., "Learning both Weights and Connections for Efficient Neural Networks", 2015,
    https://arxiv.org/abs/1506.02626; here in one shot, and later training may move the zeros.
    """
    for weight in weights:
        flat = weight.view(-1)
        order = flat.abs().argsort(stable=True)
        flat[order[: round(fraction * flat.numel())]] = 0.0
