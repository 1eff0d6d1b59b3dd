"""Generate texts for small models: reports with a summary, and English sentences with their German.

Both are stand-ins for the tasks of GKD (https://arxiv.org/abs/2306.13649), XSum and WMT14 en-de:
the same prompts and metrics, in a language that a model of 0.2 M parameters learns.
"""

import random

from prime_composer.problems.config import Problem
from prime_composer.problems.generated import NAMES, distinct

PLACES = (
    "Bath Bonn Cork Derby Dover Essen Fulda Genoa Hull Kiel Leeds Lyon "
    "Mainz Metz Nancy Oban Parma Riga Siena Trier Turin Ulm Wells York"
).split()
SHOPS = "bakery bank cinema clinic garage hotel library museum school station theater zoo".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
GOODS = "bread cars films flowers lamps maps paint rings shoes stamps tea toys".split()
WEATHER = "cold cloudy dry foggy hot mild rainy windy".split()
CHANGES = (("opened", "opens", "new"), ("closed", "closes", "old"), ("sold", "sells", "big"))
"""A report's verb, the headline's verb, and the adjective of a headline without one."""


def generate_summaries(size: int, seed: int) -> list[Problem]:
    """Generate ``size`` reports with distinct texts, each with a summary of one line.

    One of three wordings of the summary is drawn. Nothing in the report tells which: a model that
    knows the distribution of the data gives each of them a third.
    """
    return distinct(size, random.Random(f"summaries {seed}"), _report, "reports")


def _report(rng: random.Random) -> Problem:
    name, other = rng.sample(NAMES, 2)
    place, shop, day = rng.choice(PLACES), rng.choice(SHOPS), rng.choice(DAYS)
    verb, headline_verb, adjective = rng.choice(CHANGES)
    beside = [
        f"It was {rng.choice(WEATHER)} on {rng.choice(DAYS)}.",
        f"{other} was not there.",
        f"Many came for the {rng.choice(GOODS)}.",
    ]
    sentences = rng.sample(beside, rng.choice((2, 3)))
    sentences.insert(
        rng.randrange(len(sentences) + 1),
        f"On {day} {name} {verb} the {adjective} {shop} in {place}.",
    )
    summary = rng.choice(
        (
            f"{name} {headline_verb} {shop} in {place}",
            f"{place} {shop} {verb} by {name} on {day}",
            f"{adjective} {shop} of {place}: {name} {headline_verb} it",
        )
    )
    return Problem(" ".join(sentences), summary)


NOUNS = (
    ("dog", "Hund", "m"), ("man", "Mann", "m"), ("table", "Tisch", "m"), ("tree", "Baum", "m"),
    ("bird", "Vogel", "m"), ("teacher", "Lehrer", "m"), ("cat", "Katze", "f"),
    ("lamp", "Lampe", "f"), ("woman", "Frau", "f"), ("flower", "Blume", "f"),
    ("city", "Stadt", "f"), ("house", "Haus", "n"), ("child", "Kind", "n"), ("book", "Buch", "n"),
    ("horse", "Pferd", "n"), ("picture", "Bild", "n"),
)  # fmt: skip
"""English, German, and gender: masculine, feminine or neuter."""

ADJECTIVES = (
    ("old", "alt"), ("small", "klein"), ("new", "neu"), ("red", "rot"), ("young", "jung"),
    ("good", "gut"), ("tired", "müd"), ("beautiful", "schön"),
)  # fmt: skip
"""English, and the German stem."""

VERBS = (
    ("sees", "sieht"), ("looks for", "sucht"), ("finds", "findet"), ("has", "hat"),
    ("knows", "kennt"), ("draws", "malt"), ("buys", "kauft"), ("likes", "mag"),
)  # fmt: skip

TIMES = (("today", "heute"), ("now", "jetzt"), ("often", "oft"), ("here", "hier"))

SUBJECT = {
    "the": {"m": ("der", "e"), "f": ("die", "e"), "n": ("das", "e")},
    "a": {"m": ("ein", "er"), "f": ("eine", "e"), "n": ("ein", "es")},
}
"""German article, and ending of the adjective, by English article and gender: nominative."""

OBJECT = {
    "the": {"m": ("den", "en"), "f": ("die", "e"), "n": ("das", "e")},
    "a": {"m": ("einen", "en"), "f": ("eine", "e"), "n": ("ein", "es")},
}
"""The same in the accusative."""


def generate_translations(size: int, seed: int) -> list[Problem]:
    """Generate ``size`` distinct English sentences, each with its German translation."""
    return distinct(size, random.Random(f"translations {seed}"), _sentence, "sentences")


def _sentence(rng: random.Random) -> Problem:
    subject, german_subject = _phrase(rng, SUBJECT)
    object_, german_object = _phrase(rng, OBJECT)
    verb, german_verb = rng.choice(VERBS)
    english = f"{subject} {verb} {object_}"
    german = f"{german_subject} {german_verb} {german_object}"
    if rng.random() < 0.5:
        time, german_time = rng.choice(TIMES)
        english = f"{time} {english}"
        german = f"{german_time} {german_verb} {german_subject} {german_object}"
    return Problem(english, german)


def _phrase(rng: random.Random, articles: dict[str, dict[str, tuple[str, str]]]) -> tuple[str, str]:
    """Return article, adjective and noun, in English and in German."""
    noun, german_noun, gender = rng.choice(NOUNS)
    adjective, stem = rng.choice(ADJECTIVES)
    article = rng.choice(("the", "a"))
    german_article, ending = articles[article][gender]
    written = "an" if article == "a" and adjective[0] in "aeiou" else article
    return f"{written} {adjective} {noun}", f"{german_article} {stem}{ending} {german_noun}"
