"""What the package raises.

Every exception is a :class:`LayercakeError`. Where Python has a built-in class of the same meaning, the exception
is one of those as well, so ``except KeyError`` or ``except ConnectionError`` do what they say.
"""

from __future__ import annotations

__all__ = [
    "AlreadyExists",
    "AuthenticationError",
    "ChecksumMismatch",
    "Closed",
    "ForkError",
    "Incomplete",
    "InvalidArgument",
    "LayercakeError",
    "LeaseExpired",
    "Leased",
    "MasterTimeout",
    "MasterUnreachable",
    "NoSpace",
    "NotFound",
    "NotReady",
    "SessionEnded",
    "Superseded",
    "TransferFailed",
    "Unconfirmed",
    "VersionMismatch",
]


class LayercakeError(Exception):
    """Something failed. Base of all exceptions of this package."""

    #: Whether the same call may succeed later without a change by the caller.
    retryable: bool = False

    def __str__(self) -> str:
        # KeyError would show the text in quotes.
        return Exception.__str__(self)


class InvalidArgument(LayercakeError, ValueError):
    """A value can't be used; the text names it, and what is accepted."""


class NotFound(LayercakeError, KeyError):
    """No object has this key, or none that can be reached."""


class NotReady(LayercakeError):
    """A writer has reserved the key, and has not finished."""

    retryable = True


class AlreadyExists(LayercakeError):
    """An object has this key, or another session is writing it."""


class Leased(LayercakeError):
    """Readers rely on the object: try again later, or use ``force``."""

    retryable = True


class LeaseExpired(LayercakeError):
    """The lease of a get session ended before it could be renewed: start again."""


class NoSpace(LayercakeError):
    """No segment has room for the object, even after eviction."""

    retryable = True


class Incomplete(LayercakeError):
    """The object has bytes that were never written, or whose write failed: write them, then end again."""


class SessionEnded(LayercakeError):
    """The session was ended or revoked, and takes no more ranges."""


class Superseded(SessionEnded):
    """The session took too long: another writer took its place, or it was discarded."""


class TransferFailed(LayercakeError, ConnectionError):
    """Bytes could not be moved. No byte of the caller's memory is in use any more."""


class Unconfirmed(TransferFailed):
    """An earlier write of the session may still be carried out by the owner of the memory: revoke the session and start again."""


class ChecksumMismatch(TransferFailed):
    """Stored bytes do not have the checksum that they were written with. They were not served."""


class MasterUnreachable(LayercakeError, ConnectionError):
    """The master can't be reached, or what listens there is none."""

    retryable = True


class MasterTimeout(LayercakeError, TimeoutError):
    """The master did not answer in time; the call may have taken effect."""

    retryable = True


class AuthenticationError(LayercakeError, PermissionError):
    """A shared token is missing or wrong."""


class VersionMismatch(LayercakeError):
    """The two sides speak versions that don't work together; the text has both."""


class Closed(LayercakeError):
    """The object was closed."""


class ForkError(LayercakeError, RuntimeError):
    """The process forked after its parent used this package: start workers by spawn, or fork before the first use."""
