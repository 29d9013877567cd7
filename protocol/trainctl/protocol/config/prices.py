"""Prices of a cluster file: what an hour of each node costs, and the currency that all of them are in."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, NamedTuple

from msgspec import Meta

from trainctl.protocol.errors import InvalidInputError

DEFAULT_CURRENCY = "USD"
Price = Annotated[float, Meta(ge=0, le=1e9)]
_CURRENCY = re.compile(r"[^\W\d_]{1,8}|[$€£¥₩₹]")


class Prices(NamedTuple):
    """What nodes cost; a node that isn't in `per_hour` has no price."""

    currency: str = DEFAULT_CURRENCY
    per_hour: Mapping[str, float] = MappingProxyType({})  # by node


def check_currency(currency: str, where: str) -> None:
    """Raises InvalidInputError, about the setting named by `where`, unless it is one short word or a sign."""
    if not _CURRENCY.fullmatch(currency):
        raise InvalidInputError(
            where, f"{currency!r} is not a currency; write one word of at most 8 letters, such as EUR, or a sign"
        )
