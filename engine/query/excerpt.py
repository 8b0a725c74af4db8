"""Where in a stored text its target begins, so that a reader is shown the answer of a chat and not its markup."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase


def target_start(text: str, input_ids: NDArray[np.int64], target_mask: NDArray[np.bool_], tokenizer: PreTrainedTokenizerBase | None) -> int:
    """Character of `text` at which the first target token begins.

    0 where the first token is a target, where none is (classification), and where the tokens before it do not decode to the beginning of the text (a text
    truncated on the left, a tokenizer that normalises).
    """
    targets = np.flatnonzero(target_mask)
    if tokenizer is None or not targets.size or not targets[0]:
        return 0
    before = input_ids[: targets[0]].tolist()
    for skip in (False, True):  # special tokens that the tokenizer added are not in the text, those that a chat template wrote are
        decoded = str(tokenizer.decode(before, skip_special_tokens=skip, clean_up_tokenization_spaces=False))
        if decoded and text.startswith(decoded):
            return len(decoded)
    return 0
