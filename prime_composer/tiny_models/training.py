"""Train a small model on the spot: tokenizer, supervised fine-tuning, magnitude pruning."""

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from prime_composer.backends.cpu_guard import hide_cuda_packages, preserved_rng
from prime_composer.backends.hf_model import pad, without_progress_bars
from prime_composer.problems.config import Problem
from prime_composer.problems.loading import ProblemSet
from prime_composer.problems.order import prompt_batches
from prime_composer.problems.prompts import answer_text, prompt_text
from prime_composer.recipe.prepare import PrepareConfig
from prime_composer.tiny_models.transcripts import (
    CHAT_TEMPLATE,
    END_OF_TEXT,
    MARKS,
    Example,
    example_of,
    transcript_texts,
)

hide_cuda_packages()
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM  # noqa: E402

LENGTH_GROUPS = 4  # Steps that share their examples out by length: a quarter of the padding less


def build_model(
    config: PrepareConfig,
    problems: ProblemSet,
    folder: Path,
    progress: Callable[[int, int, float], None],
) -> float:
    """Write tokenizer, model and generation config into ``folder``, and return the training loss.

    The same arguments give the same bytes. The loss is in nats per token, of the last steps.
    """
    practice = [
        problem
        for problem in problems.worked
        if config.environments is None or problem.environment in config.environments
    ]
    if not practice:
        raise ValueError("[*.prepare] learns from answers, and the data has none: name models")
    tokenizer = train_tokenizer(problems, config.vocab_size, config.pieces)
    examples = [
        _example(problem, problems, tokenizer) for problem in with_worked_hints(practice, config)
    ]
    longest = max(len(token_ids) for token_ids, _ in examples)
    if longest > config.max_position_embeddings:
        raise ValueError(
            f"the longest training example has {longest} tokens and max_position_embeddings is "
            f"{config.max_position_embeddings}; raise it to at least {longest}"
        )
    threads = torch.get_num_threads()
    # With one thread, sums have one order, and other load cannot slow the step tenfold.
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


def prune_model(unpruned: Path, fraction: float, folder: Path) -> None:
    """Write a pruned copy of the model at ``unpruned``, and its tokenizer, into ``folder``."""
    with without_progress_bars():
        model = Qwen3ForCausalLM.from_pretrained(unpruned, dtype=torch.float32)
        prune_by_magnitude(layer_matrices(model), fraction)
        model.save_pretrained(folder)
    PreTrainedTokenizerFast.from_pretrained(unpruned).save_pretrained(folder)


def train_tokenizer(
    problems: ProblemSet, vocab_size: int, pieces: Literal["gpt2"] | None = None
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on the practice problems' prompts and answers, and on transcripts.

    Every digit is a token of its own, so that arithmetic is learned digit by digit. A run of
    punctuation includes the white space around it. With the pieces of GPT-2, a number may be one
    token.
    """
    tokenizer = Tokenizer(models.BPE())
    if pieces == "gpt2":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    else:
        split = Regex(r" ?\p{L}+|\p{N}|\s*[^\s\p{L}\p{N}]+\s?|\s+")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(split, behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    tokenizer.decoder = decoders.ByteLevel()
    has_transcripts = any(problems.transcript(problem) is not None for problem in problems.worked)
    marks = list(MARKS) if has_transcripts else []
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, *marks],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # Prompt and answer are separate texts, as they are tokenized: no token may span both.
    renderer = _with_template(tokenizer, marks)
    texts: list[str] = []
    for problem in problems.worked:
        transcript = problems.transcript(problem)
        if transcript is None:
            texts += _texts(problem, problems)
        else:
            texts += transcript_texts(transcript, renderer)
    tokenizer.train_from_iterator(texts, trainer)
    return _with_template(tokenizer, marks)


def _with_template(tokenizer: Tokenizer, marks: list[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer in the form of transformers, with the chat template that has ``marks``."""
    settings = {"additional_special_tokens": marks} if marks else {}
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT, **settings
    )
    if marks:
        wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def model_config(config: PrepareConfig, vocab_size: int, eos_token_id: int) -> Qwen3Config:
    """Return the Qwen3 architecture in the sizes of ``config``."""
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        tie_word_embeddings=config.tie_word_embeddings,
        # The usual 0.02 is meant for widths in the thousands. A narrow model would hardly learn.
        initializer_range=0.4 / math.sqrt(config.hidden_size),
        max_position_embeddings=config.max_position_embeddings,
        bos_token_id=None,
        eos_token_id=eos_token_id,
        pad_token_id=eos_token_id,
        dtype="float32",
    )


def with_worked_hints(problems: Sequence[Problem], config: PrepareConfig) -> list[Problem]:
    """Return the problems, a share of them with the worked answer as a hint in the question."""
    if config.hint_template is None or config.hint_share is None:
        return list(problems)
    chance = random.Random(f"hints {config.seed}")
    with_hint = []
    for problem in problems:
        if chance.random() < config.hint_share:
            text = config.hint_template.replace("{hint}", problem.answer).replace(
                "{question}", problem.question
            )
            problem = replace(problem, question=text)
        with_hint.append(problem)
    return with_hint


def _texts(problem: Problem, problems: ProblemSet) -> tuple[str, str]:
    config = problems.config_of(problem)
    return prompt_text(problem, config), answer_text(problem.answer, config)


def _example(problem: Problem, problems: ProblemSet, tokenizer: PreTrainedTokenizerFast) -> Example:
    """Return the tokens of a problem, of which the answer's are learned, or of its transcript."""
    if (transcript := problems.transcript(problem)) is not None:
        return example_of(transcript, tokenizer)
    prompt, answer = map(tokenizer.encode, _texts(problem, problems))
    answer.append(tokenizer.eos_token_id)
    return prompt + answer, [False] * len(prompt) + [True] * len(answer)


def fine_tune(
    model: Qwen3ForCausalLM,
    examples: list[Example],
    config: PrepareConfig,
    progress: Callable[[int, int, float], None],
) -> float:
    """Minimize the cross-entropy of the learned tokens, and return the mean of the last 20 steps.

    Muon trains the decoder layers' matrices, AdamW the embeddings and norms (Jordan et al., "Muon:
    An optimizer for hidden layers in neural networks", 2024,
    https://kellerjordan.github.io/posts/muon/). These models need about half the steps of AdamW
    alone.
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
    losses: deque[float] = deque(maxlen=20)
    model.train()
    for step in range(config.sft_steps):
        factor = (step + 1) / warmup
        if step >= warmup:
            angle = math.pi * (step - warmup) / (config.sft_steps - warmup)
            factor = 0.5 * (1.0 + math.cos(angle))
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
        with ProductsInFloat32():
            muon.step()
        adamw.step()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            raise ValueError(
                f"fine-tuning a prepared model diverges: the loss of step {step + 1} is "
                f"{losses[-1]}; lower learning_rate or matrix_learning_rate of its [*.prepare]"
            )
        progress(step + 1, config.sft_steps, losses[-1])
    model.eval()
    return sum(losses) / max(1, len(losses))


class ProductsInFloat32(TorchFunctionMode):
    """Within the block, matrix products of bfloat16 are computed in float32, and rounded after.

    Products of two bfloat16 numbers are exact in float32. Muon multiplies in bfloat16, and where a
    processor has no units for it, PyTorch is 15 to 20 times slower than in float32.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.addmm, torch.Tensor.matmul) and args[0].dtype == torch.bfloat16:
            return func(*(each.float() for each in args), **(kwargs or {})).bfloat16()
        return func(*args, **(kwargs or {}))


def _batch_of_similar_lengths(
    examples: list[Example], config: PrepareConfig, step: int
) -> list[Example]:
    """Return the examples of a step, of those that ``LENGTH_GROUPS`` steps share."""
    group, turn = divmod(step, LENGTH_GROUPS)
    indices = prompt_batches(len(examples), LENGTH_GROUPS * config.batch_size, config.seed, group)
    indices.sort(key=lambda i: len(examples[i][0]))
    share = random.Random(f"lengths {config.seed} {group}").sample(
        range(LENGTH_GROUPS), LENGTH_GROUPS
    )[turn]
    return [
        examples[i] for i in indices[share * config.batch_size : (share + 1) * config.batch_size]
    ]


def _padded(
    batch: list[Example],
) -> tuple[Int[Tensor, "batch seq"], Int[Tensor, "batch seq"]]:
    """Return ids, padded at the right, and at each position the next id if learned, else -1."""
    token_ids, _ = pad([example[:-1] for example, _ in batch], torch.device("cpu"))
    targets = torch.full_like(token_ids, -1)
    for row, (example, learned) in enumerate(batch):
        following = [
            token if is_learned else -1
            for token, is_learned in zip(example[1:], learned[1:], strict=True)
        ]
        targets[row, : len(following)] = torch.tensor(following)
    return token_ids, targets


def layer_matrices(model: Qwen3ForCausalLM) -> list[torch.nn.Parameter]:
    """Return the matrices of the decoder layers: attention and MLP, no embeddings, no norms."""
    return [weight for weight in model.model.layers.parameters() if weight.ndim == 2]


@torch.no_grad()
def prune_by_magnitude(weights: Sequence[torch.nn.Parameter], fraction: float) -> None:
    """Set ``round(fraction * n)`` of each matrix's n entries to zero, the smallest ones first.

    This is magnitude pruning (Han et al., "Learning both Weights and Connections for Efficient
    Neural Networks", 2015, https://arxiv.org/abs/1506.02626) in one shot.
    """
    for weight in weights:
        flat = weight.view(-1)
        order = flat.abs().argsort(stable=True)
        flat[order[: round(fraction * flat.numel())]] = 0.0
