"""Toy teachers whose distribution over all texts can be written down."""

import random
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cache

import numpy as np
import torch
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from prime_composer.cross_tokenizer.token_bytes import SPACE, TokenBytes

END = "<end>"
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level(merges: list[tuple[str, str]], *, words: bool) -> Tokenizer:
    """Return a byte-level BPE with these merges and an end; with ``words``, a space begins one."""
    pairs = [tuple(part.replace(" ", "Ġ") for part in pair) for pair in merges]
    tokens = list(dict.fromkeys([*BYTES, *(a + b for a, b in pairs)]))
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, pairs))
    split = pre_tokenizers.Split(Regex(" ?[^ ]+| "), behavior="isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_]) if words else bytes_
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    return tokenizer


def trained(texts: Iterable[str], size: int, special: Sequence[str]) -> Tokenizer:
    """Return a byte-level BPE of texts, with ``size`` tokens, the special ones among them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[AddedToken(token, special=True) for token in special],
        initial_alphabet=BYTES,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def sentencepiece(
    merges: list[tuple[str, str]], characters: str, *, prefix: bool = False
) -> Tokenizer:
    """Return a BPE of these characters, with tokens for the bytes of others, and an end.

    With ``prefix`` it writes a space in front of every text.
    """
    pairs = [tuple(part.replace(" ", SPACE) for part in pair) for pair in merges]
    signs = [character.replace(" ", SPACE) for character in characters]
    named = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = list(dict.fromkeys([*named, *signs, *(a + b for a, b in pairs)]))
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, byte_fallback=True))
    first = [normalizers.Prepend(SPACE)] * prefix
    tokenizer.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", SPACE)])
    written = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*written, *[decoders.Strip(" ", 1, 0)] * prefix])
    tokenizer.add_special_tokens([END])
    return tokenizer


def random_tokenizer(
    seed: int, alphabet: str, count: int, *, words: bool, signs: bool = False
) -> TokenBytes:
    """Return a tokenizer with random merges, frequent pairs of a random text among them.

    With ``signs`` it is sentencepiece's, otherwise byte-level.
    """
    rng = random.Random(seed)
    pieces = [[*rng.choices(alphabet, k=8)] for _ in range(300)]
    merges: list[tuple[str, str]] = []
    while len(merges) < count:
        seen: dict[tuple[str, str], int] = defaultdict(int)
        for piece in pieces:
            for pair in zip(piece, piece[1:], strict=False):
                if not (words and " " in pair[1]) and len("".join(pair)) <= 4:
                    seen[pair] += 1
        best = max(sorted(seen), key=lambda pair: seen[pair] * rng.uniform(0.3, 1))
        merges.append(best)
        for piece in pieces:
            at = 0
            while at < len(piece) - 1:
                if (piece[at], piece[at + 1]) == best:
                    piece[at : at + 2] = ["".join(best)]
                at += 1
    made = sentencepiece(merges, alphabet) if signs else byte_level(merges, words=words)
    return TokenBytes(made, "a toy")


class ToyTeacher:
    """Random rows by position and the last two tokens, over texts of at most ``length`` tokens.

    ``noncanonical`` is a factor of the probability of tokens that its tokenizer would not write
    next, and ``lead`` is in front of every text.
    """

    def __init__(
        self,
        tokens: TokenBytes,
        alphabet: str,
        length: int,
        noncanonical: float,
        seed: int,
        lead: str = "",
    ):
        self.tokens, self.length, self.noncanonical, self.seed = tokens, length, noncanonical, seed
        self.lead = lead
        allowed = alphabet.encode()
        self.ids = [
            i for i, content in enumerate(tokens.of_id) if content and not content.strip(allowed)
        ]
        self.end = len(tokens.of_id) - 1
        self.last = np.eye(len(tokens.of_id))[self.end]
        self.row = cache(self._row)

    def _row(self, context: tuple[int, ...]) -> np.ndarray:
        if len(context) == self.length:
            return self.last
        row = np.zeros(len(self.tokens.of_id))
        key = zlib.crc32(repr((self.seed, context[-2:], len(context))).encode())
        row[[*self.ids, self.end]] = np.exp(
            1.2 * np.random.default_rng(key).standard_normal(len(self.ids) + 1)
        )
        before = self.tokens.bytes_of(context).decode()
        row[self.end] *= 0.3 if len(before) > len(self.lead) else 0
        for i in self.ids:
            text = before + (self.tokens.of_id[i] or b"").decode()
            if self.tokens.encode(text) != (*context, i):
                row[i] *= self.noncanonical
            if not text.startswith(self.lead):
                row[i] = 0
        return row / row.sum()

    def texts(self) -> dict[str, float]:
        """Return the probability of every text."""
        found: dict[str, float] = defaultdict(float)
        for context, mass in self._walk((), 1.0):
            text = self.tokens.bytes_of(context).decode().removeprefix(self.lead)
            found[text] += mass * self.row(context)[self.end]
        return found

    def _walk(
        self, context: tuple[int, ...], mass: float
    ) -> Iterator[tuple[tuple[int, ...], float]]:
        if mass < 1e-13:
            return
        yield context, mass
        if len(context) == self.length:
            return
        row = self.row(context)
        for i in self.ids:
            yield from self._walk((*context, i), mass * row[i])

    def rows(self, text: str) -> torch.Tensor:
        """Return the rows of its own encoding of a text, [tokens + 1, V_T]."""
        return self.rows_of(self.tokens.encode(self.lead + text if text else ""))

    def rows_of(self, ids: tuple[int, ...]) -> torch.Tensor:
        """Return the rows of a text in its own tokens, [tokens + 1, V_T]."""
        return torch.from_numpy(np.stack([self.row(ids[:end]) for end in range(len(ids) + 1)]))


def pushed_forward(
    teacher: ToyTeacher, student: TokenBytes, end: int, lead: str = ""
) -> dict[tuple[int, ...], float]:
    """Return the probability that the student's encoding of a text begins with each sequence."""
    found: dict[tuple[int, ...], float] = defaultdict(float)
    masses = teacher.texts()
    encoded = student.encode_all([lead + text if text else "" for text in masses])
    for written, mass in zip(encoded, masses.values(), strict=True):
        ids = (*written, end)
        for length in range(len(ids) + 1):
            found[ids[:length]] += mass
    return found
