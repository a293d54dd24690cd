"""Sources of chat templates: the tokenizer, a file, or the folder `templates/` by its name."""

from pathlib import Path

from skyrl.errors import ConfigError
from skyrl.train.config import ChatTemplateConfig

FOLDER = Path(__file__).parent / "templates"
LARGEST = 2**20
"""Bytes of a template file at most."""


def load_template(config: ChatTemplateConfig) -> str | None:
    """The template's text; None if the tokenizer's own is meant.

    Raises ConfigError for an unknown name, and for a file that is missing, larger than 1 MiB, not text in UTF-8, or
    reached by "..".
    """
    if config.name_or_path is None:
        return None
    if config.source == "file":
        return _file(config.name_or_path)
    known = {path.stem: path for path in FOLDER.glob("*.jinja")}
    if config.name_or_path not in known:
        raise ConfigError(
            f"chat_template.name_or_path={config.name_or_path}: no template of this name; known: "
            f"{', '.join(sorted(known))}; for a file set chat_template.source=file"
        )
    return known[config.name_or_path].read_text(encoding="utf-8")


def _file(name: str) -> str:
    path = Path(name).expanduser()
    problem = ""
    if ".." in path.parts:
        problem = "has '..' in it; write the path without"
    elif not path.is_file():
        problem = "is no file; give the path of a template"
    elif (size := path.stat().st_size) > LARGEST:
        problem = f"has {size} bytes, more than {LARGEST}; give the path of a template"
    if not problem:
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            problem = f"cannot be read ({error}); give a readable file in UTF-8"
    raise ConfigError(f"chat_template.name_or_path={name} {problem}")
