"""The settings of a run: the forms of the environment variable, and the check of a loss table."""

import json
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_composer.losses import LOSS_TYPES
from prime_composer.upstream.keys import IMPORT_PATH, SWITCH
from prime_composer.upstream.settings import AdapterSettings, parse_loss_table
from tests.fuzz import EXAMPLES, ODD, bounded, bounded_memory, damaged
from tests.upstream import scheduled_loss

TOP_K = {"type": "topk_reverse_kl", "k": 4}
SAMPLED = {"type": "sampled_reverse_kl"}
FULL = {"type": "topk_reverse_kl", "k": "full", "normalization": "full"}
BOTH_KINDS = {
    "type": "compose",
    "distillation": {
        "some": {"weight": 1.0, "loss": TOP_K},
        "all": {"weight": 1.0, "loss": FULL},
    },
}


@pytest.mark.parametrize(
    "value,expected",
    [
        ("0", None),
        ("1", AdapterSettings()),
        (json.dumps({"loss": TOP_K}), AdapterSettings(loss=TOP_K, k=4)),
        (
            # The command line makes strings of values.
            json.dumps({"loss": {**SAMPLED, "adapter": "True", "head_on": "cpu"}}),
            AdapterSettings(loss=SAMPLED, k=0, teachers_mixed=True, head_on="cpu"),
        ),
    ],
)
def test_from_env_reads_every_form(monkeypatch, value, expected):
    monkeypatch.setenv(SWITCH, value)
    assert AdapterSettings.from_env() == expected


TEACHER = {"url": "http://me:secret@host:1/v1", "model": "m", "weight": 1.5}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        *((text, "topk_reverse_kl") for text in ("yes", "[1]", '{"los": 1}', '{"k": -1}')),
        ('{"loss": ' + 100_000 * "[", "write PRIME_COMPOSER=1"),
        ('{"k": ' + 5000 * "9" + "}", "write PRIME_COMPOSER=1"),
        (json.dumps({"teachers": [TEACHER]})[:-1], "not shown: it may have a password"),
        ('{"k": 1, "teachers": {"e": []}}', "teachers: name at least one"),
        (json.dumps({"k": 1, "teachers": [{**TEACHER, "weight": True}]}), "teachers.weight: true"),
        ('{"k": 1, "teacher_prompts": {"m": {"system": "x"}}}', "tokenizer"),
        ('{"k": 1, "teacher_prompts": {"m": {"tokenizer": "d", "sytem": "x"}}}', "sytem"),
        (
            '{"loss": {"type": "compose", "distillation": {"loss": {"loss": {"type": "topk_reverse_'
            'kl", "kk": 3}}}}}',
            "unknown key 'distillation.loss.loss.kk'; did you mean 'k'",
        ),
    ],
    ids=lambda value: str(value)[:24],
)
def test_from_env_refuses_in_one_sentence(monkeypatch, value, message):
    """Without the password of a teacher's URL."""
    monkeypatch.setenv(SWITCH, value)
    with pytest.raises(ValueError, match=message) as refusal:
        AdapterSettings.from_env()
    assert "secret" not in str(refusal.value) and len(str(refusal.value)) <= 2000


RUNS = [
    *({"loss": {"type": name, **knobs}} for name, cls in LOSS_TYPES.items()
      for knobs in cls.examples if ":" not in name),
    {"loss": {**TOP_K, "asked_by": "trainer", "head_on": "cpu", "adapter": True}, "k": 4,
     "teachers_mixed": True, "teachers": {"loss": [TEACHER], "f": [TEACHER]}},
]  # fmt: skip


@pytest.mark.parametrize("examples", EXAMPLES)
def test_from_env_damaged_is_read_or_refused(examples, monkeypatch):
    """Odd values in any place, and any piece of text in the JSON."""

    @bounded(examples)
    @given(
        st.sampled_from(RUNS),
        st.lists(ODD, max_size=3),
        st.integers(0, 10**6),
        st.sampled_from(["", "", "[", "{", '"', "\\ud800", "9", "true"]),
        st.integers(1, 5000),
    )
    def damage(run, values, seed, piece, times):
        text = json.dumps(damaged(run, values, seed))
        place = seed % (len(text) + 1)
        monkeypatch.setenv(SWITCH, text[:place] + piece * times + text[place:])
        try:
            settings = AdapterSettings.from_env()
        except ValueError as error:
            assert type(error) is ValueError
            message = str(error)
            assert message.startswith((SWITCH, "[trainer.loss.kwargs]"))
            assert len(message) <= 2000 and "secret" not in message
            return
        assert settings is not None and "secret" not in repr(settings)
        if settings.k is not None:
            assert type(settings.k) is int and settings.k >= 0
        monkeypatch.setenv(SWITCH, settings.to_env()[SWITCH])
        assert AdapterSettings.from_env() == settings

    with bounded_memory():
        damage()


BOTH = {"type": "topk_reverse_kl", "k": 4, "rl_mix": {"kd": 0.5}}


@pytest.mark.parametrize(
    "given,k,rewards,asked_by",
    [
        ({"loss": TOP_K}, 4, False, None),
        ({"loss": BOTH}, 4, True, None),
        ({"loss": {**TOP_K, "asked_by": "trainer"}}, 4, False, "trainer"),
        ({"loss": FULL}, 0, False, "trainer"),
        ({"loss": BOTH_KINDS}, 4, True, "trainer"),
        ({"loss": {"type": scheduled_loss.MARGIN, "k": "full"}}, 0, False, "trainer"),
    ],
)
def test_from_env_derives_rewards_and_who_asks(monkeypatch, given, k, rewards, asked_by):
    """The trainer asks where hidden states are read, by a loss from outside too."""
    monkeypatch.setenv(SWITCH, json.dumps(given))
    settings = AdapterSettings.from_env()
    assert (settings.k, settings.reads_rewards, settings.asked_by) == (k, rewards, asked_by)
    assert settings.trainer_asks is (asked_by == "trainer") and "asked_by" not in settings.loss


def test_loss_table_without_a_type_names_section_and_choices():
    with pytest.raises(ValueError, match=r"^\[here\] .*has no `type`.*topk_reverse_kl"):
        parse_loss_table({"k": 3}, section="here")


NATIVE = f"""
[orchestrator]
batch_size = 8
[trainer.loss]
type = "custom"
import_path = "{IMPORT_PATH}"
[trainer.loss.kwargs]
type = "topk_reverse_kl"
k = 4
adapter = true
"""
MIXED = {"loss": TOP_K, "k": 4, "teachers_mixed": True}


@pytest.mark.parametrize(
    "name,text",
    [
        ("native.toml", NATIVE),
        ("rl.json", json.dumps(tomllib.loads(NATIVE))),
        ("settings.json", json.dumps(MIXED)),
    ],
)
def test_from_env_reads_a_file(monkeypatch, tmp_path, name, text):
    """prime-rl's own config in both of its formats, and what the launcher hands on."""
    (tmp_path / name).write_text(text)
    monkeypatch.setenv(SWITCH, f"@{tmp_path / name}")
    assert AdapterSettings.from_env() == AdapterSettings(**MIXED)


@pytest.mark.parametrize(
    "name,text,words",
    [
        ("absent.toml", None, "absent.toml.*Name a TOML or a JSON file"),
        ("a.json", "[1]", "a.json.*Name a TOML or a JSON file"),
        ("a.toml", '[trainer]\nloss = "x"', f"no loss of ours.*{IMPORT_PATH}"),
        ("a.toml", NATIVE.replace("loss_fn", "lossfn"), f"did you mean.*{IMPORT_PATH}"),
        ("a.toml", NATIVE.replace("k = 4", "K = 4"), "did you mean .k."),
        (
            "a.json",
            '{"loss": {"type": "topk_reverse_kl", "k": 4}, "Seq_len": 4}',
            "mean .seq_len",
        ),
    ],
)
def test_from_env_refuses_a_file_without_a_loss(monkeypatch, tmp_path, name, text, words):
    """The file and the key are named, and a key in another case is found."""
    if text is not None:
        (tmp_path / name).write_text(text)
    monkeypatch.setenv(SWITCH, f"@{tmp_path / name}")
    with pytest.raises(ValueError, match=words):
        AdapterSettings.from_env()
