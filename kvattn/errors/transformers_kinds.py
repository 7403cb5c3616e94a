"""Mistakes in the use of kvattn through Hugging Face Transformers."""

from __future__ import annotations

from kvattn.errors.base import ArgumentTypeError, ArgumentValueError, KvattnError


class TransformersNotInstalledError(KvattnError, ImportError):
    """Transformers is not installed."""

    code = "KV401"
    problem = "the integration needs a package that is not installed"
    fix = "pip install 'kvattn[transformers]'"


class TransformersTooOldError(KvattnError, ImportError):
    """The installed release of Transformers has another cache protocol."""

    code = "KV402"
    problem = "this release of Transformers is too old"
    fix = "pip install --upgrade 'kvattn[transformers]'"


class ModelConfigError(ArgumentValueError):
    """The model has layers that do not keep keys and values of their own for every token."""

    code = "KV403"
    problem = "a paged cache cannot serve every layer of this model"
    fix = "leave the cache out: attn_implementation='kvattn' works with Transformers' own caches"


class NotAModelError(ArgumentTypeError):
    """Something else was passed for a model, or for its config."""

    code = "KV414"
    problem = "a model of Transformers or its config is needed"
    fix = "load it with AutoModelForCausalLM.from_pretrained(path); its config is model.config"


class OwnAttentionError(ArgumentTypeError):
    """The model has no attention function that could be chosen."""

    code = "KV413"
    problem = "attention can only be chosen for a model that asks Transformers for it"
    fix = "keep the model's own attention, or call flash_attn_with_kvcache in its code"


class AttentionNotEnabledError(ArgumentValueError):
    """KvattnCache was handed to a model whose attention is not kvattn's."""

    code = "KV404"
    problem = "only kvattn's attention can read a KvattnCache"
    fix = "call kvattn.integrations.transformers.enable(model) before generating"


class CacheBatchError(ArgumentValueError):
    """The batch has another size than the sequences in the cache."""

    code = "KV405"
    problem = "the batch must have one row for each sequence in the cache"
    fix = "call cache.reset() before a new batch, or use a cache for each batch"


class PaddingError(ArgumentValueError):
    """The attention mask hides tokens in a place where a paged cache cannot leave them out."""

    code = "KV406"
    problem = "the padding cannot be left out of the cache"
    fix = (
        "pad on the left (tokenizer.padding_side = 'left'), and pass the mask of all columns so "
        "far, the old ones unchanged; call cache.reset() before another prompt"
    )


class StepIncompleteError(KvattnError, RuntimeError):
    """A layer was left out of an earlier step, so it lacks tokens that other layers have."""

    code = "KV407"
    problem = "a layer has not taken part in every step of the cache"
    fix = "call cache.reset() after an interrupted step, and use a cache with one model only"


class UnsupportedModelError(ArgumentTypeError):
    """The attention of this model type is not one that fuse knows."""

    code = "KV408"
    problem = "fuse does not know the attention layers of this model"
    fix = "use enable(model) instead: it works with any model that takes attn_implementation"


class AttentionArgumentError(ArgumentValueError):
    """The model asks for something that an attention kernel without weights cannot give."""

    code = "KV409"
    problem = "kvattn cannot honour this argument of the model's attention"
    fix = "use attn_implementation='eager' for this model or this call"


class CropError(ArgumentValueError):
    """The cache cannot forget just those tokens."""

    code = "KV410"
    problem = "the cache cannot be cropped by that many tokens"
    fix = "pass the negative number of tokens to drop, none of them before the last padding"


class LayerShapeError(ArgumentValueError):
    """The keys and values of a layer do not fit the pages."""

    code = "KV411"
    problem = "all layers in a paged cache must have the same kv heads, head dims and dtype"
    fix = "use one cache per model, or leave the cache out"


class BatchSelectionError(ArgumentValueError):
    """The rows that a cache is asked to keep do not exist, or repeats are not positive."""

    code = "KV412"
    problem = "the rows do not select sequences of the cache"
    fix = "pass at least one row, from 0 to the batch size - 1, or a number of repeats above 0"
