"""Mistakes in getting a model: packages, paths, files, the download, the cache directory."""

from __future__ import annotations

from kvattn.errors.base import ArgumentValueError, KvattnError


class TransformersMissingError(KvattnError, ImportError):
    """A package that loads models is not installed."""

    code = "KV301"
    problem = "loading a model needs a package that is not installed"
    fix = "pip install 'kvattn[transformers]'"


class ModelNotFoundError(KvattnError, FileNotFoundError):
    """The path that names the model does not exist."""

    code = "KV302"
    problem = "there is no such directory or file"
    fix = "pass the path of a saved model or of a GGUF file, or leave it out for the default model"


class ModelDirectoryError(ArgumentValueError):
    """The directory holds no model."""

    code = "KV303"
    problem = "the directory holds no saved model"
    fix = "pass the directory that save_pretrained wrote, the one that holds config.json"


class NotGgufError(ArgumentValueError):
    """The file is not a GGUF file."""

    code = "KV304"
    problem = "the file is not a GGUF file"
    fix = "pass a .gguf file; for safetensors pass the directory that holds them"


class ModelDownloadError(KvattnError, ConnectionError):
    """The default model could not be fetched."""

    code = "KV305"
    problem = "the default model could not be fetched"
    fix = "connect and run again, or pass the path of a model directory or of a GGUF file"


class ModelCacheError(KvattnError, OSError):
    """The converted model could not be written to the cache directory."""

    code = "KV306"
    problem = "the converted model could not be written to the cache directory"
    fix = "free some space there, or set KVATTN_CACHE to a directory with room"


class ModelUnreadableError(ArgumentValueError):
    """The model's files are damaged, incomplete, or of a kind that Transformers cannot load."""

    code = "KV307"
    problem = "the model could not be loaded"
    fix = "fetch or convert the model again"
