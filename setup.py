"""Long description of the package: README.md, whose relative links become plain text, as they need the repository.

All other metadata is in pyproject.toml.
"""

import re
from pathlib import Path

from setuptools import setup

README = (Path(__file__).parent / "README.md").read_text("utf-8")

setup(
    long_description=re.sub(r"\[([^\]]*)\]\((?!\w+://)[^)\s]+\)", r"\1", README),
    long_description_content_type="text/markdown",
)
