"""Environment variables of child processes that do not need the keys of other services."""

import re
from collections.abc import Mapping

NEEDED = ("HF_TOKEN", "HF_TOKEN_PATH", "HUGGING_FACE_HUB_TOKEN", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
"""Names that look like secrets and stay: a child may load a model from the hub, or join the cluster of its parent."""

SECRET = re.compile(r"(?:^|_)(?:KEY|KEY_ID|TOKEN|SECRET|CREDENTIALS)$|PASSWORD|PASSWD|DATABASE_URL$", re.IGNORECASE)


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those whose names are usual for secrets, such as WANDB_API_KEY and PGPASSWORD."""
    return {name: value for name, value in environment.items() if name in NEEDED or not SECRET.search(name)}
