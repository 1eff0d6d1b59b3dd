"""What the tokens of a tokenizer write, and how it encodes what others wrote.

Supported are byte-level BPE tokenizers, those with GPT-2's alphabet: Llama 3, Qwen, SmolLM, tekken.
This room rests on a property of BPE: a sequence of tokens is what the tokenizer itself writes
exactly where each pair of neighbors is.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

from tokenizers import Tokenizer

CACHED_TEXTS = 2**18
"""Short texts whose encoding is kept per tokenizer."""

PROBES = (
    "Natalia sold 48/2 = 24 clips in May.\nShe has $1,234.50 left.\n#### 72",
    "  def f(x):\n\treturn {'a': [x, -1e-5]}  # ok",
    "Größe, naïve, 東京, Привет, 👍🏽, \ufb01, \uff21",
)
"""Texts whose bytes a tokenizer must keep: numbers, white space, and what normalizers change."""


class UnsupportedTokenizer(ValueError):
    """The bytes that tokens write do not follow from the tokenizer. The message says why."""


class TokenBytes:
    """A byte-level BPE tokenizer as a code: every ordinary token writes bytes.

    Args:
        tokenizer: of the ``tokenizers`` library.
        who: whose it is, for messages: "the student", "the teacher".
        size: entries of the model's head. Ids beyond the tokenizer's write nothing.
        silent: other ids that write nothing, such as those that end a turn. None is left out.

    Attributes:
        of_id: bytes of each id. None: a special token, which writes nothing.
        digest: names the tokenizer by its content.

    Raises:
        UnsupportedTokenizer: it is no byte-level BPE, or its tokens do not write the text.
    """

    def __init__(
        self, tokenizer: Tokenizer, who: str, size: int = 0, silent: Iterable[int | None] = ()
    ):
        content = tokenizer.to_str()
        _check_family(json.loads(content), who)
        self._tokenizer = Tokenizer.from_str(content)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        # A text that spells a special token is text: its characters are encoded.
        self._tokenizer.encode_special_tokens = True
        self.digest = hashlib.sha256(content.encode()).hexdigest()
        of_id, quiet = _bytes_of_ids(self._tokenizer), {*silent}
        self.of_id = tuple(
            None if index in quiet or index >= len(of_id) else of_id[index]
            for index in range(max(size, len(of_id)))
        )
        self.encode = lru_cache(CACHED_TEXTS)(lambda text: tuple(self.encode_all([text])[0]))
        for text in PROBES:
            if self.bytes_of(self.encode(text)) != text.encode():
                raise UnsupportedTokenizer(
                    f"{who}'s tokenizer writes {text!r} as other bytes (its normalizer or its "
                    "prefix changes them), so positions in the text would move"
                )

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without special tokens."""
        encodings = self._tokenizer.encode_batch_fast([*texts], add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_bytes(self, content: bytes) -> tuple[int, ...] | None:
        """Return the ids of a few bytes; None where they are not whole characters."""
        try:
            return self.encode(content.decode())
        except UnicodeDecodeError:
            return None

    def bytes_of(self, ids: Sequence[int]) -> bytes:
        """Return what the tokens write."""
        return b"".join(self.of_id[i] or b"" for i in ids)

    def starts(self, ids: Sequence[int]) -> list[int]:
        """Return where each token begins in the bytes, and where the last one ends."""
        return [0, *accumulate(len(self.of_id[i] or b"") for i in ids)]

    def word_starts(self, text: str) -> set[int]:
        """Return the bytes of a text at which the tokenizer begins anew: no token spans one."""
        splitter = self._tokenizer.pre_tokenizer
        if splitter is None:
            return {0}
        characters = {start for _, (start, _) in splitter.pre_tokenize_str(text)}
        offsets = [0, *accumulate(len(character.encode()) for character in text)]
        return {0} | {offsets[start] for start in characters}


def _check_family(content: dict[str, Any], who: str) -> None:
    model = content["model"]
    kind = model.get("type")
    if kind != "BPE":
        raise UnsupportedTokenizer(
            f"{who}'s tokenizer is a {kind} model, and only BPE encodings are decided by adjacent "
            "pairs of tokens"
        )
    decoder = content["decoder"] or {}
    if not any(part["type"] == "ByteLevel" for part in decoder.get("decoders", [decoder]) if part):
        raise UnsupportedTokenizer(
            f"{who}'s tokenizer is a BPE of characters (its decoder is not ByteLevel), and only "
            "byte-level tokenizers are supported"
        )


def _bytes_of_ids(tokenizer: Tokenizer) -> tuple[bytes | None, ...]:
    """Return the bytes of each id; None for special tokens and for ids that no token has."""
    byte_of = _byte_of_characters()
    added = tokenizer.get_added_tokens_decoder()
    found: list[bytes | None] = [None] * (1 + max(tokenizer.get_vocab().values()))
    for token, index in tokenizer.get_vocab().items():
        if index not in added:
            found[index] = bytes(byte_of[character] for character in token)
        elif not added[index].special:
            found[index] = token.encode()
    return tuple(found)


def _byte_of_characters() -> dict[str, int]:
    """Return GPT-2's alphabet: printable bytes are themselves, the others 256, 257, and so on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }
