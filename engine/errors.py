"""Errors that a user can act on.

Each carries a stable `code` (a slug, listed in the docs), one clear sentence, and the HTTP status that the service answers with.
The command line prints the sentence and exits with 2; nobody who made a mistake sees a traceback.
"""

from __future__ import annotations


class EogpError(Exception):
    """A failure with one clear sentence: what is wrong, where (field, row, limit), and what to do."""

    code = "error"
    status = 500
    exit_code = 1

    def __init__(self, message: str, *, code: str | None = None, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        if code is not None:
            self.code = code


class UserError(EogpError):
    """The caller's mistake: 4xx or exit code 2."""

    code = "bad-input"
    status = 422
    exit_code = 2


class DataError(UserError):
    """A row, file or query that cannot be used."""

    code = "bad-data"


class SettingError(UserError):
    """A setting out of range, or two settings that contradict each other."""

    code = "bad-setting"


class LimitError(UserError):
    """A request or a plan that exceeds a stated limit (memory, disk, length, count)."""

    code = "limit-exceeded"


class ModelError(UserError):
    """A model or tokenizer that cannot be loaded, or is not the one that the store was built with."""

    code = "bad-model"


class StoreError(UserError):
    """A store that is missing, damaged, locked or of another format."""

    code = "bad-store"


class NumericalError(EogpError):
    """A non-finite activation, gradient, covariance or factor; the message names module and example."""

    code = "non-finite"
    exit_code = 2
