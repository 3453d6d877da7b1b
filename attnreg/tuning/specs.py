"""Specs as plain data: a line of a recorded workload."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

from attnreg.contract.spec import AttentionSpec
from attnreg.errors import InvalidInputError

if TYPE_CHECKING:
    from attnreg.contract.spec import Device

__all__ = ["spec_from", "spec_to"]

_DEFAULTS = {one.name: one.default for one in fields(AttentionSpec)}


def spec_to(spec: AttentionSpec) -> dict[str, Any]:
    """Return what a call asks as plain data, without the device and what is at its default."""
    found = {}
    for name, default in _DEFAULTS.items():
        value = getattr(spec, name)
        if name != "device" and (default is MISSING or value != default):
            found[name] = list(value) if isinstance(value, tuple) else value
    return found


def spec_from(data: object, device: Device) -> AttentionSpec:
    """Return the call that the data describes, on a device.

    Raises:
        InvalidInputError: it describes none.
    """
    if not isinstance(data, dict):
        raise InvalidInputError(f"spec: got {data!r}, expected an object")
    if unknown := sorted(data.keys() - (_DEFAULTS.keys() - {"device"})):
        raise InvalidInputError(f"spec.{unknown[0]}: unknown key")
    try:
        return AttentionSpec(device=device, **data)
    except TypeError as error:
        raise InvalidInputError(f"spec: {error}") from None
