"""What the tokens of a tokenizer write, and how it encodes what others wrote.

Supported are two families of BPE: byte-level ones, with GPT-2's alphabet (Llama 3, Qwen, SmolLM,
tekken), and sentencepiece's, with a sign for the space and a token for every byte (Llama 2, Mistral
before tekken, Gemma). This room rests on a property of BPE: a sequence of tokens is what the
tokenizer itself writes exactly where each pair of neighbors is.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

from tokenizers import Tokenizer

CACHED_TEXTS = 2**18  # Short texts whose encoding is kept per tokenizer

PROBES = (
    "Natalia sold 48/2 = 24 clips in May.\nShe has $1,234.50 left.\n#### 72",
    "  def f(x):\n\treturn {'a': [x, -1e-5]}  # ok",
    "Größe, naïve, 東京, Привет, 👍🏽, \ufb01, \uff21",
)
"""Texts whose bytes a tokenizer must keep: numbers, white space, and what normalizers change."""


SPACE = "\u2581"  # Sentencepiece's sign for a space

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # A byte of a character that has no token


class UnsupportedTokenizer(ValueError):
    """The bytes that tokens write do not follow from the tokenizer. The message says why."""


class TokenBytes:
    """A BPE tokenizer as a code: every ordinary token writes bytes.

    Encodings are those of a text that goes on. Where a tokenizer writes a space in front of every
    text, this is left out: whoever needs it puts it into the text.

    Args:
        who: whose it is, for messages: "the student", "the teacher".
        size: entries of the model's head. Ids beyond the tokenizer's write nothing.
        silent: other ids that write nothing, such as those that end a turn.

    Attributes:
        of_id: bytes of each id. None: a special token, which writes nothing.
        digest: names the tokenizer by what decides its encodings, the ids that write nothing
            included.
    """

    def __init__(
        self, tokenizer: Tokenizer, who: str, size: int = 0, silent: Iterable[int | None] = ()
    ):
        content = json.loads(tokenizer.to_str())
        self._has_sign = _is_sentencepiece(content, who)
        if self._has_sign:
            _encode_what_goes_on(content)
        self._tokenizer = Tokenizer.from_str(json.dumps(content))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        # A text that spells a special token is text: its characters are encoded.
        self._tokenizer.encode_special_tokens = True
        of_id, quiet = _bytes_of_ids(self._tokenizer, self._has_sign), {*silent}
        self.of_id = tuple(
            None if index in quiet or index >= len(of_id) else of_id[index]
            for index in range(max(size, len(of_id)))
        )
        deciding = [content.get(key) for key in ("normalizer", "pre_tokenizer", "model")]
        named = json.dumps([deciding, [i for i, of in enumerate(self.of_id) if of is None]])
        self.digest = hashlib.sha256(named.encode()).hexdigest()
        self._spaces_begin_words = self._has_sign and not any(
            b" " in (of or b"").lstrip(b" ") for of in self.of_id
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
        return b"".join(self.of_id[i] or b"" for i in ids)

    def starts(self, ids: Sequence[int]) -> list[int]:
        """Return where each token begins in the bytes, and where the last one ends."""
        return [0, *accumulate(len(self.of_id[i] or b"") for i in ids)]

    def word_starts(self, text: str) -> set[int]:
        """Return the bytes of a text at which the tokenizer begins anew: no token spans one."""
        splitter, characters = self._tokenizer.pre_tokenizer, set[int]()
        if splitter is not None:
            signed = text.replace(" ", SPACE) if self._has_sign else text
            characters = {start for _, (start, _) in splitter.pre_tokenize_str(signed)}
        if self._spaces_begin_words:
            characters |= {match.start() for match in re.finditer("(?<! ) ", text)}
        offsets = [0, *accumulate(len(character.encode()) for character in text)]
        return {0} | {offsets[start] for start in characters}


def _is_sentencepiece(content: dict[str, Any], who: str) -> bool:
    """Return whether a BPE has sentencepiece's form, and not GPT-2's."""
    model = content["model"]
    kind = model.get("type")
    if kind != "BPE":
        raise UnsupportedTokenizer(
            f"{who}'s tokenizer is a {kind} model, and only BPE encodings are decided by adjacent "
            "pairs of tokens"
        )
    decoder = content["decoder"] or {}
    decoders = {part["type"] for part in decoder.get("decoders", [decoder]) if part}
    if "ByteLevel" in decoders:
        return False
    if not (model.get("byte_fallback") and "ByteFallback" in decoders):
        raise UnsupportedTokenizer(
            f"{who}'s tokenizer is a BPE of characters (neither ByteLevel nor with byte_fallback), "
            "so that some texts have no encoding"
        )
    return True


def _encode_what_goes_on(content: dict[str, Any]) -> None:
    """Remove from a tokenizer's description the space that it writes in front of every text."""
    normalizer, splitter = content["normalizer"] or {}, content["pre_tokenizer"] or {}
    if normalizer.get("type") == "Prepend":
        content["normalizer"] = None
    parts = normalizer.get("normalizers", [])
    parts[:] = [part for part in parts if part["type"] != "Prepend"]
    for part in splitter.get("pretokenizers", [splitter]):
        if part.get("type") == "Metaspace":
            part["prepend_scheme"] = "never"


def _bytes_of_ids(tokenizer: Tokenizer, has_sign: bool) -> tuple[bytes | None, ...]:
    """Return the bytes of each id; None for special tokens and for ids that no token has."""
    byte_of = _byte_of_characters()
    added = tokenizer.get_added_tokens_decoder()
    found: list[bytes | None] = [None] * (1 + max(tokenizer.get_vocab().values()))
    for token, index in tokenizer.get_vocab().items():
        if index not in added and has_sign:
            byte = BYTE_TOKEN.fullmatch(token)
            text = token.replace(SPACE, " ").encode()
            found[index] = bytes.fromhex(byte[1]) if byte else text
        elif index not in added:
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
