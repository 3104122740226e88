"""From the command line, the environment and a file to settings."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass

from blend.errors import InvalidConfig
from blend_server.settings import checks
from blend_server.settings.building import Building, renamed
from blend_server.settings.errors import Refused
from blend_server.settings.places import CommandConfig
from blend_server.settings.sources import (
    CONFIG_VARIABLE,
    Given,
    Layer,
    from_environment,
    from_file,
    from_flags,
    merged,
)


@dataclass(frozen=True)
class Settings:
    """The command's settings, and what was given for them, by path."""

    config: CommandConfig
    given: Mapping[str, Given]

    def renamed(self, error: InvalidConfig) -> InvalidConfig:
        """The same error with the names under which its settings were given: flags, variables, keys of the file."""
        return renamed(error, self.given)

    def check_files(self) -> None:
        """Check what the settings name: files, directories, models that are directories, optional packages.

        Nothing is made, listened on or loaded.

        Raises:
            Refused: something is not there, or not as it has to be.
        """
        if errors := [self.renamed(error) for error in checks.of_files(self.config)]:
            raise Refused(errors)


def read(arguments: argparse.Namespace, environ: Mapping[str, str]) -> Settings:
    """Return the settings that all sources make together: flags over variables over the file over the defaults.

    Args:
        arguments: what :func:`~blend_server.settings.command.parser` makes of the command line.
        environ: the environment.

    Raises:
        Refused: something is wrong; it says all of it.
    """
    errors: list[InvalidConfig] = []
    given = merged(_file(arguments, environ, errors), from_environment(environ, errors), from_flags(arguments, errors))
    config = Building(given, errors).whole()
    if config is not None:
        told = {error.field for error in errors}  # of these the defaults stand in
        found = [renamed(error, given) for error in checks.of_values(config)]
        errors += [error for error in found if error.field not in told]
    if config is None or errors:
        raise Refused(errors)
    return Settings(config, given)


def _file(arguments: argparse.Namespace, environ: Mapping[str, str], errors: list[InvalidConfig]) -> Layer:
    if arguments.config is not None:
        return from_file(arguments.config, "--config", errors)
    if (path := environ.get(CONFIG_VARIABLE)) is not None:
        return from_file(path, CONFIG_VARIABLE, errors)
    return {}
