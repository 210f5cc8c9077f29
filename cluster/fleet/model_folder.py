"""Resolution of `model.path` to a folder: bundled checkpoint, local folder or hub id."""

import re
from pathlib import Path

import models
from contracts.config import BUNDLED
from contracts.errors import CheckpointError, RequestError
from models.text.tokenizer import Tokenizer

_HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+(@[\w./-]+)?")
TRIVIAL = "Hello"
_FILES = ["*.json", "*.safetensors", "*.jinja"]  # no pickles, no code
# The same weights for other programs. Templates are in additional_chat_templates/.
_OTHER_FILES = ["*/*.json", "*/*.safetensors", "consolidated*"]


def resolve_model_folder(path: str) -> Path:
    """Return the checkpoint folder of `model.path`.

    "bundled" is the one of the package. A hub id ("Qwen/Qwen3-30B-A3B", with a revision
    "Qwen/Qwen3-30B-A3B@main") is found in Hugging Face's cache or downloaded. Raises
    CheckpointError: one line.
    """
    if path == BUNDLED:
        return Path(models.__path__[0]).resolve() / BUNDLED
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if is_hub_id(path):
        return _download(path, _FILES)
    raise CheckpointError(
        f'model.path={path}: no such folder; give a Hugging Face model folder, "{BUNDLED}", or a '
        "hub id (organisation/name)"
    )


def public_name(path: str, folder: Path) -> str:
    """Return the name of a model for clients: its hub id, or the name of its folder as given.

    folder: of `resolve_model_folder`; the cache has models--ORGANISATION--NAME/snapshots/COMMIT.
    """
    if not Path(path).expanduser().is_dir() and path != BUNDLED:
        return path.partition("@")[0]
    *_, cached, snapshots, _ = ("", "", *folder.parts)
    if snapshots == "snapshots" and cached.startswith("models--"):
        return "/".join(cached.split("--")[1:])
    given = Path(path).expanduser().absolute().name
    return folder.name if path == BUNDLED or given == ".." else given


def check_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer and render a chat, in milliseconds.

    Raises CheckpointError for errors that would prevent the ingress's start or every chat answer.
    """
    tokenizer = Tokenizer.load(folder)
    tokenizer.encode(TRIVIAL)
    if tokenizer.has_chat_template:
        try:
            tokenizer.encode_chat([{"role": "user", "content": TRIVIAL}])
        except RequestError as error:
            raise CheckpointError(
                f"{folder}: the chat template fails on a chat of one message, {TRIVIAL!r}: "
                f"{error.message}; mend it, or take it away to serve without chats"
            ) from None
    return tokenizer


def is_hub_id(name: str) -> bool:
    """Return whether the name has the form organisation/name or organisation/name@revision."""
    return _HUB_ID.fullmatch(name) is not None


def download_config(hub_id: str) -> Path:
    """Return a folder with the config.json of a hub id, from cache or hub.

    Raises CheckpointError: one line.
    """
    return _download(hub_id, ["config.json", "generation_config.json"])


def _download(hub_id: str, files: list[str]) -> Path:
    import httpx  # slow to import, and for hub ids only
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    name, _, revision = hub_id.partition("@")
    try:
        found = snapshot_download(
            name, revision=revision or None, allow_patterns=files, ignore_patterns=_OTHER_FILES
        )
        return Path(found)
    except (
        *(HfHubHTTPError, HFValidationError, LocalEntryNotFoundError),
        *(httpx.HTTPError, OSError),
    ) as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"model.path={hub_id}: no such folder, and not to be had from the hub ({reason}); "
            "download it where there is a network and give its folder"
        ) from None
