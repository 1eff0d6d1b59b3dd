"""Tiny random Qwen3 models, and one vLLM engine of each kind for the whole session (2 s each).

``conftest.py`` makes the fixtures those of every folder.
"""

import copy
from types import SimpleNamespace

import pytest
import torch

VOCAB = 131


def make_model(tied: bool, seed: int, layers: int = 2, **changes):
    """Return a random Qwen3 model of 131 tokens, with other settings than the usual ones."""
    from prime_composer.backends.hf_model import import_transformers

    transformers = import_transformers()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        settings = {
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": layers,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "max_position_embeddings": 512,
            "tie_word_embeddings": tied,
            "initializer_range": 0.25,
            "bos_token_id": None,
            "eos_token_id": 1,
            "pad_token_id": 0,
        }
        config = transformers.Qwen3Config(**settings | changes)
        return transformers.Qwen3ForCausalLM(config).float().eval()


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Return directories ``tied`` and ``untied``, and their ``tied_model`` and ``untied_model``."""
    root = tmp_path_factory.mktemp("models")
    namespace = SimpleNamespace()
    for name, tied, seed in (("tied", True, 0), ("untied", False, 1)):
        model = make_model(tied, seed)
        model.save_pretrained(root / name)
        setattr(namespace, name, root / name)
        setattr(namespace, f"{name}_model", model)
    return namespace


@pytest.fixture(scope="session")
def vllm_sampler(models):
    """Return a sampler of the tied model; only for tests marked ``vllm``."""
    from prime_composer.backends.vllm import VLLMSampler

    sampler = VLLMSampler(models.tied, max_model_len=320)
    yield sampler
    sampler.close()


@pytest.fixture(scope="session")
def vllm_scorer(models):
    """Return a scorer of the untied model; only for tests marked ``vllm``."""
    from prime_composer.teachers.vllm import VLLMScorer

    scorer = VLLMScorer(models.untied, max_model_len=320, max_logprobs="full")
    yield scorer
    scorer.close()


@pytest.fixture
def tied_model(models):
    """Return a copy of the tied model that a test may change."""
    return copy.deepcopy(models.tied_model)


@pytest.fixture(scope="session")
def plain_logprobs():
    """Return a function: log softmax of a model's logits for one unpadded sequence, [seq, V].

    Row t predicts token t.
    """

    @torch.no_grad()
    def compute(model, token_ids):
        logits = model(input_ids=torch.as_tensor(token_ids).unsqueeze(0)).logits[0]
        first = torch.full((1, logits.shape[1]), torch.nan)
        return torch.cat([first, torch.log_softmax(logits.double(), dim=-1)[:-1].float()])

    return compute
