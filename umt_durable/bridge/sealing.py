"""The payload codec that an app's settings name."""

from __future__ import annotations

import importlib
from typing import cast

from umt_durable.errors import ConfigurationError
from umt_durable.payloads import PayloadCodec, Vault


def vault_of(setting: object | None) -> Vault:
    """Return how payloads are stored where `payload_codec` is set to this: a codec, or `module:name` of one.

    Errors: ConfigurationError when there is none.
    """
    found = _named(setting) if isinstance(setting, str) else setting
    return Vault(cast("PayloadCodec | None", found))  # which looks what it is given


def _named(name: str) -> object:
    """Find what a person wrote into the configuration; no name that was stored ever comes here."""
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise ConfigurationError(f"payload_codec must be a codec, or where one is, as `module:name`, not {name!r}")
    try:
        found: object = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"payload_codec={name!r} cannot be loaded: {error}") from error
    return found
