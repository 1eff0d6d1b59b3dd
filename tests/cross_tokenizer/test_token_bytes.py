"""The bytes of tokens, with tokenizers that packages ship, and what is refused."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from prime_composer.backends.cpu_guard import hide_cuda_packages
from prime_composer.cross_tokenizer.pair import Pair, whole_characters
from prime_composer.cross_tokenizer.plan import plan_of
from prime_composer.cross_tokenizer.token_bytes import TokenBytes, UnsupportedTokenizer
from prime_composer.tiny_models.cache import SHIPPED
from tests.cross_tokenizer.toys import byte_level

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
def tekken() -> TokenBytes:
    """Mistral's, which vLLM's mistral_common ships."""
    hide_cuda_packages()
    from transformers.integrations.mistral import convert_tekken_tokenizer

    spec = importlib.util.find_spec("mistral_common")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("mistral_common is not installed (pip install mistral-common)")
    file = Path(spec.submodule_search_locations[0]) / "data" / "tekken_240911.json"
    return TokenBytes(convert_tekken_tokenizer(str(file)).backend_tokenizer, "tekken")


def test_every_token_of_tekken_and_of_the_tiny_teacher_writes_its_bytes(
    tekken: TokenBytes, tiny: TokenBytes
) -> None:
    for tokens in (tekken, tiny):
        ordinary = [i for i, content in enumerate(tokens.of_id) if content]
        chosen = np.random.default_rng(0).choice(ordinary, 2000).tolist()
        for token in chosen:
            text, cut = whole_characters(tokens.of_id[token] or b"")
            if text is not None and not cut:
                assert tokens.bytes_of(tokens.encode(text)) == tokens.of_id[token]


def test_texts_keep_their_bytes_also_where_they_spell_special_tokens(
    tekken: TokenBytes, tiny: TokenBytes
) -> None:
    for tokens in (tekken, tiny):
        for text in TEXTS:
            ids = tokens.encode(text)
            assert tokens.bytes_of(ids) == text.encode()
            assert all(tokens.of_id[i] is not None for i in ids)
            starts = tokens.starts(ids)
            assert tokens.word_starts(text) <= {*starts}


def test_neighbors_decide_whether_tekken_writes_a_sequence(tekken: TokenBytes) -> None:
    # What the seam filter rests on: pairs of a canonical text are canonical, each by itself.
    for text in TEXTS:
        ids = tekken.encode(text)
        for left, right in zip(ids, ids[1:], strict=False):
            content = (tekken.of_id[left] or b"") + (tekken.of_id[right] or b"")
            assert tekken.encode_bytes(content) in (None, (left, right))


def test_positions_of_tekken_in_the_tiny_teachers_text(
    tekken: TokenBytes, tiny: TokenBytes
) -> None:
    # The first text alone has what a student of GSM8K writes; emoji are cut inside of characters.
    pair = Pair(tekken, tiny, [2], 0, [TEXTS[0]])
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
    never, often = (Pair(digits, tiny, [256], 0, t) for t in ([], texts))
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
    assert "ByteLevel" in refusal(characters)


def test_a_normalizer_that_changes_bytes_is_refused_with_the_text() -> None:
    tokenizer = byte_level([], words=False)
    tokenizer.normalizer = normalizers.NFKC()
    assert "Größe" in refusal(tokenizer)
