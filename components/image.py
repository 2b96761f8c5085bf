"""The image that every component runs in, by digest: a tag can move, and KFP's cache keys on the string."""

import os
import re

from routewright.errors import BadInput

# No image is published yet: the all-zero digest cannot be pulled, so that forgetting ROUTEWRIGHT_IMAGE fails loudly.
UNPUBLISHED = "ghcr.io/routewright/train@sha256:" + "0" * 64
BUILD_IT = "build it with docker/build.sh, push it, set ROUTEWRIGHT_IMAGE to name@digest"
DIGEST_REFERENCE = re.compile(r"[a-z0-9][a-z0-9._:/-]*@sha256:[0-9a-f]{64}")


def image_reference(reference: str) -> str:
    """``reference`` itself if it names an image by digest; BadInput for a tag or anything else."""
    if not DIGEST_REFERENCE.fullmatch(reference):
        raise BadInput(
            f"ROUTEWRIGHT_IMAGE: expected an image by digest (registry/name@sha256:<64 hex digits>), got {reference!r}"
        )
    return reference


def is_placeholder(reference: str) -> bool:
    """Whether the digest is all zeros, which no image has."""
    return set(reference.partition("@sha256:")[2]) == {"0"}


IMAGE = image_reference(os.environ.get("ROUTEWRIGHT_IMAGE") or UNPUBLISHED)
