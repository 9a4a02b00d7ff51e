"""Numbers that come from others and are reckoned with: whoever sends others is not understood.

One that is negative, endless or no number would spread from one member's report into every choice.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

MOST = 2**53
"""Up to here a float holds every whole number."""

Count = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=MOST)]
"""Neither bound admits NaN."""

TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
"""What fits where ids are kept: u32."""
