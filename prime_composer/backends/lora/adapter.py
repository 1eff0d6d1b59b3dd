"""Put a LoRA adapter on a student, and store it as peft, transformers and vLLM load it.

A checkpoint is a directory with ``adapter_config.json`` and ``adapter_model.safetensors``. With
``merge`` it is a whole model, and that directory is the folder ``adapter`` in it.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from prime_composer.backends.cpu_guard import preserved_rng
from prime_composer.backends.errors import naming_file
from prime_composer.backends.four_bits import four_bit_layers
from prime_composer.backends.hf_model import ModelUnavailable, import_transformers, linear_layers
from prime_composer.backends.lora.views import ADAPTER, base_of, weights_of
from prime_composer.backends.model_files import read_json
from prime_composer.extras import pip_install
from prime_composer.recipe.model import LoraConfig

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
FOLDER = "adapter"  # Where the adapter is in a checkpoint of the merged model

PREFIX = "base_model.model."  # peft's, before the names of the base's layers

DIGEST = "base_sha256"  # Key of the file's metadata: the digest of the base's weights

OF_NO_MATTER = frozenset(
    "r lora_alpha target_modules exclude_modules lora_dropout inference_mode auto_mapping revision "
    "base_model_name_or_path peft_version megatron_core qalora_group_size runtime_config".split()
)
"""Keys of an adapter's config that may have any value: compared elsewhere, or without effect."""

PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM",),
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),
}
"""Values that other keys may have. These beginnings leave the base as it is: PiSSA, OLoRA and
others subtract the first A and B from it."""


def import_peft() -> Any:
    import_transformers()  # peft would import it beside a torchvision that breaks it
    try:
        import peft
    except ModuleNotFoundError as error:
        if error.name != "peft":
            raise
        raise ImportError(f"[student.lora] needs peft: {pip_install('lora')}.") from error
    return peft


@dataclass(frozen=True)
class LoraAdapter:
    """The adapter of a student."""

    model: nn.Module
    config: LoraConfig
    base: str  # directory or hub id of the model without it
    digest: str  # SHA-256 of the base's weights
    merge: bool = False  # whether a checkpoint is the merged model

    @classmethod
    def of_model(
        cls,
        model: nn.Module,
        config: LoraConfig,
        base: str | Path,
        seed: int,
        merge: bool = False,
        checkpoint: Path | None = None,
    ) -> "LoraAdapter":
        """Freeze a model, and put an adapter on it in place.

        B begins at 0, so that the model computes what it did, bit for bit. A is random by the seed.
        """
        peft = import_peft()
        names = layers_to_adapt(model, config.targets)
        digest = adapter_digest(model)
        with preserved_rng():
            torch.manual_seed(seed)
            settings = peft.LoraConfig(
                r=config.rank, lora_alpha=config.alpha, target_modules=list(names)
            )
            peft.inject_adapter_in_model(settings, model)
        adapter = cls(model.eval(), config, str(base), digest, merge)
        if (begins := checkpoint or config.start) is not None:
            adapter.load(begins)
        return adapter

    @property
    def weights(self) -> dict[str, Tensor]:
        """A and B of each layer, by the names of peft's files."""
        return {
            PREFIX + name.replace(f".{ADAPTER}.", "."): parameter.detach()
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }

    def state_dict(self) -> dict[str, Tensor]:
        """Return tensors of the sizes that ``save_pretrained`` writes, which cost no memory."""
        return self.weights | (base_of(self.model).state_dict() if self.merge else {})

    def save_pretrained(self, folder: Path, state_dict: Mapping[str, Tensor] | None = None) -> None:
        """Write the adapter's directory, or with ``merge`` the merged model's."""
        from safetensors.torch import save_file

        if self.merge:
            net: Any = self.model
            merged = dict(weights_of(self.model)) if state_dict is None else state_dict
            net.save_pretrained(folder, state_dict=merged)
            folder = folder / FOLDER
            folder.mkdir()
        text = json.dumps(self._described(), indent=2) + "\n"
        (folder / CONFIG).write_text(text, encoding="utf-8")
        weights = {name: value.cpu().contiguous() for name, value in self.weights.items()}
        with naming_file(folder / WEIGHTS):
            save_file(weights, folder / WEIGHTS, metadata={"format": "pt", DIGEST: self.digest})

    def _described(self) -> dict[str, Any]:
        """Return ``adapter_config.json``: what every version of peft reads."""
        base = Path(self.base)
        layers = layers_to_adapt(base_of(self.model), self.config.targets)
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": str(base.resolve()) if base.is_dir() else self.base,
            "r": self.config.rank,
            "lora_alpha": self.config.alpha,
            "target_modules": sorted({name.rpartition(".")[2] for name in layers}),
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        }

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Take the weights of an adapter's directory, or of a checkpoint."""
        from safetensors import SafetensorError, safe_open

        folder = folder_of_adapter(folder)
        check_directory(folder, self.config)
        try:
            with safe_open(folder / WEIGHTS, framework="pt") as file:
                digest = (file.metadata() or {}).get(DIGEST, self.digest)
                stored = {name: file.get_tensor(name) for name in file.keys()}
        except (OSError, SafetensorError) as error:
            raise ModelUnavailable(f"[student.lora] {folder / WEIGHTS}: {error}") from error
        if digest != self.digest:
            raise ModelUnavailable(
                f"[student.lora] {folder} is an adapter of another model than {self.base}: the "
                "SHA-256 of that one's weights differs. Name the student that it was trained on"
            )
        own = self.weights
        shapes = {name: value.shape for name, value in own.items()}
        if {name: value.shape for name, value in stored.items()} != shapes:
            raise ModelUnavailable(
                f"[student.lora] {folder} has other matrices than `targets` and `rank` give "
                f"{self.base}: set them to those of its {CONFIG}"
            )
        for name, value in own.items():
            value.copy_(stored[name])


def folder_of_adapter(checkpoint: Path) -> Path:
    """Return the directory of a checkpoint's adapter: the folder of a merged one, or itself."""
    inner = checkpoint / FOLDER
    return inner if inner.is_dir() else checkpoint


def check_directory(folder: Path, config: LoraConfig) -> None:
    """Check that a directory has an adapter of this rank and alpha. No weights are read."""
    described: Mapping[str, Any] | None = read_json(folder / CONFIG)
    if described is None or not (folder / WEIGHTS).is_file():
        raise ModelUnavailable(
            f"[student.lora] {folder} is no LoRA adapter: it needs {CONFIG} and {WEIGHTS}"
        )
    wanted = {"r": config.rank, "lora_alpha": config.alpha}
    found = {key: described.get(key) for key in wanted}
    if found != wanted:
        raise ModelUnavailable(
            f"[student.lora] {folder} has rank {found['r']} and alpha {found['lora_alpha']}, and "
            f"the recipe has {config.rank} and {config.alpha}: set `rank` and `alpha` to its own"
        )
    for key, value in described.items():
        # An empty value turns off what a key, of whatever version of peft, stands for.
        is_off = value is False or value in (None, "", [], {})
        if not is_off and key not in OF_NO_MATTER and value not in PLAIN.get(key, ()):
            raise ModelUnavailable(
                f"[student.lora] {folder} has {key} = {value} in its {CONFIG}, and the "
                "student's adapter is a plain one: leave `start` out"
            )


def layers_to_adapt(
    model: nn.Module, targets: Literal["all-linear"] | tuple[str, ...]
) -> dict[str, nn.Linear]:
    """Return the layers that get an adapter, by name: linear ones in float32, or in 4 bits."""
    net: Any = model
    layers = dict(linear_layers(model))
    names = sorted({name.rpartition(".")[2] for name in layers})
    if not layers:
        raise ModelUnavailable(
            f"[student.lora] {net.name_or_path} has no linear layers that could have an adapter"
        )
    for target in () if targets == "all-linear" else targets:
        if target in names:
            continue
        ends = (net.get_output_embeddings(), net.get_input_embeddings())
        is_end = any(
            name.rpartition(".")[2] == target and module in ends
            for name, module in model.named_modules()
        )
        why = ", whose weight losses and sampler read as it is" if is_end else ""
        what = "the output head or the embeddings" if is_end else "no linear layer"
        raise ModelUnavailable(
            f"[student.lora] targets names {target!r}, which is {what} of {net.name_or_path}{why}: "
            f"choose among {', '.join(names)}"
        )
    chosen = {
        name: layer
        for name, layer in layers.items()
        if targets == "all-linear" or name.rpartition(".")[2] in targets
    }
    four_bits = four_bit_layers(model)
    for name, layer in chosen.items():
        if name in four_bits:
            continue
        if type(layer) is not nn.Linear or layer.weight.dtype != torch.float32:
            raise ModelUnavailable(
                f"[student.lora] {name} of {net.name_or_path} is quantized "
                f"({type(layer).__name__}, {layer.weight.dtype}), and the sampler gets merged "
                "weights, which need its float32 ones: name the unquantized model, with load = "
                "'nf4' to keep it in 4 bits"
            )
    return chosen


def adapter_digest(model: nn.Module) -> str:
    """Return the SHA-256 of a model's parameters, with their names and shapes."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
        values = parameter.detach().cpu().contiguous().flatten()
        digest.update(values.view(torch.uint8).numpy().data)
    return digest.hexdigest()
