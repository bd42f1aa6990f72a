"""
What setup.cfg can't say: the address of the project, and README.md with absolute links.

PyPI shows README.md without the files that it links to. In the repository and on the
site its links are relative.
"""

import re
from pathlib import Path

from setuptools import setup

#: Who publishes the package puts the owner of the repository here; it stands nowhere
#: else.
ADDRESS = "https://github.com/OWNER/opacus_ext"
RELATIVE_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)(?=[^)\s]+\))")


def absolute_links(markdown):
    """Text whose relative links lead to the files in the repository."""
    return RELATIVE_LINK.sub(f"{ADDRESS}/blob/main/", markdown)


if __name__ == "__main__":
    readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    setup(
        url=ADDRESS,
        long_description=absolute_links(readme),
        long_description_content_type="text/markdown",
        project_urls={
            "Documentation": f"{ADDRESS}/tree/main/docs",
            "Source": ADDRESS,
            "Issues": f"{ADDRESS}/issues",
            "Changelog": f"{ADDRESS}/blob/main/CHANGELOG.md",
        },
    )
