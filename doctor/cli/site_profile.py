"""The option ``--profile``: the published environment that the ranks are compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from doctor.cli.completion import complete_profile
from doctor.cli.output import print_notice, write
from doctor.core.errors import UnusableError

if TYPE_CHECKING:
    from doctor.cli.options import CommonOptions
    from doctor.core.facts import SiteProfileFacts
    from doctor.core.job import Job

profile_option = click.option(
    "--profile",
    metavar="NAME",
    shell_complete=complete_profile,
    help="Compare the environment with what a cloud or computing center recommends, such as aws-efa or cscs-alps; "
    "differences are of severity info. `--profile list` shows all names.",
)


def find_profile(name: str | None, options: CommonOptions) -> SiteProfileFacts | None:
    """Return the chosen profile as facts, if there is one. The name ``list`` prints all profiles and exits with 0.

    Raises:
        UnusableError: there is no profile of that name.
    """
    if name is None:
        return None
    from doctor.core.facts import SiteProfileFacts
    from doctor.core.settings import suggestion
    from doctor.knowledge.sites.profiles import site_profiles

    if name == "list":
        write(_listing(options.form), options.output)
        raise SystemExit(0)
    if name not in site_profiles():
        near = suggestion(name, site_profiles())
        raise UnusableError(
            f"unknown profile {name!r}{near or '.'} Run 'doctor check --profile list' to see all profiles"
        )
    return SiteProfileFacts(name=name)


def print_profile(chosen: SiteProfileFacts | None) -> None:
    """Print which system the environment is compared with, and where its recommendation was published."""
    if chosen is not None:
        from doctor.knowledge.sites.profiles import site_profiles

        profile = site_profiles()[chosen.name]
        print_notice(f"comparing with {profile.title}: {profile.source}")


def with_profile(job: Job, chosen: SiteProfileFacts | None) -> Job:
    """Return the job with the chosen profile among the facts of every rank; the job itself if there is none."""
    if chosen is None:
        return job
    compared = job.apart()
    for rank in compared.ranks:
        rank.sections = {**rank.sections, chosen.key: chosen}
    return compared


def _listing(form: str) -> str:
    """All profiles: as JSON (schema 1) with sources and variables, otherwise one line each."""
    import msgspec

    from doctor.knowledge.sites.profiles import site_profiles
    from doctor.report.formatting import as_json

    profiles = site_profiles()
    if form == "json":
        return as_json({"schema": 1, "profiles": msgspec.to_builtins(profiles)}) + "\n"
    width = max(map(len, profiles))
    return "".join(f"{name:<{width}}  {profile.title}\n" for name, profile in profiles.items())
