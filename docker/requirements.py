"""Print the project's requirements with those of the named extras: python requirements.py pyproject.toml serve ..."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["project"]
for requirement in project["dependencies"] + [r for e in sys.argv[2:] for r in project["optional-dependencies"][e]]:
    print(requirement)
