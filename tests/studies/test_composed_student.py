"""The student of ``composed_student`` starts from its teacher's embeddings."""

from pathlib import Path

import torch

from prime_composer.backends.hf_model import (
    import_transformers,
    load_student,
    load_tokenizer,
    read_eos_token_ids,
)
from tests.cross_tokenizer.toys import trained
from tests.studies.composed_student import build
from tests.tiny_qwen import make_model

TEXTS = ["Ada has 12 apples and 3 pears.\n12 + 3 = 15\n#### 15"] * 3


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
    # A token that the teacher lacks is the mean of its parts.
    parts = load_tokenizer(tmp_path / "teacher").encode("12", add_special_tokens=False)
    mean = theirs["model.embed_tokens.weight"][parts].mean(0)
    (token,) = tokenizer.encode("12", add_special_tokens=False)
    assert len(parts) == 2
    torch.testing.assert_close(own["model.embed_tokens.weight"][token], mean)
