"""How far a counted share can be trusted. Pure arithmetic; knows nothing of what was counted."""

import math

Z95 = 1.959963984540054  # standard normal quantile of 0.975


def wilson(right: int, count: int, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval of ``right`` out of ``count``, as (low, high) within 0..1; (0, 1) where nothing was
    counted. ``z``: 1.96 gives 95 %. Unlike the normal approximation it is sensible at 0 and at 100 %.

    Raises ValueError unless 0 <= right <= count. Source: E. B. Wilson, JASA 22 (1927), 209-212.
    """
    if not 0 <= right <= count:
        raise ValueError(f"{right} right out of {count}")
    if count == 0:
        return 0.0, 1.0
    share, weight = right / count, z * z / count
    middle = share + weight / 2
    spread = z * math.sqrt(share * (1 - share) / count + weight / (4 * count))
    # At the ends the bound is exact; the subtraction would leave a rounding error there.
    low = 0.0 if right == 0 else (middle - spread) / (1 + weight)
    high = 1.0 if right == count else (middle + spread) / (1 + weight)
    return low, high
