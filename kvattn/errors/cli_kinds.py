"""Mistakes that only the `kvattn` command can meet: missing extras, prompts, devices."""

from __future__ import annotations

from kvattn.errors.base import ArgumentValueError, KvattnError


class CommandPackageError(KvattnError, ImportError):
    """A package that draws the command's options or its output is not installed."""

    code = "KV501"
    problem = "the kvattn command needs a package that is not installed"
    fix = "pip install 'kvattn[cli]'"


class EmptyPromptError(ArgumentValueError):
    """The tokenizer makes no token of a prompt, so there is nothing to go on from."""

    code = "KV502"
    problem = "a prompt holds no tokens"
    fix = "write something, or drop raw mode if the model has a chat template"


class ChatTemplateError(ArgumentValueError):
    """The model's chat template refuses a single message from the user."""

    code = "KV503"
    problem = "the model's chat template cannot be applied to the prompt"
    fix = "use raw mode (--raw), which passes the prompt on as it is"


class DeviceUnavailableError(ArgumentValueError):
    """The device does not exist on this machine, or this build of PyTorch cannot use it."""

    code = "KV504"
    problem = "PyTorch cannot use this device"
    fix = "see `kvattn doctor`, or leave the device out to stay on the CPU"


class CommandMemoryError(KvattnError, MemoryError):
    """The model, its cache or the tensors of a measurement do not fit into the memory there is."""

    code = "KV508"
    problem = "the memory of this device does not suffice"
    fix = "ask for less: fewer or shorter answers, smaller pages, a narrower --kv-dtype or --dtype"


class SitePackageError(KvattnError, ImportError):
    """A package that writes or serves the pages about errors is not installed."""

    code = "KV505"
    problem = "the pages about errors need a package that is not installed"
    fix = "pip install 'kvattn[site]'"


class ExportTargetError(KvattnError, OSError):
    """The pages cannot be written to this directory, or something else lies in their way there."""

    code = "KV506"
    problem = "the pages about errors cannot be written there"
    fix = "name a new or empty directory, or one that holds an earlier export"


class ListenAddressError(KvattnError, OSError):
    """No server can listen at this host and port: taken, not allowed, or not of this machine."""

    code = "KV507"
    problem = "the pages about errors cannot be served at this address"
    fix = "pass --port 0 for any free port, and a --host of this machine"
