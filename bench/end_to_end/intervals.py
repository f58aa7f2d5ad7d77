# SPDX-License-Identifier: Apache-2.0
"""Student's t for a few values that belong to rounds or seeds: intervals of a mean, and whether it differs from 0."""

import math
import statistics

# These are the two-sided 95 % points for 1, 2, 3 and more degrees of freedom.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
           2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)


def mean_interval(values: list[float]) -> tuple[float, float]:
    """Mean and half of its 95 % interval; infinite for a single value."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, math.inf
    freedom = len(values) - 1
    return mean, STUDENT[min(freedom, len(STUDENT)) - 1] * statistics.stdev(values) / math.sqrt(len(values))


def _beta(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I_x(a, b), by its continued fraction."""
    if x <= 0.0 or x >= 1.0:
        return 0.0 if x <= 0.0 else 1.0
    if x > (a + 1) / (a + b + 2):
        return 1.0 - _beta(1.0 - x, b, a)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    # Lentz's method: the fraction is 1 / (1 + d1 / (1 + d2 / ..)).
    c, d = 1.0, 1.0 / (1.0 - (a + b) * x / (a + 1))
    fraction = d
    for m in range(1, 300):
        for term in (m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
                     -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))):
            d = 1.0 / (1.0 + term * d)
            c = 1.0 + term / c
            fraction *= c * d
        if abs(c * d - 1.0) < 1e-14:
            break
    return front * fraction


def p_value(values: list[float]) -> float:
    """Two-sided p of Student's t test that the mean is 0; 1 for a single value, 0 where all are the same but 0."""
    if len(values) < 2:
        return 1.0
    mean, spread = statistics.fmean(values), statistics.stdev(values)
    if spread == 0.0:
        return 1.0 if mean == 0.0 else 0.0
    freedom = len(values) - 1
    t = mean / (spread / math.sqrt(len(values)))
    return _beta(freedom / (freedom + t * t), freedom / 2, 0.5)


def holm(p_values: dict[str, float]) -> dict[str, float]:
    """By Holm's method: what each p is worth among all of them."""
    corrected, most = {}, 0.0
    for rank, name in enumerate(sorted(p_values, key=p_values.get)):
        most = max(most, min(1.0, (len(p_values) - rank) * p_values[name]))
        corrected[name] = most
    return corrected
