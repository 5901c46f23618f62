"""Plans on the Hugging Face Hub."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from manifoldkv.core.errors import PlanError, RunError, first_line
from manifoldkv.core.files import write_whole

CARD = "README.md"


class OnHub:
    """Upload to the Hub and download from it, for objects that save to a folder.

    The mixin of huggingface_hub sets attributes on new objects, which frozen dataclasses refuse.
    """

    FILES: tuple[str, ...]
    """Names of the files that `save` writes; no others are downloaded."""

    @abstractmethod
    def save(self, folder: str | Path) -> None: ...

    @classmethod
    @abstractmethod
    def load(cls, folder: str | Path) -> Self: ...

    @abstractmethod
    def card(self, repo_id: str) -> str:
        """Return the page that describes it, in Markdown."""

    def push_to_hub(
        self, repo_id: str, *, private: bool | None = None, token: str | None = None
    ) -> str:
        """Upload it with a model card and return the address; make the repository if need be.

        Parameters
        ----------
        repo_id : str
            ``"user/name"``.
        private : bool, optional
            Of a new repository; as the account is set up if omitted.
        token : str, optional
            The one that is logged in if omitted.

        Returns
        -------
        str
            Address of the commit.

        Raises
        ------
        RunError
            If the Hub refuses, cannot be reached, or offline mode is set (``HF_HUB_OFFLINE``).
        """
        api = HfApi(token=token)
        try:
            with TemporaryDirectory() as folder:
                self.save(folder)
                write_whole(Path(folder) / CARD, self.card(repo_id).encode())
                api.create_repo(repo_id, private=private, exist_ok=True)
                message = "Upload with manifoldkv"
                commit = api.upload_folder(
                    repo_id=repo_id, folder_path=folder, commit_message=message
                )
        except (HfHubHTTPError, ValueError, OSError) as error:
            raise RunError(f"cannot push to {repo_id}: {first_line(error)}") from error
        return str(commit.commit_url)

    @classmethod
    def from_pretrained(
        cls, name: str | Path, *, revision: str | None = None, token: str | None = None
    ) -> Self:
        """Load from a folder or from the Hub, where only `FILES` are downloaded.

        Parameters
        ----------
        name : str or Path
            Folder, or repository ``"user/name"``.
        revision : str, optional
            Branch, tag or commit.
        token : str, optional
            Token for private repositories; that of the logged-in user if omitted.

        Raises
        ------
        PlanError
            If there is no such folder or repository, the Hub cannot be reached and nothing is in
            the cache, or the files are not a plan.
        """
        if not str(name) or Path(name).is_dir():
            return cls.load(name)
        try:
            folder = snapshot_download(
                str(name), revision=revision, token=token, allow_patterns=list(cls.FILES)
            )
        except LocalEntryNotFoundError as error:
            raise PlanError(
                f"{name} is no folder, and it is neither in the local cache of the Hub nor to be "
                "reached there"
            ) from error
        except (HfHubHTTPError, ValueError, OSError) as error:
            raise PlanError(f"cannot load {name}: {first_line(error)}") from error
        return cls.load(folder)
