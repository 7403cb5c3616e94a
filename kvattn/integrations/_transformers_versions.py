"""What kvattn takes from Transformers, and what differs between its releases, all in one place.

The argument for the cache is called `cache` from 5.24 on, `past_key_values` before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kvattn.errors.transformers_kinds import (
    NotAModelError,
    TransformersNotInstalledError,
    TransformersTooOldError,
)

OLDEST = (5, 17)


def installed() -> tuple[int, int]:
    """Major and minor number of the installed release.

    Raises:
        TransformersNotInstalledError, TransformersTooOldError: there is none, or not one that fits.
    """
    try:
        from transformers import __version__ as version
    except ImportError as error:
        got = f"no package 'transformers' ({error})"
        raise TransformersNotInstalledError(
            "transformers", got, f"{_name(OLDEST)} or newer"
        ) from None
    major, minor = (int(number) for number in re.findall(r"\d+", version)[:2])
    if (major, minor) < OLDEST:
        raise TransformersTooOldError("transformers", version, f"{_name(OLDEST)} or newer")
    return major, minor


def _name(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))


# Only what every release from OLDEST on has may be imported here, and only after the check.
CACHE_ARGUMENT = "cache" if installed() >= (5, 24) else "past_key_values"


from transformers import (  # noqa: E402
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
)
from transformers.cache_utils import Cache, CacheLayerMixin  # noqa: E402
from transformers.masking_utils import (  # noqa: E402
    causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

__all__ = [
    "CACHE_ARGUMENT",
    "OLDEST",
    "AttentionInterface",
    "AttentionMaskInterface",
    "Cache",
    "CacheLayerMixin",
    "cache_of",
    "causal_mask_function",
    "decoder_config",
    "installed",
    "sdpa_mask",
    "sliding_window_causal_mask_function",
    "the_model",
]


def the_model(model: Any) -> Any:
    """The model itself, if it is one, or something compiled or wrapped that answers like it.

    Raises:
        NotAModelError: it is something else: a name, a pipeline, a config.
    """
    if not hasattr(model, "set_attn_implementation"):
        raise NotAModelError("model", type(model).__name__, "a PreTrainedModel")
    return model


def decoder_config(config: Any) -> PreTrainedConfig:
    """The config of the model's text decoder.

    Raises:
        NotAModelError: there is no config.
    """
    if not isinstance(config, PreTrainedConfig):
        raise NotAModelError("config", type(config).__name__, "a PreTrainedConfig, as model.config")
    decoder: PreTrainedConfig = config.get_text_config(decoder=True)
    return decoder


def cache_of(keywords: Mapping[str, Any]) -> Any:
    """The cache among the keywords of an attention module's forward, or None."""
    return keywords.get(CACHE_ARGUMENT)
