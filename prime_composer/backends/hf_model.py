"""Load Hugging Face models and tokenizers, and read their hidden states and output head."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from prime_composer.backends.cpu_guard import hide_cuda_packages
from prime_composer.backends.errors import how_to_install, own_words
from prime_composer.backends.four_bits import compute_in_float32, four_bit_config
from prime_composer.backends.model_files import (
    cached_file,
    has_tokenizer,
    missing_folder,
    why_not_on_hub,
)
from prime_composer.contract import Logits
from prime_composer.lm_head import head_logits, logprobs_at, whole_logits

PLAIN_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Number formats of weights that are not quantized. PyTorch compares no others."""

OWN_FILES = (
    "generation_config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
"""Files of a model that a checkpoint has as they are."""


WAY_OUT = (
    'a student has to be another model, and a teacher is scored right with backend = "vllm" in its '
    "table"
)
"""What to do about logits that are more than a product."""


class ModelUnavailable(ValueError):
    """A model or tokenizer could not be loaded; the message says why and names the remedy."""


def import_transformers() -> Any:
    """Return the transformers module, imported without a torchvision that would break it."""
    hide_cuda_packages()
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ImportError(
            f"The one-machine engine needs transformers: {how_to_install()}."
        ) from error
    return transformers


@contextmanager
def explained(model: str | Path) -> Iterator[None]:
    """Within the block, turn the library's errors of loading into ``ModelUnavailable``."""
    if not Path(model).is_dir():
        reason = missing_folder(str(model))
        if reason is not None:
            raise ModelUnavailable(f"Could not load {model}: it {reason}.")
        reason = why_not_on_hub(str(model))
        if reason is not None:
            raise ModelUnavailable(f"Could not load {model}: {reason}")
    try:
        yield
    except (ModelUnavailable, MemoryError, ImportError):
        raise
    except Exception as error:  # the libraries of configs, weights and tokenizers raise anything
        raise ModelUnavailable(
            f"Could not load {model} ({own_words(error)}); correct the model's table in the "
            "recipe, for example --set student.model=DIR_OR_HUB_ID."
        ) from error


def read_config(model: str | Path) -> Any:
    """Return the transformers config of a model directory or hub id."""
    with explained(model):
        return import_transformers().AutoConfig.from_pretrained(str(model))


def read_eos_token_ids(model: str | Path) -> tuple[int, ...]:
    """Return every id that ends a completion, by configs and tokenizer, in ascending order."""
    transformers = import_transformers()
    sources = [read_config(model)]
    readers = [transformers.GenerationConfig]
    # Without tokenizer files transformers makes up an empty tokenizer with an EOS of its own.
    if not Path(model).is_dir() or has_tokenizer(Path(model)):
        readers.append(transformers.AutoTokenizer)
    for reader in readers:
        # A model may have no generation config, or no tokenizer.
        with explained(model), suppress(OSError, ValueError):
            sources.append(reader.from_pretrained(str(model)))
    found = {one for source in sources for one in ids_of(source)}
    if wrong := [one for one in found if not isinstance(one, int) or one < 0]:
        raise ModelUnavailable(
            f"{model} has eos_token_id = {wrong[0]!r} (generation_config.json, config.json), which "
            "is no token's id; correct it there"
        )
    return tuple(sorted(found))


def ids_of(source: Any) -> set[Any]:
    """Return what ``eos_token_id`` has, which may be one id, several or none."""
    ids = getattr(source, "eos_token_id", None)
    return set() if ids is None else {*ids} if isinstance(ids, list | tuple | set) else {ids}


def load_tokenizer(model: str | Path) -> Any | None:
    """Return the tokenizer of a model directory or hub id; None for a directory without one."""
    if Path(model).is_dir() and not has_tokenizer(Path(model)):
        return None
    with explained(model):
        return import_transformers().AutoTokenizer.from_pretrained(str(model))


def load_model(
    model: str | Path,
    dtype: str = "float32",
    device: str | torch.device | None = None,
    load: str = "float32",
) -> nn.Module:
    """Return a causal language model in eval mode. ``device`` None is the GPU where there is one.

    Without dropout the student's log-probs are those that the sampler computes. With ``load`` "nf4"
    its linear layers are frozen in 4 bits.
    """
    config = read_config(model)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    with without_progress_bars(), explained(model):
        net, loading = auto_class(config).from_pretrained(
            str(model),
            config=config,
            dtype=getattr(torch, dtype),
            quantization_config=four_bit_config() if load == "nf4" else None,
            output_loading_info=True,
        )
        missing = sorted(loading["missing_keys"])
        if missing:  # transformers fills them with random numbers
            raise ModelUnavailable(
                f"Could not load {model}: its files lack {len(missing)} weights of the model, such "
                f"as {missing[0]}; copy the model again."
            )
        check_finite(net, model)
    compute_in_float32(net)
    cap_attention(net)
    net.generation_config = OwnFiles.of(model)
    return net.to(device).eval()


def auto_class(config: Any) -> Any:
    """Return transformers' class for a model of a config; that of images too, where it reads them.

    Read as text alone, such a model would be saved, and sent to a sampler, as another architecture.
    """
    transformers = import_transformers()
    if reads_images(config):
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def reads_images(config: Any) -> bool:
    """Return whether a model of a config has towers beside its text's layers."""
    known = import_transformers().MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return type(config) in known and config.get_text_config() is not config


def text_layers(model: nn.Module) -> nn.Module:
    """Return what reads text: a part of a model that reads images too, else the model."""
    net: Any = model
    return net.get_decoder() if reads_images(net.config) else net


def freeze_towers(model: nn.Module) -> None:
    """Let nothing train but what a text uses: its layers and the head."""
    net: Any = model
    used = [*text_layers(net).parameters(), *net.get_output_embeddings().parameters()]
    model.requires_grad_(False)
    for parameter in used:
        parameter.requires_grad_(True)


def cap_attention(model: nn.Module) -> list[str]:
    """Let the attention of a model have the cap of its scores (Gemma 2); return what it costs.

    transformers' sdpa, its default, leaves a cap out, and its eager attention has it.
    """
    net: Any = model
    cap = getattr(net.config.get_text_config(), "attn_logit_softcapping", None)
    if cap is None or net.config._attn_implementation not in ("sdpa", "eager"):
        return []
    net.set_attn_implementation("eager")
    return [
        f"{type(model).__name__} caps the scores of its attention at {cap:g}, which transformers' "
        "sdpa leaves out: it computes with eager attention, whose memory grows with the square of "
        "a sequence's length."
    ]


@dataclass(frozen=True)
class OwnFiles:
    """A model's generation config and processors, which ``save_pretrained`` writes as they are.

    transformers refuses to write some that it reads, writes others than it has read, and needs the
    libraries of images for a processor.
    """

    content: dict[str, bytes]

    @classmethod
    def of(cls, model: str | Path) -> "OwnFiles":
        """Return those of a directory, or of a hub id that is cached."""
        files = {name: cached_file(model, name) for name in OWN_FILES}
        return cls({name: file.read_bytes() for name, file in files.items() if file is not None})

    def save_pretrained(self, folder: str | Path) -> None:
        for name, content in self.content.items():
            (Path(folder) / name).write_bytes(content)


def shapes(model: str | Path) -> nn.Module:
    """Return a model without weights, in float32, as its config describes it."""
    config = read_config(model)
    with explained(model), torch.device("meta"):
        net: nn.Module = auto_class(config).from_config(config)
    return net.float().eval()


def check_finite(net: nn.Module, model: str | Path) -> None:
    """Check that no weight is NaN or infinite. Quantized weights are not looked at."""
    for name, weight in net.named_parameters():
        if weight.dtype not in PLAIN_DTYPES or weight.numel() == 0:
            continue
        if not torch.stack(weight.detach().aminmax()).isfinite().all():
            raise ModelUnavailable(
                f"Could not load {model}: its weight {name} has values that are NaN or infinite; "
                "use another checkpoint."
            )


def refuse_quantized(described: Any) -> None:
    """Refuse a student that is stored in fewer bits, by its config, or that of a form."""
    stored = getattr(getattr(described, "config", described), "quantization_config", None)
    if stored is not None:
        raise ModelUnavailable(
            f"{described.name_or_path} is quantized ({stored['quant_method']}), and a student "
            "trains in float32: name the unquantized model, or round it with [student.prepare] "
            "quantize"
        )


def load_student(model: str | Path, load: str = "float32") -> tuple[nn.Module, Any]:
    """Return a causal language model of a directory or hub id, in float32, and its tokenizer.

    With ``load`` "nf4" its linear layers are frozen in 4 bits, and compute in float32.

    The tokenizer is None where the directory contains none. Refused are a model that is stored in
    fewer bits, one whose logits are more than ``contract.Logits``, and a tokenizer with ids that
    the head does not have.
    """
    refuse_quantized(read_config(model))  # before it is loaded, whose library may be missing
    net = load_model(model, load=load)
    tokenizer = load_tokenizer(model)
    vocab_size = lm_head_weight(net).shape[0]
    if tokenizer is not None and len(tokenizer) > vocab_size:
        raise ValueError(
            f"The tokenizer of {model} has {len(tokenizer)} entries and the model's head only "
            f"{vocab_size}; resize the model's embeddings, or use the tokenizer that the model was "
            "trained with."
        )
    check_head(net)
    if load == "float32":
        freeze_towers(net)
    else:
        described: Any = net.config
        del described.quantization_config  # nothing that is saved or sent has 4 bits
    return net, tokenizer


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Within the block, load and save without transformers' progress bars."""
    logging = import_transformers().utils.logging
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def checkpoint_layers(model: nn.Module) -> None:
    """Make the backward recompute each layer instead of storing its activations.

    transformers only recomputes layers whose ``training`` flag is set. The modules inside them stay
    in eval mode, so dropout stays off.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    net: Any = model
    net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    layers = [
        module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no layers that can be recomputed; set "
            "trainer.gradient_checkpointing = false."
        )
    for layer in layers:
        layer.training = True


def lm_head_weight(model: nn.Module) -> Tensor:
    """Return the weight [V, d] that turns final hidden states into logits."""
    net: Any = model
    head = net.get_output_embeddings()
    if head is None or getattr(head, "weight", None) is None:
        raise ModelUnavailable(
            f"{type(model).__name__} has no output embeddings; use a causal language model."
        )
    return head.weight


def logits_over(model: nn.Module, hidden: Float[Tensor, "n d"]) -> Logits:
    """Return a model's logits over its hidden states, in whose dtype the head's products are.

    Its config says of a cap and a scale, which ``check_head`` compares with what it computes.
    """
    net: Any = model
    config = net.config.get_text_config()
    scale = getattr(net, "logit_scale", 1.0)  # Cohere. MPT's config has the key, and its model not
    scale *= getattr(config, "lm_head_multiplier", 1.0)  # Falcon-H1
    return Logits(
        hidden,
        lm_head_weight(model).to(hidden.dtype),
        getattr(net.get_output_embeddings(), "bias", None),
        getattr(config, "final_logit_softcapping", None),  # Gemma 2
        scale / (getattr(config, "logits_scaling", None) or 1.0),  # Granite
    )


def linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear layers of a causal language model by name, without its output head."""
    net: Any = model
    head, used = net.get_output_embeddings(), set(text_layers(model).modules())
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head and module in used:
            yield name, module


def cache_argument(model: nn.Module) -> str | None:
    """Return under which name a model takes and returns its cache; None where it has none."""
    taken = inspect.signature(model.forward).parameters
    return next((name for name in ("past_key_values", "cache_params") if name in taken), None)


def check_head(model: nn.Module) -> None:
    """Check on four tokens that the logits are ``logits_over`` the hidden states."""
    net: Any = model
    weight = lm_head_weight(model)
    ids = torch.arange(4, device=weight.device).remainder(weight.shape[0]).unsqueeze(0)
    more = (
        f"{type(model).__name__} does more to its logits than a product of hidden states and head, "
        f"a bias, a cap and a scale, which are all that the chunked head does; {WAY_OUT}"
    )
    mask = torch.ones_like(ids)
    with torch.no_grad(), float32_head(model):
        plain = whole_logits(logits_over(model, hidden_states(model, ids, mask)[0]))[None]
        logits = net(input_ids=ids, attention_mask=mask, use_cache=False).logits
    tolerance = 1e-3 if logits.dtype in (torch.float32, torch.float64) else 3e-2
    if logits.shape != plain.shape or (
        logits - plain
    ).abs().max() > tolerance * logits.abs().max().clamp_min(1.0):
        raise ModelUnavailable(more)


@contextmanager
def float32_head(model: nn.Module) -> Iterator[None]:
    """Within the block, let the head of a model in half precision keep its float32 sums."""
    net: Any = model
    head = net.get_output_embeddings()
    half = type(head) is nn.Linear and head.weight.dtype in (torch.float16, torch.bfloat16)
    if not half or "forward" in vars(head):  # another library's own
        yield
        return

    def forward(hidden: Tensor) -> Tensor:
        logits = head_logits(hidden, head.weight)
        return logits if head.bias is None else logits + head.bias

    head.forward = forward
    try:
        yield
    finally:
        del head.forward


def hidden_states(
    model: nn.Module, input_ids: Int[Tensor, "batch seq"], attention_mask: Int[Tensor, "batch seq"]
) -> Float[Tensor, "batch seq d"]:
    """Return the final hidden states, after the last norm.

    ``hidden[:, t]`` is computed from the tokens up to and including t, and so predicts token t + 1.
    Padding may be on either side; positions are counted without it.
    """
    net: Any = model
    position_ids = (attention_mask.cumsum(dim=1) - 1).clamp_min(0)
    return net.base_model(
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
    """Return token ids and attention mask of sequences of different lengths, both 0 at padding."""
    rows = [torch.as_tensor(ids, dtype=torch.int64) for ids in sequences]
    tokens = pad_sequence(rows, batch_first=True, padding_side=side)
    ones = [torch.ones_like(row) for row in rows]
    mask = pad_sequence(ones, batch_first=True, padding_side=side)
    return tokens.to(device), mask.to(device)


@torch.no_grad()
def sequence_logprobs(
    model: nn.Module, sequences: Sequence[Sequence[int]]
) -> list[Float[Tensor, " seq"]]:
    """Return log p of every token of each sequence given those before it; NaN at the first."""
    results = []
    for ids in sequences:
        tokens, mask = pad([ids], lm_head_weight(model).device)
        hidden = hidden_states(model, tokens, mask)[0, :-1]
        logprobs = logprobs_at(logits_over(model, hidden), tokens[0, 1:, None])[:, 0]
        results.append(torch.cat([torch.full((1,), torch.nan), logprobs.float().cpu()]))
    return results


def token_batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Return indices in batches of similar length, up to ``budget`` padded tokens each."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batches and (len(batches[-1]) + 1) * lengths[index] <= budget:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
