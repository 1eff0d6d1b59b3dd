"""The student of ``composed_student`` starts from its teacher's embeddings."""

from pathlib import Path

import torch
from tokenizers import Tokenizer

from prime_composer.backends.hf_model import (
    import_transformers,
    load_student,
    load_tokenizer,
    read_eos_token_ids,
)
from tests.cross_tokenizer.toys import byte_level, trained
from tests.studies.composed_student import build, composed
from tests.tiny_qwen import make_model

TEXTS = ["Ada has 12 apples and 3 pears.\n12 + 3 = 15\n#### 15"] * 3


def test_embedding_is_the_mean_of_the_old_tokens():
    old = byte_level([("a", "b"), ("ab", "c")], words=False)
    new = byte_level([("a", "b"), ("b", "a"), ("ba", "b"), ("ab", "c")], words=False)
    embeddings = torch.randn(old.get_vocab_size(), 3, generator=torch.Generator().manual_seed(0))
    rows = composed(embeddings, old, new)

    def of(tokenizer: Tokenizer, token: str) -> int:
        return tokenizer.token_to_id(token)

    for token in ("a", "Ġ", "ab", "abc", "<end>"):
        assert torch.equal(rows[of(new, token)], embeddings[of(old, token)])
    a, b, ab = (embeddings[of(old, token)] for token in ("a", "b", "ab"))
    torch.testing.assert_close(rows[of(new, "ba")], (b + a) / 2)
    torch.testing.assert_close(rows[of(new, "bab")], (b + ab) / 2)


def save_teacher(folder: Path) -> torch.nn.Module:
    tokenizer = trained(["once upon a time"] * 3, 280, ["<start>", "<end>"])
    model = make_model(True, 0, vocab_size=tokenizer.get_vocab_size())
    model.save_pretrained(folder)
    import_transformers().PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<start>",
        eos_token="<end>",
        chat_template="{{ messages[0]['content'] }}",
    ).save_pretrained(folder)
    return model


def test_student_is_the_teacher_with_another_vocabulary(tmp_path):
    teacher = save_teacher(tmp_path / "teacher")
    build(tmp_path / "teacher", TEXTS, 275, tmp_path / "student")
    student, tokenizer = load_student(tmp_path / "student")
    assert len(tokenizer) == 275 == student.config.vocab_size
    assert tokenizer.chat_template == "{{ messages[0]['content'] }}"
    assert tokenizer.decode(tokenizer.encode("3 pears é")) == "3 pears é"
    end = tokenizer.convert_tokens_to_ids("<end>")
    assert read_eos_token_ids(tmp_path / "student") == (end,)
    theirs, own = teacher.state_dict(), student.state_dict()
    changed = {name for name in theirs if not torch.equal(theirs[name], own[name])}
    assert changed == {"model.embed_tokens.weight", "lm_head.weight"}
    assert student.lm_head.weight is student.model.embed_tokens.weight
    old_end = load_tokenizer(tmp_path / "teacher").convert_tokens_to_ids("<end>")
    old = theirs["model.embed_tokens.weight"][old_end]
    assert torch.equal(own["model.embed_tokens.weight"][end], old)
