"""Loading of chat templates (the tokenizer's, a file, or a name in the folder `templates/`), and error messages."""

import re
import traceback
from pathlib import Path

from jinja2 import TemplateSyntaxError

from skyrl.config import ChatTemplateConfig
from skyrl.errors import ConfigError
from skyrl.utils.spelling import did_you_mean

FOLDER = Path(__file__).parent / "templates"
LARGEST = 2**20
"""Maximum size of a template file, in bytes."""
UNSET = "tokenizer.chat_template is not set"
"""Part of the error of transformers for a tokenizer without a template."""
UNNAMED = "multiple chat templates with no default specified"
"""Part of its error for a tokenizer whose templates have names other than default. The names follow, in quotes."""


class ChatTemplate(str):
    """Text of a chat template, which also has an origin."""

    origin: str
    """Path of the file, or name of a built-in template, for messages."""

    @classmethod
    def of(cls, text: str, origin: str) -> "ChatTemplate":
        """Create a template with this text and `origin`."""
        template = cls(text)
        template.origin = origin
        return template


def template_error(error: Exception, template: str | None) -> str:
    """Describe an error in a template, with its file and line: "own.jinja, line 3: UndefinedError: ...".

    Args:
        error: Exception during rendering.
        template: Text of the template. None: the tokenizer's own.
    """
    if template is None and UNSET in str(error):
        return "the tokenizer has no chat template"
    if template is None and UNNAMED in str(error):
        names = re.findall(r"'([^']+)'", str(error).partition(UNNAMED)[2])
        return (
            f"the tokenizer has several chat templates, none of them named default: {', '.join(names)} (to choose one, "
            "save it as a file, and set chat_template.source=file and chat_template.name_or_path)"
        )
    origin = "the tokenizer's template" if template is None else getattr(template, "origin", "the template")
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    lines += [error.lineno] if isinstance(error, TemplateSyntaxError) else []
    said = f"{type(error).__name__}: {error.message if isinstance(error, TemplateSyntaxError) else error}"
    said = " ".join(said.split())
    return f"{origin}, line {lines[-1]}: {said}" if lines else said


def load_template(config: ChatTemplateConfig) -> ChatTemplate | None:
    """Return the text of the configured template. None: use the tokenizer's own.

    Raises ConfigError for an unknown name, and for a file that is missing, larger than 1 MiB or not UTF-8 text, or
    whose path contains "..".
    """
    if config.name_or_path is None:
        return None
    if config.source == "file":
        return _file(config.name_or_path)
    known = {path.stem: path for path in FOLDER.glob("*.jinja")}
    if config.name_or_path not in known:
        raise ConfigError(
            f"chat_template.name_or_path={config.name_or_path}: no template of this name; known: "
            f"{', '.join(sorted(known))}{did_you_mean(config.name_or_path, known)}; for a file set "
            "chat_template.source=file"
        )
    text = known[config.name_or_path].read_text(encoding="utf-8")
    return ChatTemplate.of(text, f"the template {config.name_or_path}")


def _file(name: str) -> ChatTemplate:
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
            return ChatTemplate.of(path.read_text(encoding="utf-8"), name)
        except (OSError, UnicodeDecodeError) as error:
            problem = f"cannot be read ({error}); give a readable file in UTF-8"
    raise ConfigError(f"chat_template.name_or_path={name} {problem}")
