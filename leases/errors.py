"""The one error of this room."""


class LeasesUnavailable(Exception):  # noqa: N818 - named for the state the caller falls back from
    """Redis could not be reached, did not answer in time, or refused the command.

    The message names the operation, the address (never the password) and the way out. What the operation did
    to the table is unknown: repeat it (an acquire with the same nonce), or let the lease run out.
    """
