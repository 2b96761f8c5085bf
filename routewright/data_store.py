"""DVC and the object store: made ready for this process, and what they raise in one sentence."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from routewright.errors import BadInput, StageFailed

_DENIED = "the credentials are wrong or do not allow it"
_DENYING = ("401", "403", "AccessDenied", "ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "SignatureDoesNotMatch")


@cache
def use_dvc() -> None:
    """Make DVC ready for this process; BadInput where it is not installed."""
    folder = tempfile.mkdtemp(prefix="routewright-dvc-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["DVC_NO_ANALYTICS"] = "1"
    # What DVC remembers of a remote must not outlive the process: it would take lost objects for pushed ones.
    os.environ["DVC_SITE_CACHE_DIR"] = folder
    try:
        import dvc_s3  # noqa: F401
        from dvc.repo.open_repo import clean_repos
    except ModuleNotFoundError as error:
        raise BadInput(f"data versions: {error.name} is not installed, pip install 'routewright[data]' brings it") from None
    atexit.register(clean_repos)
    logging.getLogger("dvc").setLevel(logging.CRITICAL)


@contextmanager
def reaching(what: str) -> Iterator[None]:
    """Turn what DVC, boto3 and the file system raise in the body into one sentence about ``what``.

    BadInput where a source, a revision, an object or the credentials are wrong; StageFailed where a server does not answer.
    """
    try:
        yield
    except (BadInput, StageFailed):
        raise
    except Exception as error:
        sentence = _object_store_sentence(what, error) or _dvc_sentence(what, error)
        if sentence is None:
            raise
        raise sentence from None


def causes(error: BaseException) -> list[BaseException]:
    """The error and what it came from, outermost first."""
    chain = [error]
    while (inner := chain[-1].__cause__ or chain[-1].__context__) is not None and inner not in chain:
        chain.append(inner)
    return chain


def _object_store_sentence(what: str, error: BaseException) -> BadInput | StageFailed | None:
    from botocore.exceptions import BotoCoreError, ClientError, ConnectionError, HTTPClientError, NoCredentialsError

    for one in causes(error):
        if isinstance(one, ClientError):
            fault = one.response.get("Error", {})
            code, message = str(fault.get("Code", "")), _one_line(fault.get("Message", ""))
            return BadInput(f"{what}: the object store refused: {_DENIED if code in _DENYING else message} ({code})")
        if isinstance(one, PermissionError) and one.filename is None:
            # What s3fs makes of a refusal; the file system's own names a file.
            return BadInput(f"{what}: the object store refused: {_DENIED} ({_one_line(one)})")
        if isinstance(one, NoCredentialsError):
            return BadInput(f"{what}: found no credentials for the object store, expected those of boto3's chain")
        if isinstance(one, (ConnectionError, HTTPClientError)):
            return StageFailed(f"{what}: the object store does not answer ({type(one).__name__})")
        if isinstance(one, BotoCoreError):
            return BadInput(f"{what}: {_one_line(one)}")
    return None


def _dvc_sentence(what: str, error: BaseException) -> BadInput | None:
    if "dvc.scm" in sys.modules:
        from dvc.exceptions import DvcException
        from dvc.scm import CloneError, RevError
        from dvc_data.index import DataIndexDirError

        if isinstance(error, DataIndexDirError):
            return BadInput(f"{what}: the folder's listing in the DVC remote is missing or corrupted")
        if isinstance(error, RevError):
            return BadInput(f"{what}: the repository has no such revision")
        if isinstance(error, CloneError):
            return BadInput(f"{what}: the repository cannot be cloned ({_one_line(causes(error)[-1])})")
        if isinstance(error, DvcException):
            return BadInput(f"{what}: {_one_line(error)}")
    if isinstance(error, FileNotFoundError) and "storage files" in str(error):
        return BadInput(f"{what}: an object is missing in the DVC remote ({_one_line(error)})")
    if isinstance(error, FileNotFoundError):
        return BadInput(f"{what}: no such file or folder there")
    if isinstance(error, OSError):
        return BadInput(f"{what}: {_one_line(error)}")
    return None


def _one_line(text: object) -> str:
    return " ".join(str(text).split()) or type(text).__name__
