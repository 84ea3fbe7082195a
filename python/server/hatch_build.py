"""Puts a program that is built already into the wheel. `scripts/release package` looks at the program, and then sets
`PROGRAM` (its file) and `WHEEL_TAG` (where it runs)."""

import os

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface


class Client(MetadataHookInterface):
    """The client of the same version comes with the program."""

    def update(self, metadata):
        metadata["dependencies"] = [f"sconce-client=={metadata['version']}"]


class Program(BuildHookInterface):
    """pip copies it to where it keeps commands."""

    def initialize(self, version, build_data):
        try:
            program, tag = os.environ["PROGRAM"], os.environ["WHEEL_TAG"]
        except KeyError as error:
            raise SystemExit(f"{error} is not set: `make wheel` builds this wheel, around a program") from None
        build_data["pure_python"] = False
        build_data["tag"] = tag
        build_data["shared_scripts"][program] = "sconce"
