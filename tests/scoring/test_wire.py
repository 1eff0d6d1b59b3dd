"""Questions and answers as bytes, right ones and damaged ones."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_composer.scoring.wire import (
    NAME,
    VERSION,
    Facts,
    Field,
    ScoreResponse,
    SequenceRows,
    WireError,
    decode_response,
    unpack_arrays,
)
from tests.fuzz import EXAMPLES, bounded, bounded_memory, damaged_bytes

FACTS = Facts("m", 100, 8, 512, "float32", ["sampled", "top_k"], "0.32.0")
OWN = np.array([-1.5, -0.25, -3.0], "<f4")
IDS = np.array([[7, 99], [0, 3], [5, 6]], "<i4")
FIELDS = [Field("sampled", "float32", 0), Field("top_ids", "int32", 2)]


def rows(**changes):
    return SequenceRows(
        **{"n": 3, "fields": FIELDS, "data": OWN.tobytes() + IDS.tobytes()} | changes
    )


def encoded(*sequences, **changes):
    answer = {"plugin": NAME, "version": VERSION, "facts": FACTS, "sequences": list(sequences)}
    return msgspec.msgpack.encode(msgspec.to_builtins(answer | changes, builtin_types=(bytes,)))


def test_answer_comes_back_bit_for_bit():
    answer = decode_response(encoded(rows()), ScoreResponse)
    arrays = unpack_arrays(answer.sequences[0], 3)
    assert answer.facts == FACTS
    assert arrays["sampled"].tobytes() == OWN.tobytes() and arrays["sampled"].shape == (3,)
    assert arrays["top_ids"].tolist() == IDS.tolist()


@pytest.mark.parametrize(
    ("content", "is_ours", "words"),
    [
        (b"", False, "no response of the plugin"),
        (encoded(plugin="another"), False, "a response of 'another'"),
        (encoded(version=1), True, "version 1 .* reads version 2; install the same"),
        (encoded(facts={}), True, "a damaged response of the plugin"),
    ],
)
def test_other_bytes_are_refused_with_a_reason(content, is_ours, words):
    with pytest.raises(WireError, match=words) as error:
        decode_response(content, ScoreResponse)
    assert error.value.is_ours is is_ours


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (rows(n=2), "2 rows, where 3"),
        (rows(data=b"\0" * 35), "35 bytes, too few for 'top_ids'"),
        (rows(data=b"\0" * 37), "37 bytes, where 36"),
        (rows(fields=[Field("sampled", "float64", 0)]), "dtype 'float64'"),
        (rows(fields=[Field("sampled", "float32", 2**60)]), "too few for 'sampled'"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(wrong, words):
    with pytest.raises(WireError, match=words):
        unpack_arrays(wrong, 3)


@pytest.mark.parametrize("examples", EXAMPLES)
def test_answer_damaged_is_read_or_refused(examples):
    """Truncated, flipped and huge declared sizes: an error in short, in little memory."""
    right = encoded(rows())
    giant = [b"\xc6\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xcb"]

    def read(content):
        try:
            answer = decode_response(content, ScoreResponse)
            for one in answer.sequences:
                arrays = unpack_arrays(one, 3)
                assert sum(array.nbytes for array in arrays.values()) == len(one.data)
        except WireError as error:
            assert 0 < len(str(error)) < 500

    @bounded(examples)
    @given(damaged_bytes(right, giant), st.integers(0, len(right)))
    def damage(content, length):
        read(content)
        read(right[:length])

    with bounded_memory():
        damage()
