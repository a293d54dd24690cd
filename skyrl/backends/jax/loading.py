"""From the name of a base model to a folder on this machine."""

from pathlib import Path

from skyrl.errors import RequestError


def model_folder(base_model: str) -> Path:
    """Folder with the model's files; a hub id is downloaded (or found in the hub's cache).

    Raises:
        RequestError: Neither a model folder nor a model that the hub gives us.
    """
    folder = Path(base_model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise RequestError(
                f"base_model={base_model}: the folder has no config.json; name a Hugging Face model folder"
            )
        return folder.resolve()
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(base_model, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt"]))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise RequestError(
            f"base_model={base_model}: no such folder, and the model hub does not give it ({type(error).__name__}); "
            "name a local folder, check the spelling and the network, or leave it out for the built-in model"
        ) from error
