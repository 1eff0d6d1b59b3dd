"""Generate facts about invented people, each with a question, for chat models as they come.

A fact stands in the prompt, so that a model has to read and needs no knowledge. A held-out problem
has no name, town or job that any problem to train on has.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle
from typing import NamedTuple

from prime_composer.problems.config import Problem, Topic
from prime_composer.problems.generated import distinct

GIVEN_NAMES = (
    "Aaron Alice Amos Anna Arthur Bella Boris Bruno Carla Carol Cecil Clara Colin Daisy David "
    "Diana Dora Edgar Edith Elena Emma Ernest Esther Felix Fiona Flora Frank Gavin George Gloria "
    "Grace Greta Harold Hazel Helen Henry Hugo Irene Iris Isaac Jacob James Jasper Jenny Joan "
    "Julia Karen Karl Keith Laura Lena Lewis Linda Louis Lucy Luke Mabel Marcus Maria Martha Mary "
    "Maya Molly Nadia Nathan Nora Norman Olga Oliver Oscar Owen Paula Peter Philip Rachel Ralph "
    "Rita Robert Ruby Ruth Sarah Simon Stella Susan Tessa Theo Thomas Trudy Vera Victor Walter "
    "Wendy Zoe"
).split()

SURNAMES = (
    "Abbick Ardlow Belgrave Birkett Brandle Calloway Cardew Corvane Dellis Dunmore Elsworth Fenner "
    "Galbrook Garrow Hadwin Halloran Ingle Jarrow Kelby Kestrel Larkin Lomax Marlow Merrin Nettle "
    "Norcott Oakes Ormond Pellow Penrose Quill Ramsey Redfern Sallow Selwyn Tarrant Thorne Ullman "
    "Vance Wexler"
).split()

TOWNS = [
    f"{start}{end}"
    for start in (
        "Arvel Bremer Calder Dorval Elming Farrow Gelder Harrol Ivering Jessam Kelver Lorn Marlin "
        "Nevel Orrin Pellen Quenby Rossel Selder Tarvel"
    ).split()
    for end in ("dale", "ford", "haven", "mere", "stead", "wick")
]
"""Invented. Those with the same beginning stand together, and are trained on or held out alike."""

JOBS = (
    "baker barber beekeeper bookbinder brewer bricklayer butcher carpenter chemist cobbler cook "
    "dentist diver drummer farmer fisherman florist gardener glazier goldsmith grocer hatter "
    "joiner judge lawyer librarian locksmith mason mechanic midwife miller miner musician nurse "
    "painter pilot plumber potter printer roofer saddler sailor sculptor singer surgeon tailor "
    "tanner teacher translator typist waiter weaver welder woodcutter"
).split()

AGES = range(18, 98)

CAPITALS = {
    "Afghanistan": "Kabul", "Albania": "Tirana", "Algeria": "Algiers", "Argentina": "Buenos Aires",
    "Armenia": "Yerevan", "Australia": "Canberra", "Austria": "Vienna", "Azerbaijan": "Baku",
    "Bangladesh": "Dhaka", "Belarus": "Minsk", "Belgium": "Brussels", "Brazil": "Brasília",
    "Bulgaria": "Sofia", "Cambodia": "Phnom Penh", "Canada": "Ottawa", "Chile": "Santiago",
    "China": "Beijing", "Colombia": "Bogotá", "Croatia": "Zagreb", "Cuba": "Havana",
    "Cyprus": "Nicosia", "the Czech Republic": "Prague", "Denmark": "Copenhagen",
    "Ecuador": "Quito", "Egypt": "Cairo", "Estonia": "Tallinn", "Ethiopia": "Addis Ababa",
    "Finland": "Helsinki", "France": "Paris", "Georgia": "Tbilisi", "Germany": "Berlin",
    "Ghana": "Accra", "Greece": "Athens", "Hungary": "Budapest", "Iceland": "Reykjavík",
    "India": "New Delhi", "Indonesia": "Jakarta", "Iran": "Tehran", "Iraq": "Baghdad",
    "Ireland": "Dublin", "Italy": "Rome", "Jamaica": "Kingston", "Japan": "Tokyo",
    "Jordan": "Amman", "Kenya": "Nairobi", "Latvia": "Riga", "Lebanon": "Beirut",
    "Libya": "Tripoli", "Lithuania": "Vilnius", "Madagascar": "Antananarivo",
    "Malaysia": "Kuala Lumpur", "Mali": "Bamako", "Malta": "Valletta", "Mexico": "Mexico City",
    "Morocco": "Rabat", "Mozambique": "Maputo", "Nepal": "Kathmandu",
    "the Netherlands": "Amsterdam", "New Zealand": "Wellington", "Nigeria": "Abuja",
    "North Korea": "Pyongyang", "Norway": "Oslo", "Oman": "Muscat", "Pakistan": "Islamabad",
    "Panama": "Panama City", "Paraguay": "Asunción", "Peru": "Lima", "the Philippines": "Manila",
    "Poland": "Warsaw", "Portugal": "Lisbon", "Qatar": "Doha", "Romania": "Bucharest",
    "Russia": "Moscow", "Rwanda": "Kigali", "Saudi Arabia": "Riyadh", "Senegal": "Dakar",
    "Serbia": "Belgrade", "Slovakia": "Bratislava",
    "Slovenia": "Ljubljana", "Somalia": "Mogadishu", "South Korea": "Seoul", "Spain": "Madrid",
    "Sudan": "Khartoum", "Sweden": "Stockholm", "Switzerland": "Bern", "Syria": "Damascus",
    "Thailand": "Bangkok", "Tunisia": "Tunis", "Turkey": "Ankara",
    "Uganda": "Kampala", "the United Kingdom": "London",
    "the United States": "Washington", "Uruguay": "Montevideo", "Venezuela": "Caracas",
    "Vietnam": "Hanoi", "Zambia": "Lusaka", "Zimbabwe": "Harare",
}  # fmt: skip
"""Countries with one undisputed seat that English names in one way. Not in the prompt."""


class Cast(NamedTuple):
    """Who and what facts are about: one part of all names."""

    given_names: Sequence[str]
    surnames: Sequence[str]
    towns: Sequence[str]
    jobs: Sequence[str]


ENDS = 6  # Towns with the same beginning


def _cast(held_out: bool) -> Cast:
    """Return every fifth name, town and job, or the other four."""

    def part(names: Sequence[str], together: int = 1) -> list[str]:
        return [name for i, name in enumerate(names) if (i // together % 5 == 4) == held_out]

    return Cast(part(GIVEN_NAMES), part(SURNAMES), part(TOWNS, together=ENDS), part(JOBS))


CASTS = {held_out: _cast(held_out) for held_out in (False, True)}


def generate_facts(size: int, seed: int, topics: Iterable[Topic], held_out: bool) -> list[Problem]:
    """Generate ``size`` distinct problems on these topics, which take turns."""
    cast = CASTS[held_out]
    turns = cycle(TOPICS[topic] for topic in topics)
    rng = random.Random(f"facts {seed} {held_out}")
    return distinct(size, rng, lambda rng: next(turns)(rng, cast), "questions")


def _person(rng: random.Random, cast: Cast) -> str:
    return f"{rng.choice(cast.given_names)} {rng.choice(cast.surnames)}"


def _age(rng: random.Random, cast: Cast) -> Problem:
    name, age, town = _person(rng, cast), rng.choice(AGES), rng.choice(cast.towns)
    fact = rng.choice(
        (
            f"{name} is {age} years old.",
            f"{name} lives in {town}. {name} is {age} years old.",
            f"{name} is {age} years old and lives in {town}.",
        )
    )
    return Problem(f"{fact} How old is {name}?", str(age))


def _town(rng: random.Random, cast: Cast) -> Problem:
    name, town, job = _person(rng, cast), rng.choice(cast.towns), rng.choice(cast.jobs)
    fact = rng.choice(
        (
            f"{name} lives in {town}.",
            f"{name} is a {job}. {name} lives in {town}.",
            f"{name} lives in {town} and works as a {job}.",
        )
    )
    return Problem(f"{fact} In which town does {name} live?", town)


def _job(rng: random.Random, cast: Cast) -> Problem:
    name, town, job = _person(rng, cast), rng.choice(cast.towns), rng.choice(cast.jobs)
    fact = rng.choice(
        (
            f"{name} works as a {job}.",
            f"{name} lives in {town}. {name} works as a {job}.",
            f"{name} lives in {town} and works as a {job}.",
        )
    )
    return Problem(f"{fact} What is the job of {name}?", job)


def _copy(rng: random.Random, cast: Cast) -> Problem:
    name, town, job = _person(rng, cast), rng.choice(cast.towns), rng.choice(cast.jobs)
    sentence = f"{name} is a {job} in {town}."
    return Problem(f"Repeat this sentence, and write nothing else: {sentence}", sentence)


def _capital(rng: random.Random, _: Cast) -> Problem:
    country, city = rng.choice([*CAPITALS.items()])
    return Problem(f"What is the capital of {country}?", city)


TOPICS: dict[Topic, Callable[[random.Random, Cast], Problem]] = {
    "ages": _age,
    "towns": _town,
    "jobs": _job,
    "copies": _copy,
    "capitals": _capital,
}
"""What is asked about -> what draws a problem."""
