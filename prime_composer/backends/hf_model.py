"""Load Hugging Face models and read their hidden states and output head."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from prime_composer.backends.cpu_guard import hide_cuda_packages
from prime_composer.lm_head import selected_logprobs


def import_transformers():
    """The transformers module, imported so that it works beside a CUDA build of torchvision too.

    Raises:
        ImportError: transformers is missing; the message names the pip line.
    """
    hide_cuda_packages()
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ImportError(
            "The one-machine engine needs transformers: pip install 'prime-composer[local]' on a CPU machine, "
            "'prime-composer[gpu]' on a GPU machine."
        ) from error
    return transformers


def read_config(model: str | Path) -> Any:
    """The transformers config of a model directory or hub id."""
    return import_transformers().AutoConfig.from_pretrained(str(model))


def read_eos_token_ids(model: str | Path) -> tuple[int, ...]:
    """Every id that ends a completion: those of the generation config, of the config, and of the tokenizer."""
    transformers = import_transformers()
    found: set[int] = set()
    sources = [transformers.AutoConfig.from_pretrained(str(model))]
    readers = [transformers.GenerationConfig]
    # For a directory without tokenizer files transformers makes up an empty tokenizer, with an EOS of its own.
    if not Path(model).is_dir() or any(Path(model).glob("tokenizer*")):
        readers.append(transformers.AutoTokenizer)
    for reader in readers:
        try:
            sources.append(reader.from_pretrained(str(model)))
        except (
            OSError,
            ValueError,
        ):  # a model may come without a generation config, or without a tokenizer
            continue
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        found.update([] if ids is None else [ids] if isinstance(ids, int) else ids)
    return tuple(sorted(found))


def load_tokenizer(model: str | Path) -> Any | None:
    """The tokenizer of a model directory or hub id; None for a directory that holds none."""
    if Path(model).is_dir() and not any(Path(model).glob("tokenizer*")):
        return None
    return import_transformers().AutoTokenizer.from_pretrained(str(model))


def load_student(
    model: str | Path, dtype: str = "float32", device: str | torch.device | None = None
) -> tuple[nn.Module, Any]:
    """A causal language model ready for training, and its tokenizer (None where the directory holds none).

    Args:
        model: a directory or a hub id.
        dtype: of the weights; float32 is what an optimiser wants.
        device: None is the GPU where there is one.

    Raises:
        ImportError: transformers is missing.
        ValueError: the logits are more than hidden states times the head's weight (a bias, soft-capping, a scale), or
            the tokenizer knows ids that the head does not.
    """
    net = load_model(model, dtype, device)
    tokenizer = load_tokenizer(model)
    vocab_size = lm_head_weight(net).shape[0]
    if tokenizer is not None and len(tokenizer) > vocab_size:
        raise ValueError(
            f"The tokenizer of {model} has {len(tokenizer)} entries and the model's head only {vocab_size}; resize the "
            "model's embeddings, or use the tokenizer that the model was trained with."
        )
    check_plain_head(net)
    return net, tokenizer


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Loading and saving without transformers' own progress bars: the run has one, and two would overwrite each other."""
    logging = import_transformers().utils.logging
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def load_model(
    model: str | Path, dtype: str = "float32", device: str | torch.device | None = None
) -> nn.Module:
    """A causal language model in eval mode (no dropout: the student's log-probs are those that the sampler sees)."""
    transformers = import_transformers()
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    with without_progress_bars():
        net = transformers.AutoModelForCausalLM.from_pretrained(
            str(model), dtype=getattr(torch, dtype)
        )
    return net.to(device).eval()


def checkpoint_layers(model: nn.Module) -> None:
    """Recompute each layer in the backward instead of keeping its activations; dropout stays off.

    transformers recomputes only layers whose ``training`` flag is up. It goes up on those layers alone: what is in them
    stays in eval mode.

    Raises:
        ValueError: the model cannot do it.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    layers = [
        module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no layers that can be recomputed; set trainer.gradient_checkpointing = false."
        )
    for layer in layers:
        layer.training = True


def lm_head_weight(model: nn.Module) -> Tensor:
    """The weight [V, d] that turns the final hidden states into logits; the embeddings' own where they are tied.

    Raises:
        ValueError: the model has no such matrix, or adds a bias to its logits.
    """
    head = model.get_output_embeddings()
    if head is None or getattr(head, "weight", None) is None:
        raise ValueError(
            f"{type(model).__name__} has no output embeddings; use a causal language model."
        )
    if getattr(head, "bias", None) is not None:
        raise ValueError(
            f"{type(model).__name__} adds a bias to its logits, which lm_head does not; use another model."
        )
    return head.weight


def check_plain_head(model: nn.Module) -> None:
    """Assert on four tokens that the model's logits are hidden states times the head's weight, and nothing more.

    Raises:
        ValueError: they are not: soft-capping, a scale, a bias.
    """
    weight = lm_head_weight(model)
    config = model.config.get_text_config()
    if getattr(config, "final_logit_softcapping", None):
        raise ValueError(
            f"{type(model).__name__} soft-caps its logits at {config.final_logit_softcapping}, and the chunked head does "
            "not; use a model without final_logit_softcapping."
        )
    ids = torch.arange(4, device=weight.device).remainder(weight.shape[0]).unsqueeze(0)
    with torch.no_grad():
        mask = torch.ones_like(ids)
        plain = (hidden_states(model, ids, mask) @ weight.T).float()
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits.float()
    tolerance = 1e-3 if weight.dtype == torch.float32 else 3e-2
    if logits.shape != plain.shape or (
        logits - plain
    ).abs().max() > tolerance * logits.abs().max().clamp_min(1.0):
        raise ValueError(
            f"{type(model).__name__} does more to its logits than multiplying hidden states with the head's weight (a "
            "scale, a cap), and the chunked head does not; use another model."
        )


def hidden_states(
    model: nn.Module, input_ids: Int[Tensor, "batch seq"], attention_mask: Int[Tensor, "batch seq"]
) -> Float[Tensor, "batch seq d"]:
    """Final hidden states, after the last norm; what lm_head and the head's weight turn into log-probs.

    ``hidden[:, t]`` has read the tokens up to and including t, and so predicts token t + 1. Padding may stand on either
    side; positions are counted without it.
    """
    position_ids = (attention_mask.cumsum(dim=1) - 1).clamp_min(0)
    return model.base_model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        use_cache=False,
    ).last_hidden_state


def pad(
    sequences: Sequence[Sequence[int]],
    device: torch.device,
    side: Literal["left", "right"] = "right",
) -> tuple[Int[Tensor, "batch seq"], Int[Tensor, "batch seq"]]:
    """Token ids and attention mask of sequences of different lengths; padding is id 0 and mask 0."""
    width = max(len(ids) for ids in sequences)
    tokens = torch.zeros(len(sequences), width, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for row, ids in enumerate(sequences):
        where = slice(width - len(ids), None) if side == "left" else slice(0, len(ids))
        tokens[row, where] = torch.as_tensor(ids, dtype=torch.int64)
        mask[row, where] = 1
    return tokens.to(device), mask.to(device)


@torch.no_grad()
def sequence_logprobs(
    model: nn.Module, sequences: Sequence[Sequence[int]]
) -> list[Float[Tensor, " seq"]]:
    """log p of every token of each sequence given those before it; NaN at the first one, which has no context."""
    results = []
    for ids in sequences:
        tokens, mask = pad([ids], lm_head_weight(model).device)
        hidden = hidden_states(model, tokens, mask)[0, :-1]
        logprobs = selected_logprobs(hidden, lm_head_weight(model), tokens[0, 1:, None])[:, 0]
        results.append(torch.cat([torch.full((1,), torch.nan), logprobs.float().cpu()]))
    return results


def token_batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices in batches of similar length whose padded size stays within ``budget`` tokens (one sequence may not)."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batches and (len(batches[-1]) + 1) * lengths[index] <= budget:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
