"""Adds the addresses of the project to the package's metadata, where GitHub Actions builds it and names them."""

import os

from hatchling.metadata.plugin.interface import MetadataHookInterface


class Addresses(MetadataHookInterface):
    def update(self, metadata):
        repository = os.environ.get("GITHUB_REPOSITORY")
        home = f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{repository}"
        pages = {
            "Homepage": home,
            "Documentation": f"{home}/tree/main/python",
            "Changelog": f"{home}/blob/main/CHANGELOG.md",
            "Issues": f"{home}/issues",
        }
        metadata["urls"] = pages if repository else {}
