"""The bytes of tokens, with tokenizers that packages ship, and what is refused."""

import importlib.util
import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from prime_composer.backends.cpu_guard import hide_cuda_packages
from prime_composer.cross_tokenizer.pair import TokenizerPair, whole_characters
from prime_composer.cross_tokenizer.plan import plan_of
from prime_composer.cross_tokenizer.token_bytes import TokenBytes, UnsupportedTokenizer
from prime_composer.tiny_models.cache import SHIPPED
from tests.cross_tokenizer.toys import byte_level, sentencepiece

# One process makes the tokenizers.
pytestmark = pytest.mark.xdist_group("token_bytes")

TEXTS = (
    "Natalia sold 48/2 = 24 clips in May, and 1,350 in all.\nShe's got $12.50 left.\n\n#### 72",
    "  def f(x):\n\treturn {'a': [x, -1e-5]}   # we'll see\n",
    "Größe, naïve, 東京, Привет, 👍🏽👩‍👩‍👧, <|im_end|> and </s>",
)


@pytest.fixture(scope="module")
def tiny() -> TokenBytes:
    (folder,) = SHIPPED.glob("*/tokenizer.json")
    return TokenBytes(Tokenizer.from_file(str(folder)), "the tiny teacher")


@pytest.fixture(scope="module")
def shipped() -> Path:
    """Return the folder of the tokenizers that vLLM's mistral_common ships."""
    hide_cuda_packages()
    spec = importlib.util.find_spec("mistral_common")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("mistral_common is not installed (pip install mistral-common)")
    return Path(spec.submodule_search_locations[0]) / "data"


@pytest.fixture(scope="module")
def tekken(shipped: Path, tmp_path_factory: pytest.TempPathFactory) -> TokenBytes:
    """Mistral's. A quarter of its 131,072 tokens, those of its first merges, takes a tenth."""
    from transformers.integrations.mistral import convert_tekken_tokenizer

    file = tmp_path_factory.mktemp("tekken") / "tekken.json"
    whole = json.loads((shipped / "tekken_240911.json").read_text())
    whole["config"]["default_vocab_size"] = 32_768
    file.write_text(json.dumps(whole | {"vocab": whole["vocab"][:32_768]}))
    return TokenBytes(convert_tekken_tokenizer(str(file), "").backend_tokenizer, "tekken")


@pytest.fixture(scope="module")
def mistral(shipped: Path, tmp_path_factory: pytest.TempPathFactory) -> TokenBytes:
    """Mistral's first one, of sentencepiece."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("mistral")
    shutil.copy(shipped / "tokenizer.model.v1", folder / "tokenizer.model")
    return TokenBytes(AutoTokenizer.from_pretrained(folder).backend_tokenizer, "mistral")


def test_every_token_of_tekken_and_of_the_tiny_teacher_writes_its_bytes(
    tekken: TokenBytes, tiny: TokenBytes, mistral: TokenBytes
) -> None:
    for tokens in (tekken, tiny, mistral):
        ordinary = [i for i, content in enumerate(tokens.of_id) if content]
        chosen = np.random.default_rng(0).choice(ordinary, 2000).tolist()
        for token in chosen:
            text, cut = whole_characters(tokens.of_id[token] or b"")
            if text is not None and not cut:
                assert tokens.bytes_of(tokens.encode(text)) == tokens.of_id[token]


def test_texts_keep_their_bytes_also_where_they_spell_special_tokens(
    tekken: TokenBytes, tiny: TokenBytes, mistral: TokenBytes
) -> None:
    for tokens in (tekken, tiny, mistral):
        for text in TEXTS:
            ids = tokens.encode(text)
            assert tokens.bytes_of(ids) == text.encode()
            assert all(tokens.of_id[i] is not None for i in ids)
            starts = tokens.starts(ids)
            assert tokens.word_starts(text) <= {*starts}


def test_neighbors_decide_whether_a_sequence_is_canonical(
    tekken: TokenBytes, mistral: TokenBytes
) -> None:
    # What the seam filter rests on: pairs of a canonical text are canonical, each by itself.
    for tokens, text in itertools.product((tekken, mistral), TEXTS):
        ids = tokens.encode(text)
        for left, right in zip(ids, ids[1:], strict=False):
            content = (tokens.of_id[left] or b"") + (tokens.of_id[right] or b"")
            assert tokens.encode_bytes(content) in (None, (left, right))


def test_tables_of_mistral_and_tekken_are_what_the_student_encodes(
    tekken: TokenBytes, mistral: TokenBytes
) -> None:
    # Both ways, and the one with a lead: entries against the encoding of their bytes.
    rng = np.random.default_rng(0)
    for teacher, student, leads in (
        (mistral, tekken, (b" ", b"")),
        (tekken, mistral, (b"", b" ")),
    ):
        pair = TokenizerPair(teacher, student, [2], 2, [TEXTS[0]], leads)
        checked = 0
        for token in rng.choice(pair.tables.order, 1000).tolist():
            skip = int(rng.integers(-len(pair.before), len(teacher.of_id[token] or b"")))
            ids = student.encode_bytes(pair.written(token, skip))
            if ids is not None:
                assert pair.tables.first[pair.tables.start[token] + skip] == ids[0]
                checked += 1
        assert checked > 700
        check_positions(pair, TEXTS[0])


def check_positions(pair: TokenizerPair, text: str) -> None:
    """Check where the tokens of a text stand between those of the teacher."""
    student, leads = pair.student, (pair.teacher_lead.decode(), pair.student_lead.decode())
    ids = [*student.encode(leads[1] + text), pair.student_end]
    plan = plan_of(pair, ids)
    assert None not in plan.positions and plan.teacher_ids == pair.teacher.encode(leads[0] + text)
    starts = pair.teacher.starts(plan.teacher_ids)
    shift = len(leads[0]) - len(leads[1])
    for begin, position in zip(student.starts(ids), plan.positions, strict=False):
        assert position is not None and position.canonical
        assert starts[position.row] + position.skip == begin + shift
    assert plan.positions[0] is not None and plan.positions[0].skip == shift


def test_positions_of_tekken_in_the_tiny_teachers_text(
    tekken: TokenBytes, tiny: TokenBytes
) -> None:
    # The first text alone has what a student of GSM8K writes; emoji are cut inside of characters.
    pair = TokenizerPair(tekken, tiny, [2], 0, [TEXTS[0]])
    ids = [*tiny.encode(TEXTS[0]), 0]
    plan = plan_of(pair, ids)
    assert None not in plan.positions
    starts = tekken.starts(plan.teacher_ids)
    for begin, position in zip(tiny.starts(ids), plan.positions, strict=False):
        assert position is not None
        assert starts[position.row] + len(position.rest) == begin
        assert position.canonical
        for part in position.straddling:
            contents = [pair.contents[i] for i in range(part.tokens.start, part.tokens.stop)]
            prefix = TEXTS[0].encode()[starts[part.row] : begin]
            assert len(prefix) == part.skip
            assert all(c.startswith(prefix) and len(c) > part.skip for c in contents)
    # A character that is cut has no score, and neither has what follows it.
    ids = [*tiny.encode("x👍")[:-1], *tiny.encode("ab")]
    scored = [position is not None for position in plan_of(pair, ids).positions]
    assert scored == [True] + [False] * (len(ids) - 1)


def test_openness_is_counted_where_texts_show_a_token_often(tiny: TokenBytes) -> None:
    digits = TokenBytes(byte_level([("1", "3")], words=True), "the teacher")
    texts = ["13 " * 30]
    never, often = (TokenizerPair(digits, tiny, [256], 0, t) for t in ([], texts))
    token = digits.encode("13")[0]
    entry = never.tables.start[token]
    # "13" is "1" and "3" to the student, whatever follows; texts agree.
    assert not often.tables.open[entry]
    assert often.tables.first[entry] == tiny.encode("13")[0]


def refusal(tokenizer: Tokenizer) -> str:
    with pytest.raises(UnsupportedTokenizer) as caught:
        TokenBytes(tokenizer, "the teacher")
    return str(caught.value)


def test_other_families_are_refused_by_name() -> None:
    message = refusal(Tokenizer(models.Unigram([("a", 0.0)], 0)))
    assert "the teacher" in message and "Unigram" in message
    assert "WordPiece" in refusal(Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")))
    characters = Tokenizer(models.BPE({"▁": 0, "a": 1}, []))
    characters.pre_tokenizer = pre_tokenizers.Metaspace()
    characters.decoder = decoders.Metaspace()
    assert "byte_fallback" in refusal(characters)


def test_a_space_in_front_of_every_text_is_left_out() -> None:
    # As normalizer and as pre-tokenizer; whoever needs it asks for it (a pair's leads).
    plain, first = (sentencepiece([(" ", "a")], "ab ", prefix=prefix) for prefix in (False, True))
    assert first.encode("ab").tokens == ["\u2581a", "b"] and plain.encode("ab").tokens == ["a", "b"]
    meta = sentencepiece([(" ", "a")], "ab ")
    meta.normalizer, meta.pre_tokenizer = None, pre_tokenizers.Metaspace(prepend_scheme="first")
    assert meta.encode("ab").tokens == ["\u2581a", "b"]
    for tokenizer in (plain, first, meta):
        tokens = TokenBytes(tokenizer, "a toy")
        for text in ("ab", " ab", "a ab", "  a", "\u00e4b\n"):
            ids = tokens.encode(text)
            assert [tokens.of_id[i] for i in ids] == [
                tokens.of_id[i] for i in plain.encode(text).ids
            ]
            assert tokens.bytes_of(ids) == text.encode()


def test_a_normalizer_that_changes_bytes_is_refused_with_the_text() -> None:
    tokenizer = byte_level([], words=False)
    tokenizer.normalizer = normalizers.NFKC()
    assert "Größe" in refusal(tokenizer)
