"""Bounds logits that would end the scheduler in the sampler.

A grammar, a ``logit_bias`` and ``min_new_tokens`` ban tokens, and together they can ban every
token. Then the probabilities are not numbers: PyTorch's sampler ends the scheduler, and SGLang says
that other samplers may return a token outside of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# SGLang's own bound where it replaces infinite logits. The sampler divides them by the temperature,
# which is at least 1e-6, and the result must be finite.
_MAX_LOGIT = 1e30


def keep_finite(original: Callable[..., Any], sampler: Any, logits: Any, sampling_info: Any) -> Any:
    """Bound the logits of rows without a usable maximum; wraps ``Sampler._preprocess_logits``.

    A request whose tokens are all banned gets any token. If it has a grammar, SGLang then ends it.
    """
    logits = original(sampler, logits, sampling_info)
    if not _may_ban_all(sampling_info):
        return logits
    import torch

    bounded = torch.nan_to_num(logits, nan=-_MAX_LOGIT).clamp(-_MAX_LOGIT, _MAX_LOGIT)
    is_usable = logits.amax(dim=-1, keepdim=True).abs() <= _MAX_LOGIT
    return torch.where(is_usable, logits, bounded)


def _may_ban_all(sampling_info: Any) -> bool:
    penalties = sampling_info.penalizer_orchestrator
    return bool(
        sampling_info.grammars
        or sampling_info.logit_bias is not None
        # Under the overlap schedule, these have the penalties.
        or sampling_info.acc_additive_penalties is not None
        or sampling_info.acc_scaling_penalties is not None
        or (penalties and penalties.is_required)
    )
